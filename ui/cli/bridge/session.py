"""What a client of an older protocol has at the server: a session, its standing stream, its subscriptions.

A server that was started anew knows the session no more. Then the bridge opens another one in the client's name, with
the client's own words, and subscribes again; the client notices nothing but that it is told to read again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from cotenant.ui.cli.bridge import frames
from cotenant.ui.cli.bridge.upstream import Upstream, messages
from cotenant.ui.cli.problems import NoServer, Torn

Forward = Callable[[bytes, frames.Message, int], Awaitable[None]]
_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 5.0)
_TOKEN_PAUSE_S = 5.0
#: A stream that ended this soon did not stand: the next try waits longer.
_STOOD_S = 5.0
_BYE_S = 0.5


def pause(tries: int) -> float:
    """Seconds before the next try after `tries` that failed."""
    return _PAUSES[min(tries, len(_PAUSES) - 1)]


class _TokenRefused(Exception):
    """The server does not know the token (any more)."""


class Session:
    """The session of one older client. Requests wait for `ready`; `number` rises with every session opened."""

    def __init__(self, upstream: Upstream, forward: Forward, say: Callable[[str], None]) -> None:
        self._upstream = upstream
        self._forward = forward
        self._say = say
        self._hello: frames.Message | None = None
        self._level: frames.Message | None = None
        self._uris: dict[str, None] = {}
        self._id: str | None = None
        self._version: str | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._asked = 0
        self.number = 0
        self.ready = asyncio.Event()
        self.ready.set()

    def headers(self) -> dict[str, str]:
        """What every request within the session carries."""
        out = {} if self._id is None else {"Mcp-Session-Id": self._id}
        # A version before headers were is not named in one.
        return {**out, "MCP-Protocol-Version": self._version} if self._version else out

    # ---- what the client does ---------------------------------------------------------------------

    def opened(self, hello: frames.Message, result: Any, headers: dict[str, str]) -> None:
        """The server answered the client's initialize."""
        self._stop()
        self._hello = hello
        self._uris.clear()
        self._level = None
        self._take(result, headers)

    def _take(self, result: Any, headers: dict[str, str]) -> None:
        self._id = headers.get("mcp-session-id")
        version = result.get("protocolVersion") if isinstance(result, dict) else None
        self._version = frames.header_value(version) if isinstance(version, str) else None
        self.number += 1

    def begin(self) -> None:
        """The client said that it is ready: open its standing stream; requests wait until it stands."""
        if self._id is not None and self._keeper is None:
            self.ready.clear()
            self._keeper = asyncio.create_task(self._keep())

    def note(self, frame: frames.Frame) -> None:
        """A request was answered with success: what has to be said again in a new session is kept."""
        uri = frame.params.get("uri")
        if frame.method == "resources/subscribe" and isinstance(uri, str):
            self._uris[uri] = None
        elif frame.method == "resources/unsubscribe" and isinstance(uri, str):
            self._uris.pop(uri, None)
        elif frame.method == "logging/setLevel":
            self._level = frame.params

    def lost(self) -> bool:
        """The server knows the session no more: open another; whether that can be done."""
        if self._hello is None:
            return False
        self._stop()
        self.ready.clear()
        self._keeper = asyncio.create_task(self._keep(renew=True))
        return True

    def _stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        self.ready.set()

    async def close(self) -> None:
        """Give the session back, if that can be done quickly."""
        self._stop()
        if self._id is None:
            return
        with contextlib.suppress(NoServer, Torn, TimeoutError):
            async with asyncio.timeout(_BYE_S):
                async with self._upstream.request("DELETE", self.headers()) as answer:
                    await answer.body()

    # ---- the standing stream ----------------------------------------------------------------------

    async def _keep(self, *, renew: bool = False) -> None:
        """Hold the stream open for as long as the session lives, and the session for as long as the client does."""
        tries, gap, new = 0, False, True  # new: opened just now, so the server must know it
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                if renew:
                    await self._renew()
                    renew, new, gap = False, True, True
                refused = False
                async with self._upstream.request("GET", self.headers()) as answer:
                    if answer.status == 200:
                        if gap:
                            await self._tell_all()
                        new = False
                        self.ready.set()
                        async for data, message in messages(answer):
                            await self._forward(data, message, self.number)
                    elif answer.status in (404, 405) and not new:
                        await answer.body()
                        renew = True
                        continue
                    elif answer.status in (404, 405):  # a server without standing streams
                        self.ready.set()
                        return
                    # 503: it is going down or coming up. Anything else, such as too many streams, is no reason to keep
                    # requests waiting: they need no stream.
                    refused = answer.status not in (200, 503)
            except _TokenRefused:
                refused = True
            except (NoServer, Torn):
                refused = new = False  # whoever answers next may be another server
            gap = True
            if refused:
                self.ready.set()  # so that the next call is sent; where it is refused too, that says why
                await asyncio.sleep(_TOKEN_PAUSE_S)
                continue
            # Until the stream stands again it is not known whether the session still does.
            self.ready.clear()
            tries = 0 if loop.time() - began > _STOOD_S else tries + 1
            await asyncio.sleep(pause(tries))

    async def _renew(self) -> None:
        """A new session with the client's own greeting, and what it had asked for.

        Raises:
            NoServer, Torn: it could not be opened now.
            _TokenRefused: not with this token.
        """
        assert self._hello is not None
        self._id = self._version = None
        hello = {"jsonrpc": "2.0", "id": self._own_id(), "method": "initialize", "params": self._hello}
        answer, said = await self._upstream.post(hello, {})
        result = (said or {}).get("result")
        if answer.status == 401:
            raise _TokenRefused
        if not isinstance(result, dict):
            raise Torn(f"{self._upstream.url} did not open a session (HTTP {answer.status}).")
        self._take(result, answer.headers)
        await self._upstream.post(frames.notification("notifications/initialized"), self.headers())
        if self._level is not None:
            await self._ask("logging/setLevel", self._level)
        for uri in list(self._uris):
            await self._ask("resources/subscribe", {"uri": uri})
        self._say("the server was started anew; the session was opened again")

    async def _ask(self, method: str, params: frames.Message) -> None:
        body = {"jsonrpc": "2.0", "id": self._own_id(), "method": method, "params": params}
        await self._upstream.post(body, self.headers())

    def _own_id(self) -> str:
        self._asked += 1
        return f"cotenant-bridge-{self._asked}"

    async def _tell_all(self) -> None:
        """What was missed is not repeated by anybody, so everything watched has to be read again."""
        for uri in list(self._uris):
            told = frames.notification("notifications/resources/updated", {"uri": uri})
            await self._forward(frames.dumps(told), told, self.number)
