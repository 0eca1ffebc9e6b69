"""Waiting for a job or a claim: what it ends with, and telling a client where a long call stands meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from cotenant.server.mcp.call import PROGRESS_S, Peer
from cotenant.server.mcp.results import plain
from cotenant.server.model.answers import JobAnswer, LeaseAnswer
from cotenant.server.model.caller import Caller
from cotenant.server.model.states import JOB_FINAL, LeaseState

if TYPE_CHECKING:
    from cotenant.server.control import Control

T = TypeVar("T")
LEASE = "lse_"
_FINAL = frozenset(str(state) for state in JOB_FINAL)


async def standing(control: Control, caller: Caller, subject: str) -> JobAnswer | LeaseAnswer:
    """The job or lease that is waited for, as it stands now."""
    if subject.startswith(LEASE):
        return await control.views.get_lease(caller, subject)
    return await control.jobs.get(caller, subject)


def is_over(answer: JobAnswer | LeaseAnswer) -> bool:
    """Whether there is nothing left to wait for: the job has ended, the claim is granted or gone."""
    return answer.state in _FINAL if isinstance(answer, JobAnswer) else answer.state != LeaseState.QUEUED


def waited(answer: JobAnswer | LeaseAnswer, waited_s: float, since: str) -> dict[str, Any]:
    """What a wait ends with: where things stand, whether it is done, and the cursor of the events since it began."""
    return {**plain(answer), "done": is_over(answer), "waited_s": round(waited_s, 1), "cursor": since}


class Reporter:
    """Progress in seconds of waiting: it only rises, as the protocol asks."""

    def __init__(self, peer: Peer, total_s: float | None) -> None:
        self._peer = peer
        self._total_s = total_s
        self._began = time.monotonic()
        self._told = self._began
        self._last = 0.0
        self._message = "waiting"

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    async def relay(self, done: float, total: float | None, message: str) -> None:
        """Pass on what the control plane says; its own numbers give way to the seconds waited."""
        self._message = message
        await self._tell()

    async def _tell(self) -> None:
        self._told = time.monotonic()
        self._last = max(self.elapsed_s(), self._last + 0.001)
        await self._peer.progress(round(self._last, 3), self._total_s, self._message)

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; while it is silent, its last message is told again every PROGRESS_S seconds."""

        async def tick() -> None:
            while True:
                pause = self._told + PROGRESS_S - time.monotonic()
                if pause <= 0:
                    await self._tell()
                else:
                    await asyncio.sleep(pause)

        ticker = asyncio.create_task(tick())
        try:
            return await work
        finally:
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker
