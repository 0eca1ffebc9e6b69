"""`cotenant mcp-stdio` by its frames: what it passes on unchanged, what it adds, and that nothing makes it hang or die."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import queue
import socket
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NUMBERS = itertools.count(1_000_000)
OVERLONG = 33 * 1024 * 1024


# ---- what is no frame -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "ident"),
    [
        (b"{", -32700, None),
        (b"\xff\xfe", -32700, None),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":NaN}', -32700, None),
        (b"[" * 100_000, -32700, None),
        (b"[]", -32600, None),
        (b'"x"', -32600, None),
        (b"7", -32600, None),
        (b"{}", -32600, None),
        (b'{"id":3,"method":"ping"}', -32600, 3),
        (b'{"jsonrpc":"2.0","id":"a"}', -32600, "a"),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":[1],"method":"ping"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":5,"method":7}', -32600, 5),
    ],
)
def test_what_is_no_frame_is_answered_and_forgotten(bridge: Any, line: bytes, code: int, ident: Any) -> None:
    bridge.send(line)
    told = bridge.next()
    assert told["error"]["code"] == code and told["id"] == ident and told["error"]["message"]
    assert "result" in bridge.ask(1, "tools/list")


def test_frames_too_large_are_refused_by_whoever_has_the_limit(bridge: Any, modern: Any) -> None:
    bridge.send(modern("big", "tools/call", {"name": "quota_status", "arguments": {"x": "a" * 5 * 1024 * 1024}}))
    assert "too_large" in bridge.answer("big")["error"]["message"]
    bridge.send(b'{"jsonrpc":"2.0","id":"endless","method":"' + b"a" * OVERLONG + b'"}')
    assert "left out" in bridge.next()["error"]["message"]
    assert "result" in bridge.ask("after", "tools/list")


def test_an_id_may_be_open_once(bridge: Any, modern: Any) -> None:
    listen = modern(7, "subscriptions/listen", {"notifications": {"resourceSubscriptions": ["cotenant://gpus"]}})
    bridge.send(listen)
    assert bridge.next()["method"] == "notifications/subscriptions/acknowledged"
    bridge.send(listen)
    assert "still open" in bridge.answer(7)["error"]["message"]
    bridge.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}})
    assert "result" in bridge.ask(8, "tools/list")


def test_methods_that_nobody_knows_are_the_servers_to_refuse(bridge: Any) -> None:
    for ident, method in (("x", "vendor/thing"), (2, "sampling/createMessage"), (3, "ping")):
        assert bridge.ask(ident, method)["error"]["code"] == -32601
    assert "error" in bridge.ask(4, "ünknown/метод")


def test_an_older_frame_without_a_greeting_is_the_servers_to_refuse(bridge: Any) -> None:
    bridge.send({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
    assert "error" in bridge.answer(1)


def test_many_calls_at_once_are_all_answered(bridge: Any, modern: Any) -> None:
    for ident in range(300):
        bridge.send(modern(ident, "tools/call", {"name": "quota_status", "arguments": {}}))
    answered = {bridge.next(60)["id"] for _ in range(300)}
    assert answered == set(range(300))


def test_it_ends_with_its_input_and_answers_what_is_short(bridge: Any, modern: Any) -> None:
    bridge.send(modern(1, "subscriptions/listen", {"notifications": {"resourceSubscriptions": ["cotenant://gpus"]}}))
    assert bridge.next()["method"] == "notifications/subscriptions/acknowledged"
    bridge.send(modern(2, "tools/call", {"name": "quota_status", "arguments": {}}))
    assert bridge.close() == 0
    assert "result" in bridge.answer(2)
    assert bridge.frames.get(timeout=1) is None


def test_a_signal_ends_it_whatever_is_under_way(bridge: Any, modern: Any) -> None:
    bridge.send(modern(1, "tools/call", {"name": "submit_job", "arguments": {"command": "sleep 20", "gpus": 0}}))
    job = bridge.answer(1)["result"]["structuredContent"]["job_id"]
    wait = modern(2, "tools/call", {"name": "wait_job", "arguments": {"job_id": job, "max_wait_s": 40}})
    wait["params"]["_meta"]["progressToken"] = 2
    bridge.send(wait)
    assert bridge.next()["method"] == "notifications/progress"
    bridge.process.terminate()
    assert bridge.close(8) == 0  # sooner than the wait, and than what is left to it at the end of the input


def test_it_ends_when_nobody_reads_any_more(server: Any, tokens: Any, token_file: Any, modern: Any) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    argv = server.bridge_argv(token_file(tokens["alice"]))
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(json.dumps(modern(1, "tools/list")).encode() + b"\n")
        process.stdin.flush()
        try:
            assert process.wait(20) == 0
            assert b"Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_pipes_that_do_not_block_are_as_good(server: Any, tokens: Any, token_file: Any, modern: Any) -> None:
    """Some clients hand on ends that answer "not now", which is neither the end of the input nor of the reader."""
    (there, out), (answers, into) = os.pipe(), os.pipe()
    for end in (there, into):
        os.set_blocking(end, False)
    argv = server.bridge_argv(token_file(tokens["alice"]))
    with subprocess.Popen(argv, stdin=there, stdout=into, stderr=subprocess.DEVNULL) as process:
        os.close(there)
        os.close(into)
        with os.fdopen(out, "wb") as sending, os.fdopen(answers, "rb") as reading:
            for ident in range(3):  # more than a pipe holds, so that writing has to wait
                sending.write(json.dumps(modern(ident, "tools/list")).encode() + b"\n")
            sending.flush()
            assert sorted(json.loads(reading.readline())["id"] for _ in range(3)) == [0, 1, 2]
        assert process.wait(20) == 0


@pytest.mark.parametrize("content", ["", "two words"])
def test_a_token_that_is_none_is_said_at_once(server: Any, Bridge: Any, token_file: Any, content: str) -> None:
    made = Bridge(server.bridge_argv(token_file(content)))
    assert made.close() == 1 and b"token" in made.errors and b"Traceback" not in made.errors


def test_a_token_that_others_can_read_is_not_used(server: Any, Bridge: Any, token_file: Any) -> None:
    path = token_file("ctn_secret")
    path.chmod(0o644)
    made = Bridge(server.bridge_argv(path))
    assert made.close() == 1 and b"chmod 600" in made.errors and b"ctn_secret" not in made.errors


def test_without_a_token_of_its_own_an_agent_is_not_let_in(server: Any, Bridge: Any) -> None:
    """The data directory's token would make the agent the person who runs the server."""
    argv = server.bridge_argv(Path("x"))
    made = Bridge([*argv[: argv.index("--url")], "--data", str(server.data)])
    assert made.close() == 1 and b"cotenant token create" in made.errors


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
METHODS = st.sampled_from([
    "initialize", "tools/list", "tools/call", "resources/read", "resources/subscribe", "notifications/initialized",
    "notifications/cancelled", "server/discover", "tasks/get", "prompts/get", "logging/setLevel", "ping", "vendor/x",
])  # fmt: skip
META = st.just(
    {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
)
PARAMS = st.dictionaries(
    st.sampled_from(["name", "arguments", "uri", "requestId", "taskId", "protocolVersion", "capabilities", "_meta"]),
    JSON | META | st.sampled_from(["submit_job", "cotenant://gpus", "2025-06-18"]),
)
FRAMES = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0")},
    optional={
        "id": st.integers(0, 5) | st.text(max_size=3) | JSON,
        "method": METHODS | st.text(max_size=10),
        "params": PARAMS | JSON,
        "result": JSON,
        "error": JSON,
    },
)


@given(lines=st.lists(st.binary(max_size=80) | FRAMES.map(lambda frame: json.dumps(frame).encode()), max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_in_it_goes_on(bridge: Any, lines: list[bytes]) -> None:
    for line in lines:
        bridge.send(line.replace(b"\n", b" "))
    ident = next(NUMBERS)
    assert "result" in bridge.ask(ident, "tools/list")
    assert b"Traceback" not in bridge.errors and b"bridge_failed" not in bridge.errors


# ---- a server that does what it is told -----------------------------------------------------------


class Played(http.server.ThreadingHTTPServer):
    """A server by script: `plays` maps a method to a function of (handler, frame); every request is kept in `heard`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Playing)
        self.heard: queue.Queue[tuple[str, dict[str, str], bytes]] = queue.Queue()
        self.plays: dict[str, Callable[[Playing, dict[str, Any]], None]] = {"tools/list": Playing.tools}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, method: str) -> tuple[dict[str, str], bytes]:
        """(headers, body) of the next request with this method of JSON-RPC; others are passed over."""
        while True:
            verb, headers, body = self.heard.get(timeout=20)
            if verb == "POST" and json.loads(body).get("method") == method:
                return headers, body

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error here."""


class Playing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Played

    def do_GET(self) -> None:
        self.server.heard.put((self.command, {}, b""))
        self.server.plays.get("GET", Playing.nothing)(self, {})

    def do_DELETE(self) -> None:
        self.nothing({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.heard.put((self.command, {key.lower(): value for key, value in self.headers.items()}, body))
        frame = json.loads(body)
        self.server.plays.get(frame.get("method", "answer"), Playing.done)(self, frame)

    def nothing(self, frame: dict[str, Any]) -> None:
        self.answer(405, b"")

    def done(self, frame: dict[str, Any]) -> None:
        if "id" in frame and "method" in frame:
            self.json({"jsonrpc": "2.0", "id": frame["id"], "result": {"resultType": "complete"}})
        else:
            self.answer(202, b"")

    def tools(self, frame: dict[str, Any]) -> None:
        writing = {"name": "write_it", "inputSchema": {"type": "object", "properties": {"request_id": {}}}}
        reading = {"name": "read_it", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}
        plain = {"name": "do_it", "inputSchema": {"type": "object"}}
        self.json({"jsonrpc": "2.0", "id": frame["id"], "result": {"tools": [writing, reading, plain]}})

    def hello(self, frame: dict[str, Any]) -> None:
        result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "played", "version": "1"}}
        self.json({"jsonrpc": "2.0", "id": frame["id"], "result": result}, {"Mcp-Session-Id": f"s{next(NUMBERS)}"})

    def json(self, frame: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.answer(200, json.dumps(frame, indent=1).encode(), {"Content-Type": "application/json", **(headers or {})})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.close_connection = True

    def event(self, frame: dict[str, Any]) -> None:
        self.wfile.write(b"event: message\r\ndata: " + json.dumps(frame).encode() + b"\r\n\r\n")
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def played() -> Iterator[Played]:
    with Played() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(5)


@pytest.fixture
def to_played(played: Played, Bridge: Any, server: Any, token_file: Any) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(*more: str) -> Any:
        argv = [played.url if word == server.url else word for word in server.bridge_argv(token_file("ctn_x"), *more)]
        made.append(Bridge(argv))
        return made[-1]

    yield make
    for item in made:
        item.__exit__()


def test_a_frame_arrives_as_it_was_sent(played: Played, to_played: Any) -> None:
    bridge = to_played()
    raw = (
        b'{ "method":"vendor/do","id" : "\\u00e9", "extra":[1.50, {"deep":null}],"jsonrpc":"2.0",'
        b'"params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","vendor/x":1}}}'
    )
    bridge.send(raw)
    bridge.answer("é")
    headers, body = played.take("vendor/do")
    assert body == raw
    assert headers["mcp-method"] == "vendor/do" and headers["mcp-protocol-version"] == "2026-07-28"
    assert headers["authorization"] == "Bearer ctn_x" and headers["cotenant-agent-host"]


@pytest.mark.parametrize(
    ("method", "params", "name"),
    [
        ("tools/call", {"name": "read_it"}, "read_it"),
        ("resources/read", {"uri": "cotenant://gpus"}, "cotenant://gpus"),
        ("prompts/get", {"name": "grüße"}, "=?base64?Z3LDvMOfZQ==?="),
        ("tasks/get", {"taskId": "t 1\n"}, "=?base64?dCAxCg==?="),
        ("tools/list", {}, None),
    ],
)
def test_the_headers_repeat_the_frame(
    played: Played, to_played: Any, modern: Any, method: str, params: dict[str, Any], name: str | None
) -> None:
    bridge = to_played()
    bridge.send(modern("the one", method, params))
    bridge.answer("the one")
    while True:
        headers, body = played.take(method)
        if json.loads(body)["id"] == "the one":
            break
    assert headers["mcp-method"] == method and headers.get("mcp-name") == name


def test_writes_get_a_request_id_and_reads_do_not(played: Played, to_played: Any, modern: Any) -> None:
    bridge = to_played()
    for tool, own in (("write_it", None), ("write_it", "mine"), ("read_it", None), ("do_it", None)):
        sent = modern(
            next(NUMBERS), "tools/call", {"name": tool, "arguments": {"request_id": own} if own else {"a": 1}}
        )
        bridge.send(sent)
        bridge.answer(sent["id"])
        _, body = played.take("tools/call")
        arguments = json.loads(body)["params"]["arguments"]
        if tool == "write_it" and own is None:
            assert arguments.pop("request_id").startswith("bridge-") and arguments == {"a": 1}
        else:
            assert json.loads(body) == sent


def test_what_may_not_be_sent_twice_is_not(played: Played, to_played: Any, modern: Any) -> None:
    """The connection breaks in mid-answer: reads and known writes come again with the same id, the rest is told of."""
    bridge = to_played()
    broken: list[bytes] = []

    def breaks_once(handler: Playing, frame: dict[str, Any]) -> None:
        if frame["id"] in broken:
            handler.done(frame)
            return
        broken.append(frame["id"])
        handler.stream()

    played.plays["tools/call"] = played.plays["vendor/do"] = breaks_once
    assert "result" in bridge.ask(1, "tools/call", {"name": "read_it"})
    assert played.take("tools/call")[1] == played.take("tools/call")[1]
    assert "isError" not in bridge.ask(2, "tools/call", {"name": "write_it"})["result"]
    assert played.take("tools/call")[1] == played.take("tools/call")[1]
    result = bridge.ask(3, "tools/call", {"name": "do_it"})["result"]
    assert result["isError"] is True and result["resultType"] == "complete"
    assert result["content"][0]["text"].startswith("outcome_unknown: ")
    told = bridge.ask(4, "vendor/do")
    assert told["error"]["data"]["outcome"] == "unknown" and told["error"]["message"].startswith("outcome_unknown: ")
    assert "result" in bridge.ask(5, "tools/list")
    assert broken == [1, 2, 3, 4]


def test_a_server_that_says_nothing_is_given_up(played: Played, to_played: Any) -> None:
    hung = threading.Event()
    played.plays["vendor/do"] = lambda handler, frame: hung.wait(20) or handler.close_connection
    bridge = to_played("--silence", "0.3")
    assert "nothing came" in bridge.ask(1, "vendor/do")["error"]["message"]
    hung.set()


def test_a_server_that_is_not_up_yet_is_waited_for(server: Any, Bridge: Any, token_file: Any, modern: Any) -> None:
    """503 says that nothing was done; so does a refused connection."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    more = ("--patience", "0.3")
    argv = [url if word == server.url else word for word in server.bridge_argv(token_file("ctn_x"), *more)]
    with Bridge(argv) as bridge:
        assert bridge.ask(1, "server/discover")["error"]["message"].startswith("no_server: ")
        result = bridge.ask(2, "tools/call", {"name": "submit_job", "arguments": {}})["result"]
        assert result["isError"] and result["content"][0]["text"].startswith("no_server: ")


def test_503_is_not_yet(played: Played, to_played: Any) -> None:
    left = [503, 503]

    def later(handler: Playing, frame: dict[str, Any]) -> None:
        if left:
            handler.answer(left.pop(), b"")
        else:
            handler.done(frame)

    played.plays["vendor/do"] = later
    bridge = to_played()
    assert "result" in bridge.ask(1, "vendor/do")
    left.extend([503] * 1000)
    assert to_played("--patience", "0.3").ask(1, "vendor/do")["error"]["message"].startswith("unavailable: ")


def greet(bridge: Any) -> None:
    """What an older client says first."""
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}}
    bridge.send({"jsonrpc": "2.0", "id": "hello", "method": "initialize", "params": hello})
    assert bridge.answer("hello")["result"]["protocolVersion"] == "2025-06-18"
    bridge.send({"jsonrpc": "2.0", "method": "notifications/initialized"})


def old(ident: Any, method: str, params: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": ident, "method": method, "params": params}


@pytest.mark.parametrize("method", ["sampling/createMessage", "elicitation/create", "roots/list", "vendor/ask"])
def test_what_the_server_asks_goes_both_ways(played: Played, to_played: Any, method: str) -> None:
    answered: queue.Queue[dict[str, Any]] = queue.Queue()

    def asks(handler: Playing, frame: dict[str, Any]) -> None:
        handler.stream()
        handler.event(old(0, method, {"x": 1}))
        handler.event({"jsonrpc": "2.0", "id": frame["id"], "result": {"heard": answered.get(timeout=20)}})

    def take(handler: Playing, frame: dict[str, Any]) -> None:
        answered.put(frame)
        handler.answer(202, b"")

    played.plays |= {"initialize": Playing.hello, "tools/call": asks, "answer": take}
    bridge = to_played()
    greet(bridge)
    bridge.send(old(1, "tools/call", {"name": "do_it"}))
    assert bridge.next() == old(0, method, {"x": 1})
    bridge.send({"jsonrpc": "2.0", "id": 0, "result": {"said": "yes"}})
    assert bridge.answer(1)["result"]["heard"] == {"jsonrpc": "2.0", "id": 0, "result": {"said": "yes"}}


def test_an_answer_to_an_old_session_never_reaches_a_new_one(played: Played, to_played: Any) -> None:
    """A new server counts its questions from the begin: yes to the old first one must not be yes to the new first one."""
    answered: queue.Queue[dict[str, Any]] = queue.Queue()
    restarted = threading.Event()
    again = threading.Event()
    asked: list[int] = []

    def asks(handler: Playing, frame: dict[str, Any]) -> None:
        asked.append(1)
        handler.stream()
        handler.event(old(1, "elicitation/create", {"message": f"question {len(asked)}"}))
        if len(asked) == 1:
            again.wait(20)
            return
        handler.event({"jsonrpc": "2.0", "id": frame["id"], "result": {"heard": answered.get(timeout=20)}})

    def standing(handler: Playing, frame: dict[str, Any]) -> None:
        if restarted.is_set() and handler.headers["mcp-session-id"] == sessions[0]:
            handler.nothing(frame)
            return
        sessions.append(handler.headers["mcp-session-id"])
        handler.stream()
        (restarted if len(sessions) == 1 else ended).wait(20)

    def take(handler: Playing, frame: dict[str, Any]) -> None:
        answered.put(frame)
        handler.answer(202, b"")

    sessions: list[str] = []
    ended = threading.Event()
    played.plays |= {"initialize": Playing.hello, "tools/call": asks, "answer": take, "GET": standing}
    bridge = to_played()
    greet(bridge)
    bridge.send(old(9, "tools/call", {"name": "read_it"}))
    assert bridge.next()["id"] == 1
    restarted.set()
    again.set()
    frames = [bridge.next(), bridge.next()]
    withdrawn = next(frame for frame in frames if frame["method"] == "notifications/cancelled")
    assert withdrawn["params"]["requestId"] == 1
    question = next(frame for frame in frames if frame["method"] == "elicitation/create")
    assert question["params"]["message"] == "question 2" and question["id"] != 1
    bridge.send({"jsonrpc": "2.0", "id": 1, "result": {"to": "the old one"}})
    bridge.send({"jsonrpc": "2.0", "id": question["id"], "result": {"to": "the new one"}})
    assert bridge.answer(9)["result"]["heard"] == {"jsonrpc": "2.0", "id": 1, "result": {"to": "the new one"}}
    assert answered.empty()
    ended.set()


@pytest.mark.parametrize("status", [429, 403, 500])
def test_a_session_whose_standing_stream_is_refused_serves_calls_all_the_same(
    played: Played, to_played: Any, status: int
) -> None:
    """A caller with too many streams, say: what is refused is the stream, and the server is well."""
    played.plays |= {"initialize": Playing.hello, "GET": lambda handler, _: handler.answer(status, b"")}
    bridge = to_played("--patience", "5")
    greet(bridge)
    bridge.send(old(9, "tools/call", {"name": "read_it"}))
    assert "isError" not in bridge.answer(9)["result"]


class Babbling(socketserver.ThreadingTCPServer):
    """Reads a request and answers with `said`, whatever that is."""

    daemon_threads = True
    allow_reuse_address = True
    said = b""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Babble)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The other side may go away at any time."""


class Babble(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            part = self.request.recv(65536)
            if not part:
                return
            head += part
        assert isinstance(self.server, Babbling)
        self.request.sendall(self.server.said)


HEADS = st.sampled_from([
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -9\r\n\r\n", b"HTTP/1.1 401 No\r\n\r\n", b"HTTP/1.1 404 No\r\n\r\n",
    b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 100 Go\r\n\r\n", b"HTTP/1.1 204 \r\n\r\n", b"",
])  # fmt: skip
BODIES = st.sampled_from([
    b"zz\r\n", b"-5\r\nabc", b"5\r\nabc", b"data: {}\n\n", b'data: {"jsonrpc":"2.0","method":7}\n\n', b"data: [1]\r\n\r\n",
    b'data: {"jsonrpc":"2.0","id":null,"error":3}\n\n', b'{"jsonrpc":"2.0","id":1,"result":{}}', b"data: " + b"x" * 70_000,
    b'data: {"jsonrpc":"2.0","method":"notifications/progress","params":[]}\n\n', b"\n" * 99,
])  # fmt: skip


@pytest.fixture
def babbling(Bridge: Any, server: Any, token_file: Any) -> Iterator[tuple[Any, Babbling]]:
    with Babbling() as babble:
        threading.Thread(target=babble.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{babble.server_address[1]}"
        more = ("--patience", "0.1", "--silence", "1")
        argv = [url if word == server.url else word for word in server.bridge_argv(token_file("ctn_x"), *more)]
        with Bridge(argv) as bridge:
            yield bridge, babble
        babble.shutdown()


@given(head=HEADS | st.binary(max_size=60), bodies=st.lists(BODIES | st.binary(max_size=60), max_size=4))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_server_says_a_request_is_answered(
    babbling: tuple[Any, Babbling], head: bytes, bodies: list[bytes]
) -> None:
    bridge, babble = babbling
    babble.said = head + b"".join(bodies)
    answer = bridge.ask(next(NUMBERS), "vendor/do")
    assert "error" in answer or "result" in answer
    assert b"Traceback" not in bridge.errors and b"bridge_failed" not in bridge.errors
