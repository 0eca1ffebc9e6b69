"""The shim: one small process per attempt that starts the command, outlives hostd, and writes how it ended.

Owns the attempt's process tree from the first instruction to the last: its session, its log files, its time limit,
its suspension (STOP, CONT), the stop ladder (TERM, CONT, grace, KILL) and the exit record. Needs nobody: hostd may die and come back.
Must not know: cards, leases, the wire's framing, asyncio. Liveness is the flock that arrives with the request.

Files: reads and appends to the attempt's record (JSON lines; see attempts.py), and opens its two logs. Lines it writes:
`gate` while it waits for the word to begin and `given_up` when that did not come, `began` before the command can run,
`pid`, `suspended` and `resumed`, `main` when the command is over and its tree is not, `exit` (synced).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import socket
import time
import traceback
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from cotenant.hostd import processes
from cotenant.hostd.pause import Pause

#: How long after KILL a tree may still hold on before the record is written without it (kernel calls cannot be killed).
UNKILLABLE_S = 5.0
#: Poll no longer than this while a deadline runs: poll() sleeps on a clock that stands still while the machine is
#: suspended, and the deadline is on one that does not.
CLOCK_SLICE_S = 30.0
#: An end is synced this long after it was written, unless the next start says that the server has it, or nobody was there
#: to be told: whoever acts on an end that hostd passed on has a copy.
SYNC_AFTER_S = 0.02
#: The kernel's count of its OOM kills costs 0.1 ms to read, so a command gets this far before it is.
OOM_LOOK_AFTER_S = 0.02
#: Raised for the command's tree, so that the kernel takes a job before it takes hostd or the shim.
OOM_SCORE_ADJ = "500"

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_prctl: Any = None
_me: Optional[Tuple[int, int]] = None


def prepare() -> None:
    """Load what every shim needs, once, in the warm parent."""
    global _prctl
    _prctl = ctypes.CDLL(None, use_errno=True).prctl
    _rehearse()


def _rehearse() -> None:
    """Do once, to no effect, what a start will do.

    In a fresh fork the first use of a page copies it: about 3 ms in all on a small virtual machine. The spare has
    time for that while it waits, the start has not.
    """
    json.loads(json.dumps({"spec": {"argv": ["a"], "env": {"a": "b"}, "slots": []}, "launch_env": {"a": "b"}}))
    _myself()
    _now()
    env = dict(os.environ)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
    try:
        find_program("/", env.get("PATH", os.defpath))
        os.posix_spawn("/", ["/"], env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_IGNORED_HERE)
    except OSError as error:
        _exec_error("/", None, error)
    os.close(null)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shim = Shim("/", {}, ours, null, null)
    shim._tell(b'{"pid": %d}' % 1)
    _receive(theirs)
    json.dumps(shim._record({"code": 0}))
    _outcome(0)
    ours.close()
    theirs.close()


def wait_for_request(requests: socket.socket, taken: int) -> None:
    """Wait as the spare shim; run the one request that comes, or return when hostd is gone.

    A request is JSON, {"base", "secrets", "stored"}, with the descriptors of the attempt's record (locked), of the socket to
    hostd, and of any card locks, in this order. Secrets come this way alone: no file ever holds them. `stored` says whether the
    end of the attempt that this shim kept before is stored by the server.
    """
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _prctl(_PR_SET_NAME, b"cotenant-shim", 0, 0, 0)
    wake = _catch_signals()
    _rehearse()
    request, fds = _receive(requests)
    if request is None:
        return

    def free_the_place() -> None:
        with contextlib.suppress(OSError):  # the warm parent may have died meanwhile; that must not end this attempt
            os.write(taken, b"1")
        os.close(taken)
        requests.close()

    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fds.pop(1))
    started: Callable[[], None] = free_the_place
    while request is not None:
        record = fds.pop(0)
        try:
            whole = Shim(request["base"], request["secrets"], control, wake, record).run(started)
        except BaseException:  # noqa: BLE001 (the process ends here; this is its only word)
            # Nobody reads this process's stderr; what went wrong must be found beside the attempt.
            with open(request["base"] + ".error", "a", encoding="utf-8") as file:
                file.write(traceback.format_exc())
            return
        if not whole:
            os.fdatasync(record)
            return
        # Nothing of the attempt is left, so this process can keep the next one: that saves a fork and its page copies,
        # most of what an attempt costs. hostd says no by closing the socket.
        for fd in fds:
            os.close(fd)
        ended = _Ended(record)
        request, fds = ended.wait(control)
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 65536)  # what was signalled between two attempts was meant for neither
        started = ended.sync_unless(request is not None and request["stored"])


class _Ended:
    """The record of the attempt that this shim kept last, while its end is not known to be safe."""

    def __init__(self, record: int) -> None:
        self._record = record
        fcntl.flock(record, fcntl.LOCK_UN)

    def wait(self, control: socket.socket) -> Tuple[Optional[Dict[str, Any]], List[int]]:
        """The next request. The end is synced when none comes soon, or hostd is gone."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        if not poll.poll(SYNC_AFTER_S * 1000):
            self.sync()
        try:
            request, fds = _receive(control)
        except OSError:
            request, fds = None, []
        if request is None:
            self.sync()
        return request, fds

    def sync_unless(self, stored: bool) -> Callable[[], None]:
        """What is left to do once the next command runs: the server may not have the end yet."""
        if stored and self._record >= 0:
            os.close(self._record)
            self._record = -1
        return self.sync

    def sync(self) -> None:
        """Put the end on disk; again is fine."""
        if self._record >= 0:
            os.fdatasync(self._record)
            os.close(self._record)
            self._record = -1


def _receive(source: socket.socket) -> Tuple[Optional[Dict[str, Any]], List[int]]:
    """A request and its descriptors, or None when hostd is gone. A late word about an earlier attempt is passed over."""
    while True:
        # Not recv_fds, which hands no flags on: a command that inherited the lock would keep it beyond its shim's death.
        data, ancillary, _flags, _address = source.recvmsg(1 << 18, socket.CMSG_LEN(32 * 4), socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for _level, _kind, body in ancillary:
            fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
        if not data:
            return None, []
        if data[:1] == b"{":
            return json.loads(data), list(fds)


def _catch_signals() -> int:
    """Turn the signals the shim lives on into bytes on a pipe; returns its reading end."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _noop)
    return read


def _done() -> None:
    """What was to be done once the command runs was done before."""


def _noop(number: int, frame: Any) -> None:
    """The wake-up descriptor has already said it."""


def _myself() -> Tuple[int, int]:
    """This process's pid and start ticks, read once in each."""
    global _me
    if _me is None or _me[0] != os.getpid():
        _me = (os.getpid(), processes.start_ticks(os.getpid()) or 0)
    return _me


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Shim:
    """One attempt's keeper. `run` returns when the whole tree is gone and the record is on disk."""

    def __init__(self, base: str, secrets: Dict[str, str], control: socket.socket, wake: int, record: int) -> None:
        self.base = base
        self.secrets = secrets
        self.record = record  # opened to read and append; the lock on it is this attempt's life
        self.control = control
        self.wake = wake
        self.job = 0
        self.status: Optional[int] = None  # of the command itself, once reaped
        self.user_s = 0.0
        self.sys_s = 0.0
        self.peak_kib = 0
        self.asked: Set[int] = set()  # signals sent because hostd was asked to
        self.record_read = 0
        self.reason: Optional[str] = None
        self.sender: Optional[str] = None  # set when a stop began: shim, or outside for a TERM at the shim itself
        self.stopped_first = False  # the stop began before the command ended by itself
        self.kill_at: Optional[float] = None
        self.killed_at: Optional[float] = None
        self.escapees: Set[Tuple[int, int]] = set()
        self.terminal: Optional[int] = None
        self.slave = self.out = self.err = self.null = -1
        self.oom_before: Optional[int] = None  # None: not looked at yet
        self.pause = Pause()
        self.started = _now()
        self.ended: Optional[float] = None

    # ---- from the request to the running command

    def run(self, started: Callable[[], None]) -> bool:
        """Keep the attempt to its end; `started` is called once its command was started.

        True when nothing of it is left, False when something survived even KILL.
        """
        first, *early = self._read_record()
        self.spec: Dict[str, Any] = first["spec"]
        env = dict(os.environ)
        env.update(self.spec.get("env", {}))
        env.update(self.secrets)
        env.update(first["launch_env"])
        env.setdefault("PYTHONUNBUFFERED", "1")
        ready = self._open_streams(env)
        may_go = self._may_go(early)
        if may_go and self.spec.get("gate_s") is not None:
            started()  # others must not wait for their shims while this one waits for its word
            started = _done
            may_go = self._wait_at_gate(float(self.spec["gate_s"]))
        if not may_go:
            self._close_streams()
            self._close_terminal()
            started()
            self._tell(b"i")
            return True  # without `began` it counts as never started
        failure = self._spawn(ready, env)
        if failure is None:
            self._introduce()
        started()
        if failure is not None:
            self.ended = _now()
            gone = self._finish({"exec_error": failure})
        else:
            gone = self._wait_for_end()
        self._close_terminal()
        return gone

    def _may_go(self, early: List[Dict[str, Any]]) -> bool:
        """Wait for hostd's word that the fence is on disk; False when it will not come, or a stop came before it (maybe `early`).

        Everything up to here is made ready beside that sync.
        """
        word = b"g" + self.base.encode("utf-8", "surrogateescape")
        try:
            while (said := self.control.recv(4096)) != word:
                if not said:
                    return False
        except OSError:
            return False
        return not any("tombstone" in line for line in [*early, *self._read_record()])

    def _wait_at_gate(self, gate_s: float) -> bool:
        """Wait for the order to begin; False when a stop comes first, or nothing in time.

        The word goes through the record, so that it can come from another hostd than the one that asked for the start.
        """
        me, ticks = _myself()
        until = _now() + gate_s
        self._write(b'{"gate": [%d, %d]}' % (me, ticks))
        self._tell(b"r %d %d" % (me, ticks))
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        while True:
            in_time = _now() < until
            for line in self._read_record():
                if "tombstone" in line:
                    return False
                if line.get("order", {}).get("do") == "go":
                    return True
            if not in_time:
                self._write(b'{"given_up": true}')
                return False
            poll.poll(int(max(0.0, min(until - _now(), CLOCK_SLICE_S)) * 1000) + 1)
            try:
                if signal.SIGTERM in os.read(self.wake, 4096):
                    return False
            except BlockingIOError:
                pass

    def _open_streams(self, env: Dict[str, str]) -> List[Tuple[Any, ...]]:
        """Open what the command will have as its standard streams; returns what posix_spawn is to do with them."""
        self.out = os.open(self.base + ".out", os.O_WRONLY | os.O_APPEND)
        self.err = os.open(self.base + ".err", os.O_WRONLY | os.O_APPEND)
        self.null = os.open("/dev/null", os.O_RDWR)
        if self.spec.get("pty"):
            env.setdefault("TERM", "xterm")
            self.terminal, self.slave, path = _open_terminal()
            # The first terminal that a session leader opens becomes its controlling one.
            return [
                (os.POSIX_SPAWN_OPEN, 0, path, os.O_RDWR, 0),
                (os.POSIX_SPAWN_DUP2, 0, 1),
                (os.POSIX_SPAWN_DUP2, 0, 2),
            ]
        return [
            (os.POSIX_SPAWN_DUP2, self.null, 0),
            (os.POSIX_SPAWN_DUP2, self.out, 1),
            (os.POSIX_SPAWN_DUP2, self.err, 2),
        ]

    def _close_streams(self) -> None:
        """Close the command's ends. Of a terminal, ours and the log stay open for relaying."""
        for fd in (0, 1, 2):
            os.dup2(self.null, fd)
        os.close(self.err)
        if self.terminal is None:
            os.close(self.out)
        else:
            os.close(self.slave)  # held until the command had opened it, else the master would read a hang-up first
        os.close(self.null)

    def _close_terminal(self) -> None:
        if self.terminal is not None:
            os.close(self.terminal)
            os.close(self.out)

    def _spawn(self, actions: List[Tuple[Any, ...]], env: Dict[str, str]) -> Optional[str]:
        """Start the command; returns what went wrong, or None. Effects: the line `began`."""
        argv: List[str] = self.spec["argv"]
        workdir = self.spec.get("workdir")
        self._write(b'{"began": true}')
        try:
            if workdir:
                os.chdir(workdir)
            program = find_program(argv[0], env.get("PATH", os.defpath))
            # posix_spawn shares memory until exec: it costs a third of a fork, and reports a failed exec by itself.
            self.started = _now()
            self.job = os.posix_spawn(
                program, argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_IGNORED_HERE
            )
        except (OSError, ValueError) as error:
            return _exec_error(argv[0] if argv else "", workdir, error)
        finally:
            if workdir:
                os.chdir("/")  # a keeper must not keep a file system from being unmounted
            self._close_streams()
        return None

    def _introduce(self) -> None:
        """Tell who the command is, to the disk and to hostd."""
        me, my_ticks = _myself()
        ticks = processes.start_ticks(self.job) or 0
        self._write(b'{"pid": [%d, %d, %d, %d]}' % (self.job, ticks, me, my_ticks))
        self._tell(b"p %d %d %d %d" % (self.job, ticks, me, my_ticks))
        try:
            # Lowering it again would need a privilege, so it is not raised in the shim before the spawn.
            fd = os.open("/proc/%d/oom_score_adj" % self.job, os.O_WRONLY)
            try:
                os.write(fd, OOM_SCORE_ADJ.encode())
            finally:
                os.close(fd)
        except OSError:
            pass  # it has ended already, or a container forbids it

    # ---- while it runs

    def _wait_for_end(self) -> bool:
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        if self.terminal is not None:
            poll.register(self.terminal, select.POLLIN)
        limit = self.spec.get("time_limit_s")
        limited = None if limit is None else self.started + float(limit)
        self._read_orders()  # one may have been written before this shim could be signalled
        while True:
            gone = self._reap()
            if self.status is not None and gone:
                break
            now = _now()
            if self.status is not None and self.ended is None:
                self._leader_ended(now)
            if self.oom_before is None and now >= self.started + OOM_LOOK_AFTER_S:
                self.oom_before = processes.oom_kills()
            if self.pause.until is not None:
                if now >= self.pause.until:
                    self._go_on(now)
                else:
                    self._stand_still()  # again: somebody outside may have continued a part of it
            limit_at = self.pause.put_off(limited)
            if limit_at is not None and now >= limit_at and self.kill_at is None:
                self._begin_stop("time_limit", "shim", float(self.spec.get("stop_grace_s", 10.0)), now)
            if self.kill_at is not None and now >= self.kill_at:
                if self.killed_at is None:
                    self.killed_at = now
                self._signal_tree(signal.SIGKILL)
                if self.status is not None and now > self.killed_at + UNKILLABLE_S:
                    break
            for fd, _events in poll.poll(self._timeout_ms(limit_at, now)):
                if fd == self.wake:
                    self._woken()
                elif not self._relay():
                    poll.unregister(fd)
        if self.terminal is not None:
            while self._relay():
                pass
        assert self.status is not None
        return self._finish(_outcome(self.status))

    def _timeout_ms(self, limit_at: Optional[float], now: float) -> Optional[int]:
        if self.killed_at is not None:
            return 50  # KILL is repeated: a tree that still forks may have made a new one
        limit_at = limit_at if self.kill_at is None else None
        deadlines = [at for at in (limit_at, self.kill_at, self.pause.until) if at is not None]
        if self.oom_before is None:
            deadlines.append(self.started + OOM_LOOK_AFTER_S)
        if not deadlines:
            return None
        return int(max(0.0, min(min(deadlines) - now, CLOCK_SLICE_S)) * 1000) + 1

    def _woken(self) -> None:
        try:
            numbers = os.read(self.wake, 4096)
        except BlockingIOError:
            return
        if signal.SIGUSR1 in numbers:
            self._read_orders()
        if signal.SIGTERM in numbers and self.kill_at is None:
            self._begin_stop(None, "outside", float(self.spec.get("stop_grace_s", 10.0)), _now())

    def _read_orders(self) -> None:
        """Carry out what hostd has written to the record since the last look."""
        for line in self._read_record():
            order = line.get("order", {})
            if order.get("do") == "stop":
                self._begin_stop(order["reason"], "shim", float(order["grace_s"]), _now())
            elif order.get("do") == "signal" and self.status is None:
                self.asked.add(int(order["signal"]))
                self._signal_group(int(order["signal"]))
            elif order.get("do") == "suspend" and self.status is None and self.kill_at is None:
                self._suspend(float(order["max_s"]))
            elif order.get("do") == "resume":
                self._go_on(_now())

    def _read_record(self) -> List[Dict[str, Any]]:
        """The record's whole lines since the last look, from whoever wrote them."""
        size = os.fstat(self.record).st_size
        fresh = os.pread(self.record, size - self.record_read, self.record_read)
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self.record_read += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line]

    def _write(self, line: bytes) -> None:
        os.write(self.record, line + b"\n")

    # ---- standing still

    def _suspend(self, max_s: float) -> None:
        """Stop every process of the tree where it stands; the time limit stands still with it."""
        now = _now()
        if self.pause.begin(now, max_s):
            self._stand_still()
            self._write(b'{"suspended": %.3f}' % now)
            self._tell(b"c")

    def _stand_still(self) -> None:
        self._signal_group(signal.SIGSTOP)
        told: Set[Tuple[int, int]] = set()
        while True:  # what is not stopped yet may fork meanwhile
            fresh = [
                seen
                for seen in processes.descendants(os.getpid(), processes.sweep())
                if seen.pgid != self.job and seen.state not in "TtZX" and (seen.pid, seen.ticks) not in told
            ]
            if not fresh:
                return
            for seen in fresh:
                told.add((seen.pid, seen.ticks))
                processes.send(seen.pid, seen.ticks, signal.SIGSTOP)

    def _go_on(self, now: float) -> None:
        """Let a suspended tree go on; nothing otherwise."""
        if not self.pause.end(now):
            return
        self._signal_group(signal.SIGCONT)
        for seen in processes.descendants(os.getpid(), processes.sweep()):
            if seen.pgid != self.job:
                processes.send(seen.pid, seen.ticks, signal.SIGCONT)
        self._note_end_of_pause()

    def _note_end_of_pause(self) -> None:
        self._write(b'{"resumed": %.3f}' % self.pause.total_s)
        self._tell(b"c")

    # ---- stopping

    def _begin_stop(self, reason: Optional[str], sender: str, grace_s: float, now: float) -> None:
        """The ladder: TERM and CONT now, KILL after the grace. A second order can only shorten the grace."""
        if self.kill_at is not None:
            self.kill_at = min(self.kill_at, now + grace_s)
            if self.reason is None:
                self.reason, self.sender = reason, sender
            return
        self.kill_at = now + grace_s
        if self.pause.end(now):
            self._note_end_of_pause()
        if self.status is None:
            self.reason, self.sender, self.stopped_first = reason, sender, True
        self._signal_tree(signal.SIGTERM)
        self._signal_tree(signal.SIGCONT)  # a stopped process gets its TERM only once it goes on

    def _leader_ended(self, now: float) -> None:
        """The command is over, something of its tree is not: keep the result at once, then end the rest."""
        self.ended = now
        assert self.status is not None
        self._write(b'{"main": %s}' % json.dumps(self._record(_outcome(self.status))).encode())
        if self.kill_at is None:
            self._begin_stop(None, "shim", float(self.spec.get("stop_grace_s", 10.0)), now)

    def _reap(self) -> bool:
        """Collect what has ended; True when no descendant is left (the shim is the subreaper of all of them)."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            self.user_s += usage.ru_utime
            self.sys_s += usage.ru_stime
            self.peak_kib = max(self.peak_kib, usage.ru_maxrss)
            if pid == self.job:
                self.status = status

    def _signal_group(self, number: int) -> None:
        # Nobody else can have this group's number: the leader is our unreaped child.
        if self.status is None:
            with contextlib.suppress(OSError):
                os.killpg(self.job, number)

    def _signal_tree(self, number: int) -> None:
        """Signal the command's group and every descendant outside it, such as what called setsid."""
        grouped = self.status is None
        self._signal_group(number)
        for seen in processes.descendants(os.getpid(), processes.sweep()):
            if (self.status is not None or seen.sid != self.job) and seen.state not in "ZX":
                self.escapees.add((seen.pid, seen.ticks))
            if not (grouped and seen.pgid == self.job):
                processes.send(seen.pid, seen.ticks, number)

    def _relay(self) -> bool:
        """Copy what the terminal has to the log; False when it is closed or, at the end, empty."""
        assert self.terminal is not None
        if self.status is not None and not select.select([self.terminal], [], [], 0)[0]:
            return False
        try:
            data = os.read(self.terminal, 65536)
        except OSError:  # EIO: the last process that had it open is gone
            return False
        while data:
            data = data[os.write(self.out, data) :]
        return True

    # ---- the end

    def _finish(self, outcome: Dict[str, Any]) -> bool:
        """Write down the end; True when nothing of the attempt survived."""
        record = self._record(outcome)
        text = json.dumps(record).encode()
        self._write(b'{"exit": %s}' % text)
        # Before anybody is told: hostd may use these files for another attempt in the next moment.
        fcntl.flock(self.record, fcntl.LOCK_UN)
        # The sync is not on the road of the answer (see SYNC_AFTER_S). Whoever acts on the answer has a copy then; a power
        # cut before the sync shows the attempt as lost, which is the truth of a cut a few milliseconds earlier.
        if not self._tell(b"e " + text):
            os.fdatasync(self.record)
        return not record["survivors"]

    def _record(self, outcome: Dict[str, Any]) -> Dict[str, Any]:
        ended = self.ended if self.ended is not None else _now()
        sender, reason = None, None
        if self.stopped_first:
            sender, reason = self.sender, self.reason
        elif "signal" in outcome:
            number = outcome["signal"]
            if number in self.asked:
                sender = "cotenant"
            elif number == signal.SIGKILL and self._oom_killed():
                sender = "kernel_oom"
            elif number in _FAULTS:
                sender = "fault"
            else:
                sender = "outside"
        survivors = 0
        if self.killed_at is not None:
            left = processes.descendants(os.getpid(), processes.sweep())
            survivors = sum(1 for seen in left if seen.state not in "ZX")
        self.pause.end(ended)
        record = dict(outcome)
        record.update(
            sender=sender,
            reason=reason,
            cpu_user_s=round(self.user_s, 3),
            cpu_sys_s=round(self.sys_s, 3),
            peak_memory_mib=self.peak_kib // 1024,
            duration_s=round(max(0.0, ended - self.started), 3),
            suspended_s=round(self.pause.total_s, 3),
            escapees_killed=len(self.escapees),
            ended_at_ms=int(time.time() * 1000),
            survivors=survivors,
        )
        return record

    def _oom_killed(self) -> bool:
        return self.oom_before is not None and processes.oom_kills() > self.oom_before >= 0

    def _tell(self, message: bytes) -> bool:
        """Tell hostd if it is there; it finds the same in the files if it is not."""
        try:
            self.control.send(message, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True


#: Signals that this process ignores (Python itself ignores some); the command must not inherit that.
_IGNORED_HERE = [signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGQUIT]


#: Raised for what a process itself did, by the kernel or by abort(). Who sent a deadly signal is not told to a parent, so this
#: is what they are as a rule, not what was seen.
_FAULTS = frozenset(
    (
        signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS, signal.SIGABRT,
        signal.SIGXCPU, signal.SIGXFSZ, signal.SIGPIPE,
    )
)  # fmt: skip


def _outcome(status: int) -> Dict[str, Any]:
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    return {"code": os.WEXITSTATUS(status)}


def find_program(name: str, path: str) -> str:
    """The file that `name` means, looked up in `path` as a shell does, relative to the working directory.

    Raises:
        FileNotFoundError: nowhere. PermissionError: found, and not executable.
    """
    if not name:
        raise FileNotFoundError(errno.ENOENT, "the command is empty")
    if "/" in name:
        return name
    refused = False
    for folder in path.split(os.pathsep):
        candidate = os.path.join(folder or ".", name)
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            refused = True
    if refused:
        raise PermissionError(errno.EACCES, "found in PATH, but not executable")
    raise FileNotFoundError(errno.ENOENT, "not found in PATH")


def _exec_error(name: str, workdir: Optional[str], error: Exception) -> str:
    name = name[:200]  # the record travels in one message
    if not isinstance(error, OSError):
        return f"{name!r} cannot be started: {error}"
    code = errno.errorcode.get(error.errno or 0, "EIO")
    if error.filename is not None and workdir and os.fspath(error.filename) == workdir:
        return f"{code}: the working directory {workdir!r}: {error.strerror}"
    if error.errno == errno.ENOEXEC:
        return f"{code}: {name!r} is no program the kernel can start; a script needs a first line such as #!/bin/sh"
    return f"{code}: {name!r}: {error.strerror}"


def _open_terminal() -> Tuple[int, int, str]:
    """A new terminal: master, slave, and the slave's path. Newlines come out as the command wrote them."""
    import struct
    import termios

    master, slave = os.openpty()
    path = os.ttyname(slave)
    modes: List[Any] = termios.tcgetattr(slave)
    modes[1] &= ~termios.ONLCR
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    return master, slave, path
