"""Who is logged in to the page."""

from __future__ import annotations

import sqlite3
from typing import Final

from cotenant.server.store.db import Tx

#: Rows of sessions that are over are kept for as long, then dropped; the events stay.
KEPT_MS: Final = 7 * 24 * 3600 * 1000


def insert(tx: Tx, session_id: str, token_id: str, now_ms: int, expires_at_ms: int) -> None:
    """Write a new session down, and drop what is long over."""
    tx.execute("DELETE FROM session WHERE expires_at_ms < ?", (now_ms - KEPT_MS,))
    tx.execute(
        "INSERT INTO session (id, token_id, created_at_ms, expires_at_ms) VALUES (?, ?, ?, ?)",
        (session_id, token_id, now_ms, expires_at_ms),
    )


def end(tx: Tx, session_id: str, now_ms: int) -> bool:
    """Whether it was living and is over now."""
    return (
        tx.changes("UPDATE session SET ended_at_ms = ? WHERE id = ? AND ended_at_ms IS NULL", (now_ms, session_id)) == 1
    )


def end_all_but(tx: Tx, token_id: str, newest: int, now_ms: int) -> list[str]:
    """End the living sessions of a token but its `newest` ones; returns their ids."""
    rows = tx.all(
        "UPDATE session SET ended_at_ms = ? WHERE id IN (SELECT id FROM session WHERE token_id = ? AND ended_at_ms IS NULL"
        " AND expires_at_ms > ? ORDER BY created_at_ms DESC, id DESC LIMIT -1 OFFSET ?) RETURNING id",
        (now_ms, token_id, now_ms, newest),
    )
    return [str(row["id"]) for row in rows]


def living(connection: sqlite3.Connection, now_ms: int) -> list[sqlite3.Row]:
    return connection.execute(
        "SELECT * FROM session WHERE ended_at_ms IS NULL AND expires_at_ms > ?", (now_ms,)
    ).fetchall()
