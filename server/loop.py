"""The loop: snapshot, decide, recheck and record, carry out. Woken by what happened; a slow tick once a second is the net."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

from cotenant.server.backends.base import HostRefused
from cotenant.server.control import grants, placing
from cotenant.server.control.auth import Auth
from cotenant.server.control.context import Context
from cotenant.server.control.holds import Holds
from cotenant.server.control.hosts import Hosts
from cotenant.server.control.idling import Idling
from cotenant.server.control.leases import Leases
from cotenant.server.control.preempting import Preempting
from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.world import Blocker, Expire, GiveUp, Notice, Preempt, Reclaim, Slot, Start, Withdraw
from cotenant.server.errors import Unavailable
from cotenant.server.model.caller import LOOP
from cotenant.server.model.states import LeaseState
from cotenant.server.store import events, forecasts, leases, requests, waits
from cotenant.server.store.db import Tx

log = logging.getLogger(__name__)

TICK_S: Final = 1.0
#: A tick this late means that the machine slept or the process was stopped: direct leases get their ttl anew.
#: Half the shortest ttl, so that no lease can run out unseen.
LATE_S: Final = 30.0
_HOUSEKEEPING_EVERY_S: Final = 600.0
#: A COMMIT does not wait for reasons that take longer than this to work out.
_WITHIN_COMMIT_S: Final = 0.005


class Loop:
    """Owns the pass and the tick. `run` until cancelled."""

    def __init__(
        self,
        context: Context,
        leases_: Leases,
        holds: Holds,
        hosts: Hosts,
        auth: Auth,
        preempting: Preempting,
        idling: Idling,
    ) -> None:
        self._context = context
        self._leases = leases_
        self._holds = holds
        self._hosts = hosts
        self._auth = auth
        self._preempting = preempting
        self._idling = idling
        self._wake = asyncio.Event()
        self._wake_at_ms: int | None = None
        self._ticked_s = self._housekept_s = context.clock.monotonic_s()
        self._ticked_ms = context.now()
        #: What a pass before a COMMIT found another reason for: (to turn the turnstile for, to publish), told after it.
        self._held_back: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        context.db.before_commit(self.decide_before_commit, self._undone)
        context.db.on_commit(lambda changed, dirty: self._tell_held_back())
        self._explained_s = 0.0  # when it was last worked out why everybody waits, and how long that took
        self._explaining_took_s = 0.0
        self.passes = 0
        self.longest_pass_s = 0.0

    def wake(self) -> None:
        """Something happened that may change who can start."""
        self._wake.set()

    async def run(self) -> None:
        clock = self._context.clock
        while True:
            timeout = max(0.0, self._ticked_s + TICK_S - clock.monotonic_s())
            if self._wake_at_ms is not None:
                timeout = min(timeout, max(0.0, (self._wake_at_ms - self._context.now()) / 1000))
            if self._context.keeper.waiting.explain is not None:
                timeout = min(timeout, max(0.0, self._explain_at_s - clock.monotonic_s()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            try:
                await self.turn()
            except Unavailable as error:
                log.warning("the store refuses for now: %s", error)
                await clock.sleep(TICK_S)
            except Exception:
                # one bad pass must not end the server; the next starts from the database
                log.exception("a pass of the loop failed")
                self._context.keeper.distrust()
                await clock.sleep(TICK_S)

    async def turn(self) -> None:
        """Do what is due now: the pause rule before all else, then a pass, then the tick."""
        context = self._context
        now_s, now_ms = context.clock.monotonic_s(), context.now()
        late_s = now_s - self._ticked_s
        # the wall clock is compared with the steady one: a step of it would else end every lease at once, or none
        stepped_s = (now_ms - self._ticked_ms) / 1000 - late_s
        if late_s > LATE_S or abs(stepped_s) > LATE_S:
            # before any decision: one made on the old ends would let leases run out that nobody could renew
            what = (
                f"the server's tick was {late_s:.0f} s late"
                if late_s > LATE_S
                else f"the clock moved by {stepped_s:.0f} s"
            )
            await self.renew_all(what)
            self._ticked_s, self._ticked_ms = now_s, now_ms  # not before: a failure must not make the pause forgotten
            self.wake()
        if self._wake.is_set() or (self._wake_at_ms is not None and self._wake_at_ms <= context.now()):
            self._wake.clear()
            self.step()
        if context.keeper.waiting.explain is not None and now_s >= self._explain_at_s:
            self._explain()
        if now_s - self._ticked_s < TICK_S and late_s <= LATE_S:
            return
        self._ticked_s, self._ticked_ms = now_s, now_ms
        await self._hosts.tick()
        await self._auth.flush_seen()
        if context.keeper.stale:
            self.wake()  # the net under a wake-up that a failure swallowed
        if now_s - self._housekept_s >= _HOUSEKEEPING_EVERY_S:
            self._housekept_s = now_s
            await context.db.write(partial(requests.forget_old, now_ms=now_ms))
            await context.db.write(partial(waits.forget_old, now_ms=now_ms))
            await context.db.write(partial(forecasts.forget_old, now_ms=now_ms))

    def decide_before_commit(self, writer: sqlite3.Connection, dirty: set[tuple[str, str]]) -> None:
        """A pass over rows that are about to be committed; the starts it makes join their COMMIT."""
        keeper = self._context.keeper
        try:
            keeper.foresee(dirty)
            self.step(writer)
        except Exception:
            # the group itself is sound: it is committed, and the next turn decides from the database
            log.exception("a pass before a commit failed")
            keeper.distrust()
            self.wake()

    def step(self, writer: sqlite3.Connection | None = None) -> None:
        """One pass: decide, and set in motion what was decided. Never gives the loop away."""
        context, now = self._context, self._context.now()
        began = context.clock.monotonic_s()
        context.keeper.refresh(now, writer)
        due = self._wake_at_ms is not None and self._wake_at_ms <= now
        if not (due or context.keeper.undecided):
            return  # what came stands behind equals that wait already
        decided = context.keeper.turn(now, context.policy)
        changes = context.keeper.take_changes()
        if context.journal is not None:
            context.journal.note(changes, now, context.policy, decided)
        context.keeper.bookings = {booking.ask_id: booking for booking in decided.bookings}
        if writer is not None and decided.wake_at_ms is not None and decided.wake_at_ms != self._wake_at_ms:
            self.wake()  # `run` sleeps until what was due before
        self._wake_at_ms = decided.wake_at_ms
        of_arrays: dict[str, list[placing.Grant]] = {}
        for decision in decided.decisions:
            if isinstance(decision, Start):
                self._start(decision, now, of_arrays)
            elif isinstance(decision, Expire):
                self._expire(decision)
            elif isinstance(decision, GiveUp):
                context.keeper.waiting.drop(decision.ask_id)
                context.background_task(placing.give_up(context, decision.ask_id, decision.why))
            elif isinstance(decision, Preempt):
                context.background_task(self._preempting.begin(decision, now))
            elif isinstance(decision, Withdraw):
                context.background_task(self._preempting.withdraw(decision.preemption_id, decision.why))
            elif isinstance(decision, Notice):
                context.keeper.assume_idle_notice(decision.lease_id, now)
                context.background_task(self._idling.notice(decision))
            elif isinstance(decision, Reclaim):
                context.background_task(self._idling.reclaim(decision))
        for array_id, granted in of_arrays.items():
            context.background_task(placing.start_elements(context, array_id, granted, now))
        context.keeper.settled()
        self.passes += 1
        late = self._explaining_took_s > _WITHIN_COMMIT_S and writer is not None
        if context.clock.monotonic_s() >= self._explain_at_s and not late:
            self._explain(writer)
        else:
            context.keeper.waiting.explain = self._explain
            if writer is not None:
                self.wake()  # `run` sleeps until what was due before
        self.longest_pass_s = max(self.longest_pass_s, context.clock.monotonic_s() - began)

    @property
    def _explain_at_s(self) -> float:
        """When why everybody waits may be worked out again: that takes a fifth of the time at most, however long the queue."""
        return self._explained_s + 4 * self._explaining_took_s

    def _explain(self, writer: sqlite3.Connection | None = None) -> None:
        """Work out why everybody waits. Who starts does not hang on it, so that it can come later; who asks for it gets it."""
        context = self._context
        began = context.clock.monotonic_s()
        context.keeper.waiting.explain = None
        decided = decide(context.keeper.heads(), context.now(), context.policy)
        self._hear(decided.blockers, writer)
        if any(isinstance(decision, Start) for decision in decided.decisions):
            context.keeper.doubt_decided()  # what starts may make another booking better
            self.wake()
        self._explained_s = context.clock.monotonic_s()
        self._explaining_took_s = self._explained_s - began

    def _hear(self, blockers: dict[str, tuple[Blocker, ...]], writer: sqlite3.Connection | None) -> None:
        """Keep why everybody waits and tell whose reason is another now, after the COMMIT that it is part of."""
        context = self._context
        context.keeper.waiting.explain = None
        changed, reworded = context.keeper.waiting.answer(blockers)
        if changed or reworded:
            pools = {ask.pool for i in changed if (ask := context.keeper.waiting.get(i)) is not None}
            turned = frozenset(map(_address, changed))
            told = frozenset(map(_address, (*changed, *reworded))) | {f"cotenant://queues/{pool}" for pool in pools}
            if writer is None:
                self._tell(turned, told)
            else:
                self._held_back = turned, told

    def _tell(self, turned: frozenset[str], told: frozenset[str]) -> None:
        self._context.turnstile.turn(turned)
        self._context.changes.publish(told)

    def _tell_held_back(self) -> None:
        (turned, told), self._held_back = self._held_back, (frozenset(), frozenset())
        if told:
            self._tell(turned, told)

    def _undone(self) -> None:
        """The group that a pass saw was never committed."""
        self._held_back = (frozenset(), frozenset())
        self._context.keeper.distrust()

    def _start(self, decision: Start, now: int, of_arrays: dict[str, list[placing.Grant]]) -> None:
        """Set a start in motion; those of an array's elements are gathered in `of_arrays`."""
        context = self._context
        ask = context.keeper.waiting.get(decision.ask_id)
        if ask is None:
            return
        slots = [context.keeper.slot(key) for key in decision.slots]
        values = {
            "owner": ask.owner, "caller": ask.agent, "human": ask.human, "pool": ask.pool, "granted_at_ms": now,
            "hard_end_at_ms": now + ask.hours_ms, "priority": ask.priority,
        }  # fmt: skip
        lease_id = ask.id if decision.kind == "claim" else context.ids.new("lease", now)
        is_array = ask.array == ask.id
        context.keeper.assume(
            ask.id,
            grants.holding_of(
                lease_id, decision.kind, decision.slots, values,
                job_id=ask.id if decision.kind == "job" else None, needs=ask.needs, array=ask.array,
            ),
        )  # fmt: skip
        if is_array:
            of_arrays.setdefault(ask.id, []).append((lease_id, slots))
        elif decision.kind == "job":
            context.background_task(placing.start_job(context, ask.id, lease_id, slots, now))
        else:
            context.background_task(self._grant(ask.id, slots, now))

    async def _grant(self, lease_id: str, slots: list[Slot], now: int) -> None:
        if await placing.grant_claim(self._context, lease_id, slots, now):
            refused = await self._holds.take(lease_id)
            if refused is not None:
                await self._requeue(lease_id, refused)

    def _expire(self, decision: Expire) -> None:
        if decision.why in ("pickup", "pickup_twice"):
            work: Coroutine[Any, Any, object] = self._requeue(decision.lease_id)
        else:
            reason = "its ttl ran out without a heartbeat" if decision.why == "ttl" else "its hard end was reached"
            work = self._leases.end(LOOP, decision.lease_id, LeaseState.EXPIRED, reason, only_if_due=decision.why)
        self._context.background_task(work)

    async def _requeue(self, lease_id: str, refused: HostRefused | None = None) -> None:
        if await placing.requeue_claim(self._context, lease_id, refused=refused):
            if refused is None:
                await self._holds.free(lease_id)
            self._context.wake()

    async def renew_all(self, reason: str) -> None:
        """Downtime counts as a pause: every direct lease gets its whole ttl anew. Hard ends do not move."""
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> None:
            living = tx.all("SELECT id, ttl_s, hard_end_at_ms FROM lease WHERE kind = 'direct' AND state IN ('queued', 'leased', 'running')"
                            " AND state <> 'queued' AND expires_at_ms IS NOT NULL")  # fmt: skip
            for row in living:
                leases.update(tx, row["id"], expires_at_ms=min(now + row["ttl_s"] * 1000, row["hard_end_at_ms"]))
            waiting = tx.all(
                "SELECT id FROM lease WHERE state IN ('queued', 'leased', 'running') AND state = 'leased' AND pickup_by_ms IS NOT NULL"
            )
            for row in waiting:
                leases.update(tx, row["id"], pickup_by_ms=now + context.settings.pickup_s * 1000)
            if living or waiting:
                events.append(
                    tx,
                    "clock.jumped",
                    LOOP,
                    now,
                    severity="warning",
                    reason=reason,
                    args={"leases": len(living) + len(waiting)},
                )

        await context.db.write(write)


def _address(ask_id: str) -> str:
    return f"cotenant://{'leases' if ask_id.startswith('lse') else 'jobs'}/{ask_id}"
