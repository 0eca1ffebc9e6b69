"""Telling a client where a long call stands, often enough that it does not give the call up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from cotenant.server.mcp.call import PROGRESS_S, Peer

T = TypeVar("T")


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
