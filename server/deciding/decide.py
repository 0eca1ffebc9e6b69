"""One pass: which asks start, which wait and why, which leases end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from cotenant.server.deciding import booking, caps, idle, preempt, reasons, reserved, windows
from cotenant.server.deciding.fit import Fleet
from cotenant.server.deciding.hosts import NO_LIMIT, SHARED, Host
from cotenant.server.deciding.leases import expired, next_due_ms
from cotenant.server.deciding.order import Line, in_order
from cotenant.server.deciding.shape import Shape
from cotenant.server.deciding.usage import Use
from cotenant.server.deciding.world import (
    Ask,
    Blocker,
    Booking,
    Decided,
    Decision,
    GiveUp,
    Needs,
    Policy,
    PoolRules,
    Reservation,
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
    "hours_ms",
    "array",
)
"""What makes two asks with equal needs wait for the same reasons."""
_GROUP = attrgetter("kind", "needs", "resumed", "count", "array_room", "not_after_ms")


def equal_key(ask: Ask) -> tuple[object, ...]:
    """What decides over an ask besides its id and its time: asks with one key are answered alike once the first waits."""
    return (*_GROUP(ask), *_EQUAL(ask))


_OWN = ("quota_owner", "quota_agent")


class Pass:
    """The state of one pass: what is left after the asks that were looked at so far."""

    def __init__(self, world: World, now_ms: int, policy: Policy) -> None:
        self.now_ms = now_ms
        self.world = world
        self.policy = policy
        self.use = Use(world)
        self.fleet = Fleet(world, policy, now_ms)
        self.bookings: dict[str, Booking] = {}  # by pool: what is kept for the first that does not fit
        self._pools = {pool.name: pool for pool in world.pools}
        self._owners = {owner.owner: owner for owner in world.owners}
        self._agents = {agent.agent: agent for agent in world.agents}
        self._limits: dict[tuple[str, str, bool, str, int], caps.Limits] = {}
        self._lines: defaultdict[str, Line] = defaultdict(Line)
        self._rooms: dict[str, int] = {}  # array -> elements that may still start beside those that run
        self._queues: dict[str, list[Blocker]] = {}
        self._stays: dict[str, list[tuple[reserved.Stay, bool]]] = {}  # pool -> (what is held, by a person?)
        self._started: dict[str, list[tuple[reserved.Stay, bool]]] = {}
        self._reservations: dict[str, list[Reservation]] = {}  # pool -> those in force
        for reservation in world.reservations:
            stays = [stay for stay, _ in self.stays(reservation.pool)]
            if reserved.in_force(reservation, stays, now_ms):
                self._reservations.setdefault(reservation.pool, []).append(reservation)

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
            limits = caps.limits_for(
                self.use, self.pool(ask.pool), self._owners.get(ask.owner), self._agents.get(ask.agent), ask
            )
            self._limits[key] = limits
        return limits

    def pool(self, name: str) -> PoolRules:
        """The rules of a pool; a pool that nobody configured has none."""
        return self._pools.get(name) or PoolRules(name)

    def stays(self, pool: str) -> list[tuple[reserved.Stay, bool]]:
        """What is held in a pool and until when, with whether a person holds it; what starts in the pass included."""
        found = self._stays.get(pool)
        if found is None:
            found = self._stays[pool] = []
            for lease in (*self.world.holdings, *self.world.cleaning):
                if lease.pool == pool:
                    units, until_ms = self.use.units_of(lease.slots), self.fleet.until_ms[lease.id]
                    found.append((reserved.Stay(lease.owner, units, until_ms), lease.human))
        started = self._started.get(pool)
        return [*found, *started] if started else found

    def answer(self, ask: Ask) -> tuple[tuple[SlotKey, ...], tuple[Blocker, ...]]:
        """The slots that `ask` (of an array: its next element) gets, or why it waits; one of the two is empty.

        Either changes what is left for those behind it.
        """
        shape = self.fleet.shape(ask.pool, ask.needs)
        limits = self.limits(ask)
        wanted = shape.least_units
        ends_ms = self.fleet.ends_ms(ask)
        itself = reasons.of_itself(ask, self.now_ms)
        array_room = self.room_of(ask)
        if array_room is not None and array_room <= 0:
            itself.append(reasons.array_full(ask))
        queue = self._queue(ask.pool)
        jobs = limits.jobs_reached()
        hours = [] if shape.cpu else limits.hours_used_up()
        reached = [] if shape.cpu else limits.reached(wanted)
        room = caps.UNLIMITED if shape.cpu or reached else limits.room()
        line = self._lines[ask.pool]
        beside = line.room(ask.human, ends_ms)
        before = line if wanted > beside else None
        kept, reservation = self._reserved_room(ask, wanted, ends_ms)
        of_its_own = bool(itself or queue or jobs or hours or wanted > kept) or any(
            limit.code in _OWN for limit in reached
        )
        if not (of_its_own or reached or before):
            where = self.fleet.find(shape, min(room, beside, kept), 0, ends_ms)
            if where is not None:
                return self._start(ask, where, ends_ms), ()
        obstacles = self.fleet.obstacles(shape, room, ends_ms)
        # What an ask says about itself, what can never be, the queue, caps, hosts, those before it. In each group all
        # that hold are told, so that lifting the first lets the ask start or shows the next.
        found = itself
        if obstacles is None:
            found.append(reasons.never(self.fleet, shape))
        found += [limit.refuse(wanted) for limit in reached if wanted > limit.cap]
        found += queue
        found += [limit.refuse(1) for limit in jobs]
        found += hours
        found += [limit.refuse(wanted) for limit in reached if wanted <= limit.cap]
        if reservation is not None and wanted > kept:
            found.append(reasons.reserved_in_advance(reservation, wanted, kept, self.now_ms))
        if obstacles is not None:
            found += reasons.of_hosts(self.fleet, shape, obstacles, ends_ms)
            if before is not None and all(blocker.code not in ("behind", "reserved_for") for blocker in found):
                assert before.by is not None
                found.append(reasons.behind(ask.pool, before.by, before.at_ms))
        if not of_its_own and limits.ever(wanted) is None:
            self._keep(ask, shape, line, reached, obstacles)
        return (), tuple(found)

    def _queue(self, name: str) -> list[Blocker]:
        found = self._queues.get(name)
        if found is None:
            pool = self.pool(name)
            found = self._queues[name] = reasons.of_queue(pool, windows.opens_at_ms(pool, self.now_ms), self.now_ms)
        return found

    def _start(self, ask: Ask, where: list[tuple[Host, int]], ends_ms: int) -> tuple[SlotKey, ...]:
        keys = self.fleet.grant(ask, where)
        units = self.use.units_of(keys)
        self.use.start(ask, units)
        self._lines[ask.pool].take(ask.human, units, ends_ms)
        self._started.setdefault(ask.pool, []).append((reserved.Stay(ask.owner, units, ends_ms), ask.human))
        if ask.array_room is not None:
            self._rooms[ask.array] = self._rooms.get(ask.array, ask.array_room) - 1
        return keys

    def _reserved_room(self, ask: Ask, wanted: int, ends_ms: int) -> tuple[int, Reservation | None]:
        """What advance reservations leave of the pool: see `reserved.room`."""
        reservations = self._reservations.get(ask.pool)
        if not reservations or not wanted:
            return NO_LIMIT, None
        stays = [stay for stay, _ in self.stays(ask.pool)]
        return reserved.room(reservations, stays, self._well(ask.pool), ask, self.now_ms, ends_ms)

    def _well(self, pool: str) -> int:
        """Units of the cards of a pool that can be given out at all."""
        found = 0
        for host in self.fleet.hosts:
            if not host.gate:
                found += sum(slot.units for _, slot in host.keys(host.free | host.held) if slot.pool == pool)
        return found

    def _keep(
        self, ask: Ask, shape: Shape, line: Line, reached: list[caps.Limit], obstacles: tuple[int, ...] | None
    ) -> None:
        """Keep what this ask waits for from those behind it, where they could take it and it can come free.

        An ask that also waits for something nobody can give, or whose time nobody knows, keeps nothing: that would leave
        cards idle for a time nobody knows.
        """
        if not self.policy.backfill:
            if obstacles is None or any(step & ~SHARED for step in obstacles):
                return
            line.by, line.at_ms = line.by or ask.id, -1
            for limit in reached:
                if limit.code == "quota_pool":
                    line.all_spare = 0
                elif limit.code == "reserve":
                    line.agents_spare = 0
            if not reached:
                booking.keep_everything(self.fleet, ask, shape)
            return
        if ask.pool in self.bookings:
            return
        stays = self.stays(ask.pool)
        ends = sorted(((s.until_ms, s.units, human) for s, human in stays if s.until_ms is not None))
        at_ms = caps.room_at_ms(self.limits(ask), shape.least_units, ends, self.now_ms)
        if at_ms is None:
            return
        booked = booking.book(self.fleet, ask, shape, self.now_ms, at_ms)
        if booked is None:
            return
        self.bookings[ask.pool] = booked
        line.by, line.at_ms = ask.id, booked.at_ms
        line.all_spare, line.agents_spare = caps.spare_at(self.limits(ask), shape.least_units, ends, booked.at_ms)


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
    due_ms, ends = next_due_ms(world, now_ms), expired(world, now_ms)
    late = sorted(
        (a for a in world.asks if a.not_after_ms is not None and a.not_after_ms <= now_ms), key=lambda a: a.id
    )
    if late:
        world = replace(world, asks=tuple(a for a in world.asks if a.not_after_ms is None or a.not_after_ms > now_ms))
    given_up = [GiveUp(ask.id, reasons.window_closed(ask)) for ask in late]

    def fits(other: World, ask: Ask) -> tuple[SlotKey, ...]:
        return Pass(other, now_ms, policy).answer(ask)[0]

    world, of_preemptions = preempt.keep(world, now_ms, fits)
    if not world.asks:
        return Decided((*ends, *given_up, *of_preemptions), due_ms, {})
    state = Pass(world, now_ms, policy)
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
    takings, again_ms = _takings(world, now_ms, policy, starts, waiting, fits)
    return Decided(
        decisions=(*ends, *given_up, *of_preemptions, *starts, *waiting, *takings),
        wake_at_ms=min((at for at in (due_ms, again_ms) if at is not None), default=None),
        blockers=blockers,
        bookings=tuple(state.bookings[pool] for pool in sorted(state.bookings)),
    )


def _takings(
    world: World, now_ms: int, policy: Policy, starts: Sequence[Decision], waits: list[Wait], fits: preempt.Fits
) -> tuple[list[Decision], int | None]:
    """Whom to stop for asks that do not fit, who is idle meanwhile, and when to look again: see `preempt`, `idle`."""
    if not waits or all(pool.preempt == "off" and not pool.idle_s for pool in world.pools):
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

    preemptions, later = preempt.choose(world, now_ms, asks, waits, fits, usable)
    idlers, again = idle.judge(world, now_ms, asks, waits, fits)
    return [*preemptions, *idlers], min((at for at in (later, again) if at is not None), default=None)
