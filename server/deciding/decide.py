"""One pass: which asks start, which wait and why, which leases end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from cotenant.server.deciding import idle, preempt, reasons
from cotenant.server.deciding.leases import expired, next_due_ms
from cotenant.server.deciding.mirror import Mirror
from cotenant.server.deciding.order import in_order
from cotenant.server.deciding.passes import Pass
from cotenant.server.deciding.trials import Trials
from cotenant.server.deciding.world import (
    Ask,
    Blocker,
    Decided,
    Decision,
    GiveUp,
    Needs,
    Policy,
    Preemption,
    Start,
    Wait,
    World,
)

_EQUAL = attrgetter(
    "owner",
    "agent",
    "human",
    "pool",
    "priority",
    "held",
    "not_before_ms",
    "not_before_why",
    "own_cap",
    "after",
    "hours_ms",
    "array",
)
"""What makes two asks with equal needs wait for the same reasons."""
_GROUP = attrgetter("kind", "needs", "resumed", "count", "array_room", "not_after_ms")


def equal_key(ask: Ask) -> tuple[object, ...]:
    """What decides over an ask besides its id and its time: asks with one key are answered alike once the first waits."""
    return (*_GROUP(ask), *_EQUAL(ask))


def decide(world: World, now_ms: int, policy: Policy) -> Decided:
    """What should change in `world` at `now_ms`; touches nothing.

    Decisions stand in the order: ends of direct leases by id, what becomes of preemptions under way, starts in the order
    of the queue, waits in the order of their first ask, new preemptions, idle leases. Every ask is in exactly one GiveUp, Start or Wait;
    an array is in a Start for each element that starts and in a Wait if others do not. Equal worlds give equal answers,
    whatever the order of their tuples. Slots of a lease that ends here stay taken: they are free once the host has
    reported them clean.

    An ask starts with the most cards that fit now between its minimum and maximum, on the hosts and under the caps of its
    pool. For the first of a pool that does not fit, slots and room under the cap are kept from the time on at which known
    ends give them; those behind it start beside them, or on them if they are over by then (backfill). Without backfill a
    pool is strict: an ask that waits for cards in use keeps those behind it off every slot it could use.
    """
    due_ms, ends = next_due_ms(world, now_ms), expired(world.holdings, now_ms)
    late = sorted(
        (a for a in world.asks if a.not_after_ms is not None and a.not_after_ms <= now_ms), key=lambda a: a.id
    )
    if late:
        world = replace(world, asks=tuple(a for a in world.asks if a.not_after_ms is None or a.not_after_ms > now_ms))
    given_up = [GiveUp(ask.id, reasons.window_closed(ask)) for ask in late]

    mirror = Mirror(world, now_ms, policy)
    state = Pass(mirror)
    trials = Trials(mirror, state)
    asks_by_id = {ask.id: ask for ask in world.asks} if world.preemptions else {}
    of_preemptions, met = preempt.keep(trials, state, world.preemptions, asks_by_id)
    if met:
        world = replace(world, asks=tuple(ask for ask in world.asks if ask.id not in met))
    if not world.asks:
        return Decided((*ends, *given_up, *of_preemptions), due_ms, {})
    needs_number: dict[int, int] = {}  # by identity: asks often share their Needs, and hashing one is slow
    numbers: dict[Needs, int] = {}
    waits: dict[tuple[object, ...], tuple[list[str], tuple[Blocker, ...]]] = {}
    starts: list[Decision] = []
    last_needs: Needs | None = None
    last_equal: tuple[object, ...] = ()
    wait: tuple[list[str], tuple[Blocker, ...]] | None = None
    asks = in_order(world, now_ms)
    for ask, equal in zip(asks, map(_EQUAL, asks), strict=True):
        needs = ask.needs
        if wait is not None and needs is last_needs and equal == last_equal:
            wait[0].append(ask.id)  # the usual case of a long queue, without a look at the table
            continue
        last_needs, last_equal = needs, equal
        number = needs_number.get(id(needs))
        if number is None:
            number = needs_number[id(needs)] = numbers.setdefault(needs, len(numbers))
        key = (number, equal)
        wait = waits.get(key)
        if wait is None:
            why: tuple[Blocker, ...] = ()
            for _ in range(ask.count):
                keys, why = state.answer(ask)
                if not keys:
                    break
                starts.append(Start(ask.id, ask.kind, keys))
            else:
                continue
            # Nothing comes free within a pass, so what blocks the first of equal asks blocks the rest.
            wait = waits[key] = ([], why)
        wait[0].append(ask.id)
    blockers: dict[str, tuple[Blocker, ...]] = {}
    for ids, why in waits.values():
        blockers.update(dict.fromkeys(ids, why))
    waiting = [Wait(tuple(ids), why) for ids, why in waits.values()]
    bookings = tuple(state.bookings[pool] for pool in sorted(state.bookings))
    takings, again_ms = takings_for(trials, {ask.id: ask for ask in world.asks}, waiting, world.preemptions)
    return Decided(
        decisions=(*ends, *given_up, *of_preemptions, *starts, *waiting, *takings),
        wake_at_ms=min((at for at in (due_ms, again_ms) if at is not None), default=None),
        blockers=blockers,
        bookings=bookings,
    )


def takings_for(
    trials: Trials, asks: Mapping[str, Ask], waits: Sequence[Wait], preemptions: Sequence[Preemption]
) -> tuple[list[Decision], int | None]:
    """Whom to stop for asks that do not fit, who is idle meanwhile, and when to look again: see `preempt`, `idle`.

    `waits` in the order in which the asks were looked at. The claims of the pass are dropped.
    """
    mirror = trials.mirror
    if not waits or all(pool.preempt == "off" and not pool.idle_s for pool in mirror.pools.values()):
        return [], None
    mirror.fleet.drop_claims()
    chosen, later = preempt.choose(trials, asks, waits, preemptions)
    idlers, again = idle.judge(trials, asks, waits, preemptions)
    return [*chosen, *idlers], min((at for at in (later, again) if at is not None), default=None)
