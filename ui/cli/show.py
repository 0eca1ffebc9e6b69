"""How answers are shown: tables on a terminal, the same without colours or cuts when piped, exact JSON with --json.

Text that others wrote may hold anything; what would steer a terminal is made visible before it gets there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    from typing import Any, TextIO

BOLD, DIM, RED, GREEN, YELLOW, PLAIN = "\033[1m", "\033[2m", "\033[31m", "\033[32m", "\033[33m", "\033[0m"


def out(text: str = "") -> None:
    """One line on standard output, there at once.

    Raises:
        Problem: it cannot be written (a full disk). A reader that has gone is no problem, but the command's end.
    """
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        from cotenant.ui.cli.problems import Problem

        raise Problem(f"The output cannot be written: {exc.strerror}.") from exc


def err(text: str) -> None:
    """One line on standard error as it is: what a job wrote there."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def say(text: str) -> None:
    """One line for the person, on standard error, so that output stays clean. Nothing in it steers a terminal."""
    sys.stderr.write("".join(f"{mark}{harmless(line)}\n" for mark, line in _marked(text)))
    sys.stderr.flush()


def _marked(text: str) -> Iterable[tuple[str, str]]:
    """Lines with what stands before them: the program's name before the first."""
    lines = text.splitlines() or [""]
    return [("cotenant: ", lines[0]), *(("", line) for line in lines[1:])]


def as_json(value: Any) -> None:
    """The exact answer, indented for people on a terminal and on one line for programs."""
    out(_json(value, indent=2 if sys.stdout.isatty() else None))


def line_json(value: Any) -> None:
    """One record of a stream: always one line."""
    out(_json(value, indent=None))


def _json(value: Any, *, indent: int | None) -> str:
    """JSON that is read as text: letters of all languages as they are, but what could steer a terminal as \\u escapes."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return "\n".join(
        line if line.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
        for line in text.split("\n")
    )


def colours() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str) -> str:
    return f"{colour}{text}{PLAIN}" if colours() else text


def harmless(text: str) -> str:
    """`text` with every character that could steer a terminal (escapes, carriage returns, bidi marks) as \\x1b and the like."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def log_line(text: str, stream: TextIO) -> str:
    """A log line as it was written, when `stream` is piped; without what steers a terminal on one."""
    return harmless(text) if stream.isatty() else text


def table(rows: Iterable[Sequence[Any]], heads: Sequence[str], *, empty: str) -> None:
    """Rows under heads, aligned; numbers to the right; on a terminal the widest give way to its width. `empty` if no rows."""
    cells = [[cell(value) for value in row] for row in rows]
    if not cells:
        out(empty)
        return
    widths = [max(breadth(head), *(breadth(row[i]) for row in cells)) for i, head in enumerate(heads)]
    right = [
        all(row[i] == "-" or (row[i][:1].isdigit() and " " not in row[i] and row[i][4:5] != "-") for row in cells)
        for i in range(len(heads))  # what begins as a date, 2026-…, is no number
    ]
    if sys.stdout.isatty():
        limit = columns(sys.stdout)
        for i in sorted(range(1, len(widths)), key=lambda i: -widths[i]):  # ids stand first and are never cut
            over = sum(widths) + 2 * (len(widths) - 1) - limit
            if over > 0 and not right[i]:
                widths[i] = max(len(heads[i]), 8, widths[i] - over)
    out(paint(_row(heads, widths, right), BOLD))
    for row in cells:
        out(_row(row, widths, right))


def columns(stream: Any) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    shown = []
    for text, width, to_right in zip(cells, widths, right, strict=True):
        text = text if breadth(text) <= width else cut(text, width)
        gap = " " * (width - breadth(text))
        shown.append(gap + text if to_right else text + gap)
    return "  ".join(shown).rstrip()


def breadth(text: str) -> int:
    """How many columns a terminal needs for it: letters of Chinese, Japanese and Korean take two, combining ones none."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """The beginning of `text` in `width` columns, with an ellipsis."""
    kept, used = "", 0
    for c in text:
        used += breadth(c)
        if used > width - 1:
            break
        kept += c
    return kept + "…"


def cell(value: Any) -> str:
    """One value for a table: unknown is -, never 0."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return harmless(str(value))


def pairs(items: Iterable[tuple[str, Any]]) -> None:
    """Names and values, one pair a line; pairs without a value are left out."""
    shown = [(name, cell(value)) for name, value in items if value not in (None, "", [], {})]
    width = max((len(name) for name, _ in shown), default=0)
    for name, text in shown:
        out(f"{paint(name.ljust(width), DIM)}  {text}")


def span(seconds: float | None) -> str:
    """A duration as people say it: 45s, 3m, 2h05m, 3d4h; - where it is not known."""
    if seconds is None:
        return "-"
    left = max(0, int(seconds))
    if left < 60:
        return f"{left}s"
    if left < 3600:
        return f"{left // 60}m{left % 60:02}s" if left < 600 else f"{left // 60}m"
    if left < 86400:
        return f"{left // 3600}h{left % 3600 // 60:02}m"
    return f"{left // 86400}d{left % 86400 // 3600}h"


def slots(answer: dict[str, Any]) -> str:
    """The cards of a lease or job: local:0,1; - where there are none, as for a job without a card."""
    by_host: dict[str, list[str]] = {}
    for slot in answer.get("slots") or ():
        if slot.get("uuid") == "cpu":
            continue
        number = "?" if slot.get("index") is None else str(slot["index"])
        share = "" if slot.get("share") is None else f"/{slot['share']}"
        by_host.setdefault(str(slot.get("host")), []).append(number + share)
    text = " ".join(f"{host}:{','.join(numbers)}" for host, numbers in by_host.items())
    return (text + " simulated" if answer.get("simulated") else text) or "-"


def blockers(answer: dict[str, Any]) -> None:
    """Why something waits, a line each, with what would help."""
    for blocker in answer.get("blockers") or ():
        helps = f"; {ours(blocker['helps'])}" if blocker.get("helps") else ""
        out(f"  waits: {cell(blocker.get('code'))}: {cell(blocker.get('message'))}{helps}")


def ours(text: str) -> str:
    """A sentence of the server in the command line's words, harmless to a terminal."""
    from cotenant.ui.cli.words import for_people

    return harmless(for_people(text))
