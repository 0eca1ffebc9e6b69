"""Signs of work of living attempts, and notices to them: save now, you will be stopped, never mind.

Owns the looks at checkpoint directories (in a thread each: their file systems may hang) and the notice files. Must not know:
connections, cards. What is judged and how: checkpoints.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from typing import Any, Callable, Coroutine, Dict, List, Optional, Tuple

from cotenant.hostd.attempts import Attempt, Attempts
from cotenant.hostd.checkpoints import Directory, Entry, Signature
from cotenant.hostd.durable import storage
from cotenant.hostd.protocol import CheckpointSeen, Progress, Refused, StartSpec
from cotenant.hostd.supervisor import Supervisor

#: Seconds between two looks: at what was told to save or is just being written, and at all others.
SOON_S = 0.5
LATER_S = 2.0
#: How long after a change a directory is looked at more often.
STIRRED_S = 6.0
#: How often a connected server hears of all attempts although nothing happened.
TELL_ALL_S = 5.0
#: How long a start waits for the first look at its checkpoints.
FIRST_LOOK_S = 2.0
#: How long an end waits for the last look at its checkpoints.
LAST_LOOK_S = 5.0

Later = Callable[[Coroutine[Any, Any, None]], None]


class _Watch:
    """What is known of one attempt."""

    def __init__(self, directory: Optional[Directory]) -> None:
        self.directory = directory
        self.looked_at = -1e9
        self.busy = False  # a look is under way
        self.log_bytes = -1
        self.log_at: Optional[float] = None  # when its logs were last seen to have grown
        self.told: Any = None


class Watching:
    """Watches the attempts of one host. `later(work)` does something beside the requests."""

    def __init__(self, attempts: Attempts, supervisor: Supervisor, later: Later) -> None:
        self._attempts = attempts
        self._supervisor = supervisor
        self._later = later
        self._watches: Dict[str, _Watch] = {}
        self._expected: Dict[str, Directory] = {}  # of attempts that are about to start
        self._told_all = -1e9

    # ---- looking

    def tick(self) -> List[Progress]:
        """Begin the looks that are due; what the server should hear now."""
        now = _now()
        living = {attempt.id: attempt for attempt in self._attempts.living() if attempt.spec is not None}
        for gone in [attempt_id for attempt_id in self._watches if attempt_id not in living]:
            del self._watches[gone]
        every = now - self._told_all >= TELL_ALL_S
        if every:
            self._told_all = now
        news = []
        for attempt in living.values():
            watch = self._watch(attempt)
            self._see_logs(attempt, watch, now)
            if (
                watch.directory is not None
                and not watch.busy
                and now - watch.looked_at >= self._interval(attempt, watch, now)
            ):
                watch.busy = True
                self._later(self._look(attempt, watch))
            progress = self.progress(attempt)
            # ages move by themselves; news is what they belong to
            told = (
                progress.checkpoint and progress.checkpoint.name,
                progress.saved,
                watch.directory and watch.directory.changed_at,
            )
            if every or told != watch.told:
                watch.told = told
                news.append(progress)
        return news

    def _watch(self, attempt: Attempt) -> _Watch:
        watch = self._watches.get(attempt.id)
        if watch is None:
            assert attempt.spec is not None
            directory = self._expected.pop(attempt.id, None) or directory_of(attempt.spec)
            if directory is not None and attempt.checkpoint is not None:
                name, signature = attempt.checkpoint
                directory.trusted[name] = tuple(signature)  # type: ignore[assignment]
            watch = self._watches[attempt.id] = _Watch(directory)
        return watch

    async def before(self, spec: StartSpec) -> None:
        """Look at what lies there before the command can write anything: the first look tells its work from others'."""
        directory = directory_of(spec)
        if directory is not None:
            self._expected[spec.attempt_id] = directory
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_in_thread(directory.look, _now()), FIRST_LOOK_S)

    def forget(self, attempt_id: str) -> None:
        """What was expected does not start."""
        self._expected.pop(attempt_id, None)

    @staticmethod
    def _interval(attempt: Attempt, watch: _Watch, now: float) -> float:
        changed = watch.directory.changed_at if watch.directory is not None else None
        stirred = changed is not None and now - changed < STIRRED_S
        return SOON_S if attempt.notice is not None or stirred else LATER_S

    @staticmethod
    def _see_logs(attempt: Attempt, watch: _Watch, now: float) -> None:
        size = 0
        for stream in ("out", "err"):
            with contextlib.suppress(OSError):
                size += os.stat(attempt.log_path(stream)).st_size
        if watch.log_bytes >= 0 and size != watch.log_bytes:
            watch.log_at = now
        watch.log_bytes = size

    async def _look(self, attempt: Attempt, watch: _Watch) -> None:
        try:
            await self._look_now(attempt, watch)
        finally:
            watch.busy = False

    async def _look_now(self, attempt: Attempt, watch: _Watch) -> None:
        assert watch.directory is not None
        now = watch.looked_at = _now()
        await _in_thread(watch.directory.look, now)
        newest, _ = watch.directory.newest(_now())
        found = None if newest is None else (newest.name, newest.signature)
        if found is not None and (attempt.checkpoint is None or _as_kept(attempt.checkpoint) != found):
            attempt.checkpoint = found
            with contextlib.suppress(Refused):  # a hostd after us proves it anew, or does not
                attempt.append({"checkpoint": found})

    async def last_look(self, attempt: Attempt) -> None:
        """Judge the checkpoints of an attempt that is over, and keep the judgement with it."""
        watch = self._watch(attempt)
        self._see_logs(attempt, watch, _now())
        if watch.directory is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._look_now(attempt, watch), LAST_LOOK_S)
        by_itself = attempt.exit is not None and attempt.exit.code is not None
        attempt.progress = self.progress(attempt, over=by_itself)
        self._watches.pop(attempt.id, None)

    def progress(self, attempt: Attempt, over: bool = False) -> Progress:
        """What is known of an attempt's work, as of the last look."""
        now, watch, directory = _now(), self._watch(attempt), self._watch(attempt).directory
        newest: Optional[Entry] = None
        skipped: List[str] = []
        saved: Optional[Entry] = None
        if directory is not None:
            newest, skipped = directory.newest(now, over)
            if directory.error:
                skipped = [directory.error]
            if attempt.notice is not None:
                saved = directory.newer_than(attempt.notice.get("seen", {}), now, over)
        return Progress(
            attempt_id=attempt.id,
            lease_id=attempt.lease_id,
            log_bytes=max(0, watch.log_bytes),
            log_ago_ms=_ago(watch.log_at, now),
            checkpoint=None if newest is None or directory is None else _seen(directory, newest),
            writing_ago_ms=_ago(directory.changed_at, now) if directory is not None else None,
            skipped=tuple(skipped[:8]),
            notice=None if attempt.notice is None else attempt.notice["id"],
            saved=saved is not None,
        )

    # ---- notices

    async def notice(
        self, attempt: Attempt, notice_id: str, what: str, why: str, by_s: Optional[float], number: Optional[int]
    ) -> Progress:
        """Tell a running attempt something by its notice file and, where it asked for one, by a signal. Once per `notice_id`.

        `what` is save, stop or none (never mind); what is newer than a notice counts from the look that is made here.

        Raises:
            Refused: not_running; bad_request, a signal that is none; storage.
        """
        if attempt.state not in ("running", "stopping") or not attempt.base:
            raise Refused("not_running", f"attempt {attempt.id} is {attempt.state}; it has no process to tell")
        if number is not None and not 1 <= number <= 64:
            raise Refused("bad_request", f"signal: 1 to 64 was expected, not {number}")
        watch = self._watch(attempt)
        if attempt.notice is not None and attempt.notice["id"] == notice_id:
            return self.progress(attempt)
        if watch.directory is not None and what != "none":
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._look_now(attempt, watch), LAST_LOOK_S)
        body = {"what": what, "why": why, "id": notice_id, "by_s": by_s, "written_at": time.time()}
        _write_whole(attempt.notice_path, json.dumps(body).encode() + b"\n")
        seen = watch.directory.signatures() if watch.directory is not None else {}
        kept: Optional[Dict[str, Any]] = None if what == "none" else {"id": notice_id, "seen": seen}
        attempt.append({"notice": kept})
        attempt.notice = kept
        if number is not None and what != "none":
            self._supervisor.signal(attempt, number)
        return self.progress(attempt)


def directory_of(spec: StartSpec) -> Optional[Directory]:
    """The checkpoint directory of an attempt, not looked at yet."""
    if spec.checkpoint is None:
        return None
    trusted = {os.path.basename(spec.resume_path): None} if spec.resume_path else {}
    return Directory(spec.checkpoint.dir, spec.checkpoint.manifest, dict(trusted))


def _as_kept(checkpoint: Tuple[str, Signature]) -> Tuple[str, Signature]:
    name, signature = checkpoint
    return name, (signature[0], signature[1], signature[2])  # lists, where a record was read back


async def _in_thread(work: Callable[[float], None], now: float) -> None:
    """`work(now)` in a thread that keeps nobody from ending: a file system may never answer it."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def run() -> None:
        try:
            work(now)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="look at checkpoints", daemon=True).start()
    await done.wait()


def _seen(directory: Directory, entry: Entry) -> CheckpointSeen:
    # The file's time against this machine's wall clock, for display and for least lost work; nothing newer is told by it.
    age = max(0, int(time.time() * 1000) - entry.signature[1] // 1_000_000)
    return CheckpointSeen(entry.name, os.path.join(directory.path, entry.name), entry.signature[0], age)


def _write_whole(path: str, data: bytes) -> None:
    """Replace a file so that a reader sees the old or the new one. Raises Refused("storage")."""
    with storage():
        part = path + ".part"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
        os.replace(part, path)


def _ago(at: Optional[float], now: float) -> Optional[int]:
    return None if at is None else max(0, int((now - at) * 1000))


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
