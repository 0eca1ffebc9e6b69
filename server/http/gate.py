"""Who asks, and how much they may send: in front of /mcp and /operate.

A bearer token names the caller; cookies and query parameters never do. There are no OAuth metadata routes: tokens are
static, and clients that find such routes start a login instead of sending the token they were given.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cotenant.server.errors import BadRequest, CotenantError, Forbidden
from cotenant.server.mcp import sdk

if TYPE_CHECKING:
    from cotenant.server.control import Control

MAX_BODY = 4 * 1024 * 1024
_MAX_DRAIN = 64 * 1024 * 1024
_DRAIN_S = 10.0
Problem = Callable[..., JSONResponse]


class _TooLarge(Exception):
    """The body is longer than MAX_BODY."""


class Gate:
    """Lets requests with a living token and a body of at most MAX_BODY bytes through to `app`.

    The caller stands in the scope under `sdk.CALLER`, and a function that looks it up anew under `sdk.CALLER_NOW`.
    """

    def __init__(self, app: ASGIApp, control: Control, *, door: str, problem: Problem) -> None:
        self._app = app
        self._control = control
        self._door = door
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        token = _bearer(headers.get(b"authorization", b""))
        find = self._control.auth.caller_of
        caller = find(token, door=self._door) if token else None
        if caller is None:
            await self._problem(
                _unauthorized(bool(token)), status=401, headers={"WWW-Authenticate": 'Bearer realm="cotenant"'}
            )(scope, receive, send)
            return
        try:
            if int(headers.get(b"content-length", b"0")) > MAX_BODY:
                raise _TooLarge
        except ValueError:
            await self._problem(BadRequest("the header Content-Length is not a number."), status=400)(
                scope, receive, send
            )
            return
        except _TooLarge:
            await self._refuse_size(scope, receive, send)
            return
        scope = {
            **scope,
            "user": sdk.user_of(caller),
            sdk.CALLER: caller,
            sdk.CALLER_NOW: lambda: find(token, door=self._door),
        }
        begun = False
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                raise _TooLarge
            return message

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except _TooLarge:  # a body without a declared length
            if begun:
                raise
            await self._refuse_size(scope, receive, send)

    async def _refuse_size(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _drain(receive)
        refused = BadRequest(
            f"the request is larger than {MAX_BODY // 1024 // 1024} MiB; nothing was done.",
            hint="Send less: put long data into a file on the host and give its path.",
            code="too_large",
            data={"limit_bytes": MAX_BODY},
        )
        await self._problem(refused, status=413)(scope, receive, send)


async def _drain(receive: Receive) -> None:
    """Read on and forget: a client that is still sending when the connection closes never sees the answer."""
    dropped = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while dropped < _MAX_DRAIN:
                message = await receive()
                dropped += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


def _bearer(header: bytes) -> str:
    """The token of an Authorization header, or an empty string."""
    scheme, _, token = header.decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _unauthorized(given: bool) -> CotenantError:
    return Forbidden(
        "the token is unknown, expired or revoked." if given else "there is no token in this request.",
        hint=(
            "Send the header Authorization: Bearer TOKEN. A person who runs the server makes a token with "
            "`cotenant token create NAME --kind agent --owner OWNER --scopes read,write`."
        ),
        code="unauthorized",
    )
