"""Real servers in a temporary directory: start, kill, restart; clients over plain HTTP; what ran, by the jobs' own word.

Nothing here knows the server's code but for `examine`, the check behind `cotenant doctor`. Every process that a rig's
servers start inherits the variable COTENANT_E2E, by which the rig finds its own and no others.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from cotenant.server.doctor import examine

ROOT = Path(__file__).resolve().parents[2]
COTENANT = Path(sys.executable).with_name("cotenant")
PROTOCOL = "2026-07-28"
READY_S = 60.0
DEADLINE_S = 40.0
FINAL = ("succeeded", "failed", "cancelled")
MARK = "COTENANT_E2E"

#: What a job of a rig does around its work. Lines are short, so that O_APPEND keeps them whole; the lock says whether
#: another attempt of the same job lives at this moment (the kernel frees it with the last process that has it).
_JOB = """\
say() { echo "$1 $COTENANT_JOB $COTENANT_ATTEMPT $(date +%%s%%N) ${COTENANT_GPU_UUIDS:--} $2" >> %(ran)s; }
exec 9> %(locks)s/$COTENANT_JOB
flock -n 9 || say OVERLAP
say BEGIN
%(work)s
say END %(code)d
exit %(code)d
"""


class Refusal(Exception):
    """The server said no. `code` is its code, the text its sentence."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Away(Exception):
    """No answer came: nobody listens, or the connection broke. The act may have happened."""


def until(look: Callable[[], Any], what: str = "", deadline_s: float = DEADLINE_S) -> Any:
    """Poll `look` until it is true and return its value; fails with `what` after the deadline.

    The pauses grow: what comes at once is seen at once, and what takes long is not slowed down by the polling.
    """
    end, pause = time.monotonic() + deadline_s, 0.002
    while not (value := look()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what or look}"
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)
    return value


class Client:
    """One caller over one kept connection, protocol 2026-07-28. Not for several threads at once."""

    def __init__(self, server: Server, token: str, timeout_s: float = 30.0) -> None:
        self._server = server
        self.token = token
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._number = 0
        server.rig.clients.append(self)

    def _post(self, path: str, body: Any, headers: dict[str, str]) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", **headers}
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=self._timeout_s)
                self._connection.connect()
                assert self._connection.sock is not None
                self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.request("POST", path, data, headers)
            reply = self._connection.getresponse()
            raw, kind = reply.read(), reply.headers.get("Content-Type", "")
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Away(f"{type(error).__name__}: {error}") from error
        if kind.startswith("text/event-stream"):
            frames = [
                json.loads(line[5:])
                for line in raw.decode().splitlines()
                if line.startswith("data:") and line[5:].strip()
            ]
            answers = [frame for frame in frames if "result" in frame or "error" in frame]
            if not answers:
                raise Away("the stream ended before its answer")
            return reply.status, answers[-1]
        try:
            return reply.status, json.loads(raw)
        except ValueError:
            raise Away(f"HTTP {reply.status}: {raw[:200]!r}") from None

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """One tool call's structured answer.

        Raises:
            Refusal: a tool error.
            Away: no answer.
        """
        self._number += 1
        meta = {
            "io.modelcontextprotocol/protocolVersion": PROTOCOL,
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        body = {
            "jsonrpc": "2.0",
            "id": self._number,
            "method": "tools/call",
            "params": {"name": tool, "arguments": arguments, "_meta": meta},
        }
        headers = {
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": PROTOCOL,
            "Mcp-Method": "tools/call",
            "Mcp-Name": tool,
        }
        status, frame = self._post("/mcp", body, headers)
        if status == 503:
            raise Away(f"503: {frame}")
        assert status == 200, (status, frame)
        result = frame.get("result")
        assert result is not None, frame
        if result.get("isError"):
            text = result["content"][0]["text"]
            code = (result.get("_meta") or {}).get("cotenant.dev/error", {}).get("code") or text.split(":")[0]
            if code in ("unavailable", "shutting_down"):
                raise Away(text)
            raise Refusal(code, text)
        answer: dict[str, Any] = result["structuredContent"]
        return answer

    def surely(self, tool: str, *, deadline_s: float = 90.0, **arguments: Any) -> dict[str, Any]:
        """`call`, repeated with the same arguments while no answer comes, as an agent does with its request_id."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                return self.call(tool, **arguments)
            except Away:
                if time.monotonic() > end:
                    raise
                time.sleep(0.03)

    def operate(self, verb: str, reason: str = "a test", **args: Any) -> dict[str, Any]:
        """What only people do.

        Raises:
            Refusal: as the server says.
        """
        status, answer = self._post(
            f"/operate/{verb}", {"args": args, "reason": reason}, {"Accept": "application/json"}
        )
        if status != 200:
            error = answer["error"]
            raise Refusal(str(error.get("code")), str(error.get("text") or error.get("message")))
        assert isinstance(answer, dict)
        return answer

    def job(self, job_id: str) -> dict[str, Any]:
        return self.surely("get_job", job_id=job_id)

    def until_job(self, job_id: str, *states: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """The job once it is in one of `states`."""
        seen: dict[str, Any] = {}

        def there() -> bool:
            nonlocal seen
            seen = self.job(job_id)
            return seen["state"] in states

        try:
            until(there, deadline_s=deadline_s)
        except AssertionError:
            raise AssertionError(f"{job_id} is {seen.get('state')}, not one of {states}: {seen}") from None
        return seen

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Server:
    """`cotenant serve` over one data directory; may be killed and started again, on the same port."""

    def __init__(self, rig: Rig, data: Path, *, gpus: int, config: str) -> None:
        self.rig = rig
        self.data = data
        self.port = free_port()
        self._gpus = gpus
        self.log = data.with_name(data.name + ".log")
        self.process: subprocess.Popen[bytes] | None = None
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        if config:
            (data / "cotenant.toml").write_text(config)

    def spawn(self) -> None:
        """Start it and return at once."""
        command = [str(self.rig.cotenant), "serve", "--data", str(self.data), "--port", str(self.port)]
        if self._gpus:
            command += ["--simulate-gpus", str(self._gpus)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=self.rig.env
            )

    def ready(self) -> None:
        """Return once MCP answers; fails when it ends before."""
        process = self.process
        assert process is not None and process.stdout is not None
        watchdog = threading.Timer(READY_S, process.kill)
        watchdog.start()
        try:
            said = next((line for line in process.stdout if line.startswith(b"ready ")), b"")
        finally:
            watchdog.cancel()
        assert said, f"the server never said ready: {self.said()[-3000:]}"

    def start(self) -> Server:
        self.spawn()
        self.ready()
        return self

    def said(self) -> str:
        """All that it wrote to stderr."""
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Signal it (KILL) and wait for its end; returns how it ended, as subprocess does."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            return process.wait(20)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def stop(self) -> None:
        """End it in good order."""
        if self.process is not None:
            code = self.kill(signal.SIGTERM)
            assert code == 0, f"exit code {code}: {self.said()[-3000:]}"

    # ---- its processes

    def hostd_pid(self, host: str = "local") -> int | None:
        """Of the hostd that listens now, by the kernel's word."""
        from cotenant.server.backends.local import socket_path, state_folder

        with contextlib.closing(socket.socket(socket.AF_UNIX)) as link:
            try:
                link.connect(str(socket_path(state_folder(self.data, host))))
            except OSError:
                return None
            pid, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)

    def warm_pid(self) -> int | None:
        """Of the parent that forks shims."""
        hostd = self.hostd_pid()
        if hostd is None:
            return None
        for pid in self.rig.processes():
            with contextlib.suppress(OSError):
                if parent_of(pid) == hostd and b"cotenant.hostd.warm" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def kill_hostd(self, host: str = "local") -> None:
        if (pid := self.hostd_pid(host)) is not None:
            kill(pid)

    def kill_warm(self) -> None:
        if (pid := self.warm_pid()) is not None:
            kill(pid)

    # ---- its callers

    def chief(self) -> Client:
        """The person who runs the server."""
        return Client(self, (self.data / "local.token").read_text().strip())

    def token(self, name: str, owner: str, kind: str = "agent", *, scopes: str = "read,write", **more: Any) -> str:
        """A new token, made on the command line (which needs no running server)."""
        command = ["token", "create", name, "--kind", kind, "--owner", owner, "--scopes", scopes]
        for key, value in more.items():
            command += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return str(json.loads(self.cli(*command, "--json").stdout)["token"])

    def cli(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`cotenant WORDS --data …`."""
        command = [str(self.rig.cotenant), *words, "--data", str(self.data)]
        done = subprocess.run(command, env=self.rig.env, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    def client(self, name: str, owner: str = "olga", **more: Any) -> Client:
        return Client(self, self.token(name, owner, **more))

    # ---- its records

    @contextlib.contextmanager
    def rows(self) -> Iterator[sqlite3.Connection]:
        """A read-only connection of our own, beside whatever the server does."""
        with contextlib.closing(sqlite3.connect(f"file:{self.data / 'control.db'}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            yield connection

    def events(self, *types: str, **wanted: Any) -> list[dict[str, Any]]:
        """Events of these types (all), oldest first, `args` as an object; `wanted` names columns."""
        where, values = ["1"], list[Any]()
        if types:
            where.append(f"type IN ({', '.join('?' * len(types))})")
            values += types
        for column, value in wanted.items():
            where.append(f"{column} = ?")
            values.append(value)
        with self.rows() as c:
            found = [
                dict(row) for row in c.execute(f"SELECT * FROM event WHERE {' AND '.join(where)} ORDER BY id", values)
            ]
        return [{**row, "args": json.loads(row["args"])} for row in found]

    def wait_event(self, kind: str, deadline_s: float = DEADLINE_S, **wanted: Any) -> dict[str, Any]:
        """The first event of this kind, as soon as it is on disk."""
        found: list[dict[str, Any]] = until(lambda: self.events(kind, **wanted), f"event {kind} {wanted}", deadline_s)
        return found[0]

    def healthy(self) -> None:
        """`cotenant doctor` finds nothing wrong with the records."""
        wrong = [finding for finding in examine(self.data) if not finding.ok]
        assert not wrong, wrong


class Rig:
    """Everything of one test: servers, what jobs wrote, and the end of all processes."""

    def __init__(self, folder: Path, env: dict[str, str] | None = None, cotenant: Path = COTENANT) -> None:
        self.folder = folder
        self.cotenant = cotenant
        self.mark = uuid.uuid4().hex
        # what a test runner adds would reach servers and jobs
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("COTENANT_", "PYTEST_"))}
        own = {MARK: self.mark, "COTENANT_LOCK_DIR": str(folder / "card-locks")}
        self.env = {**clean, **own, **(env or {})}
        self.ran = folder / "ran"
        self.locks = folder / "locks"
        self.locks.mkdir(exist_ok=True)
        self.ran.touch()
        self._servers: list[Server] = []
        self.clients: list[Client] = []

    def server(self, name: str = "data", *, gpus: int = 4, config: str = "", start: bool = True) -> Server:
        """A new server over `folder/name`; `gpus=0` takes the machine's real cards."""
        made = Server(self, self.folder / name, gpus=gpus, config=config)
        self._servers.append(made)
        return made.start() if start else made

    def command(self, work: str = ":", code: int = 0) -> str:
        """A shell command that tells when it begins and ends, and ends with `code`."""
        return _JOB % {"ran": self.ran, "locks": self.locks, "work": work, "code": code}

    # ---- what ran

    def lines(self) -> list[list[str]]:
        """All that jobs wrote: [what, job, attempt, time ns, cards, code]."""
        return [line.split() for line in self.ran.read_text().splitlines()]

    def said(self, what: str, job_id: str) -> list[list[str]]:
        return [line for line in self.lines() if line[0] == what and line[1] == job_id]

    # ---- processes

    def processes(self) -> list[int]:
        """Living processes that a server of this rig started, whatever became of their parents."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):
                    if (
                        wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                        and state_of(int(name)) not in "ZX"
                    ):
                        found.append(int(name))
        return found

    def carriers(self, **wanted: str) -> list[int]:
        """Those of them whose environment has all of `wanted`, such as COTENANT_LEASE."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if all(f"{key}={value}".encode() in pairs for key, value in wanted.items()):
                    found.append(pid)
        return found

    def end(self) -> None:
        """End every process of this rig; fails when one cannot be ended."""
        for client in self.clients:
            client.close()
        for server in self._servers:
            server.kill()
            print(f"--- what {server.log.name} ends with\n{server.said()[-20_000:]}")  # shown for a test that failed

        def gone() -> bool:
            left = self.processes()
            for pid in left:
                kill(pid)
            return not left

        until(gone, "the rig's processes end", 20)
        shutil.rmtree(self.locks, ignore_errors=True)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal one process if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def free_port() -> int:
    """A port that nobody has now, kept through restarts of one server."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def copy_database(server: Server, to: Path) -> None:
    """A consistent copy of control.db as it is now, as a backup program would take it."""
    with server.rows() as source, contextlib.closing(sqlite3.connect(to)) as target:
        source.backup(target)


def put_back(server: Server, copy: Path) -> None:
    """Put an older copy in the place of the records; the server must be dead."""
    for ending in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{server.data / 'control.db'}{ending}")
    shutil.copyfile(copy, server.data / "control.db")


def rising(numbers: Iterable[int]) -> bool:
    """Whether each is above the one before."""
    seen = list(numbers)
    return all(a < b for a, b in zip(seen, seen[1:], strict=False))


__all__ = [
    "COTENANT", "DEADLINE_S", "FINAL", "ROOT", "Away", "Client", "Refusal", "Rig", "Server", "copy_database", "free_port",
    "kill", "parent_of", "put_back", "rising", "state_of", "until",
]  # fmt: skip
