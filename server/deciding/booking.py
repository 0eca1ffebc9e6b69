"""When the first ask that does not fit will fit, from known ends, and what is kept for it until then."""

from __future__ import annotations

from cotenant.server.deciding.fit import Fleet
from cotenant.server.deciding.hosts import NO_LIMIT, Claim, Tenant
from cotenant.server.deciding.shape import Seat, Shape
from cotenant.server.deciding.world import Ask, Booking


def _end(tenant: Tenant) -> tuple[int, str]:
    assert tenant.until_ms is not None
    return (tenant.until_ms, tenant.id)


def room_at(seat: Seat, shape: Shape, ask: Ask, now_ms: int) -> Claim | None:
    """What `ask` gets on one host at the earliest, as the claim that keeps it; None when known ends are not enough.

    Slots that are free now come first, then those that come free soonest.
    """
    host, needs = seat.host, shape.needs
    if host.gate:
        return None
    allowed = seat.cards or seat.shares  # a card for itself where the host has both kinds
    want = shape.low if seat.cards else 1
    mask, free = 0, host.free & allowed
    cpus, memory, disk = host.cpus_left, host.memory_left, host.disk_left
    holders, limit = host.holders, host.view.max_jobs or NO_LIMIT
    alone = sum(1 for tenant in host.tenants if tenant.exclusive)
    at_ms = now_ms
    ends = sorted((tenant for tenant in host.tenants if tenant.until_ms is not None), key=_end)
    for tenant in (None, *ends):
        if tenant is not None:
            assert tenant.until_ms is not None
            at_ms = max(at_ms, tenant.until_ms)
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
            return Claim(
                ask.id, at_ms, mask, cpus - needs.cpus, memory - needs.memory_mib, disk - needs.disk_mib,
                limit - holders - 1 if host.view.max_jobs else NO_LIMIT, needs.exclusive_host,
            )  # fmt: skip
    return None


def book(fleet: Fleet, ask: Ask, shape: Shape, now_ms: int, room_ms: int) -> Booking | None:
    """Keep for `ask` what will be free first on as many hosts as it wants, not before `room_ms`; None = nobody knows when."""
    found = [
        (claim.at_ms, seat.prefer, seat.host.name, seat, claim)
        for seat in shape.seats
        if (claim := room_at(seat, shape, ask, now_ms)) is not None
    ]
    if len(found) < shape.nodes:
        return None
    found.sort(key=lambda one: one[:3])
    chosen = found[: shape.nodes]
    at_ms = max(room_ms, *(one[0] for one in chosen))
    keys = []
    for *_, seat, claim in sorted(chosen, key=lambda one: one[2]):
        claim.at_ms = at_ms
        fleet.claim(seat.host, claim)
        keys += [slot.key for _, slot in seat.host.keys(claim.mask)]
    return Booking(ask.id, at_ms, tuple(keys))


def keep_everything(fleet: Fleet, ask: Ask, shape: Shape) -> None:
    """Without backfill: keep every slot that `ask` could use from all behind it, however soon they would be over."""
    for seat in shape.seats:
        mask = seat.cards | seat.shares
        if seat.host.gate or any(claim.mask == mask for claim in seat.host.claims):
            continue
        fleet.claim(seat.host, Claim(ask.id, -1, mask, NO_LIMIT, NO_LIMIT, NO_LIMIT, NO_LIMIT))
