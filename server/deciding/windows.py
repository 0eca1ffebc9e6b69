"""When a pool may start something: the next opening and closing of its windows."""

from __future__ import annotations

import functools
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from cotenant.server.deciding.world import PoolRules, Window

_DAY = timedelta(days=1)
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def window_of(text: str) -> Window:
    """``mon-fri 20:00-08:00``, ``sat,sun 00:00-24:00``, ``daily 22:00-06:00``, as a Window.

    Raises:
        ValueError: it cannot be read so; the message says what is wrong.
    """
    days_text, _, hours = text.strip().lower().partition(" ")
    begin, dash, end = hours.strip().partition("-")
    if not dash:
        raise ValueError(f'{text!r} is no window: write days and hours, such as "mon-fri 20:00-08:00"')
    days: set[int] = set(range(7)) if days_text == "daily" else set()
    for part in () if days_text == "daily" else days_text.split(","):
        first, _, last = part.partition("-")
        if first not in DAYS or (last and last not in DAYS):
            raise ValueError(f"{part!r} is no day: use {', '.join(DAYS)}, a span such as mon-fri, or daily")
        number, until = DAYS.index(first), DAYS.index(last or first)
        while number != until:
            days.add(number)
            number = (number + 1) % 7
        days.add(until)
    window = Window(tuple(sorted(days)), _minutes(begin, text), _minutes(end, text))
    if window.begin_min == window.end_min or window.begin_min == 24 * 60:
        raise ValueError(f"{text!r} has no length: begin and end must differ, 00:00-24:00 is a whole day")
    return window


def window_text(window: Window) -> str:
    """The window as it is written."""
    days = "daily" if len(window.days) == 7 else ",".join(DAYS[number] for number in window.days)
    begin, end = (f"{m // 60:02d}:{m % 60:02d}" for m in (window.begin_min, window.end_min))
    return f"{days} {begin}-{end}"


def _minutes(text: str, whole: str) -> int:
    hour, colon, minute = text.strip().partition(":")
    if not (colon and hour.isdecimal() and minute.isdecimal() and len(minute) == 2 and int(minute) < 60):
        raise ValueError(f"{whole!r}: {text.strip()!r} is no time of day, such as 20:00")
    value = int(hour) * 60 + int(minute)
    if value > 24 * 60:
        raise ValueError(f"{whole!r}: {text.strip()!r} is after 24:00")
    return value


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
    spans = _near(rules, now_ms)
    if any(begin <= now_ms < end for begin, end in spans):
        return now_ms
    return min((begin for begin, _ in spans if begin > now_ms), default=now_ms)


def next_change_ms(rules: PoolRules, now_ms: int) -> int | None:
    """The next opening or closing after `now_ms`; None for a pool without windows."""
    if not rules.windows:
        return None
    return min((at for span in _near(rules, now_ms) for at in span if at > now_ms), default=None)


def _near(rules: PoolRules, now_ms: int) -> tuple[tuple[int, int], ...]:
    """The spans of a pool's windows around `now_ms`."""
    now = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=now_ms)
    return _spans(rules.windows, rules.timezone, now.astimezone(ZoneInfo(rules.timezone)).date())
