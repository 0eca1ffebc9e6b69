"""When a pool may start something: the next opening and closing of its windows."""

from __future__ import annotations

import functools
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from cotenant.server.deciding.world import PoolRules, Window

_DAY = timedelta(days=1)


@functools.lru_cache(maxsize=1024)
def _spans(windows: tuple[Window, ...], zone: str, first: date) -> tuple[tuple[int, int], ...]:
    """(begin, end) in ms since the epoch of all windows that begin on the ten days from the day before `first` on."""
    where = ZoneInfo(zone)
    found: list[tuple[int, int]] = []
    for number in range(-1, 9):
        day = first + number * _DAY
        for window in windows:
            if day.weekday() in window.days:
                end_day = day if window.end_min > window.begin_min else day + _DAY
                begin, end = _at(day, window.begin_min, where), _at(end_day, window.end_min, where)
                if end > begin:
                    found.append((begin, end))
    return tuple(sorted(found))


def _at(day: date, minute: int, zone: ZoneInfo) -> int:
    if minute >= 24 * 60:
        day, minute = day + _DAY, minute - 24 * 60
    at = datetime(day.year, day.month, day.day, minute // 60, minute % 60, tzinfo=zone).astimezone(UTC)
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def opens_at_ms(rules: PoolRules, now_ms: int) -> int:
    """When the pool may start something: `now_ms` while it may, else the next opening. A pool without windows always may."""
    if not rules.windows:
        return now_ms
    spans = _spans(rules.windows, rules.timezone, _day(rules, now_ms))
    if any(begin <= now_ms < end for begin, end in spans):
        return now_ms
    return min((begin for begin, _ in spans if begin > now_ms), default=now_ms)


def next_change_ms(rules: PoolRules, now_ms: int) -> int | None:
    """The next opening or closing after `now_ms`; None for a pool without windows."""
    if not rules.windows:
        return None
    spans = _spans(rules.windows, rules.timezone, _day(rules, now_ms))
    return min((at for span in spans for at in span if at > now_ms), default=None)


def _day(rules: PoolRules, now_ms: int) -> date:
    return (
        (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=now_ms)).astimezone(ZoneInfo(rules.timezone)).date()
    )
