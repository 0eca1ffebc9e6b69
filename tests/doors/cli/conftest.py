"""The `cotenant` command as a person has it: real processes against a real server with simulated cards."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

COTENANT = [sys.executable, "-P", "-m", "cotenant.ui.cli"]
#: Seconds for anything that should take well under one, on a machine that is busy with other tests.
PATIENCE_S = 30


def clean_env(**more: str) -> dict[str, str]:
    """This environment without what would name another server or token."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("COTENANT_", "XDG_"))}
    return {**env, "NO_COLOR": "1", "COTENANT_LOCK_DIR": os.environ["COTENANT_LOCK_DIR"], **more}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """The command with a data directory of its own; HOME is elsewhere, so that nothing of the machine's is touched."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.env = clean_env(HOME=str(data.parent))

    def argv(self, *words: str) -> list[str]:
        return [*COTENANT, "--data", str(self.data), *words]

    def __call__(self, *words: str, code: int | None = 0, stdin: str = "", timeout: float = 60, **env: str) -> Done:
        """Run to the end; the exit code must be `code` unless that is None."""
        done = subprocess.run(
            self.argv(*words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**self.env, **env},
            check=False,
        )
        assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """Start and return at once; the caller ends it (see `ending`)."""
        return subprocess.Popen(
            self.argv(*words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.env, **env},
        )

    def json(self, *words: str, **env: str) -> Any:
        return self(*words, "--json", **env).json


def until(what: Callable[[], Any], why: str, within_s: float = PATIENCE_S) -> Any:
    """The first true value of `what()`; fails with `why` after `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        if value := what():
            return value
        assert time.monotonic() < deadline, why
        time.sleep(0.02)


@pytest.fixture(name="until")
def _until() -> Callable[..., Any]:
    return until


class Server(Cli):
    """A running server, and the command for it. `start_server` and `stop_server` may be called again and again."""

    def __init__(self, data: Path, gpus: int) -> None:
        super().__init__(data)
        self.gpus = gpus
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start_server(self, *more: str, **env: str) -> None:
        with open(self.data.parent / "serve.err", "ab") as log:
            self._process = subprocess.Popen(
                self.argv("serve", "--port", "0", "--simulate-gpus", str(self.gpus), *more),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env={**self.env, **env},
            )  # fmt: skip
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.match(r"ready (http://\S+)$", line):
                self.url = found.group(1)
                break
        else:
            raise AssertionError((self.data.parent / "serve.err").read_text())
        until(lambda: self.json("gpus")["free"] == self.gpus or self.json("gpus")["total"] == self.gpus, "no cards")

    def signal_server(self, number: int) -> int:
        """Send a signal and wait for the end; the exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        return code

    def stop_server(self) -> None:
        if self._process is not None:
            began = time.monotonic()
            assert self.signal_server(signal.SIGTERM) == 0, (self.data.parent / "serve.err").read_text()
            assert time.monotonic() - began < 8, "the server took too long to end"

    def token(self, name: str, owner: str, *more: str) -> str:
        return str(self.json("token", "create", name, "--owner", owner, *more)["token"])

    def idle(self) -> None:
        """Wait until every card is free again; ends what other tests may have left."""
        for lease in self.json("lease", "list")["leases"]:
            if lease["kind"] == "direct":
                self("lease", "release", lease["lease_id"], code=None)
        until(lambda: self.json("gpus")["free"] == self.gpus, "the cards did not become free")


def end_leftovers(data: Path) -> None:
    """End every process whose command line or environment names `data`: hostd and attempts outlive a server by design."""
    mark = os.fsencode(data)
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if mark in Path(f"/proc/{name}/cmdline").read_bytes():
                    os.kill(int(name), signal.SIGKILL)
            except OSError:
                continue


@pytest.fixture
def room() -> Iterator[Path]:
    """A directory with a short path: unix sockets have room for 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="ctn-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def live() -> Iterator[Server]:
    """One server with two simulated cards for all tests of the session."""
    with tempfile.TemporaryDirectory(prefix="ctn-", ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder) / "data", 2)
        try:
            server.start_server()
            yield server
            server.stop_server()
        finally:
            if server._process is not None:
                server._process.kill()
            end_leftovers(server.data)


@pytest.fixture
def own(room: Path) -> Iterator[Server]:
    """A server of the test's own with one card, not started yet."""
    server = Server(room / "data", 1)
    try:
        yield server
    finally:
        if server._process is not None:
            server._process.kill()
            server._process.wait()
        end_leftovers(server.data)


@pytest.fixture
def ending() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes put here are ended and closed at the end of the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_S)


class Terminal:
    """A command on a terminal of its own, as a person at a keyboard has it."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            try:
                os.execve(sys.executable, cli.argv(*words), {**cli.env, "TERM": "xterm", "COLUMNS": "100"})
            finally:
                os._exit(126)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, text: str) -> None:
        """Read until `text` was shown."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} was not shown: {self.seen!r}"
            if not self._read():
                raise AssertionError(f"it ended without showing {text!r}: {self.seen!r}")

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], 1)[0]:
            return True
        try:
            part = os.read(self._fd, 65536)
        except OSError:  # EIO: nobody holds the other end any more
            return False
        self.seen += part.decode(errors="replace")
        return bool(part)

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < deadline, f"it did not end: {self.seen!r}"
        _, status = os.waitpid(self.pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)


@pytest.fixture(name="Frames")
def _frames() -> Callable[[list[str]], Any]:
    """The answer of quota_status through a program that speaks MCP on standard input and output."""

    def ask(argv: list[str]) -> Any:
        meta = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        params = {"name": "quota_status", "arguments": {}, "_meta": meta}
        frame = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
        done = subprocess.run(
            argv, input=frame + "\n", capture_output=True, text=True, timeout=60, check=True, env=clean_env()
        )
        return json.loads(done.stdout)["result"]["structuredContent"]

    return ask


@pytest.fixture
def terminal(live: Server) -> Callable[..., Terminal]:
    return lambda *words: Terminal(live, *words)


@pytest.fixture
def on_terminal() -> type[Terminal]:
    """The same for any server and environment: `on_terminal(cli, *words)`."""
    return Terminal
