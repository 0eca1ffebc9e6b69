"""Who comes first in a pool, and who may pass whom while it waits."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from cotenant.server.deciding.world import Ask

_BY_TIME = attrgetter("queued_at_ms", "id")
_BY_RANK = attrgetter("priority", "resumed")


def in_order(asks: Iterable[Ask]) -> list[Ask]:
    """The asks as they are looked at: priority, resumed victims within it, time of submit, id.

    Two stable sorts on attributes instead of one on a built key: the keys are made in C, which halves the time for a long queue.
    """
    return sorted(sorted(asks, key=_BY_TIME), key=_BY_RANK, reverse=True)


class Line:
    """What the waiting asks of one pool keep from those behind them.

    An ask that waits for something others could take before it (cards in use, the pool's cap, the agents' part of
    the cap) guards it. Slots are guarded in the fleet's masks; what is here is guarded for the whole pool.
    An ask that waits for something of its own (its owner's caps, a hold, a back-off) guards nothing.
    """

    __slots__ = ("agents_behind", "all_behind")

    def __init__(self) -> None:
        self.all_behind: str | None = None  # the first ask that waits for room under the pool's cap
        self.agents_behind: str | None = None  # the first agent's ask that waits for room under cap less reserve

    def guard(self, ask: Ask, code: str) -> None:
        """Remember that `ask` waits for the pool's cap (``quota_pool``) or the agents' part of it (``reserve``)."""
        if code == "quota_pool":
            self.all_behind = self.all_behind or ask.id
        elif code == "reserve":
            self.agents_behind = self.agents_behind or ask.id

    def first_before(self, later: Ask) -> str | None:
        """The waiting ask that `later` may not pass wherever it would be placed, or None.

        Strict: no look at how long `later` would hold its cards. Backfill belongs here and in `Fleet.find`, whose flag
        BEHIND lets an ask use guarded slots. An ask without cards counts against no cap and passes; a person passes an
        agent that waits at the reserve, since what is left is kept for people.
        """
        if later.needs.gpus_max == 0:
            return None
        if self.all_behind is not None:
            return self.all_behind
        return None if later.human else self.agents_behind
