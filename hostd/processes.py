"""Processes of this machine: who they are, who descends from whom, and a signal that cannot hit a stranger.

Owns every reading of /proc/PID and every signal that is sent. Must not know: attempts, cards, the wire.
A pid alone is no identity (it came back after 31,114 forks in a test, 49 s): with the start ticks (field 22 of
/proc/PID/stat, 10 ms) and the boot id it names one process for ever. A sweep reads /proc itself, because psutil
costs four times as much for the same fields (36 against 8 ms for 413 processes, measured 2026-11-29).
Imported by the warm parent too, so it stays light: no asyncio, no dataclasses.
"""

from __future__ import annotations

import os
import signal
from typing import Dict, List, NamedTuple, Optional, Set

#: Clock ticks in a second, the unit of Stat.ticks.
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Stat(NamedTuple):
    """One process as /proc/PID/stat shows it. `state` is one letter; Z and X are dead."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    state: str
    ticks: int
    name: str


def boot_id() -> str:
    """The id of this boot of the machine."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


def oom_kills() -> int:
    """How often the kernel has killed for memory since boot, on the whole machine; -1 when it does not tell."""
    for line in _read("/proc/vmstat").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return -1


def stat(pid: int) -> Optional[Stat]:
    """The process `pid` now, or None when there is none."""
    try:
        fd = os.open("/proc/%d/stat" % pid, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, OverflowError):
        return None
    try:
        text = os.read(fd, 4096).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(fd)
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if len(fields) < 20:
        return None
    name = head.partition("(")[2]
    return Stat(pid, int(fields[1]), int(fields[2]), int(fields[3]), fields[0], int(fields[19]), name)


def start_ticks(pid: int) -> Optional[int]:
    """When `pid` began, in clock ticks since boot, or None when there is no such process."""
    seen = stat(pid)
    return seen.ticks if seen else None


def alive(pid: int, ticks: int) -> bool:
    """Whether exactly this process still runs. A zombie does not run."""
    seen = stat(pid)
    return seen is not None and seen.ticks == ticks and seen.state not in "ZX"


def sweep() -> Dict[int, Stat]:
    """All processes of the machine by pid."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            seen = stat(int(entry))
            if seen is not None:
                found[seen.pid] = seen
    return found


def descendants(root: int, table: Dict[int, Stat]) -> List[Stat]:
    """Everything below `root` in `table`, without `root`, parents before children."""
    children: Dict[int, List[Stat]] = {}
    for seen in table.values():
        children.setdefault(seen.ppid, []).append(seen)
    found: List[Stat] = []
    line = [root]
    known = {root}
    while line:
        for seen in children.get(line.pop(), ()):
            if seen.pid not in known:
                known.add(seen.pid)
                found.append(seen)
                line.append(seen.pid)
    return found


def ancestors(pid: int, table: Dict[int, Stat]) -> Set[int]:
    """`pid` and everything above it in `table`."""
    found: Set[int] = set()
    while pid in table and pid not in found:
        found.add(pid)
        pid = table[pid].ppid
    return found


def environ(pid: int) -> Optional[Dict[str, str]]:
    """The environment `pid` had at exec, or None when it cannot be read (another user's, or gone)."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            raw = file.read()
    except OSError:
        return None
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {key.decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape") for key, _, value in pairs}


def owner(pid: int) -> Optional[str]:
    """The user name of `pid` (the number where it has no name), or None when there is no such process."""
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return None
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (KeyError, ImportError):
        return str(uid)


def program(pid: int) -> Optional[str]:
    """The program name of `pid`, never its arguments, or None when there is no such process."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            first = file.read(4096).split(b"\0")[0]
    except OSError:
        return None
    if first:
        return os.path.basename(first.decode("utf-8", "replace").split(" ")[0])
    seen = stat(pid)
    return seen.name if seen else None


def send(pid: int, ticks: int, number: int) -> bool:
    """Send signal `number` to exactly this process; False when it is gone (or not ours to signal).

    The pidfd is opened first and the start ticks compared afterwards, so that the pid cannot change hands in
    between. Kernels before 5.3 have no pidfd; there the ticks are compared right before kill, which leaves
    a gap of microseconds.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        if not alive(pid, ticks):
            return False
        try:
            os.kill(pid, number)
        except OSError:
            return False
        return True
    try:
        if start_ticks(pid) != ticks:
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _read(path: str) -> str:
    # os.read asks the kernel half as often as open() does; it is on the road of every start.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 65536).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
