"""Idleness: whose cards do nothing while somebody waits for them.

Judged by signs of work (log lines, checkpoints, what the cards do), never by low utilisation alone, and never where nothing
was observed. The holder is told first; taking back comes after another time, and only while somebody still waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from cotenant.server.deciding.preempt import HELPED, without
from cotenant.server.deciding.world import Ask, Holding, Notice, PoolRules, Reclaim, SlotKey, Wait, World

Fits: TypeAlias = Callable[[World, Ask], tuple[SlotKey, ...]]

#: Asks of a pool that are looked at, in their order, for whom an idle lease would make room.
ASKS = 3


def judge(
    world: World, now_ms: int, asks: Mapping[str, Ask], waits: Iterable[Wait], fits: Fits
) -> tuple[list[Notice | Reclaim], int | None]:
    """(notices and reclaims by lease, when to look again or None). `world` is as it stands after the starts of this pass."""
    pools = {pool.name: pool for pool in world.pools if pool.idle_s > 0}
    if not pools:
        return [], None
    first: dict[str, list[Ask]] = {}
    for wait in waits:
        ask = asks[wait.ask_ids[0]]
        if ask.pool in pools and all(blocker.code in HELPED for blocker in wait.blockers):
            first.setdefault(ask.pool, []).append(ask)
    found: list[Notice | Reclaim] = []
    due: list[int] = []
    spoken = {name for one in world.preemptions for name in one.victims}
    for lease in sorted(world.holdings, key=lambda one: one.id):
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
        waiting = _helped(world, lease, first[lease.pool][:ASKS], fits)
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


def _helped(world: World, lease: Holding, asks: list[Ask], fits: Fits) -> tuple[str, ...]:
    after = without(world, [lease])
    return tuple(ask.id for ask in asks if fits(after, ask))
