"""The two clocks. Records carry `now_ms`, durations are measured with `monotonic_s`; nothing else reads a clock."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What the server asks about time; tests give their own."""

    def now_ms(self) -> int:
        """UTC, milliseconds since 1970."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go back; suspended time counts."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clocks. CLOCK_BOOTTIME, because a laptop that slept has let leases run out."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def iso(at_ms: int) -> str:
    """ISO 8601 in UTC with milliseconds: 2026-11-30T22:53:04.120Z."""
    stamp = datetime.fromtimestamp(at_ms / 1000, UTC)
    return stamp.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at_ms % 1000:03d}Z"


def iso_or_none(at_ms: int | None) -> str | None:
    return None if at_ms is None else iso(at_ms)
