"""`cotenant top`: everything at one look, kept up to date: the server says when to look again, nobody polls."""

from __future__ import annotations

import contextlib
import sys
import time

from cotenant.ui.cli import ask, board, show
from cotenant.ui.cli.problems import NoServer, Problem, TokenRefused, ToolRefused

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import Any

    from cotenant.ui.cli.client import Client
    from cotenant.ui.cli.entry import Parser

    Answer = dict[str, Any]

OVERVIEW = "cotenant://overview"
#: Pauses between tries while the server does not answer: a restart takes a second or two.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)


def configure(parser: Parser, _: str) -> None:
    top = parser.command(act, example="cotenant top          # q ends it, arrows scroll\n  cotenant top --once")
    top.add_argument("--once", action="store_true", help="print it once and end, as where output is no terminal")


def act(args: argparse.Namespace) -> int:
    client = ask.client(args)
    if args.json:
        show.as_json(client.read_resource(OVERVIEW))
        return 0
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        seen = client.read_resource(OVERVIEW)
        width = show.columns(sys.stdout) if sys.stdout.isatty() else None
        show.out(f"{client.place.url}  as of {seen['at'][:19]}Z")
        for line in board.lines(seen, width):
            show.out(board.fit(line, width))
        return 0
    return _stay(client)


def _stay(client: Client) -> int:
    import threading

    from cotenant.ui.cli.screen import Screen

    first = client.read_resource(OVERVIEW)  # a wrong token or no server is told before the screen is taken
    with Screen() as screen:
        news = News(client, first, screen.poke)
        threading.Thread(target=news.run, daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):  # as good an end as q
            _show(screen, news, client.place.url)
    if news.refused is not None:
        raise news.refused
    return 0


def _show(screen: Any, news: News, url: str) -> None:
    top = 0
    while news.refused is None:
        width, height = screen.size()
        seen, at = news.seen
        age = time.monotonic() - at
        all_lines = board.lines(seen, width, age)
        room = max(1, height - 1)
        top = max(0, min(top, len(all_lines) - room))
        head = [board.piece("cotenant top", show.BOLD), board.piece(f"  {url}  "), _freshness(seen, age, news.trouble)]
        more = len(all_lines) - room - top
        if more > 0 or top:
            head.append(board.piece(f"  ↑{top} ↓{max(0, more)}", show.DIM))
        screen.draw([board.fit(line, width) for line in (head, *all_lines[top : top + room])])
        for key in screen.wait(1.0):
            if key in ("q", "Q"):
                return
            steps = {"up": -1, "down": 1, "page up": -room, "page down": room, "home": -top, "end": len(all_lines)}
            top = max(0, top + steps.get(key, 0))


def _freshness(seen: Answer, age: float, trouble: str | None) -> tuple[str, str]:
    said = f"as of {seen['at'][11:19]}Z, {show.span(age)} ago"
    return board.piece(f"{said}, stale: {trouble}", show.RED) if trouble else board.piece(f"{said}, live", show.GREEN)


class News:
    """The newest reading, kept by a thread that listens. `seen` and `trouble` are only ever replaced whole."""

    def __init__(self, client: Client, first: Answer, poke: Callable[[], None]) -> None:
        self._reader = client
        self._listener = client.twin()
        self._poke = poke
        self.seen: tuple[Answer, float] = (first, time.monotonic())  # and when it was read
        self.trouble: str | None = None
        self.refused: Problem | None = None

    def run(self) -> None:
        """Read again whenever the server says so; over its restarts, until the token is refused."""
        tries = 0
        while True:
            try:
                for _ in self._listener.listen([OVERVIEW]):
                    self.seen = (self._reader.read_resource(OVERVIEW), time.monotonic())
                    self.trouble, tries = None, 0
                    self._poke()
                tries = 0  # it ended in good order: the server stops, and says so itself when it is asked again
            except (TokenRefused, ToolRefused) as problem:
                if not (isinstance(problem, ToolRefused) and problem.code in ("unavailable", "shutting_down")):
                    self.refused = problem
                    self._poke()
                    return
                self.trouble = "the server is going down"
            except Problem as problem:
                self.trouble = "no server answers" if isinstance(problem, NoServer) else "the connection broke off"
            self._poke()
            time.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1
