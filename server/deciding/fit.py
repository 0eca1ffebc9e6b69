"""Where an ask fits: best fit over the hosts, and what keeps it from fitting.

What keeps an ask from fitting is found by ignoring one obstacle after another (`LADDER`) until it fits.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappop, heappush

from cotenant.server.deciding.caps import UNLIMITED
from cotenant.server.deciding.closeness import choose
from cotenant.server.deciding.hosts import (
    BEHIND,
    BUSY,
    EVERYTHING,
    HOST_CPU,
    HOST_DISK,
    HOST_MEMORY,
    LADDER,
    LIMIT,
    NO_LIMIT,
    OCCUPIED,
    SICK,
    Claim,
    Holder,
    Host,
    Tenant,
)
from cotenant.server.deciding.leases import known_end_ms
from cotenant.server.deciding.shape import Seat, Shape
from cotenant.server.deciding.world import UNITS_PER_CARD, Ask, Holding, HostView, Needs, Policy, Slot, SlotKey, World

#: After so many changes a fleet that is kept forgets what it worked out for each shape, so that it does not grow.
_FORGET_AT = 20_000


class Fleet:
    """All hosts during one pass: what is free, what is booked, what earlier asks wait for."""

    def __init__(self, world: World, policy: Policy, now_ms: int) -> None:
        self._policy = policy
        self._now_ms = now_ms
        self.holder: dict[SlotKey, Holder] = {}
        self.until_ms: dict[str, int | None] = {}  # lease -> when it has left its slots at the latest, if that is known
        self._holders: dict[str, Holder] = {}  # by lease
        self._places: dict[str, list[tuple[Host, int]]] = {}  # lease -> its slots as masks
        for leases, cleaning in ((world.cleaning, True), (world.holdings, False)):
            for lease in leases:
                self._take(lease, self.until_of(lease, cleaning=cleaning))
        by_host: dict[str, list[Slot]] = {}
        for slot in world.slots:
            by_host.setdefault(slot.host, []).append(slot)
        self.hosts: list[Host] = []
        for view in sorted(world.hosts, key=lambda h: h.name):
            slots = by_host.pop(view.name, [])
            slots.sort(key=_slot_order)
            self.hosts.append(Host(view, slots, self.holder))
        self._by_name = {host.name: host for host in self.hosts}
        for lease in (*world.holdings, *world.cleaning):
            self._book(lease)
        self._ladder = -1
        self.generation = 0  # rises when all shapes are forgotten
        self.freed = 0  # rises whenever something may fit that did not before
        self._granted: list[tuple[str, list[tuple[Host, int]]]] = []  # in this pass: (ask, slots)
        self._changed: list[Host] = []  # hosts in the order of their changes
        self.moved: list[Host] = []  # the same without claims: where something may come free at another time
        self._shapes: dict[tuple[str, Needs], Shape] = {}
        self._obstacles: dict[tuple[int, int, int], tuple[int, ...] | None] = {}  # until the next grant or claim
        self._earliest: dict[int, tuple[Holder | None, int, int]] = {}  # until the next grant
        self.claimed: list[Host] = []  # hosts with claims

    def _take(self, lease: Holding, until_ms: int | None) -> None:
        self.until_ms[lease.id] = until_ms
        holder = self._holders[lease.id] = Holder(lease.agent, until_ms)
        for key in lease.slots:
            self.holder[key] = holder

    def _book(self, lease: Holding) -> list[tuple[Host, int]]:
        """Book on its hosts what a lease has of them; gives its slots as masks."""
        until = self.until_ms[lease.id]
        names = [lease.slots[0][0]] if len(lease.slots) == 1 else sorted({key[0] for key in lease.slots})
        places = self._places[lease.id] = []
        for name in names:
            if (host := self._by_name.get(name)) is not None:
                mask = host.mask_of(lease.slots)
                places.append((host, mask))
                host.book(Tenant(lease.id, until, mask, lease.cpus, lease.memory_mib, lease.disk_mib, lease.exclusive))
        return places

    def until_of(self, lease: Holding, *, cleaning: bool) -> int | None:
        """When a lease, or with `cleaning` one that is over, has left its slots at the latest; None where nobody knows."""
        if cleaning:
            return None if lease.lost else self._now_ms + self._policy.cleaning_s * 1000
        end = known_end_ms(lease, self._policy)
        return end if end is not None and end > self._now_ms else None

    # ---- what changed since it was built: see `Mirror` -----------------------------------------

    def set_now(self, now_ms: int) -> None:
        """Go on to this time."""
        self._now_ms = now_ms
        if len(self._changed) > _FORGET_AT or len(self._shapes) > _FORGET_AT:
            self.generation += 1
            self._changed.clear()
            self.moved.clear()
            self._shapes.clear()

    def see(self, slot: Slot) -> None:
        """A slot is in another state."""
        host = self._by_name[slot.host]
        host.see(host.bits()[slot.key], slot, slot.key in self.holder)
        self._free_again(host)

    def look(self, view: HostView) -> bool:
        """A host is in another state; False where that changes what may fit on it at all."""
        host = self._by_name[view.name]
        if replace(host.view, link=view.link, mode=view.mode, reason=view.reason) != view:
            return False
        host.look(view)
        self._free_again(host)
        return True

    def hold(self, lease: Holding, *, cleaning: bool) -> None:
        """A lease is there, or its slots are being cleaned."""
        self._take(lease, self.until_of(lease, cleaning=cleaning))
        for host, mask in self._book(lease):
            host.free &= ~mask
            host.occupied &= ~mask
            host.sick &= ~mask
            host.held |= mask
            self._touch(host)
        self._obstacles.clear()
        self._earliest.clear()

    def let_go(self, lease: Holding) -> None:
        """A lease is over and its slots are clean."""
        del self.until_ms[lease.id]
        holder = self._holders.pop(lease.id)
        for key in lease.slots:
            if self.holder.get(key) is holder:
                del self.holder[key]
        for host, mask in self._places.pop(lease.id):
            host.leave(lease.id)
            for bit, slot in host.keys(mask):
                host.see(bit, slot, slot.key in self.holder)
            self._free_again(host)

    def set_until(self, lease: Holding, until_ms: int | None) -> None:
        """A lease's slots come free at another time than was known, or nobody knows when."""
        if self.until_ms[lease.id] == until_ms:
            return
        self._take(lease, until_ms)
        for host, _ in self._places[lease.id]:
            for tenant in host.tenants:
                if tenant.id == lease.id:
                    tenant.until_ms = until_ms
            host.ends += 1
            self.moved.append(host)
        self._earliest.clear()

    def _free_again(self, host: Host) -> None:
        self._touch(host)
        self.freed += 1
        self._ladder = -1
        self._obstacles.clear()
        self._earliest.clear()

    def slot(self, key: SlotKey) -> Slot | None:
        """A slot by its key, as it is; None where there is none any more."""
        host = self._by_name.get(key[0])
        bit = host.bits().get(key) if host is not None else None
        return None if host is None or bit is None else host.slots[bit.bit_length() - 1]

    def drop_claims(self) -> None:
        """Keep nothing for anybody any more."""
        for host in self.claimed:
            host.claims.clear()
            host.version += 1
            self._changed.append(host)
        self.claimed.clear()
        self._obstacles.clear()

    def undo(self) -> None:
        """Take back what was granted and claimed: a pass leaves the fleet as it found it."""
        self.drop_claims()
        self.freed += bool(self._granted)
        for ask_id, where in reversed(self._granted):
            for host, mask in where:
                host.leave(ask_id)
                host.held &= ~mask
                host.free |= mask
                for _, slot in host.keys(mask):
                    del self.holder[slot.key]
                self._touch(host)
        self._granted.clear()
        self._obstacles.clear()
        self._earliest.clear()

    def _present(self) -> int:
        """The obstacles that exist on some host; the others need not be tried."""
        present = BEHIND | BUSY | HOST_CPU | HOST_MEMORY | HOST_DISK
        for host in self.hosts:
            present |= host.gate
            if host.view.max_jobs:
                present |= LIMIT
            if host.occupied:
                present |= OCCUPIED
            if host.sick:
                present |= SICK
        return present

    def _steps(self, needs: Needs) -> list[int]:
        """The rungs of the ladder that can make a difference for these needs."""
        if self._ladder < 0:
            self._ladder = self._present()
        present = self._ladder
        if not needs.cpus:
            present &= ~HOST_CPU
        if not needs.memory_mib:
            present &= ~HOST_MEMORY
        if not needs.disk_mib:
            present &= ~HOST_DISK
        return [step for step in LADDER if step & present]

    def shape(self, pool: str, needs: Needs) -> Shape:
        """The seats for these needs; worked out once in a pass."""
        key = (pool, needs)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = Shape(len(self._shapes), pool, needs, self.hosts)
        return shape

    def find(
        self, shape: Shape, room: int = UNLIMITED, ignored: int = 0, ends_ms: int = NO_LIMIT
    ) -> list[tuple[Host, int]] | None:
        """The slots for this shape within `room` units, as (host, mask) by host, or None.

        The most cards that fit; whole cards before a share; then preferred hosts, gaps before what is claimed for others
        (for an ask that is over by then, see `ends_ms`), the host with the fewest free cards left over, the name of the
        host, the index of the card. Obstacles in `ignored` count as gone; an answer with some of them only says that it
        would fit.
        """
        if not ignored and shape.fixed:
            needed = 0 if shape.cpu else shape.low * UNITS_PER_CARD
            if needed <= room and (best := self._best(shape, ends_ms)) is not None:
                return best
        else:
            found = self._scan(shape, room, ignored, ends_ms)
            if found is not None:
                return found
        return self._find_share(shape, room, ignored, ends_ms) if shape.share_units else None

    def possible(self, shape: Shape) -> bool:
        """Whether this shape fits if what is kept for others, caps and the queue are left out."""
        if shape.none_at == self.freed:
            return False
        if shape.fixed:
            if self._top(shape) is not None:
                return True
            for host in self.claimed:
                seat = shape.seat_on.get(host.name)
                if seat is not None and _gap(shape, seat, 0):
                    return True
            found = self._find_share(shape, UNLIMITED, 0, 0) if shape.share_units else None
        else:
            found = self.find(shape, ends_ms=0)
        if found is None:
            shape.none_at = self.freed
            return False
        return True

    def latest_ms(self, shape: Shape) -> int:
        """Until when an ask of this shape may stay that starts now: NO_LIMIT beside all that is kept for others, 0 for never."""
        if shape.latest_at != len(self._changed):
            shape.latest_at = len(self._changed)
            shape.latest_ms = self._latest_ms(shape)
        return shape.latest_ms

    def _latest_ms(self, shape: Shape) -> int:
        if not self.possible(shape):
            return 0
        if (shape.fixed and self._top(shape) is not None) or self.find(shape) is not None:
            return NO_LIMIT
        if shape.nodes > 1:
            return max(claim.at_ms for host in self.claimed for claim in host.claims)
        latest = 0
        for host in self.claimed:
            seat = shape.seat_on.get(host.name)
            for claim in host.claims if seat is not None else ():
                if claim.at_ms > latest and seat is not None and not host.closed(shape.needs, 0, claim.at_ms):
                    mask = host.open_mask(0, claim.at_ms)
                    if (mask & seat.cards).bit_count() >= shape.low or mask & seat.shares:
                        latest = claim.at_ms
        return latest

    def _best(self, shape: Shape, ends_ms: int) -> list[tuple[Host, int]] | None:
        """The same as `_scan` for a fixed number of cards on one host, without looking at every host each time.

        Hosts with claims are looked at beside `_top`, which knows nothing of ends.
        """
        gap: tuple[tuple[int, int, str], Seat, int] | None = None
        for host in self.claimed:
            seat = shape.seat_on.get(host.name)
            if seat is not None and (mask := _gap(shape, seat, ends_ms)):
                key = (seat.prefer, (host.free & seat.pool_cards).bit_count(), host.name)
                if gap is None or key < gap[0]:
                    gap = (key, seat, mask)
        top = self._top(shape)
        if top is not None and (gap is None or top.prefer < gap[0][0]):
            return [(top.host, choose(top.host, top.host.open_mask(0) & top.cards, shape.low))]
        return None if gap is None else [(gap[1].host, choose(gap[1].host, gap[2], shape.low))]

    def _top(self, shape: Shape) -> Seat | None:
        """The best seat for a fixed number of cards on one host beside all claims, None where there is none.

        A heap of (preference, cards left over, host, version of the host) is kept; hosts that changed since the last look
        get a new entry, and entries of an older version are dropped when they come up.
        """
        if shape.heap is None:
            shape.heap = [entry for seat in shape.seats if (entry := _entry(shape, seat)) is not None]
            heapify(shape.heap)
        elif shape.seen != len(self._changed):
            for host in dict.fromkeys(self._changed[shape.seen :]):
                seat = shape.seat_on.get(host.name)
                if seat is not None and (entry := _entry(shape, seat)) is not None:
                    heappush(shape.heap, entry)
            if len(shape.heap) > 64 + 4 * len(shape.seats):
                shape.heap = [entry for entry in set(shape.heap) if shape.seat_on[entry[2]].host.version == entry[3]]
                heapify(shape.heap)
        shape.seen = len(self._changed)
        while shape.heap:
            _, _, name, version_then = shape.heap[0]
            seat = shape.seat_on[name]
            if seat.host.version == version_then:
                return seat
            heappop(shape.heap)
        return None

    def _scan(self, shape: Shape, room: int, ignored: int, ends_ms: int) -> list[tuple[Host, int]] | None:
        """Whole cards (or cpu places) for this shape, by a look at every host."""
        nodes = shape.nodes
        high = shape.high if shape.cpu else min(shape.high, room // (UNITS_PER_CARD * nodes))
        found: list[tuple[int, Seat, int]] = []
        if high >= shape.low:
            low = shape.low
            for seat in shape.seats:
                host = seat.host
                if host.closed(shape.needs, ignored, ends_ms):
                    continue
                mask = host.open_mask(ignored, ends_ms) & seat.cards
                # of a divided card a program can use only one part, and nothing else beside it
                count = 1 if mask & host.mig and shape.high > 1 else mask.bit_count()
                if count >= low:
                    found.append((count, seat, mask))
        if len(found) >= nodes:
            take = min(high, sorted((count for count, _, _ in found), reverse=True)[nodes - 1])
            fitting = [(seat, mask) for count, seat, mask in found if count >= take]
            if len(fitting) > 1:
                fitting.sort(key=lambda one: (one[0].prefer, not one[0].host.gap(ends_ms), *_left_over(one)))
            return [
                (seat.host, choose(seat.host, mask, take)) for seat, mask in sorted(fitting[:nodes], key=_host_name)
            ]
        return None

    def _find_share(self, shape: Shape, room: int, ignored: int, ends_ms: int) -> list[tuple[Host, int]] | None:
        """One share: on a preferred host, then the smallest that is enough, on the card with the fewest free shares."""
        best: tuple[tuple[int, int, int], Host, int] | None = None
        for seat in shape.seats:
            host = seat.host
            if not seat.shares or host.closed(shape.needs, ignored, ends_ms):
                continue
            mask = host.open_mask(ignored, ends_ms) & seat.shares
            free_of: dict[str, int] = {}
            for _, slot in host.keys(host.free & seat.shares):
                free_of[slot.uuid] = free_of.get(slot.uuid, 0) + 1
            for bit, slot in host.keys(mask):
                if slot.units > room:
                    continue
                key = (seat.prefer, slot.units, free_of.get(slot.uuid, 0))
                if best is None or key < best[0]:
                    best = (key, host, bit)
        return None if best is None else [(best[1], best[2])]

    def grant(self, ask: Ask, where: list[tuple[Host, int]]) -> tuple[SlotKey, ...]:
        """Take these slots for `ask`, and book what it wants of their hosts. Gives the keys in order."""
        needs = ask.needs
        keys: list[SlotKey] = []
        ends_ms = self.ends_ms(ask.hours_ms)
        holder = Holder(ask.agent, ends_ms)
        for host, mask in where:
            host.free &= ~mask
            host.held |= mask
            self._touch(host)
            host.book(Tenant(ask.id, ends_ms, mask, needs.cpus, needs.memory_mib, needs.disk_mib, needs.exclusive_host))
            for claim in host.claims:
                if claim.at_ms < ends_ms:
                    claim.cpus -= needs.cpus
                    claim.memory_mib -= needs.memory_mib
                    claim.disk_mib -= needs.disk_mib
                    claim.holders -= 1
            for _, slot in host.keys(mask):
                keys.append(slot.key)
                self.holder[slot.key] = holder
        self._granted.append((ask.id, where))
        self._obstacles.clear()
        self._earliest.clear()
        return tuple(keys)

    def _touch(self, host: Host) -> None:
        """What is free on a host, or when it will be, is another thing now."""
        host.version += 1
        host.ends += 1
        self._changed.append(host)
        self.moved.append(host)

    def seats_moved(self, shape: Shape) -> list[Seat]:
        """The seats of `shape` on hosts that changed (claims apart) since it was last looked at for a booking."""
        names = dict.fromkeys(host.name for host in self.moved[shape.moved_seen :])
        return [seat for name in names if (seat := shape.seat_on.get(name)) is not None]

    def ends_ms(self, hours_ms: int = 0) -> int:
        """When what may stay for `hours_ms` would have left its slots at the latest if it started now."""
        return self._now_ms + hours_ms + (10 + self._policy.cleaning_s) * 1000

    def claim(self, host: Host, claim: Claim) -> None:
        """Keep something on a host for an ask that came first."""
        if not host.claims:
            self.claimed.append(host)
        host.claims.append(claim)
        host.version += 1
        self._changed.append(host)
        self._obstacles.clear()

    def first_claim(self, shape: Shape, ends_ms: int) -> Claim | None:
        """The first claim that an ask of this shape with this end may run into."""
        for host in self.claimed:
            seat = shape.seat_on.get(host.name)
            if seat is None:
                continue
            for claim in host.claims:
                if claim.at_ms < ends_ms and (claim.mask & (seat.cards | seat.shares) or claim.keeps_out(shape.needs)):
                    return claim
        return None

    def obstacles(self, shape: Shape, room: int = UNLIMITED, ends_ms: int = NO_LIMIT) -> tuple[int, ...] | None:
        """What has to go so that this shape fits, the main obstacle first; () when it fits, None when it never can.

        Each one is needed: without the others alone it would still not fit.
        """
        key = (shape.number, room, ends_ms if self.claimed else 0)
        if key not in self._obstacles:
            self._obstacles[key] = self._climb(shape, room, ends_ms)
        return self._obstacles[key]

    def _climb(self, shape: Shape, room: int, ends_ms: int) -> tuple[int, ...] | None:
        ignored = 0
        if self.find(shape, room, 0, ends_ms) is not None:
            return ()
        if self.find(shape, room, EVERYTHING, ends_ms) is None:
            return None
        steps: list[int] = []
        for step in self._steps(shape.needs):
            ignored |= step
            steps.append(step)
            if self.find(shape, room, ignored, ends_ms) is not None:
                break
        for step in reversed(steps[:-1]):
            if self.find(shape, room, ignored & ~step, ends_ms) is not None:
                ignored &= ~step
        return tuple(step for step in reversed(steps) if ignored & step)

    def earliest(self, shape: Shape) -> tuple[Holder | None, int, int]:
        """Who has to end first so that enough is free, and how many of the cards that fit are free and in use now.

        The holder is the one with whose end enough is free, at the earliest known time. Where no known ends are
        enough it is one of those whose end nobody knows, without a time. Cards of hosts that get no new work are
        left out.
        """
        found = self._earliest.get(shape.number)
        if found is None:
            found = self._earliest[shape.number] = self._find_earliest(shape)
        return found

    def _find_earliest(self, shape: Shape) -> tuple[Holder | None, int, int]:
        ends: list[tuple[int, str, Holder]] = []
        unknown: Holder | None = None
        free = in_use = 0
        for seat in shape.seats:
            host = seat.host
            if host.gate:
                continue
            allowed = seat.cards | seat.shares
            free += (host.free & allowed).bit_count()
            in_use += (host.held & allowed).bit_count()
            held = [h for _, slot in host.keys(host.held & allowed) if (h := self.holder.get(slot.key)) is not None]
            unknown = unknown or next((h for h in held if h.until_ms is None), None)
            known = [(h.until_ms, h.agent, h) for h in held if h.until_ms is not None]
            known.sort(key=_end_order)
            missing = max(1, (1 if seat.shares else shape.low) - (host.free & allowed).bit_count())
            if shape.needs.exclusive_host:
                missing = len(held)
            if 0 < missing <= len(known):
                ends.append(known[missing - 1])
        ends.sort(key=_end_order)
        first = ends[shape.nodes - 1][2] if len(ends) >= shape.nodes else unknown
        return first, free, in_use


def _entry(shape: Shape, seat: Seat) -> tuple[int, int, str, int] | None:
    """The place of a seat in the heap of `Fleet._top`, or None where it has too little."""
    host = seat.host
    if host.closed(shape.needs, 0) or (host.open_mask(0) & seat.cards).bit_count() < shape.low:
        return None
    return (seat.prefer, (host.free & seat.pool_cards).bit_count(), host.name, host.version)


def _gap(shape: Shape, seat: Seat, ends_ms: int) -> int:
    """The slots of a host with claims for an ask that is over by `ends_ms`, where some claim lets it in and they are enough."""
    host = seat.host
    if not host.gap(ends_ms) or host.closed(shape.needs, 0, ends_ms):
        return 0
    mask = host.open_mask(0, ends_ms) & seat.cards
    return mask if mask.bit_count() >= shape.low else 0


def _slot_order(slot: Slot) -> tuple[bool, int, str, int]:
    return (slot.index is None, slot.index or 0, slot.uuid, slot.share)


def _end_order(end: tuple[int, str, Holder]) -> tuple[int, str]:
    return end[:2]


def _left_over(fitting: tuple[Seat, int]) -> tuple[int, str]:
    seat = fitting[0]
    return ((seat.host.free & seat.pool_cards).bit_count(), seat.host.name)


def _host_name(fitting: tuple[Seat, int]) -> str:
    return fitting[0].host.name
