"""What a refused request at /mcp lacks, said so that it can be added: the SDK's own words name no header.

Stands between the gate and the SDK. Only refusals of the request's form (400, 406, 415) are touched, and of those only the
sentence: status, JSON-RPC code and id stay as they are. Whoever tries the endpoint by hand meets these first.
"""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cotenant.server.errors import BadRequest
from cotenant.server.http.problems import rpc_problem

_FORM = frozenset({400, 406, 415})
#: Of a request only this much is looked at for its method and name; longer ones come from programs.
_LOOK = 64 * 1024
_PLAIN = re.compile(r"[A-Za-z0-9_./:-]{1,100}")
_VERSION = "2026-07-28"
_SEE = "A whole call with curl stands in docs/mcp.md, under By hand."


class Missing:
    """Passes requests on to `app` and completes the sentence of its refusals."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = bytearray()
        held: dict[str, Any] = {}  # the start of a refusal, until its body is whole
        body = bytearray()

        async def listening() -> Message:
            message = await receive()
            if len(seen) <= _LOOK:
                seen.extend(message.get("body", b""))
            return message

        async def speaking(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in _FORM and scope["method"] == "POST":
                held.update(message)
            elif not held:
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    await _answer(bytes(body), held, _advice(scope, bytes(seen)))(scope, receive, send)

        await self._app(scope, listening, speaking)


def _answer(body: bytes, start: dict[str, Any], advice: str) -> Any:
    """The refusal as it came, with `advice` behind its sentence."""
    try:
        frame = json.loads(body)
        said = str(frame["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        what = body.decode("utf-8", "replace").strip() or "the request was refused"
        return rpc_problem(BadRequest(f"{what}.", hint=advice), status=start["status"])
    if advice:
        frame["error"]["message"] = f"{said}. {advice}"
    return _as_it_came(json.dumps(frame, separators=(",", ":")).encode(), start)


def _as_it_came(body: bytes, start: dict[str, Any]) -> ASGIApp:
    headers = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    return app


def _advice(scope: Scope, body: bytes) -> str:
    """The lines to add to the request; empty where its form is whole."""
    headers = {key: value.decode("latin-1").lower() for key, value in scope["headers"]}
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        request = None
    lines = []
    if not headers.get(b"content-type", "").startswith("application/json"):
        lines.append("Content-Type: application/json")
    accept = headers.get(b"accept", "")
    if not ("*/*" in accept or ("application/json" in accept and "text/event-stream" in accept)):
        lines.append("Accept: application/json, text/event-stream")
    version = headers.get(b"mcp-protocol-version")
    sessionless = b"mcp-session-id" not in headers and (version is None or version >= _VERSION)
    method = request.get("method") if isinstance(request, dict) else None
    if isinstance(request, dict) and isinstance(method, str) and sessionless and method != "initialize":
        given = request.get("params")
        params: dict[str, Any] = given if isinstance(given, dict) else {}
        if version is None:
            lines.append(f"MCP-Protocol-Version: {_VERSION}")
        if headers.get(b"mcp-method") != method.lower():
            lines.append(f"Mcp-Method: {_plain(method)}")
        name = params.get("name", params.get("uri"))
        if name is not None and headers.get(b"mcp-name") != str(name).lower():
            lines.append(f"Mcp-Name: {_plain(str(name))}")
        missing_meta = "io.modelcontextprotocol/protocolVersion" not in (params.get("_meta") or {})
    else:
        missing_meta = False
    said = []
    if body and not isinstance(method, str):
        said.append('The body must be a JSON-RPC request: {"jsonrpc":"2.0","id":1,"method":"tools/call","params":{…}}.')
    if lines:
        said.append(f"Add the header{'s' if len(lines) > 1 else ''} {', '.join(f'`{line}`' for line in lines)}.")
    if missing_meta:
        said.append(
            f'Give params._meta: {{"io.modelcontextprotocol/protocolVersion":"{_VERSION}",'
            '"io.modelcontextprotocol/clientCapabilities":{}}.'
        )
    return " ".join([*said, _SEE]) if said else ""


def _plain(word: str) -> str:
    """A method or name as it can stand in a header line."""
    return word if _PLAIN.fullmatch(word) else "…"
