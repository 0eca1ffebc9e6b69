"""What hosts have to do with leases: they keep a direct lease's cards, and say when an ended lease's slots are clean."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from cotenant.hostd.protocol import CleanCheck, SlotRef
from cotenant.server.backends.base import Host, HostRefused
from cotenant.server.control.context import Context
from cotenant.server.errors import OutcomeUnknown, Unreachable
from cotenant.server.model.caller import LOOP, Caller
from cotenant.server.model.states import LeaseState
from cotenant.server.model.text import clean
from cotenant.server.store import events, leases, meta, ranks
from cotenant.server.store.db import Tx

log = logging.getLogger(__name__)

#: How long after a word about a lease got lost it is said again, and how long after a host refused to keep its cards.
SAY_AGAIN_S: Final = 2.0
REFUSED_AGAIN_S: Final = 30.0
#: States in which an attempt has processes, as hosts tell them.
_LIVING: Final = frozenset({"starting", "ready", "running", "stopping"})


class Holds:
    """Speaks with hosts about leases. Of one lease only one word is under way at a time, so that none overtakes another."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._kept: set[tuple[str, str]] = set()  # (direct lease, host that said it keeps it since its last hello)
        self._again_s: dict[
            tuple[str, str], float
        ] = {}  # (direct lease, host that shall keep it) -> when it is asked next
        self._told: dict[tuple[str, str], str] = {}  # refusals that are on record: (direct lease, host) -> code

    def _lock(self, lease_id: str) -> asyncio.Lock:
        lock = self._locks.get(lease_id)
        if lock is None:
            lock = self._locks[lease_id] = asyncio.Lock()
        return lock

    def greeted(self, host: str, kept: tuple[str, ...]) -> None:
        """A host said hello: `kept` are all direct leases whose cards it keeps, and it is asked about others anew."""
        for known in (self._kept, self._again_s):
            for key in [key for key in known if key[1] == host]:
                known.discard(key) if isinstance(known, set) else known.pop(key)
        self._kept |= {(lease_id, host) for lease_id in kept}

    async def take(self, lease_id: str) -> HostRefused | None:
        """Let the host keep a granted lease's cards; its refusal, when it finds something on them.

        A host that does not answer is asked again by the tick (`due`), or hears of the lease at its next hello: the
        grant stands.
        """
        return next(iter((await self._ask_to_keep(lease_id)).values()), None)

    def due(self) -> list[str]:
        """Living direct leases that a host which is there should keep, does not keep yet, and may be asked about now."""
        now = self._context.clock.monotonic_s()
        found = {lease for (lease, host), at in self._again_s.items() if at <= now and host in self._context.hosts}
        return sorted(found)

    def ask_now(self, host: str) -> None:
        """What a host refused may be asked again at once: it is ready for work now."""
        for key in self._again_s:
            if key[1] == host:
                self._again_s[key] = self._context.clock.monotonic_s()

    async def keep_anew(self, lease_id: str) -> None:
        """Have a living lease's cards kept by a host that does not keep them. The lease stands, whatever the host says.

        A host that lost its memory has a floor of fences above the lease's: the lease then gets a newer fence. What is
        refused otherwise is recorded once, for a person to see, and asked again.
        """
        refused = await self._ask_to_keep(lease_id)
        if any(error.code == "stale_fence" for error in refused.values()):
            await self._lift_fence(lease_id, refused)
            refused = await self._ask_to_keep(lease_id)
        for host, error in refused.items():
            self._again_s[lease_id, host] = self._context.clock.monotonic_s() + REFUSED_AGAIN_S
            if self._told.get((lease_id, host)) != error.code:
                await self._record_refusal(lease_id, host, error)
                self._told[lease_id, host] = error.code

    async def _ask_to_keep(self, lease_id: str) -> dict[str, HostRefused]:
        """Ask each host of a living lease to keep it, which is safe to repeat; what they refused, by host."""
        context = self._context
        refused: dict[str, HostRefused] = {}
        async with self._lock(lease_id):
            row, slots = context.db.peek(lambda c: _lease_and_slots(c, lease_id, ("held",)))
            if row is None or row["state"] not in ("leased", "running"):
                for known in (self._again_s, self._told):
                    for key in [key for key in known if key[0] == lease_id]:
                        known.pop(key)
                return {}
            for host, refs in by_host(slots).items():
                key = (lease_id, host)
                link = context.hosts.get(host)
                if link is None or all(ref.uuid == "cpu" for ref in refs):
                    continue
                try:
                    await link.hold(lease_id, row["fence"], refs)
                except HostRefused as error:
                    context.doubt_cards(error, [ref.uuid for ref in refs])
                    refused[host] = error
                except (Unreachable, OutcomeUnknown):
                    log.warning("host %s did not hear of lease %s yet", host, lease_id)
                    self._again_s[key] = context.clock.monotonic_s() + SAY_AGAIN_S
                else:
                    self._kept.add(key)
                    self._again_s.pop(key, None)
                    self._told.pop(key, None)
        return refused

    async def _lift_fence(self, lease_id: str, refused: dict[str, HostRefused]) -> None:
        """Give a living lease a newer fence: above all that its hosts have seen, and above every one given before."""
        now = self._context.now()
        seen = max(max(error.data.get("fence", 0), error.data.get("floor", 0)) for error in refused.values())

        def write(tx: Tx) -> None:
            row = leases.get(tx, lease_id)
            if row["state"] not in ("leased", "running"):
                return
            meta.lift(tx, "fence", seen)
            fence = meta.next_of(tx, "fence")
            leases.update(tx, lease_id, fence=fence)
            events.append(tx, "lease.refenced", LOOP, now, owner=row["owner"], severity="warning", lease_id=lease_id, host=row["host"],
                          pool=row["pool"], old=str(row["fence"]), new=str(fence),
                          reason="the host refuses its older fence since it lost its memory")  # fmt: skip

        await self._context.db.write(write)

    async def _record_refusal(self, lease_id: str, host: str, refused: HostRefused) -> None:
        now = self._context.now()

        def write(tx: Tx) -> None:
            row = leases.get(tx, lease_id)
            if row["state"] not in ("leased", "running"):
                return
            events.append(tx, "lease.unkept", LOOP, now, owner=row["owner"], severity="warning", lease_id=lease_id, host=host,
                          pool=row["pool"], new=refused.code, reason=clean(refused.message, 300))  # fmt: skip

        await self._context.db.write(write)

    async def free(self, lease_id: str) -> dict[str, CleanCheck]:
        """Ask the hosts whether the slots that a lease no longer has are clean, and free those that are.

        What each host said; those that did not answer are not in it.
        """
        context = self._context
        answers: dict[str, CleanCheck] = {}
        async with self._lock(lease_id):
            row, slots = context.db.peek(lambda c: _lease_and_slots(c, lease_id, ("cleaning", "occupied")))
            if row is None:
                return {}
            for host, refs in by_host(slots).items():
                try:
                    said = await self._ask(row, host, refs)
                except (Unreachable, OutcomeUnknown, HostRefused) as error:
                    log.info("slots of %s stay in cleaning: %s", lease_id, error)
                    continue
                if said is None:
                    continue
                answers[host] = said
                if said.clean:
                    await context.db.write(partial(free_slots, lease_id=lease_id, now=context.now(), host=host))
                    context.wake()
        return answers

    async def _ask(self, row: sqlite3.Row, host: str, slots: list[SlotRef]) -> CleanCheck | None:
        link = self._context.hosts.get(host)
        if row["kind"] == "job":
            return None if link is None else await self._ask_attempt(row["id"], link, slots)
        if all(ref.uuid == "cpu" for ref in slots):
            return CleanCheck(clean=True)  # no host was told of it
        if link is None:
            return None
        check = await link.unhold(row["id"], slots)
        if check.clean and (row["id"], host) not in self._kept:
            # "clean" of a lease that it never kept says nothing about the cards
            check = await link.check(slots)
        if check.clean:
            self._kept.discard((row["id"], host))
        return check

    async def _ask_attempt(self, lease_id: str, link: Host, slots: list[SlotRef]) -> CleanCheck:
        """A job's slots are clean when its attempt's processes are gone and the cards are well."""
        attempt = self._context.db.peek(
            lambda c: c.execute(
                "SELECT id, state FROM attempt WHERE lease_id = ? ORDER BY epoch DESC LIMIT 1", (lease_id,)
            ).fetchone()
        )
        rank = self._context.db.peek(lambda c: ranks.on_host(c, attempt["id"], link.name))
        if rank is not None and attempt["state"] == "ended" and rank["exit"] is None:
            # it may still be on its way there, or stand ready: the stop makes sure that it never begins
            report = await link.stop(rank["id"], "evict", 10)
        else:
            report = await link.probe(attempt["id"] if rank is None else rank["id"])
        if report.state in _LIVING:
            if attempt["state"] == "ended" and rank is None:
                # given up in the records, and there all the same
                await link.stop(attempt["id"], "evict", 10)
            return CleanCheck(clean=False, unclean=report.unclean)
        if report.state == "unknown" or report.clean is None:
            return await link.check(slots)
        return CleanCheck(clean=report.clean, unclean=report.unclean)


def _lease_and_slots(
    connection: sqlite3.Connection, lease_id: str, uses: tuple[str, ...]
) -> tuple[sqlite3.Row | None, list[sqlite3.Row]]:
    row = connection.execute("SELECT id, kind, state, fence FROM lease WHERE id = ?", (lease_id,)).fetchone()
    return row, [slot for slot in leases.slots(connection, lease_id) if slot["use"] in uses]


def by_host(rows: list[sqlite3.Row]) -> dict[str, list[SlotRef]]:
    """Slots of a lease as each host is asked about them."""
    out: dict[str, list[SlotRef]] = {}
    for row in rows:
        out.setdefault(row["host"], []).append(SlotRef(row["uuid"], row["share"], row["shares"]))
    return out


def end_lease(
    tx: Tx, by: Caller, row: sqlite3.Row, to: LeaseState, reason: str, now: int, *, request_id: str | None = None, severity: str = "info",
    clean: bool = False, args: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """End a granted lease: its slots are being cleaned, or free at once where the host has said so."""
    leases.move(tx, row["id"], to, row=row, ended_at_ms=now, end_reason=reason, pickup_by_ms=None)
    leases.end_slots(tx, row["id"], "freed" if clean else "cleaning", now)
    tx.execute("DELETE FROM offer WHERE object_id = ?", (row["id"],))
    events.append(
        tx, f"lease.{to.value}", by, now, owner=row["owner"], severity=severity, lease_id=row["id"], job_id=row["job_id"],
        host=row["host"], pool=row["pool"], old=row["state"], new=to.value, reason=reason, request_id=request_id, args=args,
    )  # fmt: skip


def free_slots(
    tx: Tx, lease_id: str, now: int, by: Caller = LOOP, *, host: str | None = None, reason: str | None = None
) -> bool:
    """The slots that a lease no longer has are free; False when there was nothing to free. What it holds stays."""
    row = leases.get(tx, lease_id)
    freed = leases.free_slots(tx, lease_id, now, host)
    if freed:
        kind = "slot.cleaned" if by is LOOP else "slot.cleared"
        events.append(
            tx,
            kind,
            by,
            now,
            owner=row["owner"],
            lease_id=lease_id,
            host=freed[0]["host"],
            pool=row["pool"],
            reason=reason,
        )
    return bool(freed)
