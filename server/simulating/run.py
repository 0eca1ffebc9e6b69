"""One simulation: events on a virtual clock, every pass by the decision core itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.engine import Engine
from cotenant.server.deciding.order import Order
from cotenant.server.deciding.world import (
    UNITS_PER_CARD,
    AgentRules,
    Ask,
    Blocker,
    GiveUp,
    Holding,
    OwnerRules,
    Policy,
    PoolRules,
    Preempt,
    Preemption,
    Reservation,
    SlotKey,
    Spent,
    Start,
    Withdraw,
    World,
)
from cotenant.server.simulating.past import Past
from cotenant.server.simulating.trace import SimJob, Trace

#: Time 0 of a trace: a Monday, 00:00 UTC, so that start windows mean something.
BEGIN_MS = 1_767_571_200_000
#: How old the sums of past use may be, as in the server.
SPENT_EVERY_MS = 60_000
#: How long a victim of a preemption takes to save, where its grace is not shorter.
SAVE_MS = 30_000
#: Wake-ups in a row at which nothing starts while nothing runs and nothing is to come: what waits then waits for ever.
IDLE_WAKES = 500

_ARRIVE, _END, _STOP, _WAKE = range(4)
Progress = Callable[[int, int], None]
"""Called with (events so far, events expected)."""


@dataclass
class Stay:
    """A job on its slots; a job that was preempted has several. Times in ms of the simulation's clock."""

    job: SimJob
    number: int
    queued_ms: int
    begun_ms: int
    slots: tuple[SlotKey, ...]
    units: int
    lease: Holding
    ended_ms: int = 0
    why: str = ""  # done, limit, preempted
    backfilled: bool = False


@dataclass
class Outcome:
    """What came of a simulation."""

    trace: Trace
    begin_ms: int
    stays: list[Stay] = field(default_factory=list)  # in the order of their ends
    waiting: dict[str, tuple[Blocker, ...]] = field(default_factory=dict)  # job id -> why it never started
    given_up: dict[str, str] = field(default_factory=dict)
    queued_ms: dict[str, int] = field(default_factory=dict)  # of what waits still
    events: int = 0
    passes: int = 0
    preempted: int = 0
    shares: dict[tuple[str, str], int] = field(
        default_factory=dict
    )  # (host, uuid) -> into how many its card is divided
    index: dict[tuple[str, str], int] = field(default_factory=dict)


class Simulation:
    """Runs `trace` under `pools` and `owners`. Equal input, equal outcome. `fleet`: its hosts and slots instead, all well.

    A job's slots are free the moment it ends. It ends when its work is done, at its time limit at the latest. A victim of a
    preemption saves for at most `SAVE_MS` after the notice, stops, loses no work, and goes back to the queue.
    """

    def __init__(
        self,
        trace: Trace,
        pools: tuple[PoolRules, ...],
        *,
        owners: tuple[OwnerRules, ...] = (),
        agents: tuple[AgentRules, ...] = (),
        reservations: tuple[Reservation, ...] = (),
        policy: Policy | None = None,
        fleet: World | None = None,
        begin_ms: int = BEGIN_MS,
        progress: Progress | None = None,
    ) -> None:
        self._policy = policy or Policy()
        self._progress = progress
        if fleet is None:
            slots = tuple(slot for host in trace.hosts for slot in host.slots())
            views = tuple(host.view() for host in trace.hosts)
        else:
            slots = tuple(replace(slot, state="free", lease_id=None, reason="") for slot in fleet.slots)
            views = tuple(replace(view, link="up", mode="ready") for view in fleet.hosts)
        self._units = {slot.key: slot.units for slot in slots}
        self._base = World(
            hosts=views, slots=slots, pools=pools, owners=owners, agents=agents,
            reservations=reservations,
        )  # fmt: skip
        self._pools = {pool.name: pool for pool in pools}
        self._ordered = any(pool.order == "fairshare" for pool in pools) or _counts_hours(pools, owners, agents)
        self._past = Past({pool.name: pool.half_life_h for pool in pools}, begin_ms)
        self._spent_at_ms = -SPENT_EVERY_MS
        self._spent: tuple[Spent, ...] = ()
        self._jobs = {job.id: job for job in trace.jobs}
        self._queue: dict[str, Ask] = {}
        self._undecided = False
        self._engine = Engine(self._base, begin_ms, self._policy)
        self._queued: dict[str, int] = {}
        self._left: dict[str, int] = {}  # work that a preempted job still has, ms
        self._numbers: dict[str, int] = {}
        self._running: dict[str, Stay] = {}  # lease -> stay
        self._preemptions: dict[str, Preemption] = {}
        self._heap: list[tuple[int, int, int, str]] = []
        self._count = 0
        self._wake_ms: int | None = None
        self._idle_wakes = 0
        self.outcome = Outcome(trace, begin_ms)
        self.outcome.shares = {(s.host, s.uuid): s.shares for s in slots}
        self.outcome.index = {(s.host, s.uuid): s.index for s in slots if s.index is not None}
        for job in trace.jobs:
            self._push(begin_ms + job.submit_ms, _ARRIVE, job.id)

    def _push(self, at_ms: int, kind: int, what: str) -> None:
        self._count += 1
        heappush(self._heap, (at_ms, kind if kind == _WAKE else 0, self._count, f"{kind}{what}"))

    def run(self) -> Outcome:
        """To the end: until nothing runs and nothing that waits can start any more."""
        heap, out, now = self._heap, self.outcome, self.outcome.begin_ms
        while heap:
            now = heap[0][0]
            while heap and heap[0][0] == now:
                what = heappop(heap)[3]
                self._happen(int(what[0]), what[1:], now)
            if self._undecided or self._due(now) or self._preemptions:
                self._decide(now)
            if self._idle_wakes > IDLE_WAKES and not self._running:
                break
        if self._queue:
            final = decide(self._world(), now, self._policy)
            for ask_id, why in final.blockers.items():
                out.waiting[ask_id] = why
                out.queued_ms[ask_id] = self._queued[ask_id]
        return out

    def _due(self, now: int) -> bool:
        return self._wake_ms is not None and self._wake_ms <= now

    def _happen(self, kind: int, what: str, now: int) -> None:
        if kind == _WAKE:
            if self._running or any(h[3][0] != str(_WAKE) for h in self._heap[:1]):
                self._idle_wakes = 0
            else:
                self._idle_wakes += 1
            return
        out = self.outcome
        if kind == _ARRIVE:
            job = self._jobs[what]
            self._queued[job.id] = now
            self._put(job, now, resumed=False)
        else:
            stay = self._running.get(what)
            if stay is None:
                return  # it was preempted before its end, or ended before it was to stop
            if kind == _STOP and not any(what in one.victims for one in self._preemptions.values()):
                return  # withdrawn
            self._end(stay, now, preempted=kind == _STOP)
        out.events += 1
        if self._progress is not None and out.events % 256 == 0:
            self._progress(out.events, 2 * len(self._jobs))

    def _put(self, job: SimJob, now: int, *, resumed: bool) -> None:
        ask = self._queue[job.id] = Ask(
            job.id, "job", job.owner, job.agent, job.human, job.pool, job.needs, job.priority, self._queued[job.id], job.hours_ms,
            resumed=resumed, default_hours=job.default_hours, not_before_ms=job.after_ms and self.outcome.begin_ms + job.after_ms,
        )  # fmt: skip
        if self._engine.put(ask):
            self._undecided = True

    def _drop(self, job_id: str) -> None:
        del self._queue[job_id]
        self._engine.drop(job_id)

    def _end(self, stay: Stay, now: int, *, preempted: bool) -> None:
        del self._running[stay.lease.id]
        stay.ended_ms = now
        job = stay.job
        self._past.end((job.owner, job.agent, job.pool), stay.units, stay.begun_ms, now)
        self._engine.let_go(stay.lease.id)
        left = self._left.get(job.id, job.runs_ms) - (now - stay.begun_ms)
        self.outcome.stays.append(stay)
        if preempted:
            stay.why = "preempted"
            self.outcome.preempted += 1
            self._left[job.id] = max(1, left)
            self._put(job, now, resumed=True)
        else:
            stay.why = "limit" if left > 0 else "done"
        self._undecided = True

    def _world(self) -> World:
        base = self._base
        return World(
            hosts=base.hosts, slots=base.slots, pools=base.pools, owners=base.owners, agents=base.agents,
            reservations=base.reservations, holdings=tuple([stay.lease for stay in self._running.values()]),
            asks=tuple(self._queue.values()),
            preemptions=tuple(self._preemptions.values()), spent=self._spent,
        )  # fmt: skip

    def _decide(self, now: int) -> None:
        if self._ordered and now - self._spent_at_ms >= SPENT_EVERY_MS:
            self._spent_at_ms, self._spent = now, self._past.spent(now)
            self._engine.spend(self._spent)
        self._undecided = False
        if not self._queue and not self._preemptions:
            self._wake_ms = None
            return
        self._engine.preempt(tuple(self._preemptions.values()))
        decided = self._engine.turn(now)
        self.outcome.passes += 1
        booked = {self._pool_of(one.ask_id): one.ask_id for one in decided.bookings}
        order: Order | None = None
        for decision in decided.decisions:
            if isinstance(decision, Start):
                ask = self._queue[decision.ask_id]
                first = booked.get(ask.pool)
                passed = False
                if first is not None:
                    order = order or Order(World(pools=self._base.pools, spent=self._spent), now)
                    passed = order.key(ask) > order.key(self._queue[first])
                self._start(ask, decision.slots, now, passed)
            elif isinstance(decision, GiveUp):
                self._drop(decision.ask_id)
                self.outcome.given_up[decision.ask_id] = decision.why
            elif isinstance(decision, Preempt):
                self._preempt(decision, now)
            elif isinstance(decision, Withdraw):
                self._preemptions.pop(decision.preemption_id, None)
        if decided.wake_at_ms is not None and decided.wake_at_ms != self._wake_ms:
            self._push(decided.wake_at_ms, _WAKE, "")
        self._wake_ms = decided.wake_at_ms

    def _pool_of(self, ask_id: str) -> str:
        return self._jobs[ask_id].pool

    def _start(self, ask: Ask, slots: tuple[SlotKey, ...], now: int, passed: bool) -> None:
        job = self._jobs[ask.id]
        number = self._numbers[job.id] = self._numbers.get(job.id, 0) + 1
        lease = Holding(
            f"{job.id}#{number}", "job", job.owner, job.agent, job.human, job.pool, slots, now, now + job.hours_ms, job_id=job.id,
            priority=job.priority, cpus=job.needs.cpus, memory_mib=job.needs.memory_mib, disk_mib=job.needs.disk_mib,
            exclusive=job.needs.exclusive_host, preemptible=job.preemptible, resumable=job.preemptible,
        )  # fmt: skip
        units = sum(self._units[key] for key in slots)
        stay = Stay(job, number, ask.queued_at_ms, now, slots, units, lease, backfilled=passed)
        self._running[lease.id] = stay
        self._drop(ask.id)
        self._engine.hold(lease)
        self._idle_wakes = 0
        self._past.start((job.owner, job.agent, job.pool), units, now)
        self._push(now + min(self._left.get(job.id, job.runs_ms), job.hours_ms), _END, lease.id)
        for one in [one for one in self._preemptions.values() if one.ask_id == ask.id]:
            del self._preemptions[one.id]

    def _preempt(self, decision: Preempt, now: int) -> None:
        self._count += 1
        pool = self._pool_of(decision.ask_id)
        one = Preemption(f"p{self._count:09d}", pool, decision.ask_id, decision.victims, decision.slots, now)
        self._preemptions[one.id] = one
        save_ms = min(SAVE_MS, self._pools[pool].grace_s * 1000)
        for victim in decision.victims:
            self._push(now + save_ms, _STOP, victim)


def _counts_hours(pools: tuple[PoolRules, ...], owners: tuple[OwnerRules, ...], agents: tuple[AgentRules, ...]) -> bool:
    hours = [h for pool in pools for h in (pool.gpu_hours, pool.owner_gpu_hours, pool.agent_gpu_hours)]
    hours += [one.gpu_hours for one in owners] + [one.gpu_hours for one in agents]
    return any(h is not None for h in hours)


def part_of_card(outcome: Outcome, key: SlotKey) -> float:
    """What one slot is of its card; 0 for a place without one."""
    return 0.0 if key[1] == "cpu" else 1 / outcome.shares[key[0], key[1]]


def cards_of(units: int) -> float:
    """Units of 1/840 as cards."""
    return units / UNITS_PER_CARD
