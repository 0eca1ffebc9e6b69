"""The asks that could start, in lanes: those of one asker that want the same, in their order.

Nobody in a lane can start where the first of it cannot, unless he would be over sooner. So a pass looks at a few of each
lane, however many wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from cotenant.server.deciding.caps import HOUR_MS, Limits
from cotenant.server.deciding.order import STARVING, rank, shortest
from cotenant.server.deciding.shape import Shape
from cotenant.server.deciding.world import Ask, Needs, PoolRules

Entry: TypeAlias = tuple[int, int, int, str]
"""The place within a lane: (-rank, size for the order `shortest` or 0, time of submit, id)."""
_LaneKey: TypeAlias = tuple[str, int, str, str, bool, int]
_FORGET_AT = 10_000


class Lane:
    """What one asker wants of one pool with the same needs."""

    __slots__ = ("asks", "entries", "hours", "human", "limits", "needs", "owner", "pool", "priorities", "shape")

    def __init__(self, ask: Ask) -> None:
        self.pool = ask.pool
        self.owner = ask.owner
        self.human = ask.human
        self.needs = ask.needs
        self.entries: list[Entry] = []  # sorted
        self.asks: list[Ask] = []  # in the order of `entries`
        self.hours: list[int] = []  # of all of them, sorted
        self.priorities: list[int] = []  # the same
        self.shape: Shape | None = None  # these two of the fleet as it is; see `Engine`
        self.limits: Limits | None = None

    def put(self, entry: Entry, ask: Ask) -> None:
        place = bisect_left(self.entries, entry)
        self.entries.insert(place, entry)
        self.asks.insert(place, ask)
        insort(self.hours, ask.hours_ms)
        insort(self.priorities, ask.priority)

    def drop(self, entry: Entry) -> None:
        place = bisect_left(self.entries, entry)
        del self.entries[place]
        ask = self.asks.pop(place)
        del self.hours[bisect_left(self.hours, ask.hours_ms)]
        del self.priorities[bisect_left(self.priorities, ask.priority)]

    def shorter(self, place: int, hours_ms: int) -> int:
        """The first place from `place` on whose ask takes less than `hours_ms`; -1 if there is none."""
        if not self.hours or self.hours[0] >= hours_ms:
            return -1
        asks = self.asks
        for number in range(place, len(asks)):
            if asks[number].hours_ms < hours_ms:
                return number
        return -1


class Lanes:
    """Every waiting ask: in its lane, or asleep while it waits for something of its own."""

    def __init__(self, pools: dict[str, PoolRules], now_ms: int) -> None:
        self._pools = pools
        self._now_ms = now_ms
        self.asks: dict[str, Ask] = {}
        self._lanes: dict[_LaneKey, Lane] = {}
        self._place: dict[str, tuple[_LaneKey, Entry]] = {}  # of those that are in a lane
        self._numbers: dict[Needs, int] = {}
        self._by_identity: dict[int, tuple[Needs, int]] = {}
        self._begins = _Times(lambda ask: ask.not_before_ms or None, self.asks)
        self._closes = _Times(lambda ask: ask.not_after_ms, self.asks)
        self._starves = _Times(self._starves_ms, self.asks)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def __len__(self) -> int:
        return len(self.asks)

    def set_rules(self, pools: dict[str, PoolRules]) -> None:
        """Order everything anew by other rules."""
        asks = list(self.asks.values())
        self._pools = pools
        for ask in asks:
            self.drop(ask.id)
        for ask in asks:
            self.put(ask)

    def _number(self, needs: Needs) -> int:
        # asks often share their Needs, and hashing one is slow
        found = self._by_identity.get(id(needs))
        if found is None:
            if len(self._by_identity) > _FORGET_AT:
                self._by_identity.clear()
            number = self._numbers.setdefault(needs, len(self._numbers))
            found = self._by_identity[id(needs)] = (needs, number)  # holds it, so that its id stays its own
        return found[1]

    def put(self, ask: Ask) -> Lane | None:
        """Add an ask, or replace the one with its id. Gives its lane, or None while it sleeps."""
        if ask.id in self.asks:
            self.drop(ask.id)
        self.asks[ask.id] = ask
        now = self._now_ms
        if ask.not_before_ms > now:
            self._begins.put(ask, ask.not_before_ms)
        if ask.not_after_ms is not None:
            self._closes.put(ask, ask.not_after_ms)
        if (at := self._starves_ms(ask)) is not None and at > now:
            self._starves.put(ask, at)
        if not ask.startable(now):
            return None
        return self._enter(ask)

    def _enter(self, ask: Ask) -> Lane:
        key = (ask.pool, self._number(ask.needs), ask.owner, ask.agent, ask.human, ask.own_cap)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(ask)
        rules = self._pools.get(ask.pool)
        first = rank(ask, rules, self._now_ms)
        size = shortest(ask) if rules is not None and rules.order == "shortest" and first != STARVING else 0
        entry = (-first, size, ask.queued_at_ms, ask.id)
        lane.put(entry, ask)
        self._place[ask.id] = (key, entry)
        return lane

    def _leave(self, ask_id: str) -> None:
        found = self._place.pop(ask_id, None)
        if found is None:
            return
        key, entry = found
        lane = self._lanes[key]
        lane.drop(entry)
        if not lane.entries:
            del self._lanes[key]

    def entry(self, ask_id: str) -> Entry:
        """The place of an ask in its lane."""
        return self._place[ask_id][1]

    def drop(self, ask_id: str) -> Ask | None:
        """Take an ask out and give it; None where there is none."""
        self._leave(ask_id)
        return self.asks.pop(ask_id, None)

    def _starves_ms(self, ask: Ask) -> int | None:
        rules = self._pools.get(ask.pool)
        return None if rules is None else ask.queued_at_ms + rules.starve_h * HOUR_MS

    def advance(self, now_ms: int) -> bool:
        """Let time go on. Gives whether an ask woke up or came to stand elsewhere."""
        if now_ms < self._now_ms:  # a clock that was set back: what was due is not any more
            asks = list(self.asks.values())
            for ask in asks:
                self.drop(ask.id)
            self._now_ms = now_ms
            for ask in asks:
                self.put(ask)
            return True
        self._now_ms = now_ms
        moved = False
        for ask in (*self._begins.due(now_ms), *self._starves.due(now_ms)):
            self._leave(ask.id)
            if ask.startable(now_ms):
                self._enter(ask)
                moved = True
        return moved

    def closed(self, now_ms: int) -> list[Ask]:
        """The asks whose time to start is over, by id. They stay until they are dropped."""
        found = self._closes.due(now_ms)
        for ask in found:
            self._closes.put(ask, ask.not_after_ms or 0)
        return sorted(found, key=lambda ask: ask.id)

    def next_ms(self) -> int | None:
        """The earliest time at which an ask may start, is given up, or has waited so long that it goes first."""
        times = (times.next_ms(self._now_ms) for times in (self._begins, self._closes, self._starves))
        return min((at for at in times if at is not None), default=None)


class _Times:
    """Asks by a time that is still to come. Those that were dropped or replaced fall out when they come up."""

    def __init__(self, at_ms: Callable[[Ask], int | None], asks: dict[str, Ask]) -> None:
        self._at_ms = at_ms
        self._asks = asks
        self._heap: list[tuple[int, str]] = []

    def put(self, ask: Ask, at_ms: int) -> None:
        heappush(self._heap, (at_ms, ask.id))
        if len(self._heap) > _FORGET_AT + 2 * len(self._asks):
            self._heap = [(at, ask.id) for ask in self._asks.values() if (at := self._at_ms(ask)) is not None]
            heapify(self._heap)

    def _top(self) -> tuple[int, Ask] | None:
        while self._heap:
            at_ms, ask_id = self._heap[0]
            ask = self._asks.get(ask_id)
            if ask is not None and self._at_ms(ask) == at_ms:
                return at_ms, ask
            heappop(self._heap)
        return None

    def due(self, now_ms: int) -> list[Ask]:
        """Those whose time has come; each is told once."""
        found: dict[str, Ask] = {}
        while (top := self._top()) is not None and top[0] <= now_ms:
            heappop(self._heap)
            found[top[1].id] = top[1]
        return list(found.values())

    def next_ms(self, now_ms: int) -> int | None:
        """The first of the times after `now_ms`; those up to it must have been taken with `due`, or are still there."""
        top = self._top()
        if top is None or top[0] > now_ms:
            return None if top is None else top[0]
        return min((at for at, ask_id in self._heap if at > now_ms and self._now(ask_id) == at), default=None)

    def _now(self, ask_id: str) -> int | None:
        ask = self._asks.get(ask_id)
        return None if ask is None else self._at_ms(ask)
