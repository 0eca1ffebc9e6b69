"""Standard input, output and error as the bridge uses them: one thread each, so that no slow reader holds up another.

Threads, because an event loop cannot wait for a regular file or a terminal in the way it waits for a pipe.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading

#: A line longer than this is told of and left out; the server itself takes 4 MiB.
LONGEST_LINE = 32 * 1024 * 1024
#: While this much waits to be read by the client, nothing more is taken from the server.
HIGH_WATER = 8 * 1024 * 1024
_AHEAD = 256


class Overlong:
    """Stands for a line that was longer than LONGEST_LINE."""


class Lines:
    """The lines of a file descriptor. `get` gives one after the other, Overlong for one left out, None at the end."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        self._fd = fd
        self._loop = loop
        self._queue: asyncio.Queue[bytes | Overlong | None] = asyncio.Queue()
        self._ahead = threading.Semaphore(_AHEAD)  # lines read and not yet taken
        os.set_blocking(fd, True)  # some clients hand their own ends on, which do not block
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    async def get(self) -> bytes | Overlong | None:
        line = await self._queue.get()
        self._ahead.release()
        return line

    def _put(self, line: bytes | Overlong | None) -> None:
        self._ahead.acquire()
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, line)
        except RuntimeError:  # the loop is closed: the bridge has ended
            raise SystemExit from None

    def _read(self) -> None:
        begun = bytearray()
        overlong = False
        while True:
            try:
                part = os.read(self._fd, 1 << 16)
            except OSError:
                part = b""
            if not part:
                break
            *lines, rest = part.split(b"\n")
            for line in lines:
                if overlong:
                    self._put(Overlong())
                elif whole := bytes(begun + line).strip():
                    self._put(whole)
                begun.clear()
                overlong = False
            if not overlong:
                begun += rest
            if len(begun) > LONGEST_LINE:
                overlong = True
                begun.clear()
        if whole := bytes(begun).strip():
            self._put(whole)
        self._put(None)


class Writer:
    """Lines to a file descriptor, in order, never in pieces. `broken` is set once nobody reads any more."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._fd = fd
        self._loop = loop
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()
        self._room = asyncio.Event()
        self._room.set()
        self.broken = asyncio.Event()
        os.set_blocking(fd, True)
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Add one line; never waits."""
        with self._lock:
            self._waiting += len(line)
            if self._waiting > HIGH_WATER:
                self._room.clear()
        self._lines.put(line + b"\n")

    async def send(self, line: bytes) -> None:
        """Add one line once there is room."""
        if not self._room.is_set():
            await self._room.wait()
        self.put(line)

    @property
    def waiting(self) -> int:
        """Bytes that nobody has read yet."""
        return self._waiting

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            left = memoryview(line)
            try:
                while left:
                    left = left[os.write(self._fd, left) :]
            except OSError:
                self._tell(self.broken.set)
                self._tell(self._room.set)
                return
            with self._lock:
                self._waiting -= len(line) - 1
                fits = self._waiting <= HIGH_WATER
            if fits and not self._room.is_set():
                self._tell(self._room.set)

    def _tell(self, what: object) -> None:
        try:
            self._loop.call_soon_threadsafe(what)  # type: ignore[arg-type]
        except RuntimeError:
            return

    def close(self, within_s: float) -> None:
        """Write what is left, for `within_s` at most."""
        self._lines.put(None)
        self._thread.join(within_s)
