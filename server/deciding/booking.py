"""When the first ask that does not fit will fit, from known ends, and what is kept for it until then."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TypeAlias

from cotenant.server.deciding.fit import Fleet
from cotenant.server.deciding.hosts import NO_LIMIT, Claim, Tenant
from cotenant.server.deciding.shape import Seat, Shape
from cotenant.server.deciding.world import Ask, Booking

Room: TypeAlias = tuple[int, int, int, int, int, int]
"""What an ask gets on one host at the earliest: (when, slots as a mask; what is left beside it of processors, memory, disk,
and of the host's limit). The time is 0 for what is free now."""


def _end(tenant: Tenant) -> tuple[int, str]:
    assert tenant.until_ms is not None
    return (tenant.until_ms, tenant.id)


def room_at(seat: Seat, shape: Shape) -> Room | None:
    """What an ask of this shape gets on one host at the earliest; None when known ends are not enough.

    Slots that are free now come first, then those that come free soonest.
    """
    host, needs = seat.host, shape.needs
    if host.gate:
        return None
    allowed = seat.cards or seat.shares  # a card for itself where the host has both kinds
    want = shape.low if seat.cards else 1
    mask, free = 0, host.free & allowed
    cpus, memory, disk = host.cpus_left, host.memory_left, host.disk_left
    holders, limit, alone = host.holders, host.view.max_jobs or NO_LIMIT, host.alone
    at_ms = 0
    ends = sorted((tenant for tenant in host.tenants if tenant.until_ms is not None), key=_end)
    for tenant in (None, *ends):
        if tenant is not None:
            assert tenant.until_ms is not None
            at_ms = tenant.until_ms
            free = tenant.mask & allowed & ~mask
            cpus, memory, disk = cpus + tenant.cpus, memory + tenant.memory_mib, disk + tenant.disk_mib
            holders, alone = holders - 1, alone - tenant.exclusive
        while free and mask.bit_count() < want:
            bit = free & -free
            mask |= bit
            free ^= bit
        if (
            mask.bit_count() >= want
            and not alone
            and needs.cpus <= cpus
            and needs.memory_mib <= memory
            and needs.disk_mib <= disk
            and holders < limit
            and not (needs.exclusive_host and holders)
        ):
            left = limit - holders - 1 if host.view.max_jobs else NO_LIMIT
            return (at_ms, mask, cpus - needs.cpus, memory - needs.memory_mib, disk - needs.disk_mib, left)
    return None


def _soonest(fleet: Fleet, shape: Shape) -> list[tuple[Seat, Room]]:
    """The hosts on which an ask of this shape gets its place first, as many as it wants; fewer where nobody knows when.

    The rooms of all hosts are kept in a heap from one look to the next, as in `Fleet.find`: hosts that changed get a new
    entry, and older entries of theirs are dropped when they come up.
    """
    heap, rooms = shape.soonest, shape.rooms
    changed = shape.seats if shape.moved_seen < 0 else fleet.seats_moved(shape)
    for seat in changed:
        host = seat.host
        room = rooms[host.name] = room_at(seat, shape)
        if room is not None:
            heappush(heap, (room[0], seat.prefer, host.name, host.ends))
    shape.moved_seen = len(fleet.moved)
    if len(heap) > 64 + 4 * len(shape.seats):
        heap[:] = [entry for entry in heap if shape.seat_on[entry[2]].host.ends == entry[3]]
        heapify(heap)
    found: list[tuple[Seat, Room]] = []
    taken: list[tuple[int, int, str, int]] = []
    while heap and len(found) < shape.nodes:
        entry = heap[0]
        seat = shape.seat_on[entry[2]]
        heappop(heap)
        if seat.host.ends == entry[3]:
            room = rooms[entry[2]]
            assert room is not None
            taken.append(entry)
            found.append((seat, room))
    for entry in taken:
        heappush(heap, entry)
    return found


def book(fleet: Fleet, ask: Ask, shape: Shape, now_ms: int, room_ms: int) -> Booking | None:
    """Keep for `ask` what will be free first on as many hosts as it wants, not before `room_ms`; None = nobody knows when."""
    chosen = _soonest(fleet, shape)
    if len(chosen) < shape.nodes:
        return None
    at_ms = max(now_ms, room_ms, *(room[0] for _, room in chosen))
    keys = []
    for seat, (_, mask, cpus, memory, disk, left) in sorted(chosen, key=lambda one: one[0].host.name):
        fleet.claim(seat.host, Claim(ask.id, at_ms, mask, cpus, memory, disk, left, shape.needs.exclusive_host))
        keys += [slot.key for _, slot in seat.host.keys(mask)]
    return Booking(ask.id, at_ms, tuple(keys))


def keep_everything(fleet: Fleet, ask: Ask, shape: Shape) -> None:
    """Without backfill: keep every slot that `ask` could use from all behind it, however soon they would be over."""
    for seat in shape.seats:
        mask = seat.cards | seat.shares
        if seat.host.gate or any(claim.mask == mask for claim in seat.host.claims):
            continue
        fleet.claim(seat.host, Claim(ask.id, -1, mask, NO_LIMIT, NO_LIMIT, NO_LIMIT, NO_LIMIT))
