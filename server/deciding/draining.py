"""Which leases drain: those of a draining pool, and what is above a cap that was lowered.

A draining lease finishes what it has: it is not interrupted, not renewed past its hard end, and its job gets no new
attempt while the pool drains or the cap is reached. So use above a cap only falls.
"""

from __future__ import annotations

from collections.abc import Iterable

from cotenant.server.deciding.usage import Use
from cotenant.server.deciding.world import UNITS_PER_CARD, Holding, World


def draining(world: World) -> frozenset[str]:
    """Ids of the living leases that drain. Of what is above a cap the least and newest go: lowest priority first.

    Leases whose slots are being cleaned are over and no excess. A lease that drains for one cap counts for no other.
    """
    use = Use(world)
    pools = {pool.name: pool for pool in world.pools}
    units = {lease.id: use.units_of(lease.slots) for lease in world.holdings}
    marked = {lease.id for lease in world.holdings if lease.pool in pools and pools[lease.pool].draining}
    order = sorted(world.holdings, key=lambda lease: (lease.priority, -lease.granted_at_ms, lease.id))

    def mark(group: Iterable[Holding], cap: int | None) -> None:
        if cap is None:
            return
        among = [lease for lease in group if lease.id not in marked]
        above = sum(units[lease.id] for lease in among) - max(0, cap) * UNITS_PER_CARD
        for lease in among:
            if above <= 0:
                return
            if units[lease.id]:
                marked.add(lease.id)
                above -= units[lease.id]

    for rules in world.owners:
        mark([lease for lease in order if lease.owner == rules.owner], rules.cap)
    for name in sorted(pools):
        pool, mine = pools[name], [lease for lease in order if lease.pool == name]
        for owner in sorted({lease.owner for lease in mine}):
            mark([lease for lease in mine if lease.owner == owner], pool.owner_cap)
        agents = [lease for lease in mine if not lease.human]
        for agent in sorted({lease.agent for lease in agents}):
            mark([lease for lease in agents if lease.agent == agent], pool.agent_cap)
        if pool.reserve:
            cap = use.cards[name] // UNITS_PER_CARD if pool.cap is None else pool.cap
            mark(agents, cap - pool.reserve)
        mark(mine, pool.cap)
    return frozenset(marked)
