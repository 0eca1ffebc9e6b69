"""Clients for benchmarks that cost little themselves: MCP by hand over one kept connection, waiting or not."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from cotenant.server.backends.local import socket_path

MODERN = "2026-07-28"
OLD = "2025-06-18"


def frame(method: str, params: dict[str, Any], number: int = 1) -> tuple[dict[str, str], bytes]:
    """Headers and body of one request of the newest protocol."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    headers = {"MCP-Protocol-Version": MODERN, "Mcp-Method": method}
    if (name := params.get("name") or params.get("uri")) is not None:
        headers["Mcp-Name"] = name
    body = {"jsonrpc": "2.0", "id": number, "method": method, "params": {**params, "_meta": meta}}
    return headers, json.dumps(body).encode()


def head(token: str) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        **({"Authorization": f"Bearer {token}"} if token else {}),
    }


class Caller:
    """One kept connection; `call` waits for the answer."""

    def __init__(self, url: str, token: str = "") -> None:
        self._headers = head(token)
        host, port = url.removeprefix("http://").split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=60)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def raw(self, headers: dict[str, str], body: bytes) -> bytes:
        self._connection.request("POST", "/mcp", body, self._headers | headers)
        return self._connection.getresponse().read()

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer of a tool; a refusal ends the benchmark."""
        answer = json.loads(self.raw(*frame("tools/call", {"name": tool, "arguments": arguments})))
        assert "result" in answer and not answer["result"].get("isError"), answer
        content: dict[str, Any] = answer["result"]["structuredContent"]
        return content

    def lease(self, within_s: float = 60.0) -> str:
        """A lease on one card. Another Cotenant's work on this machine may keep a new host back for a while."""
        end = time.monotonic() + within_s
        while True:
            try:
                return str(self.call("acquire_lease", gpus=1, ttl_s=3600)["lease_id"])
            except AssertionError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def close(self) -> None:
        self._connection.close()


class Line:
    """One kept connection on an event loop. With `slow` its buffers are as small as they can be."""

    def __init__(self, url: str, token: str, *, slow: bool = False) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)
        self._headers = head(token)
        self._slow = slow
        self.session = ""

    async def open(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        await asyncio.get_running_loop().sock_connect(sock, (self._host, self._port))
        self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=2048 if self._slow else 2**20)

    async def send(self, headers: dict[str, str], body: bytes, method: str = "POST") -> tuple[int, dict[str, str]]:
        """(status, headers) of the answer; its body is read by `body` or `events`."""
        lines = {**self._headers, **headers, "Host": f"{self._host}:{self._port}", "Content-Length": str(len(body))}
        if self.session:
            lines |= {"Mcp-Session-Id": self.session, "MCP-Protocol-Version": OLD}
        text = f"{method} /mcp HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._writer.write(text.encode() + b"\r\n" + body)
        await self._writer.drain()
        raw = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        got = dict(line.lower().split(": ", 1) for line in raw[1:] if ": " in line)
        return int(raw[0].split()[1]), got

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)

    async def body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        return b"".join([chunk async for chunk in self._chunks()])

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The frames of an event stream, as they come."""
        rest = b""
        async for chunk in self._chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One request and its answer, in the newest protocol or, with a session, in the older one."""
        if self.session:
            headers, body = {}, json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
        else:
            headers, body = frame(method, params)
        _, got = await self.send(headers, body)
        raw = await self.body(got)
        if raw.lstrip()[:1] != b"{":
            raw = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")][-1]
        answer: dict[str, Any] = json.loads(raw)
        assert "result" in answer, answer
        return answer["result"]  # type: ignore[no-any-return]

    async def hello(self) -> None:
        """Begin a session of the older protocol on this connection."""
        params = {"protocolVersion": OLD, "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
        _, got = await self.send({}, json.dumps(body).encode())
        await self.body(got)
        self.session = got["mcp-session-id"]
        _, got = await self.send({}, b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
        await self.body(got)

    def close(self) -> None:
        self._writer.close()


class Server:
    """A server of benchmarks/bench_server.py in a process of its own."""

    def __init__(self, data: Path, *options: str, toml: str = "") -> None:
        data.mkdir(parents=True, exist_ok=True)
        if toml:
            (data / "cotenant.toml").write_text(toml)
        self._data = data
        command = [sys.executable, str(Path(__file__).with_name("bench_server.py")), "--data", str(data), *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.trivial = self.answer("trivial").split()[1] if "--trivial" in options else ""
        self.url = self.answer("ready").split()[1]

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self, word: str) -> str:
        """The next line of stdout, which must begin with `word`."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(word), f"the server said {line!r}, not {word}"
        return line

    def token(self, name: str, owner: str) -> str:
        body = {"args": {"name": name, "kind": "agent", "owner": owner, "scopes": ["read", "write"]}, "reason": "bench"}
        local = (self._data / "local.token").read_text().strip()
        request = urllib.request.Request(f"{self.url}/operate/token.create", json.dumps(body).encode(), head(local))
        with urllib.request.urlopen(request, timeout=20) as response:
            return str(json.load(response)["token"])

    def end(self) -> tuple[int, float]:
        """(exit code, seconds it took to end)."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        took = time.monotonic() - began
        self._end_hostd()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return code, took

    def _end_hostd(self) -> None:
        """A lease that is still held keeps hostd by design; nobody comes back for this one."""
        with contextlib.suppress(OSError), contextlib.closing(socket.socket(socket.AF_UNIX)) as link:
            link.connect(str(socket_path(self._data / "hostd")))
            pid, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            os.kill(pid, signal.SIGTERM)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(data: Path, *options: str, toml: str = "") -> Iterator[Server]:
    server = Server(data, *options, toml=toml)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] * 1e3 for p in (50, 99)]
    return {"p50_ms": at[0], "p99_ms": at[1]}
