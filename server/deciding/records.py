"""Worlds and decisions as canonical JSON: fields in the order of their class, no spaces; whole worlds, and changes between.

Two objects that are the same object are equal without a look at them: the keeper replaces what changed and keeps the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from cotenant.server.deciding.engine import Changes
from cotenant.server.deciding.world import (
    AgentRules,
    Ask,
    Decided,
    Holding,
    HostView,
    Needs,
    OwnerRules,
    Policy,
    PoolRules,
    Preemption,
    Reservation,
    Slot,
    Spent,
    Wait,
    Window,
    World,
)

#: Objects of a whole world that are written before the writer breathes.
PIECE = 50
#: Every field of a world: the class of what is in it, and by what one of them is known.
PARTS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "hosts": (HostView, attrgetter("name")),
    "slots": (Slot, attrgetter("host", "uuid", "share")),
    "pools": (PoolRules, attrgetter("name")),
    "owners": (OwnerRules, attrgetter("owner")),
    "holdings": (Holding, attrgetter("id")),
    "cleaning": (Holding, attrgetter("id")),
    "asks": (Ask, attrgetter("id")),
    "agents": (AgentRules, attrgetter("agent")),
    "reservations": (Reservation, attrgetter("id")),
    "preemptions": (Preemption, attrgetter("id")),
    "spent": (Spent, attrgetter("owner", "agent", "pool")),
}
_INNER: dict[tuple[Any, str], Callable[[Any], Any]] = {
    (Ask, "needs"): lambda value: build(Needs, value),
    (PoolRules, "windows"): lambda value: tuple(build(Window, one) for one in value),
}


def _plain(value: Any) -> Any:
    return value.__dict__


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain, check_circular=False).encode


def canonical(decided: Decided) -> str:
    """What one pass decided, as text: equal decisions give equal text, and only those.

    Without the waits, which the engine leaves to `decide`: they follow from the world, which is recorded.
    """
    return _encode(
        {
            "decisions": [[type(one).__name__, one] for one in decided.decisions if not isinstance(one, Wait)],
            "wake_at_ms": decided.wake_at_ms,
            "bookings": decided.bookings,
        }
    )


def recanonical(record: Any) -> str:
    """The same text from what was read back."""
    return _encode(record)


def build(kind: Any, value: dict[str, Any]) -> Any:
    """An object of the world from its record. A field that this version does not know is left out; one it lacks is default."""
    known = {field.name for field in fields(kind)}
    given = {}
    for key, item in value.items():
        if key in known:
            inner = _INNER.get((kind, key))
            given[key] = inner(item) if inner is not None else _tuples(item)
    return kind(**given)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


class Writing:
    """Turns one tick after another into records; the first, and any after `begin`, holds the whole world.

    It follows the world by its changes, so that a record costs what changed, not what there is. `breathe` is called again
    and again while a whole world, which may be long, is written.
    """

    def __init__(self, version: str, breathe: Callable[[], None] = lambda: None) -> None:
        self._version = version
        self._breathe = breathe
        self._parts: dict[str, dict[Any, Any]] = {name: {} for name in PARTS}
        self._policy: Policy | None = None

    def begin(self) -> None:
        """Let the next record be whole."""
        self._policy = None

    def follow(self, changes: Changes) -> dict[str, Any]:
        """Take over what changed; gives it as it is recorded."""
        if changes.world is not None:
            for name, (_, key) in PARTS.items():
                self._parts[name] = {key(one): one for one in getattr(changes.world, name)}
            self.begin()
        out: dict[str, Any] = {}
        for name, part in changes.parts.items():
            known = self._parts[name]
            gone = [of for of, one in part.items() if one is None and known.pop(of, None) is not None]
            put = {of: one for of, one in part.items() if one is not None}
            known.update(put)
            out[name] = {"put": list(put.values()), "gone": gone}
        for name, whole in changes.whole.items():
            key = PARTS[name][1]
            now = {key(one): one for one in whole}
            out[name] = {"put": whole, "gone": [of for of in self._parts[name] if of not in now]}
            self._parts[name] = now
        return out

    def record(self, changes: Changes, now_ms: int, policy: Policy, decided: Decided, lost: int = 0) -> str:
        """One tick as one line; `lost` ticks before it were never recorded."""
        out: dict[str, Any] = {"at_ms": now_ms}
        if lost:
            out["lost"] = lost
        changed = self.follow(changes)
        if policy != self._policy:
            self._policy = policy
            out["version"] = self._version
            out["policy"] = policy
            world = ",".join(f'"{name}":{self._whole(part)}' for name, part in self._parts.items())
            return f'{_encode(out)[:-1]},"world":{{{world}}},"decided":{canonical(decided)}}}'
        out["changes"] = changed
        return f'{_encode(out)[:-1]},"decided":{canonical(decided)}}}'

    def _whole(self, part: dict[Any, Any]) -> str:
        """All of one part as a list, a few at a time."""
        there = list(part.values())
        pieces = []
        for begin in range(0, len(there), PIECE):
            pieces.append(_encode(there[begin : begin + PIECE])[1:-1])
            self._breathe()
        return f"[{','.join(pieces)}]"


@dataclass(frozen=True)
class Tick:
    """One tick as it was recorded. `decided` is JSON as read; `recanonical` gives its text."""

    at_ms: int
    version: str
    world: World
    policy: Policy
    decided: Any
    lost: int


class Reading:
    """Follows records in their order."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[Any, Any]] | None = None
        self._policy = Policy()
        self._version = ""

    def follow(self, line: str) -> Tick | None:
        """The tick of a record; None while no whole world has been read yet.

        Raises:
            ValueError: it is no record.
        """
        try:
            record = json.loads(line)
            if "world" in record:
                self._version = record["version"]
                self._policy = build(Policy, record["policy"])
                self._parts = {
                    name: {key(one): one for one in (build(kind, item) for item in record["world"].get(name, ()))}
                    for name, (kind, key) in PARTS.items()
                }
            elif self._parts is not None:
                for name, change in record["changes"].items():
                    if name in PARTS:
                        kind, key = PARTS[name]
                        part = self._parts[name]
                        for of in change["gone"]:
                            part.pop(_tuples(of), None)
                        for item in change["put"]:
                            one = build(kind, item)
                            part[key(one)] = one
            if self._parts is None:
                return None
            world = World(**{name: tuple(part.values()) for name, part in self._parts.items()})
            return Tick(
                record["at_ms"],
                self._version,
                world,
                self._policy,
                record["decided"],
                record.get("lost", 0),
            )
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"not a record of this journal: {exc!r}") from exc
