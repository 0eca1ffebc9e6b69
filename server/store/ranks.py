"""Ranks: the parts of an attempt that runs on several hosts, one for each host. Other attempts have none."""

from __future__ import annotations

import sqlite3
from typing import Any

from cotenant.server.store.db import Tx


def attempt_of(rank_id: str) -> str | None:
    """The attempt that an id at a host is a rank of; None for the id of an attempt."""
    attempt_id, dot, _ = rank_id.partition(".")
    return attempt_id if dot else None


def insert(tx: Tx, attempt_id: str, hosts: list[str]) -> None:
    """One rank on each of these hosts, in this order."""
    tx.connection.executemany(
        "INSERT INTO rank (id, attempt_id, rank, host, state) VALUES (?, ?, ?, ?, 'intended')",
        [(f"{attempt_id}.{number}", attempt_id, number, host) for number, host in enumerate(hosts)],
    )


def find(tx: Tx, rank_id: str) -> sqlite3.Row | None:
    return tx.one("SELECT * FROM rank WHERE id = ?", (rank_id,))


def of(connection: sqlite3.Connection, attempt_id: str) -> list[sqlite3.Row]:
    """All ranks of an attempt, in order."""
    return connection.execute("SELECT * FROM rank WHERE attempt_id = ? ORDER BY rank", (attempt_id,)).fetchall()


def on_host(connection: sqlite3.Connection, attempt_id: str, host: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM rank WHERE attempt_id = ? AND host = ?", (attempt_id, host)
    ).fetchone()
    return row


def update(tx: Tx, rank_id: str, **values: Any) -> None:
    """Set columns of a rank. An ended one stays ended."""
    tx.execute(f"UPDATE rank SET {', '.join(f'{n} = ?' for n in values)} WHERE id = ?", (*values.values(), rank_id))


def living(connection: sqlite3.Connection, host: str) -> list[sqlite3.Row]:
    """Ranks on a host that are not known to have ended, with the columns of `jobs.attempts_on`."""
    return connection.execute(
        "SELECT r.*, a.job_id, a.epoch, a.fence, a.lease_id, a.go_at_ms, j.state AS job_state, j.stop_reason AS job_stop_reason"
        " FROM rank r JOIN attempt a ON a.id = r.attempt_id JOIN job j ON j.id = a.job_id"
        " WHERE r.host = ? AND r.state <> 'ended' ORDER BY a.fence",
        (host,),
    ).fetchall()


def seats(connection: sqlite3.Connection, attempt_id: str) -> list[tuple[str, str]]:
    """Where an attempt has, or may have, processes: (its id there, host), one for each of its hosts."""
    found = connection.execute(
        "SELECT id, host FROM rank WHERE attempt_id = ? AND state <> 'ended' ORDER BY rank", (attempt_id,)
    ).fetchall()
    if not found:
        found = connection.execute(
            "SELECT id, host FROM attempt WHERE id = ? AND nodes = 1 AND state <> 'ended'", (attempt_id,)
        ).fetchall()
    return [(row["id"], row["host"]) for row in found]


def take_port(tx: Tx, attempt_id: str, port: int) -> bool:
    """Note where the ranks of an attempt meet; False when another living one has that port, or it has one already."""
    return (
        tx.changes(
            "UPDATE attempt SET port = ? WHERE id = ? AND port IS NULL AND NOT EXISTS"
            " (SELECT 1 FROM attempt WHERE port = ? AND state <> 'ended')",
            (port, attempt_id, port),
        )
        == 1
    )


def ports(connection: sqlite3.Connection) -> list[int]:
    """Ports at which living attempts meet."""
    rows = connection.execute(
        "SELECT port FROM attempt WHERE port IS NOT NULL AND state <> 'ended' ORDER BY port"
    ).fetchall()
    return [int(row[0]) for row in rows]
