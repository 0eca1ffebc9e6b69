"""Everything at one look, as lines of text: `cotenant top` draws them again and again, or prints them once.

A line is a list of (text, colour) pieces, so that it can be cut to a width before it is painted. What others wrote is made
harmless in `piece`, the one way into a line.
"""

from __future__ import annotations

import unicodedata

from cotenant.ui.cli import show

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Answer = dict[str, Any]
    Line = list[tuple[str, str]]

_TONES = {
    "free": show.GREEN, "running": show.GREEN, "sick": show.RED, "lost": show.RED, "critical": show.RED, "warning": show.YELLOW,
    "occupied": show.YELLOW, "unknown": show.YELLOW, "unverified": show.YELLOW, "stopping": show.YELLOW, "stale": show.YELLOW,
}  # fmt: skip
#: The widest a column gets while there is more to show than room.
_NARROW = 10


def piece(text: Any, colour: str = "") -> tuple[str, str]:
    """Anything as a harmless piece of a line; unknown is -, never 0."""
    return show.cell(text).replace("\t", " "), colour


def lines(seen: Answer, width: int | None, later_s: float = 0) -> list[Line]:
    """What was read, `later_s` seconds after it was. None: as wide as it is."""
    later = int(later_s)
    out: list[Line] = [[piece(seen["headline"], show.BOLD)]]
    if any(gpu["simulated"] for gpu in seen["gpus"]):
        out.append([piece("The cards are simulated; the processes on them are real.", show.YELLOW)])
    out += [_pool(pool) for pool in seen["pools"]]
    for alert in seen["alerts"]:
        reason = f": {alert['reason']}" if alert.get("reason") else ""
        out.append([piece(f"! {alert['about']}: {alert['what']}{reason}", _TONES.get(alert["severity"], ""))])
    stale = set(seen["gpus_stale"])
    cards = [_card(gpu, gpu["uuid"] in stale, seen["at"], later) for gpu in seen["gpus"]]
    heads: tuple[str, ...] = ("CARD", "STATE", "HOLDER", "JOB", "UNTIL", "MEMORY MIB", "USE %", "SEEN")
    out += _section("Cards", heads, cards, "No card.", width)
    works = [_work(work, later) for work in seen["working"]]
    heads = ("ID", "STATE", "NAME", "HOLDER", "WHERE", "FOR", "LEFT")
    out += _section(
        _title("At work", seen["working_total"], works), heads, works, "Nothing runs, nobody holds a lease.", width
    )
    waits = [_waiter(item, later) for item in seen["waiting"]]
    heads = ("ID", "NAME", "HOLDER", "CARDS", "PRIORITY", "FOR", "WHY")
    out += _section(_title("Waiting", seen["waiting_total"], waits), heads, waits, "Nobody waits.", width)
    out += [[], _ended(seen["ended"])]
    events = [_event(event, later) for event in seen["events"]]
    out += _section("What happened last", ("AT", "SEVERITY", "TYPE", "BY", "ABOUT", "WHAT"), events, "Nothing.", width)
    return out


def fit(line: Line, width: int | None) -> str:
    """A line cut to `width` columns of a terminal, and painted."""
    out, left = [], width
    for text, colour in line:
        shown = text if left is None else cut(text, left)
        if left is not None:
            left -= columns_of(shown)
        out.append(show.paint(shown, colour) if colour and shown.strip() else shown)
    return "".join(out).rstrip()


def columns_of(text: str) -> int:
    """Columns that a terminal takes for it: East Asian letters are two wide, marks on letters none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """At most `width` columns of it; an ellipsis marks a cut."""
    if columns_of(text) <= width:
        return text
    out, taken = [], 1
    for c in text:
        taken += columns_of(c)
        if taken > width:
            break
        out.append(c)
    return "".join(out) + "…" if width > 0 else ""


def _section(title: str, heads: Sequence[str], rows: list[Line], empty: str, width: int | None) -> list[Line]:
    if not rows:
        return [[], [piece(title, show.BOLD), piece(f"  {empty}", show.DIM)]]
    return [[], [piece(title, show.BOLD)], *_table(heads, rows, width)]


def _table(heads: Sequence[str], rows: list[Line], width: int | None) -> list[Line]:
    """Rows under heads; where there is no room the widest give way, and the last is cut at the edge."""
    widths = [max(len(head), *(columns_of(row[i][0]) for row in rows)) for i, head in enumerate(heads)]
    if width is not None:
        for i in sorted(range(1, len(widths)), key=lambda i: -widths[i]):  # what stands first is an id
            over = sum(widths) + 2 * (len(widths) - 1) - width
            if over > 0:
                widths[i] = max(len(heads[i]), _NARROW, widths[i] - over)
    table = [[(head, show.DIM) for head in heads], *rows]
    return [[(_padded(text, widths[i]) + "  ", colour) for i, (text, colour) in enumerate(row)] for row in table]


def _padded(text: str, width: int) -> str:
    shown = cut(text, width)
    return shown + " " * (width - columns_of(shown))


def _pool(pool: Answer) -> Line:
    marks = [mark for mark, on in (("paused", pool["paused"]), ("near its cap", pool["near_cap"])) if on]
    if not pool["known"]:
        marks.append("some cards unknown")
    said = (
        f"{pool['free']} of {pool['cards']} free, {pool['used']} of cap {pool['cap']} in use, {pool['reserved']} kept for people,"
        f" {pool['running']} at work, {pool['waiting']} waiting"
    )
    return [
        piece("pool "),
        piece(pool["pool"], show.BOLD),
        piece(f"  {said}"),
        *(piece(f"  {m}", show.YELLOW) for m in marks),
    ]


def _card(gpu: Answer, stale: bool, at: str, later: int) -> Line:
    used = "?" if gpu["memory_used_mib"] is None else gpu["memory_used_mib"]
    seen = "never" if gpu["age_s"] is None else f"{show.span(gpu['age_s'] + later)} ago"
    state = gpu["state"] + (f": {gpu['reason']}" if gpu["reason"] else "")
    return [
        piece(f"{gpu['host']}:{gpu['index']}"),
        piece(state, _TONES.get(gpu["state"], "")),
        piece(gpu["holder"]),
        piece(gpu["job_name"] or gpu["job_id"] or gpu["lease_id"]),
        piece(_minute(gpu["until"], at)),
        piece(f"{used}/{gpu['memory_mib']}"),
        piece("?" if gpu["util_pct"] is None else gpu["util_pct"]),
        piece(f"{seen} stale" if stale else seen, show.YELLOW if stale else ""),
    ]


def _work(work: Answer, later: int) -> Line:
    return [
        piece(work["id"]),
        piece(work["state"] + (" draining" if work["draining"] else ""), _TONES.get(work["state"], "")),
        piece(work["name"]),
        piece(work["holder"]),
        piece(cards if (cards := show.slots(work)) != "-" else work["host"]),
        piece("not started" if work["for_s"] is None else show.span(work["for_s"] + later)),
        piece(None if work["left_s"] is None else show.span(max(0, work["left_s"] - later))),
    ]


def _waiter(item: Answer, later: int) -> Line:
    blocker = item["blocker"] or {}
    return [
        piece(item["id"]),
        piece(item["name"] or item["kind"]),
        piece(item["holder"]),
        piece(item["gpus"]),
        piece(item["priority"]),
        piece(show.span(item["waiting_s"] + later)),
        piece(f"{blocker['code']}: {blocker['message']}" if blocker else None),
    ]


def _ended(ended: Answer) -> Line:
    classes = ", ".join(
        f"{count['failure_class'] or 'not yours to see'} {count['count']}" for count in ended["failures"]
    )
    failed = f"{ended['failed']} failed" + (f" ({classes})" if classes else "")
    return [
        piece("Ended in the last 24 h", show.BOLD),
        piece(f"  {ended['succeeded']} succeeded, "),
        piece(failed, show.YELLOW if ended["failed"] else ""),
        piece(f", {ended['cancelled']} cancelled"),
    ]


def _event(event: Answer, _: int) -> Line:
    about = next((event[key] for key in ("job_id", "lease_id", "run_id", "host", "pool") if event[key]), None)
    moved = f"{show.cell(event['old'])} → {show.cell(event['new'])}" if event["old"] or event["new"] else ""
    return [
        piece(event["at"][11:19]),
        piece(event["severity"], _TONES.get(event["severity"], "")),
        piece(event["type"]),
        piece(event["caller"]),
        piece(about),
        piece("; ".join(part for part in (moved, event["reason"]) if part) or None),
    ]


def _title(name: str, total: int, rows: list[Line]) -> str:
    return name if total == len(rows) else f"{name} ({len(rows)} of {total})"


def _minute(iso: str | None, today: str) -> str | None:
    """A time in UTC to the minute, with its day where that is another than today's."""
    if not iso:
        return None
    return iso[11:16] + "Z" if iso[:10] == today[:10] else f"{iso[5:10]} {iso[11:16]}Z"
