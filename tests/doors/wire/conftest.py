"""A real server over simulated cards, and the SDK's own client in both protocol eras."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

ERAS = ("auto", "legacy")  # "auto" negotiates 2026-07-28 with our server
START_S = 30.0


class Server:
    """`cotenant serve` in a process of its own, with a temporary data directory and two simulated cards."""

    def __init__(self, data: Path, *, config: str = "", gpus: int = 2, port: int = 0) -> None:
        self.data = data
        data.mkdir(parents=True, exist_ok=True)
        self._args = ["--data", str(data), "--port", str(port), "--simulate-gpus", str(gpus)]
        if config:
            (data / "cotenant.toml").write_text(config)
        self.errors: list[str] = []
        self.start()

    def start(self) -> None:
        """Start (again); returns once MCP answers."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cotenant.ui.cli", "serve", *self._args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        process = self.process
        assert process.stdout is not None and process.stderr is not None
        threading.Thread(target=lambda: self.errors.extend(process.stderr or ()), daemon=True).start()
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        try:
            line = next((item for item in process.stdout if item.startswith("ready ")), "")
        finally:
            watchdog.cancel()
        assert line, f"the server never said ready: {''.join(self.errors)[-2000:]}"
        self.url = line.split()[1]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """(exit code, seconds it took)."""
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(5)
        took = time.monotonic() - began
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(ValueError, OSError):
                    pipe.close()
        return code, took

    def end_leftovers(self) -> None:
        """End hostd, shims and jobs: they outlive a server by design, and would be strangers to every later one."""
        mark = os.fsencode(self.data)
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                words, env = (Path(f"/proc/{name}/{what}").read_bytes() for what in ("cmdline", "environ"))
                if int(name) != os.getpid() and (mark in words or b"COTENANT_STATE_DIR=" + mark in env):
                    os.kill(int(name), signal.SIGKILL)
            except OSError:
                continue

    @property
    def local_token(self) -> str:
        return (self.data / "local.token").read_text().strip()

    def post(
        self, path: str, body: Any, token: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any] | str, dict[str, str]]:
        """(status, body, headers) of one plain POST."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method="POST")
        request.add_header("Content-Type", "application/json")
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                status, raw, got = response.status, response.read(), {k.lower(): v for k, v in response.headers.items()}
        except urllib.error.HTTPError as error:
            with error:
                status, raw, got = error.code, error.read(), {k.lower(): v for k, v in error.headers.items()}
        try:
            return status, json.loads(raw), got
        except ValueError:
            return status, raw.decode("utf-8", "replace"), got

    def modern(
        self,
        token: str,
        method: str,
        params: dict[str, Any] | None = None,
        *,
        capabilities: dict[str, Any] | None = None,
        headers: dict[str, str | None] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """(status, JSON-RPC answer) of one request of 2026-07-28 as plain frames; a header of None is left out."""
        params = params or {}
        name = next((params[key] for key in ("name", "uri", "taskId") if isinstance(params.get(key), str)), None)
        sent: dict[str, str | None] = {
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": "2026-07-28",
            "Mcp-Method": method,
            "Mcp-Name": name,
            **(headers or {}),
        }
        meta = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": capabilities or {},
        }
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
        status, answer, _ = self.post("/mcp", body, token, {k: v for k, v in sent.items() if v is not None})
        if isinstance(answer, str):  # a stream of events; the answer is its last
            data = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
            answer = json.loads(data[-1])
        assert isinstance(answer, dict)
        return status, answer

    def operate(self, verb: str, args: dict[str, Any], reason: str = "a test") -> dict[str, Any]:
        """One act of a person; it must succeed."""
        status, answer, _ = self.post(f"/operate/{verb}", {"args": args, "reason": reason}, self.local_token)
        assert status == 200 and isinstance(answer, dict), answer
        return answer

    def token(self, name: str, owner: str, scopes: str = "read,write", **options: Any) -> str:
        """A new agent's token."""
        args = {"name": name, "kind": "agent", "owner": owner, "scopes": scopes.split(","), **options}
        return str(self.operate("token.create", args)["token"])

    @contextlib.asynccontextmanager
    async def client(self, token: str, mode: str = "auto", query: str = "", **options: Any) -> AsyncIterator[Agent]:
        """The SDK's client as one agent."""
        async with create_mcp_http_client(headers={"Authorization": f"Bearer {token}"}) as http:
            transport = streamable_http_client(f"{self.url}/mcp{query}", http_client=http)
            async with Client(transport, mode=mode, **options) as client:
                yield Agent(client)

    def bridge_argv(self, token_file: Path, *more: str) -> list[str]:
        """`cotenant mcp-stdio` to this server."""
        command = [sys.executable, "-P", "-m", "cotenant.ui.cli", "mcp-stdio", "--url", self.url]
        return [*command, "--token-file", str(token_file), *more]

    @contextlib.asynccontextmanager
    async def bridged(
        self, token_file: Path, mode: str = "auto", *more: str, cwd: Path | None = None, **options: Any
    ) -> AsyncIterator[Agent]:
        """The SDK's client as one agent, through `cotenant mcp-stdio`. What the bridge says goes to bridge.err."""
        command, *args = self.bridge_argv(token_file, *more)
        with open(token_file.parent / "bridge.err", "a") as errors:
            transport = stdio_client(StdioServerParameters(command=command, args=args, cwd=cwd), errlog=errors)
            async with Client(transport, mode=mode, **options) as client:
                yield Agent(client)
        assert "Traceback" not in (token_file.parent / "bridge.err").read_text()


class Bridge:
    """`cotenant mcp-stdio` by its frames. Use it as a context manager; at its end it must end by itself."""

    def __init__(self, argv: list[str], **env: str) -> None:
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={key: value for key, value in os.environ.items() if not key.startswith("COTENANT_")} | env,
        )
        self.frames: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.others: list[dict[str, Any]] = []
        self.errors = b""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._hear)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.frames.put(json.loads(line))
        self.frames.put(None)

    def _hear(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line

    def send(self, frame: Any) -> None:
        """One frame as it is (bytes), or as JSON."""
        assert self.process.stdin is not None
        data = frame if isinstance(frame, bytes) else json.dumps(frame).encode()
        self.process.stdin.write(data + b"\n")
        self.process.stdin.flush()

    def next(self, within_s: float = 20.0) -> dict[str, Any]:
        """The next frame that comes out."""
        frame = self.frames.get(timeout=within_s)
        assert frame is not None, f"the bridge has ended: {self.errors!r}"
        return frame

    def answer(self, ident: Any, within_s: float = 20.0) -> dict[str, Any]:
        """The answer to a request; what else comes out before it goes to `others`."""
        end = time.monotonic() + within_s
        while True:
            frame = self.next(max(0.01, end - time.monotonic()))
            if "method" not in frame and frame.get("id") == ident:
                return frame
            self.others.append(frame)

    def ask(self, ident: Any, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """A request of 2026-07-28, and its answer."""
        self.send(modern(ident, method, params))
        return self.answer(ident)

    def close(self, within_s: float = 10.0) -> int:
        """Close its input; its exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        code = self.process.wait(within_s)
        for thread in self._threads:
            thread.join(within_s)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.process.stdout is not None and not self.process.stdout.closed:
                assert self.close() == 0, self.errors
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(5)
        assert b"Traceback" not in self.errors, self.errors.decode()


def modern(ident: Any, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """A request of 2026-07-28."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "frames", "version": "1"},
    }
    return {"jsonrpc": "2.0", "id": ident, "method": method, "params": {"_meta": meta, **(params or {})}}


class Agent:
    """A client, and short words for what tests do with it."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer; a refusal fails the test."""
        result = await self.client.call_tool(tool, arguments)
        assert not result.is_error, result.content
        assert isinstance(result.structured_content, dict)
        return result.structured_content

    async def refused(self, tool: str, **arguments: Any) -> str:
        """The text of a refusal; success fails the test. Its form is checked every time."""
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error, f"{tool} was done: {result.structured_content}"
        assert result.structured_content is None
        text = str(result.content[0].text)  # type: ignore[union-attr]
        told = (result.meta or {})["cotenant.dev/error"]
        assert text.startswith(f"{told['code']}: "), text
        assert "Traceback" not in text and "pydantic" not in text
        return text

    async def until(self, job_id: str, *states: str) -> dict[str, Any]:
        """The job once it is in one of `states`."""

        async def there() -> dict[str, Any] | None:
            job = await self.call("get_job", job_id=job_id)
            return job if job["state"] in states else None

        job: dict[str, Any] = await self.eventually(there)
        return job

    async def eventually(self, look: Callable[[], Awaitable[Any]], within_s: float = 45.0) -> Any:
        """What `look` finds, tried until it finds something."""
        end = time.monotonic() + within_s
        while (found := await look()) is None:
            assert time.monotonic() < end, f"not within {within_s} s"
            await asyncio.sleep(0.05)
        return found


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    """One server for the tests that leave it as they found it."""
    with tempfile.TemporaryDirectory(prefix="ctn-doors-", ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder) / "data")
        try:
            yield server
        finally:
            code, _ = server.stop()
            server.end_leftovers()
        assert code == 0, "".join(server.errors)[-2000:]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Servers of a test's own; all are ended with it."""
    made: list[Server] = []

    def make(**options: Any) -> Server:
        made.append(Server(tmp_path / f"data{len(made)}", **options))
        return made[-1]

    yield make
    for item in made:
        item.stop()
        item.end_leftovers()


@pytest.fixture
def free_port() -> int:
    """A port that a server may have twice, one after the other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def token_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a token into a file of one's own."""

    def write(token: str) -> Path:
        path = tmp_path / "token"
        path.touch(0o600)
        path.write_text(token)
        return path

    return write


@pytest.fixture
def bridge(server: Server, tokens: dict[str, str], token_file: Callable[[str], Path]) -> Iterator[Bridge]:
    """alice's bridge to the shared server, by its frames."""
    with Bridge(server.bridge_argv(token_file(tokens["alice"]))) as made:
        yield made


@pytest.fixture(name="Bridge")
def _bridge_class() -> type[Bridge]:
    return Bridge


@pytest.fixture(name="modern")
def _modern() -> Callable[..., dict[str, Any]]:
    return modern


@pytest.fixture(scope="package")
def tokens(server: Server) -> dict[str, str]:
    """alice's and bob's agents, and one that may only read."""
    return {
        "alice": server.token("alice-agent", "alice"),
        "bob": server.token("bob-agent", "bob"),
        "reader": server.token("reader-agent", "rita", "read"),
        "reporter": server.token("reporter-agent", "rita", "report"),
    }


@pytest.fixture(params=ERAS)
def era(request: pytest.FixtureRequest) -> str:
    """Both protocol eras."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _no_leftover(request: pytest.FixtureRequest) -> Iterator[None]:
    """The shared server must still live after every test that used it."""
    yield
    if "server" in request.fixturenames:
        server: Server = request.getfixturevalue("server")
        assert server.process.poll() is None, "".join(server.errors)[-3000:]


def pid_lives(pid: int) -> bool:
    """Whether a process is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
