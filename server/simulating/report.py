"""What a simulation says: figures, a plot-ready record, and the schedule itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cotenant.server.simulating.run import Outcome, Stay, cards_of, part_of_card

#: At most so many points in a plotted line.
POINTS = 600


def schedule(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """One record for each stay of a job on cards, and one for each job that never came to any, with its blockers.

    Seconds from the beginning. The second and later stays of a preempted job are named JOB#2, JOB#3 …, each submitted when
    the one before it was stopped. Jobs without a card have no slots.
    """
    begin = outcome.begin_ms
    stopped: dict[str, int] = {}
    for stay in sorted(outcome.stays, key=lambda s: (s.begun_ms, s.lease.id)):
        job = stay.job
        yield {
            "job": job.id if stay.number == 1 else f"{job.id}#{stay.number}",
            "owner": job.owner,
            "priority": job.priority,
            "submit_s": _s(stopped.get(job.id, stay.queued_ms) - begin),
            "start_s": _s(stay.begun_ms - begin),
            "end_s": _s(stay.ended_ms - begin),
            "slots": [
                {"gpu": f"{host}/{outcome.index[host, uuid]}", "share": part_of_card(outcome, (host, uuid, share))}
                for host, uuid, share in stay.slots
                if uuid != "cpu"
            ],
        }
        stopped[job.id] = stay.ended_ms
    started = {stay.job.id for stay in outcome.stays}
    jobs = {job.id: job for job in outcome.trace.jobs}
    for job_id, blockers in sorted(outcome.waiting.items()):
        yield {
            "job": f"{job_id}#again" if job_id in started else job_id,
            "owner": jobs[job_id].owner,
            "priority": jobs[job_id].priority,
            "submit_s": _s(stopped.get(job_id, outcome.queued_ms[job_id]) - begin),
            "start_s": None,
            "end_s": None,
            "slots": [],
            "blockers": [{"code": b.code, "message": b.message} for b in blockers],
        }
    for job_id, why in sorted(outcome.given_up.items()):
        yield {
            "job": job_id, "owner": jobs[job_id].owner, "priority": jobs[job_id].priority, "submit_s": _s(jobs[job_id].submit_ms),
            "start_s": None, "end_s": None, "slots": [], "blockers": [{"code": "start_window", "message": why}],
        }  # fmt: skip


def summary(outcome: Outcome) -> dict[str, Any]:
    """Figures: waits of all that started (s), by asker, owner and priority, use of the cards while jobs arrived, counts."""
    first = [stay for stay in outcome.stays if stay.number == 1]
    trace = outcome.trace
    begin = outcome.begin_ms + (trace.jobs[0].submit_ms if trace.jobs else 0)
    until = outcome.begin_ms + (trace.jobs[-1].submit_ms if trace.jobs else 0)
    used = sum(max(0, min(s.ended_ms, until) - max(s.begun_ms, begin)) * s.units for s in outcome.stays)
    whole = (until - begin) * trace.cards
    return {
        "trace": trace.source,
        "notes": list(trace.notes),
        "hosts": len(trace.hosts),
        "cards": trace.cards,
        "jobs": len(trace.jobs),
        "started": len(first),
        "never_started": len(outcome.waiting) + len(outcome.given_up),
        "ended_at_limit": sum(1 for stay in outcome.stays if stay.why == "limit"),
        "backfilled": sum(1 for stay in outcome.stays if stay.backfilled),
        "preempted": outcome.preempted,
        "events": outcome.events,
        "passes": outcome.passes,
        "utilisation": round(cards_of(used) / whole, 4) if whole else None,
        "gpu_hours": round(sum(cards_of(s.units) * (s.ended_ms - s.begun_ms) for s in outcome.stays) / 3_600_000, 1),
        "end_s": _s(max((s.ended_ms for s in outcome.stays), default=outcome.begin_ms) - outcome.begin_ms),
        "wait_s": waits([stay.begun_ms - stay.queued_ms for stay in first]),
        "by_asker": _by(first, lambda stay: "people" if stay.job.human else "agents"),
        "by_owner": _by(first, lambda stay: stay.job.owner),
        "by_priority": _by(first, lambda stay: str(stay.job.priority)),
        "reasons": _reasons(outcome),
    }


def waits(found_ms: list[int]) -> dict[str, Any]:
    """Mean, median, 95th percentile (the nearest rank below) and longest, in seconds; None where there is none."""
    if not found_ms:
        return {"count": 0, "mean": None, "p50": None, "p95": None, "max": None}
    ordered = sorted(found_ms)
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "mean": round(sum(ordered) / len(ordered) / 1000, 1),
        "p50": _s(ordered[last * 50 // 100]),
        "p95": _s(ordered[last * 95 // 100]),
        "max": _s(ordered[-1]),
    }


def _by(stays: list[Stay], of: Callable[[Stay], str]) -> dict[str, Any]:
    groups: dict[str, list[int]] = {}
    for stay in stays:
        groups.setdefault(of(stay), []).append(stay.begun_ms - stay.queued_ms)
    return {name: waits(groups[name]) for name in sorted(groups)}


def _reasons(outcome: Outcome) -> dict[str, int]:
    """The main blockers of what never started, with how many jobs each."""
    found: dict[str, int] = {}
    for blockers in outcome.waiting.values():
        if blockers:
            found[blockers[0].code] = found.get(blockers[0].code, 0) + 1
    return dict(sorted(found.items()))


def plots(outcome: Outcome) -> dict[str, Any]:
    """Lines to draw: cards in use and jobs waiting over time, and the waits by quantile. Columns of equal length."""
    moves: list[tuple[int, int, int]] = []  # (when, units, jobs that wait)
    for stay in outcome.stays:
        moves.append((stay.begun_ms, stay.units, -1))
        moves.append((stay.ended_ms, -stay.units, 1 if stay.why == "preempted" else 0))
        if stay.number == 1:
            moves.append((stay.queued_ms, 0, 1))
    moves += [(queued, 0, 1) for job, queued in outcome.queued_ms.items()]
    moves.sort()
    t: list[int] = []
    used: list[float] = []
    waiting: list[int] = []
    units = queue = 0
    for at_ms, change, queued in moves:
        units, queue = units + change, queue + queued
        if t and t[-1] == at_ms:
            used[-1], waiting[-1] = cards_of(units), queue
        else:
            t.append(at_ms)
            used.append(cards_of(units))
            waiting.append(queue)
    step = max(1, -(-len(t) // POINTS))
    ordered = sorted(s.begun_ms - s.queued_ms for s in outcome.stays if s.number == 1)
    last = len(ordered) - 1
    return {
        "load": {
            "t_s": [_s(at - outcome.begin_ms) for at in t[::step]],
            "cards_used": [round(value, 3) for value in used[::step]],
            "waiting": waiting[::step],
        },
        "waits": {
            "quantile": [q / 100 for q in range(101)] if ordered else [],
            "wait_s": [_s(ordered[last * q // 100]) for q in range(101)] if ordered else [],
        },
    }


def _s(ms: int) -> float | int:
    return ms // 1000 if ms % 1000 == 0 else ms / 1000
