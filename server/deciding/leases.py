"""When leases end: the direct ones that end now, and the ends that others may count on."""

from __future__ import annotations

from collections.abc import Iterable

from cotenant.server.deciding import reserved, windows
from cotenant.server.deciding.caps import HOUR_MS
from cotenant.server.deciding.world import Expire, Holding, Policy, PoolRules, Reservation, World


def expired(holdings: Iterable[Holding], now_ms: int) -> list[Expire]:
    """The direct leases among `holdings` that end now, by id.

    A claim that was granted and not picked up has no ttl yet: its time starts with the first heartbeat. Job leases
    never end here: their time limit is kept by the shim on the host. The slots stay taken until the host has
    reported them clean, so nothing of an expired lease is free in the same pass.
    """
    found: list[Expire] = []
    for lease in holdings:
        if lease.kind != "direct":
            continue
        if lease.hard_end_ms <= now_ms:
            found.append(Expire(lease.id, "hard_end"))
        elif lease.pickup_ms is not None:
            if lease.pickup_ms <= now_ms:
                found.append(Expire(lease.id, "pickup_twice" if lease.missed_pickups else "pickup"))
        elif lease.expires_ms is not None and lease.expires_ms <= now_ms:
            found.append(Expire(lease.id, "ttl"))
    return sorted(found, key=lambda e: e.lease_id)


def next_due_ms(world: World, now_ms: int) -> int | None:
    """The earliest time after `now_ms` at which something may change by itself.

    A direct lease ends; an ask may start again, is given up, or has waited so long that it goes first; a pool's window
    opens or closes; an advance reservation begins, frees itself or ends.
    """
    due = direct_ends(world.holdings)
    pools = {pool.name: pool for pool in world.pools}
    for ask in world.asks:
        due.append(ask.not_before_ms)
        if ask.not_after_ms is not None:
            due.append(ask.not_after_ms)
        if (pool := pools.get(ask.pool)) is not None:
            due.append(ask.queued_at_ms + pool.starve_h * HOUR_MS)
    if world.asks:
        due += rule_changes(world.pools, world.reservations, now_ms)
    return min((at for at in due if at > now_ms), default=None)


def direct_ends(holdings: Iterable[Holding]) -> list[int]:
    """When each direct lease ends if nobody renews it or picks it up."""
    due: list[int] = []
    for lease in holdings:
        if lease.kind == "direct":
            soft = lease.expires_ms if lease.pickup_ms is None else lease.pickup_ms
            due.append(lease.hard_end_ms if soft is None else min(soft, lease.hard_end_ms))
    return due


def rule_changes(pools: Iterable[PoolRules], reservations: Iterable[Reservation], now_ms: int) -> list[int]:
    """The next change of each pool's window, and of the advance reservations."""
    due = [at for pool in pools if (at := windows.next_change_ms(pool, now_ms)) is not None]
    if (at := reserved.next_change_ms(reservations, now_ms)) is not None:
        due.append(at)
    return due


def known_end_ms(lease: Holding, policy: Policy) -> int | None:
    """When the slots of a living lease are free at the latest, or None for a lost or suspended one: nobody knows that."""
    if lease.lost or lease.suspended:
        return None
    return lease.hard_end_ms + (lease.stop_s + policy.cleaning_s) * 1000
