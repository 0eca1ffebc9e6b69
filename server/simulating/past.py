"""Past use of a simulation, as the world wants it: per caller and pool, in the last day and altogether."""

from __future__ import annotations

from bisect import bisect_right

from cotenant.server.deciding.world import UNITS_PER_CARD, Spent
from cotenant.server.simulating.trace import HOUR_MS

_DAY_MS = 24 * HOUR_MS
#: 2 to the power of -n/8, in 1/65536.
_WEIGHT = (65536, 60097, 55109, 50535, 46341, 42495, 38968, 35734)
_Key = tuple[str, str, str]


class _Use:
    __slots__ = ("begun", "buckets", "ends", "sums", "units")

    def __init__(self) -> None:
        self.units = 0  # in use now
        self.begun = 0  # sum of units times their begin
        self.buckets: dict[int, int] = {}  # eighth of a half-life in which it ended -> card-ms
        self.ends: list[int] = [0]  # times at which `units` changed
        self.sums: list[tuple[int, int]] = [(0, 0)]  # (unit-ms up to that time, units from then on)

    def step(self, at_ms: int, units: int) -> None:
        total, rate = self.sums[-1]
        total += (at_ms - self.ends[-1]) * rate
        self.units += units
        if self.ends[-1] == at_ms:
            self.sums[-1] = (total, self.units)
        else:
            self.ends.append(at_ms)
            self.sums.append((total, self.units))

    def until(self, at_ms: int) -> int:
        place = bisect_right(self.ends, at_ms) - 1
        if place < 0:
            return 0
        total, rate = self.sums[place]
        return total + (at_ms - self.ends[place]) * rate


class Past:
    """Sums that cost the same however much has been used. Times in ms, units of 1/840 card."""

    def __init__(self, half_life_h: dict[str, int], begin_ms: int) -> None:
        self._eighth = {pool: hours * HOUR_MS // 8 for pool, hours in half_life_h.items()}
        self._uses: dict[_Key, _Use] = {}
        self._begin_ms = begin_ms

    def start(self, key: _Key, units: int, now_ms: int) -> None:
        """Something of (owner, agent, pool) begins."""
        use = self._uses.get(key)
        if use is None:
            use = self._uses[key] = _Use()
            use.ends[0] = self._begin_ms
        use.begun += units * now_ms
        use.step(now_ms, units)

    def end(self, key: _Key, units: int, begun_ms: int, now_ms: int) -> None:
        """Something that began at `begun_ms` is over."""
        use = self._uses[key]
        use.begun -= units * begun_ms
        use.step(now_ms, -units)
        bucket = now_ms // self._of(key)
        use.buckets[bucket] = use.buckets.get(bucket, 0) + (now_ms - begun_ms) * units // UNITS_PER_CARD

    def _of(self, key: _Key) -> int:
        return self._eighth.get(key[2], 168 * HOUR_MS // 8)

    def spent(self, now_ms: int) -> tuple[Spent, ...]:
        """As `World.spent`."""
        found = []
        for key in sorted(self._uses):
            use = self._uses[key]
            here = now_ms // self._of(key)
            decayed = (now_ms * use.units - use.begun) // UNITS_PER_CARD
            for bucket in [b for b in use.buckets if here - b > 64]:
                del use.buckets[bucket]
            for bucket, used in use.buckets.items():
                age = here - bucket
                decayed += used * _WEIGHT[age % 8] >> 16 + age // 8
            day = (use.until(now_ms) - use.until(now_ms - _DAY_MS)) // UNITS_PER_CARD
            found.append(Spent(*key, day, decayed))
        return tuple(found)
