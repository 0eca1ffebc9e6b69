"""The client's wire handling, against a server that answers oddly: every answer ends in a value or in one clear sentence."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cotenant.ui.cli import client as client_module
from cotenant.ui.cli import place, show, wire
from cotenant.ui.cli.client import Client, patiently
from cotenant.ui.cli.problems import NoServer, Problem, TokenRefused, ToolRefused, Torn, Usage

Answer = Callable[[dict[str, Any]], bytes | Iterable[bytes] | None]


class OddServer:
    """Answers each request with the next of `answers`: bytes, or pieces sent one by one; the connection closes on None.

    `requests` holds what came: headers (lower case) and the JSON body.
    """

    def __init__(self, *answers: Answer, keep: bool = False) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.connections = 0
        self._answers = iter(answers)
        self._keep = keep
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with contextlib.suppress(ConnectionError), link, link.makefile("rb") as reader:
                while self._one(link, reader) and self._keep:
                    pass

    def _one(self, link: socket.socket, reader: Any) -> bool:
        headers: dict[str, str] = {}
        first = reader.readline()
        if not first:
            return False
        while (line := reader.readline().strip()) != b"":
            key, _, value = line.decode().partition(":")
            headers[key.lower()] = value.strip()
        body = json.loads(reader.read(int(headers["content-length"])))
        self.requests.append((headers, body))
        answer = next(self._answers)(body)
        if answer is None:
            return False
        for piece in [answer] if isinstance(answer, bytes) else answer:
            link.sendall(piece)
        return True

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def odd() -> Iterator[Callable[..., tuple[OddServer, Client]]]:
    made: list[tuple[OddServer, Client]] = []

    def make(*answers: Answer, keep: bool = False) -> tuple[OddServer, Client]:
        server = OddServer(*answers, keep=keep)
        caller = Client(place.Place(server.url, "secret-token", "the token of the test"))
        made.append((server, caller))
        return server, caller

    yield make
    for server, caller in made:
        caller.close()
        server.close()


def http(body: bytes, *, status: str = "200 OK", kind: str = "application/json", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{key.replace('_', '-')}: {value}" for key, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def result(value: dict[str, Any]) -> Answer:
    return lambda body: http(frame(body, value))


def frame(body: dict[str, Any], value: dict[str, Any]) -> bytes:
    return json.dumps(
        {"jsonrpc": "2.0", "id": body.get("id"), "result": {"structuredContent": value, "content": []}}
    ).encode()


def chunked(*parts: bytes, kind: str) -> list[bytes]:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return [head, *(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts), b"0\r\n\r\n"]


# ---- what is sent


def test_a_call_is_one_modern_post_with_token_headers_and_meta(odd: Any) -> None:
    server, caller = odd(result({"ok": True}))
    assert caller.call_tool("get_job", {"job_id": "j", "left_out": None}) == {"ok": True}
    headers, body = server.requests[0]
    assert headers["authorization"] == "Bearer secret-token"
    assert headers["mcp-protocol-version"] == "2026-07-28"
    assert (headers["mcp-method"], headers["mcp-name"]) == ("tools/call", "get_job")
    assert set(headers["accept"].split(", ")) == {"application/json", "text/event-stream"}
    assert body["params"]["arguments"] == {"job_id": "j"}, "reads carry no request_id, and None is left out"
    meta = body["params"]["_meta"]
    assert meta["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"
    assert meta["io.modelcontextprotocol/clientCapabilities"] == {}


@pytest.mark.parametrize("tool", sorted(client_module.WRITES))
def test_every_write_carries_a_request_id_of_its_own(odd: Any, tool: str) -> None:
    server, caller = odd(result({}), result({}))
    caller.call_tool(tool)
    caller.call_tool(tool, {"request_id": "mine"})
    ids = [body["params"]["arguments"]["request_id"] for _, body in server.requests]
    assert ids[0].startswith("cli-")
    assert ids[1] == "mine"


def test_the_writes_are_exactly_the_tools_that_take_a_request_id() -> None:
    from cotenant.tools import ALL

    takes = {tool.name for tool in ALL if "request_id" in tool.input_schema["properties"]}
    assert takes - {"heartbeat"} == client_module.WRITES, "heartbeat is repeatable as it is"


# ---- answers in all their forms


def test_an_event_stream_with_pings_progress_and_splits_anywhere(odd: Any) -> None:
    def stream(body: dict[str, Any]) -> list[bytes]:
        progress = {
            "jsonrpc": "2.0",
            "method": "notifications/progress",
            "params": {"progressToken": body["id"], "progress": 1, "message": "half\u00e9"},
        }
        text = (
            b": ping\r\n\r\nevent: message\r\ndata: " + json.dumps(progress, ensure_ascii=False).encode() + b"\r\n\r\n"
        )
        text += b": ping\n\ndata: " + frame(body, {"n": 1}) + b"\n\n"
        return chunked(*(text[i : i + 7] for i in range(0, len(text), 7)), kind="text/event-stream; charset=utf-8")

    server, caller = odd(stream)
    heard: list[str] = []
    assert caller.call_tool("wait_job", {}, on_progress=heard.append) == {"n": 1}
    assert heard == ["halfé"]
    _, body = server.requests[0]
    assert body["params"]["_meta"]["progressToken"] == body["id"]


def test_an_answer_without_length_ends_with_the_connection(odd: Any) -> None:
    _, caller = odd(lambda body: b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + frame(body, {"n": 2}))
    assert caller.call_tool("get_job") == {"n": 2}


def test_an_interim_answer_is_passed_over(odd: Any) -> None:
    _, caller = odd(lambda body: b"HTTP/1.1 100 Continue\r\n\r\n" + http(frame(body, {"n": 3})))
    assert caller.call_tool("get_job") == {"n": 3}


def test_the_connection_is_kept_and_made_anew_when_the_server_closed_it(odd: Any) -> None:
    server, caller = odd(result({"n": 1}), result({"n": 2}), lambda _: None, result({"n": 3}), keep=True)
    assert [caller.call_tool("get_job") for _ in range(2)] == [{"n": 1}, {"n": 2}]
    assert server.connections == 1
    assert caller.call_tool("get_job") == {"n": 3}
    assert server.connections == 2


# ---- refusals


def test_a_tools_refusal_has_its_code_text_and_numbers(odd: Any) -> None:
    def refuse(body: dict[str, Any]) -> bytes:
        told = {"code": "busy", "message": "taken", "free_at": "12:00"}
        value = {
            "isError": True,
            "content": [{"type": "text", "text": "busy: taken. Wait."}],
            "_meta": {"cotenant.dev/error": told},
        }
        return http(json.dumps({"jsonrpc": "2.0", "id": body["id"], "result": value}).encode())

    _, caller = odd(refuse)
    with pytest.raises(ToolRefused) as caught:
        caller.call_tool("acquire_lease")
    assert (caught.value.code, caught.value.text, caught.value.data) == (
        "busy",
        "busy: taken. Wait.",
        {"free_at": "12:00"},
    )
    assert caught.value.record() == {"error": {"code": "busy", "message": "busy: taken. Wait.", "free_at": "12:00"}}


def test_a_refusal_without_record_takes_its_code_from_the_text(odd: Any) -> None:
    value = {"isError": True, "content": [{"type": "text", "text": "not_found: no job."}]}
    _, caller = odd(lambda body: http(json.dumps({"jsonrpc": "2.0", "id": body["id"], "result": value}).encode()))
    with pytest.raises(ToolRefused) as caught:
        caller.call_tool("get_job")
    assert caught.value.code == "not_found"


def test_401_names_where_the_token_came_from_and_not_the_token(odd: Any) -> None:
    _, caller = odd(lambda _: http(b'{"error":{"code":-32001,"message":"unauthorized: x"}}', status="401 Unauthorized"))
    with pytest.raises(TokenRefused) as caught:
        caller.call_tool("get_job")
    assert "the token of the test" in caught.value.text
    assert "secret-token" not in caught.value.text
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("status", "body", "code", "said"),
    [
        ("413 Too Large", b"", "too_large", "larger than the server takes"),
        (
            "403 Forbidden",
            b'{"error":{"code":"people_only","message":"m","text":"people_only: m"}}',
            "people_only",
            "people_only: m",
        ),
        (
            "400 Bad",
            b'{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"bad: m","data":{"code":"bad","hint":"h"}}}',
            "bad",
            "bad: m",
        ),
        ("500 Oops", b"<html>\x1b[31moops</html>", "http_500", "oops"),
        ("302 Found", b"", "http_302", "302"),
    ],
)
def test_http_refusals_become_one_sentence(odd: Any, status: str, body: bytes, code: str, said: str) -> None:
    _, caller = odd(lambda _: http(body, status=status))
    with pytest.raises(ToolRefused) as caught:
        caller.call_tool("get_job")
    assert caught.value.code == code
    assert said in caught.value.text
    assert "\x1b" not in caught.value.text


def test_413_is_read_even_when_the_server_stopped_reading(odd: Any) -> None:
    refused = threading.Event()

    class Impatient(OddServer):
        def _one(self, link: socket.socket, reader: Any) -> bool:
            link.sendall(
                http(b'{"error":{"code":"too_large","message":"no"}}', status="413 Too Large", Connection="close")
            )
            link.shutdown(socket.SHUT_WR)
            refused.wait(10)
            return False

    server = Impatient()
    caller = Client(place.Place(server.url, "t", "test"))
    try:
        with pytest.raises(ToolRefused, match="no"):
            caller.call_tool("get_job", {"job_id": "x" * 1000})
    finally:
        refused.set()
        caller.close()
        server.close()


def test_503_is_no_server_and_404_is_another_server(odd: Any) -> None:
    _, caller = odd(
        lambda _: http(b"starting", status="503 Unavailable"), lambda _: http(b"nginx", status="404 Not Found")
    )
    with pytest.raises(NoServer, match="starting"):
        caller.call_tool("get_job")
    with pytest.raises(Problem, match="Is it a Cotenant server"):
        caller.call_tool("get_job")


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[1]", b"\xff\xfe", b"", b"{"])
def test_what_is_not_ours_is_said_to_be_so(odd: Any, body: bytes) -> None:
    _, caller = odd(lambda _: http(body))
    with pytest.raises(Problem, match="Is the address right"):
        caller.call_tool("get_job")


def test_a_result_without_content_and_an_rpc_error(odd: Any) -> None:
    _, caller = odd(
        lambda body: http(json.dumps({"jsonrpc": "2.0", "id": body["id"], "result": {"content": []}}).encode()),
        lambda body: http(
            json.dumps({"jsonrpc": "2.0", "id": body["id"], "error": {"code": -32602, "message": "no tool"}}).encode()
        ),
    )
    with pytest.raises(Problem, match="another version"):
        caller.call_tool("get_job")
    with pytest.raises(ToolRefused, match="no tool"):
        caller.call_tool("get_job")


# ---- torn answers


def torn(body: dict[str, Any]) -> bytes:
    whole = http(frame(body, {"n": 1}))
    return whole[:-5]


def torn_stream(body: dict[str, Any]) -> list[bytes]:
    return chunked(b"data: " + frame(body, {"n": 1})[:-3], kind="text/event-stream")


@pytest.mark.parametrize(
    "first", [torn, torn_stream, lambda _: None, lambda _: b"HTTP/1.1 200 OK\r\nContent-", lambda _: b"SSH-2.0-x\r\n"]
)
def test_a_torn_write_is_sent_once_more_under_the_same_id(odd: Any, first: Answer) -> None:
    server, caller = odd(first, result({"n": 2}))
    assert caller.call_tool("submit_job", {"command": "true"}) == {"n": 2}
    ids = [body["params"]["arguments"]["request_id"] for _, body in server.requests]
    assert len(ids) == 2
    assert ids[0] == ids[1]


def test_torn_twice_says_that_it_may_have_happened(odd: Any) -> None:
    _, caller = odd(torn, torn)
    with pytest.raises(Torn, match="may have been done") as caught:
        caller.call_tool("submit_job")
    assert caught.value.exit_code == 3


def test_an_operation_is_never_sent_twice(odd: Any) -> None:
    server, caller = odd(torn, lambda _: http(b"{}"))
    with pytest.raises(Torn):
        caller.operate("lease.evict", {"lease_id": "x"}, "why")
    assert len(server.requests) == 1
    assert server.requests[0][1] == {"args": {"lease_id": "x"}, "reason": "why"}


def test_a_silent_server_is_given_up(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_S", 0.1)
    over = threading.Event()

    def silent(_: dict[str, Any]) -> None:
        over.wait(10)

    _, caller = odd(silent, silent)
    try:
        with pytest.raises(Torn, match="did not answer within"):
            caller.call_tool("get_job")
    finally:
        over.set()


@pytest.mark.parametrize("size", [b"zz\r\n", b"-5\r\n", b"5\r\nabcdefgh\r\n"])
def test_chunks_that_lie_are_torn_answers(odd: Any, size: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    _, caller = odd(lambda _: head + size, lambda _: head + size)
    with pytest.raises(Torn):
        caller.call_tool("get_job")


def test_an_endless_answer_is_given_up(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LONGEST_ANSWER", 1000)
    _, caller = odd(lambda _: http(b"x" * 2000), lambda _: http(b"x" * 2000))
    with pytest.raises(Torn, match="longer than"):
        caller.call_tool("get_job")


def test_an_answer_that_never_comes_to_its_end_is_given_up(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte each wait is short; the whole has an end all the same."""
    monkeypatch.setattr(client_module, "ANSWER_S", 0.2)
    monkeypatch.setattr(wire, "BODY_S", 0.2)
    over = threading.Event()

    def trickle(_: dict[str, Any]) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        while not over.wait(0.02):
            yield b": ping\n"

    _, caller = odd(trickle, trickle)
    try:
        with pytest.raises(Torn, match="does not come to its end"):
            caller.call_tool("get_job")
    finally:
        over.set()


def test_nobody_listens_is_no_server_and_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(NoServer, match="cotenant serve") as caught:
        Client(place.Place(f"http://127.0.0.1:{port}", "t", "test")).call_tool("get_job")
    assert caught.value.refused
    assert caught.value.exit_code == 3


def test_patience_outlives_a_restart_and_has_an_end() -> None:
    said: list[str] = []
    going = ToolRefused("shutting_down", "shutting_down: the server ended the wait.")
    answers: Iterator[Any] = iter([going, NoServer("Down. Start it.", refused=True), Torn("Torn. Look."), {"n": 1}])

    def act() -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    assert patiently(act, say=said.append) == {"n": 1}
    assert len(said) == 1, "one notice, not one a try"

    def down() -> dict[str, Any]:
        raise NoServer("Down.", refused=True)

    with pytest.raises(NoServer):
        patiently(down, say=said.append, patience_s=0.3)

    def refused() -> dict[str, Any]:
        raise ToolRefused("no_such_job", "no_such_job: x")

    with pytest.raises(ToolRefused):
        patiently(refused, say=said.append)


# ---- addresses and tokens


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("http://127.0.0.1:8425", "http://127.0.0.1:8425"),
        ("http://127.0.0.1:8425/mcp", "http://127.0.0.1:8425"),
        ("http://127.0.0.1:8425/", "http://127.0.0.1:8425"),
        ("localhost:8425", "http://localhost:8425"),
        ("HTTPS://gpu.example/cotenant/mcp/", "https://gpu.example/cotenant"),
        ("http://[::1]:8425", "http://[::1]:8425"),
        ("http://0.0.0.0:8425", "http://127.0.0.1:8425"),
        ("http://[::]:8425/mcp", "http://[::1]:8425"),
    ],
)
def test_addresses_as_people_write_them(given: str, wanted: str) -> None:
    assert place.normal(given) == wanted


@pytest.mark.parametrize(
    "given",
    [
        "",
        "http://",
        "ftp://x",
        "http://a b",
        "http://x:port",
        "http://x:0",
        "http://x:70000",
        "http://u:p@x",
        "http://x\r\nEvil: 1",
    ],
)
def test_what_is_no_address_is_wrong_usage(given: str) -> None:
    with pytest.raises(Usage):
        place.normal(given)


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:1", True),
        ("http://[::1]:1", True),
        ("http://localhost", True),
        ("http://127.evil.example", False),
        ("http://gpu1", False),
    ],
)
def test_loopback_is_told_from_names_that_look_like_it(url: str, here: bool) -> None:
    assert place.is_loopback(url) is here


def _token_file(path: Path, content: str, mode: int = 0o600) -> str:
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def test_token_files_must_be_closed_and_hold_one_word(tmp_path: Path) -> None:
    assert place.read_token(_token_file(tmp_path / "good", "ctn_x\n")) == "ctn_x"
    for mode in (0o640, 0o604, 0o622):
        with pytest.raises(Problem, match="chmod 600"):
            place.read_token(_token_file(tmp_path / f"m{mode}", "ctn_x", mode))
    for content in ("", "two words", "evil\r\nX: 1", "ümlaut"):
        with pytest.raises(Problem) as caught:
            place.read_token(_token_file(tmp_path / "bad", content))
        assert "evil" not in caught.value.text
    with pytest.raises(Problem, match="cannot be read"):
        place.read_token(str(tmp_path / "nothere"))
    with pytest.raises(Problem, match="not a regular file"):
        place.read_token(str(tmp_path))


def test_options_go_before_the_environment_and_that_before_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in os.environ if n.startswith(("COTENANT_", "XDG_"))]:
        monkeypatch.delenv(name)
    data = tmp_path / "data"
    data.mkdir()
    with pytest.raises(NoServer, match="cotenant serve"):
        place.find(url=None, token_file=None, data=str(data))
    (data / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:1111", "pid": 1}))
    _token_file(data / "local.token", "local")
    found = place.find(url=None, token_file=None, data=str(data))
    assert (found.url, found.token) == ("http://127.0.0.1:1111", "local")
    monkeypatch.setenv("COTENANT_TOKEN", "env")
    assert place.find(url=None, token_file=None, data=str(data)).token == "env"
    file = _token_file(tmp_path / "file", "file")
    assert place.find(url=None, token_file=file, data=str(data)).token == "file"
    monkeypatch.setenv("COTENANT_URL", "http://elsewhere:2222/mcp")
    assert place.find(url=None, token_file=None, data=None).url == "http://elsewhere:2222"
    assert place.find(url=None, token_file=None, data=str(data)).url == "http://127.0.0.1:1111"
    monkeypatch.delenv("COTENANT_TOKEN")
    with pytest.raises(Problem, match="No token for"):
        place.find(url="http://elsewhere:2222", token_file=None, data=str(data))
    (data / "server.json").write_text("{")
    with pytest.raises(Problem, match="cannot be read"):
        place.find(url=None, token_file=None, data=str(data))


def test_what_would_steer_a_terminal_is_made_visible() -> None:
    assert show.harmless("a\x1b[31m\r\u202eb\t\u00e9") == "a\\x1b[31m\\r\\u202eb\té"
    assert show.cell(None) == "-"
    assert show.cell(0) == "0", "unknown and nothing are not the same"
    assert [show.span(s) for s in (None, 0, 59, 61, 3600, 90000)] == ["-", "0s", "59s", "1m01s", "1h00m", "1d1h"]
