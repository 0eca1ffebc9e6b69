"""Rules that people have set, and cards that they have booked in advance."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from cotenant.server.deciding.world import Reservation
from cotenant.server.model.rules import Rules, Setting, above
from cotenant.server.store.db import Tx, dumps

_SETTINGS = "SELECT scope, name, key, value, set_by, set_at_ms, reason FROM rule"


def settings(connection: sqlite3.Connection) -> list[Setting]:
    """Everything that is set above the configuration."""
    return [_setting(row) for row in connection.execute(f"{_SETTINGS} ORDER BY scope, name, key")]


def coming(connection: sqlite3.Connection, now_ms: int) -> list[Reservation]:
    """The reservations that are not over and not taken back."""
    rows = connection.execute(
        "SELECT id, pool, owner, cards, begin_ms, end_ms, set_by FROM reservation"
        " WHERE removed_at_ms IS NULL AND end_ms > ? ORDER BY begin_ms, id",
        (now_ms,),
    )
    return [Reservation(*row) for row in rows]


def read(connection: sqlite3.Connection, base: Rules, now_ms: int) -> Rules:
    """The rules that hold as of what this connection sees."""
    return above(base, settings(connection), coming(connection, now_ms))


def of(tx: Tx, base: Rules, pool: str, owner: str, agent: str) -> Rules:
    """The rules for one asker as they stand in this transaction, reservations apart."""
    rows = tx.all(
        f"{_SETTINGS} WHERE (scope = 'pool' AND name = ?) OR (scope = 'owner' AND name = ?) OR (scope = 'agent' AND name = ?)",
        (pool, owner, agent),
    )
    return above(base, map(_setting, rows)) if rows else base


def find(connection: sqlite3.Connection, scope: str, name: str, key: str) -> Setting | None:
    """One rule as a person has set it, or None while the configuration holds."""
    row = connection.execute(f"{_SETTINGS} WHERE scope = ? AND name = ? AND key = ?", (scope, name, key)).fetchone()
    return None if row is None else _setting(row)


def put(tx: Tx, setting: Setting) -> None:
    """Set a rule above the configuration."""
    tx.execute(
        "INSERT INTO rule (scope, name, key, value, set_by, set_at_ms, reason) VALUES (?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (scope, name, key) DO UPDATE SET value = excluded.value, set_by = excluded.set_by,"
        " set_at_ms = excluded.set_at_ms, reason = excluded.reason",
        (
            setting.scope,
            setting.name,
            setting.key,
            dumps(setting.value),
            setting.set_by,
            setting.set_at_ms,
            setting.reason,
        ),
    )
    _touch(tx)


def drop(tx: Tx, scope: str, name: str, key: str) -> None:
    """Let the configuration hold again."""
    tx.execute("DELETE FROM rule WHERE scope = ? AND name = ? AND key = ?", (scope, name, key))
    _touch(tx)


def add_reservation(tx: Tx, values: dict[str, Any]) -> None:
    """Book cards."""
    tx.execute(
        f"INSERT INTO reservation ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", tuple(values.values())
    )
    _touch(tx)


def remove_reservation(tx: Tx, reservation_id: str, by: str, now_ms: int) -> sqlite3.Row | None:
    """Take a booking back; its row, or None when there is none that is still to come or running."""
    row = tx.one(
        "SELECT * FROM reservation WHERE id = ? AND removed_at_ms IS NULL AND end_ms > ?", (reservation_id, now_ms)
    )
    if row is not None:
        tx.execute(
            "UPDATE reservation SET removed_at_ms = ?, removed_by = ? WHERE id = ?", (now_ms, by, reservation_id)
        )
        _touch(tx)
    return row


def _touch(tx: Tx) -> None:
    tx.dirty.add(("rule", ""))
    tx.changed.add("cotenant://quota/me")


def _setting(row: sqlite3.Row) -> Setting:
    return Setting(
        row["scope"], row["name"], row["key"], json.loads(row["value"]), row["set_by"], row["set_at_ms"], row["reason"]
    )
