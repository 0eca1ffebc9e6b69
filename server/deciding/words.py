"""How numbers, names and times are written in blockers. Names are identifiers and stand as JSON strings."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from cotenant.server.deciding.world import UNITS_PER_CARD

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST_MS = 253_402_300_799_000  # the end of year 9999: a date can say no more


def quoted(name: str) -> str:
    """A name as a JSON string in ASCII, so that nothing in it reads as part of the sentence."""
    return json.dumps(name)


def plural(count: int, one: str, many: str) -> str:
    """``1 card``, ``2 cards``."""
    return f"{count} {one if count == 1 else many}"


def cards_text(units: int, noun: bool = True) -> str:
    """Units of 1/840 card as cards with at most two decimals (rounded down): ``1 card``, ``2.5 cards``, ``0.33``."""
    whole, rest = divmod(units, UNITS_PER_CARD)
    number = f"{whole}.{rest * 100 // UNITS_PER_CARD:02d}".rstrip("0") if rest else str(whole)
    if not noun:
        return number
    return f"{number} card" if units == UNITS_PER_CARD else f"{number} cards"


def cards_up(units: int) -> int:
    """Units of 1/840 card as whole cards, a part counting as one."""
    return -(-units // UNITS_PER_CARD)


def at_text(at_ms: int) -> str:
    """A time in ms since the epoch as ISO 8601 in UTC, to the second."""
    at = _EPOCH + timedelta(milliseconds=max(0, min(at_ms, _LATEST_MS)))
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
