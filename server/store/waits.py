"""Waits that clients follow as protocol tasks. A wait ends once; what it ended with never changes."""

from __future__ import annotations

import sqlite3
from typing import Final

from cotenant.server.store.db import Tx
from cotenant.server.store.requests import secret_hash

#: Waits of one caller that may be open at once; a client that loses its ids must not fill the table.
OPEN_MAX: Final = 100


def begin(
    tx: Tx, secret: str, *, caller: str, subject: str, cursor: str, now_ms: int, until_ms: int, expires_at_ms: int
) -> bool:
    """Remember a wait under its secret id; False when the caller has OPEN_MAX already."""
    working = tx.one(
        "SELECT count(*) FROM wait WHERE caller = ? AND state = 'working' AND until_ms > ?", (caller, now_ms)
    )
    if working is not None and working[0] >= OPEN_MAX:
        return False
    tx.execute(
        "INSERT INTO wait (hash, caller, subject, state, cursor, created_at_ms, changed_at_ms, until_ms, expires_at_ms) "
        "VALUES (?, ?, ?, 'working', ?, ?, ?, ?, ?)",
        (secret_hash(secret), caller, subject, cursor, now_ms, now_ms, until_ms, expires_at_ms),
    )
    return True


def find(connection: sqlite3.Connection, secret: str, caller: str) -> sqlite3.Row | None:
    """The caller's wait with this id; another caller's is as unknown as none."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM wait WHERE hash = ? AND caller = ?", (secret_hash(secret), caller)
    ).fetchone()
    return row


def end(tx: Tx, secret: str, caller: str, state: str, result: str | None, now_ms: int) -> bool:
    """End a wait that is still open; False when it had ended before (its first end stands)."""
    return bool(
        tx.changes(
            "UPDATE wait SET state = ?, result = ?, changed_at_ms = ? WHERE hash = ? AND caller = ? AND state = 'working'",
            (state, result, now_ms, secret_hash(secret), caller),
        )
    )


def forget_old(tx: Tx, now_ms: int) -> int:
    """Drop those whose time to be remembered is over; returns how many."""
    return tx.changes("DELETE FROM wait WHERE expires_at_ms < ?", (now_ms,))
