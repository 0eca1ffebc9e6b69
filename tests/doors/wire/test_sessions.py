"""Sessions of older clients that are over: who is told so with a 404, and who goes on without noticing."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message

from cotenant.server.mcp import sessions

CODEX = "codex-mcp-client"
LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}


def post(server: Any, token: str, body: Any, session: str | None = None, **headers: str) -> tuple[int, str, str]:
    """(status, body, session id of the answer)."""
    sent = {"Accept": "application/json, text/event-stream", **headers}
    if session is not None:
        sent |= {"Mcp-Session-Id": session, "MCP-Protocol-Version": "2025-06-18"}
    status, answer, got = server.post("/mcp", body, token, sent)
    return status, answer if isinstance(answer, str) else json.dumps(answer), got.get("mcp-session-id", "")


def hello(name: str) -> dict[str, Any]:
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": name, "version": "1"}}
    return {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}


def opened(server: Any, token: str, name: str) -> str:
    status, _, session = post(server, token, hello(name))
    assert status == 200 and session
    assert post(server, token, {"jsonrpc": "2.0", "method": "notifications/initialized"}, session)[0] == 202
    status, answer, again = post(server, token, LIST, session)
    assert status == 200 and "quota_status" in answer
    assert again in ("", session), "clients take the id from any answer"
    return session


def delete(server: Any, token: str, session: str) -> int:
    request = urllib.request.Request(server.url + "/mcp", method="DELETE")
    request.add_header("Authorization", f"Bearer {token}")
    request.add_header("Mcp-Session-Id", session)
    with urllib.request.urlopen(request, timeout=20) as response:
        return int(response.status)


def test_after_a_restart_each_client_gets_what_it_can_deal_with(make_server: Callable[..., Any]) -> None:
    server = make_server()
    token = server.token("old-timer", "alice")
    stays, starts_anew = opened(server, token, "some-client"), opened(server, token, CODEX)
    server.stop()
    server.start()
    assert post(server, token, LIST, stays)[0] == 200
    status, answer, _ = post(server, token, LIST, starts_anew)
    assert status == 404 and "Session not found" in answer
    assert opened(server, token, CODEX) != starts_anew
    assert post(server, token, LIST, stays)[0] == 200, "for good"


@pytest.mark.parametrize("name", ["some-client", CODEX])
def test_a_session_that_its_client_ended_is_over(server: Any, tokens: dict[str, str], name: str) -> None:
    session, other = opened(server, tokens["alice"], name), opened(server, tokens["alice"], name)
    assert delete(server, tokens["alice"], session) == 200
    assert post(server, tokens["alice"], LIST, session)[0] == 404
    assert post(server, tokens["alice"], LIST, other)[0] == 200


def test_a_session_that_ran_out_is_like_one_of_before_a_restart(make_server: Callable[..., Any]) -> None:
    """Thirty minutes by default; shortened here to a second."""
    server = make_server(config="[server]\nsession_idle_s = 1\n")
    token = server.token("sleeper", "alice")
    stays, starts_anew = opened(server, token, "some-client"), opened(server, token, CODEX)
    end = time.monotonic() + 20
    while True:  # asking keeps a session alive, so each look is at a time when it would have ended
        time.sleep(1.5)
        status = post(server, token, LIST, starts_anew)[0]
        if status == 404:
            break
        assert time.monotonic() < end, status
    assert post(server, token, LIST, stays)[0] == 200


@pytest.mark.parametrize("name", ["some-client", CODEX])
def test_a_standing_stream_ends_with_its_token(server: Any, name: str) -> None:
    token = server.token(f"holder-{name}", "sue")
    session = opened(server, token, name)
    request = urllib.request.Request(server.url + "/mcp", method="GET")
    for key, value in {
        "Authorization": f"Bearer {token}", "Mcp-Session-Id": session, "Accept": "text/event-stream",
        "MCP-Protocol-Version": "2025-06-18",
    }.items():  # fmt: skip
        request.add_header(key, value)
    with urllib.request.urlopen(request, timeout=20) as stream:
        assert stream.status == 200
        server.operate("token.revoke", {"token": f"holder-{name}"})
        assert b"quota" not in stream.read(), "it ends, with nothing more in it"


def test_white_space_around_a_header_is_no_part_of_it(server: Any, tokens: dict[str, str]) -> None:
    call = {"name": "quota_status", "arguments": {}}
    for name, code in (("  quota_status\t ", 200), ("quota status", 400), ("quota_statu", 400), ("QUOTA_STATUS", 400)):
        status, _ = server.modern(tokens["alice"], "tools/call", call, headers={"Mcp-Name": name})
        assert status == code, name


# ---- the parts by themselves ----------------------------------------------------------------------


async def _first(*parts: bytes, end: bool = True) -> tuple[bool, bytes]:
    messages: list[Message] = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) or not end}
        for number, part in enumerate(parts, 1)
    ]
    messages.append({"type": "http.disconnect"})

    async def receive() -> Message:
        return messages.pop(0)

    anew, again = await sessions.opening(receive)
    read = b""
    while (message := await again())["type"] == "http.request":
        read += message["body"]
    return anew, read


async def test_the_first_request_is_looked_at_and_passed_on_whole() -> None:
    codex = json.dumps(hello(CODEX)).encode()
    assert await _first(codex) == (True, codex)
    assert await _first(codex[:50], codex[50:]) == (True, codex)
    for other in (
        json.dumps(hello("vscode")).encode(),
        b"",
        b"codex-mcp-client",
        b'"codex-mcp-client',
        b'["codex-mcp-client"]',
        b'{"method":"initialize","params":"codex-mcp-client"}',
        b'{"method":"tools/call","params":{"clientInfo":{"name":"codex-mcp-client"}}}',
        b'{"method":"initialize","params":{"clientInfo":{"name":["codex-mcp-client"]}}}',
        b"[" * 100_000 + b"codex-mcp-client",
        b"\xff\xfecodex-mcp-client",
    ):
        assert await _first(other) == (False, other)
    assert await _first(codex[:50], end=False) == (False, codex[:50]), "a client that went away in the middle"


def test_what_is_remembered_of_ended_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MAX_ENDED", 2)
    ended = sessions.Ended()
    for session in ("a", "b", "c"):
        ended.add(session)
    assert "a" not in ended and "b" in ended and "c" in ended
    assert sessions.unmarked(sessions.marked("x")) == ("x", True) and sessions.unmarked("x-rest") == ("x-rest", False)
