"""What would happen to one ask: why it waits, where it would start, whether it ever could, what may be taken now.

All of it is the pass of `decide` over the same world, so that no door tells another story than the loop acts on.
"""

from __future__ import annotations

from dataclasses import replace

from cotenant.server.deciding import reasons
from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.hosts import EVERYTHING
from cotenant.server.deciding.mirror import Mirror
from cotenant.server.deciding.passes import Pass
from cotenant.server.deciding.world import (
    UNITS_PER_CARD,
    Ask,
    Blocker,
    Needs,
    Policy,
    SlotKey,
    Start,
    World,
)


def _with(world: World, ask: Ask) -> World:
    return replace(world, asks=(*(other for other in world.asks if other.id != ask.id), ask))


def outlook(
    world: World, ask: Ask, now_ms: int, policy: Policy
) -> tuple[tuple[SlotKey, ...] | None, tuple[Blocker, ...]]:
    """(the slots that `ask` gets if it is asked now, or None; why it waits, the main reason first) from one pass.

    `ask` may be one of the world (it then replaces the one with its id) or a hypothetical one; other asks take their
    turns before and after it as in `decide`. Nothing is taken.
    """
    decided = decide(_with(world, ask), now_ms, policy)
    for decision in decided.decisions:
        if isinstance(decision, Start) and decision.ask_id == ask.id:
            return decision.slots, ()
    return None, decided.blockers.get(ask.id, ())


def blockers(world: World, ask: Ask, now_ms: int, policy: Policy) -> tuple[Blocker, ...]:
    """Why `ask` does not start now, the main reason first; empty when it starts. See `outlook`."""
    return outlook(world, ask, now_ms, policy)[1]


def would_start(world: World, ask: Ask, now_ms: int, policy: Policy) -> tuple[SlotKey, ...] | None:
    """The slots that `ask` gets if it is asked now, or None when it waits. See `outlook`."""
    return outlook(world, ask, now_ms, policy)[0]


def could_ever(world: World, ask: Ask) -> Blocker | None:
    """Why `ask` could not start even if nothing were used and every host were well, or None when it could.

    A cap that it is above by itself (``quota_*``, ``reserve``, ``jobs_at_once``), else ``no_such_gpu`` with the need
    that no host meets. Hosts that are down, drained or not classified count as there.
    """
    state = Pass(Mirror(world, 0, Policy()))
    shape = state.fleet.shape(ask.pool, ask.needs)
    limit = state.mirror.limits(ask).ever(shape.least_units)
    if limit is not None:
        return limit.refuse(shape.least_units)
    if state.fleet.find(shape, ignored=EVERYTHING) is None:
        return reasons.never(state.fleet, shape)
    return None


def room_now(world: World, owner: str, agent: str, human: bool, pool: str, own_cap: int = 0) -> int:
    """Whole cards that this caller may take now in `pool`, maybe on several hosts; what others wait for is not taken off.

    The least of the pool's cap, the agents' part of it, the owner's and the agent's caps and the free whole cards of
    hosts that take work; 0 when the queue is paused or draining, or a cap on jobs at once or GPU-hours is reached.
    """
    needs = Needs()
    ask = Ask("", "claim", owner, agent, human, pool, needs, 0, 0, 0, own_cap=own_cap)
    state = Pass(Mirror(world, 0, Policy()))
    limits = state.mirror.limits(ask)
    if reasons.of_queue(state.mirror.pool(pool)) or limits.jobs_reached() or limits.hours_used_up():
        return 0
    free = 0
    for seat in state.fleet.shape(pool, needs).seats:
        if not seat.host.closed(needs, 0):
            free += (seat.host.free & seat.cards).bit_count()
    return min(free, limits.room() // UNITS_PER_CARD)
