"""What is on disk for certain: a file that is replaced whole, and one that is only appended to.

Owns every sync of hostd, and the thread that makes those which a start waits for. Must not know: what is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
from typing import Awaitable, Callable, Iterator, List, NamedTuple, Optional

from cotenant.hostd.protocol import Refused


class _Item(NamedTuple):
    lines: bytes
    instead: bool  # of all that is in the file, and not after it
    loop: asyncio.AbstractEventLoop
    written: Optional[Callable[[], None]]
    done: Callable[[Optional[OSError]], None]
    always: bool  # whether `done` is called after a success too


class Journal:
    """A file that is only appended to, synced by a thread of its own so that many waiters share one sync."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = _open_to_append(path)
        sync_directory(os.path.dirname(path))
        self._owed = b""  # lines whose writing failed, maybe half done: nothing later counts as written before they are
        self._torn = False
        self._unnamed = False  # the file is a new one whose name is not on disk yet: nothing in it counts as written
        self._queue: queue.SimpleQueue[Optional[_Item]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def append(self, lines: bytes) -> Awaitable[None]:
        """Begin to write whole lines (maybe none); await the answer until they, and all before, are on disk.

        Raises OSError there.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(error: Optional[OSError]) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        self._queue.put(_Item(lines, False, done.get_loop(), None, settle, True))
        return done

    def append_then(self, lines: bytes, written: Callable[[], None], failed: Callable[[OSError], None]) -> None:
        """Begin to write whole lines; `written` is called in the journal's own thread once they are on disk.

        That saves the loop a wake-up on the road of every start. `failed` is called in the loop instead.
        """

        def done(error: Optional[OSError]) -> None:
            if error is not None:
                failed(error)

        self._queue.put(_Item(lines, False, asyncio.get_running_loop(), written, done, False))

    def replace(self, lines: bytes) -> None:
        """Begin to write the file anew with `lines`, which say all that was appended so far. It stays as it is if that fails."""

        def done(error: Optional[OSError]) -> None:
            if error is not None:
                print(f"{self._path} cannot be made shorter: {error}", file=sys.stderr, flush=True)

        self._queue.put(_Item(lines, True, asyncio.get_running_loop(), None, done, False))

    def _run(self) -> None:
        while True:
            items = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    items.append(self._queue.get_nowait())
            batch: List[_Item] = []
            for item in items:
                if item is None or item.instead:
                    self._write(batch)
                    batch = []
                if item is None:
                    return
                if item.instead:
                    self._write_anew(item)
                else:
                    batch.append(item)
            self._write(batch)

    def _write(self, batch: List[_Item]) -> None:
        error: Optional[OSError] = None
        if not batch:
            return
        try:
            self._owed += b"".join(item.lines for item in batch)
            self._write_owed()
        except OSError as caught:
            error = caught
        for item in batch:
            if error is None and item.written is not None:
                item.written()
            if error is not None or item.always:
                _tell(item, error)

    def _write_anew(self, item: _Item) -> None:
        try:
            fd = replace_open(self._path, item.lines)
        except OSError as error:
            _tell(item, error)
            return
        # From the rename on only the new file is the journal: what went to the old one would be lost with it.
        os.close(self._fd)
        self._fd, self._owed, self._torn, self._unnamed = fd, b"", False, True

    def _write_owed(self) -> None:
        if self._unnamed:
            sync_directory(os.path.dirname(self._path))
            self._unnamed = False
        if not self._owed:
            return
        torn, self._torn = self._torn, True  # half a line may be there from here on, until the sync has said otherwise
        write_all(self._fd, b"\n" + self._owed if torn else self._owed)
        os.fdatasync(self._fd)
        self._owed, self._torn = b"", False

    def close(self) -> None:
        """Write what is queued, then end."""
        self._queue.put(None)
        self._thread.join()
        os.close(self._fd)


def _tell(item: _Item, error: Optional[OSError]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended; nobody waits any more
        item.loop.call_soon_threadsafe(item.done, error)


def _open_to_append(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def write_all(fd: int, body: bytes) -> None:
    """Write every byte of `body`. Raises OSError."""
    while body:
        body = body[os.write(fd, body) :]


def write_synced(path: str, body: bytes) -> None:
    """Replace `path` by `body` so that after any crash one of the two is there, whole."""
    os.close(replace_open(path, body))
    sync_directory(os.path.dirname(path))


def replace_open(path: str, body: bytes) -> int:
    """Replace `path` by `body`, and give the new file back, open to read and to append.

    Its content is on disk, its name only after sync_directory(). Raises OSError: then `path` is as it was.
    """
    fresh = path + ".new"
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, body)
        os.fsync(fd)
        os.rename(fresh, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def sync_directory(path: str) -> None:
    """Put the names in `path` on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def storage() -> Iterator[None]:
    """Turn a failed write into the refusal that the server knows."""
    try:
        yield
    except OSError as error:
        raise Refused("storage", f"the host's state directory cannot be written: {error}") from error
