"""Refusals over plain HTTP, in a form that programs, MCP clients and people can read.

The body is `{"error": {code, message, hint, text}}`. At /mcp it is a JSON-RPC error as well, because MCP clients show
nothing else of a refused request.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from cotenant.server.errors import (
    BadRequest,
    CotenantError,
    Forbidden,
    NotFound,
    OutcomeUnknown,
    Refused,
    Unavailable,
    Unreachable,
)
from cotenant.server.mcp import sdk

#: The first class that fits decides.
_STATUS: tuple[tuple[type[CotenantError], int], ...] = (
    (BadRequest, 400),
    (Forbidden, 403),
    (NotFound, 404),
    (Refused, 409),
    (Unreachable, 502),
    (OutcomeUnknown, 504),
    (Unavailable, 503),
)


def status_of(error: CotenantError) -> int:
    """The HTTP status for an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def problem(error: CotenantError, *, status: int | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """A refusal for programs over plain HTTP."""
    body = {"error": {**error.record(), "text": error.text()}}
    return JSONResponse(body, status_code=status or status_of(error), headers=headers)


def rpc_problem(error: CotenantError, *, status: int, headers: dict[str, str] | None = None) -> JSONResponse:
    """The same for an MCP client, whose request was not read: its id is not known."""
    body: dict[str, Any] = {
        "jsonrpc": "2.0",
        "id": None,
        "error": {"code": sdk.REFUSED, "message": error.text(), "data": error.record()},
    }
    return JSONResponse(body, status_code=status, headers=headers)
