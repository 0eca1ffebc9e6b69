"""Prompts, what is offered for their arguments, and the list of live resources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mcp_types as wire
import pytest
from mcp.shared.exceptions import MCPError

from cotenant import tools
from cotenant.prompts import Prompts
from cotenant.server import errors

TEMPLATE = "cotenant://{}"
NAMES = {tool.name for tool in tools.ALL}
WORDS = {
    name for tool in tools.ALL for name in (*tool.arguments.model_fields, *tool.output_schema.get("properties", {}))
}


def resource(path: str) -> wire.ResourceTemplateReference:
    return wire.ResourceTemplateReference(uri=TEMPLATE.format(path))


async def offered(agent: Any, ref: Any, name: str, begun: str = "", **given: str) -> list[str]:
    answer = await agent.client.complete(ref, {"name": name, "value": begun}, given or None)
    return list(answer.completion.values)


async def test_what_is_there_is_offered(server: Any, tokens: dict[str, str], era: str) -> None:
    async with server.client(tokens["alice"], era) as alice, server.client(tokens["bob"]) as bob:
        job = (await alice.call("submit_job", command="sleep 60", gpus=0, name="to complete"))["job_id"]
        lease = (await alice.call("acquire_lease"))["lease_id"]
        theirs = (await bob.call("submit_job", command="true", gpus=0, name="bob's"))["job_id"]
        try:
            assert await offered(alice, resource("hosts/{host}"), "host", "lo") == ["local"]
            assert await offered(alice, resource("hosts/{host}"), "host", "x") == []
            assert await offered(alice, resource("hosts/{host}/gpus/{index}"), "index", host="local") == ["0", "1"]
            assert await offered(alice, resource("hosts/{host}/gpus/{index}"), "index", host="nowhere") == []
            assert await offered(alice, resource("queues/{pool}"), "pool") == ["default"]
            jobs = await offered(alice, resource("jobs/{id}"), "id", "job_")
            assert job in jobs and lease not in jobs and theirs not in jobs
            assert job in await offered(alice, resource("jobs/{id}/log"), "id", job[:-2])
            leases = await offered(alice, resource("leases/{id}"), "id")
            assert lease in leases and all(item.startswith("lse_") for item in leases)
            assert theirs in await offered(bob, resource("jobs/{id}"), "id")
            training = wire.PromptReference(name="run_training")
            assert await offered(alice, training, "pool", "de") == ["default"]
            assert await offered(alice, training, "command", "py") == []
            with pytest.raises(MCPError, match="Unknown prompt"):
                await offered(alice, wire.PromptReference(name="none"), "pool")
            listed = {str(item.uri) for item in (await alice.client.list_resources()).resources}
            assert {f"cotenant://jobs/{job}", f"cotenant://jobs/{job}/log", f"cotenant://leases/{lease}"} <= listed
            assert f"cotenant://jobs/{theirs}" not in listed and "cotenant://queues/default" in listed
        finally:
            await alice.call("release_lease", lease_id=lease)
            asked = await alice.call("cancel_job", job_id=job)
            await alice.call("cancel_job", job_id=job, confirm_token=asked["confirm_token"])
            await alice.until(job, "cancelled")


async def test_pools_that_a_token_does_not_reach_are_not_offered(make_server: Any) -> None:
    server = make_server(config="[pools.a]\n[pools.b]\n[server]\ndefault_pool = 'a'\n")
    async with server.client(server.token("bound", "alice", pools=["b"])) as bound:
        assert await offered(bound, resource("queues/{pool}"), "pool") == ["b"]


async def test_prompts_take_what_they_are_given(server: Any, tokens: dict[str, str], era: str) -> None:
    async with server.client(tokens["alice"], era) as alice:
        listed = {prompt.name: prompt for prompt in (await alice.client.list_prompts()).prompts}
        assert {"share_politely", "run_training"} <= set(listed)
        for name, prompt in listed.items():
            assert prompt.title and prompt.description, name
            given = {item.name: f"given {item.name}" for item in prompt.arguments or ()}
            said = (await alice.client.get_prompt(name, given)).messages[0].content.text
            assert all(value in said for value in given.values())
            assert "$" not in said
        assert "- gpus: \n" in (await alice.client.get_prompt("run_training", {})).messages[0].content.text
        with pytest.raises(MCPError, match="Unknown prompt"):
            await alice.client.get_prompt("none", {})


@pytest.mark.parametrize("name", [item["name"] for item in Prompts().listing()])
def test_prompts_name_only_what_there_is(name: str) -> None:
    """Every word with an underscore is a tool, an argument, a field or a code that the server gives."""
    text = Prompts().find(name, {}) or ""
    assert len(text) < 6000
    source = "\n".join(file.read_text() for file in sorted(Path(errors.__file__).parent.rglob("*.py")))
    for word in set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)):
        assert word in NAMES or word in WORDS or re.search(rf"\b{word}\b", source), word
