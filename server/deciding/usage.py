"""Who uses how much of what: the sums that caps are compared with. Cards are in units of 1/840."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from cotenant.server.deciding.world import UNITS_PER_CARD, Ask, Holding, SlotKey, Spent, World


@dataclass(frozen=True)
class PoolUse:
    """The use of one pool in units of 1/840 card; `owners` and `callers` are sorted by name."""

    pool: str
    cards: int  # units of all cards of the pool, whatever their state
    cap: int  # units that everybody together may use; the pool's cards where the pool has no cap
    agents_cap: int  # units that agents together may use: cap less reserve, not below 0
    used: int
    used_by_agents: int
    owners: tuple[tuple[str, int], ...]
    callers: tuple[tuple[str, int], ...]


class Use:
    """Running sums of one pass. Living leases count, lost ones too, and ended ones until their slots are clean."""

    def __init__(self, world: World) -> None:
        self.cards: defaultdict[str, int] = defaultdict(int)  # pool -> units there are
        self.units: dict[SlotKey, int] = {}
        for slot in world.slots:
            units = self.units[(slot.host, slot.uuid, slot.share)] = slot.units
            self.cards[slot.pool] += units
        self.all: defaultdict[str, int] = defaultdict(int)
        self.agents: defaultdict[str, int] = defaultdict(int)
        self.owner: defaultdict[str, int] = defaultdict(int)
        self.caller: defaultdict[str, int] = defaultdict(int)
        self.owner_in: defaultdict[tuple[str, str], int] = defaultdict(int)  # (owner, pool)
        self.caller_in: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.jobs: defaultdict[str, int] = defaultdict(int)  # by owner; leases at once, not units
        self.owner_jobs_in: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.caller_jobs_in: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.jobs_in: defaultdict[str, int] = defaultdict(int)  # by pool
        self.caller_jobs: defaultdict[str, int] = defaultdict(int)
        #: card-milliseconds of the last 24 h by owner, (owner, pool), agent, (agent, pool) and pool
        self.day_owner: defaultdict[str, int] = defaultdict(int)
        self.day_owner_in: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.day_caller: defaultdict[str, int] = defaultdict(int)
        self.day_caller_in: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.day_pool: defaultdict[str, int] = defaultdict(int)
        self.spend(world.spent)
        for lease in world.holdings:
            self.count(lease, self.units_of(lease.slots), 1)
        for lease in world.cleaning:  # its cards are not free yet, but it is no lease any more
            self.count(lease, self.units_of(lease.slots), 1, job=False)

    def spend(self, spent: tuple[Spent, ...]) -> None:
        """Take these sums of past use in place of those there were."""
        for sums in (self.day_owner, self.day_owner_in, self.day_caller, self.day_caller_in, self.day_pool):
            sums.clear()
        for one in spent:
            self.day_owner[one.owner] += one.day_ms
            self.day_owner_in[one.owner, one.pool] += one.day_ms
            self.day_caller[one.agent] += one.day_ms
            self.day_caller_in[one.agent, one.pool] += one.day_ms
            self.day_pool[one.pool] += one.day_ms

    def units_of(self, slots: tuple[SlotKey, ...]) -> int:
        """Units that these slots count. A card that is in no inventory any more counts whole until it is given back."""
        return sum(self.units.get(key, 0 if key[1] == "cpu" else UNITS_PER_CARD) for key in slots)

    def count(self, who: Ask | Holding, units: int, sign: int, *, job: bool = True) -> None:
        """Count what `who` holds, or with sign -1 no longer; `job`: as one of the leases at once too."""
        owner, agent, pool = who.owner, who.agent, who.pool
        if units:
            units *= sign
            self.all[pool] += units
            if not who.human:
                self.agents[pool] += units
            self.owner[owner] += units
            self.caller[agent] += units
            self.owner_in[owner, pool] += units
            self.caller_in[agent, pool] += units
        if job:
            self.jobs[owner] += sign
            self.jobs_in[pool] += sign
            self.caller_jobs[agent] += sign
            self.owner_jobs_in[owner, pool] += sign
            self.caller_jobs_in[agent, pool] += sign


def usage(world: World, pool: str) -> PoolUse:
    """How much of `pool` is used, by whom, and what its limits are. A pool that nobody configured has no limits."""
    use = Use(world)
    rules = next((p for p in world.pools if p.name == pool), None)
    cards = use.cards[pool]
    cap = cards if rules is None or rules.cap is None else rules.cap * UNITS_PER_CARD
    reserve = 0 if rules is None else rules.reserve * UNITS_PER_CARD
    return PoolUse(
        pool=pool,
        cards=cards,
        cap=cap,
        agents_cap=max(0, cap - reserve),
        used=use.all[pool],
        used_by_agents=use.agents[pool],
        owners=tuple(sorted((owner, n) for (owner, p), n in use.owner_in.items() if p == pool and n)),
        callers=tuple(sorted((agent, n) for (agent, p), n in use.caller_in.items() if p == pool and n)),
    )
