"""The server as the bridge reaches it: its address, the token, the headers of every request, the tools it has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import urllib.parse
from collections.abc import AsyncIterator, Callable
from typing import Any

from cotenant.ui.cli import place
from cotenant.ui.cli.bridge import frames
from cotenant.ui.cli.bridge.http import Answer, Pool
from cotenant.ui.cli.client import PROTOCOL, WRITES
from cotenant.ui.cli.problems import NoServer, Problem, Torn

#: The first call waits this long for the list of tools; without it a call is taken for one that may not be repeated.
_CATALOG_S = 3.0


class Upstream:
    """Requests to one server. `find` gives its address and token, and is asked again when either may have changed."""

    def __init__(self, find: Callable[[], place.Place], *, tools: str | None, silence_s: float) -> None:
        self._find = find
        self._place: place.Place | None = None
        self._path = f"/mcp?tools={tools}" if tools else "/mcp"
        self._pool = Pool(silence_s=silence_s)
        # Where the agent sits, for the list of agents: said by us, shown by the server as our words.
        self._about = {
            "Cotenant-Agent-Host": urllib.parse.quote(socket.gethostname()[:255]),
            "Cotenant-Agent-Cwd": urllib.parse.quote(_cwd()[:1024], safe="/"),
        }

    @property
    def url(self) -> str:
        return self._place.url if self._place is not None else "the server"

    def reload(self) -> bool:
        """Look for the address and the token anew; whether the token is another one now. Keeps the old on failure."""
        before = self._place.token if self._place is not None else None
        with contextlib.suppress(Problem):
            self._place = self._find()
        return self._place is not None and self._place.token != before

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, headers: dict[str, str], body: bytes = b"", *, fresh: bool = False
    ) -> AsyncIterator[Answer]:
        """One request to /mcp; a refused token is read again once, because tokens are renewed in place.

        Raises:
            NoServer: nothing was sent.
            Torn: sent, and no whole answer came.
        """
        if self._place is None:
            try:
                self._place = self._find()
            except NoServer:
                raise
            except Problem as exc:
                raise NoServer(exc.text) from exc
        try:
            async with self._once(method, headers, body, fresh) as answer:
                if answer.status != 401 or not self.reload():
                    yield answer
                    return
                await answer.body()
        except NoServer:
            self.reload()  # a server with our data directory may be back at another port
            raise
        async with self._once(method, headers, body, fresh) as answer:
            yield answer

    @contextlib.asynccontextmanager
    async def _once(self, method: str, headers: dict[str, str], body: bytes, fresh: bool) -> AsyncIterator[Answer]:
        assert self._place is not None
        sent = {
            "Accept": "application/json, text/event-stream" if method == "POST" else "text/event-stream",
            "Authorization": f"Bearer {self._place.token}",
            **self._about,
            **headers,
        }
        if method == "POST":
            sent["Content-Type"] = "application/json"
        async with self._pool.request(self._place.url, method, self._path, sent, body, fresh=fresh) as answer:
            yield answer

    async def post(self, message: frames.Message, headers: dict[str, str]) -> tuple[Answer, frames.Message | None]:
        """A message of the bridge's own, and the answer to it: of a response or an error of HTTP, None for others.

        Raises NoServer or Torn.
        """
        async with self.request("POST", headers, frames.dumps(message)) as answer:
            return answer, await response_in(answer, message.get("id"))

    def close(self) -> None:
        self._pool.close()


async def messages(answer: Answer) -> AsyncIterator[tuple[bytes, frames.Message]]:
    """The messages of an answer, each as one line and as what it says; what is none is left out. Raises Torn."""
    if answer.kind == "text/event-stream":
        async for data in answer.events():
            if (message := message_of(data)) is not None:
                yield data if b"\n" not in data and b"\r" not in data else frames.dumps(message), message
        return
    data = await answer.body()
    if (message := message_of(data)) is not None:
        yield data if b"\n" not in data and b"\r" not in data else frames.dumps(message), message


def message_of(data: bytes) -> frames.Message | None:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and message.get("jsonrpc") == "2.0" else None


async def response_in(answer: Answer, ident: Any) -> frames.Message | None:
    """The response to `ident` in an answer; an error without an id counts, as the refusal of a whole request has none."""
    found: frames.Message | None = None
    async for _, message in messages(answer):
        if "method" not in message and message.get("id") in (ident, None):
            found = message
    return found


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


class Catalog:
    """The server's tools: which of them may be called twice, and which take a request_id."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tools: dict[str, tuple[bool, bool]] | None = None
        self._loading: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Ask for the list in the background, unless that is being done or was done."""
        if self._tools is None and (self._loading is None or self._loading.done()):
            self._loading = asyncio.create_task(self._load())

    def forget(self) -> None:
        """The server may be another one: ask again before the next call."""
        self._tools = None

    async def _load(self) -> None:
        meta = {frames.VERSION_KEY: PROTOCOL, "io.modelcontextprotocol/clientCapabilities": {}}
        body = {"jsonrpc": "2.0", "id": "cotenant-bridge-tools", "method": "tools/list", "params": {"_meta": meta}}
        headers = {"MCP-Protocol-Version": PROTOCOL, "Mcp-Method": "tools/list"}
        try:
            _, answer = await self._upstream.post(body, headers)
            listed = (answer or {})["result"]["tools"]
            self._tools = {str(tool["name"]): _repeating(tool) for tool in listed}
        except (Problem, KeyError, TypeError, AttributeError):
            return  # the call itself will tell what is wrong with the server

    async def look(self, name: str) -> tuple[bool, bool]:
        """(may be called twice, takes a request_id), as far as it is known within a moment."""
        if self._tools is None:
            self.begin()
            assert self._loading is not None
            await asyncio.wait({self._loading}, timeout=_CATALOG_S)
        return (self._tools or {}).get(name, (False, name in WRITES))


def _repeating(tool: frames.Message) -> tuple[bool, bool]:
    hints = tool.get("annotations") or {}
    read_only = hints.get("readOnlyHint") is True
    takes_id = not read_only and "request_id" in (tool.get("inputSchema") or {}).get("properties", {})
    return read_only or hints.get("idempotentHint") is True, takes_id


__all__ = ["Catalog", "Torn", "Upstream", "message_of", "messages", "response_in"]
