"""One tool call as a tool sees it: who asks, what may be used, and how to tell or ask the caller something."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cotenant.server.errors import Unavailable
from cotenant.server.model.caller import Caller

if TYPE_CHECKING:
    from cotenant.server.control import Control

T = TypeVar("T")

#: Clients give a silent request up after 60 s; the MCP endpoint itself pings every 15 s (docs/adr, measured).
PROGRESS_S = 10.0


class Peer(Protocol):
    """The client behind a call."""

    def can_ask(self) -> bool:
        """Whether a person behind the client can be asked a yes-or-no question within this call."""
        ...

    def declares(self, extension: str) -> bool:
        """Whether the client says within this call that it understands a protocol extension."""
        ...

    async def ask(self, question: str, state: str) -> bool | None:
        """The answer: yes, no, or None for a dialog that was closed. May raise NeedsAnswer: see there."""
        ...

    def reply(self) -> Reply | None:
        """The answer that came with this call, to a question that an earlier call ended with."""
        ...

    async def progress(self, done: float, total: float | None, message: str) -> None:
        """Tell where things stand; nothing happens if the client did not ask for it."""
        ...


@dataclass(frozen=True)
class Reply:
    """An answer to an earlier question, and the state that the question was sent with."""

    yes: bool | None
    state: str


class NeedsAnswer(Exception):
    """The protocol asks by ending the call: the client calls again with the answer and `state`."""

    def __init__(self, question: str, state: str) -> None:
        super().__init__(question)
        self.question = question
        self.state = state


@dataclass(frozen=True)
class Call:
    """What every tool gets first. `stopping` is set when the server begins to shut down."""

    caller: Caller
    control: Control
    peer: Peer
    stopping: asyncio.Event

    async def patiently(self, waiting: Coroutine[Any, Any, T]) -> T:
        """The result of `waiting`, unless the server shuts down first: a wait must not hold it up.

        Raises:
            Unavailable: the server shuts down; what was waited for goes on by itself.
        """
        work = asyncio.ensure_future(waiting)
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise Unavailable(
                "the server is shutting down and ended the wait.",
                hint="What you waited for goes on. Ask again once the server is back.",
                code="shutting_down",
                retry_after_s=10,
            )
        finally:
            for task in (work, stop):
                if not task.done():
                    task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)


Progress = Callable[[float, float | None, str], Awaitable[None]]
