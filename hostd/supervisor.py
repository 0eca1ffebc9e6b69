"""Shims seen from hostd: handing attempts to them, hearing of their ends, adopting them after a restart.

Owns the warm parent and every move of an attempt's state. Must not know: cards, connections. Truth is on disk: the
socket to a shim only makes news fast, and is gone after hostd's own death. The judgement in all cases is one table:

    exit there                     exited
    lock held                      running (its shim lives)
    lock free, no `began`          certainly never ran: start it (again), or never
    lock free, `began`, no exit    lost: its shim died; what is left of its tree is found and ended
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, Callable, Coroutine, Dict, List, Optional, Set

from cotenant.hostd import processes
from cotenant.hostd.attempts import Attempt, Attempts
from cotenant.hostd.protocol import Refused

#: An accepted start that hostd's death interrupted is still made this long afterwards; later it counts as never.
RESUME_START_WITHIN_S = 300.0
#: How long the word to begin waits for its effect before it answers that there is none yet.
GO_WITHIN_S = 5.0
#: How often one start is handed over before it is refused: each try needs a shim that died before it began.
HAND_OVER_TRIES = 5
#: Between TERM and KILL for what a dead shim left behind, where the spec does not say.
ORPHAN_GRACE_S = 10.0
#: How long a suspend or resume waits for the shim's word; one that comes later is told by a report.
STANDING_WITHIN_S = 2.0
#: How many shims wait for another attempt when theirs is over, and how long.
IDLE_SHIMS = 4
IDLE_SHIM_S = 5.0


class Keeper:
    """A shim, by the socket to it."""

    def __init__(self, ours: socket.socket) -> None:
        self.socket = ours
        self.attempt: Optional[Attempt] = None  # None while it is idle
        self.kept: Optional[Attempt] = None  # while it is idle: the one it kept last
        self.idle_since = 0.0


class Gate:
    """What lets one attempt begin: its fence is on disk, and a shim is ready. Whichever comes last sends the word."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = False
        self._refused: Optional[Refused] = None
        self._attempt: Optional[Attempt] = None
        self._keeper: Optional[Keeper] = None

    def open(self) -> None:
        """The fence is on disk. Called in the journal's thread."""
        with self._lock:
            self._open = True
            if self._keeper is not None:
                self._send(self._keeper)

    def fail(self, refused: Refused) -> None:
        """It could not be written."""
        self._refused = refused
        if self._attempt is not None:
            self._refuse(self._attempt, refused)

    def handed(self, attempt: Attempt, keeper: Keeper) -> None:
        """A shim has the request."""
        self._attempt = attempt
        if self._refused is not None:
            self._refuse(attempt, self._refused)
        with self._lock:
            self._keeper = keeper
            if self._open:
                self._send(keeper)

    def _send(self, keeper: Keeper) -> None:
        # The word names the attempt: the loop may close this socket in this moment and get its number for another.
        assert self._attempt is not None
        with contextlib.suppress(OSError):
            keeper.socket.send(b"g" + self._attempt.base.encode("utf-8", "surrogateescape"), socket.MSG_DONTWAIT)

    @staticmethod
    def _refuse(attempt: Attempt, refused: Refused) -> None:
        if attempt.taken is not None and not attempt.taken.done():
            attempt.taken.set_exception(refused)


class Supervisor:
    """Keeps the warm parent and all living attempts of this host.

    `on_change(attempt)` is called after a move that no answer to a request carries; `on_end(attempt)` once per attempt
    that is over; `on_unmade(attempt)` when an adopted start turns out never to have been made.
    """

    def __init__(
        self,
        attempts: Attempts,
        on_change: Callable[[Attempt], None],
        on_end: Callable[[Attempt], None],
        on_unmade: Callable[[Attempt], None],
    ) -> None:
        self._attempts = attempts
        self._on_change = on_change
        self._on_end = on_end
        self._on_unmade = on_unmade
        self._loop = asyncio.get_running_loop()
        self._warm: Optional[socket.socket] = None
        self._warm_pid = 0
        self._keepers: Set[Keeper] = set()
        self._idle: List[Keeper] = []  # those whose attempt is over, ready for another
        self._dismissal: Optional[asyncio.TimerHandle] = None
        self._closed = False
        self._tasks: Set[asyncio.Task[None]] = set()

    # ---- the warm parent

    def start_warm(self) -> None:
        """Start the warm parent unless one serves. Its start takes about 30 ms; requests wait in the socket."""
        if self._warm is not None or self._closed:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        os.set_inheritable(theirs.fileno(), True)
        package = os.path.dirname(os.path.abspath(__file__))
        root = package[: -len(os.path.join("cotenant", "hostd")) - 1]
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from cotenant.hostd.warm import main; main(int(sys.argv[2]))"
        )
        # No site, no user settings: it needs the standard library alone, and starts in a third of the time.
        argv = [sys.executable, "-E", "-s", "-S", "-c", code, root, str(theirs.fileno())]
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Never hostd's own stdout: a reader of it would wait for the last job's end. Its stderr is hostd's log.
            actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1)]
            self._warm_pid = os.posix_spawn(sys.executable, argv, os.environ, file_actions=actions)
        finally:
            os.close(null)
            theirs.close()
        self._warm = ours
        self._loop.add_reader(ours, self._warm_gone, ours)

    def _warm_gone(self, which: socket.socket) -> None:
        """The warm parent and its spare are dead: nothing is lost but their readiness."""
        with contextlib.suppress(ConnectionError):
            which.recv(1)  # it never says anything: readable means closed, reset where a request was left unread
        self._loop.remove_reader(which)
        which.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._warm_pid, 0)
        if which is self._warm:
            self._warm = None
            self._loop.call_later(0.02, self.start_warm)

    # ---- starting

    async def launch(self, attempt: Attempt, locks: List[int], gate: Gate) -> None:
        """Hand an accepted attempt to a shim; returns once its command runs or could not be executed.

        `locks` are descriptors of card locks that the shim is to hold too. The shim makes everything ready and begins when
        `gate` opens. Repeating is safe.

        Raises:
            Refused: storage, no shim could be had, or the gate failed; tombstoned, a stop came meanwhile. It certainly did
            not run then.
        """
        for tried in range(HAND_OVER_TRIES):
            if tried:
                await asyncio.sleep(0.05 * tried)  # a new warm parent takes about 50 ms
            if attempt.tombstone:
                self._never(attempt)
                raise Refused("tombstoned", f"a stop of attempt {attempt.id} came before its start")
            lock, attempt.lock = attempt.lock, -1
            if lock < 0:
                again = attempt.take_lock()
                if again is None:
                    continue  # a request that nobody took is still on its way to its end
                lock = again
                attempt.read()
                if attempt.began:
                    os.close(lock)
                    self._settle(attempt)
                    return
            attempt.taken = self._loop.create_future()
            try:
                keeper = self._hand_over(attempt, lock, locks)
            except OSError as error:
                # No descriptor or process is to be had. Left as it is, it would hold its slot and never begin.
                raise Refused("storage", f"no process can be made to keep the attempt: {error}") from error
            gate.handed(attempt, keeper)
            try:
                await attempt.taken
            except Refused:
                self._let_go(keeper)  # it waits for a word that will not come, and ends without having begun
                raise
            if attempt.state != "starting":
                return
        if attempt.is_locked():
            self._adopt_running(attempt)
            return
        raise Refused("storage", "no process could be made to keep the attempt; see the log of hostd on this host")

    def _hand_over(self, attempt: Attempt, lock: int, locks: List[int]) -> Keeper:
        """Send the attempt to a shim, an idle or a new one. `lock` is the shim's from here on. Raises OSError."""
        request = {"base": attempt.base, "secrets": attempt.secrets, "stored": False}
        theirs: Optional[socket.socket] = None
        try:
            if self._idle:
                keeper = self._idle.pop()
                request["stored"] = keeper.kept is not None and keeper.kept.acked
                fds, to = [lock, *locks], keeper.socket
            else:
                self.start_warm()
                assert self._warm is not None
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours.setblocking(False)
                keeper = Keeper(ours)
                self._keepers.add(keeper)
                self._loop.add_reader(ours.fileno(), self._heard, keeper)
                fds, to = [lock, theirs.fileno(), *locks], self._warm
            keeper.attempt, keeper.kept = attempt, None
            # Where it fails the shim has died, or nobody took it: _heard reads the end of the socket, and it is tried again.
            with contextlib.suppress(OSError):
                socket.send_fds(to, [json.dumps(request).encode()], fds)
        finally:
            os.close(lock)
            if theirs is not None:
                theirs.close()
        return keeper

    def _heard(self, keeper: Keeper) -> None:
        """A word from a shim: p and four numbers (it runs), c (it was suspended, or goes on), e record (it is over),
        i (it never began), or its own end.
        """
        try:
            message = keeper.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        attempt = keeper.attempt
        if not message:
            self._let_go(keeper)
            if attempt is not None and attempt.living:
                self._spawn(self._shim_gone(attempt))
        elif attempt is None:
            return
        elif message[:1] == b"r":
            shim, shim_ticks = (int(word) for word in message.split()[1:])
            attempt.gated, attempt.shim = True, (shim, shim_ticks)
            if attempt.state == "starting":
                attempt.state = "ready"
                self._answer(attempt)
        elif message[:1] == b"p":
            pid, ticks, shim, shim_ticks = (int(word) for word in message.split()[1:])
            attempt.pid, attempt.ticks, attempt.shim = pid, ticks, (shim, shim_ticks)
            if attempt.state in ("starting", "ready"):
                attempt.state = "running"
                self._answer(attempt)
        elif message[:1] == b"c":
            self.look_again(attempt)
        elif message[:1] == b"e":
            attempt.take_exit(json.loads(message[2:]))
            attempt.exit_whole = True  # it is in the record before it is told
            if not attempt.survivors:
                self._make_idle(keeper)
            self._end(attempt, "exited")
        else:
            self._make_idle(keeper)
            if attempt.living:
                self._spawn(self._shim_gone(attempt))

    # ---- shims without an attempt

    def _make_idle(self, keeper: Keeper) -> None:
        keeper.kept, keeper.attempt = keeper.attempt, None
        if self._closed or len(self._idle) >= IDLE_SHIMS:
            self._let_go(keeper)
            return
        keeper.idle_since = self._loop.time()
        self._idle.append(keeper)
        if self._dismissal is None:
            self._dismissal = self._loop.call_later(IDLE_SHIM_S, self._dismiss)

    def _dismiss(self) -> None:
        """Let shims end that nobody has needed for a while."""
        self._dismissal = None
        now = self._loop.time()
        for keeper in [one for one in self._idle if now - one.idle_since >= IDLE_SHIM_S]:
            self._let_go(keeper)
        if self._idle:
            oldest = min(one.idle_since for one in self._idle)
            self._dismissal = self._loop.call_later(oldest + IDLE_SHIM_S - now, self._dismiss)

    def _let_go(self, keeper: Keeper) -> None:
        """Close our end: without an attempt, the shim ends; with one, it keeps it and is found by its lock."""
        keeper.attempt = keeper.kept = None
        if keeper in self._keepers:
            self._keepers.discard(keeper)
            if keeper in self._idle:
                self._idle.remove(keeper)
            self._loop.remove_reader(keeper.socket.fileno())
            keeper.socket.close()

    # ---- the ends of shims

    def _answer(self, attempt: Attempt) -> None:
        if attempt.taken is not None and not attempt.taken.done():
            attempt.taken.set_result(None)

    async def _shim_gone(self, attempt: Attempt) -> None:
        await self._unlocked(attempt)
        if not attempt.living:
            return
        attempt.read()
        if attempt.began:
            self._settle(attempt)
        elif attempt.gated:
            self._not_let_go(attempt)
        else:
            self._answer(attempt)  # launch() tries again

    def _not_let_go(self, attempt: Attempt) -> None:
        """It was ready, and its keeper ended before the word to begin: it never will."""
        if attempt.given_up:
            attempt.message = "the word to begin did not come in time"
        elif not attempt.tombstone:
            attempt.message = "its keeper ended before the word to begin"
        self._never(attempt)

    async def _unlocked(self, attempt: Attempt) -> None:
        """Wait until a dying shim's lock is free: the kernel closes its descriptors one after another."""
        deadline = time.monotonic() + 5.0
        while attempt.is_locked() and time.monotonic() < deadline:  # noqa: ASYNC110 (a flock has no event)
            await asyncio.sleep(0.002)

    def _settle(self, attempt: Attempt) -> None:
        """Judge an attempt that began and whose shim is gone."""
        attempt.read()
        if attempt.exit is not None:
            self._end(attempt, "exited")
            if not attempt.exit_whole:
                self._spawn(self._end_orphans(attempt))
        else:
            attempt.state = "stopping"
            attempt.message = "its shim died; what is left of it is being ended"
            self._answer(attempt)
            self._spawn(self._end_lost(attempt))

    async def _end_lost(self, attempt: Attempt) -> None:
        await self._end_orphans(attempt)
        attempt.message = "its shim died, so how it ended is not known"
        self._end(attempt, "lost")

    async def _end_orphans(self, attempt: Attempt) -> None:
        """TERM, grace, KILL for the processes that a dead shim left. Only those that are surely the attempt's."""
        grace = attempt.spec.stop_grace_s if attempt.spec else ORPHAN_GRACE_S
        kill_at = time.monotonic() + grace
        told: Set[int] = set()
        wait = 0.01
        while True:
            left = self.orphans(attempt)
            if not left or time.monotonic() > kill_at + 5.0:
                attempt.survivors = len(left)
                return
            for seen in left:
                if time.monotonic() >= kill_at:
                    processes.send(seen.pid, seen.ticks, signal.SIGKILL)
                elif seen.pid not in told:
                    told.add(seen.pid)
                    processes.send(seen.pid, seen.ticks, signal.SIGTERM)
                    processes.send(seen.pid, seen.ticks, signal.SIGCONT)
            await asyncio.sleep(wait)
            wait = min(0.25, wait * 2)

    def orphans(self, attempt: Attempt) -> List[processes.Stat]:
        """Living processes of an attempt without a shim: below its command, or with its id in their environment."""
        table = processes.sweep()
        found: Dict[int, processes.Stat] = {}
        leader = table.get(attempt.pid or -1)
        if leader is not None and leader.ticks == attempt.ticks:
            for seen in [leader, *processes.descendants(leader.pid, table)]:
                found[seen.pid] = seen
            found.update({seen.pid: seen for seen in table.values() if seen.sid == leader.pid})
        for seen in table.values():
            env = None if seen.pid in found else processes.environ(seen.pid)
            if env and env.get("COTENANT_ATTEMPT") == attempt.id:
                found[seen.pid] = seen
        me = processes.ancestors(os.getpid(), table)
        return [seen for seen in found.values() if seen.state not in "ZX" and seen.pid not in me]

    def _end(self, attempt: Attempt, state: str) -> None:
        if not attempt.living:
            return
        attempt.state = state
        self._unwatch(attempt)
        self._answer(attempt)
        self._on_end(attempt)

    def _never(self, attempt: Attempt) -> None:
        attempt.secrets = {}
        if attempt.living:
            attempt.clean = True
            attempt.state = "never"
            self._answer(attempt)
            self._on_change(attempt)

    # ---- letting go

    async def go(self, attempt: Attempt) -> None:
        """Let what is ready begin; returns once its command runs, could not be executed, or never will.

        Raises:
            Refused: storage; not_running, it is not ready yet.
        """
        if attempt.state == "starting":
            raise Refused("not_running", f"attempt {attempt.id} is not ready yet")
        if attempt.state != "ready":
            return
        attempt.append({"order": {"do": "go"}})
        self._wake_shim(attempt)
        deadline = self._loop.time() + GO_WITHIN_S
        while attempt.state == "ready" and self._loop.time() < deadline:
            attempt.taken = self._loop.create_future()
            # A shim that another hostd started tells only the record.
            await asyncio.wait({attempt.taken}, timeout=0.02)
            attempt.read()
            self._seen_running(attempt, tell=False)

    # ---- stopping

    def stop(self, attempt: Attempt, reason: str, grace_s: float) -> None:
        """Begin the ladder; the tombstone is on disk already. Answers nothing: reports tell the end."""
        if not attempt.living:
            return
        if attempt.state == "starting" and not attempt.is_locked():
            attempt.read()
            if not attempt.began:
                self._never(attempt)
                return
        attempt.append({"order": {"do": "stop", "reason": reason, "grace_s": grace_s}})
        attempt.stop_by = time.clock_gettime(time.CLOCK_BOOTTIME) + grace_s
        self._wake_shim(attempt)
        if attempt.state == "running":
            attempt.state = "stopping"

    def signal(self, attempt: Attempt, number: int) -> None:
        """Have the shim signal the command's process group. Raises Refused("not_running")."""
        if attempt.state not in ("running", "stopping") or not self._shim_of(attempt):
            raise Refused("not_running", f"attempt {attempt.id} is {attempt.state}; it has no process to signal")
        if number == signal.SIGCONT and attempt.suspended:
            # behind the shim's back it would run on while its time limit stands still
            raise Refused("not_running", f"attempt {attempt.id} is suspended; it goes on when it is resumed")
        attempt.append({"order": {"do": "signal", "signal": number}})
        self._wake_shim(attempt)

    # ---- standing still

    async def suspend(self, attempt: Attempt, max_s: float) -> None:
        """Have the shim stop the whole tree, at most `max_s` in all suspensions. Raises Refused("not_running")."""
        if attempt.state != "running" or not self._shim_of(attempt):
            raise Refused("not_running", f"attempt {attempt.id} is {attempt.state}; there is nothing to suspend")
        if not attempt.suspended:
            attempt.append({"order": {"do": "suspend", "max_s": max_s}})
            await self._until_standing(attempt, True)

    async def resume(self, attempt: Attempt) -> None:
        """Have the shim let the tree go on. One that goes on already, or is over, needs nothing.

        The order is given whatever is known here: a suspend before it may not have been carried out yet.
        """
        if attempt.state == "running" and self._shim_of(attempt):
            attempt.append({"order": {"do": "resume"}})
            await self._until_standing(attempt, False)

    async def _until_standing(self, attempt: Attempt, standing: bool) -> None:
        """Wait for what the shim writes down; the socket to it is gone where hostd was started anew."""
        self._wake_shim(attempt)
        deadline, wait = self._loop.time() + STANDING_WITHIN_S, 0.001
        while True:
            self.look_again(attempt)
            if attempt.state != "running" or attempt.standing is standing or self._loop.time() >= deadline:
                return
            await asyncio.sleep(wait)
            wait = min(0.1, wait * 2)

    def look_again(self, attempt: Attempt) -> None:
        """Read whether a running attempt stands still, and report a change."""
        before = attempt.standing, attempt.suspended_s
        if attempt.state == "running":
            attempt.read()
            if (attempt.standing, attempt.suspended_s) != before:
                self._on_change(attempt)

    def _shim_of(self, attempt: Attempt) -> bool:
        if attempt.shim is None and attempt.is_locked():
            attempt.read()
        return attempt.shim is not None

    def _wake_shim(self, attempt: Attempt) -> None:
        # A shim that is not there yet reads its orders when it has started the command.
        if self._shim_of(attempt):
            assert attempt.shim is not None
            processes.send(attempt.shim[0], attempt.shim[1], signal.SIGUSR1)

    # ---- adopting

    def adopt(self) -> List[Attempt]:
        """Judge everything on disk after a start of hostd; returns those whose start must still be made.

        Ends that were acknowledged already are taken in without a call of `on_end`.
        """
        boot_id = processes.boot_id()
        unmade = []
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        for attempt in self._attempts.load():
            if attempt.exit_whole:
                self._take_in(attempt, "exited")
            elif attempt.boot_id != boot_id:
                attempt.message = "the machine was restarted"
                self._take_in(attempt, "exited" if attempt.exit else "lost" if attempt.began else "never")
            elif attempt.is_locked():
                self._adopt_running(attempt)
            elif attempt.began:
                self._settle(attempt)
            elif attempt.gated:
                self._not_let_go(attempt)
            elif attempt.tombstone or now - attempt.accepted_at > RESUME_START_WITHIN_S:
                attempt.message = None if attempt.tombstone else "hostd died before it could start"
                self._take_in(attempt, "never")
            else:
                unmade.append(attempt)
        return unmade

    def _take_in(self, attempt: Attempt, state: str) -> None:
        """An end found on disk: told again unless it was acknowledged."""
        if attempt.acked or state == "never":
            attempt.state = state
            attempt.clean = True
            if not attempt.acked:
                self._on_change(attempt)
        else:
            self._end(attempt, state)

    def _adopt_running(self, attempt: Attempt) -> None:
        if attempt.pid is not None:
            attempt.state = "stopping" if attempt.tombstone else "running"
            self._answer(attempt)
        elif attempt.gated:
            attempt.state = "ready"
            self._answer(attempt)
        self._spawn(self._watch(attempt))

    async def _watch(self, attempt: Attempt) -> None:
        """Follow a shim that is not our child: by pidfd where its pid is known, by its lock until then."""
        while attempt.living and attempt.is_locked():
            if attempt.shim is None or attempt.state == "ready":
                attempt.read()
                self._seen_running(attempt)
            if attempt.shim is None:
                await asyncio.sleep(0.02)  # between the request and the line that names its pid
            elif attempt.state == "ready":
                await asyncio.sleep(0.1)  # it may be let go at any time, by an order that an earlier hostd wrote
            elif await self._ended(*attempt.shim):
                break
            else:
                await asyncio.sleep(1.0)  # no pidfd on this kernel
        if not attempt.living:
            return
        attempt.read()
        if not attempt.began and attempt.gated:
            self._not_let_go(attempt)
        elif not attempt.began:
            self._on_unmade(attempt)
        else:
            await self._unlocked(attempt)
            self._settle(attempt)

    def _seen_running(self, attempt: Attempt, tell: bool = True) -> None:
        """Take in what the record says of a shim that does not speak to us; `tell` it, unless an answer will."""
        if attempt.pid is not None and attempt.state in ("starting", "ready"):
            attempt.state = "stopping" if attempt.tombstone else "running"
        elif attempt.gated and attempt.state == "starting":
            attempt.state = "ready"
        else:
            return
        self._answer(attempt)
        if tell:
            self._on_change(attempt)

    async def _ended(self, pid: int, ticks: int) -> bool:
        """Wait for the end of exactly this process; False where the kernel has no pidfd."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        gone = asyncio.Event()
        try:
            if processes.start_ticks(pid) != ticks:
                return True
            self._loop.add_reader(handle, gone.set)
            await gone.wait()
            return True
        finally:
            self._loop.remove_reader(handle)
            os.close(handle)

    def _unwatch(self, attempt: Attempt) -> None:
        attempt.shim = None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let go of everything; attempts run on under their shims."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._dismissal is not None:
            self._dismissal.cancel()
        for keeper in list(self._keepers):
            self._let_go(keeper)
        if self._warm is not None:
            self._loop.remove_reader(self._warm)
            self._warm.close()
            self._warm = None
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._warm_pid, 0)  # noqa: ASYNC222 (its socket is closed: it ends at once)
