"""Refused asks that come again at once: answered from memory and counted, so that an agent that hammers costs nothing.

A refusal holds as long as nothing in the world has changed, and no longer than the time that it gave: whoever releases a card
and asks again at once gets it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from cotenant.server.errors import CotenantError

#: Refusals that are remembered; the oldest go first.
REMEMBERED: Final = 1_000


@dataclass
class _Refusal:
    error: CotenantError
    at_ms: int
    until_ms: int
    version: int
    count: int = 1


class Refusals:
    """What was refused to whom, a moment ago."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], _Refusal] = OrderedDict()

    def again(self, caller: str, digest: str, now_ms: int, version: int) -> CotenantError | None:
        """The refusal of the same ask, counted; None where it has to be looked at anew. `version` is the world's."""
        found = self._known.get((caller, digest))
        if found is None:
            return None
        if found.version != version or not found.at_ms <= now_ms < found.until_ms:
            return None
        found.count += 1
        left_s = max(1, -(-(found.until_ms - now_ms) // 1000))
        error = found.error
        return type(error)(
            error.message,
            hint=f"Asked {found.count} times since the first refusal: asking again changes nothing. {error.hint}".strip(),
            code=error.code,
            retry_after_s=left_s,
            data={**error.data, "asked": found.count},
        )

    def remember(self, caller: str, digest: str, error: CotenantError, now_ms: int, version: int) -> CotenantError:
        """Keep a refusal that says when to come again, for as long as that is; gives it back, to be raised."""
        before = self._known.pop((caller, digest), None)
        if error.retry_after_s is not None:
            count = 1 if before is None or now_ms >= before.until_ms else before.count + 1
            until = now_ms + error.retry_after_s * 1000
            self._known[caller, digest] = _Refusal(error, now_ms, until, version, count)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return error
