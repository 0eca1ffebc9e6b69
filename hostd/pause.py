"""How long an attempt has stood still, and until when it may. The signals are the shim's; this only counts.

Owns nothing but numbers, in seconds of CLOCK_BOOTTIME. Must not know: processes, files, the wire. Imported by the warm
parent too, so it stays light.
"""

from __future__ import annotations

from typing import Optional


class Pause:
    """All suspensions of one attempt. `total_s` holds those that are over."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.since: Optional[float] = None
        self.until: Optional[float] = None

    def begin(self, now: float, max_s: float) -> bool:
        """Stand still from now on, at most until `max_s` are used up over all suspensions; False when they are."""
        if self.since is not None or self.total_s >= max_s:
            return False
        self.since, self.until = now, now + max_s - self.total_s
        return True

    def end(self, now: float) -> bool:
        """Go on; False when it was not standing still."""
        if self.since is None:
            return False
        self.total_s += max(0.0, now - self.since)
        self.since = self.until = None
        return True

    def put_off(self, deadline: Optional[float]) -> Optional[float]:
        """When a time limit is over that stands still meanwhile; None while nobody can say."""
        return None if deadline is None or self.since is not None else deadline + self.total_s
