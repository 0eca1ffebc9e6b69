"""Idleness: whose cards do nothing while somebody waits for them.

Judged by signs of work (log lines, checkpoints, what the cards do), never by low utilisation alone, and never where nothing
was observed. The holder is told first; taking back comes after another time, and only while somebody still waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cotenant.server.deciding.preempt import HELPED
from cotenant.server.deciding.trials import Trials
from cotenant.server.deciding.world import Ask, Holding, Notice, PoolRules, Preemption, Reclaim, Wait

#: Asks of a pool that are looked at, in their order, for whom an idle lease would make room.
ASKS = 3


def judge(
    trials: Trials, asks: Mapping[str, Ask], waits: Iterable[Wait], preemptions: Iterable[Preemption]
) -> tuple[list[Notice | Reclaim], int | None]:
    """(notices and reclaims by lease, when to look again or None). `trials` is of the world after the starts of this pass."""
    now_ms = trials.mirror.now_ms
    pools = {name: pool for name, pool in trials.mirror.pools.items() if pool.idle_s > 0}
    if not pools:
        return [], None
    first: dict[str, dict[tuple[object, ...], Ask]] = {}  # one of each asker and wish: others are helped alike
    for wait in waits:
        ask = asks[wait.ask_ids[0]]
        if ask.pool in pools and all(blocker.code in HELPED for blocker in wait.blockers):
            first.setdefault(ask.pool, {}).setdefault((ask.owner, ask.agent, ask.human, ask.own_cap, ask.needs), ask)
    found: list[Notice | Reclaim] = []
    due: list[int] = []
    spoken = {name for one in preemptions for name in one.victims}
    for lease in sorted(trials.mirror.living.values(), key=lambda one: one.id):
        pool = pools.get(lease.pool)
        if pool is None or lease.id in spoken or lease.pool not in first:
            continue
        since = idle_since_ms(lease)
        if since is None:
            continue
        told = lease.idle_notice_ms if lease.idle_notice_ms is not None and lease.idle_notice_ms >= since else None
        at = since + pool.idle_s * 1000 if told is None else told + pool.idle_grace_s * 1000
        if told is not None and not may_reclaim(lease, pool):
            continue
        if at > now_ms:
            due.append(at)
            continue
        waiting = _helped(trials, lease, list(first[lease.pool].values())[:ASKS])
        if not waiting:
            continue
        idle_s = (now_ms - since) // 1000
        if told is None:
            found.append(Notice(lease.id, idle_s, waiting))
            due.append(now_ms + pool.idle_grace_s * 1000)
        else:
            found.append(Reclaim(lease.id, idle_s))
    return found, min(due, default=None)


def idle_since_ms(lease: Holding) -> int | None:
    """Since when nothing was seen of a lease's work; None where that cannot be said."""
    if lease.progress_ms is None or lease.lost or lease.stopping or lease.suspended or lease.pickup_ms is not None:
        return None
    if not any(key[1] != "cpu" for key in lease.slots):
        return None  # what a program without a card does shows nowhere
    return max(lease.progress_ms, lease.granted_at_ms)


def may_reclaim(lease: Holding, pool: PoolRules) -> bool:
    """Whether an idle lease is taken back at all: direct ones, jobs only where the pool says so."""
    return lease.kind == "direct" or pool.idle_jobs


def _helped(trials: Trials, lease: Holding, asks: list[Ask]) -> tuple[str, ...]:
    return tuple(ask.id for ask in asks if trials.fits(ask, [lease]))
