"""The tasks extension: a wait that a client polls for, and that ends without touching what it waited for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mcp_types as wire
import pytest

TASKS = "io.modelcontextprotocol/tasks"
DECLARED = {"extensions": {TASKS: {}}}
FOREVER = "until [ -e {} ]; do sleep 0.05; done"


class Tasks:
    """One caller's tasks, in plain frames."""

    def __init__(self, server: Any, token: str) -> None:
        self._server = server
        self._token = token

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        status, answer = self._server.modern(self._token, method, params, capabilities=DECLARED)
        assert status == 200, answer
        result: dict[str, Any] = answer["result"]
        return result

    def wait(self, subject: str, max_wait_s: float = 60) -> dict[str, Any]:
        return self.ask("tools/call", name="wait_job", arguments={"job_id": subject, "max_wait_s": max_wait_s})

    def get(self, task_id: str) -> dict[str, Any]:
        got = self.ask("tasks/get", taskId=task_id)
        assert got["resultType"] == "complete" and got["taskId"] == task_id
        return got

    def until_over(self, task_id: str, within_s: float = 20) -> dict[str, Any]:
        end = time.monotonic() + within_s
        while (got := self.get(task_id))["status"] == "working":
            assert time.monotonic() < end, got
            time.sleep(0.05)
        return got

    def refused(self, method: str, **params: Any) -> tuple[int, dict[str, Any]]:
        status, answer = self._server.modern(self._token, method, params, capabilities=DECLARED)
        return status, answer["error"]


@pytest.fixture
def alice(server: Any, tokens: dict[str, str]) -> Tasks:
    return Tasks(server, tokens["alice"])


async def submit(agent: Any, command: str) -> str:
    """A job that runs; it ends by itself, for a process that stays would keep every later server here from starting any."""
    job = await agent.call("submit_job", command=command, gpus=0, hours=0.02)
    await agent.until(job["job_id"], "running", "succeeded")
    return str(job["job_id"])


async def test_a_wait_becomes_a_task_and_its_result_is_the_waits(
    server: Any, tokens: dict[str, str], alice: Tasks, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with server.client(tokens["alice"]) as agent:
        job = await submit(agent, FOREVER.format(go) + "; exit 3")
        task = await asyncio.to_thread(alice.wait, job)
        assert task["resultType"] == "task" and task["status"] == "working" and job in task["statusMessage"]
        assert not {"result", "requestState", "structuredContent", "content"} & task.keys()
        assert isinstance(task["ttlMs"], int) and task["ttlMs"] > 60_000 and isinstance(task["pollIntervalMs"], int)
        assert task["createdAt"] == task["lastUpdatedAt"] and len(task["taskId"]) > 30 and job not in task["taskId"]
        assert (await asyncio.to_thread(alice.get, task["taskId"]))["status"] == "working"
        go.touch()
        done = await asyncio.to_thread(alice.until_over, task["taskId"])
        assert done["status"] == "completed" and done["lastUpdatedAt"] >= done["createdAt"]
        told = done["result"]["structuredContent"]
        plain = await agent.call("wait_job", job_id=job)
        assert done["result"]["isError"] is False and json.loads(done["result"]["content"][0]["text"]) == told
        assert told.keys() == plain.keys() and told["done"] is True and told["state"] == "failed"
        assert told["attempts"][0]["exit_code"] == 3 and told["waited_s"] > 0
        events = (await agent.call("list_events", since=told["cursor"], job_id=job))["events"]
        assert "job.failed" in [item["type"] for item in events], "the cursor is of the beginning of the wait"
        assert await asyncio.to_thread(alice.get, task["taskId"]) == done, "an end never changes"


async def test_ending_the_wait_ends_nothing_else(
    server: Any, tokens: dict[str, str], alice: Tasks, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with server.client(tokens["alice"]) as agent:
        job = await submit(agent, FOREVER.format(go))
        task = (await asyncio.to_thread(alice.wait, job))["taskId"]
        for _ in range(2):
            assert (await asyncio.to_thread(lambda: alice.ask("tasks/cancel", taskId=task)))["resultType"] == "complete"
            got = await asyncio.to_thread(alice.get, task)
            assert got["status"] == "cancelled" and "result" not in got and job in got["statusMessage"]
        assert (await agent.call("get_job", job_id=job))["state"] == "running"
        other = (await asyncio.to_thread(alice.wait, job))["taskId"]
        go.touch()
        await agent.until(job, "succeeded")
        done = await asyncio.to_thread(alice.until_over, other)
        assert done["status"] == "completed"
        await asyncio.to_thread(lambda: alice.ask("tasks/cancel", taskId=other))
        assert await asyncio.to_thread(alice.get, other) == done
        assert (await asyncio.to_thread(alice.get, task))["status"] == "cancelled"


async def test_a_wait_that_was_long_enough_says_so_for_good(
    server: Any, tokens: dict[str, str], alice: Tasks, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with server.client(tokens["alice"]) as agent:
        job = await submit(agent, FOREVER.format(go))
        task = (await asyncio.to_thread(alice.wait, job, 0.3))["taskId"]
        done = await asyncio.to_thread(alice.until_over, task)
        assert done["status"] == "completed" and done["result"]["structuredContent"]["done"] is False
        go.touch()
        await agent.until(job, "succeeded")
        assert await asyncio.to_thread(alice.get, task) == done


async def test_what_is_over_or_wrong_is_answered_at_once(
    server: Any, tokens: dict[str, str], alice: Tasks, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with server.client(tokens["alice"]) as agent:
        job = await submit(agent, FOREVER.format(go))
        assert (await asyncio.to_thread(alice.wait, job, 0))["resultType"] == "complete", "a look is no wait"
        go.touch()
        await agent.until(job, "succeeded")
        over = await asyncio.to_thread(alice.wait, job)
        assert over["resultType"] == "complete" and over["structuredContent"]["done"] is True
    nothing = alice.wait("job_none")
    assert nothing["isError"] is True and nothing["content"][0]["text"].startswith("no_such_job: ")


async def test_a_queued_claim_is_waited_for_too(server: Any, tokens: dict[str, str], alice: Tasks) -> None:
    async with server.client(tokens["alice"]) as agent, server.client(tokens["bob"]) as bob:
        held = await bob.call("acquire_lease", gpus=2)
        claim = await agent.call("acquire_lease", gpus=1, when_full="queue")
        task = (await asyncio.to_thread(alice.wait, claim["lease_id"]))["taskId"]
        assert "queued" in (await asyncio.to_thread(alice.get, task))["statusMessage"]
        await bob.call("release_lease", lease_id=held["lease_id"])
        done = await asyncio.to_thread(alice.until_over, task)
        assert done["result"]["structuredContent"]["state"] == "leased"
        assert done["result"]["structuredContent"]["fence"] > held["fence"]
        await agent.call("release_lease", lease_id=claim["lease_id"])


async def test_a_task_is_its_callers_alone(server: Any, tokens: dict[str, str], alice: Tasks, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with server.client(tokens["alice"]) as agent:
        job = await submit(agent, FOREVER.format(go))
        task = (await asyncio.to_thread(alice.wait, job))["taskId"]
        bob = Tasks(server, tokens["bob"])
        for method in ("tasks/get", "tasks/update", "tasks/cancel"):
            for who, task_id in ((bob, task), (alice, "tsk_" + "0" * 32), (alice, job), (alice, "x' OR 1=1 --")):
                more = {"inputResponses": {}} if method == "tasks/update" else {}
                status, error = await asyncio.to_thread(lambda w=who, t=task_id: w.refused(method, taskId=t, **more))  # noqa: B023
                assert error["code"] == wire.INVALID_PARAMS, error
                assert error["message"].startswith("not_found: ") and status == 400
        reporter = Tasks(server, tokens["reporter"])
        assert (
            "forbidden" in (await asyncio.to_thread(lambda: reporter.refused("tasks/get", taskId=task)))[1]["message"]
        )
        assert (await asyncio.to_thread(alice.get, task))["status"] == "working"
        assert (await asyncio.to_thread(lambda: alice.ask("tasks/update", taskId=task, inputResponses={"x": 1}))) == {
            "resultType": "complete", "_meta": (await asyncio.to_thread(alice.get, task))["_meta"],
        }  # fmt: skip
        go.touch()
        await agent.until(job, "succeeded")


def test_requests_that_are_not_in_order(server: Any, tokens: dict[str, str], alice: Tasks) -> None:
    token = tokens["alice"]
    status, found = server.modern(token, "server/discover")
    assert status == 200 and found["result"]["capabilities"]["extensions"] == {TASKS: {}}
    for method in ("tasks/get", "tasks/update", "tasks/cancel"):
        params = {"taskId": "tsk_1", "inputResponses": {}}
        status, answer = server.modern(token, method, params)
        assert (status, answer["error"]["code"]) == (400, wire.MISSING_REQUIRED_CLIENT_CAPABILITY)
        assert answer["error"]["data"] == {"requiredCapabilities": {"extensions": {TASKS: {}}}}
        for name in (None, "tsk_2", "=?base64?!!?="):
            status, answer = server.modern(token, method, params, capabilities=DECLARED, headers={"Mcp-Name": name})
            assert (status, answer["error"]["code"]) == (400, wire.HEADER_MISMATCH), name
        for wrong in ({}, {"taskId": 7}, {"taskId": "t" * 1000}, {"taskId": None}):
            status, answer = server.modern(token, method, wrong, capabilities=DECLARED, headers={"Mcp-Name": "7"})
            assert (status, answer["error"]["code"]) == (400, wire.INVALID_PARAMS), wrong
    for method in ("tasks/list", "tasks/result"):
        status, answer = server.modern(token, method, {"taskId": "tsk_1"}, capabilities=DECLARED)
        assert (status, answer["error"]["code"]) == (404, wire.METHOD_NOT_FOUND)
    status, answer = server.modern(token, "subscriptions/listen", {"notifications": {"taskIds": ["tsk_1"]}})
    assert (status, answer["error"]["code"]) == (400, wire.MISSING_REQUIRED_CLIENT_CAPABILITY)


async def test_without_the_extension_nothing_is_missing(
    server: Any, tokens: dict[str, str], era: str, tmp_path: Path
) -> None:
    """The same wait as one call, in both eras."""
    go = tmp_path / "go"
    async with server.client(tokens["alice"], era) as agent:
        job = await submit(agent, FOREVER.format(go))
        short = await agent.call("wait_job", job_id=job, max_wait_s=0.2)
        assert short["done"] is False
        go.touch()
        assert (await agent.call("wait_job", job_id=job, max_wait_s=20))["done"] is True


def test_an_older_client_that_declares_it_gets_plain_answers(server: Any, tokens: dict[str, str]) -> None:
    """The Inspector does, in its initialize; a task could not be delivered to it."""

    def ask(body: dict[str, Any], session: str | None = None) -> tuple[dict[str, Any], str]:
        headers = {"Accept": "application/json, text/event-stream"}
        if session:
            headers |= {"Mcp-Session-Id": session, "MCP-Protocol-Version": "2025-11-25"}
        _, answer, got = server.post("/mcp", {"jsonrpc": "2.0", **body}, tokens["alice"], headers)
        data = [line.removeprefix("data: ") for line in str(answer).splitlines() if line.startswith("data: {")]
        return json.loads(data[-1]) if data else answer, got.get("mcp-session-id", "")

    hello = {"protocolVersion": "2025-11-25", "capabilities": DECLARED, "clientInfo": {"name": "o", "version": "1"}}
    greeted, session = ask({"id": 1, "method": "initialize", "params": hello})
    assert "extensions" not in greeted["result"]["capabilities"]
    ask({"method": "notifications/initialized"}, session)
    job = {"name": "submit_job", "arguments": {"command": "sleep 0.5", "gpus": 0}}
    made, _ = ask({"id": 2, "method": "tools/call", "params": job}, session)
    wait = {"job_id": made["result"]["structuredContent"]["job_id"], "max_wait_s": 20}
    waited, _ = ask({"id": 3, "method": "tools/call", "params": {"name": "wait_job", "arguments": wait}}, session)
    assert waited["result"]["structuredContent"]["done"] is True and "resultType" not in waited["result"]
    gone, _ = ask({"id": 4, "method": "tasks/get", "params": {"taskId": "tsk_1"}}, session)
    assert gone["error"]["code"] == wire.METHOD_NOT_FOUND


async def test_a_task_outlives_the_server(make_server: Callable[..., Any], tmp_path: Path) -> None:
    """Killed in the middle: the id answers as before, and the end that came meanwhile is told."""
    server = make_server()
    token = server.token("keeper", "alice")
    tasks, go = Tasks(server, token), tmp_path / "go"
    async with server.client(token) as agent:
        job = await submit(agent, FOREVER.format(go))
        task = (await asyncio.to_thread(tasks.wait, job, 3600))["taskId"]
        ended = (await asyncio.to_thread(tasks.wait, job, 3600))["taskId"]
        await asyncio.to_thread(lambda: tasks.ask("tasks/cancel", taskId=ended))
    server.stop(signal.SIGKILL)
    server.start()
    assert tasks.get(task)["status"] == "working" and tasks.get(ended)["status"] == "cancelled"
    server.stop()
    go.touch()
    server.start()
    done = tasks.until_over(task)
    assert done["result"]["structuredContent"]["state"] == "succeeded"
    server.operate("token.revoke", {"token": "keeper"})
    status, answer = server.modern(token, "tasks/get", {"taskId": task}, capabilities=DECLARED)
    assert status == 401 and "unauthorized" in json.dumps(answer)


@pytest.mark.parametrize("modern", [True, False])
async def test_a_dropped_connection_ends_the_wait_and_not_the_job(
    server: Any, tokens: dict[str, str], modern: bool, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with server.client(tokens["alice"]) as agent:
        job = await submit(agent, FOREVER.format(go))
        version = "2026-07-28" if modern else "2025-06-18"
        params: dict[str, Any] = {"name": "wait_job", "arguments": {"job_id": job, "max_wait_s": 60}}
        headers = ["Mcp-Method: tools/call", "Mcp-Name: wait_job"]
        if modern:
            params["_meta"] = {
                "io.modelcontextprotocol/protocolVersion": version, "io.modelcontextprotocol/clientCapabilities": {},
            }  # fmt: skip
        else:
            # Without a session of its own, as a client that kept one over a restart.
            headers = ["Mcp-Session-Id: of-before"]
        body = json.dumps({"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": params})
        address = urlsplit(server.url)
        with contextlib.closing(socket.create_connection((address.hostname, address.port), 10)) as peer:
            lines = [
                "POST /mcp HTTP/1.1", f"Host: {address.netloc}", f"Authorization: Bearer {tokens['alice']}",
                "Accept: application/json, text/event-stream", "Content-Type: application/json",
                f"MCP-Protocol-Version: {version}", *headers, f"Content-Length: {len(body)}", "", body,
            ]  # fmt: skip
            peer.sendall("\r\n".join(lines).encode())
            await asyncio.sleep(0.3)  # the wait has no sign of its own that it has begun
        assert (await agent.call("get_job", job_id=job))["state"] == "running"
        go.touch()
        await agent.until(job, "succeeded")


async def test_a_cancelled_request_ends_the_wait_and_not_the_job(
    server: Any, tokens: dict[str, str], era: str, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with server.client(tokens["alice"], era) as agent:
        job = await submit(agent, FOREVER.format(go))
        began = asyncio.Event()

        async def on_progress(done: float, total: float | None, message: str | None) -> None:
            began.set()

        wait = {"job_id": job, "max_wait_s": 60}
        call = asyncio.create_task(agent.client.call_tool("wait_job", wait, progress_callback=on_progress))
        await asyncio.wait_for(began.wait(), 20)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await agent.call("get_job", job_id=job))["state"] == "running", "and the client goes on"
        go.touch()
        await agent.until(job, "succeeded")
