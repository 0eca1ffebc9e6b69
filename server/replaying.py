"""A recorded past: decided again, shown as it was, or run under other rules."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import unified_diff
from typing import Any, Final

from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.records import Tick, canonical, recanonical
from cotenant.server.deciding.world import Ask, Holding, Needs, SlotKey, World
from cotenant.server.simulating.trace import SimHost, SimJob, Trace

#: Lines of a difference that are printed.
SHOWN_LINES: Final = 20


@dataclass
class Compared:
    """What came of deciding a journal again."""

    ticks: int = 0
    decisions: int = 0
    lost: int = 0  # passes that were never written
    first_ms: int | None = None
    last_ms: int | None = None
    other_versions: dict[str, int] = field(default_factory=dict)  # version -> ticks not decided again
    differs_at_ms: int | None = None
    difference: str = ""


def compare(found: Iterable[Tick], version: str, *, any_version: bool = False) -> Compared:
    """Decide every tick again and compare the texts; ends at the first that differs.

    Ticks that another version decided are counted and left out, unless `any_version`.
    """
    out = Compared()
    for tick in found:
        out.ticks += 1
        out.lost += tick.lost
        out.first_ms = tick.at_ms if out.first_ms is None else out.first_ms
        out.last_ms = tick.at_ms
        if tick.version != version and not any_version:
            out.other_versions[tick.version] = out.other_versions.get(tick.version, 0) + 1
            continue
        recorded = recanonical(tick.decided)
        again = canonical(decide(tick.world, tick.at_ms, tick.policy))
        out.decisions += len(tick.decided["decisions"])
        if recorded != again:
            out.differs_at_ms, out.difference = tick.at_ms, _difference(tick.decided, json.loads(again))
            break
    return out


def _difference(recorded: Any, again: Any) -> str:
    """The lines of both that the other has not, one decision or booking a line; - is the record, + is now."""
    lines = unified_diff(_lines(recorded), _lines(again), "recorded", "now", n=1, lineterm="")
    found = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    more = len(found) - SHOWN_LINES
    return "\n".join([*found[:SHOWN_LINES], *([f"… and {more} lines more"] if more > 0 else [])])


def _lines(decided: Any) -> list[str]:
    out = [f"{kind} {recanonical(value)}" for kind, value in decided["decisions"]]
    out += [f"Booking {recanonical(one)}" for one in decided["bookings"]]
    return [*out, f"looks again at {decided['wake_at_ms']}"]


def shown(tick: Tick) -> dict[str, Any]:
    """The world of one tick for a person: who holds what, who waits and why."""
    world = tick.world
    decided = decide(world, tick.at_ms, tick.policy)
    cards = {slot.key: slot for slot in world.slots}
    booked = {one.ask_id: one.at_ms for one in decided.bookings}

    def places(keys: tuple[SlotKey, ...]) -> list[str]:
        return [
            f"{key[0]}/{cards[key].index}" if key in cards and key[1] != "cpu" else f"{key[0]}/{key[1]}" for key in keys
        ]

    return {
        "at_ms": tick.at_ms,
        "version": tick.version,
        "hosts": [{"host": h.name, "link": h.link, "mode": h.mode} for h in sorted(world.hosts, key=lambda h: h.name)],
        "pools": [
            {
                "pool": p.name, "cap": p.cap, "reserve": p.reserve, "order": p.order, "paused": p.paused, "draining": p.draining,
                "cards": sum(1 for s in world.slots if s.pool == p.name and s.kind == "gpu" and s.share == 0),
            }
            for p in sorted(world.pools, key=lambda p: p.name)
        ],
        "holders": [
            {
                "lease": h.id, "job": h.job_id, "owner": h.owner, "agent": h.agent, "pool": h.pool, "slots": places(h.slots),
                "since_ms": h.granted_at_ms, "hard_end_ms": h.hard_end_ms, "lost": h.lost, "draining": h.draining,
            }
            for h in sorted(world.holdings, key=lambda h: (h.granted_at_ms, h.id))
        ],
        "waiting": [
            {
                "id": a.id, "owner": a.owner, "agent": a.agent, "pool": a.pool, "priority": a.priority, "gpus": a.needs.gpus_min,
                "since_ms": a.queued_at_ms, "count": a.count, "booked_at_ms": booked.get(a.id),
                "why": [{"code": b.code, "message": b.message} for b in decided.blockers.get(a.id, ())],
            }
            for a in sorted(world.asks, key=lambda a: (a.queued_at_ms, a.id))
        ],
    }  # fmt: skip


@dataclass
class _Held:
    """One lease of the record: what it was granted for, and when its slots were given up."""

    slots: frozenset[SlotKey]
    granted_ms: int
    ask: Ask | None  # None: taken at once, without a place in the line
    lease: Holding | None = None  # None: no pass saw it between its start and its end
    ended_ms: int | None = None


@dataclass(frozen=True)
class Past:
    """What a journal says was asked for and how long it ran."""

    trace: Trace
    fleet: World  # as last seen
    begin_ms: int
    waited_ms: dict[str, int]  # by job of the trace


def recorded(found: Iterable[Tick]) -> Past:
    """What was asked for and how long it ran, from the ticks of a journal.

    Every lease is one job of the trace: asked for when its ask was made, with the ask's needs, and over when its slots were
    given up; what ran when the record begins asks then, for the rest of its time; what still runs at the end runs to the end of the record. Leases that were taken at once, without a place in the
    line, were asked for when they were granted. What still waits at the end is left out, for nobody knows how long it would run.

    Raises:
        ValueError: there is no tick in that time.
    """
    asks: dict[str, Ask] = {}
    living: list[_Held] = []
    over: list[_Held] = []
    last: Tick | None = None
    begin = 0
    for tick in found:
        if last is None:
            begin = tick.at_ms
        last = tick
        there = {frozenset(lease.slots): lease for lease in tick.world.holdings}
        still: list[_Held] = []
        waits = {ask.id for ask in tick.world.asks}
        for one in living:
            lease = there.pop(one.slots, None)
            if lease is not None and (one.lease is None or one.lease.id == lease.id):
                one.lease = lease
                still.append(one)
                continue
            if lease is not None:
                there[one.slots] = lease
            one.ended_ms = tick.at_ms
            undone = one.lease is None and one.ask is not None and one.ask.count == 1 and one.ask.id in waits
            if not undone:
                over.append(one)
        still += [_Held(slots, lease.granted_at_ms, None, lease) for slots, lease in there.items()]
        living = still
        asks = {ask.id: ask for ask in tick.world.asks}
        for kind, value in tick.decided["decisions"]:
            if kind == "Start" and value["ask_id"] in asks:
                slots = frozenset((key[0], key[1], key[2]) for key in value["slots"])
                living.append(_Held(slots, tick.at_ms, asks[value["ask_id"]]))
    if last is None:
        raise ValueError("the journal has no tick in that time")
    jobs: list[SimJob] = []
    waited: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for one in [*over, *living]:
        job = _job(one, numbers, begin, last.at_ms)
        jobs.append(job)
        waited[job.id] = max(0, one.granted_ms - begin - job.submit_ms)
    jobs.sort(key=lambda job: (job.submit_ms, job.id))
    by_host = {host.name: [s for s in last.world.slots if s.host == host.name] for host in last.world.hosts}
    hosts = tuple(
        SimHost(name, len({s.uuid for s in slots if s.kind == "gpu"}), places=0)
        for name, slots in sorted(by_host.items())
    )
    notes = (f"{len(jobs)} leases that were recorded, on the fleet as it was last seen",)
    return Past(Trace("journal", hosts, tuple(jobs), notes), last.world, begin, waited)


def _job(one: _Held, numbers: dict[str, int], begin_ms: int, end_ms: int) -> SimJob:
    ask, lease = one.ask, one.lease
    name = (lease.job_id or lease.id) if lease is not None else ask.id if ask is not None else ""
    number = numbers[name] = numbers.get(name, 0) + 1
    # of what ran already when the record begins only the rest is in it
    runs = max(1, (end_ms if one.ended_ms is None else one.ended_ms) - max(one.granted_ms, begin_ms))
    if ask is not None:
        asked, needs, hours = ask.queued_at_ms, ask.needs, ask.hours_ms
        who = (ask.owner, ask.agent, ask.human, ask.priority, ask.pool)
    else:
        assert lease is not None
        gpus = len({key[1] for key in one.slots if key[1] != "cpu"})
        asked, hours = one.granted_ms, lease.hard_end_ms - lease.granted_at_ms
        needs = Needs(gpus_min=gpus, gpus_max=gpus, cpus=lease.cpus, memory_mib=lease.memory_mib)
        who = (lease.owner, lease.agent, lease.human, lease.priority, lease.pool)
    stops = lease is not None and lease.preemptible and lease.resumable
    return SimJob(
        name if number == 1 else f"{name}~{number}", max(0, asked - begin_ms), runs, max(runs, hours), needs, *who, stops
    )  # fmt: skip
