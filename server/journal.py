"""The journal: the world that every pass of the loop saw and what it decided, so that it can be decided again.

It is a record, not the truth: written by a thread of its own from a bounded queue, compressed, never synced. What the
machine loses in a crash it has lost, a torn end is left out when it is read, and where the thread cannot keep up ticks are
counted as lost instead of holding the loop up. Files stand under `journal/` of the data directory, each beginning with a
whole world: frames of length, CRC-32 and zlib-compressed lines.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

from cotenant.server.deciding.engine import Changes
from cotenant.server.deciding.records import Reading, Tick, Writing
from cotenant.server.deciding.world import Decided, Policy
from cotenant.server.version import version

log = logging.getLogger(__name__)

FOLDER: Final = "journal"
SUFFIX: Final = ".ticks"
_HEAD: Final = struct.Struct(">II")
#: Ticks that may wait for the thread.
QUEUE: Final = 2_000
#: A file is closed at this size, and the next begins with a whole world.
SEGMENT_BYTES: Final = 4 << 20
#: Ticks after which a whole world is written again.
WHOLE_EVERY: Final = 2_000
#: The thread gathers for so long, so that it wakes seldom and compresses well.
GATHER_S: Final = 1.0
#: Ticks in one frame.
BATCH: Final = 200
_DAY_S: Final = 86_400


def deciding_version() -> str:
    """The version with the first digits of a hash over what decides: two checkouts of one version may decide differently."""
    from cotenant.server import deciding

    seen = hashlib.sha256()
    for path in sorted(Path(deciding.__path__[0]).glob("*.py")):
        seen.update(path.read_bytes())
    return f"{version()}+{seen.hexdigest()[:12]}"


_Pass: TypeAlias = tuple[Changes, int, Policy, Decided, int]


class Journal:
    """Writes the journal of one server. `note` may be called from the loop at any time; it costs an append."""

    def __init__(self, data_dir: Path, *, days: int = 30, mib: int = 1024) -> None:
        self._folder = data_dir / FOLDER
        self._days, self._bytes = days, mib << 20
        self._queue: deque[_Pass] = deque()
        self._lost = 0
        self._unnoted: Changes | None = None  # of passes that were lost before they came into the queue
        self._writing = Writing(deciding_version())
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._segment: Segment | None = None
        self.written = 0

    def note(self, changes: Changes, now_ms: int, policy: Policy, decided: Decided) -> None:
        """Remember one pass. Where too many wait to be written it is counted as lost."""
        if len(self._queue) >= QUEUE:
            self._lost += 1
            if self._unnoted is None:
                self._unnoted = Changes()
            self._unnoted.go_on(changes)
            return
        if self._unnoted is not None:
            self._unnoted.go_on(changes)
            changes, self._unnoted = self._unnoted, None
        lost, self._lost = self._lost, 0
        self._queue.append((changes, now_ms, policy, decided, lost))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
        if len(self._queue) == 1:
            self._wake.set()

    def close(self) -> None:
        """Write what waits, and end."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _run(self) -> None:
        # A job's start shall never wait for this thread to give the interpreter back.
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            self._wake.wait()
            self._wake.clear()
            self._closing.wait(GATHER_S)
            while self._queue:
                self._write_batch()
            if self._closing.is_set() and not self._queue:
                return

    def _write_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        try:
            if self._segment is None or self._segment.size >= SEGMENT_BYTES:
                if self._segment is not None:
                    self._segment.close()
                self._forget()
                self._segment = Segment(self._folder, batch[0][1])
                self._writing.begin()
            elif self._segment.passes >= WHOLE_EVERY:
                self._segment.passes = 0
                self._writing.begin()
            self._segment.write([self._writing.record(*one) for one in batch])
            self.written += len(batch)
        except Exception as error:
            log.warning(
                "the journal cannot be written (%s): %d passes are left out",
                error,
                len(batch),
                exc_info=not isinstance(error, OSError),
            )
            self._lost += len(batch)
            for one in batch:
                self._writing.follow(one[0])  # once more does no harm
            if self._segment is not None:
                with contextlib.suppress(OSError):
                    self._segment.close()
            self._segment = None

    def _forget(self) -> None:
        """Remove the oldest files beyond the room and the time that there is."""
        kept = sorted(self._folder.glob(f"*{SUFFIX}"), reverse=True)
        room = self._bytes - SEGMENT_BYTES
        newest = kept[0].stat().st_mtime if kept else 0.0
        for path in kept:
            seen = path.stat()
            room -= seen.st_size
            if room < 0 or seen.st_mtime < newest - self._days * _DAY_S:
                path.unlink()


class Segment:
    """One file of the journal, open for writing."""

    def __init__(self, folder: Path, begin_ms: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        number = begin_ms
        while True:
            try:
                self._fd = os.open(folder / f"{number:015d}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                break
            except FileExistsError:
                number += 1
        self.passes = 0  # since the last whole world
        self.size = 0

    def write(self, lines: list[str]) -> None:
        """One frame with these records."""
        self.passes += len(lines)
        body = zlib.compress("\n".join(lines).encode(), 1)
        frame = _HEAD.pack(len(body), zlib.crc32(body)) + body
        if os.write(self._fd, frame) != len(frame):
            raise OSError("the disk is full")
        self.size += len(frame)

    def close(self) -> None:
        """No more comes."""
        os.close(self._fd)


class Damage(Exception):
    """A part of the journal cannot be read; what comes before and after it can."""


def segments(data_dir: Path) -> list[Path]:
    """The files of a journal, oldest first."""
    return sorted((data_dir / FOLDER).glob(f"*{SUFFIX}"))


def ticks(path: Path, damages: list[str]) -> Iterator[Tick]:
    """All ticks of one file. What cannot be read ends it, and is told in `damages`; a torn end of the file is no damage."""
    raw = path.read_bytes()
    at, reading = 0, Reading()
    while at < len(raw):
        if at + _HEAD.size > len(raw):
            return
        length, crc = _HEAD.unpack_from(raw, at)
        body = raw[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length:
            return
        if zlib.crc32(body) != crc:
            damages.append(f"{path.name}: damaged at byte {at}; what follows in this file is left out")
            return
        for line in zlib.decompress(body).decode().split("\n"):
            try:
                tick = reading.follow(line)
            except ValueError as error:
                damages.append(f"{path.name}: at byte {at}: {error}")
                return
            if tick is not None:
                yield tick
        at += _HEAD.size + length


def all_ticks(data_dir: Path, damages: list[str]) -> Iterator[Tick]:
    """All ticks of a data directory's journal, oldest first."""
    for path in segments(data_dir):
        yield from ticks(path, damages)
