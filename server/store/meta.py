"""The server's own identity and its rising counters."""

from __future__ import annotations

import sqlite3

from cotenant.server.store.db import Tx


def get(connection: sqlite3.Connection, key: str) -> str | None:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def put(tx: Tx, key: str, value: str) -> None:
    tx.execute(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, value),
    )


def next_of(tx: Tx, counter: str) -> int:
    """One more than ever before. Two transactions never get the same."""
    row = tx.one("UPDATE counter SET value = value + 1 WHERE name = ? RETURNING value", (counter,))
    assert row is not None, counter
    return int(row[0])


def lift(tx: Tx, counter: str, at_least: int) -> int:
    """Raise a counter to `at_least`, if it is below; returns where it stands."""
    tx.execute("UPDATE counter SET value = ? WHERE name = ? AND value < ?", (at_least, counter, at_least))
    row = tx.one("SELECT value FROM counter WHERE name = ?", (counter,))
    assert row is not None, counter
    return int(row[0])
