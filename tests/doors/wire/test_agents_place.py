"""Where an agent sits, as the bridge tells it: shown as foreign text, its directory only to those who may see inside."""

from __future__ import annotations

import urllib.parse
from typing import Any

import pytest

META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}


def call(server: Any, token: str, tool: str, client: str | None = "teller", **place: str) -> dict[str, Any]:
    """One tool call that says where it comes from."""
    info = {"io.modelcontextprotocol/clientInfo": {"name": client, "version": "1"}} if client else {}
    params = {"name": tool, "arguments": {}, "_meta": {**META, **info}}
    headers = {"Accept": "*/*", "MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": tool}
    headers |= {f"Cotenant-Agent-{key}": urllib.parse.quote(value) for key, value in place.items()}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    status, answer, _ = server.post("/mcp", body, token, headers)
    assert status == 200 and isinstance(answer, dict)
    result: dict[str, Any] = answer["result"]["structuredContent"]
    return result


def shown(server: Any, token: str, name: str) -> dict[str, Any]:
    """One agent as the holder of `token` sees it."""
    agents = call(server, token, "list_agents", client=None)["agents"]
    return next(item for item in agents if item["name"] == name)


def test_the_directory_is_for_those_who_may_see_inside(server: Any, tokens: dict[str, str]) -> None:
    call(server, tokens["alice"], "quota_status", host="box", cwd="/home/alice/thesis")
    for token in (tokens["alice"], server.token("alice-second", "alice"), server.local_token):
        seen = shown(server, token, "alice-agent")
        assert (seen["host"], seen["cwd"], seen["client"]) == ("box", "/home/alice/thesis", "teller 1")
    seen = shown(server, tokens["bob"], "alice-agent")
    assert seen["host"] == "box" and seen["cwd"] is None


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ("a\x1b[31m\u202eb\n", "a [31m b"),
        ("/data/token=hf_abcdefghijklmnopqrstuvwx", "/data/token=***"),
        ("ü" * 5000, "ü" * 200),
        ("", None),
    ],
)
def test_it_is_foreign_text(server: Any, tokens: dict[str, str], said: str, seen: str | None) -> None:
    call(server, tokens["alice"], "quota_status", client="other", host="h", cwd=said)
    found = shown(server, tokens["alice"], "alice-agent")["cwd"]
    assert found == seen or (seen is not None and found.startswith(seen[:200]) and len(found) <= 240)


def test_it_is_forgotten_with_the_program_that_said_it(server: Any, tokens: dict[str, str]) -> None:
    call(server, tokens["alice"], "quota_status", client="bridged", host="box", cwd="/one")
    call(server, tokens["alice"], "quota_status", client="bridged")
    assert shown(server, tokens["alice"], "alice-agent")["cwd"] == "/one"
    call(server, tokens["alice"], "quota_status", client="another")
    seen = shown(server, tokens["alice"], "alice-agent")
    assert seen["client"] == "another 1" and seen["host"] is None and seen["cwd"] is None
