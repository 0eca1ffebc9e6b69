"""Direct leases: acquire, heartbeat, release, hand over, take back."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from cotenant.server.backends.base import HostRefused
from cotenant.server.control import grants, handover
from cotenant.server.control.context import Context, check_request_id, refusal_of, said
from cotenant.server.control.holds import Holds, end_lease
from cotenant.server.control.refusals import Refusals
from cotenant.server.deciding.blockers import could_ever, outlook, room_now
from cotenant.server.deciding.world import Ask, Blocker, Needs, Slot, World
from cotenant.server.errors import (
    BadRequest,
    Busy,
    Conflict,
    CotenantError,
    Forbidden,
)
from cotenant.server.model.answers import HeartbeatAnswer, LeaseAnswer
from cotenant.server.model.caller import LOOP, Caller, owns
from cotenant.server.model.states import PRIORITIES, LeaseState
from cotenant.server.model.text import clean, quoted
from cotenant.server.store import events, leases, meta, requests
from cotenant.server.store.db import Tx
from cotenant.server.store.views import Views
from cotenant.server.store.views.base import blocker_answer
from cotenant.server.store.worlds import needs_json

log = logging.getLogger(__name__)

TTL_MIN_S: Final = 60
TTL_MAX_S: Final = 86_400
GPUS_MAX: Final = 1_000_000
#: A decision that lost its race is made again this often before the caller is told to come back.
GRANT_TRIES: Final = 4

Progress = Callable[[float, float | None, str], Awaitable[None]]


class Leases:
    """Use cases over direct leases, and the end of any lease."""

    def __init__(self, context: Context, views: Views, holds: Holds) -> None:
        self._context = context
        self._views = views
        self._holds = holds
        self.refusals = Refusals()

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
        if not 0 <= gpus <= GPUS_MAX:
            raise BadRequest(f"gpus is {gpus}; it must be 0 to {GPUS_MAX}")
        if gpu_memory_mib < 0:
            raise BadRequest(f"gpu_memory_mib is {gpu_memory_mib}; it must be 0 or more")
        check_request_id(request_id)
        pool = context.pool_of(caller, pool)
        purpose = said(purpose, "purpose", 2000)
        gpu_model = said(gpu_model, "gpu_model", 200)
        host = said(host, "host", 64) if host else None
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
            known = context.db.peek(lambda c: requests.find(Tx(c), caller.name, request_id, "acquire_lease", digest))
            if known is not None:
                return replace(await self._views.get_lease(caller, known), deduplicated=True)
        priority = PRIORITIES["normal"]
        refused: HostRefused | None = None
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
            context.keeper.refresh(now)
            if when_full == "refuse":
                again = self.refusals.again(caller.name, digest, now, context.keeper.version)
                if again is not None:
                    raise again
            world = context.keeper.world()
            keys, why = outlook(world, ask, now, context.policy)
            if keys is None:
                return await self._not_now(caller, ask, world, why, row, when_full, request_id, digest)
            slots = [context.keeper.slot(key) for key in keys]
            row |= _granted(now, ttl_s, hours_ms) | {
                "state": "leased",
                "units": sum(s.units for s in slots),
                "gpus": grants.cards(slots),
                "host": slots[0].host,
                **grants.booked(needs),
            }
            context.keeper.assume(None, grants.holding_of(lease_id, "direct", keys, row, needs=needs))
            try:
                known = await context.db.write(
                    partial(self._write_grant, caller, row, slots, needs, request_id, digest)
                )
                if known is None:
                    refused = await self._holds.take(lease_id)
            except (sqlite3.IntegrityError, grants.GrantLost):
                context.keeper.doubt(lease_id)
                continue
            except asyncio.CancelledError:
                # the asker went away; the grant may be made all the same, and then its host has to know
                context.keeper.doubt(lease_id)
                context.background_task(self._see_through(lease_id))
                raise
            except BaseException:
                context.keeper.doubt(lease_id)  # what was assumed must not outlive its failure
                raise
            if known is not None:
                context.keeper.doubt(lease_id)
                return replace(await self._views.get_lease(caller, known), deduplicated=True)
            if refused is None:
                return await self._views.get_lease(caller, lease_id)
            await self._take_back(lease_id, refused)
        if refused is not None:
            raise Busy(
                f"the card cannot be given: {refused.message}", code=refused.code, hint="list_gpus shows its state.",
                retry_after_s=30, data=refused.data,
            ) from refused  # fmt: skip
        raise Busy(
            "others were faster several times in a row", hint='Ask again, or with when_full="queue".', retry_after_s=2
        )

    async def _see_through(self, lease_id: str) -> None:
        """The host's part of a grant whose asker was cancelled while it was written."""
        await self._context.db.write(lambda tx: None)  # stands behind the grant in the line
        refused = await self._holds.take(lease_id)
        if refused is not None:
            await self._take_back(lease_id, refused)

    async def _take_back(self, lease_id: str, refused: HostRefused) -> None:
        """The host will not give a card that was just granted: the lease is over before its holder heard of it."""
        now = self._context.now()

        def write(tx: Tx) -> None:
            row = leases.get(tx, lease_id)
            if row["state"] in ("leased", "running"):
                reason = clean(f"{refused.code}: {refused.message}", 300)
                # the host keeps nothing for it, and what is on the card is not this lease's doing
                end_lease(tx, LOOP, row, LeaseState.REVOKED, reason, now, severity="warning", clean=True)
            # the request was not answered with this lease: a repeat shall try anew
            tx.execute("DELETE FROM request WHERE object_id = ?", (lease_id,))
            meta.lift(tx, "fence", max(refused.data.get("fence", 0), refused.data.get("floor", 0)))

        await self._context.db.write(write)

    def _write_grant(
        self,
        caller: Caller,
        row: dict[str, Any],
        slots: list[Slot],
        needs: Needs,
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
        numbers |= grants.recheck_hosts(tx, self._context.keeper.hosts, slots, needs)
        held = grants.held_slots(slots)
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
        why: tuple[Blocker, ...],
        row: dict[str, Any],
        when_full: str,
        request_id: str | None,
        digest: str,
    ) -> LeaseAnswer:
        context, now = self._context, row["queued_at_ms"]
        if request_id is not None and when_full == "refuse":
            # a twin of this request may hold what is in its way; its transaction stands before this one in the line
            known = await context.db.write(
                lambda tx: requests.find(tx, caller.name, request_id, "acquire_lease", digest)
            )
            if known is not None:
                return replace(await self._views.get_lease(caller, known), deduplicated=True)
        never = could_ever(world, ask)
        if never is not None:
            raise self.impossible(caller, world, ask, never)
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
            answer = await self._views.get_lease(caller, ask.id)
            # The pass that decides may not have looked yet; an ask that waits always says for what.
            return replace(answer, blockers=[blocker_answer(b) for b in why]) if answer.state == "queued" else answer
        version = context.keeper.version
        raise self.refusals.remember(caller.name, digest, self.refusal(caller, world, ask, why), now, version)

    def impossible(self, caller: Caller, world: World, ask: Ask, never: Blocker) -> CotenantError:
        """What can never be had as an error; where a pool has no card at all, with what its drivers say."""
        rooms = self.rooms(caller, world, ask.pool)
        if dict(never.names).get("need") == "pool" and ask.needs.gpus_min:
            without = "Work without a card runs with gpus=0." if ask.kind == "job" else ""
            rooms = " ".join(part for part in (rooms, without, self._context.live.why_no_card()) if part)
        return refusal_of(never, rooms=rooms)

    def refusal(self, caller: Caller, world: World, ask: Ask, why: tuple[Blocker, ...]) -> CotenantError:
        """The main blocker as an error: quota when a cap is in the way, busy otherwise."""
        main = why[0]
        rooms = self.rooms(caller, world, ask.pool)
        queue_hint = 'when_full="queue" waits for it in order.'
        retry = 60 if main.until_ms is None else max(1, (main.until_ms - self._context.now()) // 1000)
        if main.code in ("quota_owner", "quota_agent", "quota_pool", "reserve", "jobs_at_once", "gpu_hours"):
            return refusal_of(main, rooms=rooms, queue_hint=queue_hint, retry_after_s=retry)
        hint = " ".join(part for part in (rooms, queue_hint) if part)
        return Busy(
            f"{main.message}.",  # the end, where it is known, stands in the message
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
        for name in sorted(self._context.keeper.rules.pools):
            if name != but and (not caller.pools or name in caller.pools):
                room = room_now(world, caller.owner, caller.name, caller.human, name)
                if room > 0:
                    found.append(f"{quoted(name)} ({room})")
        return f"Pools with free cards: {', '.join(found)}." if found else ""

    def pools_without_cards(self) -> list[str]:
        """Pools in which no card is, as far as hosts have told; empty while none has spoken."""
        context = self._context
        if not any(host.facts is not None for host in context.live.hosts.values()):
            return []
        context.keeper.refresh(context.now())
        world = context.keeper.world(waiting=False)
        return sorted(set(context.keeper.rules.pools) - {slot.pool for slot in world.slots if slot.kind == "gpu"})

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
                    f"lease {lease_id} is {row['state']}: {quoted(row['end_reason'] or 'no reason given', 300)}", code="lease_ended",
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
        check_request_id(request_id)
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> bool:
            row = self._own(tx, caller, lease_id)
            if requests.once(tx, caller.name, request_id, "release_lease", lease_id, lease_id, now):
                return False
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
                # a place without a card leaves nothing behind that a host would have to look for
                cards = bool(row["gpus"])
                end_lease(tx, caller, row, LeaseState.RELEASED, "released", now, request_id=request_id, clean=not cards)
                return cards
            return False

        if await context.db.write(write):
            await self._holds.free(lease_id)
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
            due = row["expires_at_ms"] if only_if_due == "ttl" else row["hard_end_at_ms"]
            if only_if_due and (due is None or due > now):
                return False
            end_lease(tx, by, row, to, reason, now, severity="warning")
            return True

        ended = await context.db.write(write)
        if ended:
            self._context.background_task(self._holds.free(lease_id))
        return ended

    async def wait(
        self, caller: Caller, lease_id: str, max_wait_s: float, on_progress: Progress | None = None
    ) -> LeaseAnswer:
        """Until a waiting claim is granted or has ended, at most `max_wait_s`."""
        context = self._context
        end = context.clock.monotonic_s() + max_wait_s
        while True:
            ticket = context.turnstile.ticket(f"cotenant://leases/{lease_id}")
            try:
                answer = await self._views.get_lease(caller, lease_id)
                left = end - context.clock.monotonic_s()
                if answer.state != "queued" or left <= 0:
                    return answer
                if on_progress is not None:
                    why = answer.blockers[0].message if answer.blockers else "its turn comes"
                    await on_progress(max_wait_s - left, max_wait_s, f"queued: {why}")
                await asyncio.wait({ticket}, timeout=min(left, 10))
            finally:
                ticket.cancel()

    async def hand_over(
        self, caller: Caller, object_id: str, to: str, *, request_id: str | None = None
    ) -> dict[str, Any]:
        """Pass a lease or job to another caller: see `handover.hand_over`."""
        return await handover.hand_over(self._context, caller, object_id, to, request_id=request_id)

    def _own(self, tx: Tx, caller: Caller, lease_id: str) -> sqlite3.Row:
        row = leases.get(tx, lease_id)
        if not owns(caller, owner=row["owner"], name=row["caller"]):
            raise not_yours(lease_id)
        return row


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
