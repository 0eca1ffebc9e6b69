"""Clients that others wrote: the TypeScript SDK, both of its lines, in each of its modes, and the Python SDK in both eras.

Each goes through what an agent does, and through what happens to servers: a restart, a kill in the middle of a call, a
token that is revoked, a long idle time. None may be left in a state from which it cannot go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import foreign
import mcp_types as wire
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning"),  # what older protocols have
]

CLIENTS = ("v1", "v2 auto", "v2 legacy", "v2 2026-07-28", "python auto", "python legacy")


class Failed(Exception):
    """The client reported an error instead of an answer."""


class Driver(Protocol):
    """A client that is told what to do; `events` is what happened by itself, in order."""

    events: list[dict[str, Any]]

    async def do(self, act: str, *arguments: Any) -> Any: ...


class Script:
    """client.mjs in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.events: list[dict[str, Any]] = []
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            told = json.loads(line)
            if "event" in told:
                self.events.append(told)
            else:
                self._answers.put_nowait(told)
        self._answers.put_nowait(None)

    async def do(self, act: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([act, *arguments]).encode() + b"\n")
        await self._process.stdin.drain()
        told = await asyncio.wait_for(self._answers.get(), 90)
        assert told is not None, "the client ended"
        if "error" in told:
            raise Failed(told["error"])
        return told["ok"]

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._reader


class Python:
    """The Python SDK's client, behind the same commands. Its parts live in the task that opens it."""

    def __init__(self, server: Any, token: str, mode: str) -> None:
        self._server, self._token, self._mode = server, token, mode
        self._agent: Any = None
        self._answer: dict[str, Any] = {"action": "accept", "content": {"confirm": True}}
        self._listening: list[asyncio.Task[None]] = []
        self._todo: asyncio.Queue[tuple[str, tuple[Any, ...], asyncio.Future[Any]] | None] = asyncio.Queue()
        self._life = asyncio.create_task(self._live())
        self.events: list[dict[str, Any]] = []

    async def _live(self) -> None:
        async def asked(context: Any, params: Any) -> wire.ElicitResult:
            self.events.append({"event": "asked", "message": params.message})
            return wire.ElicitResult(**self._answer)

        async def heard(message: Any) -> None:
            if isinstance(message, wire.ResourceUpdatedNotification):
                self.events.append({"event": "updated", "uri": str(message.params.uri)})

        options = {"elicitation_callback": asked, "message_handler": heard}
        async with contextlib.AsyncExitStack() as stack:
            while (todo := await self._todo.get()) is not None:
                act, arguments, future = todo
                try:
                    if act == "connect":
                        self._agent = await stack.enter_async_context(
                            self._server.client(self._token, self._mode, **options)
                        )
                        future.set_result({"server": self._agent.client.server_info.name})
                    else:
                        future.set_result(await getattr(self, "_" + act)(*arguments))
                except Exception as exc:  # noqa: BLE001 (whatever it is, the test is told)
                    future.set_exception(Failed(str(exc)))
            for task in self._listening:
                task.cancel()
            await asyncio.gather(*self._listening, return_exceptions=True)

    async def do(self, act: str, *arguments: Any) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._todo.put_nowait((act, arguments, future))
        return await asyncio.wait_for(future, 90)

    async def _list(self) -> list[str]:
        return [item.name for item in (await self._agent.client.list_tools()).tools]

    async def _call(self, name: str, arguments: dict[str, Any], timeout_s: float = 60) -> dict[str, Any]:
        async def progress(done: float, total: float | None, message: str | None) -> None:
            self.events.append({"event": "progress", "progress": done})

        result = await self._agent.client.call_tool(
            name, arguments, progress_callback=progress, read_timeout_seconds=timeout_s
        )
        told: dict[str, Any] = result.model_dump(by_alias=True, mode="json")
        return told

    async def _answer_with(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    async def _read(self, uri: str) -> Any:
        return json.loads((await self._agent.client.read_resource(uri)).contents[0].text)

    async def _resources(self) -> list[str]:
        return [str(item.uri) for item in (await self._agent.client.list_resources()).resources]

    async def _prompts(self) -> list[str]:
        return [item.name for item in (await self._agent.client.list_prompts()).prompts]

    async def _prompt(self, name: str, arguments: dict[str, str]) -> str:
        return str((await self._agent.client.get_prompt(name, arguments)).messages[0].content.text)

    async def _complete(self, uri: str, name: str, value: str) -> list[str]:
        reference = wire.ResourceTemplateReference(uri=uri)
        found = await self._agent.client.complete(reference, {"name": name, "value": value})
        return list(found.completion.values)

    async def _subscribe(self, uri: str) -> None:
        if self._mode == "legacy":
            await self._agent.client.session.subscribe_resource(uri)
            return
        opened = asyncio.Event()

        async def listen() -> None:
            async with self._agent.client.listen(resource_subscriptions=[uri]) as stream:
                opened.set()
                async for event in stream:
                    self.events.append({"event": "updated", "uri": event.uri})

        self._listening.append(asyncio.create_task(listen()))
        await opened.wait()

    async def end(self) -> None:
        self._todo.put_nowait(None)
        with contextlib.suppress(Exception):
            await self._life


@contextlib.asynccontextmanager
async def driven(kind: str, server: Any, token: str) -> AsyncIterator[Driver]:
    sdk, _, mode = kind.partition(" ")
    driver: Script | Python
    if sdk == "python":
        driver = Python(server, token, mode)
    else:
        command = foreign.command("client.mjs", sdk, mode, f"{server.url}/mcp", token)
        driver = Script(
            await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=foreign.environment()
            )
        )
    try:
        yield driver
    finally:
        await driver.end()


async def until(look: Callable[[], Any], within_s: float = 20) -> None:
    end = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < end, f"not within {within_s} s"
        await asyncio.sleep(0.05)


async def goes_on(client: Driver, within_s: float = 30) -> dict[str, Any]:
    """The answer of a read, tried again while the connection is not there: that much every agent does."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                answer: dict[str, Any] = await client.do("call", "quota_status", {})
                return answer
            except Failed:
                await asyncio.sleep(0.2)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_what_an_agent_does(server: Any, kind: str, tmp_path: Path) -> None:
    token, go = server.token(f"agent-{kind.replace(' ', '-')}", "fred"), tmp_path / "go"
    async with driven(kind, server, token) as client:
        assert (await client.do("connect"))["server"] == "cotenant"
        assert {"quota_status", "submit_job", "wait_job"} <= set(await client.do("list"))
        answer = await client.do("call", "quota_status", {})
        assert answer["structuredContent"]["me"]["owner"] == "fred"
        assert json.loads(answer["content"][0]["text"]) == answer["structuredContent"]
        refused = await client.do("call", "get_job", {"job_id": "job_none"})
        assert refused["isError"] is True and refused["content"][0]["text"].startswith("no_such_job: ")
        wrong = await client.do("call", "get_job", {"job": "x"})
        assert wrong["isError"] is True and "did you mean job_id" in wrong["content"][0]["text"]
        with pytest.raises(Failed, match="Unknown tool"):
            await client.do("call", "launch_missiles", {})

        assert "cotenant://gpus" in await client.do("resources")
        assert len((await client.do("read", "cotenant://gpus"))["gpus"]) == 2
        with pytest.raises(Failed, match=r"no_such_job|not_found"):
            await client.do("read", "cotenant://jobs/job_none")
        assert "share_politely" in await client.do("prompts")
        assert "quota_status" in await client.do("prompt", "share_politely", {})
        assert await client.do("complete", "cotenant://queues/{pool}", "pool", "de") == ["default"]

        command = {"command": f"until [ -e {go} ]; do sleep 0.05; done; sleep 60", "gpus": 0, "hours": 0.03}
        job = (await client.do("call", "submit_job", command))["structuredContent"]["job_id"]
        await client.do("subscribe", f"cotenant://jobs/{job}")
        short = await client.do("call", "wait_job", {"job_id": job, "max_wait_s": 1})
        assert short["structuredContent"]["done"] is False
        assert [item for item in client.events if item["event"] == "progress"]
        await until_running(client, job)

        answer_act = "answer" if kind[0] == "v" else "answer_with"
        await client.do(answer_act, {"action": "accept", "content": {"confirm": False}})
        kept = await client.do("call", "cancel_job", {"job_id": job})
        assert kept["structuredContent"]["status"] == "not_cancelled"
        await client.do(answer_act, {"action": "accept", "content": {"confirm": True}})
        ended = await client.do("call", "cancel_job", {"job_id": job})
        assert ended["structuredContent"]["status"] == "stopping"
        asked = [item["message"] for item in client.events if item["event"] == "asked"]
        assert len(asked) == 2 and all(job in message for message in asked)
        await until(lambda: {"event": "updated", "uri": f"cotenant://jobs/{job}"} in client.events)
        over = await client.do("call", "wait_job", {"job_id": job, "max_wait_s": 30})
        assert over["structuredContent"]["state"] == "cancelled"


async def until_running(client: Driver, job: str) -> None:
    end = time.monotonic() + 20
    while (await client.do("call", "get_job", {"job_id": job}))["structuredContent"]["state"] != "running":
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "kind", [kind for kind in CLIENTS if kind != "v2 auto"]
)  # which ends up as the pinned one does
async def test_what_happens_to_servers(make_server: Callable[..., Any], kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = make_server(port=port, config="[server]\nsession_idle_s = 1\n")
    token = server.token("patient", "fred")
    async with driven(kind, server, token) as client:
        await client.do("connect")
        await client.do("call", "quota_status", {})
        await asyncio.sleep(2.5)  # a session that nobody used for half an hour, on a shorter clock
        assert (await client.do("call", "quota_status", {}))["structuredContent"]["me"]["name"] == "patient"

        await asyncio.to_thread(server.stop)
        server.start()
        answer = await goes_on(client)
        assert answer["structuredContent"]["me"]["name"] == "patient"
        job = await client.do("call", "submit_job", {"command": "sleep 30", "gpus": 0, "hours": 0.01})
        job_id = job["structuredContent"]["job_id"]

        # With a patience of its own, as agents have: the TypeScript SDK 1.x does not notice that its answer is lost.
        waiting = asyncio.create_task(client.do("call", "wait_job", {"job_id": job_id, "max_wait_s": 30}, 5))
        await asyncio.sleep(0.5)  # the wait has no sign of its own that it has begun
        await asyncio.to_thread(server.stop, signal.SIGKILL)
        server.start()
        told = (await asyncio.gather(waiting, return_exceptions=True))[0]
        assert isinstance(told, Failed) or told["structuredContent"]["job_id"] == job_id, told
        await goes_on(client)
        seen = await client.do("call", "get_job", {"job_id": job_id})
        assert len(seen["structuredContent"]["attempts"]) <= 1, "nothing ran twice"

        # A process that stayed would keep every later server of this machine from starting any.
        ended = await client.do("call", "cancel_job", {"job_id": job_id})
        if confirm := ended["structuredContent"].get("confirm_token"):  # a client that had to go on without its session
            await client.do("call", "cancel_job", {"job_id": job_id, "confirm_token": confirm})
        over = await client.do("call", "wait_job", {"job_id": job_id, "max_wait_s": 20})
        assert over["structuredContent"]["state"] == "cancelled"

        server.operate("token.revoke", {"token": "patient"})
        with pytest.raises(Failed):
            await client.do("call", "quota_status", {})
        with pytest.raises(Failed):
            await client.do("list")
    assert "Traceback" not in "".join(server.errors), "".join(server.errors)[-3000:]
