"""The processes that descend from this one, wherever they went: signalled, ended and reaped, and nobody else's.

This process becomes the reaper of its orphans (Linux, prctl 36), so a daemon that CMD started is still found under it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Called between fork and exec: TERM for this process when `parent` dies; at once if it is dead already."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


class Kin:
    """All living descendants of this process. Make it before the first child."""

    def __init__(self) -> None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def living(self) -> list[int]:
        """Their pids, zombies left out; parents before children."""
        children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (seen := _stat(int(name))) is not None and seen[0] not in "ZX":
                children.setdefault(seen[1], []).append(int(name))
        found: list[int] = []
        due = [os.getpid()]
        while due:
            mine = children.get(due.pop(), [])
            found += mine
            due += mine
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each. Through a pidfd, checked again to be ours: a pid may be somebody else's by now."""
        for pid in self.living():
            try:
                fd = os.pidfd_open(pid)
            except OSError:
                continue
            try:
                if pid in self.living():
                    signal.pidfd_send_signal(fd, number)
            except OSError:
                pass  # gone, or of another user (setuid): nothing that we could do
            finally:
                os.close(fd)

    def end(self, grace_s: float) -> None:
        """TERM, up to `grace_s`, KILL, and up to two seconds for the kernel; returns when none lives or nothing helps."""
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
            self.signal(number)
            deadline = time.monotonic() + patience_s
            while self.living():
                _reap()
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.02)
            else:
                break
        _reap()


def _reap() -> None:
    """Take the exits of all children that ended, or they would stay as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # there is none left


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, parent's pid), or None where the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return after[0].decode(), int(after[1])
