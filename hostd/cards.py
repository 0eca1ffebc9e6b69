"""What hostd may ask of the cards, whatever they are; and the machine without any.

Owns the `Cards` protocol and `Sighting`, a card as the driver shows it, before anybody has judged whose processes
those are (clean.py does). Must not know: attempts, leases, the wire's framing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Collection, List, Optional, Protocol, Tuple

from cotenant.hostd.protocol import CardLinks


@dataclass(frozen=True)
class OnCard:
    """A process that the driver lists on a card. `memory_mib` is None where the driver does not tell."""

    pid: int
    memory_mib: Optional[int]
    graphics: bool = False


@dataclass(frozen=True)
class Sighting:
    """One card at one look. None always means "not known". `health`: ok | sick | lost | unverified."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    memory_used_mib: Optional[int] = None
    util_pct: Optional[int] = None
    temperature_c: Optional[int] = None
    power_w: Optional[int] = None
    health: str = "ok"
    reason: Optional[str] = None
    processes: Tuple[OnCard, ...] = ()
    simulated: bool = False
    mig_parent: Optional[str] = None
    compute_capability: Optional[str] = None
    pci_bus_id: Optional[str] = None
    xids: Tuple[int, ...] = ()
    seen_at: float = 0.0  # time.monotonic()


@dataclass(frozen=True)
class Driver:
    """How the driver answers; the words are those of HostFacts.nvml."""

    status: str
    message: Optional[str] = None
    version: Optional[str] = None
    cuda: Optional[str] = None


class Cards(Protocol):
    """The cards of this machine."""

    #: Seconds between looks while something is leased, and while nothing is. None: looks cost nothing, make none.
    busy_interval_s: Optional[float]
    idle_interval_s: Optional[float]

    @property
    def driver(self) -> Driver:
        """How the driver answered last."""
        ...

    @property
    def links(self) -> Tuple[CardLinks, ...]:
        """Which cards are joined by NVLink, as seen last; it is asked seldom."""
        ...

    @property
    def needs_new_process(self) -> bool:
        """Whether only another process can see the cards again: the driver was upgraded under this one."""
        ...

    def last(self) -> List[Sighting]:
        """The cards as last seen, in the driver's order. A card that has vanished stays, as lost."""
        ...

    async def look(self, uuids: Optional[Collection[str]] = None) -> List[Sighting]:
        """A fresh look at these cards, or all. Returns within a deadline also when the driver hangs; never raises."""
        ...

    def close(self) -> None:
        """Let go of the driver."""
        ...


class NoCards:
    """A machine without cards, or without a way to see them; `status` says which."""

    busy_interval_s: Optional[float] = None
    idle_interval_s: Optional[float] = None
    needs_new_process = False
    links: Tuple[CardLinks, ...] = ()

    def __init__(self, status: str, message: str) -> None:
        self._driver = Driver(status, message)

    @property
    def driver(self) -> Driver:
        return self._driver

    def last(self) -> List[Sighting]:
        return []

    async def look(self, uuids: Optional[Collection[str]] = None) -> List[Sighting]:
        return []

    def close(self) -> None:
        pass


class SomeCards:
    """Those cards of a machine that one host entry has: a machine may serve several, a card belongs to one of them.

    `only` names them (None: all), `but` those that others have; each by uuid, or by index in the driver's order. An
    instance of a divided card goes by its own uuid, its card's uuid or index.
    """

    def __init__(self, cards: Cards, only: Optional[Collection[str]], but: Collection[str]) -> None:
        self._cards = cards
        self._only = None if only is None else frozenset(only)
        self._but = frozenset(but)
        self.busy_interval_s = cards.busy_interval_s
        self.idle_interval_s = cards.idle_interval_s

    def _mine(self, card: Sighting) -> bool:
        names = {card.uuid, str(card.index), card.mig_parent or card.uuid}
        return (self._only is None or bool(names & self._only)) and not names & self._but

    @property
    def driver(self) -> Driver:
        return self._cards.driver

    @property
    def links(self) -> Tuple[CardLinks, ...]:
        mine = {card.uuid for card in self.last()}
        return tuple(pair for pair in self._cards.links if pair.a in mine and pair.b in mine)

    @property
    def needs_new_process(self) -> bool:
        return self._cards.needs_new_process

    def last(self) -> List[Sighting]:
        return [card for card in self._cards.last() if self._mine(card)]

    async def look(self, uuids: Optional[Collection[str]] = None) -> List[Sighting]:
        return [card for card in await self._cards.look(uuids) if self._mine(card)]

    def close(self) -> None:
        self._cards.close()


def ago_ms(sighting: Sighting) -> int:
    """How long ago the card was seen."""
    return max(0, int((time.monotonic() - sighting.seen_at) * 1000))
