"""Looks at cards in which nobody is listed who is not there.

Must not know: whose the processes on a card are (clean.py).
"""

from __future__ import annotations

from typing import Collection, List, Optional

from cotenant.hostd import processes
from cotenant.hostd.cards import Cards, Sighting


class Looks:
    """The cards of this machine, looked at."""

    def __init__(self, cards: Cards) -> None:
        self.cards = cards

    async def last(self) -> List[Sighting]:
        """All cards as last seen."""
        return await self._without_ghosts(self.cards.last())

    async def fresh(self, uuids: Optional[Collection[str]] = None) -> List[Sighting]:
        """A fresh look at these cards, or all, in which nobody is listed who ended while it was made."""
        return await self._without_ghosts(await self.cards.look(uuids))

    async def _without_ghosts(self, seen: List[Sighting]) -> List[Sighting]:
        """`seen`, with a second look at cards that list a process which is not there.

        One that ended after the driver was read is no stranger on the card. One that is listed again lives where we
        cannot see it (another PID namespace), and is one.
        """
        gone = [card.uuid for card in seen if any(_is_gone(one.pid) for one in card.processes)]
        if not gone:
            return seen
        fresh = {card.uuid: card for card in await self.cards.look(gone)}
        return [fresh.get(card.uuid, card) for card in seen]


def _is_gone(pid: int) -> bool:
    """Not there, or only waiting to be reaped: the driver has let go of it by now, and it may vanish at any moment."""
    stat = processes.stat(pid)
    return stat is None or stat.state in "ZX"
