"""What all views share: the caller's eyes, the world, and the small pieces of answers."""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from cotenant.server.clock import iso, iso_or_none
from cotenant.server.deciding.idle import idle_since_ms, may_reclaim
from cotenant.server.deciding.world import UNITS_PER_CARD, Blocker, Holding, PoolRules, SlotKey, World
from cotenant.server.errors import BadRequest
from cotenant.server.model import answers as a
from cotenant.server.model.caller import Caller
from cotenant.server.model.states import PRIORITIES
from cotenant.server.model.text import clean, quoted

T = TypeVar("T")

PRIORITY_NAMES = {number: name for name, number in PRIORITIES.items()}


class Eyes(Protocol):
    """Who may look inside what; `control.auth.Auth` decides."""

    def sees_inside(self, caller: Caller, *, owner: str, name: str, pool: str) -> bool: ...


class View:
    """Needs the context for clock, world and live observations only."""

    def __init__(self, context: Any, eyes: Eyes) -> None:
        self._c = context
        self._eyes = eyes
        self._rows: dict[str, Any] = {}
        self._rows_of = -1

    def _kept(self, what: str, read: Callable[[sqlite3.Connection], T]) -> T:
        """What `read` finds, kept until the next COMMIT: a thousand who watch read the same few rows after each change.

        For small tables only: it runs on the loop's thread. The hop to another is what costs under load, since a busy
        loop hands the interpreter over every 5 ms at best (docs/adr/0002).
        """
        if self._rows_of != self._c.db.groups:
            self._rows, self._rows_of = {}, self._c.db.groups
        if what not in self._rows:
            self._rows[what] = self._c.db.peek(read)
        found: T = self._rows[what]
        return found

    def _drains(self, lease_id: str) -> bool:
        return lease_id in self._c.keeper.draining()

    def _idle_notice(self, lease_id: str) -> str | None:
        """What its holder was told of its idleness, unless work was seen since. A heartbeat is no sign of work."""
        lease: Holding | None = self._c.keeper.living.get(lease_id)
        since = None if lease is None else idle_since_ms(lease)
        if lease is None or since is None or lease.idle_notice_ms is None or lease.idle_notice_ms < since:
            return None
        pool = self._c.keeper.rules.pools.get(lease.pool) or PoolRules(lease.pool)
        s = max(0, self._c.now() - since) // 1000
        what = f"Idle: no sign of work on its cards for {s} s while others wait for them. Use them or give them back"
        if not may_reclaim(lease, pool):
            return f"{what}."
        return f"{what}: they are taken back from {iso(lease.idle_notice_ms + pool.idle_grace_s * 1000)} on."

    def _near_cap(self, pool: str) -> bool:
        """Told from 90 % of the cap on (design section 6)."""
        if pool not in self._c.settings.pools:
            return False
        used, cap = self._c.keeper.used_and_cap(pool)
        return bool(cap > 0 and used * 10 >= cap * 9)

    def _simulated(self, uuid: str) -> bool:
        live = self._c.live.cards.get(uuid)
        return bool(live.state.simulated) if live is not None else uuid.startswith("SIM-")


def slot_answer(row: sqlite3.Row) -> a.SlotAnswer:
    return a.SlotAnswer(
        row["host"], row["idx"], row["uuid"], row["share"] if row["shares"] > 1 and row["uuid"] != "cpu" else None
    )


#: Until the pass that decides has looked, after the ask or after what it waited for: an ask that waits always says for what.
UNDECIDED = Blocker("behind", "nothing is known to be in its way; the next pass decides", helps="ask again in a second")


def blocker_answer(b: Blocker) -> a.BlockerAnswer:
    return a.BlockerAnswer(
        b.code, b.message, dict(b.numbers), dict(b.names), iso_or_none(b.until_ms), b.set_by, b.helps
    )


def left_s(at_ms: int | None, now: int) -> int | None:
    return None if at_ms is None else max(0, (at_ms - now) // 1000)


def cards_up(units: int) -> int:
    return -(-units // UNITS_PER_CARD)


def units_of(world: World, slots: tuple[SlotKey, ...], context: Any) -> int:
    total = 0
    for key in slots:
        if key[1] != "cpu":
            try:
                total += context.keeper.slot(key).units
            except KeyError:  # a card that is in no inventory any more
                total += UNITS_PER_CARD
    return total


def command_line(spec: dict[str, Any]) -> str:
    command = spec.get("command", "")
    return command if isinstance(command, str) else shlex.join(command)


def checked_limit(limit: int, most: int) -> int:
    if not 1 <= limit <= most:
        raise BadRequest(f"limit is {limit}; it must be 1 to {most}", hint="Use the cursor for more.")
    return limit


def one_of(value: str, what: str, known: Iterable[str]) -> None:
    if value not in known:
        raise BadRequest(f'{what} "{clean(value, 40)}" is not known', hint=f"Possible: {', '.join(known)}.")


def cursor_id(cursor: str, prefix: str) -> str:
    if not cursor.startswith(f"{prefix}_") or len(cursor) > 64:
        raise BadRequest(
            "this cursor is not from the same list", code="bad_cursor", hint="Leave it out to start from the newest."
        )
    return cursor


def time_ms(text: str) -> int:
    """An ISO 8601 time as milliseconds; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise BadRequest(
            f"{quoted(text, 40)} is no time", hint="Give ISO 8601, such as 2026-11-30T12:00:00Z, or a cursor."
        ) from None
