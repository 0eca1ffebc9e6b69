"""One pass over a mirror: what each ask meets in its turn, what it gets, and what is kept for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cotenant.server.deciding import booking, caps, reasons, reserved, windows
from cotenant.server.deciding.hosts import NO_LIMIT, SHARED, Host
from cotenant.server.deciding.mirror import End, Mirror
from cotenant.server.deciding.order import Line
from cotenant.server.deciding.shape import Shape
from cotenant.server.deciding.world import Ask, Blocker, Booking, Reservation, SlotKey

#: Caps of the asker alone: whoever waits for one keeps nothing from others.
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

    def __init__(self, mirror: Mirror, started: list[tuple[Ask, int, int]] | None = None) -> None:
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
        self._started = [] if started is None else started  # (ask, units, when it is over)
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

    def alone(self) -> Pass:
        """A pass over the same mirror that counts what this one has started, and keeps nothing for anybody."""
        other = Pass(self.mirror, self._started)
        other._rooms = self._rooms
        return other

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
        found = self.blockers(ask, shape, look)
        self.keep(ask, shape, look)
        return (), tuple(found)

    def blockers(self, ask: Ask, shape: Shape, look: Look) -> list[Blocker]:
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
