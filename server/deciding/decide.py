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
from cotenant.server.deciding.mirror import End, Mirror
from cotenant.server.deciding.order import Line, in_order
from cotenant.server.deciding.shape import Shape
from cotenant.server.deciding.world import (
    Ask,
    Blocker,
    Booking,
    Decided,
    Decision,
    GiveUp,
    Needs,
    Policy,
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


OWN = ("quota_owner", "quota_agent")


class Look:
    """What a pass found of one ask: its limits, what is left for it, and its slots."""

    __slots__ = (
        "array_full",
        "beside",
        "closed",
        "ends_ms",
        "kept",
        "limits",
        "own",
        "reached",
        "reservation",
        "room",
        "wanted",
        "where",
    )

    def __init__(
        self,
        limits: caps.Limits,
        wanted: int,
        ends_ms: int,
        reached: Sequence[caps.Limit],
        room: int,
        beside: int,
        kept: int,
        reservation: Reservation | None,
        *,
        array_full: bool,
        closed: bool,
    ) -> None:
        self.limits = limits
        self.wanted = wanted  # units that it takes at least
        self.ends_ms = ends_ms  # when it would be over at the latest
        self.reached = reached  # caps on cards that refuse it
        self.room = room  # units that caps leave for it
        self.beside = beside  # units that the first of the queue leaves for it
        self.kept = kept  # units that advance reservations leave for it
        self.reservation = reservation
        self.array_full = array_full
        self.closed = closed  # its queue starts nothing, or its jobs at once or GPU-hours are used up
        self.where: list[tuple[Host, int]] | None = None
        #: It waits for something of its own, and so keeps nothing from those behind it.
        self.own = closed or array_full or wanted > kept or any(limit.code in OWN for limit in reached)


class Pass:
    """The state of one pass: what is left after the asks that were looked at so far."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self.now_ms = mirror.now_ms
        self.policy = mirror.policy
        self.use = mirror.use
        self.fleet = mirror.fleet
        self.bookings: dict[str, Booking] = {}  # by pool: what is kept for the first that does not fit
        self._lines: defaultdict[str, Line] = defaultdict(Line)
        self._rooms: dict[str, int] = {}  # array -> elements that may still start beside those that run
        self._queues: dict[str, list[Blocker]] = {}
        self._stays: dict[str, list[reserved.Stay]] = {}
        self._started: list[tuple[Ask, int, int]] = []  # (ask, units, when it is over)
        self._reservations: dict[str, list[Reservation]] = {}  # pool -> those in force
        for reservation in mirror.reservations:
            if reserved.in_force(reservation, self.stays(reservation.pool), self.now_ms):
                self._reservations.setdefault(reservation.pool, []).append(reservation)

    def room_of(self, ask: Ask) -> int | None:
        """How many more elements of the ask's array may start; None = any number."""
        if ask.array_room is None:
            return None
        return self._rooms.setdefault(ask.array, ask.array_room)

    def stays(self, pool: str) -> list[reserved.Stay]:
        """What is held in a pool, by whom and until when; what starts in the pass included."""
        found = self._stays.get(pool)
        if found is None:
            found = self._stays[pool] = self.mirror.stays(pool)
        return [*found, *(reserved.Stay(a.owner, units, until) for a, units, until in self._started if a.pool == pool)]

    def ends(self, pool: str) -> list[End]:
        """The known ends of what is held in a pool, sorted; what starts in the pass included."""
        started = [(until, units, ask.human) for ask, units, until in self._started if ask.pool == pool]
        known = self.mirror.ends(pool)
        return sorted([*known, *started]) if started else known

    def look(self, ask: Ask, shape: Shape) -> Look:
        """What stands between `ask` (of an array: its next element) and a start, and its slots where nothing does."""
        limits = self.mirror.limits(ask)
        wanted, cpu = shape.least_units, shape.cpu
        ends_ms = self.fleet.ends_ms(ask.hours_ms)
        reached = () if cpu else limits.reached(wanted)
        room = caps.UNLIMITED if cpu or reached else limits.room()
        line = self._lines[ask.pool]
        beside = line.room(ask.human, ends_ms)
        kept, reservation = self._reserved_room(ask, wanted, ends_ms)
        array_room = self.room_of(ask)
        look = Look(
            limits,
            wanted,
            ends_ms,
            reached,
            room,
            beside,
            kept,
            reservation,
            array_full=array_room is not None and array_room <= 0,
            closed=bool(self.queue(ask.pool)) or limits.busy() or (not cpu and limits.spent()),
        )
        if not (look.own or reached or wanted > beside or not ask.startable(self.now_ms)):
            look.where = self.fleet.find(shape, min(room, beside, kept), 0, ends_ms)
        return look

    def latest_ms(self, human: bool, shape: Shape, pool: str) -> int:
        """Until when an ask of this shape may stay that starts now, for what is kept for others; 0 = it cannot start."""
        latest = self.fleet.latest_ms(shape)
        return min(latest, self._lines[pool].latest_ms(human, shape.least_units)) if latest else 0

    def answer(self, ask: Ask) -> tuple[tuple[SlotKey, ...], tuple[Blocker, ...]]:
        """The slots that `ask` (of an array: its next element) gets, or why it waits; one of the two is empty.

        Either changes what is left for those behind it.
        """
        shape = self.fleet.shape(ask.pool, ask.needs)
        look = self.look(ask, shape)
        if look.where is not None:
            return self.start(ask, look), ()
        found = self._blockers(ask, shape, look)
        self.keep(ask, shape, look)
        return (), tuple(found)

    def _blockers(self, ask: Ask, shape: Shape, look: Look) -> list[Blocker]:
        """Why `ask` waits.

        What an ask says about itself, what can never be, the queue, caps, hosts, those before it. In each group all that
        hold are told, so that lifting the first lets the ask start or shows the next.
        """
        found = reasons.of_itself(ask, self.now_ms)
        if look.array_full:
            found.append(reasons.array_full(ask))
        obstacles = self.fleet.obstacles(shape, look.room, look.ends_ms)
        wanted = look.wanted
        if obstacles is None:
            found.append(reasons.never(self.fleet, shape))
        found += [limit.refuse(wanted) for limit in look.reached if wanted > limit.cap]
        found += self.queue(ask.pool)
        found += [limit.refuse(1) for limit in look.limits.jobs_reached()]
        if not shape.cpu:
            found += look.limits.hours_used_up()
        found += [limit.refuse(wanted) for limit in look.reached if wanted <= limit.cap]
        if look.reservation is not None and wanted > look.kept:
            found.append(reasons.reserved_in_advance(look.reservation, wanted, look.kept, self.now_ms))
        if obstacles is not None:
            found += reasons.of_hosts(self.fleet, shape, obstacles, look.ends_ms)
            line = self._lines[ask.pool]
            if wanted > look.beside and all(blocker.code not in ("behind", "reserved_for") for blocker in found):
                assert line.by is not None
                found.append(reasons.behind(ask.pool, line.by, line.at_ms))
        return found

    def queue(self, name: str) -> list[Blocker]:
        found = self._queues.get(name)
        if found is None:
            pool = self.mirror.pool(name)
            found = self._queues[name] = reasons.of_queue(pool, windows.opens_at_ms(pool, self.now_ms), self.now_ms)
        return found

    def start(self, ask: Ask, look: Look) -> tuple[SlotKey, ...]:
        """Take what `look` found."""
        assert look.where is not None
        keys = self.fleet.grant(ask, look.where)
        units = self.use.units_of(keys)
        self.use.count(ask, units, 1)
        self._lines[ask.pool].take(ask.human, units, look.ends_ms)
        self._started.append((ask, units, look.ends_ms))
        if ask.array_room is not None:
            self._rooms[ask.array] = self._rooms.get(ask.array, ask.array_room) - 1
        return keys

    def undo(self) -> None:
        """Leave the mirror as the pass found it."""
        self.fleet.undo()
        for ask, units, _ in self._started:
            self.use.count(ask, units, -1)

    def _reserved_room(self, ask: Ask, wanted: int, ends_ms: int) -> tuple[int, Reservation | None]:
        """What advance reservations leave of the pool: see `reserved.room`."""
        reservations = self._reservations.get(ask.pool)
        if not reservations or not wanted:
            return NO_LIMIT, None
        return reserved.room(reservations, self.stays(ask.pool), self._well(ask.pool), ask, self.now_ms, ends_ms)

    def _well(self, pool: str) -> int:
        """Units of the cards of a pool that can be given out at all."""
        found = 0
        for host in self.fleet.hosts:
            if not host.gate:
                found += sum(slot.units for _, slot in host.keys(host.free | host.held) if slot.pool == pool)
        return found

    def keep(self, ask: Ask, shape: Shape, look: Look) -> bool:
        """Keep what this ask waits for from those behind it, where they could take it and it can come free.

        An ask that also waits for something nobody can give, or whose time nobody knows, keeps nothing: that would leave
        cards idle for a time nobody knows.
        """
        if look.own or not ask.startable(self.now_ms) or look.limits.ever(look.wanted) is not None:
            return False
        if not self.policy.backfill:
            return self._keep_everything(ask, shape, look)
        if ask.pool in self.bookings:
            return False
        limits, wanted = look.limits, look.wanted
        ends = self.ends(ask.pool) if limits.pool_wide else []
        at_ms = caps.room_at_ms(limits, wanted, ends, self.now_ms)
        if at_ms is None:
            return False
        booked = booking.book(self.fleet, ask, shape, self.now_ms, at_ms)
        if booked is None:
            return False
        self.bookings[ask.pool] = booked
        line = self._lines[ask.pool]
        line.by, line.at_ms = ask.id, booked.at_ms
        line.all_spare, line.agents_spare = caps.spare_at(limits, wanted, ends, booked.at_ms)
        return True

    def _keep_everything(self, ask: Ask, shape: Shape, look: Look) -> bool:
        obstacles = self.fleet.obstacles(shape, look.room, look.ends_ms)
        if obstacles is None or any(step & ~SHARED for step in obstacles):
            return False
        line = self._lines[ask.pool]
        line.by, line.at_ms = line.by or ask.id, -1
        for limit in look.reached:
            if limit.code == "quota_pool":
                line.all_spare = 0
            elif limit.code == "reserve":
                line.agents_spare = 0
        if not look.reached:
            booking.keep_everything(self.fleet, ask, shape)
        return True


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

    def fits(other: World, ask: Ask) -> tuple[SlotKey, ...]:
        return Pass(Mirror(other, now_ms, policy)).answer(ask)[0]

    world, of_preemptions = preempt.keep(world, now_ms, fits)
    if not world.asks:
        return Decided((*ends, *given_up, *of_preemptions), due_ms, {})
    state = Pass(Mirror(world, now_ms, policy))
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
