"""A flock per leased card in a place that all users of the machine share.

Owns the lock directory. Two hostds of different users (or state directories) on one machine see each other here. The
descriptor is also handed to the attempt's shim, so that the card stays locked while hostd is dead.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Dict, Optional, Set

from cotenant.hostd.protocol import Refused
from cotenant.hostd.state import StateError


def default_lock_directory() -> str:
    """The same answer for every user of this machine: it depends on the machine alone.

    COTENANT_LOCK_DIR overrides it: jobs have it, so that a hostd which is started under one sees the locks of the hostd above.
    """
    if given := os.environ.get("COTENANT_LOCK_DIR"):
        return given
    try:
        mode = os.stat("/run/lock").st_mode
    except OSError:
        mode = 0
    if mode & stat.S_IWOTH and mode & stat.S_ISVTX:
        return "/run/lock/cotenant"
    return "/tmp/cotenant-locks"


def open_lock_directory(path: str) -> str:
    """Make the directory when it is missing (sticky, writable by all), check it, and return it.

    Raises:
        StateError: it is no directory, or others could replace our files in it.
    """
    try:
        os.mkdir(path)
        os.chmod(path, 0o1777)
    except FileExistsError:
        pass
    except OSError as error:
        raise StateError(f"the lock directory {path} cannot be made ({error}); give --lock-dir") from error
    seen = os.lstat(path)
    if not stat.S_ISDIR(seen.st_mode):
        raise StateError(f"the lock directory {path} is not a directory; give --lock-dir")
    if seen.st_mode & stat.S_IWOTH and not seen.st_mode & stat.S_ISVTX:
        raise StateError(f"the lock directory {path} must be sticky; run: chmod 1777 {path}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise StateError(f"the lock directory {path} cannot be written; give --lock-dir")
    return path


class CardLocks:
    """The card locks that this hostd holds, each for a set of users (attempt or lease ids)."""

    def __init__(self, directory: str, key: str) -> None:
        self._directory = directory
        self._key = key  # names this state directory in the lock file
        self._held: Dict[str, int] = {}
        self._users: Dict[str, Set[str]] = {}

    def take(self, uuid: str, user: str, ours_lives: bool) -> Optional[int]:
        """Lock card `uuid` for `user`; repeatable. The descriptor, or None when an own shim holds it already.

        `ours_lives` says whether an attempt of ours lives on the card: after hostd's restart its shim holds the lock.

        Raises:
            Refused: locked, another hostd on this machine holds the card.
        """
        if uuid not in self._held:
            fd = self._open(uuid)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
                os.close(fd)
                if holder == self._key and ours_lives:
                    return None
                raise Refused(
                    "locked", f"another hostd on this machine holds card {uuid}", {"uuid": uuid, "holder": holder}
                ) from None
            try:
                os.ftruncate(fd, 0)
                os.pwrite(fd, self._key.encode() + b"\n", 0)
            except OSError:
                pass  # another user's file; the lock is what counts
            self._held[uuid] = fd
        self._users.setdefault(uuid, set()).add(user)
        return self._held[uuid]

    def release(self, user: str) -> None:
        """Unlock what `user` alone used."""
        for uuid in list(self._users):
            users = self._users[uuid]
            users.discard(user)
            if not users:
                del self._users[uuid]
                os.close(self._held.pop(uuid))

    def _open(self, uuid: str) -> int:
        path = os.path.join(self._directory, uuid.replace("/", "_") + ".lock")
        for _again in range(3):  # between two tries another hostd may make the file
            # Without O_CREAT first: in a sticky directory the kernel (fs.protected_regular) refuses to open another
            # user's existing file with it.
            for flags in (os.O_RDWR, os.O_RDONLY, os.O_RDWR | os.O_CREAT | os.O_EXCL):
                try:
                    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                except (FileNotFoundError, PermissionError, FileExistsError):
                    continue
                if flags & os.O_CREAT:
                    os.fchmod(fd, 0o666)
                return fd
        raise Refused("storage", f"the lock of card {uuid} cannot be opened in {self._directory}")
