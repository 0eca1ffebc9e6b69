"""When something that waits will start: the present world, run forward by the engine with likely running times."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from cotenant.server.deciding.engine import Engine
from cotenant.server.deciding.world import Ask, Expire, GiveUp, Holding, Policy, SlotKey, Start, World

#: No forecast looks further ahead.
HORIZON_MS = 30 * 86_400_000
#: Ends and starts that one forecast follows.
STEPS = 20_000
#: Runs of one kind from which their times are taken; with fewer the next wider kind is.
ENOUGH = 3


@dataclass(frozen=True)
class Ran:
    """One run that is over."""

    owner: str
    name: str
    ran_ms: int
    limit_ms: int


class RunTimes:
    """How long things run, from those that are over: by owner and name, else by the owner's share of his limits, else anybody's."""

    def __init__(self, past: Iterable[Ran]) -> None:
        self._named: dict[tuple[str, str], list[int]] = {}
        self._owner: dict[str, list[int]] = {}
        self._all: list[int] = []
        for one in past:
            self._named.setdefault((one.owner, one.name), []).append(one.ran_ms)
            share = min(1000, one.ran_ms * 1000 // max(1, one.limit_ms))
            self._owner.setdefault(one.owner, []).append(share)
            self._all.append(share)
        for rows in (*self._named.values(), *self._owner.values(), self._all):
            rows.sort()
        self.count = len(self._all)

    def named(self, owner: str, name: str) -> list[int]:
        """The running times (ms) of what this owner ran under this name, shortest first."""
        return self._named.get((owner, name), [])

    def likely_ms(self, owner: str, name: str, limit_ms: int, elapsed_ms: int, pct: int) -> int:
        """How long it runs from its begin, if it has run `elapsed_ms`: such that `pct` of 100 like it would be over. At most the limit."""
        named = self.named(owner, name)
        if len(named) >= ENOUGH:
            found = _quantile(named, elapsed_ms, pct)
        else:
            shares = self._owner.get(owner, [])
            if len(shares) < ENOUGH:
                shares = self._all
            share = _quantile(shares, elapsed_ms * 1000 // max(1, limit_ms), pct) if len(shares) >= ENOUGH else None
            found = None if share is None else share * limit_ms // 1000
        return limit_ms if found is None else max(elapsed_ms + 1, min(limit_ms, found))


def _quantile(rows: list[int], above: int, pct: int) -> int | None:
    """Of the sorted rows above a value, that below which `pct` of 100 lie; None where none is above it."""
    first = bisect_right(rows, above)
    left = len(rows) - first
    return None if not left else rows[first + min(left - 1, left * pct // 100)]


class Ahead:
    """One run forward. `name_of` gives the name of a job or lease, `pct` which of the likely running times each takes.

    What it leaves out: jobs that are still to come, failures, preemptions, idle leases that are taken back.
    """

    def __init__(
        self, world: World, now_ms: int, policy: Policy, times: RunTimes, name_of: Callable[[str], str], pct: int | None
    ) -> None:
        taken = {key for lease in (*world.holdings, *world.cleaning) for key in lease.slots}
        self._times, self._name_of, self._pct = times, name_of, pct
        self._now = now_ms
        self._policy = policy
        self._ends: list[tuple[int, str]] = []
        self._asks = {ask.id: ask for ask in world.asks}
        self._after: dict[str, list[str]] = {}  # job -> asks that wait for its end
        self._left: dict[str, int] = {}  # job (or array) -> parts of it that are still to end
        self._leases: dict[str, Holding] = {}
        self._cleaning = {lease.id for lease in world.cleaning}
        self._count = 0
        holdings = tuple(replace(one, expires_ms=None, pickup_ms=None) for one in world.holdings)
        world = replace(
            world, holdings=holdings, preemptions=(),
            slots=tuple(replace(s, state="free", lease_id=None) if s.key in taken else s for s in world.slots),
            pools=tuple(replace(pool, preempt="off", idle_s=0) for pool in world.pools),
        )  # fmt: skip
        for lease in holdings:
            self._leases[lease.id] = lease
            if not (lease.lost or lease.suspended):
                heappush(self._ends, (self._end_ms(lease), lease.id))
            self._part(lease.array or lease.job_id or lease.id, 1)
        for lease in world.cleaning:
            if not lease.lost:
                heappush(self._ends, (now_ms + policy.cleaning_s * 1000, lease.id))
        for ask in world.asks:
            self._part(ask.array or ask.id, ask.count)
            for job in ask.after:
                self._after.setdefault(job, []).append(ask.id)
        self._engine = Engine(world, now_ms, policy)

    def start_of(self, ask_id: str, go_on: Callable[[], bool] = lambda: True) -> int | None:
        """When the (first part of the) ask starts; None where no known end lets it, or `go_on` said no."""
        horizon = self._now + HORIZON_MS
        for _ in range(STEPS):
            if not go_on():
                return None
            decided = self._engine.turn(self._now)
            moved = False
            for decision in decided.decisions:
                if isinstance(decision, Start):
                    if decision.ask_id == ask_id:
                        return self._now
                    self._start(self._asks[decision.ask_id], decision.slots)
                    moved = True
                elif isinstance(decision, Expire):
                    self._end(decision.lease_id)
                    moved = True
                elif isinstance(decision, GiveUp):
                    if decision.ask_id == ask_id:
                        return None
                    ask = self._asks.pop(decision.ask_id)
                    self._engine.drop(ask.id)
                    self._over(ask.array or ask.id, ask.count)
                    moved = True
            if moved:
                continue
            due = [at for at in (decided.wake_at_ms, self._ends[0][0] if self._ends else None) if at is not None]
            if not due or min(due) > horizon:
                return None
            self._now = max(self._now, min(due))
            while self._ends and self._ends[0][0] <= self._now:
                self._end(heappop(self._ends)[1])
        return None

    def _end_ms(self, lease: Holding) -> int:
        limit = max(1, lease.hard_end_ms - lease.granted_at_ms)
        if self._pct is None or lease.kind == "direct":
            return max(self._now + 1, lease.hard_end_ms)
        name = self._name_of(lease.job_id or lease.id)
        elapsed = max(0, self._now - lease.granted_at_ms)
        return max(
            self._now + 1, lease.granted_at_ms + self._times.likely_ms(lease.owner, name, limit, elapsed, self._pct)
        )

    def _start(self, ask: Ask, slots: tuple[SlotKey, ...]) -> None:
        self._count += 1
        if ask.count > 1:
            room = None if ask.array_room is None else ask.array_room - 1
            self._asks[ask.id] = replace(ask, count=ask.count - 1, array_room=room)
            self._engine.put(self._asks[ask.id])
        else:
            del self._asks[ask.id]
            self._engine.drop(ask.id)
        needs = ask.needs
        lease = Holding(
            f"ahead:{self._count}", "job" if ask.kind == "job" else "direct", ask.owner, ask.agent, ask.human, ask.pool, slots,
            self._now, self._now + ask.hours_ms, job_id=ask.id, priority=ask.priority, cpus=needs.cpus, memory_mib=needs.memory_mib,
            disk_mib=needs.disk_mib, exclusive=needs.exclusive_host, array=ask.array,
        )  # fmt: skip
        self._leases[lease.id] = lease
        self._engine.hold(lease)
        heappush(self._ends, (self._end_ms(lease), lease.id))

    def _end(self, lease_id: str) -> None:
        if lease_id in self._cleaning:
            self._cleaning.remove(lease_id)
            self._engine.let_go(lease_id)
            return
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return  # a direct lease that the engine has ended already
        self._engine.let_go(lease_id)
        self._over(lease.array or lease.job_id or lease.id, 1)
        waiting = self._asks.get(lease.array)
        if waiting is not None and waiting.array_room is not None:
            self._asks[waiting.id] = replace(waiting, array_room=waiting.array_room + 1)
            self._engine.put(self._asks[waiting.id])

    def _part(self, job: str, count: int) -> None:
        self._left[job] = self._left.get(job, 0) + count

    def _over(self, job: str, count: int) -> None:
        self._left[job] = self._left.get(job, 0) - count
        if self._left[job] > 0:
            return
        for ask_id in self._after.pop(job, ()):
            ask = self._asks.get(ask_id)
            if ask is not None:
                self._asks[ask_id] = replace(ask, after=tuple(on for on in ask.after if on != job))
                self._engine.put(self._asks[ask_id])


@dataclass(frozen=True)
class Forecast:
    """When an ask starts, in ms since the epoch: if like runs are as short as the shortest fifth, as the middle, and if all
    use their time limits. None = no known end lets it start within 30 days."""

    earliest_ms: int | None
    likely_ms: int | None
    latest_ms: int | None


def forecast(
    world: World, ask_id: str, now_ms: int, policy: Policy, times: RunTimes, name_of: Callable[[str], str], go_on: Callable[[], bool] = lambda: True
) -> Forecast:  # fmt: skip
    """The forecast for one ask of `world`. Equal input gives equal answers, but where `go_on` ends it."""
    found = [Ahead(world, now_ms, policy, times, name_of, pct).start_of(ask_id, go_on) for pct in (20, 50, None)]
    known = [at for at in found if at is not None]
    if len(known) == len(found):
        known.sort()  # shorter runs can let others pass who would come later
        return Forecast(known[0], known[1], known[2])
    return Forecast(min(known[:2], default=None), found[1], found[2])
