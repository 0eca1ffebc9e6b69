"""Direct leases: acquire, heartbeat, release, hand over, take back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from cotenant.hostd.protocol import CleanCheck, SlotRef
from cotenant.server.backends.base import HostRefused
from cotenant.server.clock import iso
from cotenant.server.control import grants
from cotenant.server.control.context import Context, refusal_of, said
from cotenant.server.deciding.blockers import blockers, could_ever, room_now, would_start
from cotenant.server.deciding.world import Ask, Blocker, Needs, SlotKey, World
from cotenant.server.errors import (
    BadRequest,
    Busy,
    Conflict,
    CotenantError,
    Forbidden,
    NotFound,
    OutcomeUnknown,
    QuotaExceeded,
    Unreachable,
)
from cotenant.server.model.answers import HeartbeatAnswer, LeaseAnswer
from cotenant.server.model.caller import LOOP, Caller, owns
from cotenant.server.model.states import PRIORITIES, LeaseState
from cotenant.server.model.text import quoted
from cotenant.server.store import events, jobs, leases, meta, requests
from cotenant.server.store.db import Tx
from cotenant.server.store.views import Views
from cotenant.server.store.worlds import needs_json

log = logging.getLogger(__name__)

TTL_MIN_S: Final = 60
TTL_MAX_S: Final = 86_400
OFFER_MS: Final = 3_600_000
#: A decision that lost its race is made again this often before the caller is told to come back.
GRANT_TRIES: Final = 4

Progress = Callable[[float, float | None, str], Awaitable[None]]


class Leases:
    """Use cases over direct leases, and the end of any lease."""

    def __init__(self, context: Context, views: Views) -> None:
        self._context = context
        self._views = views

    # ---- acquire

    async def acquire(
        self,
        caller: Caller,
        *,
        gpus: int = 1,
        pool: str | None = None,
        ttl_s: int = 600,
        hours: float | None = None,
        purpose: str = "",
        gpu_memory_mib: int = 0,
        gpu_model: str = "",
        host: str | None = None,
        request_id: str | None = None,
        when_full: Literal["refuse", "queue"] = "refuse",
    ) -> LeaseAnswer:
        """Cards for the caller's own work: granted at once, queued, or refused with numbers.

        Raises:
            QuotaExceeded: more than the caller may have now (or ever).
            Busy: nothing that fits is free; says who holds it and until when.
            BadRequest, Forbidden, Conflict: see the messages.
        """
        context = self._context
        if not TTL_MIN_S <= ttl_s <= TTL_MAX_S:
            raise BadRequest(
                f"ttl_s is {ttl_s}; it must be {TTL_MIN_S} to {TTL_MAX_S}",
                hint="Renew with heartbeat instead of asking for more.",
            )
        if gpus < 0:
            raise BadRequest(f"gpus is {gpus}; it must be 0 or more")
        pool = context.pool_of(caller, pool)
        purpose = said(purpose, "purpose", 2000)
        hours_ms, hours_from = context.hours_ms(pool, hours)
        needs = Needs(
            gpus_min=gpus,
            gpus_max=gpus,
            gpu_memory_mib=gpu_memory_mib,
            models=(gpu_model,) if gpu_model else (),
            hosts=(host,) if host else (),
        )
        digest = requests.args_hash(
            "acquire_lease", [gpus, pool, ttl_s, hours_ms, purpose, gpu_memory_mib, gpu_model, host, when_full]
        )
        if request_id is not None:
            known = await context.db.read(
                lambda c: requests.find(Tx(c), caller.name, request_id, "acquire_lease", digest)
            )
            if known is not None:
                return replace(await self._views.get_lease(caller, known), deduplicated=True)
        priority = PRIORITIES["normal"]
        for _ in range(GRANT_TRIES):
            now = context.now()
            lease_id = context.ids.new("lease", now)
            ask = Ask(lease_id, "claim", caller.owner, caller.name, caller.human, pool, needs, priority, now, hours_ms)
            row: dict[str, Any] = {
                "id": lease_id,
                "kind": "direct",
                "state": "queued",
                "caller": caller.name,
                "owner": caller.owner,
                "human": int(caller.human),
                "pool": pool,
                "priority": priority,
                "needs": needs_json(needs),
                "gpus": gpus,
                "units": 0,
                "purpose": purpose,
                "hours_ms": hours_ms,
                "hours_from": hours_from,
                "ttl_s": ttl_s,
                "queued_at_ms": now,
                "granted_at_ms": None,
                "expires_at_ms": None,
                "hard_end_at_ms": None,
            }
            async with context.deciding:
                await context.keeper.refresh(now)
                world = context.keeper.world()
                keys = would_start(world, ask, now, context.policy)
                if keys is not None:
                    slots = [context.keeper.slot(key) for key in keys]
                    row |= _granted(now, ttl_s, hours_ms) | {
                        "state": "leased",
                        "units": sum(s.units for s in slots),
                        "gpus": grants.cards(slots),
                        "host": slots[0].host,
                    }
                    context.keeper.assume(None, grants.holding_of(lease_id, "direct", keys, row))
            if keys is None:
                return await self._not_now(caller, ask, world, row, when_full, request_id, digest)
            held = grants.held_slots(slots)
            try:
                known = await context.db.write(partial(self._write_grant, caller, row, held, request_id, digest))
            except (sqlite3.IntegrityError, grants.GrantLost):
                context.keeper.doubt(lease_id)
                continue
            if known is not None:
                context.keeper.doubt(lease_id)
                return replace(await self._views.get_lease(caller, known), deduplicated=True)
            await self.take_on_host(lease_id)
            return await self._views.get_lease(caller, lease_id)
        raise Busy(
            "others were faster several times in a row", hint='Ask again, or with when_full="queue".', retry_after_s=2
        )

    def _write_grant(
        self,
        caller: Caller,
        row: dict[str, Any],
        held: tuple[leases.HeldSlot, ...],
        request_id: str | None,
        digest: str,
        tx: Tx,
    ) -> str | None:
        if (known := requests.find(tx, caller.name, request_id, "acquire_lease", digest)) is not None:
            return known
        numbers = grants.recheck(
            tx,
            self._context.settings,
            pool=row["pool"],
            owner=row["owner"],
            caller=row["caller"],
            human=caller.human,
            units=row["units"],
        )
        fence = meta.next_of(tx, "fence")
        leases.insert(tx, {**row, "fence": fence}, held)
        requests.keep(tx, caller.name, request_id, "acquire_lease", digest, row["id"], row["granted_at_ms"])
        events.append(
            tx, "lease.granted", caller, row["granted_at_ms"], lease_id=row["id"], host=row["host"], pool=row["pool"], new="leased",
            request_id=request_id, args={"slots": grants.slots_for_event(held), "fence": fence, **numbers},
        )  # fmt: skip
        return None

    async def _not_now(
        self,
        caller: Caller,
        ask: Ask,
        world: World,
        row: dict[str, Any],
        when_full: str,
        request_id: str | None,
        digest: str,
    ) -> LeaseAnswer:
        context, now = self._context, row["queued_at_ms"]
        why = blockers(world, ask, now, context.policy)
        never = could_ever(world, ask)
        if never is not None:
            raise refusal_of(never, rooms=self.rooms(caller, world, ask.pool))
        if when_full == "queue":

            def enqueue(tx: Tx) -> str | None:
                if (known := requests.find(tx, caller.name, request_id, "acquire_lease", digest)) is not None:
                    return known
                leases.insert(tx, row, ())
                requests.keep(tx, caller.name, request_id, "acquire_lease", digest, ask.id, now)
                events.append(tx, "lease.queued", caller, now, lease_id=ask.id, pool=ask.pool, new="queued", request_id=request_id,
                              reason=why[0].code if why else None)  # fmt: skip
                return None

            known = await context.db.write(enqueue)
            context.wake()
            if known is not None:
                return replace(await self._views.get_lease(caller, known), deduplicated=True)
            context.blockers.setdefault(ask.id, why)
            return await self._views.get_lease(caller, ask.id)
        raise self.refusal(caller, world, ask, why)

    def refusal(self, caller: Caller, world: World, ask: Ask, why: tuple[Blocker, ...]) -> CotenantError:
        """The main blocker as an error: quota when a cap is in the way, busy otherwise."""
        main = why[0]
        rooms = self.rooms(caller, world, ask.pool)
        queue_hint = 'when_full="queue" waits for it in order.'
        retry = 60 if main.until_ms is None else max(1, (main.until_ms - self._context.now()) // 1000)
        if main.code in ("quota_owner", "quota_agent", "quota_pool", "reserve", "jobs_at_once", "gpu_hours"):
            return refusal_of(main, rooms=rooms, queue_hint=queue_hint, retry_after_s=retry)
        until = f" Free by {iso(main.until_ms)} at the latest." if main.until_ms is not None else ""
        hint = " ".join(part for part in (rooms, queue_hint) if part)
        return Busy(
            f"{main.message}.{until}",
            code=main.code
            if main.code in ("queue_paused", "queue_draining", "host_down", "host_sick", "occupied")
            else "busy",
            hint=hint,
            retry_after_s=min(retry, 600),
            data={"blocker": main.code, **dict(main.numbers), **dict(main.names)},
        )

    def rooms(self, caller: Caller, world: World, but: str) -> str:
        """A sentence that names other pools with room for this caller; empty when there are none."""
        found = []
        for name in sorted(self._context.settings.pools):
            if name != but and (not caller.pools or name in caller.pools):
                room = room_now(world, caller.owner, caller.name, caller.human, name)
                if room > 0:
                    found.append(f"{quoted(name)} ({room})")
        return f"Pools with free cards: {', '.join(found)}." if found else ""

    # ---- the host's part

    async def take_on_host(self, lease_id: str) -> None:
        """Tell the hosts; one that finds something on a card takes the grant back."""
        context = self._context
        rows = context.db.peek(lambda c: leases.slots(c, lease_id))
        fence = context.db.peek(lambda c: c.execute("SELECT fence FROM lease WHERE id = ?", (lease_id,)).fetchone()[0])
        for host, slots in by_host(rows).items():
            link = context.hosts.get(host)
            if link is None or all(s.uuid == "cpu" for s in slots):
                continue
            try:
                await link.hold(lease_id, fence, slots)
            except HostRefused as refused:
                await self.end(LOOP, lease_id, LeaseState.REVOKED, f"{refused.code}: {refused.message}")
                raise Busy(
                    f"the card cannot be given: {refused.message}", code=refused.code, hint="list_gpus shows its state.",
                    retry_after_s=30, data=refused.data,
                ) from refused  # fmt: skip
            except (Unreachable, OutcomeUnknown):
                # the grant stands: the host learns of it at the next hello
                log.warning("host %s did not hear of lease %s yet", host, lease_id)

    async def unhold_on_host(self, lease_id: str) -> None:
        """Tell the hosts that a claim lost its slots again. Nothing ran on them: they are free in the records already."""
        for link in tuple(self._context.hosts.values()):
            with contextlib.suppress(Unreachable, OutcomeUnknown, HostRefused):
                await link.unhold(lease_id)

    async def free_on_host(self, lease_id: str) -> None:
        """Ask the hosts whether an ended lease's slots are clean, and free those that are."""
        context = self._context
        rows = context.db.peek(lambda c: leases.slots(c, lease_id))
        for host, slots in by_host([row for row in rows if row["use"] in ("cleaning", "occupied")]).items():
            link = context.hosts.get(host)
            if all(s.uuid == "cpu" for s in slots):
                await self.cleaned(lease_id, CleanCheck(clean=True))
                continue
            if link is None:
                continue
            try:
                check = await link.unhold(lease_id)
            except (Unreachable, OutcomeUnknown, HostRefused) as error:
                log.info("slots of %s stay in cleaning: %s", lease_id, error)
                continue
            await self.cleaned(lease_id, check)

    async def cleaned(self, lease_id: str, check: CleanCheck) -> None:
        """Take the host's word on the slots of an ended lease."""
        context, now = self._context, self._context.now()
        if not check.clean:
            return

        def write(tx: Tx) -> None:
            free_slots(tx, lease_id, now)

        await context.db.write(write)
        context.wake()

    # ---- living

    async def heartbeat(self, caller: Caller, lease_id: str) -> HeartbeatAnswer:
        """Renew a direct lease for its whole ttl; picks a granted claim up. Never moves the hard end.

        Raises:
            NotFound, Forbidden: not there, or not the caller's.
            Conflict: the lease has ended, or still waits.
        """
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> sqlite3.Row:
            row = self._own(tx, caller, lease_id)
            if row["state"] == "queued":
                raise Conflict(
                    f"lease {lease_id} still waits for its cards", code="still_queued", hint="wait_job on its id tells when it is granted.",
                    retry_after_s=30,
                )  # fmt: skip
            if row["state"] not in ("leased", "running"):
                raise Conflict(
                    f"lease {lease_id} is {row['state']} ({row['end_reason']})", code="lease_ended",
                    hint="Stop using its cards now; ask for a new lease.",
                )  # fmt: skip
            if row["kind"] == "job":
                return row
            expires = min(now + row["ttl_s"] * 1000, row["hard_end_at_ms"])
            values: dict[str, Any] = {"expires_at_ms": expires, "pickup_by_ms": None}
            if row["state"] == "leased":
                leases.move(tx, lease_id, LeaseState.RUNNING, **values)
                if row["pickup_by_ms"] is not None:
                    events.append(
                        tx,
                        "lease.picked_up",
                        caller,
                        now,
                        owner=row["owner"],
                        lease_id=lease_id,
                        old="leased",
                        new="running",
                    )
            else:
                tx.execute("UPDATE lease SET expires_at_ms = ?, pickup_by_ms = NULL WHERE id = ?", (expires, lease_id))
                tx.dirty.add(("lease", lease_id))
            return leases.get(tx, lease_id)

        row = await context.db.write(write)
        return self._views.heartbeat_answer(row, now)

    async def release(self, caller: Caller, lease_id: str, *, request_id: str | None = None) -> LeaseAnswer:
        """Give a lease back, or take a waiting claim back. Repeating it answers the ended lease."""
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> bool:
            row = self._own(tx, caller, lease_id)
            if row["kind"] == "job":
                raise Conflict(
                    f"lease {lease_id} belongs to job {row['job_id']}",
                    code="job_lease",
                    hint="cancel_job ends the job and its lease.",
                )
            if row["state"] == "queued":
                leases.move(tx, lease_id, LeaseState.WITHDRAWN, ended_at_ms=now, end_reason="withdrawn")
                events.append(tx, "lease.withdrawn", caller, now, owner=row["owner"], lease_id=lease_id, pool=row["pool"], old="queued",
                              new="withdrawn", request_id=request_id)  # fmt: skip
                return False
            if row["state"] in ("leased", "running"):
                end_lease(tx, caller, row, LeaseState.RELEASED, "released", now, request_id=request_id)
                return True
            return False

        if await context.db.write(write):
            await self.free_on_host(lease_id)
        context.wake()
        return await self._views.get_lease(caller, lease_id)

    async def end(self, by: Caller, lease_id: str, to: LeaseState, reason: str, *, only_if_due: str = "") -> bool:
        """End a direct lease for the loop or a person; False when it was over already.

        `only_if_due` ("ttl" or "hard_end") leaves a lease alone that a heartbeat has renewed meanwhile.
        """
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> bool:
            row = leases.get(tx, lease_id)
            if row["state"] not in ("leased", "running"):
                return False
            if only_if_due and (row["expires_at_ms"] if only_if_due == "ttl" else row["hard_end_at_ms"]) > now:
                return False
            end_lease(tx, by, row, to, reason, now, severity="warning")
            return True

        ended = await context.db.write(write)
        if ended:
            self._context.background_task(self.free_on_host(lease_id))
        return ended

    async def wait(
        self, caller: Caller, lease_id: str, max_wait_s: float, on_progress: Progress | None = None
    ) -> LeaseAnswer:
        """Until a waiting claim is granted or has ended, at most `max_wait_s`."""
        context = self._context
        end = context.clock.monotonic_s() + max_wait_s
        while True:
            ticket = context.turnstile.ticket(f"cotenant://leases/{lease_id}")
            answer = await self._views.get_lease(caller, lease_id)
            left = end - context.clock.monotonic_s()
            if answer.state != "queued" or left <= 0:
                ticket.cancel()
                return answer
            if on_progress is not None:
                await on_progress(
                    max_wait_s - left,
                    max_wait_s,
                    f"queued: {answer.blockers[0].message if answer.blockers else 'its turn comes'}",
                )
            await asyncio.wait({ticket}, timeout=min(left, 10))
            ticket.cancel()

    # ---- hand over

    async def hand_over(
        self, caller: Caller, object_id: str, to: str, *, request_id: str | None = None
    ) -> dict[str, Any]:
        """Pass a lease or job to another caller: the holder offers (`to` = the other), the other accepts (`to` = itself)."""
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> dict[str, Any]:
            table = "job" if object_id.startswith("job_") else "lease"
            row = jobs.get(tx, object_id) if table == "job" else leases.get(tx, object_id)
            if table == "lease" and row["kind"] == "job":
                raise Conflict("this lease belongs to a job", hint=f"Hand over {row['job_id']} instead.")
            if row["ended_at_ms"] is not None:
                raise Conflict(f"{object_id} has ended ({row['state']})", code="already_final")
            other = tx.one("SELECT * FROM caller WHERE name = ?", (to,))
            if other is None:
                raise NotFound(
                    f"there is no caller {quoted(to)}", code="no_such_caller", hint="list_agents shows who there is."
                )
            offer = tx.one("SELECT * FROM offer WHERE object_id = ? AND expires_at_ms >= ?", (object_id, now))
            if to == caller.name and not (owns(caller, owner=row["owner"], name=row["caller"]) and offer is None):
                if offer is None or offer["receiver"] != caller.name:
                    raise Forbidden(
                        f"{object_id} was not offered to you",
                        hint="Its holder has to call hand_over with your name first.",
                    )
                self._take_over(tx, table, row, offer, caller, now, request_id)
                return {"object_id": object_id, "status": "handed_over", "holder": caller.name, "until": None}
            if not owns(caller, owner=row["owner"], name=row["caller"]):
                raise not_yours(object_id)
            if other["owner"] == caller.owner:
                self._take_over(tx, table, row, {"giver": caller.name}, replace(caller, name=to), now, request_id)
                return {"object_id": object_id, "status": "handed_over", "holder": to, "until": None}
            tx.execute(
                "INSERT INTO offer (object_id, giver, receiver, created_at_ms, expires_at_ms) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (object_id) DO UPDATE SET giver = excluded.giver, receiver = excluded.receiver,"
                " created_at_ms = excluded.created_at_ms, expires_at_ms = excluded.expires_at_ms",
                (object_id, caller.name, to, now, now + OFFER_MS),
            )
            events.append(tx, "lease.offered", caller, now, **_about(table, object_id), new=to, request_id=request_id)
            return {"object_id": object_id, "status": "offered", "holder": row["caller"], "until": iso(now + OFFER_MS)}

        answer = await context.db.write(write)
        context.wake()
        return answer

    def _take_over(
        self, tx: Tx, table: str, row: sqlite3.Row, offer: Any, taker: Caller, now: int, request_id: str | None
    ) -> None:
        """The object changes hands, if the taker's caps allow what it holds."""
        receiver = tx.one("SELECT * FROM caller WHERE name = ?", (taker.name,))
        assert receiver is not None
        lease = (
            row
            if table == "lease"
            else tx.one("SELECT * FROM lease WHERE job_id = ? AND state IN ('leased', 'running')", (row["id"],))
        )
        if lease is not None and lease["units"]:
            try:
                grants.recheck(
                    tx, self._context.settings, pool=lease["pool"], owner=receiver["owner"], caller=receiver["name"],
                    human=receiver["kind"] == "human", units=lease["units"], own_lease=lease["id"],
                )  # fmt: skip
            except grants.GrantLost as error:
                raise QuotaExceeded(
                    f"{taker.name} cannot take it: {error.message}", hint="Release something first."
                ) from error
        new = {"caller": receiver["name"], "owner": receiver["owner"], "human": int(receiver["kind"] == "human")}
        if table == "job":
            jobs.update(tx, row["id"], **new)
        if lease is not None:
            leases.update(tx, lease["id"], **new)
        tx.execute("DELETE FROM offer WHERE object_id = ?", (row["id"],))
        events.append(
            tx, f"{table}.handed_over", taker, now, owner=receiver["owner"], **_about(table, row["id"]), old=row["caller"],
            new=receiver["name"], request_id=request_id,
        )  # fmt: skip

    def _own(self, tx: Tx, caller: Caller, lease_id: str) -> sqlite3.Row:
        row = leases.get(tx, lease_id)
        if not owns(caller, owner=row["owner"], name=row["caller"]):
            raise not_yours(lease_id)
        return row


def _about(table: str, object_id: str) -> dict[str, Any]:
    return {f"{table}_id": object_id}


def not_yours(object_id: str) -> Forbidden:
    return Forbidden(
        f"{object_id} is not yours",
        code="not_yours",
        hint="Only its owner's agents, or a person through the panel or command line, may do this.",
    )


def _granted(now: int, ttl_s: int, hours_ms: int) -> dict[str, int]:
    return {
        "granted_at_ms": now,
        "hard_end_at_ms": now + hours_ms,
        "expires_at_ms": min(now + ttl_s * 1000, now + hours_ms),
    }


def by_host(rows: list[sqlite3.Row]) -> dict[str, list[SlotRef]]:
    """Slots of a lease as each host is asked about them."""
    out: dict[str, list[SlotRef]] = {}
    for row in rows:
        out.setdefault(row["host"], []).append(SlotRef(row["uuid"], row["share"], row["shares"]))
    return out


def end_lease(
    tx: Tx, by: Caller, row: sqlite3.Row, to: LeaseState, reason: str, now: int, *, request_id: str | None = None, severity: str = "info",
    clean: bool = False,
) -> None:  # fmt: skip
    """End a granted lease: its slots are being cleaned, or free at once where the host has said so."""
    leases.move(tx, row["id"], to, ended_at_ms=now, end_reason=reason, pickup_by_ms=None)
    leases.end_slots(tx, row["id"], "freed" if clean else "cleaning", now)
    events.append(
        tx, f"lease.{to.value}", by, now, owner=row["owner"], severity=severity, lease_id=row["id"], job_id=row["job_id"],
        host=row["host"], pool=row["pool"], old=row["state"], new=to.value, reason=reason, request_id=request_id,
    )  # fmt: skip


def free_slots(tx: Tx, lease_id: str, now: int, by: Caller = LOOP) -> bool:
    """The slots of an ended lease are free; False when there was nothing to free."""
    row = leases.get(tx, lease_id)
    if row["state"] in ("leased", "running"):
        return False
    freed = leases.end_slots(tx, lease_id, "freed", now)
    if freed:
        kind = "slot.cleared" if by is not LOOP else "slot.cleaned"
        events.append(tx, kind, by, now, owner=row["owner"], lease_id=lease_id, host=freed[0]["host"], pool=row["pool"])
    return bool(freed)


def slot_keys(rows: list[sqlite3.Row]) -> tuple[SlotKey, ...]:
    return tuple((row["host"], row["uuid"], row["share"]) for row in rows)
