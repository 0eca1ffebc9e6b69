"""What the real control plane does not do on command: bugs behind the doors, and details of the socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.exceptions import MCPError

from cotenant.server import config
from cotenant.server.app import allowed_hosts, build_app
from cotenant.server.control.context import Changes
from cotenant.server.errors import NotFound
from cotenant.server.http import serving
from cotenant.server.model.caller import Caller

CANARY = "canary-of-an-exception"
ALICE = Caller("alice-agent", "human", "alice", frozenset({"read", "write", "operate"}), "tok_1")


class Broken:
    """A control plane in which everything but the bearer check is a bug."""

    def __init__(self) -> None:
        self.changes = Changes()
        self.auth = SimpleNamespace(caller_of=lambda token, door: ALICE, seen=lambda *_: None)
        self.context = _Context()

    def __getattr__(self, name: str) -> Any:
        return _Bug()


class _Bug:
    def __getattr__(self, name: str) -> Any:
        async def fail(*args: Any, **options: Any) -> Any:
            raise RuntimeError(CANARY)

        return fail

    async def __call__(self, *args: Any) -> Any:
        raise RuntimeError(CANARY)


class _Context(_Bug):
    cluster_id = "clu_of_nobody"


@contextlib.asynccontextmanager
async def served(control: Any) -> AsyncIterator[str]:
    """The HTTP side over `control`, in this process; its address."""
    settings = config.parse("", data_dir=Path("/nowhere"), port=0)
    app = build_app(control, settings)
    sock = serving.bind("127.0.0.1", 0)
    ready = asyncio.Event()
    server = serving.GracefulServer(serving.config_of(app), ready.set)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    await asyncio.wait_for(ready.wait(), 20)
    try:
        yield serving.url_of(sock, "127.0.0.1")
    finally:
        app.stop()
        server.stop()
        await asyncio.wait_for(task, 20)
        sock.close()


async def test_a_bug_is_logged_and_never_told(era: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    async with served(Broken()) as url, create_mcp_http_client(headers={"Authorization": "Bearer x"}) as http:
        async with Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=era) as client:
            result = await client.call_tool("quota_status", {})
            assert result.is_error and result.structured_content is None
            text = result.content[0].text  # type: ignore[union-attr]
            assert text.startswith("internal_error: ") and CANARY not in text
            reference = result.meta["cotenant.dev/error"]["reference"]
            assert reference in text
            for ask in (client.list_resources(), client.read_resource("cotenant://gpus")):
                with pytest.raises(MCPError) as caught:
                    await ask
                assert "internal_error" in caught.value.message and CANARY not in str(caught.value.error)
            answer = await http.post(f"{url}/operate/token.list", json={"args": {}, "reason": "r"})
            assert answer.status_code == 500 and "internal_error" in answer.text and CANARY not in answer.text
    logged = caplog.text
    assert reference in logged and CANARY in logged and "Traceback" in logged


async def test_listening_goes_on_when_the_question_of_sight_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The end of a stream through a bug is an error, not silence."""
    control = Broken()
    async with served(control) as url, create_mcp_http_client(headers={"Authorization": "Bearer x"}) as http:
        async with Client(streamable_http_client(f"{url}/mcp", http_client=http), mode="auto") as client:
            async with client.listen(resource_subscriptions=["cotenant://jobs/job_1/log"]) as stream:
                control.changes.publish(frozenset({"cotenant://jobs/job_1/log"}))
                with pytest.raises(Exception, match=r"internal_error|[Ss]ubscription"):
                    async with asyncio.timeout(10):
                        await anext(stream)
    assert CANARY in caplog.text


def test_answers_leave_at_once() -> None:
    """Without this an answer in two writes waits 40 ms for the client's delayed ACK (measured)."""
    with contextlib.closing(serving.bind("127.0.0.1", 0)) as sock:
        assert sock.proto == socket.IPPROTO_TCP, "asyncio looks at this"
        with socket.create_connection(sock.getsockname()):
            accepted, _ = sock.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_addresses_as_people_write_them() -> None:
    with contextlib.closing(serving.bind("127.0.0.1", 0)) as sock:
        assert serving.url_of(sock, "127.0.0.1") == f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert serving.url_of(sock, "::1") == f"http://[::1]:{sock.getsockname()[1]}"


@pytest.mark.parametrize(
    ("host", "there", "not_there"),
    [
        ("127.0.0.1", "localhost:*", "evil.example:*"),
        ("10.1.2.3", "10.1.2.3:*", "10.1.2.4:*"),
        ("::1", "[::1]:*", "::1"),
        ("0.0.0.0", f"{socket.gethostname()}:*", "evil.example:*"),
        ("0.0.0.0", "127.0.0.1:*", "0.0.0.0:*"),
    ],
)
def test_which_host_headers_are_ours(host: str, there: str, not_there: str) -> None:
    settings = config.parse('[server]\nallowed_hosts = ["gpu.lan:8425"]', data_dir=Path("/nowhere"), host=host)
    names = allowed_hosts(settings)
    assert there in names and not_there not in names and "gpu.lan:8425" in names


class Slow(Broken):
    """A control plane whose lease takes until `go`; what was begun and what was done is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go, self.done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.leases = SimpleNamespace(release=self._release)

    async def _release(self, *args: Any, **options: Any) -> Any:
        self.begun.set()
        await self.go.wait()
        self.done.set()
        raise NotFound("there is no such lease")


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_write_is_brought_to_its_end_when_its_client_goes(stopped: bool) -> None:
    control = Slow()
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
    params = {"name": "release_lease", "arguments": {"lease_id": "lse_1"}, "_meta": meta}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    async with served(control) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /mcp HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer x\r\nContent-Type: application/json\r\n"
            "Accept: application/json, text/event-stream\r\nMCP-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\n"
            f"Mcp-Name: release_lease\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await asyncio.wait_for(control.begun.wait(), 10)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)  # the cancellation of the request has no sign that it has arrived
        if stopped:  # the server ends meanwhile: it waits a moment
            asyncio.get_running_loop().call_later(0.3, control.go.set)
        else:
            control.go.set()
            await asyncio.wait_for(control.done.wait(), 10)
    assert control.done.is_set()
