"""One pass: which asks start, which wait and why, which leases end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter

from cotenant.server.deciding import caps, preempt, reasons
from cotenant.server.deciding.fit import Fleet
from cotenant.server.deciding.hosts import SHARED
from cotenant.server.deciding.leases import expired, next_due_ms
from cotenant.server.deciding.order import Line, in_order
from cotenant.server.deciding.shape import Shape
from cotenant.server.deciding.usage import Use
from cotenant.server.deciding.world import (
    Ask,
    Blocker,
    Decided,
    Decision,
    Needs,
    Policy,
    PoolRules,
    Preempt,
    SlotKey,
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
    "array",
)
"""What makes two asks with equal needs wait for the same reasons."""
_GROUP = attrgetter("kind", "needs", "resumed", "hours_ms")


def equal_key(ask: Ask) -> tuple[object, ...]:
    """What decides over an ask besides its id and its time: asks with one key are answered alike once the first waits."""
    return (*_GROUP(ask), *_EQUAL(ask))


_OWN = ("quota_owner", "quota_agent")


class Pass:
    """The state of one pass: what is left after the asks that were looked at so far."""

    def __init__(self, world: World, now_ms: int, policy: Policy) -> None:
        self.now_ms = now_ms
        self.use = Use(world)
        self.fleet = Fleet(world, policy, now_ms)
        self._pools = {pool.name: pool for pool in world.pools}
        self._owners = {owner.owner: owner for owner in world.owners}
        self._limits: dict[tuple[str, str, bool, str, int], caps.Limits] = {}
        self._lines: defaultdict[str, Line] = defaultdict(Line)
        self._rooms: dict[str, int] = {}  # array -> elements that may still start beside those that run

    def room_of(self, ask: Ask) -> int | None:
        """How many more elements of the ask's array may start; None = any number."""
        if ask.array_room is None:
            return None
        return self._rooms.setdefault(ask.array, ask.array_room)

    def limits(self, ask: Ask) -> caps.Limits:
        """The caps for the asker of `ask`; made once for each asker, their sums go along with the pass."""
        key = (ask.owner, ask.agent, ask.human, ask.pool, ask.own_cap)
        limits = self._limits.get(key)
        if limits is None:
            limits = caps.limits_for(self.use, self.pool(ask.pool), self._owners.get(ask.owner), ask)
            self._limits[key] = limits
        return limits

    def pool(self, name: str) -> PoolRules:
        """The rules of a pool; a pool that nobody configured has none."""
        return self._pools.get(name) or PoolRules(name)

    def answer(self, ask: Ask) -> tuple[tuple[SlotKey, ...], tuple[Blocker, ...]]:
        """The slots that `ask` gets, or why it waits; one of the two is empty.

        Either changes what is left for those behind it.
        """
        shape = self.fleet.shape(ask.pool, ask.needs)
        limits = self.limits(ask)
        wanted = shape.least_units
        itself = reasons.of_itself(ask, self.now_ms)
        array_room = self.room_of(ask)
        if array_room == 0:
            itself.append(reasons.array_full(ask.array))
        queue = reasons.of_queue(self.pool(ask.pool))
        jobs = limits.jobs_reached()
        hours = None if shape.cpu else limits.hours_used_up()
        reached = [] if shape.cpu else limits.reached(wanted)
        room = caps.UNLIMITED if shape.cpu or reached else limits.room()
        line = self._lines[ask.pool]
        before = line.first_before(ask)
        of_its_own = bool(itself or queue or jobs or hours) or any(limit.code in _OWN for limit in reached)
        if not (of_its_own or reached or before):
            where = self.fleet.find(shape, room)
            if where is not None:
                keys = self.fleet.grant(ask, where)
                self.use.start(ask, self.use.units_of(keys))
                if array_room is not None:
                    self._rooms[ask.array] = array_room - 1
                return keys, ()
        obstacles = self.fleet.obstacles(shape, room)
        if not of_its_own and before is None and limits.ever(wanted) is None:
            self._guard(ask, shape, line, reached, obstacles)
        # What an ask says about itself, what can never be, the queue, caps, hosts, those before it. In each group all
        # that hold are told, so that lifting the first lets the ask start or shows the next.
        found = itself
        if obstacles is None:
            found.append(reasons.never(self.fleet, shape))
        found += [limit.refuse(wanted) for limit in reached if wanted > limit.cap]
        found += queue
        found += [limit.refuse(1) for limit in jobs]
        if hours is not None:
            found.append(hours)
        found += [limit.refuse(wanted) for limit in reached if wanted <= limit.cap]
        if obstacles is not None:
            found += reasons.of_hosts(self.fleet, shape, obstacles)
            if before is not None and all(blocker.code != "behind" for blocker in found):
                found.append(reasons.behind(ask.pool, before))
        return (), tuple(found)

    def _guard(
        self, ask: Ask, shape: Shape, line: Line, reached: list[caps.Limit], obstacles: tuple[int, ...] | None
    ) -> None:
        """Keep what this ask waits for from those behind it, where they could take it and it can come free.

        An ask that also waits for a host to come back, or for something nobody can give, guards nothing: that would
        leave cards idle for a time nobody knows.
        """
        if obstacles is None or any(step & ~SHARED for step in obstacles):
            return
        for limit in reached:
            line.guard(ask, limit.code)
        if not reached:
            self.fleet.guard(ask, shape)


def decide(world: World, now_ms: int, policy: Policy) -> Decided:
    """What should change in `world` at `now_ms`; touches nothing.

    Decisions stand in the order: ends of direct leases by id, what becomes of preemptions under way, starts in the order
    of the queue, waits in the order of their first ask, new preemptions. Every ask is in exactly one Start or Wait; an
    array is in a Start for each element that starts and in a Wait if others do not. Equal worlds give equal answers, whatever the order
    of their tuples. Slots of a lease that ends here stay taken: they are free once the host has reported them clean.

    An ask starts with the most cards that fit now between its minimum and maximum, on the hosts and under the caps
    of its pool. A pool is strict: an ask that waits for cards in use keeps those behind it off every slot it could use.
    """
    due_ms, ends = next_due_ms(world, now_ms), expired(world, now_ms)

    def fits(other: World, ask: Ask) -> tuple[SlotKey, ...]:
        return Pass(other, now_ms, policy).answer(ask)[0]

    world, of_preemptions = preempt.keep(world, now_ms, fits)
    if not world.asks:
        return Decided((*ends, *of_preemptions), due_ms, {})
    state = Pass(world, now_ms, policy)
    needs_number: dict[int, int] = {}  # by identity: asks often share their Needs, and hashing one is slow
    numbers: dict[Needs, int] = {}
    waits: dict[tuple[object, ...], tuple[list[str], tuple[Blocker, ...]]] = {}
    starts: list[Decision] = []
    last_needs: Needs | None = None
    last_equal: tuple[object, ...] = ()
    wait: tuple[list[str], tuple[Blocker, ...]] | None = None
    asks = in_order(world.asks)
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
    preemptions, again_ms = _preemptions(world, now_ms, policy, starts, waiting, fits)
    return Decided(
        decisions=(*ends, *of_preemptions, *starts, *waiting, *preemptions),
        wake_at_ms=min((at for at in (due_ms, again_ms) if at is not None), default=None),
        blockers=blockers,
    )


def _preemptions(
    world: World, now_ms: int, policy: Policy, starts: Sequence[Decision], waits: list[Wait], fits: preempt.Fits
) -> tuple[list[Preempt], int | None]:
    """Whom to stop for asks that do not fit, and when to look again: see `preempt.choose`."""
    if not waits or all(pool.preempt == "off" for pool in world.pools):
        return [], None
    asks = {ask.id: ask for ask in world.asks}
    for start in starts:
        if isinstance(start, Start):
            world = preempt.started(world, asks[start.ask_id], start.slots, now_ms)

    def usable(other: World, ask: Ask) -> dict[str, frozenset[SlotKey]]:
        seats = Fleet(other, policy, now_ms).shape(ask.pool, ask.needs).seats
        return {
            seat.host.name: frozenset(slot.key for _, slot in seat.host.keys(seat.cards | seat.shares))
            for seat in seats
        }

    return preempt.choose(world, now_ms, asks, waits, fits, usable)
