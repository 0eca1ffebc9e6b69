"""Sets of indices written as ranges: ``0-41,57``. How an array keeps ten thousand members in one word."""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

#: Elements of one array at most.
ARRAY_MAX: Final = 100_000

_PART = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", re.ASCII)


@dataclass(frozen=True)
class Indices:
    """An ordered set of numbers from 0 on, as (first, last) of each run; runs neither touch nor overlap."""

    runs: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(numbers: Iterable[int]) -> Indices:
        return _joined((n, n) for n in numbers)

    @staticmethod
    def parse(text: str) -> Indices:
        """Read ``3-9,12``; empty text is the empty set.

        Raises:
            ValueError: it is none, with a sentence that says what one looks like.
        """
        return _parsed(text)

    def __str__(self) -> str:
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.runs)

    def __len__(self) -> int:
        return sum(b - a + 1 for a, b in self.runs)

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __iter__(self) -> Iterator[int]:
        for a, b in self.runs:
            yield from range(a, b + 1)

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        at = bisect_right(self.runs, (number, ARRAY_MAX)) - 1
        return at >= 0 and self.runs[at][1] >= number

    def __or__(self, other: Indices) -> Indices:
        return _joined((*self.runs, *other.runs))

    def __and__(self, other: Indices) -> Indices:
        out, mine, theirs = [], iter(self.runs), iter(other.runs)
        a, b = next(mine, None), next(theirs, None)
        while a is not None and b is not None:
            low, high = max(a[0], b[0]), min(a[1], b[1])
            if low <= high:
                out.append((low, high))
            if a[1] < b[1]:
                a = next(mine, None)
            else:
                b = next(theirs, None)
        return Indices(tuple(out))

    def __sub__(self, other: Indices) -> Indices:
        gaps, at = [], 0
        for a, b in other.runs:
            if at < a:
                gaps.append((at, a - 1))
            at = b + 1
        gaps.append((at, ARRAY_MAX))
        return self & Indices(tuple(gaps))

    def start(self, first: int) -> Indices:
        """Those from `first` on."""
        return self & Indices(((first, ARRAY_MAX),))

    def first(self, at_least: int = 0) -> int | None:
        """The smallest that is at least `at_least`, or None."""
        at = bisect_right(self.runs, (at_least, ARRAY_MAX)) - 1
        if at >= 0 and self.runs[at][1] >= at_least:
            return at_least
        return self.runs[at + 1][0] if at + 1 < len(self.runs) else None


ALL_INDICES: Final = Indices(((0, ARRAY_MAX - 1),))


def _joined(runs: Iterable[tuple[int, int]]) -> Indices:
    out: list[tuple[int, int]] = []
    for a, b in sorted(runs):
        if out and a <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return Indices(tuple(out))


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Indices:
    runs = []
    for part in text.split(",") if text else ():
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError("indices are numbers and ranges with commas between them, such as 3-9,12")
        low, high = int(found[1]), int(found[2] or found[1])
        if low > high:
            raise ValueError(f"the range {low}-{high} runs backwards: write {high}-{low}")
        if high >= ARRAY_MAX:
            raise ValueError(f"index {high} is too large: an array has {ARRAY_MAX} elements at most")
        runs.append((low, high))
    return _joined(runs)
