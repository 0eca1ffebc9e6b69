"""Session ids of older clients over a restart: who is told that its session is gone, and who goes on without noticing.

A session lives in memory, so a restart ends it. The protocol then wants a 404, upon which a client starts anew. Measured:
many never do (the TypeScript SDK 1.x fails at every later call), so they are served without a session. The few that are
known to start anew get their 404, because only a session carries questions and a standing stream. Which kind a client is
stands in the session id itself, as a mark at its end: nothing has to be remembered over the restart.
"""

from __future__ import annotations

import json

from starlette.types import Message, Receive, Send

#: Clients that start anew on a 404, by the name in their initialize (facts of 2026-11: Codex's MCP client does, once).
STARTS_ANEW = frozenset({"codex-mcp-client"})
_MARK = "-r"
_MAX_ENDED = 10_000


def marked(session: str) -> str:
    """The id as a client that starts anew is given it."""
    return session + _MARK


def unmarked(session: str) -> tuple[str, bool]:
    """(the id as the SDK knows it, whether its client starts anew)."""
    return (session[: -len(_MARK)], True) if session.endswith(_MARK) else (session, False)


class Ended:
    """Sessions that their clients ended. Whoever uses one of them afterwards is told so, whatever kind of client it is."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def add(self, session: str) -> None:
        self._ids[session] = None
        while len(self._ids) > _MAX_ENDED:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, session: str) -> bool:
        return session in self._ids


async def opening(receive: Receive) -> tuple[bool, Receive]:
    """(whether this is the initialize of a client that starts anew, the same request to be read from the beginning)."""
    read: list[Message] = []
    while True:
        message = await receive()
        read.append(message)
        if message["type"] != "http.request" or not message.get("more_body", False):
            break

    async def again() -> Message:
        return read.pop(0) if read else await receive()

    body = b"".join(message.get("body", b"") for message in read)
    # Most first requests are from somebody else: do not parse what cannot be it.
    return any(name.encode() in body for name in STARTS_ANEW) and _client_of(body) in STARTS_ANEW, again


def _client_of(body: bytes) -> str:
    """The name that an initialize request gives, or an empty string."""
    try:
        frame = json.loads(body)
        name = frame["params"]["clientInfo"]["name"] if frame["method"] == "initialize" else ""
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return name if isinstance(name, str) else ""


#: How the SDK begins its answer to a frame that is none; what follows are lines of its validator's, values and all.
_DUMP = b'"message":"Validation error:'
_BROKEN = json.dumps(
    {
        "jsonrpc": "2.0",
        "id": None,
        "error": {
            "code": -32600,
            "message": "invalid_request: the body is not one JSON-RPC 2.0 request, notification or response. "
            "Send an object with jsonrpc, method and, for a request, an id that is a number or a text.",
        },
    }
).encode()


def worded(send: Send) -> Send:
    """Answers to frames that are none, in our words instead of the validator's."""
    held: Message | None = None

    async def wording(message: Message) -> None:
        nonlocal held
        if message["type"] == "http.response.start" and message["status"] == 400:
            held = message
            return
        if held is not None:
            start, held = held, None
            if _DUMP in message.get("body", b"")[:200].replace(b'": "', b'":"'):
                message = {**message, "body": _BROKEN}
                rest = [(key, value) for key, value in start["headers"] if key.lower() != b"content-length"]
                start = {**start, "headers": [*rest, (b"content-length", str(len(_BROKEN)).encode())]}
            await send(start)
        await send(message)

    return wording
