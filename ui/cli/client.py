"""The server's tools and operations as plain calls: a dictionary comes back, or one of problems.py is raised.

Protocol 2026-07-28: every call is one POST that stands for itself, so there is no session to lose. This module knows the
frames of MCP and of /operate, and nothing about any one tool but which of them write.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator

from cotenant.ui.cli import place
from cotenant.ui.cli.problems import NoServer, Problem, TokenRefused, ToolRefused, Torn
from cotenant.ui.cli.wire import Reply, Wire

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    from typing import Any

    Answer = dict[str, Any]

PROTOCOL = "2026-07-28"
#: Tools that take a request_id, so that a call whose answer got lost may be sent once more.
WRITES = frozenset({
    "acquire_lease", "release_lease", "hand_over", "submit_job", "cancel_job", "retry_job", "signal_job", "checkpoint_job", "hold_job", "release_job",
    "modify_job",
})  # fmt: skip
ANSWER_S = 30.0
#: A stream on which nothing comes for this long is opened anew: the other end may have gone without a word.
QUIET_S = 60.0
#: Refusals that only say "not now": the server is going down, or its storage is busy for a moment.
NOT_NOW = frozenset({"unavailable", "shutting_down", "storage_busy"})

Progress = Callable[[str], None]


def request_id() -> str:
    """A new id for one write."""
    return f"cli-{os.urandom(12).hex()}"


class Client:
    """One caller at one server. Not for several threads at once: `twin` gives each its own connection.

    `command` is the command that was given: refusals are told in its words.
    """

    def __init__(self, at: place.Place, command: str = "") -> None:
        self.place = at
        self._command = command
        self._wire = Wire(at.url)
        self._last_id = 0

    def twin(self) -> Client:
        """The same caller over a connection of its own."""
        return Client(self.place, self._command)

    def close(self) -> None:
        self._wire.close()

    def call_tool(
        self, name: str, args: Answer | None = None, *, on_progress: Progress | None = None, wait_s: float = 0
    ) -> Answer:
        """Call one tool; its structured answer.

        Arguments that are None are left out. Writes get a request_id, and are sent a second time under the same id when the
        first answer broke off. `wait_s` is how long the tool itself may wait (it is added to the time for an answer).

        Raises:
            ToolRefused, TokenRefused, NoServer, Torn: see problems.py.
        """
        sent = {key: value for key, value in (args or {}).items() if value is not None}
        if name in WRITES:
            sent.setdefault("request_id", request_id())
        try:
            return self._tool(name, sent, on_progress, ANSWER_S + wait_s)
        except Torn:
            pass  # reads change nothing, and the server knows a write again by its request_id
        try:
            return self._tool(name, sent, on_progress, ANSWER_S + wait_s)
        except NoServer as exc:  # what was said first is the truth about the act: it may have happened
            if name not in WRITES:
                raise
            raise Torn(f"The server went away in the middle; it may have been done. {exc.text}") from exc

    def read_resource(self, uri: str) -> Answer:
        """What a resource shows now.

        Raises:
            ToolRefused, TokenRefused, NoServer, Torn: see problems.py.
        """
        try:
            frame = self._frame(self._ask("resources/read", {"uri": uri}, uri, ANSWER_S), None)
        except Torn:  # reading changes nothing
            frame = self._frame(self._ask("resources/read", {"uri": uri}, uri, ANSWER_S), None)
        try:
            value = json.loads(self._result(frame, uri)["contents"][0]["text"])
        except (KeyError, IndexError, TypeError, ValueError):
            value = None
        if not isinstance(value, dict):
            raise Problem(f"The answer about {uri} has no content. Is the server of another version?")
        return value

    def listen(self, uris: list[str]) -> Iterator[str]:
        """Which of these resources to read again: each once at the begin, then whenever it changes. Ends when the server stops.

        A kept connection of its own is needed: use a `twin`.

        Raises:
            ToolRefused, TokenRefused, NoServer, Torn: see problems.py. Torn also after a long silence; then listen again.
        """
        reply = self._ask("subscriptions/listen", {"notifications": {"resourceSubscriptions": uris}}, None, QUIET_S)
        if not reply.headers.get("content-type", "").startswith("text/event-stream"):
            self._result(self._json(reply.body(), reply), "subscriptions/listen")
            return
        for data in reply.events():
            frame = self._json(data, reply)
            if frame.get("id") == self._last_id:
                self._result(frame, "subscriptions/listen")
                return
            if frame.get("method") == "notifications/subscriptions/acknowledged":
                yield from uris  # from here on nothing is missed, so what was read before may be old
            elif frame.get("method") == "notifications/resources/updated":
                yield str((frame.get("params") or {}).get("uri"))
        raise Torn(f"The stream of {self.place.url} broke off.")

    def _tool(self, name: str, args: Answer, on_progress: Progress | None, answer_s: float) -> Answer:
        progress = {} if on_progress is None else {"progressToken": self._last_id + 1}
        frame = self._frame(
            self._ask("tools/call", {"name": name, "arguments": args}, name, answer_s, progress), on_progress
        )
        if (error := frame.get("error")) is not None:
            raise ToolRefused(
                f"rpc_{error.get('code', 'error')}",
                f"The server refused the call of {name}: {error.get('message', 'no reason given')}",
                command=self._command,
            )
        return _outcome(frame.get("result"), name, self._command)

    def _ask(self, method: str, params: Answer, name: str | None, answer_s: float, meta: Answer | None = None) -> Reply:
        """Send one request of the protocol; its answer is read by the caller."""
        self._last_id += 1
        about = {
            "io.modelcontextprotocol/protocolVersion": PROTOCOL,
            "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "cotenant-cli", "version": "1"},
            **(meta or {}),
        }
        body = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": {**params, "_meta": about}}
        headers = {
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": PROTOCOL,
            "Mcp-Method": method,
        }
        if name is not None:
            headers["Mcp-Name"] = name
        return self._post("/mcp", body, headers, answer_s)

    def _result(self, frame: Answer, what: str) -> Answer:
        """The result in an answer that is no tool's, or the refusal as ToolRefused."""
        if (error := frame.get("error")) is not None:
            data = error.get("data") if isinstance(error.get("data"), dict) else {}
            code = str(data.get("code") or f"rpc_{error.get('code', 'error')}")
            raise ToolRefused(code, f"The server refused {what}: {error.get('message', 'no reason given')}")
        result = frame.get("result")
        return result if isinstance(result, dict) else {}

    def operate(self, verb: str, args: Answer, reason: str) -> Answer:
        """Do what only people may do; never sent twice.

        Raises:
            ToolRefused, TokenRefused, NoServer, Torn: see problems.py.
        """
        self._wire.close()  # a fresh connection cannot be one that the server is just closing
        sent = {key: value for key, value in args.items() if value is not None}
        reply = self._post(
            f"/operate/{verb}", {"args": sent, "reason": reason}, {"Accept": "application/json"}, ANSWER_S
        )
        return self._json(reply.body(), reply)

    def _post(self, path: str, body: Answer, headers: dict[str, str], answer_s: float) -> Reply:
        headers = {**headers, "Authorization": f"Bearer {self.place.token}", "Content-Type": "application/json"}
        data = json.dumps(body, separators=(",", ":")).encode()
        reply = self._wire.post(path, data, headers, answer_s=answer_s)
        if reply.status < 300:
            return reply
        content = reply.body()
        said = _sentence(content)
        if reply.status == 401:
            raise TokenRefused(
                f"The server at {self.place.url} does not accept {self.place.token_from}: it is unknown, expired or revoked."
                " Get a new one (`cotenant token create`), or unset it to use your own server's."
            )
        error = _error_of(content, self._command)
        if error is not None:
            raise error
        if reply.status == 413:
            raise ToolRefused(
                "too_large", f"The request is larger than the server takes ({len(data)} bytes). {said}".strip()
            )
        if reply.status == 503:
            raise NoServer(f"The server at {self.place.url} cannot answer now. {said}".strip())
        if reply.status == 404:
            raise Problem(f"What answers at {self.place.url} knows no {path}. Is it a Cotenant server? {said}".strip())
        raise ToolRefused(
            f"http_{reply.status}", f"The server at {self.place.url} answered {reply.status}. {said}".strip()
        )

    def _frame(self, reply: Reply, on_progress: Progress | None) -> Answer:
        """The response to our request, out of a JSON body or a stream of events."""
        if not reply.headers.get("content-type", "").startswith("text/event-stream"):
            return self._json(reply.body(), reply)
        answer: Answer | None = None
        for data in reply.events():
            frame = self._json(data, reply)
            if frame.get("id") == self._last_id and ("result" in frame or "error" in frame):
                answer = frame  # read on to the end, so that the connection can be kept
            elif frame.get("method") == "notifications/progress" and on_progress is not None:
                on_progress(str((frame.get("params") or {}).get("message") or ""))
        if answer is None:
            raise Torn(
                f"The answer of {self.place.url} ended before its result. It may have been done: look before you repeat it."
            )
        return answer

    def _json(self, data: bytes, reply: Reply) -> Answer:
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            reply.close()
            raise Problem(
                f"What answers at {self.place.url} does not speak as a Cotenant server does. Is the address right?"
            )
        return value


def _outcome(result: Any, name: str, command: str) -> Answer:
    """The structured content of a tool's result, or its refusal as ToolRefused."""
    if not isinstance(result, dict):
        raise Problem(f"The answer to {_command_of(name)} has no result. Is the server of another version?")
    text = "\n".join(str(part.get("text", "")) for part in result.get("content") or () if isinstance(part, dict))
    if result.get("isError"):
        told = (result.get("_meta") or {}).get("cotenant.dev/error") or {}
        code = told.get("code") or text.partition(":")[0].strip() or "refused"
        data = {k: v for k, v in told.items() if k not in ("code", "message")}
        raise ToolRefused(str(code), text or str(code), data, command=command)
    content = result.get("structuredContent")
    if not isinstance(content, dict):
        raise Problem(f"The answer to {_command_of(name)} has no content. Is the server of another version?")
    return content


def _command_of(tool: str) -> str:
    from cotenant.ui.cli.words import TOOLS

    return f"`{TOOLS.get(tool, tool)}`"


def _error_of(body: bytes, command: str) -> Problem | None:
    """The refusal in the body of an HTTP error of ours or of JSON-RPC, or None."""
    try:
        error = json.loads(body)["error"]
        message = str(error.get("text") or error["message"])
        record = error["data"] if isinstance(error.get("data"), dict) and "code" in error["data"] else error
        code = str(record["code"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    data = {k: v for k, v in record.items() if k not in ("code", "message", "text", "data")}
    return ToolRefused(code, message, data, command=command)


def _sentence(body: bytes) -> str:
    """What a server said in words, for a person: one line of at most 300 characters."""
    text = body[:2000].decode("utf-8", "replace")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:300]


def patiently(act: Callable[[], Answer], *, say: Callable[[str], None], patience_s: float = 120) -> Answer:
    """`act()`, tried again while the server does not answer: a wait or a tail outlives a server's restart.

    Raises the last NoServer or Torn (or refusal of NOT_NOW) after `patience_s` seconds, and everything else at once.
    """
    deadline: float | None = None
    for pause in _pauses():
        try:
            return act()
        except (NoServer, Torn, ToolRefused) as exc:
            if isinstance(exc, ToolRefused) and exc.code not in NOT_NOW:
                raise
            now = time.monotonic()
            if deadline is None:
                deadline = now + patience_s
                say(f"{exc.text.partition('. ')[0]}. Trying again for {patience_s:.0f} s …")
            if now + pause > deadline:
                raise
            time.sleep(pause)
    raise AssertionError("there is always one more pause")


def _pauses() -> Iterator[float]:
    """Seconds between tries: quick first, as most restarts are short, then every five."""
    pause = 0.2
    while True:
        yield pause
        pause = min(pause * 1.7, 5.0)
