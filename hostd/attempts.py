"""Attempts as they stand on disk, and in memory as a copy of it.

Owns the attempts' directories: `attempts/<id>/` while the server must still be told, `ended/<id>/` afterwards (logs stay
readable there). Must not know: processes' supervision, cards, the wire's framing. Everything here can be rebuilt from
the files, at any instant of hostd's death; what must also survive a power cut is in the journal (state.py) or was synced
by the shim (`exit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from cotenant.hostd import processes
from cotenant.hostd.protocol import (
    AttemptReport,
    CardProcess,
    ExitRecord,
    ProtocolError,
    Refused,
    SlotRef,
    StartSpec,
    from_wire,
    to_wire,
)
from cotenant.hostd.state import storage

#: States in which an attempt still has, or may get, processes.
LIVING = frozenset({"starting", "running", "stopping"})
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def check_id(attempt_id: Any) -> str:
    """`attempt_id` when it may name a directory. Raises Refused("bad_request")."""
    if not isinstance(attempt_id, str) or not _ID.fullmatch(attempt_id):
        raise Refused("bad_request", "attempt_id: 1 to 128 of A-Z a-z 0-9 . _ - were expected, not starting with . or -")
    return attempt_id


def digest(spec: StartSpec) -> str:
    """What must be equal when the same attempt id comes again. Secrets are left out: their hash could be guessed."""
    same = to_wire(dataclasses.replace(spec, secret_env={}))
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


class Attempt:
    """One attempt on this host. The supervisor moves `state`; the rest says what is known."""

    def __init__(self, attempt_id: str, directory: str, spec: Optional[StartSpec], boot_id: str) -> None:
        self.id = attempt_id
        self.directory = directory
        self.spec = spec  # None: a tombstone of an attempt that was never seen
        self.digest = digest(spec) if spec else ""
        self.boot_id = boot_id  # of the boot it was accepted in
        self.state = "starting"
        self.pid: Optional[int] = None
        self.ticks: Optional[int] = None
        self.exit: Optional[ExitRecord] = None
        self.survivors = 0  # of its tree, by the shim's own count at the end
        self.clean: Optional[bool] = None
        self.unclean: Tuple[CardProcess, ...] = ()
        self.message: Optional[str] = None
        self.acked = False
        self.stop_by: Optional[float] = None  # CLOCK_BOOTTIME when the ladder must be over
        self.peaks: Dict[str, int] = {}
        # the supervisor's handles
        self.control: Optional[socket.socket] = None
        self.shim: Optional[Tuple[int, int]] = None
        self.shim_pidfd: Optional[int] = None
        self.taken: Optional[asyncio.Future[None]] = None

    @property
    def living(self) -> bool:
        return self.state in LIVING

    @property
    def cards(self) -> Tuple[str, ...]:
        """The uuids of its cards; a cpu place is none."""
        return tuple(dict.fromkeys(slot.uuid for slot in self.slots if slot.uuid != "cpu"))

    @property
    def slots(self) -> Tuple[SlotRef, ...]:
        return self.spec.slots if self.spec else ()

    @property
    def lease_id(self) -> str:
        return self.spec.lease_id if self.spec else ""

    def report(self) -> AttemptReport:
        """Where it stands now, in the words of the wire."""
        running_for = None
        if self.living and self.ticks is not None:
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            running_for = max(0, int((now - self.ticks / processes.TICKS_PER_S) * 1000))
        record = self.exit
        if record is not None and self.peaks:
            record = dataclasses.replace(record, peak_card_memory_mib=dict(self.peaks))
        return AttemptReport(
            attempt_id=self.id,
            state=self.state,
            job_id=self.spec.job_id if self.spec else "",
            lease_id=self.lease_id,
            epoch=self.spec.epoch if self.spec else 0,
            fence=self.spec.fence if self.spec else 0,
            slots=self.slots,
            pid=self.pid,
            start_ticks=self.ticks,
            boot_id=self.boot_id or None,
            running_for_ms=running_for,
            exit=record,
            clean=self.clean,
            unclean=self.unclean,
            refusal="tombstoned" if self.state == "never" and self.has("tombstone") else None,
            message=self.message,
        )

    # ---- files

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def has(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def mark(self, name: str) -> None:
        """Make an empty file. Raises Refused("storage")."""
        with storage():
            os.close(os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def order(self, what: Dict[str, Any]) -> None:
        """Append an order for the shim; it reads them when it is signalled, and once at its start."""
        with storage():
            fd = os.open(self.path("orders"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, json.dumps(what).encode() + b"\n")
            finally:
                os.close(fd)

    def take_lock(self) -> Optional[int]:
        """The attempt's lock, or None while a shim (or a request on its way to one) holds it."""
        fd = os.open(self.path("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def is_locked(self) -> bool:
        """Whether a shim holds the attempt now."""
        fd = self.take_lock()
        if fd is None:
            return True
        os.close(fd)
        return False

    def read_shim(self) -> Optional[Tuple[int, int]]:
        """Pid and ticks that the lock's holder has written, or None."""
        fields = self._read("lock").split()
        return (int(fields[0]), int(fields[1])) if len(fields) == 2 else None

    def read_pid(self) -> None:
        """Take pid and ticks of the command from its file, when they are there."""
        fields = self._read("pid").split()
        if len(fields) == 3:
            self.pid, self.ticks = int(fields[0]), int(fields[1])

    def read_exit(self) -> bool:
        """Take the exit record from disk; False when there is none (or a power cut left an empty one)."""
        for name in ("exit", "exit.main"):
            text = self._read(name)
            if text:
                with contextlib.suppress(ValueError, ProtocolError):
                    self.take_exit(json.loads(text))
                    return True
        return False

    def take_exit(self, record: Dict[str, Any]) -> None:
        """Take an exit record as the shim wrote it."""
        self.exit = from_wire(ExitRecord, record)
        self.survivors = int(record.get("survivors", 0))

    def keep_peaks(self, seen: Dict[str, int]) -> None:
        """Note the most card memory seen, by uuid in MiB; a rise of a sixteenth is written down."""
        write = False
        for uuid, memory in seen.items():
            before = self.peaks.get(uuid, 0)
            if memory > before:
                self.peaks[uuid] = memory
                write = write or memory > before + before // 16
        if write:
            with contextlib.suppress(OSError):
                with open(self.path("peaks.new"), "w", encoding="ascii") as file:
                    json.dump(self.peaks, file)
                os.rename(self.path("peaks.new"), self.path("peaks"))

    def read_peaks(self) -> None:
        with contextlib.suppress(ValueError):
            self.peaks = {str(key): int(value) for key, value in json.loads(self._read("peaks") or "{}").items()}

    def _read(self, name: str) -> str:
        try:
            with open(self.path(name), encoding="utf-8", errors="surrogateescape") as file:
                return file.read()
        except OSError:
            return ""


class Attempts:
    """All attempts that the server must still be told of, by id."""

    def __init__(self, directory: str, boot_id: str) -> None:
        self.directory = directory
        self._boot_id = boot_id
        self._live = os.path.join(directory, "attempts")
        self._ended = os.path.join(directory, "ended")
        self._table: Dict[str, Attempt] = {}
        for path in (self._live, self._ended):
            os.makedirs(path, mode=0o700, exist_ok=True)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._table.values()))

    def __len__(self) -> int:
        return len(self._table)

    def find(self, attempt_id: str) -> Optional[Attempt]:
        return self._table.get(attempt_id)

    def living(self) -> List[Attempt]:
        return [attempt for attempt in self._table.values() if attempt.living]

    def create(self, spec: StartSpec, launch_env: Callable[[], Dict[str, str]]) -> Attempt:
        """Write down an accepted start, secrets apart. Not synced: after a power cut nothing runs anyway, and the
        fence (synced elsewhere) refuses what is older. Raises Refused("storage")."""
        attempt = Attempt(spec.attempt_id, os.path.join(self._live, spec.attempt_id), spec, self._boot_id)
        stored = {
            "spec": to_wire(dataclasses.replace(spec, secret_env={})),
            "launch_env": launch_env(),
            "boot_id": self._boot_id,
            "accepted_at": time.clock_gettime(time.CLOCK_BOOTTIME),
        }
        with storage():
            os.makedirs(attempt.directory, mode=0o700, exist_ok=True)
            if spec.secret_env:
                _write(attempt.path("secret"), json.dumps(dict(spec.secret_env)))
            _write(attempt.path("spec.new"), json.dumps(stored))
            os.rename(attempt.path("spec.new"), attempt.path("spec"))
        self._table[attempt.id] = attempt
        return attempt

    def discard(self, attempt: Attempt) -> None:
        """Undo `create` for a start that was refused before anything could run."""
        self._table.pop(attempt.id, None)
        shutil.rmtree(attempt.directory, ignore_errors=True)

    def bury(self, attempt_id: str) -> Attempt:
        """Note a stop that came before the start: an attempt that never will be. Raises Refused("storage")."""
        attempt = self._table.get(attempt_id)
        if attempt is None:
            attempt = Attempt(attempt_id, os.path.join(self._live, attempt_id), None, self._boot_id)
            with storage():
                os.makedirs(attempt.directory, mode=0o700, exist_ok=True)
            attempt.state = "never"
            attempt.clean = True
            self._table[attempt_id] = attempt
        attempt.mark("tombstone")
        return attempt

    def load(self) -> List[Tuple[Attempt, float]]:
        """Read all directories into the table; each with its age in seconds since it was accepted.

        `state` is not judged here: the supervisor looks at lock, began, pid and exit.
        """
        found = []
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        for name in sorted(os.listdir(self._live)):
            directory = os.path.join(self._live, name)
            if not _ID.fullmatch(name) or not os.path.isdir(directory):
                continue
            attempt, age = self._load_one(name, directory, now)
            if attempt is None:
                shutil.rmtree(directory, ignore_errors=True)  # hostd died between making it and writing the spec
                continue
            self._table[name] = attempt
            found.append((attempt, age))
        return found

    def _load_one(self, name: str, directory: str, now: float) -> Tuple[Optional[Attempt], float]:
        try:
            with open(os.path.join(directory, "spec"), "rb") as file:
                stored = json.loads(file.read())
            spec = from_wire(StartSpec, stored["spec"])
        except (OSError, ValueError, KeyError, ProtocolError):
            if not any(os.path.exists(os.path.join(directory, part)) for part in ("tombstone", "began", "exit")):
                return None, 0.0
            attempt = Attempt(name, directory, None, self._boot_id)
            attempt.acked = attempt.has("acked")
            return attempt, 0.0
        attempt = Attempt(name, directory, spec, stored.get("boot_id", ""))
        attempt.acked = attempt.has("acked")
        attempt.read_pid()
        attempt.read_peaks()
        return attempt, now - float(stored.get("accepted_at", 0.0))

    def forget(self, attempt_id: str) -> None:
        """Stop telling of an ended attempt; its directory moves to `ended/`, where its logs stay readable.

        Raises:
            Refused: bad_request while it lives; unknown ids and repeats are fine.
        """
        attempt = self._table.get(attempt_id)
        if attempt is None:
            return
        if attempt.living:
            raise Refused("bad_request", f"attempt {attempt_id} is {attempt.state}; only an ended one can be forgotten")
        del self._table[attempt_id]
        target = os.path.join(self._ended, attempt_id)
        with storage():
            try:
                os.rename(attempt.directory, target)
            except OSError:
                shutil.rmtree(target, ignore_errors=True)
                os.rename(attempt.directory, target)

    def find_forgotten(self, attempt_id: str) -> Optional[Attempt]:
        """A forgotten attempt, read back from `ended/`, or None."""
        directory = os.path.join(self._ended, attempt_id)
        if not os.path.isdir(directory):
            return None
        attempt, _age = self._load_one(attempt_id, directory, 0.0)
        if attempt is None:
            return None
        if attempt.read_exit():
            attempt.state = "exited"
        else:
            attempt.state = "lost" if attempt.has("began") else "never"
        attempt.clean = True
        return attempt

    def log_directory(self, attempt_id: str) -> Optional[str]:
        """Where the attempt's logs lie, living or forgotten, or None."""
        for parent in (self._live, self._ended):
            path = os.path.join(parent, attempt_id)
            if os.path.isdir(path):
                return path
        return None

    def sweep_ended(self, keep_logs_s: float, keep_record_s: float) -> None:
        """Drop what is old in `ended/`: logs after `keep_logs_s`, the rest after `keep_record_s`."""
        now = time.time()
        for name in os.listdir(self._ended):
            path = os.path.join(self._ended, name)
            with contextlib.suppress(OSError):
                age = now - os.stat(path).st_mtime
                if age > keep_record_s:
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                for log in ("out", "err"):
                    with contextlib.suppress(FileNotFoundError):
                        if now - os.stat(os.path.join(path, log)).st_mtime > keep_logs_s:
                            os.unlink(os.path.join(path, log))


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
