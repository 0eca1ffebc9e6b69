"""`cotenant doctor --mcp` against a good server, and against servers that are not: each fault is named with what to do."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def checks(done: Any) -> dict[str, dict[str, Any]]:
    return {item["check"]: item for item in done.json["checks"]}


def test_a_good_server_passes_everything(live: Any) -> None:
    token = live.token("well", "wendy")
    done = live("doctor", "--mcp", "--json", COTENANT_TOKEN=token)
    found = checks(done)
    for version in ("2026-07-28", "2025-11-25", "2025-06-18"):
        for name in ("hello", "call", "refusal", "subscribe"):
            assert found[f"{name} {version}"]["ok"] is True, found
    for name in ("clock", "door", "token", "tools", "instructions"):
        assert found[name]["ok"] is True, found[name]
    assert found["clients"]["ok"] is not False
    assert token not in done.out


def test_it_is_readable(live: Any) -> None:
    shown = live("doctor", "--mcp")
    assert "nothing wrong" in shown.out and "Make it one of its own" in shown.out  # the person's own token


def test_a_token_that_may_only_look_is_told_of(live: Any) -> None:
    reader = live.token("looker", "wendy", "--scopes", "read")
    assert "scope write" in checks(live("doctor", "--mcp", "--json", COTENANT_TOKEN=reader))["token"]["hint"]
    reporter = live.token("reporter", "wendy", "--scopes", "report")
    done = live("doctor", "--mcp", "--json", code=1, COTENANT_TOKEN=reporter)
    assert checks(done)["token"]["ok"] is False


def test_a_wrong_token_and_no_server_are_told_of(live: Any, free_url: str) -> None:
    found = checks(live("doctor", "--mcp", "--json", code=1, COTENANT_TOKEN="ctn_wrong"))
    assert found["hello 2026-07-28"]["ok"] is False and "token create" in found["hello 2026-07-28"]["hint"]
    found = checks(live("doctor", "--mcp", "--json", "--url", free_url, code=1, COTENANT_TOKEN="ctn_wrong"))
    assert "cotenant serve" in found["hello 2026-07-28"]["hint"]


@pytest.fixture
def free_url() -> str:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as probe:
        return f"http://127.0.0.1:{probe.server_address[1]}"


class Between(http.server.BaseHTTPRequestHandler):
    """A proxy that spoils one thing, as proxies do: `spoil(handler, status, headers, body)` is what it passes on."""

    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("content-length") or 0)) or None
        headers = {key: value for key, value in self.headers.items() if key.lower() not in ("host", "content-length")}
        if body is not None and b"subscriptions/listen" in body and server.hold:
            self.close_connection = True  # a proxy that keeps a stream until it is whole, given up here at once
            return
        request = urllib.request.Request(server.behind + self.path, body, headers, method=self.command)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                status, got = answer.status, dict(answer.headers.items())
                # an event stream is passed on up to its first event
                listening = b"subscriptions/listen" in (body or b"")
                data = (
                    b"".join(iter(lambda: answer.readline().rstrip(b"\r\n") + b"\n", b"\n")) + b"\n"
                    if listening
                    else answer.read()
                )
        except urllib.error.HTTPError as error:
            with error:
                status, got, data = error.code, dict(error.headers.items()), error.read()
        got = {key.lower(): value for key, value in got.items()}
        status, got, data = server.spoil(self.path, status, got, data)
        self.send_response_only(status)
        for key, value in got.items():
            if key not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _pass

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def behind(live: Any) -> Iterator[Callable[..., dict[str, dict[str, Any]]]]:
    """Runs the doctor through a proxy that spoils something."""
    token = live.token("behind-a-proxy", "wendy")
    proxy: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Between)
    proxy.daemon_threads = True
    proxy.behind, proxy.hold = live.url, False
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()

    def doctor(spoil: Any, *, code: int = 1, hold: bool = False) -> dict[str, dict[str, Any]]:
        proxy.spoil, proxy.hold = spoil, hold
        url = f"http://127.0.0.1:{proxy.server_address[1]}"
        return checks(live("doctor", "--mcp", "--json", "--url", url, code=code, COTENANT_TOKEN=token))

    with proxy:
        yield doctor
        proxy.shutdown()
        thread.join(5)


Got = tuple[int, dict[str, str], bytes]


def as_is(path: str, status: int, headers: dict[str, str], data: bytes) -> Got:
    return status, headers, data


def test_an_honest_proxy_is_fine(behind: Any) -> None:
    assert all(item["ok"] is not False for item in behind(as_is, code=0).values())


def test_a_login_in_front_is_told_of(behind: Any) -> None:
    def spoil(path: str, status: int, headers: dict[str, str], data: bytes) -> Got:
        return (200, {}, b"{}") if path.startswith("/.well-known") else (status, headers, data)

    door = behind(spoil)["door"]
    assert door["ok"] is False and "well-known" in door["message"] and "404" in door["hint"]


def test_a_lost_session_header_is_told_of(behind: Any) -> None:
    def spoil(path: str, status: int, headers: dict[str, str], data: bytes) -> Got:
        return status, {key: value for key, value in headers.items() if key != "mcp-session-id"}, data

    found = behind(spoil)
    assert "Mcp-Session-Id" in found["hello 2025-11-25"]["hint"] and found["call 2026-07-28"]["ok"] is True


def test_a_page_in_the_servers_place_is_told_of(behind: Any) -> None:
    hello = behind(lambda path, status, headers, data: (200, {"content-type": "text/html"}, b"<html>"))[
        "hello 2026-07-28"
    ]
    assert "does not speak MCP" in hello["message"]


def test_a_clock_that_is_apart_is_told_of(behind: Any) -> None:
    def spoil(path: str, status: int, headers: dict[str, str], data: bytes) -> Got:
        return status, {**headers, "date": "Thu, 01 Jan 2026 00:00:00 GMT"}, data

    clock = behind(spoil, code=0)["clock"]
    assert clock["ok"] is None and "behind" in clock["message"] and "NTP" in clock["hint"]


def test_streams_that_do_not_come_are_told_of(behind: Any) -> None:
    assert behind(as_is, hold=True)["subscribe 2026-07-28"]["ok"] is False


def test_lists_that_clients_do_not_take_are_told_of(behind: Any) -> None:
    def spoil(path: str, status: int, headers: dict[str, str], data: bytes) -> Got:
        try:
            body = json.loads(data)
            tools = body["result"]["tools"]
        except (ValueError, KeyError, TypeError):
            return status, headers, data
        tools[0]["name"] = "dotted.name"
        tools[1]["description"] = "x" * 3000
        tools[2]["name"] = "long" * 20
        return status, headers, json.dumps(body).encode()

    message = behind(spoil)["clients"]["message"]
    for part in ("dotted.name", "Claude Code cuts", "Cursor takes no name"):
        assert part in message, message
