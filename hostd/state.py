"""What this host must remember: who it is, whom it obeys, and the highest fence of every slot.

Owns the state directory's `state.json`, `journal` and `locked` file, and the amnesia rule. Must not know: attempts'
files, cards, the wire's framing. `state.json` is replaced whole and synced (rare changes); `journal` is appended and
synced (fences and tombstones: one line each, many starts share one sync). Nothing is obeyed before its line is on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
import uuid
from typing import Any, Awaitable, Callable, Dict, List, Optional, Tuple

from cotenant.hostd import processes
from cotenant.hostd.durable import Journal, storage, write_synced
from cotenant.hostd.protocol import Hello, Refused, SlotRef

#: File systems on which locks and sockets do not hold between hosts, as /proc/self/mountinfo names them.
NETWORK_FILE_SYSTEMS = frozenset(
    (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "glusterfs",
        "fuse.glusterfs",
        "lustre",
        "beegfs",
        "gpfs",
        "fuse.sshfs",
        "fuse.s3fs",
        "ncpfs",
    )
)
#: A journal that has grown by this is written anew; a line is about 80 bytes.
COMPACT_ABOVE_BYTES = 256 * 1024
#: How long a stop is remembered of which nothing else is left. Its start can no longer arrive by then: on the connection of
#: the stop and those before it everything sent earlier has arrived, or the connection is superseded and its starts are
#: refused; a server does not start what its records call stopped; and one whose records are older (a restored copy) must
#: take the host over and is told what was here, which goes back as long (KEEP_FORGOTTEN_S in attempts.py).
TOMBSTONE_KEEP_S = 14 * 86_400.0
#: Above so many the oldest go, but none younger than TOMBSTONE_MIN_S: far beyond the 20 s for which a server waits for a
#: host's answer, so that nothing it sent is under way any more.
TOMBSTONES_MAX = 50_000
TOMBSTONE_MIN_S = 3600.0

_Key = Tuple[str, int, int]


class StateError(Exception):
    """The state directory cannot be used; the message says what to do."""


def file_system_of(path: str, mountinfo: Optional[str] = None) -> str:
    """The type of the file system that holds `path`; `mountinfo` is the text of /proc/self/mountinfo."""
    if mountinfo is None:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mountinfo = file.read()
    path = os.path.realpath(path)
    best, kind = "", "unknown"
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        if not right:
            continue
        # proc(5): blank, tab, line break and backslash stand as three octal digits, all else as it is
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), left.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount over the same point hides the earlier
            best, kind = point, right.split()[0]
    return kind


def check_private_directory(path: str) -> None:
    """Make `path` if it is missing; see that it is ours alone.

    Raises:
        StateError: another user's, or open to others.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    seen = os.lstat(path)
    if os.path.islink(path) or not os.path.isdir(path):
        raise StateError(f"{path} is not a directory of its own; name another one")
    if seen.st_uid != os.geteuid():
        raise StateError(f"{path} belongs to user id {seen.st_uid}, not to {os.geteuid()}; name another directory")
    if seen.st_mode & 0o077:
        raise StateError(f"{path} is open to other users; run: chmod 700 {path}")


class State:
    """The host's memory. One per process; open() takes the directory's lock and keeps it."""

    def __init__(self, directory: str, lock_directory: str) -> None:
        self.directory = os.path.realpath(directory)
        self.boot_id = processes.boot_id()
        self.state_id = ""
        self.starts = 0  # of hostd on this directory
        self.cluster_id: Optional[str] = None
        self.incarnation = 0
        self.nonce = ""  # of the server start that has this incarnation
        self.floor = 0
        self.amnesia = False
        self.holds: Dict[str, Dict[str, Any]] = {}  # lease id -> {"fence", "slots"}
        self.endings: Dict[str, Dict[str, Any]] = {}  # ended direct leases that are not clean yet
        self.tombstones: Dict[str, float] = {}  # id -> when by the wall clock, oldest first
        self._fences: Dict[_Key, int] = {}
        self._lock_fd = -1
        self.lock_directory = os.path.realpath(lock_directory)
        self._journal: Optional[Journal] = None
        self._journal_grown, self._journal_may_grow = 0, COMPACT_ABOVE_BYTES

    # ---- opening

    def open(self) -> None:
        """Take the directory and read it.

        Raises:
            StateError: on a network file system, open to others, or held by another hostd.
        """
        check_private_directory(self.directory)
        kind = file_system_of(self.directory)
        if kind in NETWORK_FILE_SYSTEMS:
            raise StateError(f"{self.directory} is on {kind}, where locks do not hold; give --state a local directory")
        self._lock_fd = os.open(os.path.join(self.directory, "locked"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
            raise StateError(f"another hostd (pid {holder or 'unknown'}) already serves {self.directory}") from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, b"%d\n" % os.getpid(), 0)
        stored = self._read()
        fresh = not stored
        self.state_id = stored.get("state_id") or str(uuid.uuid4())
        self.starts = int(stored.get("starts", 0)) + 1
        self.cluster_id = stored.get("cluster_id")
        self.incarnation = int(stored.get("incarnation", 0))
        self.nonce = str(stored.get("nonce", ""))
        self.floor = int(stored.get("floor", 0))
        self.amnesia = bool(stored.get("amnesia", False))
        same_boot = stored.get("boot_id") == self.boot_id
        self.holds = stored.get("holds", {})
        self.endings = stored.get("endings", {}) if same_boot else {}
        if fresh and self._is_amnesia():
            self.amnesia = True
        elif not fresh and self._is_replaced():
            # an older copy of the directory was put in its place: what it remembers is not what was here last
            self.state_id = str(uuid.uuid4())
            self.amnesia = True
        self.save()
        self._mark_boot()
        self._read_journal()

    def _read(self) -> Dict[str, Any]:
        try:
            with open(os.path.join(self.directory, "state.json"), encoding="utf-8") as file:
                stored = json.load(file)
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise StateError(
                f"{self.directory}/state.json is damaged ({error}); move the directory away to start with a new one"
            ) from error
        return stored if isinstance(stored, dict) else {}

    def save(self) -> None:
        """Put `state.json` on disk, synced. Raises Refused("storage") when it cannot."""
        keys = (
            "state_id",
            "boot_id",
            "starts",
            "cluster_id",
            "incarnation",
            "nonce",
            "floor",
            "amnesia",
            "holds",
            "endings",
        )
        body = json.dumps({key: getattr(self, key) for key in keys}, indent=1).encode()
        with storage():
            write_synced(os.path.join(self.directory, "state.json"), body)

    # ---- amnesia

    def _marker(self) -> str:
        name = hashlib.sha256(f"{os.geteuid()} {self.directory}".encode()).hexdigest()[:24]
        return os.path.join(self.lock_directory, f"state-{name}")

    def _mark_boot(self) -> None:
        """Leave a word outside the directory, so that a wiped one is noticed until the next boot."""
        marker = self._marker()
        body = json.dumps({"boot_id": self.boot_id, "state_id": self.state_id, "directory": self._identity()}).encode()
        try:
            fd = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StateError(f"{marker} cannot be written ({error.strerror}); {_way_on(marker)}") from error
        try:
            os.write(fd, body)
        finally:
            os.close(fd)

    def _identity(self) -> List[int]:
        """What a copy of the directory at the same path does not share with it."""
        seen = os.stat(self.directory)
        return [seen.st_dev, seen.st_ino]

    def _marked(self) -> Dict[str, Any]:
        """What the last hostd of this boot left about this path; empty when there was none."""
        marker = self._marker()
        try:
            if os.lstat(marker).st_uid != os.geteuid():
                # What another user wrote there says nothing, and could hide that our memory was lost.
                raise StateError(f"{marker} was made by user id {os.lstat(marker).st_uid}; {_way_on(marker)}")
            with open(marker, encoding="utf-8") as file:
                marked = json.load(file)
        except (OSError, ValueError):
            return {}
        return marked if isinstance(marked, dict) and marked.get("boot_id") == self.boot_id else {}

    def _is_replaced(self) -> bool:
        return bool(self._marked().get("directory", self._identity()) != self._identity())

    def _is_amnesia(self) -> bool:
        if self._marked():
            return True
        return bool(self.unexplained_processes())

    def unexplained_processes(self) -> List[processes.Stat]:
        """Processes of attempts that a hostd on this directory started and that it knows no more: an older memory's.

        What hostds on other directories started is theirs, also where their directory is gone: on a card it makes the card
        occupied, and that needs no memory. So it is with what an agent runs itself under a direct lease, which is no attempt.
        Our own ancestors (a hostd that was itself started under a lease) are explained.
        """
        table = processes.sweep()
        above = processes.ancestors(os.getpid(), table)
        found = []
        for seen in table.values():
            if seen.pid in above or seen.state in "ZX":
                continue
            env = processes.environ(seen.pid) or {}
            home, attempt_id = env.get("COTENANT_STATE_DIR"), env.get("COTENANT_ATTEMPT")
            if not home or not attempt_id or os.path.realpath(home) != self.directory:
                continue
            if not _knows(home, attempt_id):
                found.append(seen)
        return found

    @property
    def needs_floor(self) -> bool:
        """Whether nothing may start yet because an older memory of this host was lost."""
        return self.amnesia

    def set_floor(self, fence: int) -> None:
        """Refuse every start below `fence` from now on; never lowers it. Ends amnesia once nothing old is left."""
        self.floor = max(self.floor, fence)
        if self.amnesia and self.floor > 0 and not self.unexplained_processes():
            self.amnesia = False
        self.save()

    def check_memory(self) -> None:
        """Raises Refused("needs_floor") while a lost memory may still have processes here."""
        if not self.amnesia:
            return
        if self.floor == 0:
            raise Refused("needs_floor", "this host has lost its state since boot; set a floor of fences first")
        left = self.unexplained_processes()
        if left:
            pids = [seen.pid for seen in left]
            raise Refused(
                "needs_floor",
                f"processes {pids[:8]} carry a lease of before the state was lost; they must end first",
                {"pids": pids},
            )
        self.amnesia = False
        self.save()

    # ---- whom to obey

    def greet(self, hello: Hello) -> None:
        """Pin the control plane at its first arrival; afterwards obey only it, and never an older life of it.

        Raises:
            Refused: other_cluster, old_incarnation.
        """
        if self.cluster_id is not None and hello.cluster_id != self.cluster_id and not hello.take_over:
            raise Refused(
                "other_cluster",
                f"this host obeys control plane {self.cluster_id}; a person can move it with: cotenant host take-over",
                {"cluster_id": self.cluster_id},
            )
        moved = hello.cluster_id != self.cluster_id
        if not moved and hello.incarnation < self.incarnation:
            raise Refused(
                "old_incarnation",
                f"incarnation {hello.incarnation} came, {self.incarnation} was here already (a restored copy?);"
                " a person can decide that it is the present: cotenant host take-over",
                {"incarnation": self.incarnation},
            )
        if not moved and hello.incarnation == self.incarnation and self.nonce and hello.nonce != self.nonce:
            raise Refused(
                "old_incarnation",
                f"another server start with incarnation {hello.incarnation} was here (a copied data directory?)",
                {"incarnation": self.incarnation},
            )
        if not moved and not hello.take_over and hello.fence is not None and hello.fence < self.max_fence:
            raise Refused(
                "old_incarnation",
                f"the server's newest fence is {hello.fence}, this host has seen {self.max_fence} (a restored copy?);"
                " a person can decide that it is the present: cotenant host take-over",
                {"incarnation": max(self.incarnation, hello.incarnation), "fence": self.max_fence},
            )
        if moved or (hello.incarnation, hello.nonce) != (self.incarnation, self.nonce):
            self.cluster_id, self.incarnation, self.nonce = hello.cluster_id, hello.incarnation, hello.nonce
            self.save()

    # ---- fences

    @property
    def max_fence(self) -> int:
        """The highest fence this host has ever obeyed or been given as a floor."""
        return max([self.floor, *self._fences.values()])

    def check_fence(self, slots: Tuple[SlotRef, ...], fence: int) -> None:
        """Raises Refused("stale_fence") when a higher fence was seen on any slot that overlaps one of `slots`."""
        if fence < self.floor:
            raise Refused(
                "stale_fence", f"fence {fence} is below this host's floor {self.floor}", {"floor": self.floor}
            )
        for slot in slots:
            for (uuid_, share, shares), seen in self._fences.items():
                if seen > fence and uuid_ == slot.uuid and overlap(slot, SlotRef(uuid_, share, shares)):
                    raise Refused(
                        "stale_fence",
                        f"fence {fence} came for {slot.uuid} share {slot.share}, {seen} was seen there already",
                        {"uuid": slot.uuid, "fence": seen},
                    )

    async def raise_fence(self, slots: Tuple[SlotRef, ...], fence: int) -> None:
        """Remember `fence` for `slots`; returns once it is on disk. Raises Refused("storage")."""
        await self._durable(self._opened.append(self._counted(self._raise(slots, fence))))

    def raise_fence_then(
        self, slots: Tuple[SlotRef, ...], fence: int, written: Callable[[], None], failed: Callable[[Refused], None]
    ) -> None:
        """Remember `fence` for `slots`; `written` is called once it is on disk, in another thread, or `failed` here."""
        self._opened.append_then(
            self._counted(self._raise(slots, fence)), written, lambda error: failed(self._refusal(error))
        )

    def _raise(self, slots: Tuple[SlotRef, ...], fence: int) -> bytes:
        """Lines for the journal. With none the wait is for those before: a repeat is not obeyed sooner than the first."""
        fresh = []
        for slot in slots:
            key = (slot.uuid, slot.share, slot.shares)
            if self._fences.get(key, -1) < fence:
                self._fences[key] = fence  # at once: a lower start that comes during the sync must be refused too
                fresh.append({"fence": fence, "slot": list(key)})
        return _lines(fresh)

    async def bury(self, attempt_id: str) -> None:
        """Remember that `attempt_id` must never start; returns once it is on disk. Raises Refused("storage")."""
        fresh = []
        if attempt_id not in self.tombstones:
            self.tombstones[attempt_id] = round(time.time(), 3)
            fresh = [{"tombstone": attempt_id, "at": self.tombstones[attempt_id]}]
        await self._durable(self._opened.append(self._counted(_lines(fresh))))

    def _counted(self, lines: bytes) -> bytes:
        """`lines`, before which the journal is written anew if it has grown long."""
        self._journal_grown += len(lines)
        if self._journal_grown > self._journal_may_grow:
            self._drop_tombstones()
            whole = self._whole_journal()
            self._journal_grown, self._journal_may_grow = 0, max(COMPACT_ABOVE_BYTES, len(whole))
            self._opened.replace(whole)
        return lines

    def _whole_journal(self) -> bytes:
        fences = [{"fence": fence, "slot": list(key)} for key, fence in self._fences.items()]
        return _lines(fences + [{"tombstone": name, "at": at} for name, at in self.tombstones.items()])

    def _drop_tombstones(self) -> None:
        """Forget stops whose start cannot arrive any more."""
        now = time.time()
        spare = len(self.tombstones) - TOMBSTONES_MAX
        for number, (name, at) in enumerate(list(self.tombstones.items())):
            age = now - at
            if age > TOMBSTONE_KEEP_S or (number < spare and age > TOMBSTONE_MIN_S):
                del self.tombstones[name]

    @property
    def _opened(self) -> Journal:
        assert self._journal is not None, "open() comes first"
        return self._journal

    async def _durable(self, written: Awaitable[None]) -> None:
        try:
            await written
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> Refused:
        return Refused("storage", f"{self.directory} cannot be written: {error}")

    def _read_journal(self) -> None:
        path = os.path.join(self.directory, "journal")
        try:
            with open(path, "rb") as file:
                raw = file.read()
        except FileNotFoundError:
            raw = b""
        for line in raw.split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a torn line was never acknowledged
            if "fence" in record:
                key = (str(record["slot"][0]), int(record["slot"][1]), int(record["slot"][2]))
                self._fences[key] = max(self._fences.get(key, 0), int(record["fence"]))
            elif "tombstone" in record:
                # without a time: written by an older hostd; its time begins now
                self.tombstones[str(record["tombstone"])] = float(record.get("at", time.time()))
        self._drop_tombstones()
        if len(raw) > COMPACT_ABOVE_BYTES or (raw and not raw.endswith(b"\n")):
            write_synced(path, self._whole_journal())
        self._journal = Journal(path)

    def close(self) -> None:
        """Give the directory back."""
        if self._journal is not None:
            self._journal.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)


def _way_on(marker: str) -> str:
    return f"remove it as that user or as root (sudo rm {marker}), or give --lock-dir another directory"


def _knows(home: str, attempt_id: str) -> bool:
    """Whether the state directory `home`, ours or another hostd's, has a record of the attempt."""
    wanted = json.dumps(attempt_id).encode()
    try:
        names = os.listdir(os.path.join(home, "attempts"))
    except OSError:
        return False
    for name in names:
        if name.endswith(".record"):
            with contextlib.suppress(OSError), open(os.path.join(home, "attempts", name), "rb") as file:
                if wanted in (file.readline().strip() or file.readline()):
                    return True
    return False


def _lines(records: List[Dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def overlap(one: SlotRef, other: SlotRef) -> bool:
    """Whether two slots share part of a card. Places of a cpu host are only counted, so equal numbers are equal."""
    if one.uuid != other.uuid:
        return False
    if one.uuid == "cpu":
        return one.share == other.share
    return (
        one.share * other.shares < (other.share + 1) * one.shares
        and other.share * one.shares < (one.share + 1) * other.shares
    )
