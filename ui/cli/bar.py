"""A progress bar on standard error, for what takes long; nothing where no terminal is there to see it."""

from __future__ import annotations

import sys
import time

WIDTH = 30


class Bar:
    """Call `tell(done, total)` as often as you like; it draws five times a second."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = sys.stderr.isatty()
        self._next = 0.0
        self._drawn = False

    def tell(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next, self._drawn = now + 0.2, True
        part = min(1.0, done / total) if total else 0.0
        full = int(part * WIDTH)
        sys.stderr.write(f"\r{self._what} [{'#' * full}{'.' * (WIDTH - full)}] {100 * part:3.0f} %")
        sys.stderr.flush()

    def end(self) -> None:
        """Take the bar away again."""
        if self._drawn:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
