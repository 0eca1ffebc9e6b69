"""Both protocol eras over real HTTP: tools, errors, progress, questions, resources, prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mcp_types as wire
import pytest
from mcp.shared.exceptions import MCPError

from cotenant import tools


async def test_each_era_is_what_it_says(server: Any, tokens: dict[str, str], era: str) -> None:
    async with server.client(tokens["alice"], era) as agent:
        client = agent.client
        assert (client.protocol_version == "2026-07-28") == (era == "auto")
        assert client.server_info.name == "cotenant"
        assert client.server_capabilities.resources.subscribe is True
        assert client.instructions is not None and len(client.instructions.encode()) < 2048


async def test_a_lease_from_asking_to_giving_back(server: Any, tokens: dict[str, str], era: str) -> None:
    async with server.client(tokens["alice"], era) as alice, server.client(tokens["bob"], era) as bob:
        quota = await alice.call("quota_status")
        assert quota["pools"][0]["you_can_start"] == 2 and quota["me"]["name"] == "alice-agent"
        lease = await alice.call("acquire_lease", gpus=2, purpose="a test")
        assert lease["state"] == "leased" and len(lease["slots"]) == 2 and lease["fence"] >= 1
        assert lease["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        try:
            text = await bob.refused("acquire_lease", gpus=1)
            assert text.startswith("busy: ") and "alice-agent" in text and "queue" in text
            beat = await alice.call("heartbeat", lease_id=lease["lease_id"])
            assert beat["fence"] == lease["fence"] and beat["draining"] is False
            assert (await bob.refused("heartbeat", lease_id=lease["lease_id"])).startswith("not_yours: ")
            assert (await bob.refused("release_lease", lease_id=lease["lease_id"])).startswith("not_yours: ")
            shown = await bob.call("list_leases", holder="alice-agent")
            assert [item["lease_id"] for item in shown["leases"]] == [lease["lease_id"]]
            assert shown["leases"][0]["env"] is None
            claim = await bob.call("acquire_lease", gpus=1, when_full="queue")
            assert claim["state"] == "queued"

            async def reason() -> str | None:  # there from the next pass on
                waiting = (await bob.call("list_leases", state="queued"))["leases"]
                return next((item["blockers"][0]["code"] for item in waiting if item["blockers"]), None)

            assert await bob.eventually(reason) == "busy"
        finally:
            await alice.call("release_lease", lease_id=lease["lease_id"])
        granted = await bob.call("wait_job", job_id=claim["lease_id"], max_wait_s=20)
        assert granted["done"] is True and granted["state"] == "leased" and granted["fence"] > lease["fence"]
        await bob.call("heartbeat", lease_id=claim["lease_id"])
        await bob.call("release_lease", lease_id=claim["lease_id"])


async def test_a_job_from_submit_to_result(server: Any, tokens: dict[str, str], era: str) -> None:
    told: list[tuple[float, float | None, str | None]] = []

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        told.append((done, total, message))

    async with server.client(tokens["alice"], era) as alice:
        job = await alice.call(
            "submit_job",
            command="echo out; echo err >&2; sleep 0.5; exit 3",
            gpus=0,
            name="short",
            labels={"kind": era},
        )
        assert job["task"]["status"] == "working" and job["task"]["id"] == job["job_id"]
        result = await alice.client.call_tool(
            "wait_job", {"job_id": job["job_id"], "max_wait_s": 20}, progress_callback=on_progress
        )
        answer = result.structured_content
        assert answer["done"] is True and answer["state"] == "failed" and answer["exit_code"] == 3
        assert told and [item[0] for item in told] == sorted({item[0] for item in told}) and told[0][1] == 20
        assert (await alice.call("tail_logs", job_id=job["job_id"]))["lines"] == ["out"]
        assert (await alice.call("tail_logs", job_id=job["job_id"], stream="err"))["lines"] == ["err"]
        found = await alice.call("list_jobs", label=f"kind={era}", state="final")
        assert [item["job_id"] for item in found["jobs"]] == [job["job_id"]]


async def test_wait_job_comes_back_in_time_and_leaves_the_job_alone(
    server: Any, tokens: dict[str, str], era: str
) -> None:
    async with server.client(tokens["alice"], era) as alice:
        job = await alice.call("submit_job", command="sleep 60", gpus=0)
        answer = await alice.call("wait_job", job_id=job["job_id"], max_wait_s=0.4)
        assert answer["done"] is False and 0.3 <= answer["waited_s"] < 5
        await cancel(alice, job["job_id"])


async def cancel(agent: Any, job_id: str) -> dict[str, Any]:
    """Cancel a running job with the token way."""
    await agent.until(job_id, "running")
    asked = await agent.call("cancel_job", job_id=job_id)
    assert asked["status"] == "confirmation_required"
    answer: dict[str, Any] = await agent.call("cancel_job", job_id=job_id, confirm_token=asked["confirm_token"])
    assert answer["status"] == "stopping"
    await agent.until(job_id, "cancelled")
    return asked


async def test_a_confirmation_is_for_one_caller_one_job_and_once(server: Any, tokens: dict[str, str], era: str) -> None:
    async with server.client(tokens["alice"], era) as alice, server.client(tokens["bob"], era) as bob:
        one = await alice.call("submit_job", command=f"sleep 61 # {era}", gpus=0)
        two = await alice.call("submit_job", command=f"sleep 62 # {era}", gpus=0)
        await alice.until(one["job_id"], "running")
        await alice.until(two["job_id"], "running")
        token = (await alice.call("cancel_job", job_id=one["job_id"]))["confirm_token"]
        await alice.refused("cancel_job", job_id=two["job_id"], confirm_token=token)
        await alice.refused("cancel_job", job_id=one["job_id"], confirm_token="yes_invented")
        await bob.refused("cancel_job", job_id=one["job_id"], confirm_token=token)
        await bob.refused("cancel_job", job_id=one["job_id"])
        assert (await alice.call("get_job", job_id=one["job_id"]))["state"] == "running"
        assert (await alice.call("cancel_job", job_id=one["job_id"], confirm_token=token))["status"] == "stopping"
        await alice.until(one["job_id"], "cancelled")
        assert (await alice.call("cancel_job", job_id=one["job_id"]))["status"] == "already_final"
        await cancel(alice, two["job_id"])


@pytest.mark.parametrize(
    ("action", "content", "status"),
    [
        ("accept", {"confirm": True}, "stopping"),
        ("accept", {"confirm": False}, "not_cancelled"),
        ("decline", None, "not_cancelled"),
        ("cancel", None, "not_cancelled"),
    ],
)
async def test_a_client_that_can_ask_is_asked(
    server: Any, tokens: dict[str, str], era: str, action: Any, content: Any, status: str
) -> None:
    asked: list[str] = []

    async def answer(context: Any, params: Any) -> wire.ElicitResult:
        asked.append(params.message)
        assert set(params.requested_schema["properties"]) == {"confirm"}
        return wire.ElicitResult(action=action, content=content)

    async with server.client(tokens["alice"], era, elicitation_callback=answer) as alice:
        job = await alice.call("submit_job", command=f"sleep 63 # {era} {action} {content}", gpus=0, name='a "name"')
        await alice.until(job["job_id"], "running")
        got = await alice.call("cancel_job", job_id=job["job_id"])
        assert got["status"] == status
        assert len(asked) == 1 and job["job_id"] in asked[0] and '"a \\"name\\""' in asked[0]
    async with server.client(tokens["alice"], era) as alice:
        if status == "not_cancelled":
            assert (await alice.call("get_job", job_id=job["job_id"]))["state"] == "running"
            await cancel(alice, job["job_id"])


async def test_an_unknown_tool_is_misuse_of_the_protocol(server: Any, tokens: dict[str, str], era: str) -> None:
    async with server.client(tokens["alice"], era) as alice:
        with pytest.raises(MCPError) as caught:
            await alice.client.call_tool("acquire_leases", {})
        assert caught.value.code == wire.INVALID_PARAMS and "acquire_lease?" in caught.value.message


async def test_resources_show_what_the_tools_show(server: Any, tokens: dict[str, str], era: str) -> None:
    async with server.client(tokens["alice"], era) as alice:
        lease = await alice.call("acquire_lease", gpus=1)
        job = await alice.call("submit_job", command="echo seen; sleep 60", gpus=0)
        await alice.until(job["job_id"], "running")
        try:
            listed = {item.uri: item for item in (await alice.client.list_resources()).resources}
            for uri in (
                "cotenant://gpus", "cotenant://quota/me", "cotenant://events", "cotenant://hosts/local",
                "cotenant://hosts/local/gpus/0", "cotenant://queues/default", f"cotenant://leases/{lease['lease_id']}",
                f"cotenant://jobs/{job['job_id']}", f"cotenant://jobs/{job['job_id']}/log",
            ):  # fmt: skip
                assert uri in listed, uri
                contents = (await alice.client.read_resource(uri)).contents
                assert contents[0].mime_type == "application/json"
                json.loads(contents[0].text)
            shown = json.loads((await alice.client.read_resource(f"cotenant://jobs/{job['job_id']}")).contents[0].text)
            got = await alice.call("get_job", job_id=job["job_id"])
            assert shown.keys() == got.keys() and shown["attempts"][0]["fence"] == got["attempts"][0]["fence"]
            templates = (await alice.client.list_resource_templates()).resource_templates
            assert len(templates) == 7
        finally:
            await alice.call("release_lease", lease_id=lease["lease_id"])
            await cancel(alice, job["job_id"])


@pytest.mark.parametrize(
    "uri",
    [
        "cotenant://jobs/job_none",
        "cotenant://hosts/nowhere",
        "cotenant://queues/none",
        "cotenant://jobs/a/b/c",
        "file:///etc/passwd",
    ],
)
async def test_what_is_not_there_is_said(server: Any, tokens: dict[str, str], era: str, uri: str) -> None:
    async with server.client(tokens["alice"], era) as alice:
        with pytest.raises(MCPError) as caught:
            await alice.client.read_resource(uri)
        assert caught.value.code == wire.INVALID_PARAMS
        assert caught.value.data["uri"] == uri


async def test_prompts_and_completions(server: Any, tokens: dict[str, str], era: str) -> None:
    async with server.client(tokens["alice"], era) as alice:
        prompts = (await alice.client.list_prompts()).prompts
        assert "share_politely" in [item.name for item in prompts]
        text = (await alice.client.get_prompt("share_politely", {"unknown": "x"})).messages[0].content.text
        for rule in ("quota_status", "do not hammer", "Release what you do not use", "preemption", "without a lease"):
            assert rule in text
        with pytest.raises(MCPError) as caught:
            await alice.client.get_prompt("nope")
        assert caught.value.code == wire.INVALID_PARAMS
        found = await alice.client.complete(
            wire.ResourceTemplateReference(uri="cotenant://queues/{pool}"), {"name": "pool", "value": "de"}
        )
        assert found.completion.values == ["default"]


async def test_an_answer_counts_once_even_when_it_is_sent_again(server: Any, tokens: dict[str, str]) -> None:
    """2026-07-28 carries the answer in the repeated call; a replay of that call must not cancel anything more."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {"elicitation": {"form": {}}},
    }
    headers = {
        "Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call",
        "Mcp-Name": "cancel_job",
    }  # fmt: skip

    def cancel(job_id: str, token: str, **more: Any) -> dict[str, Any]:
        params = {"name": "cancel_job", "arguments": {"job_id": job_id}, "_meta": meta, **more}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        status, answer, _ = server.post("/mcp", body, token, headers)
        assert status == 200
        result: dict[str, Any] = answer["result"]
        return result

    async with server.client(tokens["alice"]) as alice:
        job = (await alice.call("submit_job", command="sleep 64", gpus=0))["job_id"]
        await alice.until(job, "running")
        asked = cancel(job, tokens["alice"])
        assert asked["resultType"] == "input_required" and list(asked["inputRequests"]) == ["confirm"]
        yes = {
            "inputResponses": {"confirm": {"action": "accept", "content": {"confirm": True}}},
            "requestState": asked["requestState"],
        }
        forged = cancel(job, tokens["alice"], **{**yes, "requestState": "yes_" + "0" * 26})
        assert forged["isError"] is True
        assert cancel(job, tokens["bob"], **yes)["isError"] is True
        assert cancel(job, tokens["alice"], **yes)["structuredContent"]["status"] == "stopping"
        other = (await alice.call("submit_job", command="sleep 65", gpus=0))["job_id"]
        await alice.until(other, "running")
        assert cancel(other, tokens["alice"], **yes)["isError"] is True
        asked_again = await alice.call("cancel_job", job_id=other)
        await alice.call("cancel_job", job_id=other, confirm_token=asked_again["confirm_token"])
        await alice.until(job, "cancelled")
        await alice.until(other, "cancelled")


async def test_a_request_id_makes_writes_safe_to_repeat(server: Any, tokens: dict[str, str], era: str) -> None:
    async with server.client(tokens["alice"], era) as alice:
        first = await alice.call("acquire_lease", gpus=1, request_id=f"lease-{era}")
        again = await alice.call("acquire_lease", gpus=1, request_id=f"lease-{era}")
        assert again["lease_id"] == first["lease_id"] and again["deduplicated"] is True
        await alice.refused("acquire_lease", gpus=2, request_id=f"lease-{era}")
        await alice.call("release_lease", lease_id=first["lease_id"])
        assert (await alice.call("release_lease", lease_id=first["lease_id"]))["state"] == "released"
        job = await alice.call("submit_job", command="true", gpus=0, request_id=f"job-{era}")
        again = await alice.call("submit_job", command="true", gpus=0, request_id=f"job-{era}")
        assert again["job_id"] == job["job_id"] and again["deduplicated"] is True


async def test_every_state_filter_that_is_advertised_is_taken(server: Any, tokens: dict[str, str]) -> None:
    """A filter that the schema offers and the view refuses would send agents in circles."""
    async with server.client(tokens["alice"]) as alice:
        listed = {tool.name: tool.input_schema["properties"] for tool in (await alice.client.list_tools()).tools}
        for name in ("list_gpus", "list_jobs", "list_leases", "list_events"):
            for argument, schema in listed[name].items():
                for value in next((item["enum"] for item in [schema, *schema.get("anyOf", [])] if "enum" in item), []):
                    await alice.call(name, **{argument: value})


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
def test_each_older_protocol_is_served_as_itself(server: Any, tokens: dict[str, str], version: str) -> None:
    """By plain frames, as a client of that time sends them; the text alone must be enough for those that know no more."""

    def ask(body: dict[str, Any], session: str | None) -> tuple[dict[str, Any], str]:
        headers = {"Accept": "application/json, text/event-stream"}
        if session is not None:
            headers |= {"Mcp-Session-Id": session}
            if version >= "2025-06-18":
                headers["MCP-Protocol-Version"] = version
        status, answer, got = server.post("/mcp", {"jsonrpc": "2.0", **body}, tokens["alice"], headers)
        assert status in (200, 202), answer
        if isinstance(answer, str):  # a stream of events
            data = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
            answer = json.loads(data[-1]) if data else {}
        return answer, got.get("mcp-session-id", "")

    hello = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}}
    answer, session = ask({"id": 1, "method": "initialize", "params": hello}, None)
    assert answer["result"]["protocolVersion"] == version and session
    ask({"method": "notifications/initialized"}, session)
    listed, _ = ask({"id": 2, "method": "tools/list"}, session)
    assert len(listed["result"]["tools"]) == len(tools.ALL)
    done, _ = ask({"id": 3, "method": "tools/call", "params": {"name": "quota_status", "arguments": {}}}, session)
    assert json.loads(done["result"]["content"][0]["text"])["me"]["name"] == "alice-agent"
    refused, _ = ask(
        {"id": 4, "method": "tools/call", "params": {"name": "get_job", "arguments": {"job_id": "x"}}}, session
    )
    assert refused["result"]["isError"] is True and refused["result"]["content"][0]["text"].startswith("no_such_job: ")


async def test_the_cursor_of_a_wait_tells_what_happened_meanwhile(
    server: Any, tokens: dict[str, str], era: str, tmp_path: Path
) -> None:
    go = tmp_path / "go"

    async def waiting_began(done: float, total: float | None, message: str | None) -> None:
        go.touch()

    async with server.client(tokens["alice"], era) as alice:
        job = (await alice.call("submit_job", command=f"until [ -e {go} ]; do sleep 0.05; done", gpus=0))["job_id"]
        wait = {"job_id": job, "max_wait_s": 40}
        answer = (await alice.client.call_tool("wait_job", wait, progress_callback=waiting_began)).structured_content
        assert answer["done"] is True
        events = (await alice.call("list_events", since=answer["cursor"], job_id=job))["events"]
        assert "job.succeeded" in [item["type"] for item in events]
