"""`cotenant run -- CMD`: lease cards, run CMD in the foreground with the lease's environment, give the cards back.

CMD keeps this terminal, its process group, stdin and stdout: Ctrl-C and Ctrl-Z reach it as if it ran alone. The lease is
renewed meanwhile; if it is lost all the same, CMD is told, then ended, since somebody else may be on the cards.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from cotenant.ui.cli import ask, lease, place, show, waiting
from cotenant.ui.cli.client import NOT_NOW, Client
from cotenant.ui.cli.kin import Kin
from cotenant.ui.cli.problems import NoServer, Problem, ToolRefused, Torn, Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

    Answer = dict[str, Any]

#: Signals that are handed on to CMD when somebody sends them to this process alone.
HANDED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)
#: Of these, the ones after which CMD must end within the grace.
ENDING = (signal.SIGTERM, signal.SIGHUP)
#: si_code of what the terminal sends: it reached CMD, which is in the same group, already (signal.h, SI_KERNEL).
FROM_KERNEL = 0x80
#: With which the renewal wakes the main thread when the lease is lost.
LOST = signal.SIGRTMIN


def configure(parser: Parser, _: str) -> None:
    run = parser.command(
        act,
        takes_command=True,
        usage="cotenant run [options] -- CMD [ARG …]",
        example='cotenant run --gpus 1 --purpose "try the new loss" -- python train.py',
    )
    lease.needs(run)
    run.add_argument(
        "--ttl",
        type=int,
        default=300,
        metavar="S",
        help="seconds after which the cards are free again if this dies (300)",
    )
    run.add_argument("--no-queue", action="store_true", help="refuse instead of waiting in line where no card is free")
    run.add_argument(
        "--heartbeat", type=ask.number, metavar="S", help="seconds between renewals (a third of --ttl, 15 at most)"
    )
    run.add_argument("--grace", type=ask.number, default=10, metavar="S", help="seconds between TERM and KILL (10)")


def act(args: argparse.Namespace) -> int:
    if not args.command_line:
        raise Usage("What shall it run? Put the command after --: cotenant run --gpus 1 -- python train.py")
    ask.one_program(args.command_line, "cotenant run [options] -- sh -c 'LINE'")
    if args.heartbeat == 0:
        raise Usage("--heartbeat takes a number of seconds above 0.")
    client = ask.client(args)
    for number in (signal.SIGTERM, signal.SIGHUP):  # while waiting in line: give the place back, then end
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _leave)
    # Not interrupted until the id is known, or the lease would be held by nobody until its ttl.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
    held = client.call_tool("acquire_lease", lease.asked(args, ttl_s=args.ttl, queue=not args.no_queue))
    lease_id = held["lease_id"]
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if held["state"] == "queued":
            show.say(f"{lease_id} {show.ours(waiting.reason(held))}")
            held = waiting.for_lease(client, lease_id)
        _check_here(held, client.place.url)
        show.say(f"{lease_id}: {show.slots(held)}, ends in {show.span(held.get('hard_end_in_s'))} at the latest")
        code = _Foreground(client, held, args).run()
    except _Left as left:
        code = 128 + left.number
    finally:
        waiting.withdraw(client, lease_id)
    if args.json:
        show.as_json({"lease_id": lease_id, "exit_code": code})
    return code


class _Left(BaseException):
    """A signal ended the wait in line."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _leave(number: int, _: object) -> None:
    raise _Left(number)


def _check_here(held: Answer, url: str) -> None:
    """The cards must be in this machine: elsewhere the environment would name the wrong ones.

    The driver lists this machine's cards under /proc; where it does not (containers), a server on loopback must do.
    """
    wanted = {str(slot["uuid"]) for slot in held.get("slots") or ()}
    mine = _uuids_here()
    if held.get("simulated") or wanted <= mine or (place.is_loopback(url) and not mine):
        return
    if place.is_loopback(url) and any(uuid.startswith("MIG-") for uuid in wanted):  # instances are not listed there
        return
    raise Problem(
        f"The cards of the lease ({show.slots(held)}) are not in this machine. Use `cotenant submit` for them."
    )


def _uuids_here() -> set[str]:
    root, found = "/proc/driver/nvidia/gpus", set[str]()
    for name in os.listdir(root) if os.path.isdir(root) else ():
        try:
            with open(f"{root}/{name}/information", encoding="utf-8", errors="replace") as file:
                found |= {line.partition(":")[2].strip() for line in file if line.startswith("GPU UUID")}
        except OSError:
            continue
    return found


class Renewal(threading.Thread):
    """Heartbeats while CMD runs. `lost` is set, with `why`, once the lease is no longer ours.

    A server that is down stops all clocks (its leases get their whole ttl anew when it is back), so a refused connection
    is no reason to end a training. A server out of reach is: beyond the ttl the cards may be somebody else's.
    """

    def __init__(self, client: Client, lease_id: str, *, ttl_s: float, every_s: float) -> None:
        super().__init__(name="cotenant-heartbeat", daemon=True)
        self._client = client.twin()
        self._lease_id = lease_id
        self._ttl_s = ttl_s
        self._every_s = every_s
        self._ended = threading.Event()
        self.lost = False
        self.why = ""

    def run(self) -> None:
        every = self._every_s
        until, told, draining = time.monotonic() + self._ttl_s, False, False
        pause = every
        while not self._ended.wait(pause):
            sent = time.monotonic()
            try:
                beat = self._client.call_tool("heartbeat", {"lease_id": self._lease_id})
            except (NoServer, Torn) as exc:
                down = isinstance(exc, NoServer) and exc.refused
                if not told:
                    show.say(f"the lease could not be renewed; trying again. {exc.text}")
                    told = True
                if not down and sent > until:
                    self._lose(f"it could not be renewed for {self._ttl_s:.0f} s")
                    return
                pause = min(5.0, every)
                continue
            except ToolRefused as exc:
                if exc.code in NOT_NOW or exc.code == "host_unreachable":
                    pause = min(5.0, every)
                    continue
                self._lose(exc.text)
                return
            except Problem as exc:
                self._lose(exc.text)
                return
            if beat["state"] not in ("leased", "running"):
                self._lose(f"it is {beat['state']}" + (f": {beat['notice']}" if beat.get("notice") else ""))
                return
            if told:
                show.say("the lease is renewed again")
            told, pause = False, every
            until = sent + float(beat.get("expires_in_s") or self._ttl_s)
            if beat["draining"] and not draining:
                show.say(f"the lease is draining: finish soon. {show.ours(str(beat.get('notice') or ''))}".rstrip())
            draining = beat["draining"]

    def _lose(self, why: str) -> None:
        self.lost, self.why = True, why
        os.kill(os.getpid(), LOST)

    def end(self) -> None:
        """No more heartbeats; one that is on its way gets two seconds, so that it does not meet the release."""
        self._ended.set()
        if self.is_alive():
            self.join(2)


class _Foreground:
    """CMD, its signals, and its end."""

    def __init__(self, client: Client, held: Answer, args: argparse.Namespace) -> None:
        self._client = client
        self._held = held
        self._grace_s = float(args.grace)
        self._command: list[str] = args.command_line
        self._env = {**os.environ, **(held.get("env") or {})}
        self._ttl_s = float(args.ttl)
        self._kill_at: float | None = None
        self._every_s = float(args.heartbeat or min(args.ttl / 3, 15))

    def run(self) -> int:
        """CMD's exit code, 128 + n where signal n ended it, 126 or 127 where it could not be started."""
        # Signals are taken one by one from here on; nothing may interrupt between the fork and the release. What the
        # parent had ignored (nohup, or & in a script) stays ignored, for CMD too.
        watched = {n for n in HANDED_ON if signal.getsignal(n) is not signal.SIG_IGN} | {signal.SIGCHLD, LOST}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        for number in watched:
            signal.signal(number, _nothing)
        kin = Kin()
        renewal = Renewal(self._client, self._held["lease_id"], ttl_s=self._ttl_s, every_s=self._every_s)
        try:
            pid = _start(self._command, self._env, before)
            renewal.start()
            code = self._watch(pid, kin, renewal, watched)
            if left := kin.living():
                show.say(
                    f"{len(left)} process{'es' if len(left) > 1 else ''} of the command stayed behind; ended with the lease"
                )
                kin.end(self._grace_s)
            return code
        finally:
            renewal.end()
            while signal.sigtimedwait(watched, 0) is not None:
                pass  # came too late for CMD; the release is not to be interrupted by them
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _watch(self, pid: int, kin: Kin, renewal: Renewal, watched: set[signal.Signals]) -> int:
        while True:
            if (code := _reaped(pid)) is not None:
                return code
            if self._kill_at is None:
                seen: signal.struct_siginfo | None = signal.sigwaitinfo(watched)
            elif (left := self._kill_at - time.monotonic()) > 0:
                seen = signal.sigtimedwait(watched, left)
            else:
                kin.signal(signal.SIGKILL)
                self._kill_at = time.monotonic() + 1
                continue
            if seen is None or seen.si_signo == signal.SIGCHLD:
                continue
            if seen.si_signo != LOST:
                self._hand_on(pid, signal.Signals(seen.si_signo), seen.si_code, kin)
            elif renewal.lost:
                show.say(f"the lease is lost, so the command is ended: {show.harmless(renewal.why)}")
                kin.signal(signal.SIGTERM)
                self._kill_at = time.monotonic() + self._grace_s

    def _hand_on(self, pid: int, number: signal.Signals, code: int, kin: Kin) -> None:
        if code != FROM_KERNEL:
            os.kill(pid, number)  # not reaped yet, so the pid is still CMD's
        if number in ENDING:
            if self._kill_at is not None:  # asked a second time: now
                kin.signal(signal.SIGKILL)
            self._kill_at = time.monotonic() + self._grace_s


def _reaped(pid: int) -> int | None:
    """CMD's exit code if it has ended; adopted orphans that ended before it are taken on the way."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        _, status = os.waitpid(ended.si_pid, 0)
        if ended.si_pid == pid:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return None


def _nothing(number: int, _: object) -> None:
    """A handler, so that the signal is neither ignored nor fatal; sigtimedwait takes it."""


def _start(command: list[str], env: dict[str, str], mask: set[signal.Signals] | set[int]) -> int:
    """Fork and execute; the child's pid. The child dies with this process, so that no lease outlives its renewal unnoticed."""
    from cotenant.ui.cli.kin import die_with_parent

    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in (*HANDED_ON, signal.SIGCHLD, LOST, signal.SIGPIPE):
            if signal.getsignal(number) is not signal.SIG_IGN or number is signal.SIGPIPE:  # Python itself ignores that
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent(parent)
        os.execvpe(command[0], command, env)
    except OSError as exc:
        os.write(2, f"cotenant: {command[0]}: {exc.strerror}\n".encode(errors="replace"))
        os._exit(127 if isinstance(exc, FileNotFoundError) else 126)
    finally:
        os._exit(126)
