"""Cards that people booked in advance: what is left for others, at any time that they would still run.

A reservation keeps a number of cards, not certain ones: who would still hold cards when it begins has to leave as many
as were booked. It frees itself where it is not used: a quarter of an hour after its begin it keeps cards only as long as
its owner holds any in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cotenant.server.deciding.world import UNITS_PER_CARD, Ask, Reservation

UNUSED_MS = 15 * 60_000


@dataclass(frozen=True)
class Stay:
    """What a lease holds in a pool, and until when at the latest (None: nobody knows)."""

    owner: str
    units: int
    until_ms: int | None

    def there(self, at_ms: int) -> bool:
        return self.until_ms is None or self.until_ms > at_ms


def in_force(reservation: Reservation, stays: Iterable[Stay], now_ms: int) -> bool:
    """Whether the reservation keeps anything now or later."""
    if reservation.end_ms <= now_ms:
        return False
    if now_ms < reservation.begin_ms + UNUSED_MS:
        return True
    return any(stay.owner == reservation.owner for stay in stays)


def room(
    reservations: Iterable[Reservation], stays: Iterable[Stay], units: int, ask: Ask, now_ms: int, ends_ms: int
) -> tuple[int, Reservation | None]:
    """(units that `ask` may take of a pool with `units` in all, if it is over by `ends_ms`; the reservation that binds).

    `reservations` are those in force in the pool. Of what an owner holds its own reservations are filled first, so his
    asks are bound by those of others only.
    """
    others = [r for r in reservations if r.owner != ask.owner and r.begin_ms < ends_ms and r.end_ms > now_ms]
    if not others:
        return units, None
    stays = list(stays)
    best, bound = units, None
    for at_ms in sorted({max(now_ms, r.begin_ms) for r in others}):
        kept = 0
        first: Reservation | None = None
        for reservation in sorted(others, key=lambda r: (r.begin_ms, r.id)):
            if reservation.begin_ms <= at_ms < reservation.end_ms:
                mine = sum(s.units for s in stays if s.owner == reservation.owner and s.there(at_ms))
                kept += max(0, reservation.cards * UNITS_PER_CARD - mine)
                first = first or reservation
        left = units - sum(s.units for s in stays if s.there(at_ms)) - kept
        if left < best:
            best, bound = left, first
    return max(0, best), bound


def next_change_ms(reservations: Iterable[Reservation], now_ms: int) -> int | None:
    """When a reservation begins, frees itself or ends next."""
    due = [at for r in reservations for at in (r.begin_ms, r.begin_ms + UNUSED_MS, r.end_ms) if at > now_ms]
    return min(due, default=None)
