"""The page's stream of server-sent events: it says "look again", never what there is to see.

So nothing piles up for a slow reader, who loses states in between and never the last one, and nothing that a caller may not
see can get into it. At most one mark a second goes to each reader; a reader that takes none costs nobody else anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from starlette.types import Receive, Scope, Send

from cotenant.server.control.context import OVERVIEW

#: Between two marks to one reader (design, section 10).
INTERVAL_S: Final = 1.0
#: A commit seldom comes alone, and a revocation is known in memory a moment after it is on disk.
GATHER_S: Final = 0.1
#: A sign of life, at which also the session is looked at again: it may end without anything happening.
BEAT_S: Final = 15.0
#: A reader that takes nothing for this long is given up.
SEND_S: Final = 30.0
MAX_EACH: Final = 8
MAX_ALL: Final = 256


class TooManyStreams(Exception):
    """This caller, or everybody together, has as many streams as there may be."""


class Live:
    """All readers of the stream. `changed` is called after each commit and observation."""

    def __init__(self) -> None:
        self._wakes: set[asyncio.Event] = set()
        self._each: Counter[str] = Counter()
        self._closing = asyncio.Event()

    def changed(self, addresses: frozenset[str]) -> None:
        """Quick, never raises; called on the event loop."""
        if OVERVIEW in addresses:
            for wake in self._wakes:
                wake.set()

    def close(self) -> None:
        """The server stops: every stream ends in good order."""
        self._closing.set()
        for wake in self._wakes:
            wake.set()

    @contextlib.contextmanager
    def reading(self, caller: str) -> Iterator[Stream]:
        """A stream for one reader.

        Raises:
            TooManyStreams: of this caller there are MAX_EACH, or MAX_ALL altogether, or the server stops.
        """
        if self._each[caller] >= MAX_EACH or len(self._wakes) >= MAX_ALL or self._closing.is_set():
            raise TooManyStreams
        wake = asyncio.Event()
        self._wakes.add(wake)
        self._each[caller] += 1
        try:
            yield Stream(wake, self._closing)
        finally:
            self._wakes.discard(wake)
            self._each[caller] -= 1
            if not self._each[caller]:
                del self._each[caller]


class Stream:
    """What one reader is sent."""

    def __init__(self, wake: asyncio.Event, closing: asyncio.Event) -> None:
        self._wake = wake
        self._closing = closing

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, living: Callable[[], bool], headers: dict[str, str]
    ) -> None:
        """Answer a request with the stream until the reader goes, `living` says no, or the server stops."""
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        gone = asyncio.create_task(_until_gone(receive))
        pump = asyncio.create_task(self._pump(send, living))
        try:
            await asyncio.wait((gone, pump), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()  # a mistake of ours belongs into the log
        finally:
            for task in (gone, pump):
                task.cancel()
            await asyncio.gather(gone, pump, return_exceptions=True)

    async def _pump(self, send: Send, living: Callable[[], bool]) -> None:
        async def say(frame: str, *, more: bool = True) -> None:
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": frame.encode(), "more_body": more})

        with contextlib.suppress(TimeoutError, OSError):
            # Whoever just opened the stream has a page that may be older than the stream.
            await say("retry: 3000\n\nevent: changed\ndata: 0\n\n")
            number = 0
            while True:
                happened = await self._something()
                if self._closing.is_set():
                    await say("event: end\ndata: the server stops\n\n", more=False)
                    return
                if not living():
                    await say("event: end\ndata: the session is over\n\n", more=False)
                    return
                if not happened:
                    await say(": still here\n\n")
                    continue
                number += 1
                await say(f"event: changed\ndata: {number}\n\n")
                await self._rest(INTERVAL_S - GATHER_S)

    async def _something(self) -> bool:
        """True after a change, a moment later so that what comes with it is in it; False after BEAT_S without one."""
        try:
            async with asyncio.timeout(BEAT_S):
                await self._wake.wait()
        except TimeoutError:
            return False
        await self._rest(GATHER_S)
        self._wake.clear()
        return True

    async def _rest(self, seconds: float) -> None:
        """A pause that the server's end cuts short."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
