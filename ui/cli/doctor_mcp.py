"""`cotenant doctor --mcp`: plays a client against the running server, in both protocol eras, and says what is wrong.

Reads and refused calls only: nothing changes on the server but that the token's caller was seen.
"""

from __future__ import annotations

import json
import re
import time

from cotenant.ui.cli import place
from cotenant.ui.cli.agents_known import KNOWN
from cotenant.ui.cli.client import PROTOCOL
from cotenant.ui.cli.doctor import Check
from cotenant.ui.cli.problems import Problem

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from http.client import HTTPResponse
    from typing import Any

    Message = dict[str, Any]

OLDER = ("2025-11-25", "2025-06-18")
ANSWER_S = 20.0
#: Differences of clocks that people notice in ages and in `since`.
CLOCK_S = 60
#: Above this a list of tools takes a noticeable part of an agent's context.
LARGE_LIST = 48 * 1024
#: What clients' own interfaces take as the name of a tool.
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_INSTRUCTIONS = 2048
_ACCEPT = "application/json, text/event-stream"
_UPDATE = "Server and command line may be of two versions: update both."


class Wrong(Exception):
    """A check did not come out; `hint` says what to do."""

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.hint = hint


class Player:
    """A client of one era: `version` None speaks 2026-07-28, else an older protocol within a session."""

    def __init__(self, at: place.Place, version: str | None) -> None:
        self.at = at
        self.version = version
        self.session: str | None = None
        self.instructions = ""
        self._asked = 0

    @property
    def era(self) -> str:
        return self.version or PROTOCOL

    def http(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> HTTPResponse:
        """One request over a connection of its own; Wrong where no answer comes."""
        from http.client import HTTPConnection, HTTPException, HTTPSConnection

        scheme, host, port, prefix = place.split(self.at.url)
        kind = HTTPSConnection if scheme == "https" else HTTPConnection
        try:
            connection = kind(host, port, timeout=ANSWER_S)
            connection.request(method, prefix + path, body, headers)
            return connection.getresponse()
        except (OSError, HTTPException) as exc:
            why = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
            raise Wrong(
                f"no answer from {self.at.url}: {why}",
                "Start it with `cotenant serve`, or name another with --url. A tunnel or proxy in between may be down.",
            ) from exc

    def send(self, method: str, params: Message, *, ident: int | None, token: str | None = None) -> HTTPResponse:
        if self.version is None:
            params = {
                **params,
                "_meta": {
                    "io.modelcontextprotocol/protocolVersion": PROTOCOL,
                    "io.modelcontextprotocol/clientCapabilities": {},
                    "io.modelcontextprotocol/clientInfo": {"name": "cotenant-doctor", "version": "1"},
                },
            }
        frame = {"jsonrpc": "2.0", "method": method, "params": params, **({} if ident is None else {"id": ident})}
        headers = {"Accept": _ACCEPT, "Content-Type": "application/json"}
        headers["Authorization"] = f"Bearer {self.at.token if token is None else token}"
        if self.version is None:
            headers |= {"MCP-Protocol-Version": PROTOCOL, "Mcp-Method": method}
            if isinstance(name := params.get("name", params.get("uri")), str):
                headers["Mcp-Name"] = name
        elif self.session is not None:
            headers |= {"MCP-Protocol-Version": self.version, "Mcp-Session-Id": self.session}
        return self.http("POST", "/mcp", json.dumps(frame).encode(), headers)

    def frames(self, response: HTTPResponse) -> Iterator[Message]:
        """The messages of an answer, as they come."""
        if response.headers.get_content_type() != "text/event-stream":
            yield self._frame(response.read())
            return
        for line in response:
            if line.startswith(b"data:") and line[5:].strip():
                yield self._frame(line[5:])

    def _frame(self, data: bytes) -> Message:
        try:
            frame = json.loads(data)
            assert isinstance(frame, dict)
        except (ValueError, AssertionError):
            raise Wrong(
                f"what answers at {self.at.url}/mcp does not speak MCP", "Is the address that of a Cotenant server?"
            ) from None
        return frame

    def ask(self, method: str, params: Message | None = None) -> tuple[Message, HTTPResponse]:
        """(the result, the answer it came in). Raises Wrong for an error, with the server's own words."""
        self._asked += 1
        response = self.send(method, params or {}, ident=self._asked)
        for frame in self.frames(response):
            if (error := frame.get("error")) is not None:
                hint = "Get a new token: `cotenant token create NAME`." if response.status == 401 else _UPDATE
                raise Wrong(f"{method} was refused: {error.get('message')}", hint)
            if isinstance(result := frame.get("result"), dict):
                return result, response
        raise Wrong(f"{method} got no result (HTTP {response.status})", _UPDATE)

    def call(self, tool: str, arguments: Message) -> Message:
        return self.ask("tools/call", {"name": tool, "arguments": arguments})[0]


def play(args: argparse.Namespace) -> Iterator[Check]:
    """Every check, in the order in which a client would meet it."""
    try:
        at = place.find(url=args.url, token_file=args.token_file, data=args.data)
    except Problem as exc:
        yield Check("server", False, exc.text)
        return
    modern = Player(at, None)
    try:
        yield _discover(modern)
    except Wrong as exc:
        yield Check(f"hello {PROTOCOL}", False, str(exc), exc.hint)
        return
    players = [modern]
    for version in OLDER:
        player = Player(at, version)
        try:
            yield _initialize(player)
            players.append(player)
        except Wrong as exc:
            yield Check(f"hello {version}", False, str(exc), exc.hint)
    yield from _each("clock", lambda: _clock(modern))
    yield from _each("door", lambda: _door(modern))
    yield from _each("token", lambda: _token(modern))
    for player in players:
        for name, check in (("call", _call), ("refusal", _refusal), ("subscribe", _subscribe)):
            yield from _each(f"{name} {player.era}", lambda check=check, player=player: check(player))  # type: ignore[misc]
    yield from _each("tools", lambda: _tools(players))
    yield from _each("clients", lambda: _clients(modern))
    yield from _each("instructions", lambda: _instructions(modern))
    for player in players[1:]:
        _goodbye(player)


def _each(name: str, check: Callable[[], Check]) -> Iterator[Check]:
    try:
        yield check()
    except Wrong as exc:
        yield Check(name, False, str(exc), exc.hint)


def _discover(player: Player) -> Check:
    result, _ = player.ask("server/discover")
    player.instructions = str(result.get("instructions") or "")
    versions = result.get("supportedVersions") or []
    if PROTOCOL not in versions:
        raise Wrong(f"it speaks {', '.join(map(str, versions)) or 'no version that it names'}", _UPDATE)
    info = (result.get("_meta") or {}).get("io.modelcontextprotocol/serverInfo") or result.get("serverInfo") or {}
    return Check(
        f"hello {PROTOCOL}",
        True,
        f"{info.get('name', 'a server')} {info.get('version', '')} at {player.at.url}".strip(),
    )


def _initialize(player: Player) -> Check:
    hello = {
        "protocolVersion": player.version,
        "capabilities": {},
        "clientInfo": {"name": "cotenant-doctor", "version": "1"},
    }
    result, response = player.ask("initialize", hello)
    player.session = response.headers.get("mcp-session-id")
    if result.get("protocolVersion") != player.version:
        raise Wrong(f"it answered with {result.get('protocolVersion')}", _UPDATE)
    if player.session is None:
        raise Wrong(
            "it opened no session", "A proxy in between may drop the header Mcp-Session-Id: let it through both ways."
        )
    done = player.send("notifications/initialized", {}, ident=None)
    done.read()
    if done.status != 202:
        raise Wrong(f"it did not take notifications/initialized (HTTP {done.status})", _UPDATE)
    return Check(f"hello {player.version}", True, "session opened")


def _clock(player: Player) -> Check:
    from email.utils import parsedate_to_datetime

    _, response = player.ask("server/discover")
    try:
        there = parsedate_to_datetime(response.headers["Date"]).timestamp()
    except (TypeError, ValueError):
        return Check("clock", None, "the server's answers have no date")
    apart = round(there - time.time())
    if abs(apart) > CLOCK_S:
        way = "ahead of" if apart > 0 else "behind"
        return Check(
            "clock", None, f"the server's clock is {abs(apart)} s {way} this machine's",
            "Leases are not touched by that, but times that you compare with your own are. Set both by NTP.",
        )  # fmt: skip
    return Check("clock", True, f"within {CLOCK_S} s of the server's")


def _door(player: Player) -> Check:
    """What a client without a right token meets: a refusal that makes it ask for one, and no way into a login."""
    refused = player.send("server/discover", {}, ident=1, token="ctn_wrong")
    refused.read()
    if refused.status != 401 or "bearer" not in (refused.headers.get("WWW-Authenticate") or "").lower():
        raise Wrong(
            f"a wrong token was answered with HTTP {refused.status}",
            "Something in between answers in the server's place, or lets everybody in: check the proxy.",
        )
    for path in ("/.well-known/oauth-protected-resource", "/.well-known/oauth-authorization-server"):
        found = player.http("GET", path, None, {})
        found.read()
        if found.status < 400:
            raise Wrong(
                f"{path} answers with HTTP {found.status}",
                "Clients start a login when they see it and ignore their token: let the proxy answer 404 there.",
            )
    return Check("door", True, "a wrong token gets 401, and nobody is sent to a login")


def _token(player: Player) -> Check:
    result = player.call("quota_status", {})
    if result.get("isError"):
        raise Wrong(_text(result), "Make a token with the scopes read and write for an agent.")
    me = (result.get("structuredContent") or {}).get("me") or {}
    scopes = [str(scope) for scope in me.get("scopes") or ()]
    said = f"{me.get('name')}, {me.get('kind')} of {me.get('owner')}: {', '.join(scopes)} (from {player.at.token_from})"
    if me.get("kind") == "human":
        return Check(
            "token",
            None,
            said,
            "An agent under this token would pass for a person. Make it one of its own: `cotenant token create NAME`.",
        )
    if "write" not in scopes:
        return Check("token", None, said, "It may look, and neither lease nor submit: that needs the scope write.")
    return Check("token", True, said)


def _call(player: Player) -> Check:
    began = time.monotonic()
    result = player.call("quota_status", {})
    took = (time.monotonic() - began) * 1000
    if not isinstance(result.get("structuredContent"), dict):
        raise Wrong(f"quota_status gave no answer: {_text(result)}", _UPDATE)
    return Check(f"call {player.era}", True, f"quota_status answered in {took:.0f} ms")


def _refusal(player: Player) -> Check:
    result = player.call("get_job", {"job_id": "job_doctor"})
    text = _text(result)
    if not result.get("isError") or not re.match(r"[a-z_]+: ", text) or "structuredContent" in result:
        raise Wrong(f"a job that is not there was answered with {text[:80]!r}", _UPDATE)
    return Check(f"refusal {player.era}", True, text.partition(":")[0])


def _subscribe(player: Player) -> Check:
    uri = "cotenant://gpus"
    name = f"subscribe {player.era}"
    if player.version is not None:
        player.ask("resources/subscribe", {"uri": uri})
        return Check(name, True, uri)
    response = player.send("subscriptions/listen", {"notifications": {"resourceSubscriptions": [uri]}}, ident=1)
    try:
        for frame in player.frames(response):
            if frame.get("method") == "notifications/subscriptions/acknowledged":
                return Check(name, True, uri)
            break
    except OSError as exc:
        raise Wrong(
            f"the stream of a subscription brought nothing within {ANSWER_S:.0f} s",
            "A proxy in between keeps answers back until they are whole: turn its buffering off for /mcp.",
        ) from exc
    finally:
        response.close()
    raise Wrong(f"a subscription was not acknowledged (HTTP {response.status})", _UPDATE)


def _tools(players: list[Player]) -> Check:
    lists = {player.era: [tool["name"] for tool in player.ask("tools/list")[0]["tools"]] for player in players}
    if len({tuple(names) for names in lists.values()}) != 1:
        raise Wrong("the eras list different tools", _UPDATE)
    tools = players[0].ask("tools/list")[0]["tools"]
    size = len(json.dumps(tools, ensure_ascii=False, separators=(",", ":")).encode())  # as on the wire
    said = f"{len(tools)} tools, {size / 1024:.0f} kB"
    if size > LARGE_LIST:
        return Check("tools", None, said, "A client with little room is better off with /mcp?tools=core.")
    return Check("tools", True, said)


def _clients(player: Player) -> Check:
    """Whether the list fits into what each client is known to take, beside the servers it may have already."""
    tools = player.ask("tools/list")[0]["tools"]
    bad, tight = [], []
    for tool in tools:
        if not _NAME.fullmatch(tool["name"]):
            bad.append(f"the name {tool['name']!r} is not taken by every client")
    for known in KNOWN.values():
        limits = known.limits
        prefix = len("mcp__cotenant__")
        if long := [tool["name"] for tool in tools if prefix + len(tool["name"]) > limits.get("name", 128)]:
            bad.append(f"{known.title} takes no name as long as {long[0]}")
        if long := [
            tool["name"] for tool in tools if len(str(tool.get("description"))) > limits.get("description", 1 << 20)
        ]:
            bad.append(f"{known.title} cuts the description of {long[0]}")
        if len(tools) > limits.get("tools", 1 << 20) // 2:
            tight.append(f"{known.title} takes {limits['tools']} tools of all servers together")
    if bad:
        raise Wrong("; ".join(bad), _UPDATE)
    if tight:
        return Check(
            "clients", None, "; ".join(tight), "Give such a client the core toolset: `cotenant mcp-config` does."
        )
    return Check("clients", True, "names, descriptions and number fit every client that is known")


def _instructions(player: Player) -> Check:
    size = len(player.instructions.encode())
    if not 0 < size <= _INSTRUCTIONS:
        raise Wrong(f"the instructions have {size} bytes; clients read the first {_INSTRUCTIONS}", _UPDATE)
    return Check("instructions", True, f"{size} bytes of house rules")


def _goodbye(player: Player) -> None:
    """Give the session back; the server ends it by itself if that fails."""
    headers = {"Authorization": f"Bearer {player.at.token}", "Mcp-Session-Id": player.session or ""}
    try:
        player.http("DELETE", "/mcp", None, {**headers, "MCP-Protocol-Version": player.version or ""}).read()
    except (Wrong, OSError):
        return


def _text(result: Message) -> str:
    return " ".join(str(part.get("text", "")) for part in result.get("content") or () if isinstance(part, dict))
