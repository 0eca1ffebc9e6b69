"""Who gets in, what each token sees, and the door for people."""

from __future__ import annotations

import http.client
import json
import urllib.request
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from cotenant import tools

CORE = {
    "quota_status", "list_gpus", "acquire_lease", "heartbeat", "release_lease", "submit_job", "list_jobs", "get_job", "explain_job",
    "wait_job", "tail_logs", "cancel_job", "list_events",
}  # fmt: skip
PING = {
    "jsonrpc": "2.0", "id": 1, "method": "tools/list",
    "params": {"_meta": {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}},
}  # fmt: skip
HEADERS = {
    "Accept": "application/json, text/event-stream",
    "MCP-Protocol-Version": "2026-07-28",
    "Mcp-Method": "tools/list",
}


@pytest.mark.parametrize("token", [None, "", "ctn_nonsense", "x" * 5000])
def test_without_a_living_token_the_answer_says_what_to_do(server: Any, token: str | None) -> None:
    for path in ("/mcp", "/operate/token.list"):
        status, body, headers = server.post(path, PING, token, HEADERS)
        assert status == 401 and headers["www-authenticate"].startswith("Bearer")
        assert isinstance(body, dict) and "cotenant token create" in json.dumps(body["error"])


@pytest.mark.parametrize(
    "path",
    ["/.well-known/oauth-protected-resource", "/.well-known/oauth-authorization-server", "/authorize", "/register"],
)
def test_there_are_no_oauth_routes(server: Any, path: str) -> None:
    assert server.post(path, {})[0] == 404


async def test_tokens_see_only_what_they_may_use(server: Any, tokens: dict[str, str], era: str) -> None:
    async def names(token: str, query: str = "") -> set[str]:
        async with server.client(token, era, query) as agent:
            return {tool.name for tool in (await agent.client.list_tools()).tools}

    everything = {tool.name for tool in tools.ALL}
    reading = {tool.name for tool in tools.ALL if tool.scope == "read"}
    assert await names(tokens["alice"]) == everything
    assert await names(tokens["alice"], "?tools=core") == CORE
    assert await names(tokens["reader"]) == reading
    assert await names(tokens["reader"], "?tools=core") == reading & CORE
    assert await names(tokens["reporter"]) == set()
    core = server.token(f"core-agent-{era}", "carl", toolset="core")
    assert await names(core) == CORE
    assert await names(core, "?tools=full") == everything


async def test_a_reading_token_changes_nothing(server: Any, tokens: dict[str, str], era: str) -> None:
    async with server.client(tokens["reader"], era) as reader:
        before = (await reader.call("list_events", limit=1))["cursor"]
        for tool in tools.ALL:
            if tool.scope == "write":
                text = await reader.refused(tool.name)
                assert text.startswith("forbidden: ") and "write" in text
        after = await reader.call("list_events", since=before)
        assert [item for item in after["events"] if item["caller"] == "reader-agent"] == []


async def test_a_token_without_read_gets_no_resources(server: Any, tokens: dict[str, str], era: str) -> None:
    async with server.client(tokens["reporter"], era) as reporter:
        for ask in (reporter.client.list_resources, reporter.client.list_prompts):
            with pytest.raises(MCPError, match="forbidden"):
                await ask()
        with pytest.raises(MCPError, match="forbidden"):
            await reporter.client.read_resource("cotenant://gpus")
        assert (await reporter.refused("quota_status")).startswith("forbidden: ")


def test_operate_is_for_people(server: Any, tokens: dict[str, str]) -> None:
    status, body, _ = server.post("/operate/token.list", {"args": {}, "reason": "r"}, tokens["alice"])
    assert status == 403 and body["error"]["code"] == "people_only"
    status, body, _ = server.post("/operate/nonsense", {"args": {}, "reason": "r"}, server.local_token)
    assert status == 404 and body["error"]["code"] == "no_such_verb"
    status, body, _ = server.post("/operate/lease.evict", {"args": {"lease_id": "lse_none"}}, server.local_token)
    assert status == 400 and "reason" in body["error"]["text"]
    for wrong in (
        b"{",
        b"[]",
        b'{"args": 3, "reason": "r"}',
        b'{"reason": 5}',
        b'{"extra": 1, "reason": "r"}',
        b"[" * 100_000,
    ):
        status, body, _ = server.post("/operate/token.list", wrong, server.local_token)
        assert status == 400, (wrong[:40], body)
    assert server.operate("token.list", {})


def test_healthz_needs_no_token(server: Any) -> None:
    with urllib.request.urlopen(server.url + "/healthz", timeout=10) as response:
        assert json.load(response)["ok"] is True


def test_a_body_above_the_limit_is_refused_in_words(server: Any, tokens: dict[str, str]) -> None:
    big = {**PING, "params": {**PING["params"], "x": "y" * (4 * 1024 * 1024)}}
    for path, token in (("/mcp", tokens["alice"]), ("/operate/token.list", server.local_token)):
        status, body, _ = server.post(path, big, token, HEADERS)
        assert status == 413 and "4 MiB" in json.dumps(body["error"]), body


def test_a_body_without_a_length_is_limited_too(server: Any, tokens: dict[str, str]) -> None:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        chunks = (b"x" * 65536 for _ in range(80))  # 5 MiB, chunked because an iterator has no length
        headers = {**HEADERS, "Authorization": f"Bearer {tokens['alice']}", "Content-Type": "application/json"}
        connection.request("POST", "/mcp", chunks, headers, encode_chunked=True)
        response = connection.getresponse()
        assert response.status == 413 and b"4 MiB" in response.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("name", "value", "status"), [("Host", "evil.example", 421), ("Origin", "http://evil.example", 403)]
)
def test_other_hosts_and_origins_are_refused(
    server: Any, tokens: dict[str, str], name: str, value: str, status: int
) -> None:
    assert server.post("/mcp", PING, tokens["alice"], {**HEADERS, name: value})[0] == status
    assert server.post("/operate/token.list", {"reason": "r"}, server.local_token, {name: value})[0] == status
    assert server.post("/mcp", PING, tokens["alice"], {**HEADERS, "Origin": "http://localhost:3000"})[0] == 200


async def test_a_revoked_token_is_out_at_once(server: Any, era: str) -> None:
    token = server.token(f"short-lived-{era}", "sam")
    async with server.client(token, era) as agent:
        await agent.call("quota_status")
        server.operate("token.revoke", {"token": f"short-lived-{era}"})
        with pytest.raises(MCPError, match="unauthorized"):
            await agent.client.call_tool("quota_status", {})
