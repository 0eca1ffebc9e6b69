"""The journal: the world that every pass of the loop saw and what it decided, so that it can be decided again.

It is a record, not the truth: written by a thread of its own from a bounded queue, compressed, never synced. What the
machine loses in a crash it has lost, and where the thread cannot keep up, or the disk has no room, passes are counted as
lost instead of holding the loop up. `segments` has the form of the files, which stand under `journal/` of the data directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from cotenant.server.deciding.engine import Changes
from cotenant.server.deciding.records import Writing
from cotenant.server.deciding.world import Decided, Policy
from cotenant.server.segments import FOLDER, Segment, segments
from cotenant.server.version import version

log = logging.getLogger(__name__)

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
#: After a failure nothing is tried for so long.
RETRY_S: Final = 60.0
#: The thread stands still for so long after each record, and after each fifty objects of a whole world.
BREATH_S: Final = 0.0003
_DAY_S: Final = 86_400


def deciding_version() -> str:
    """The version with the first digits of a hash over what decides: two checkouts of one version may decide differently."""
    from cotenant.server import deciding

    seen = hashlib.sha256()
    for path in sorted(Path(deciding.__path__[0]).glob("*.py")):
        seen.update(path.read_bytes())
    return f"{version()}+{seen.hexdigest()[:12]}"


_Pass: TypeAlias = tuple[Changes, int, Policy, Decided, int]


def _breathe() -> None:
    """Let the loop have the interpreter: whoever waits for it would else wait 5 ms each time this thread has work."""
    time.sleep(BREATH_S)


class Journal:
    """Writes the journal of one server. `note` may be called from the loop at any time; it costs an append.

    `tell` is called from the journal's thread with the reason when writing begins to fail, and with None once it works again;
    in between it is tried every `RETRY_S`.
    """

    def __init__(
        self, data_dir: Path, *, days: int = 30, mib: int = 1024, tell: Callable[[str | None], None] = lambda _: None
    ) -> None:
        self._folder = data_dir / FOLDER
        self._days, self._bytes = days, mib << 20
        self._tell = tell
        self._queue: deque[_Pass] = deque()
        self._unqueued = 0  # passes that found no place in the queue; the loop's to count
        self._unwritten = 0  # passes that were in the queue and could not be written; the thread's to count
        self._unnoted: Changes | None = None  # of passes that were lost before they came into the queue
        self._version = deciding_version()
        self._writing = Writing(self._version, _breathe)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._segment: Segment | None = None
        self._retry_s: float | None = None  # while writing fails: when to try again
        self.written = 0
        self.busy = False  # a batch is being written

    def note(self, changes: Changes, now_ms: int, policy: Policy, decided: Decided) -> None:
        """Remember one pass. Where too many wait to be written it is counted as lost."""
        if len(self._queue) >= QUEUE:
            self._unqueued += 1
            if self._unnoted is None:
                self._unnoted = Changes()
            self._unnoted.go_on(changes)
            return
        if self._unnoted is not None:
            self._unnoted.go_on(changes)
            changes, self._unnoted = self._unnoted, None
        lost, self._unqueued = self._unqueued, 0
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
                self.busy = True
                self._write_batch()
                self.busy = False
            if self._closing.is_set() and not self._queue:
                return

    def _write_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        if self._retry_s is not None and time.monotonic() < self._retry_s:
            self._leave_out(batch)
            return
        changes, now_ms, policy, decided, lost = batch[0]
        batch[0], self._unwritten = (changes, now_ms, policy, decided, lost + self._unwritten), 0
        try:
            segment = self._segment_for(now_ms)
            records = []
            for one in batch:
                records.append(self._writing.record(*one))
                _breathe()
            segment.write(records)
        except Exception as error:  # noqa: BLE001  the server goes on, whatever is wrong with its record
            self._leave_out(batch)
            self._failed(error)
        else:
            self.written += len(batch)
            if self._retry_s is not None:
                self._retry_s = None
                self._tell(None)

    def _segment_for(self, now_ms: int) -> Segment:
        """The file to write to; where it begins, or has gone on for long, the next record is a whole world."""
        if self._segment is not None and self._segment.size >= SEGMENT_BYTES:
            self._segment.close()
            self._segment = None
        if self._segment is None:
            self._forget()
            self._segment = Segment(self._folder, now_ms, self._version)
            self._writing.begin()
        elif self._segment.passes >= WHOLE_EVERY:
            self._segment.passes = 0
            self._writing.begin()
        return self._segment

    def _leave_out(self, batch: list[_Pass]) -> None:
        for one in batch:
            self._unwritten += 1 + one[-1]
            self._writing.follow(one[0])  # once more does no harm

    def _failed(self, error: Exception) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            with contextlib.suppress(OSError):
                segment.give_up()
        why = (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        if self._retry_s is None:
            # a mistake of our own shows where it was made; that a disk is full needs no traceback
            log.warning("the journal cannot be written: %s", why, exc_info=not isinstance(error, OSError))
            self._tell(why)
        self._retry_s = time.monotonic() + RETRY_S

    def _forget(self) -> None:
        """Remove the oldest files beyond the room and the time that there is."""
        kept = segments(self._folder.parent)[::-1]
        room = self._bytes - SEGMENT_BYTES
        newest = kept[0].stat().st_mtime if kept else 0.0
        for path in kept:
            seen = path.stat()
            room -= seen.st_size
            if room < 0 or seen.st_mtime < newest - self._days * _DAY_S:
                path.unlink()
