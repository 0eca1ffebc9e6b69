"""Attempts as they stand on disk, and in memory as a copy of it.

Owns `DIR/attempts/`: per attempt three files with one number, `N.record`, `N.out` and `N.err`. The record is a file of
JSON lines that hostd and the attempt's shim both append to; the flock on it is the shim's sign of life. Must not know:
processes' supervision, cards, the wire's framing.

Everything here can be rebuilt from the files at any instant of hostd's death. What must also survive a power cut is in
the journal (state.py) or was synced by the shim (the exit). The files of the next attempts are made ahead of time:
making one costs 0.3 to 0.9 ms on ext4 (measured 2026-11-30), more than everything else hostd does for a start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import re
import time
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from cotenant.hostd import processes
from cotenant.hostd.archive import Archive
from cotenant.hostd.durable import storage
from cotenant.hostd.protocol import (
    AttemptReport,
    CardProcess,
    ExitRecord,
    Progress,
    ProtocolError,
    Refused,
    SlotRef,
    StartSpec,
    from_wire,
    to_wire,
)

#: States in which an attempt still has, or may get, processes.
LIVING = frozenset({"starting", "ready", "running", "stopping"})
#: How many attempts' files are made ahead.
READY_AHEAD = 4
#: How many empty sets of files are kept for attempts to come; the rest are removed.
READY_MAX = 256
#: How long the records and logs of forgotten attempts stay.
KEEP_FORGOTTEN_S = 14 * 86_400.0
#: How many forgotten attempts a server that takes the host over is told of again. A guess: more than a day's work, and
#: at about 1 KiB each far below the longest message.
REMEMBER_FORGOTTEN = 4096
#: How many forgotten attempts' files are removed in one go: 0.1 ms each, while nothing else is answered.
SWEEP_AT_ONCE = 64
_SORTED = json.JSONEncoder(sort_keys=True)
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def is_id(text: str) -> bool:
    """Whether `text` can be the id of an attempt or a lease."""
    return _ID.fullmatch(text) is not None


def check_id(attempt_id: Any) -> str:
    """`attempt_id` when it is one. Raises Refused("bad_request")."""
    if not isinstance(attempt_id, str) or not is_id(attempt_id):
        raise Refused("bad_request", "an id is 1 to 128 of A-Z a-z 0-9 . _ - and does not start with . or -")
    return attempt_id


def plain(spec: StartSpec) -> str:
    """The spec as canonical JSON, without its secrets: what is kept, and what must be equal when the id comes again."""
    without = dataclasses.replace(spec, secret_env={}) if spec.secret_env else spec
    return _SORTED.encode(to_wire(without))


class Attempt:
    """One attempt on this host. The supervisor moves `state`; the rest says what is known."""

    def __init__(self, attempt_id: str, base: str, spec: Optional[StartSpec], boot_id: str, text: str = "") -> None:
        self.id = attempt_id
        self.base = base  # path of its files without the ending; "" for a tombstone of one that was never seen
        self.spec = spec
        self.plain = text  # see plain()
        self.boot_id = boot_id  # of the boot it was accepted in
        self.accepted_at = 0.0  # CLOCK_BOOTTIME of that boot
        self.secrets: Dict[str, str] = {}  # only in memory, only until a shim has them
        self.wants_secrets = False
        self.state = "starting"
        # from the record
        self.began = False
        self.gated = False  # its shim waited for the word to begin
        self.given_up = False  # and the word did not come in time
        self.tombstone = False
        self.pid: Optional[int] = None
        self.ticks: Optional[int] = None
        self.shim: Optional[Tuple[int, int]] = None
        self.exit: Optional[ExitRecord] = None
        self.exit_whole = False  # False: the command ended, its shim did not come to say what became of the rest
        self.survivors = 0  # of its tree, by the shim's own count at the end
        self.acked = False
        self.forgotten = False
        self.peaks: Dict[str, int] = {}
        self.checkpoint: Optional[Tuple[str, Tuple[int, int, int]]] = None  # the newest seen complete: name, signature
        self.notice: Optional[Dict[str, Any]] = None  # the last one it was given: its id, and what lay there then
        self.standing = False  # its tree is stopped
        self.suspended_s = 0.0  # in all suspensions that are over
        # judged by hostd
        self.clean: Optional[bool] = None
        self.unclean: Tuple[CardProcess, ...] = ()
        self.message: Optional[str] = None
        self.progress: Optional[Progress] = None  # of one that is over
        self.stop_by: Optional[float] = None  # CLOCK_BOOTTIME when the ladder must be over
        # the supervisor's handles
        self.lock = -1  # the record, locked, from its making until a shim has it
        self.taken: Optional[asyncio.Future[None]] = None

    @property
    def living(self) -> bool:
        return self.state in LIVING

    @property
    def suspended(self) -> bool:
        return self.standing and self.state == "running"

    @property
    def slots(self) -> Tuple[SlotRef, ...]:
        return self.spec.slots if self.spec else ()

    @property
    def cards(self) -> Tuple[str, ...]:
        """The uuids of its cards; a cpu place is none."""
        return tuple(dict.fromkeys(slot.uuid for slot in self.slots if slot.uuid != "cpu"))

    @property
    def lease_id(self) -> str:
        return self.spec.lease_id if self.spec else ""

    def report(self) -> AttemptReport:
        """Where it stands now, in the words of the wire."""
        running_for = None
        if self.living and self.ticks is not None:
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            running_for = max(0, int((now - self.ticks / processes.TICKS_PER_S) * 1000))
        record = None if self.living else self.exit
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
            refusal="tombstoned" if self.state == "never" and self.tombstone else None,
            message=self.message,
            progress=self.progress,
            suspended=self.suspended,
            suspended_ms=int(self.suspended_s * 1000),
        )

    # ---- its files

    @property
    def record_path(self) -> str:
        return self.base + ".record"

    @property
    def notice_path(self) -> str:
        """The file that tells the command what it is asked for; the variable COTENANT_NOTICE_FILE names it."""
        return self.base + ".notice"

    def log_path(self, stream: str) -> str:
        return f"{self.base}.{stream}" if self.base else os.devnull

    def append(self, line: Dict[str, Any]) -> None:
        """Add a line to the record, unsynced. Raises Refused("storage")."""
        if not self.base:
            return
        with storage():
            fd = os.open(self.record_path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(fd, json.dumps(line).encode() + b"\n")
            finally:
                os.close(fd)

    def read(self) -> None:
        """Take in everything that the record says by now."""
        try:
            with open(self.record_path, "rb") as file:
                self.take(file.read())
        except OSError:
            return

    def take(self, record: bytes) -> None:
        """Take in what a record says."""
        for line in record.split(b"\n"):
            with contextlib.suppress(ValueError, ProtocolError):
                self._take(json.loads(line))

    def _take(self, said: Dict[str, Any]) -> None:
        if "began" in said:
            self.began = True
        elif "gate" in said:
            self.gated = True
            self.shim = (said["gate"][0], said["gate"][1])
        elif "pid" in said:
            self.pid, self.ticks, shim, shim_ticks = said["pid"]
            self.shim = (shim, shim_ticks)
        elif "exit" in said:
            self.take_exit(said["exit"])
            self.exit_whole = True
        elif "main" in said:
            self.take_exit(said["main"])
        elif "peaks" in said:
            self.peaks = said["peaks"]
        elif "checkpoint" in said:
            self.checkpoint = said["checkpoint"]
        elif "notice" in said:
            self.notice = said["notice"]
        elif "suspended" in said:
            self.standing = True
        elif "resumed" in said:
            self.standing, self.suspended_s = False, float(said["resumed"])
        self.given_up = self.given_up or "given_up" in said
        self.tombstone = self.tombstone or "tombstone" in said
        self.acked = self.acked or "acked" in said
        self.forgotten = self.forgotten or "forgotten" in said

    def take_exit(self, record: Dict[str, Any]) -> None:
        """Take an exit record as the shim wrote it. Raises ProtocolError."""
        self.exit = from_wire(ExitRecord, record)
        self.survivors = int(record.get("survivors", 0))

    def take_lock(self) -> Optional[int]:
        """The attempt's lock, or None while a shim (or a request on its way to one) holds it."""
        fd = os.open(self.record_path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
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

    def keep_peaks(self, seen: Dict[str, int]) -> None:
        """Note the most card memory seen, by uuid in MiB; a rise of a sixteenth is written down."""
        write = False
        for uuid, memory in seen.items():
            before = self.peaks.get(uuid, 0)
            if memory > before:
                self.peaks[uuid] = memory
                write = write or memory > before + before // 16
        if write:
            self.append({"peaks": self.peaks})


class Attempts:
    """All attempts of this host by id: those the server must still be told of, and the forgotten ones' logs."""

    def __init__(self, directory: str, boot_id: str, keep_s: float = KEEP_FORGOTTEN_S) -> None:
        self._boot_id = boot_id
        self._keep_s = keep_s
        self._directory = os.path.join(directory, "attempts")
        self._table: Dict[str, Attempt] = {}
        self._alive: Dict[str, Attempt] = {}  # those of the table that live, and some that have just ended
        self._forgotten: Dict[str, str] = {}  # id -> base, of those that have left a log
        self._ready: List[str] = []  # bases of files that are made and empty
        self._next = 1
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        self._archive = Archive(os.path.join(directory, "forgotten"), keep_s)  # those that have not

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._table.values()))

    def __len__(self) -> int:
        return len(self._table)

    def find(self, attempt_id: str) -> Optional[Attempt]:
        """An attempt that the server has not let us forget, or None."""
        return self._table.get(attempt_id)

    def living(self) -> List[Attempt]:
        # Looked at for every start, beside thousands that have ended and are not forgotten yet.
        for attempt_id in [attempt_id for attempt_id, attempt in self._alive.items() if not attempt.living]:
            del self._alive[attempt_id]
        return list(self._alive.values())

    # ---- making

    @property
    def needs_ready(self) -> bool:
        """Whether files should be made ahead."""
        return len(self._ready) < READY_AHEAD

    def make_ready(self) -> None:
        """Make the files of one more attempt ahead."""
        with contextlib.suppress(OSError):
            self._ready.append(self._make())

    def _make(self) -> str:
        while True:
            base = os.path.join(self._directory, f"{self._next:08d}")
            self._next += 1
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                record = os.open(base + ".record", flags, 0o600)
            except FileExistsError:
                continue
            for fd in (record, *(os.open(base + ending, flags, 0o600) for ending in (".out", ".err"))):
                os.close(fd)
            return base

    def _locked(self) -> Tuple[str, int]:
        """Empty files and their record, locked for whoever is to keep the attempt. Raises OSError."""
        while True:
            base = self._ready.pop() if self._ready else self._make()
            record = os.open(base + ".record", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            try:
                fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return base, record
            except BlockingIOError:
                os.close(record)  # somebody looks into it: a backup, a person; the files stay unused
            except OSError:
                os.close(record)
                raise

    def create(self, spec: StartSpec, text: str, launch_env: Dict[str, str]) -> Attempt:
        """Write down an accepted start; `text` is plain(spec). Raises Refused("storage").

        Not synced: after a power cut nothing runs anyway, and the fence (synced elsewhere) refuses what is older.
        """
        accepted = {
            "launch_env": launch_env,
            "boot_id": self._boot_id,
            "accepted_at": time.clock_gettime(time.CLOCK_BOOTTIME),
            "wants_secrets": bool(spec.secret_env),
        }
        with storage():
            base, record = self._locked()
            accepted["launch_env"] = {**launch_env, "COTENANT_NOTICE_FILE": os.path.abspath(base + ".notice")}
            body = ('{"spec":' + text + "," + json.dumps(accepted)[1:] + "\n").encode("utf-8", "surrogateescape")
            try:
                if os.write(record, body) < len(body):
                    raise OSError("the disk is full")
            except OSError:
                os.close(record)
                raise
        attempt = Attempt(spec.attempt_id, base, spec, self._boot_id, text)
        attempt.secrets, attempt.wants_secrets = dict(spec.secret_env), bool(spec.secret_env)
        attempt.accepted_at = accepted["accepted_at"]  # type: ignore[assignment]
        attempt.lock = record
        self._table[attempt.id] = self._alive[attempt.id] = attempt
        return attempt

    def discard(self, attempt: Attempt) -> None:
        """Undo `create` for a start that was refused before anything could run."""
        self._table.pop(attempt.id, None)
        self._alive.pop(attempt.id, None)
        if attempt.lock >= 0:
            os.close(attempt.lock)
            attempt.lock = -1
        _remove(attempt.base)

    def bury(self, attempt_id: str) -> Attempt:
        """Note a stop; of an attempt that was never seen, that it never will be. Raises Refused("storage")."""
        attempt = self._table.get(attempt_id)
        if attempt is None:
            attempt = Attempt(attempt_id, "", None, self._boot_id)
            attempt.state, attempt.clean = "never", True
            self._table[attempt_id] = attempt
        if not attempt.tombstone:
            attempt.tombstone = True
            attempt.append({"tombstone": True})
        return attempt

    # ---- reading back

    def load(self) -> List[Attempt]:
        """Read all records; returns the attempts that are not forgotten. `state` is the supervisor's to judge."""
        bases: Set[str] = set()
        for name in os.listdir(self._directory):
            number, _, _ending = name.partition(".")
            if number.isdigit():
                bases.add(os.path.join(self._directory, number))
                self._next = max(self._next, int(number) + 1)
        for base in sorted(bases):
            attempt = self._load_one(base)
            if attempt is None:
                if len(self._ready) < READY_MAX and _is_silent(base) and _size(base + ".record") in (0, 1):
                    self._ready.append(base)
                else:
                    _remove(base)  # its first line was never written whole: nothing was accepted
            elif attempt.id in self._archive:
                self._use_again(base)  # hostd died in the middle of forgetting it
            elif attempt.forgotten:
                self._forgotten[attempt.id] = base
            else:
                self._table[attempt.id] = self._alive[attempt.id] = attempt
        return list(self._table.values())

    def _load_one(self, base: str) -> Optional[Attempt]:
        try:
            with open(base + ".record", "rb") as file:
                return self._parse(base, file.read())
        except OSError:
            return None

    @staticmethod
    def _parse(base: str, record: bytes) -> Optional[Attempt]:
        try:
            stored = json.loads(record.lstrip(b"\n").partition(b"\n")[0])
            spec = from_wire(StartSpec, stored["spec"])
        except (ValueError, KeyError, ProtocolError):
            return None
        attempt = Attempt(spec.attempt_id, base, spec, stored.get("boot_id", ""), plain(spec))
        attempt.accepted_at = float(stored.get("accepted_at", 0.0))
        attempt.wants_secrets = bool(stored.get("wants_secrets"))
        attempt.take(record)
        return attempt

    # ---- forgetting

    def forget(self, attempt_ids: List[str]) -> None:
        """Stop telling of ended attempts; their logs stay readable. Unknown ids and repeats are fine.

        The files of one that wrote nothing serve another, so that only what writes logs costs files.

        Raises:
            Refused: bad_request while one lives; storage.
        """
        going = [self._table[attempt_id] for attempt_id in dict.fromkeys(attempt_ids) if attempt_id in self._table]
        for attempt in going:
            if attempt.living:
                raise Refused(
                    "bad_request", f"attempt {attempt.id} is {attempt.state}; only an ended one can be forgotten"
                )
        silent = []
        for attempt in going:
            if attempt.exit_whole and attempt.clean and not attempt.survivors and _is_silent(attempt.base):
                silent.append((attempt.id, attempt.base, _read(attempt.record_path)))
            else:
                attempt.append({"forgotten": True})
                if attempt.base:
                    self._forgotten[attempt.id] = attempt.base
                del self._table[attempt.id]
        with storage():
            self._archive.add([(attempt_id, record) for attempt_id, _, record in silent])
        for attempt_id, base, _ in silent:
            del self._table[attempt_id]
            self._use_again(base)

    def _use_again(self, base: str) -> None:
        """Empty the files of an attempt that is in the archive."""
        if len(self._ready) >= READY_MAX:
            _remove(base)
            return
        with contextlib.suppress(OSError):
            _unlink(base + ".notice")
            _blank(base + ".record")
            self._ready.append(base)

    def find_forgotten(self, attempt_id: str) -> Optional[Attempt]:
        """A forgotten attempt, read back from its record, or None."""
        base = self._forgotten.get(attempt_id)
        if base is not None:
            attempt = self._load_one(base)
        else:
            record = self._archive.find(attempt_id) if attempt_id in self._archive else None
            attempt = self._parse("", record) if record else None
        if attempt is not None:
            attempt.state = "exited" if attempt.exit else "lost" if attempt.began else "never"
            attempt.clean = True
        return attempt

    def newest_forgotten(self) -> List[Attempt]:
        """The newest forgotten attempts, oldest first: for a server whose records may be older than what we told."""
        when = self._archive.ids()
        for attempt_id, base in self._forgotten.items():
            with contextlib.suppress(OSError):
                when.append((os.stat(base + ".record").st_mtime, attempt_id))
        found = [self.find_forgotten(attempt_id) for _, attempt_id in sorted(when)[-REMEMBER_FORGOTTEN:]]
        return [attempt for attempt in found if attempt is not None]

    def sweep_forgotten(self) -> None:
        """Remove the files of forgotten attempts that nobody wrote to for `keep_s`.

        Stops at the first that is younger: they stand in the order in which they were forgotten, so that this costs
        nothing however many are kept.
        """
        self._archive.sweep()
        now = time.time()
        for attempt_id, base in list(itertools.islice(self._forgotten.items(), SWEEP_AT_ONCE)):
            with contextlib.suppress(FileNotFoundError):
                if now - os.stat(base + ".record").st_mtime <= self._keep_s:
                    return
            _remove(base)
            del self._forgotten[attempt_id]

    def close(self) -> None:
        """Let go of the archive. What was made ahead serves the next hostd."""
        self._archive.close()


def _blank(path: str) -> None:
    """Leave an empty line of a record, not an empty file: ext4 takes that for a replacement and writes it out at close."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(fd, b"\n", 0)
        os.ftruncate(fd, 1)
    finally:
        os.close(fd)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _is_silent(base: str) -> bool:
    """Whether both logs are there and empty."""
    return bool(base) and _size(base + ".out") == 0 and _size(base + ".err") == 0


def _read(path: str) -> bytes:
    with storage(), open(path, "rb") as file:
        return file.read()


def _remove(base: str) -> None:
    for ending in (".record", ".out", ".err", ".notice"):
        _unlink(base + ending)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
