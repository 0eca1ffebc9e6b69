"""The asks that wait, grouped by what decides over them, so that a pass looks at a few of each group.

Asks that differ in nothing but their id and their time are answered alike once the first of them is blocked. With a
thousand of them a pass would otherwise cost in proportion to the queue, at every start and every end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from cotenant.server.deciding.decide import equal_key
from cotenant.server.deciding.order import Key
from cotenant.server.deciding.world import Ask, Blocker

GroupKey = tuple[object, ...]


class _Group:
    __slots__ = ("asks", "blockers", "order")

    def __init__(self) -> None:
        self.order: list[tuple[int, str]] = []  # (queued_at_ms, id), sorted
        self.asks: dict[str, Ask] = {}
        self.blockers: tuple[Blocker, ...] = ()


class Waiting:
    """All waiting asks by id, and the heads of each group of equal ones."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, _Group] = {}
        self._key_of: dict[str, GroupKey] = {}
        self._of_array: dict[str, set[str]] = {}  # array with a limit -> those that share its room
        self._looked_at = 0  # how many of each group the last pass saw
        self.undecided = True  # something changed that the last pass did not see and that may change its answer
        self._touched: dict[str, None] = {}  # ids that were put or dropped since `take_touched`
        #: Works out why everybody waits, where that was put off; set by the loop while it is due.
        self.explain: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, ask_id: str) -> bool:
        return ask_id in self._key_of

    def get(self, ask_id: str) -> Ask | None:
        key = self._key_of.get(ask_id)
        return None if key is None else self._groups[key].asks[ask_id]

    def everyone(self) -> Iterable[Ask]:
        for group in self._groups.values():
            yield from group.asks.values()

    def of_array(self, array: str) -> list[Ask]:
        """The asks that share the room of an array: its own, and its elements that are in the queue again."""
        return [ask for ask_id in sorted(self._of_array.get(array, ())) if (ask := self.get(ask_id)) is not None]

    def put(self, ask: Ask) -> None:
        """Add an ask, or replace the one with its id."""
        self._touched[ask.id] = None
        key = equal_key(ask)
        if self._key_of.get(ask.id) == key:
            group = self._groups[key]
            before = group.asks[ask.id]
            if before.queued_at_ms == ask.queued_at_ms:
                # an array's elements may have got room, which those of its group share
                if (before.array_room or 0) < (ask.array_room or 0):
                    self.undecided = True
                group.asks[ask.id] = ask
                return
        self.drop(ask.id)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = _Group()
        place = (ask.queued_at_ms, ask.id)
        if not found.blockers or bisect_left(found.order, place) < self._looked_at:
            self.undecided = True
        insort(found.order, place)
        found.asks[ask.id] = ask
        self._key_of[ask.id] = key
        if ask.array_room is not None:
            self._of_array.setdefault(ask.array, set()).add(ask.id)

    def drop(self, ask_id: str) -> None:
        """Take an ask out; one that is not there is no mistake."""
        key = self._key_of.pop(ask_id, None)
        if key is None:
            return
        self._touched[ask_id] = None
        group = self._groups[key]
        ask = group.asks.pop(ask_id)
        place = bisect_left(group.order, (ask.queued_at_ms, ask_id))
        del group.order[place]
        self.undecided = True
        if not group.order:
            del self._groups[key]
        if (sharing := self._of_array.get(ask.array)) is not None:
            sharing.discard(ask_id)
            if not sharing:
                del self._of_array[ask.array]

    def take_touched(self) -> list[str]:
        """The ids of asks that were put or dropped since this was last called."""
        touched = list(self._touched)
        self._touched.clear()
        return touched

    def clear(self) -> None:
        self._touched.update(dict.fromkeys(self._key_of))
        self._groups.clear()
        self._key_of.clear()
        self._of_array.clear()
        self.undecided = True

    def heads(self, count: int) -> tuple[Ask, ...]:
        """The first `count` of each group. No more than that can start while `count` slots are free, so the rest waits."""
        self._looked_at = count
        return tuple(group.asks[ask_id] for group in self._groups.values() for _, ask_id in group.order[:count])

    def answer(self, blockers: dict[str, tuple[Blocker, ...]]) -> tuple[list[str], list[str]]:
        """Keep what a pass over the heads said.

        Returns ids of asks whose main reason is another one now, and of those where only its words, numbers or lesser
        reasons are; of each group of equal asks the first hundred.
        """
        changed: list[str] = []
        reworded: list[str] = []
        for group in self._groups.values():
            said: tuple[Blocker, ...] = ()
            for _, ask_id in group.order[: self._looked_at]:
                if (found := blockers.get(ask_id)) is not None:
                    said = found
                    break
            if said != group.blockers:
                another = [b.code for b in said[:1]] != [b.code for b in group.blockers[:1]]
                (changed if another else reworded).extend(ask_id for _, ask_id in group.order[:100])
                group.blockers = said
        return changed, reworded

    def blockers(self, ask_id: str) -> tuple[Blocker, ...]:
        """Why this ask waits, as of the last pass; empty while it has not been looked at."""
        if self.explain is not None:
            self.explain()
        key = self._key_of.get(ask_id)
        return () if key is None else self._groups[key].blockers

    def ahead(self, ask: Ask, place: Callable[[Ask], Key]) -> int:
        """How many asks of the same pool come before this one; `place` is the order's key of an ask.

        Within a group of equal asks the earlier comes first in every order, so that a few of each are looked at.
        """
        mine = place(ask)
        count = 0
        for group in self._groups.values():
            if next(iter(group.asks.values())).pool == ask.pool:
                count += bisect_left(group.order, mine, key=lambda at, asks=group.asks: place(asks[at[1]]))  # type: ignore[misc]
        return count
