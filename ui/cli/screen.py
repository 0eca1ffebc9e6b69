"""A whole terminal for one command: its own page of the screen, keys as they are pressed, size changes. Given back at the end.

Escape codes only, as every terminal since the VT100 has them; no curses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import termios
import tty

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    from typing import Any, Self

# alternate page, cursor hidden, no wrapping at the edge; and back
_ENTER, _LEAVE = "\033[?1049h\033[?25l\033[?7l", "\033[?7h\033[?25h\033[?1049l"
_KEYS = {"\033[A": "up", "\033[B": "down", "\033[5~": "page up", "\033[6~": "page down", "\033[H": "home", "\033[F": "end",
         "\033OA": "up", "\033OB": "down", "k": "up", "j": "down", " ": "page down", "g": "home", "G": "end"}  # fmt: skip


class Screen:
    """`with Screen() as screen`. `wait` returns keys; `poke` may be called from another thread to end it early."""

    def __init__(self) -> None:
        self._in = sys.stdin.fileno()
        self._before: list[Any] = []
        self._woken, self._wake = os.pipe()
        for fd in (self._woken, self._wake):
            os.set_blocking(fd, False)
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._in)
        # A terminal that is resized, a stop with Ctrl-Z, and an end by TERM or HUP must not leave it as we use it.
        for number, handler in (
            (signal.SIGWINCH, self._resized), (signal.SIGTSTP, self._stopped), (signal.SIGTERM, self._ended), (signal.SIGHUP, self._ended),
        ):  # fmt: skip
            self._handlers[number] = signal.signal(number, handler)
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._leave()

    def size(self) -> tuple[int, int]:
        """(columns, lines)."""
        try:
            columns, rows = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            columns, rows = 80, 24
        return columns or 80, rows or 24

    def draw(self, lines: list[str]) -> None:
        """Show these lines, each at most as wide as the terminal, from the top; nothing flickers that stays."""
        text = "\033[H" + "".join(f"{line}\033[0m\033[K\r\n" for line in lines)
        sys.stdout.write(text.removesuffix("\r\n") + "\033[J")
        sys.stdout.flush()

    def wait(self, seconds: float) -> list[str]:
        """Keys pressed within `seconds`; earlier after `poke` or a change of size."""
        ready, _, _ = select.select([self._in, self._woken], [], [], seconds)
        if self._woken in ready:
            try:
                while os.read(self._woken, 512):
                    pass
            except BlockingIOError:
                pass
        if self._in not in ready:
            return []
        typed = os.read(self._in, 512).decode("utf-8", "replace")
        if not typed:
            return ["q"]  # the terminal is gone
        if typed in _KEYS:
            return [_KEYS[typed]]
        return [] if typed.startswith("\033") else [_KEYS.get(c, c) for c in typed]

    def poke(self) -> None:
        with contextlib.suppress(BlockingIOError):  # then there are enough in it
            os.write(self._wake, b".")

    def _enter(self) -> None:
        tty.setcbreak(self._in)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()

    def _leave(self) -> None:
        try:
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)
        except (OSError, termios.error):
            pass  # it is gone, and nobody sees it any more

    def _resized(self, *_: object) -> None:
        self.poke()

    def _stopped(self, *_: object) -> None:
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # stops here, and goes on here
        signal.signal(signal.SIGTSTP, self._stopped)
        self._enter()
        self.poke()

    def _ended(self, number: int, _: object) -> None:
        raise SystemExit(128 + number)
