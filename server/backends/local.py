"""A hostd of this machine: started as a detached child, found again after a server's death, ended when it has nothing to do.

A machine can have several, each a host entry with its own state directory and its own cards.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

from cotenant.hostd.protocol import Hello, Welcome, shown_cards
from cotenant.server.backends.base import HostEvents
from cotenant.server.backends.link import HostLink
from cotenant.server.config import HostSettings, Settings

#: hostd on this machine is back within a second; nobody is spared by waiting longer.
BACK_OFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
#: sun_path holds 108 bytes with the final NUL (unix(7)).
_SOCKET_PATH_MAX: Final = 100
_START_TIMEOUT_S: Final = 15.0
_END_TIMEOUT_S: Final = 3.0
_LIVING: Final = frozenset({"starting", "running", "stopping"})
log = logging.getLogger(__name__)


class LocalRoad:
    """The road to a host entry of this machine."""

    near = True

    def __init__(self, settings: Settings, host: HostSettings) -> None:
        self.name = host.name
        self.hostd = LocalHostd(state_folder(settings.data_dir, host.name), host, settings.hostd_python)

    def link(self, hello: Callable[[], Hello], events: HostEvents) -> HostLink:
        return HostLink(self.name, self.hostd.connect, hello, events, BACK_OFF_S, unsuited=self.hostd.unsuited)

    async def leave(self, busy: bool) -> None:
        if busy:
            self.hostd.forget_children()
        else:
            # a hostd with nothing to keep would only be left over
            await asyncio.to_thread(self.hostd.end)


def state_folder(data_dir: Path, name: str) -> Path:
    """Where the hostd of a host entry keeps its state, socket and log."""
    return data_dir / "hostd" if name == "local" else data_dir / "hosts" / name


class LocalHostd:
    """Makes sure that a hostd serves `folder`, and connects to it."""

    def __init__(self, folder: Path, settings: HostSettings, python: str | None) -> None:
        self.folder = folder
        self.socket = socket_path(folder)
        self._settings = settings
        self._python = python or sys.executable
        self._children: list[subprocess.Popen[bytes]] = []
        self._replaced = False

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to hostd, which is started if it does not run.

        Raises:
            OSError: it cannot be started or does not answer; the message says where its log is.
        """
        with contextlib.suppress(OSError):
            return await asyncio.open_unix_connection(str(self.socket))
        child = self._start()
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                return await asyncio.open_unix_connection(str(self.socket))
            if child.poll() not in (None, 0):
                raise OSError(f"hostd ended with code {child.returncode}; its last words: {self._last_words()}")
            if asyncio.get_running_loop().time() > deadline:
                raise OSError(f"hostd did not listen on {self.socket} within {_START_TIMEOUT_S:.0f} s; see {self.log}")
            await asyncio.sleep(0.01)

    def unsuited(self, welcome: Welcome) -> Callable[[], Awaitable[None]] | None:
        """What must be done where the hostd that answers does not show the cards that this server was started for.

        One from before a restart with other cards is ended when it has nothing to keep, so that connect()
        starts one anew. Else it stays, and a warning says what to do.
        """
        host = self._settings
        wanted, there = shown_cards(host.simulate_gpus, host.cards, host.without), welcome.facts.shows
        if wanted == there:
            return None
        keeps = [one.attempt_id for one in welcome.attempts if one.state in _LIVING] + list(welcome.holds)
        if keeps or self._replaced:
            log.warning(
                "the hostd of host %s was started earlier and shows %s, not %s as asked for now; %s."
                " End what runs there (cotenant job cancel, lease release), then stop this server and start it again.",
                host.name,
                there,
                wanted,
                f"it keeps {len(keeps)} running jobs or leases, so it is left as it is" if keeps else "it does not end",
            )
            return None
        log.warning("the hostd of host %s showed %s: it is started anew with %s", host.name, there, wanted)
        self._replaced = True
        return partial(asyncio.to_thread, self.end)

    @property
    def log(self) -> Path:
        return self.folder / "hostd.log"

    def _start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [
            self._python,
            "-m",
            "cotenant.hostd",
            "--state",
            str(self.folder / "state"),
            "--socket",
            str(self.socket),
        ]
        if self._settings.simulate_gpus:
            command += ["--simulate-gpus", str(self._settings.simulate_gpus)]
        if self._settings.cards is not None:
            command += ["--cards", ",".join(self._settings.cards)]
        if self._settings.without:
            command += ["--without-cards", ",".join(self._settings.without)]
        if self._settings.residents:
            command += ["--residents", ",".join(self._settings.residents)]
        # -P and PYTHONSAFEPATH: started in a checkout, "server" or "tools" there must not shadow anything
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        with open(self.log, "ab") as log:
            os.fchmod(log.fileno(), 0o600)
            # its own session: the end of the server or of the terminal is not its end
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                close_fds=True,
                cwd="/",
                env=environment,
            )
        self._children.append(child)
        return child

    def _last_words(self) -> str:
        try:
            return self.log.read_text("utf-8", "replace")[-300:].strip().replace("\n", " | ")
        except OSError:
            return "(no log)"

    def end(self) -> None:
        """Ask the hostd behind the socket to end; running attempts are not its and go on.

        The pid comes from the kernel (SO_PEERCRED), never from a file that may be stale.
        """
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(1)
            link.connect(str(self.socket))
            pid, uid, _ = struct.unpack(
                "3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            if uid == os.geteuid() and pid > 0:
                pidfd = os.pidfd_open(pid)
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGTERM)
                    select.select([pidfd], [], [], _END_TIMEOUT_S)  # readable once it has ended
                finally:
                    os.close(pidfd)
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(3)

    def forget_children(self) -> None:
        """Leave a hostd to itself: it has work and outlives this server."""
        for child in self._children:
            child.returncode = child.poll() or 0  # nobody waits for it any more; init will


def socket_path(folder: Path) -> Path:
    """Where the socket is: in the folder, or, where that path is too long, in a private directory with a short name."""
    path = folder / "hostd.sock"
    if len(os.fsencode(path)) <= _SOCKET_PATH_MAX:
        return path
    digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime and os.path.isdir(runtime) else Path(tempfile.gettempdir())
    return base / f"cotenant-{os.geteuid()}-{digest}" / "hostd.sock"
