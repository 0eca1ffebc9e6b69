"""The end and the new beginning: open streams, running jobs, sessions that outlive a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_open_streams_and_waits_do_not_hold_the_end_up(
    make_server: Callable[..., Any], number: int, tmp_path: Path
) -> None:
    """A listen stream, a standing GET stream and a wait_job are open; the job goes on and is there after the restart."""
    server = make_server()
    token = server.token("holder", "alice")
    pid_file = tmp_path / "pid"
    ended: dict[str, str] = {}

    async def listening(agent: Any) -> None:
        async with agent.client.listen(resource_subscriptions=["cotenant://gpus"]) as stream:
            opened.set()
            async for _ in stream:
                pass
        ended["listen"] = "in good order"

    async def waiting(agent: Any, job_id: str) -> None:
        ended["wait"] = await agent.refused("wait_job", job_id=job_id, max_wait_s=45)

    opened = asyncio.Event()
    async with server.client(token) as new, server.client(token) as waiter, server.client(token, "legacy") as old:
        await old.client.session.subscribe_resource("cotenant://gpus")
        job = await new.call("submit_job", command=f"echo $$ > {pid_file}; exec sleep 300", gpus=1, hours=1)
        await new.until(job["job_id"], "running")
        async with anyio.create_task_group() as group:
            group.start_soon(listening, new)
            group.start_soon(waiting, waiter, job["job_id"])
            await opened.wait()
            await asyncio.sleep(0.3)  # the wait has no sign of its own that it has begun
            code, took = await asyncio.to_thread(server.stop, number)
    assert code == 0, "".join(server.errors)[-2000:]
    assert took < 5
    assert ended["listen"] == "in good order"
    assert ended["wait"].startswith("shutting_down: ")
    assert "Traceback" not in "".join(server.errors), "".join(server.errors)[-3000:]
    os.kill(int(pid_file.read_text()), 0)  # still there

    server.start()
    async with server.client(token) as again:
        seen = await again.until(job["job_id"], "running")
        assert [item["epoch"] for item in seen["attempts"]] == [1]
        asked = await again.call("cancel_job", job_id=job["job_id"])
        await again.call("cancel_job", job_id=job["job_id"], confirm_token=asked["confirm_token"])
        await again.until(job["job_id"], "cancelled")


def _raw(server: Any, token: str, body: dict[str, Any], session: str | None) -> tuple[int, str, dict[str, str]]:
    headers = {"Accept": "application/json, text/event-stream"}
    if session:
        headers |= {"Mcp-Session-Id": session, "MCP-Protocol-Version": "2025-06-18"}
    status, answer, got = server.post("/mcp", body, token, headers)
    return status, str(answer), got


def test_a_client_that_keeps_its_session_over_a_restart_goes_on(make_server: Callable[..., Any]) -> None:
    """Measured: the TypeScript SDK 1.x never starts anew on a 404, so it gets none."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = make_server(port=port)
    token = server.token("old-timer", "alice")
    hello = {
        "jsonrpc": "2.0", "id": 1, "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}},
    }  # fmt: skip
    status, _, headers = _raw(server, token, hello, None)
    session = headers["mcp-session-id"]
    assert status == 200 and session
    _raw(server, token, {"jsonrpc": "2.0", "method": "notifications/initialized"}, session)
    ask = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "quota_status", "arguments": {}}}
    assert '"old-timer"' in _raw(server, token, ask, session)[1].replace("\\", "")
    server.stop()
    server.start()
    status, answer, _ = _raw(server, token, ask, session)
    assert status == 200 and '"old-timer"' in answer.replace("\\", "")
    other = server.token("somebody-else", "bob")
    assert '"somebody-else"' in _raw(server, other, ask, session)[1].replace("\\", ""), "a session lends nobody's name"


def test_a_session_serves_nobody_but_its_own_caller(make_server: Callable[..., Any]) -> None:
    server = make_server()
    token, other = server.token("one", "alice"), server.token("two", "bob")
    hello = {
        "jsonrpc": "2.0", "id": 1, "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}},
    }  # fmt: skip
    session = _raw(server, token, hello, None)[2]["mcp-session-id"]
    ask = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    assert _raw(server, other, ask, session)[0] == 404
    assert _raw(server, token, ask, session)[0] == 200


def test_a_second_server_on_the_same_data_is_refused_in_words(make_server: Callable[..., Any]) -> None:
    server = make_server()
    command = [sys.executable, "-m", "cotenant.ui.cli", "serve", "--data", str(server.data), "--port", "0"]
    second = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert second.returncode != 0 and "ready" not in second.stdout
    assert "Traceback" not in second.stderr and str(server.data) in second.stderr, second.stderr


def test_a_port_that_is_taken_is_said(make_server: Callable[..., Any], tmp_path: Path) -> None:
    server = make_server()
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "cotenant.ui.cli", "serve", "--data", str(tmp_path / "other"), "--port", port]
    second = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert second.returncode != 0 and "Traceback" not in second.stderr
    assert "in use" in second.stderr, second.stderr


async def test_ready_means_that_work_can_be_had(make_server: Callable[..., Any]) -> None:
    """The first call after the line must not be refused because hostd has not reported yet."""
    server = make_server(gpus=3)
    async with server.client(server.token("early", "alice")) as early:
        assert (await early.call("list_gpus"))["free"] == 3
        done = await early.call("submit_job", command="true", gpus=3, wait_s=20)
        assert done["state"] == "succeeded", done
