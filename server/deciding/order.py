"""Who comes first in a pool, and who may pass whom while it waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from cotenant.server.deciding.caps import HOUR_MS
from cotenant.server.deciding.hosts import NO_LIMIT
from cotenant.server.deciding.world import Ask, PoolRules, Spent, World

Key: TypeAlias = tuple[int, int, int, str]
"""(rank, place within the rank by the pool's order, time of submit, id): the lowest comes first."""

CRITICAL = 30
STARVING = 2 * CRITICAL - 1  # the rank just below critical work


def rank(ask: Ask, rules: PoolRules | None, now_ms: int) -> int:
    """What stands above every order: priority, then those on their way back; and below critical whoever waited too long.

    Ageing changes no priority and no right: it only makes an ask that has waited `starve_h` the head of its queue, so
    that what it waits for is kept for it. Where its own caps hold it back it is passed as ever.
    """
    if rules is not None and ask.priority < CRITICAL and ask.queued_at_ms + rules.starve_h * HOUR_MS <= now_ms:
        return STARVING
    return 2 * ask.priority + ask.resumed


class Order:
    """The order of all asks of a world: `key` gives each its place."""

    def __init__(self, world: World, now_ms: int) -> None:
        self._pools = {pool.name: pool for pool in world.pools}
        self._now_ms = now_ms
        self._past = past_use(world.spent)

    def key(self, ask: Ask) -> Key:
        """The place of `ask`."""
        rules = self._pools.get(ask.pool)
        first = rank(ask, rules, self._now_ms)
        if rules is None or rules.order == "fifo" or first == STARVING:
            return (-first, 0, ask.queued_at_ms, ask.id)
        by = fairshare(ask, self._past) if rules.order == "fairshare" else shortest(ask)
        return (-first, by, ask.queued_at_ms, ask.id)


def past_use(spent: Iterable[Spent]) -> dict[tuple[str, str], int]:
    """(pool, owner) -> card-milliseconds used, older ones weighing less."""
    found: dict[tuple[str, str], int] = {}
    for one in spent:
        of = (one.pool, one.owner)
        found[of] = found.get(of, 0) + one.decayed_ms
    return found


def fairshare(ask: Ask, past: Mapping[tuple[str, str], int]) -> int:
    """Owners that used least of the pool lately come first: card-milliseconds, older ones weighing less."""
    return past.get((ask.pool, ask.owner), 0)


def shortest(ask: Ask) -> int:
    """What takes least comes first: cards times the longest time that it may hold them, in card-milliseconds."""
    return ask.hours_ms * max(1, ask.needs.gpus_min * ask.needs.nodes)


def in_order(world: World, now_ms: int, asks: Iterable[Ask] | None = None) -> list[Ask]:
    """The asks (all of the world's, or these) in the order in which they are looked at."""
    return sorted(world.asks if asks is None else asks, key=Order(world, now_ms).key)


class Line:
    """What the first waiting ask of one pool keeps from those behind it: room under the pool's cap.

    Slots are claimed on their hosts; what is here holds for the whole pool. An ask that waits for something of its own
    (its owner's caps, a hold, a back-off) keeps nothing.
    """

    __slots__ = ("agents_spare", "all_spare", "at_ms", "by")

    def __init__(self) -> None:
        self.by: str | None = None  # the ask that something is kept for
        self.at_ms = NO_LIMIT  # who is over by then may use it meanwhile
        self.all_spare: int | None = None  # units left for those who are not, everybody together; None = any
        self.agents_spare: int | None = None  # the same for agents, under cap less reserve

    def room(self, human: bool, ends_ms: int) -> int:
        """Units that an ask which is over by `ends_ms` may take without delaying the first."""
        if self.by is None or ends_ms <= self.at_ms:
            return NO_LIMIT
        room = NO_LIMIT if self.all_spare is None else self.all_spare
        if not human and self.agents_spare is not None:
            room = min(room, self.agents_spare)
        return max(0, room)

    def latest_ms(self, human: bool, wanted: int) -> int:
        """Until when an ask for `wanted` units may stay without delaying the first: NO_LIMIT where there is room for both."""
        if self.by is None or (
            (self.all_spare is None or wanted <= self.all_spare)
            and (human or self.agents_spare is None or wanted <= self.agents_spare)
        ):
            return NO_LIMIT
        return self.at_ms

    def take(self, human: bool, units: int, ends_ms: int) -> None:
        """Count the start of an ask that passed."""
        if self.by is None or ends_ms <= self.at_ms:
            return
        if self.all_spare is not None:
            self.all_spare -= units
        if self.agents_spare is not None and not human:
            self.agents_spare -= units
