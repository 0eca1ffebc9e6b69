"""Frames and headers that no client would send: each is answered soon, in words, and never with a 500 or a traceback.

The token may only read, so nothing that is made up here can start or stop anything.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

#: Generous, because other programs may be busy here; a hang is for ever.
ANSWER_S = 20
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

VERSION = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
META = {VERSION: "2026-07-28", CAPABILITIES: {}}
METHODS = [
    "initialize", "server/discover", "tools/list", "tools/call", "resources/list", "resources/read", "ping",
    "resources/templates/list", "resources/subscribe", "resources/unsubscribe", "prompts/list", "prompts/get",
    "completion/complete", "subscriptions/listen", "tasks/get", "tasks/update", "tasks/cancel", "tasks/list",
    "logging/setLevel", "notifications/initialized", "notifications/cancelled", "notifications/progress", "",
]  # fmt: skip
TOOLS = ["quota_status", "list_gpus", "get_job", "list_jobs", "tail_logs", "list_events", "wait_job", "list_leases"]

words = st.text(max_size=30) | st.sampled_from(["\ud800", "\x00", "é" * 40, "'; DROP TABLE job; --", "../../etc", "💥"])
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | words
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=12
)
arguments = st.dictionaries(
    st.sampled_from(["job_id", "limit", "cursor", "since", "state", "max_wait_s", "pool", "lines", "stream"]) | words,
    values,
    max_size=4,
)
params = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(TOOLS) | values,
        "arguments": arguments | values,
        "uri": st.sampled_from(["cotenant://gpus", "cotenant://jobs/x", "cotenant://hosts/local/gpus/9"]) | values,
        "taskId": values,
        "notifications": values,
        "ref": values,
        "argument": values,
        "cursor": values,
        "inputResponses": values,
        "requestState": values,
        "capabilities": values,
        "clientInfo": values,
        "protocolVersion": st.sampled_from(["2025-06-18", "2026-07-28"]) | values,
        "_meta": st.just(META)
        | st.fixed_dictionaries(
            {},
            optional={
                VERSION: values,
                CAPABILITIES: values,
                "progressToken": values,
                "io.modelcontextprotocol/x": values,
            },
        )
        | values,
    },
)
frames = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0") | values, "method": st.sampled_from(METHODS) | words},
    optional={"id": st.integers(0, 9) | values, "params": params | values, "result": values, "error": values},
)


class Wire:
    """Requests as bytes, with a token that may read."""

    def __init__(self, server: Any, token: str) -> None:
        address = urlsplit(server.url)
        self._host, self._port = address.hostname or "", address.port or 0
        self._token = token

    def ask(
        self, body: bytes, headers: dict[str, str], method: str = "POST", path: str = "/mcp"
    ) -> tuple[int, str, dict[str, str]]:
        """(status, as much of the body as tells what the answer is, headers)."""
        with contextlib.closing(http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_S)) as connection:
            sent = {
                "Authorization": f"Bearer {self._token}", "Content-Type": "application/json",
                "Accept": "application/json, text/event-stream", **headers,
            }  # fmt: skip
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            told = {key.lower(): value for key, value in answer.getheaders()}
            if told.get("content-type", "").startswith("text/event-stream"):
                line = b""
                # A stream that was asked for stays open and may be silent; only what it says is looked at.
                if connection.sock is not None:
                    connection.sock.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    while not line.startswith(b"data: {") and (line := answer.readline()):
                        pass
                return answer.status, line.removeprefix(b"data: ").decode("utf-8", "replace"), told
            return answer.status, answer.read().decode("utf-8", "replace"), told

    def raw(self, data: bytes) -> bytes:
        """What comes back until the connection is closed or nothing more comes."""
        out = b""
        with contextlib.closing(socket.create_connection((self._host, self._port), ANSWER_S)) as peer:
            with contextlib.suppress(OSError):
                peer.sendall(data)
                peer.shutdown(socket.SHUT_WR)
                while part := peer.recv(65536):
                    out += part
        return out

    def in_order(self, status: int, text: str) -> None:
        """The one rule of this page."""
        assert status < 500, (status, text[:500])
        assert "Traceback" not in text and 'File "' not in text and "pydantic" not in text, text[:500]
        with contextlib.suppress(ValueError):
            told = json.loads(text)
            if isinstance(told, dict) and isinstance(error := told.get("error"), dict):
                assert error.get("code") != -32603 or "unavailable" in str(error.get("message")), told
            assert "internal_error" not in text, text[:500]


@pytest.fixture
def reader(server: Any, tokens: dict[str, str]) -> Wire:
    return Wire(server, tokens["reader"])


@pytest.fixture
def session(server: Any, tokens: dict[str, str]) -> str:
    """A session of an older client."""
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "f", "version": "1"}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    accept = {"Accept": "application/json, text/event-stream"}
    return str(server.post("/mcp", body, tokens["reader"], accept)[2]["mcp-session-id"])


@pytest.fixture(autouse=True)
def _nothing_in_the_log(server: Any) -> Any:
    before = len(server.errors)
    yield
    told = "".join(server.errors[before:])
    assert "Traceback" not in told, told[-4000:]


def dumped(frame: Any) -> bytes:
    """JSON as Python writes it, with NaN and lone surrogates: what it is meant to be refused for."""
    return json.dumps(frame).encode()


@FUZZ
@given(frame=frames, era=st.sampled_from(["modern", "session", "none"]), mirrored=st.booleans())
@example(frame={"jsonrpc": "2.0", "id": 10**400, "method": "tools/list"}, era="modern", mirrored=True)
@example(
    frame={"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "\ud800"}}, era="none", mirrored=True
)
def test_frames(reader: Wire, session: str, frame: dict[str, Any], era: str, mirrored: bool) -> None:
    headers: dict[str, str] = {}
    if era == "modern":
        headers["MCP-Protocol-Version"] = "2026-07-28"
        if mirrored:
            # As a client in order would mirror them; otherwise it is refused for its headers and nothing more is seen.
            inner = frame.get("params")
            inner = inner if isinstance(inner, dict) else {}
            if isinstance(inner.get("_meta"), dict):
                frame = {**frame, "params": {**inner, "_meta": {**META, **inner["_meta"]}}}
            name = next((inner[key] for key in ("name", "uri", "taskId") if isinstance(inner.get(key), str)), None)
            for header, value in (("Mcp-Method", frame["method"]), ("Mcp-Name", name)):
                if isinstance(value, str) and value.isascii() and value.isprintable():
                    headers[header] = value
    elif era == "session":
        headers |= {"Mcp-Session-Id": session, "MCP-Protocol-Version": "2025-06-18"}
    status, text, _ = reader.ask(dumped(frame), headers)
    reader.in_order(status, text)


@FUZZ
@given(data=st.data())
def test_headers(reader: Wire, session: str, data: st.DataObject) -> None:
    visible = st.characters(min_codepoint=1, max_codepoint=255, exclude_characters="\r\n")
    value = st.text(visible, max_size=60) | st.sampled_from(
        ["2026-07-28", "2025-06-18", "tools/call", "quota_status", "=?base64?cXVvdGFfc3RhdHVz?=", "=?base64?!?=", "*/*"]
    )
    names = ["MCP-Protocol-Version", "Mcp-Method", "Mcp-Name", "Mcp-Session-Id", "Accept", "Content-Type", "Host"]
    more = ["Origin", "Last-Event-ID", "Content-Encoding", "Mcp-Param-X", "X-Forwarded-For", "Expect", "Authorization"]
    headers = data.draw(st.dictionaries(st.sampled_from(names + more), value, max_size=6))
    # http.client writes latin-1, as HTTP/1.1 has it; a length that lies is a matter of raw bytes, below.
    method = data.draw(st.sampled_from(["POST", "GET", "DELETE", "PUT", "OPTIONS", "HEAD"]))
    path = data.draw(st.sampled_from(["/mcp", "/mcp?tools=core", "/mcp?tools=%00", "/mcp/", "/operate/x", "/healthz"]))
    params = {"name": "quota_status", "arguments": {}, "_meta": META}
    body = dumped({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
    status, text, _ = reader.ask(body, {key: item.strip() for key, item in headers.items()}, method, path)
    reader.in_order(status, text)


BODIES = [
    b"", b"null", b"[]", b"[[]]", b"{", b"{}", b"0", b'"x"', b"\x00", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[" * 100_000,
    b'{"a":' * 50_000, b'{"jsonrpc":"2.0","id":' + b"9" * 5000 + b',"method":"ping"}', b'{"jsonrpc":"2.0","id":NaN,"method":"ping"}',
    b'{"jsonrpc":"2.0","id":1,"id":2,"method":"tools/list","params":{}}', '{"jsonrpc":"2.0"}'.encode("utf-16"),
    b'{"jsonrpc":"2.0","id":1,"method":"\\ud800"}', b'{"jsonrpc":"2.0","id":1e999,"method":"ping"}', b"[1,2,3]",
    b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"get_job","arguments":' + b"[" * 900 + b"]" * 900 + b"}}",
    b'{"jsonrpc":"2.0","id":{"a":1},"method":"tools/list"}', b'{"jsonrpc":"2.0","result":{},"id":1}', b"x" * 5_000_000,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_bodies(reader: Wire, session: str, number: int) -> None:
    modern = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "get_job"}
    older = {"Mcp-Session-Id": session, "MCP-Protocol-Version": "2025-06-18"}
    for headers in (modern, older, {}, {"Mcp-Session-Id": "of-before"}):
        status, text, _ = reader.ask(BODIES[number], headers)
        reader.in_order(status, text)
        assert 400 <= status < 500 or '"error"' in text or "isError" in text or status in (200, 202), (
            status,
            text[:200],
        )


START = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n"


@FUZZ
@given(noise=st.binary(max_size=300), where=st.sampled_from(["alone", "headers", "body", "chunks", "length"]))
@example(noise=b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", where="alone")
@example(noise=b"-1", where="length")
@example(noise=b"99999999999999999999", where="length")
@example(noise=b"\xc2\xb2", where="length")
@example(noise=b"ffffffffffffffff\r\n", where="chunks")
def test_bytes(server: Any, tokens: dict[str, str], reader: Wire, noise: bytes, where: str) -> None:
    start = START % tokens["reader"].encode()
    data = {
        "alone": noise,
        "headers": start + noise + b"\r\n\r\n",
        "body": start + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(noise) + noise,
        "chunks": start + b"Transfer-Encoding: chunked\r\n\r\n" + noise,
        "length": start + b"Content-Length: " + noise + b"\r\n\r\n{}",
    }[where]
    answer = reader.raw(data)
    if answer.startswith(b"HTTP/"):
        reader.in_order(int(answer.split(b" ", 2)[1]), answer.decode("latin-1"))
    assert reader.ask(b"", {}, "GET", "/healthz")[0] == 200, "and the next one is served"
