"""JSON-RPC frames: what a line holds, whether it may be sent twice, and the answers that the bridge gives by itself."""

from __future__ import annotations

import base64
import json
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

PARSE_ERROR, INVALID_REQUEST, BRIDGE_ERROR = -32700, -32600, -32000
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
SUBSCRIPTION_KEY = "io.modelcontextprotocol/subscriptionId"
#: Where the server puts a refusal for programs; the bridge's own refusals stand in the same place.
ERROR_META = "cotenant.dev/error"

#: The header Mcp-Name repeats one parameter (2026-07-28, and its tasks extension).
_NAME_OF = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
#: Requests that change nothing, or to the same end when they come twice. `initialize` only opens a session that runs out.
_REPEATABLE = frozenset({
    "initialize", "ping", "server/discover", "tools/list", "resources/list", "resources/templates/list", "resources/read",
    "resources/subscribe", "resources/unsubscribe", "prompts/list", "prompts/get", "completion/complete", "logging/setLevel",
    "tasks/get", "tasks/cancel", "subscriptions/listen",
})  # fmt: skip


class BadFrame(Exception):
    """A line that is no frame; `answer` is what its sender is told."""

    def __init__(self, code: int, message: str, ident: Any = None) -> None:
        super().__init__(message)
        self.answer = error(ident, code, message)


class Frame:
    """One message of the client. `kind` is request, notification or response; `raw` is what is sent on."""

    __slots__ = ("kind", "message", "raw", "version")

    def __init__(self, raw: bytes, message: Message, kind: str) -> None:
        self.raw = raw
        self.message = message
        self.kind = kind
        meta = self.params.get("_meta")
        version = meta.get(VERSION_KEY) if isinstance(meta, dict) else None
        #: The protocol version that the frame itself names: only frames of 2026-07-28 and later do.
        self.version: str | None = version if isinstance(version, str) and version else None

    @property
    def method(self) -> str:
        return str(self.message.get("method", ""))

    @property
    def params(self) -> Message:
        found = self.message.get("params")
        return found if isinstance(found, dict) else {}

    @property
    def ident(self) -> Any:
        return self.message.get("id")

    @property
    def key(self) -> str:
        return key_of(self.ident)

    @property
    def tool(self) -> str | None:
        """The name of the tool that a tools/call calls."""
        name = self.params.get("name")
        return name if self.method == "tools/call" and isinstance(name, str) else None

    @property
    def arguments(self) -> Message | None:
        """The arguments of a tools/call; None where they are no object, which is for the server to refuse."""
        found = self.params.get("arguments")
        return {} if found is None else found if isinstance(found, dict) else None

    def with_argument(self, name: str, value: Any) -> Frame:
        """The same call with one argument more."""
        message = {**self.message, "params": {**self.params, "arguments": {**(self.arguments or {}), name: value}}}
        try:
            return Frame(dumps(message), message, self.kind)
        except ValueError:  # a number such as 1e999, which Python cannot write back as JSON: the server refuses it
            return self

    @property
    def read_only(self) -> bool:
        """Whether the method may be sent twice whatever it carries; tools/call is decided by its tool."""
        return self.method in _REPEATABLE

    def headers(self) -> dict[str, str]:
        """What 2026-07-28 wants to see outside the body; nothing for older frames."""
        if self.version is None:
            return {}
        out = {"MCP-Protocol-Version": header_value(self.version), "Mcp-Method": header_value(self.method)}
        field = "taskId" if self.method.startswith("tasks/") else _NAME_OF.get(self.method)
        value = self.params.get(field) if field else None
        return {**out, "Mcp-Name": header_value(value)} if isinstance(value, str) else out


def parse(line: bytes) -> Frame:
    """One line as a frame.

    Raises:
        BadFrame: it is not JSON, or no single JSON-RPC message.
    """
    try:
        message = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        why = "it is nested too deeply" if isinstance(exc, RecursionError) else "it is not JSON in UTF-8"
        raise BadFrame(PARSE_ERROR, f"This line cannot be read: {why}. Send one JSON-RPC message per line.") from None
    if isinstance(message, list):
        raise BadFrame(INVALID_REQUEST, "Batches are not taken. Send each message on a line of its own.")
    if not isinstance(message, dict):
        raise BadFrame(INVALID_REQUEST, "A message must be a JSON object.")
    ident = message.get("id")
    usable = ident if isinstance(ident, str | int | float) and not isinstance(ident, bool) else None
    if message.get("jsonrpc") != "2.0":
        raise BadFrame(INVALID_REQUEST, 'A message must have "jsonrpc": "2.0".', usable)
    method = message.get("method")
    if method is None and ("result" in message or "error" in message) and usable is not None:
        return Frame(line, message, "response")
    if not isinstance(method, str) or not method:
        raise BadFrame(INVALID_REQUEST, "A message needs a method, or the result or error of a request.", usable)
    if "id" not in message:
        return Frame(line, message, "notification")
    if usable is None:
        raise BadFrame(INVALID_REQUEST, "The id of a request must be a string or a number.")
    return Frame(line, message, "request")


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def key_of(ident: Any) -> str:
    """An id as a dictionary key: 1 and "1" are two ids."""
    return json.dumps(ident)


def dumps(message: Message) -> bytes:
    """One line without its end. Raises ValueError for NaN and the infinities."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()


def header_value(value: str) -> str:
    """`value` as it can stand in a header: as it is, or in the base64 form that the protocol has for all others."""
    plain = value.isascii() and value.isprintable() and value == value.strip()
    if plain and not (value.startswith("=?base64?") and value.endswith("?=")):
        return value
    return f"=?base64?{base64.b64encode(value.encode('utf-8', 'surrogatepass')).decode()}?="


# ---- what the bridge says by itself ---------------------------------------------------------------


def error(ident: Any, code: int, message: str, data: Any = None) -> Message:
    body: Message = {"code": code, "message": message}
    return {"jsonrpc": "2.0", "id": ident, "error": body if data is None else {**body, "data": data}}


def failure(frame: Frame, code: str, text: str, **data: Any) -> Message:
    """The answer to a request that could not be carried to its end; `code` is a word as the server's refusals have it.

    Models are shown the text of a failed tool, but hardly ever an error of the protocol: so a call gets the first.
    """
    record = {"code": code, "message": text, **data}
    if frame.method != "tools/call":
        return error(frame.ident, BRIDGE_ERROR, f"{code}: {text}", record)
    result: Message = {
        "content": [{"type": "text", "text": f"{code}: {text}"}],
        "isError": True,
        "_meta": {ERROR_META: record},
    }
    if frame.version is not None:
        result["resultType"] = "complete"
    return {"jsonrpc": "2.0", "id": frame.ident, "result": result}


def notification(method: str, params: Message | None = None) -> Message:
    return {"jsonrpc": "2.0", "method": method, **({} if params is None else {"params": params})}
