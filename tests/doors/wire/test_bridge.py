"""`cotenant mcp-stdio` with the SDK's own client, in both eras: all that works over HTTP works through it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mcp_types as wire
import pytest
from mcp.shared.exceptions import MCPError

from cotenant import tools

pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")

TokenFile = Callable[[str], Path]


async def yes(context: Any, params: Any) -> wire.ElicitResult:
    return wire.ElicitResult(action="accept", content={"confirm": True})


async def test_list_call_read_and_prompts(
    server: Any, tokens: dict[str, str], era: str, token_file: TokenFile, tmp_path: Path
) -> None:
    async with server.bridged(token_file(tokens["alice"]), era, cwd=tmp_path) as alice:
        listed = (await alice.client.list_tools()).tools
        assert [item.name for item in listed] == [item.name for item in tools.ALL]
        assert (await alice.call("quota_status"))["me"]["name"] == "alice-agent"
        assert (await alice.refused("get_job", job_id="job_none")).startswith("no_such_job: ")
        assert "cotenant://gpus" in [item.uri for item in (await alice.client.list_resources()).resources]
        shown = (await alice.client.read_resource("cotenant://gpus")).contents[0].text
        assert json.loads(shown)["total"] == 2
        assert "share_politely" in [item.name for item in (await alice.client.list_prompts()).prompts]
        assert (await alice.client.get_prompt("share_politely")).messages
        found = await alice.client.complete(
            wire.ResourceTemplateReference(uri="cotenant://queues/{pool}"), {"name": "pool", "value": "de"}
        )
        assert found.completion.values == ["default"]
        with pytest.raises(MCPError) as caught:
            await alice.client.read_resource("cotenant://jobs/job_none")
        assert caught.value.code == wire.INVALID_PARAMS and caught.value.data["uri"] == "cotenant://jobs/job_none"
        me = next(item for item in (await alice.call("list_agents"))["agents"] if item["name"] == "alice-agent")
        assert me["cwd"] == str(tmp_path) and me["host"] and me["client"]


async def test_progress_comes_through(server: Any, tokens: dict[str, str], era: str, token_file: TokenFile) -> None:
    told: list[float] = []

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        told.append(done)

    async with server.bridged(token_file(tokens["alice"]), era) as alice:
        job = await alice.call("submit_job", command=f"sleep 0.5 # {era}", gpus=0)
        wait = {"job_id": job["job_id"], "max_wait_s": 20}
        result = await alice.client.call_tool("wait_job", wait, progress_callback=on_progress)
        assert result.structured_content["done"] is True and told


async def test_a_person_is_asked_through_it(
    server: Any, tokens: dict[str, str], era: str, token_file: TokenFile
) -> None:
    async with server.bridged(token_file(tokens["alice"]), era, elicitation_callback=yes) as alice:
        job = await alice.call("submit_job", command=f"sleep 70 # {era}", gpus=0)
        await alice.until(job["job_id"], "running")
        assert (await alice.call("cancel_job", job_id=job["job_id"]))["status"] == "stopping"
        await alice.until(job["job_id"], "cancelled")


class Ear:
    """What a client is told of resources, in either era."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str] = asyncio.Queue()

    async def hear(self, message: Any) -> None:
        if isinstance(message, wire.ResourceUpdatedNotification):
            await self.told.put(str(message.params.uri))

    async def until(self, uri: str, within_s: float = 20.0) -> None:
        async with asyncio.timeout(within_s):
            while await self.told.get() != uri:
                pass

    async def listen(self, agent: Any, era: str, *uris: str) -> asyncio.Task[None] | None:
        """Watch `uris`; returns once that stands. The task is what listens, where something has to."""
        if era == "legacy":
            for uri in uris:
                await agent.client.session.subscribe_resource(uri)
            return None
        stands = asyncio.Event()

        async def follow() -> None:
            async with agent.client.listen(resource_subscriptions=list(uris)) as stream:
                stands.set()
                async for event in stream:
                    await self.told.put(str(event.uri))

        task = asyncio.create_task(follow())
        await stands.wait()
        return task


async def end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_changes_is_told(server: Any, tokens: dict[str, str], era: str, token_file: TokenFile) -> None:
    ear = Ear()
    async with server.bridged(token_file(tokens["alice"]), era, message_handler=ear.hear) as alice:
        listening = await ear.listen(alice, era, "cotenant://quota/me")
        lease = await alice.call("acquire_lease", gpus=1)
        await ear.until("cotenant://quota/me")
        await alice.call("release_lease", lease_id=lease["lease_id"])
        await end(listening)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_server_that_comes_back_is_the_same_to_the_client(
    make_server: Any, free_port: int, era: str, number: int, token_file: TokenFile
) -> None:
    """Call, subscription and question: all three work on after a restart, in good order or not."""
    server = make_server(port=free_port)
    ear = Ear()
    path = token_file(server.token("survivor", "sue"))
    async with server.bridged(path, era, message_handler=ear.hear, elicitation_callback=yes) as agent:
        job = await agent.call("submit_job", command="sleep 120", gpus=0)
        await agent.until(job["job_id"], "running")
        listening = await ear.listen(agent, era, "cotenant://quota/me", "cotenant://gpus")
        await asyncio.to_thread(server.stop, number)
        late = asyncio.create_task(agent.call("quota_status"))  # while nobody answers
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(30):
            assert (await late)["me"]["name"] == "survivor"
        await ear.until("cotenant://quota/me")  # told to read again, because nobody knows what was missed
        await ear.until("cotenant://gpus")
        while not ear.told.empty():
            ear.told.get_nowait()
        lease = await agent.call("acquire_lease", gpus=1)
        await ear.until("cotenant://quota/me")
        await agent.call("release_lease", lease_id=lease["lease_id"])
        await agent.until(job["job_id"], "running")
        assert (await agent.call("cancel_job", job_id=job["job_id"]))["status"] == "stopping"
        await end(listening)


async def test_a_kill_in_mid_call(make_server: Any, free_port: int, era: str, token_file: TokenFile) -> None:
    """A wait goes on; a submit is one job, however often it had to be sent."""
    server = make_server(port=free_port)
    waiting = asyncio.Event()
    told: list[float] = []

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        told.append(done)
        waiting.set()

    async def through_a_kill(tool: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a call in whose middle the server is killed, and started again."""
        waiting.clear()
        told.clear()
        call = asyncio.create_task(agent.client.call_tool(tool, arguments, progress_callback=on_progress))
        await waiting.wait()
        await asyncio.to_thread(server.stop, signal.SIGKILL)
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(40):
            result = await call
        assert not result.is_error, result.content
        assert told == sorted(told)  # progress may never fall, also where the server began anew
        answer: dict[str, Any] = result.structured_content
        return answer

    async with server.bridged(token_file(server.token("survivor", "sue")), era) as agent:
        job = await through_a_kill("submit_job", command="sleep 8", gpus=0, wait_s=30, name=f"once {era}")
        assert job["deduplicated"] is True
        assert (await through_a_kill("wait_job", job_id=job["job_id"], max_wait_s=30))["state"] == "succeeded"
        jobs = (await agent.call("list_jobs", state="final"))["jobs"]
        assert [item["job_id"] for item in jobs] == [job["job_id"]]


async def test_an_unknown_outcome_is_said(make_server: Any, era: str, token_file: TokenFile) -> None:
    """The server dies with a write in its hands and does not come back."""
    server = make_server()
    waiting = asyncio.Event()

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        waiting.set()

    async with server.bridged(token_file(server.token("survivor", "sue")), era, "--patience", "0.5") as agent:
        submit = {"command": "sleep 60", "gpus": 0, "wait_s": 30}
        call = agent.client.call_tool("submit_job", submit, progress_callback=on_progress)
        submitted = asyncio.create_task(call)
        await waiting.wait()
        await asyncio.to_thread(server.stop, signal.SIGKILL)
        async with asyncio.timeout(30):
            result = await submitted
        assert result.is_error and result.structured_content is None
        text = result.content[0].text
        assert text.startswith("outcome_unknown: ") and "submit_job" in text and "before you repeat it" in text
        assert result.meta["cotenant.dev/error"]["outcome"] == "unknown"
        later = await agent.client.call_tool("quota_status", {})
        assert later.is_error and later.content[0].text.startswith("no_server: ")
        assert "Nothing was done" in later.content[0].text


async def test_a_revoked_token_is_said_and_a_new_one_taken(server: Any, era: str, token_file: TokenFile) -> None:
    name = f"renewed-{era}"
    path = token_file(server.token(name, "sue"))
    async with server.bridged(path, era) as agent:
        await agent.call("quota_status")
        server.operate("token.revoke", {"token": name})
        result = await agent.client.call_tool("quota_status", {})
        assert result.is_error and result.content[0].text.startswith("unauthorized: ")
        path.write_text(server.token(name, "sue"))
        assert (await agent.call("quota_status"))["me"]["name"] == name
        os.chmod(path, 0o600)


async def test_a_long_idle_client_goes_on(make_server: Any, era: str, token_file: TokenFile) -> None:
    """Thirty minutes without a word, shortened: sessions of the server end after one second of it."""
    server = make_server(config="[server]\nsession_idle_s = 1\n")
    ear = Ear()
    path = token_file(server.token("idler", "ida"))
    async with server.bridged(path, era, message_handler=ear.hear, elicitation_callback=yes) as agent:
        listening = await ear.listen(agent, era, "cotenant://quota/me")
        job = await agent.call("submit_job", command="sleep 60", gpus=0)
        await agent.until(job["job_id"], "running")
        await asyncio.sleep(3)  # not to wait for something: the idleness is what is tried
        while not ear.told.empty():
            ear.told.get_nowait()
        lease = await agent.call("acquire_lease", gpus=1)
        await ear.until("cotenant://quota/me")
        await agent.call("release_lease", lease_id=lease["lease_id"])
        assert (await agent.call("cancel_job", job_id=job["job_id"]))["status"] == "stopping"
        await end(listening)


async def test_a_cancelled_call_is_over_at_the_server_too(
    server: Any, tokens: dict[str, str], era: str, token_file: TokenFile
) -> None:
    async with server.bridged(token_file(tokens["alice"]), era) as alice:
        job = await alice.call("submit_job", command=f"sleep 71 # {era}", gpus=0)
        await alice.until(job["job_id"], "running")
        waiting = asyncio.Event()

        async def on_progress(done: float, total: float | None, message: str | None) -> None:
            waiting.set()

        wait = {"job_id": job["job_id"], "max_wait_s": 40}
        call = asyncio.create_task(alice.client.call_tool("wait_job", wait, progress_callback=on_progress))
        await waiting.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        asked = await alice.call("cancel_job", job_id=job["job_id"])  # the job itself went on
        await alice.call("cancel_job", job_id=job["job_id"], confirm_token=asked["confirm_token"])
