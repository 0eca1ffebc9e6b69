"""Needs and the slots that they allow, whatever the state of these."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.server.deciding.hosts import Host, Kind
from cotenant.server.deciding.world import UNITS_PER_CARD, HostView, Needs


@dataclass(frozen=True)
class Seat:
    """The slots of one host that an ask's needs allow, whatever their state."""

    host: Host
    cards: int  # whole cards; cpu places for an ask without cards
    shares: int  # shares of cards, for an ask that says how much memory it needs
    pool_cards: int  # all whole cards (or cpu places) of the pool on this host: fewest left over wins
    prefer: int  # place in prefer_hosts, then of the first label in prefer_labels; the less the better


class Shape:
    """Needs in a pool, with the seats they allow: the part of an ask that placement looks at."""

    __slots__ = (
        "cpu",
        "fixed",
        "heap",
        "high",
        "latest_at",
        "latest_ms",
        "least_units",
        "low",
        "moved_seen",
        "needs",
        "nodes",
        "none_at",
        "number",
        "pool",
        "rooms",
        "seat_on",
        "seats",
        "seen",
        "share_units",
        "soonest",
    )

    def __init__(self, number: int, pool: str, needs: Needs, hosts: list[Host]) -> None:
        self.number = number
        self.pool = pool
        self.needs = needs
        self.cpu = needs.gpus_max <= 0
        self.low = 1 if self.cpu else max(1, needs.gpus_min)
        self.high = 1 if self.cpu else max(self.low, needs.gpus_max)
        self.nodes = max(1, needs.nodes)
        self.fixed = self.nodes == 1 and self.low == self.high  # a fixed number of cards on one host
        seats = self._seats(hosts, avoiding=True)
        if (needs.avoid_hosts or needs.avoid_cards) and not self._could_fit(seats):
            # What a job should avoid is a wish: on the only host there is, a second attempt is better than none.
            seats = self._seats(hosts, avoiding=False)
        self.seats = seats
        self.seat_on = {seat.host.name: seat for seat in seats}
        self.heap: list[tuple[int, int, str, int]] | None = None  # of `Fleet._top`
        self.seen = 0
        self.rooms: dict[str, tuple[int, int, int, int, int, int] | None] = {}  # these three of `booking`
        self.soonest: list[tuple[int, int, str, int]] = []
        self.moved_seen = -1
        self.none_at = -1  # of `Fleet.possible`
        self.latest_at = -1  # these two of `Fleet.latest_ms`
        self.latest_ms = 0
        self.share_units = min(
            (slot.units for seat in seats for _, slot in seat.host.keys(seat.shares)),
            default=0,
        )
        #: the units that it takes at least
        self.least_units = 0 if self.cpu else self.share_units or self.low * self.nodes * UNITS_PER_CARD

    @property
    def takes_share(self) -> bool:
        """Whether one share of a card would do: the ask says how much memory it needs and can live with one card."""
        return not self.cpu and self.needs.gpu_memory_mib > 0 and self.low == 1 and self.nodes == 1

    def _could_fit(self, seats: list[Seat]) -> bool:
        enough = sum(1 for seat in seats if seat.cards.bit_count() >= self.low)
        return enough >= self.nodes or any(seat.shares for seat in seats)

    def _seats(self, hosts: list[Host], avoiding: bool) -> list[Seat]:
        needs = self.needs
        avoid_cards = needs.avoid_cards if avoiding else ()
        seats: list[Seat] = []
        for host in hosts:
            if host_misses(needs, host.view) or (avoiding and host.name in needs.avoid_hosts):
                continue
            cards = shares = pool_cards = 0
            for kind, mask in host.kinds.items():
                if kind[0] != self.pool or (kind[1] == "cpu") != self.cpu:
                    continue
                if self.cpu:
                    cards |= mask
                    pool_cards |= mask
                    continue
                if kind[2] == 1:
                    pool_cards |= mask
                if card_misses(needs, kind):
                    continue
                if kind[2] == 1:
                    cards |= mask
                elif self.takes_share:
                    shares |= mask
            if host.mig and self.high > 1 and (cards & ~host.mig or self.low > 1):
                cards &= ~host.mig  # a program can use only one part of a divided card
            if avoid_cards:
                for bit, slot in host.keys(cards | shares):
                    if slot.uuid in avoid_cards:
                        cards &= ~bit
                        shares &= ~bit
            if cards or shares:
                seats.append(Seat(host, cards, shares, pool_cards, _preference(needs, host.view)))
        return seats


def _preference(needs: Needs, view: HostView) -> int:
    """How much a host is preferred, 0 the most: its place among the named hosts, then of its first label that is named."""
    if view.name in needs.prefer_hosts:
        return needs.prefer_hosts.index(view.name)
    named = len(needs.prefer_hosts)
    for rank, label in enumerate(needs.prefer_labels):
        if label in view.labels:
            return named + rank
    return named + len(needs.prefer_labels)


def host_misses(needs: Needs, view: HostView) -> str:
    """The first need that this host can never meet, by name; empty when it meets them."""
    if needs.hosts and view.name not in needs.hosts:
        return "hosts"
    if needs.labels and any(label not in view.labels for label in needs.labels):
        return "labels"
    if needs.driver and version(view.driver) < version(needs.driver):
        return "driver"
    if needs.cuda > view.cuda:
        return "cuda"
    if needs.cpus > view.cpus:
        return "cpus"
    if needs.memory_mib > view.memory_mib:
        return "memory_mib"
    if needs.disk_mib > view.disk_mib:
        return "disk_mib"
    return ""


def card_misses(needs: Needs, kind: Kind) -> str:
    """The first need that a card of this kind can never meet, by name; empty when it meets them."""
    _, _, _, model, memory_mib, capability = kind
    if needs.models and not any(wanted.lower() in model.lower() for wanted in needs.models):
        return "models"
    if needs.gpu_memory_mib > memory_mib:
        return "gpu_memory_mib"
    if needs.capability > capability:
        return "capability"
    return ""


def version(text: str) -> tuple[int, ...]:
    """A dotted version as numbers, so that 99 is before 535; what is no number ends it."""
    parts: list[int] = []
    for part in text.strip().split("."):
        if not (part.isascii() and part.isdigit()):
            break
        parts.append(int(part))
    return tuple(parts)
