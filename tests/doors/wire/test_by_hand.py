"""A request put together by hand is told which line it lacks, until it has them all; the page's own example works."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
HEADERS = {
    "Accept": "application/json, text/event-stream",
    "MCP-Protocol-Version": "2026-07-28",
    "Mcp-Method": "tools/call",
    "Mcp-Name": "quota_status",
}


def _body(**meta: Any) -> dict[str, Any]:
    params = {"name": "quota_status", "arguments": {}, **meta}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


def _told(answer: Any) -> str:
    assert isinstance(answer, dict), answer
    return str(answer["error"]["message"])


@pytest.mark.parametrize("lacking", ["MCP-Protocol-Version", "Mcp-Method", "Mcp-Name", "Accept", "Content-Type"])
def test_a_missing_header_is_named_with_the_line_to_add(server: Any, tokens: dict[str, str], lacking: str) -> None:
    headers = {key: value for key, value in {"Content-Type": "application/json", **HEADERS}.items() if key != lacking}
    if lacking in ("Accept", "Content-Type"):
        headers[lacking] = "text/plain"
    status, answer, _ = server.post("/mcp", _body(_meta=META), tokens["alice"], headers)
    assert status in (400, 406, 415)
    whole = {"Content-Type": "application/json", **HEADERS}[lacking]
    assert f"`{lacking}: {whole}`" in _told(answer)
    others = [f"`{key}:" for key in HEADERS if key != lacking]
    assert not [key for key in others if key in _told(answer)], "what is there is not asked for"


def test_step_by_step_a_bare_request_becomes_a_whole_one(server: Any, tokens: dict[str, str]) -> None:
    """What each refusal says to add is enough to get an answer."""
    headers: dict[str, str] = {}
    body = _body()
    for _ in range(4):
        status, answer, _ = server.post("/mcp", body, tokens["alice"], headers)
        if status == 200:
            break
        told = _told(answer)
        headers |= dict(line.split(": ", 1) for line in re.findall(r"`([A-Za-z-]+: [^`]+)`", told))
        if found := re.search(r"params\._meta: (\{.*\})\.", told):
            body["params"]["_meta"] = json.loads(found[1])
    assert status == 200, answer
    assert "quota_status" in headers["Mcp-Name"]


@pytest.mark.parametrize("body", [b"{}", b"[]", b"1", b"{not json", b'{"method": 5}'])
def test_a_body_that_is_no_request_is_said_to_be_none(server: Any, tokens: dict[str, str], body: bytes) -> None:
    status, answer, _ = server.post("/mcp", body, tokens["alice"])
    assert status in (400, 406)
    assert "must be a JSON-RPC request" in _told(answer) and "None" not in _told(answer)


def test_other_refusals_keep_their_words_and_codes(server: Any, tokens: dict[str, str]) -> None:
    status, answer, _ = server.post("/mcp", b"{not json", tokens["alice"], HEADERS)
    assert status == 400 and isinstance(answer, dict) and answer["error"]["code"] == -32700
    hostile = _body(_meta=META)
    hostile["params"]["name"] = "a`\nX: y"
    status, answer, _ = server.post("/mcp", hostile, tokens["alice"], HEADERS)
    assert "\n" not in _told(answer) and "X: y" not in _told(answer), "what was sent is not repeated as a line to add"
