"""Hosts and cards as last seen: what placement and every list start from."""

from __future__ import annotations

import sqlite3
from typing import Any

from cotenant.server.model.addresses import LIST
from cotenant.server.store.db import Tx, dumps


def get(connection: sqlite3.Connection, name: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM host WHERE name = ?", (name,)).fetchone()
    return row


def all_hosts(connection: sqlite3.Connection) -> list[sqlite3.Row]:
    return connection.execute("SELECT * FROM host ORDER BY name").fetchall()


def all_gpus(connection: sqlite3.Connection) -> list[sqlite3.Row]:
    return connection.execute("SELECT * FROM gpu WHERE present = 1 ORDER BY host, idx, uuid").fetchall()


def put(tx: Tx, name: str, now_ms: int, **values: Any) -> bool:
    """Make or update a host; returns whether it is new."""
    new = (
        tx.changes("INSERT INTO host (name, first_seen_at_ms) VALUES (?, ?) ON CONFLICT DO NOTHING", (name, now_ms))
        == 1
    )
    if values:
        tx.execute(f"UPDATE host SET {', '.join(f'{n} = ?' for n in values)} WHERE name = ?", (*values.values(), name))
    tx.dirty.add(("host", name))
    tx.changed.add(f"cotenant://hosts/{name}")
    if new:
        tx.changed.add(LIST)
    return new


def put_gpu(tx: Tx, uuid: str, host: str, now_ms: int, **values: Any) -> tuple[bool, str | None]:
    """Make or update a card; returns (new, name of the other host entry that has it).

    A card that its host shows no more, and on which nothing is leased or being cleaned, goes to the host that shows it.
    """
    row = tx.one("SELECT host, present FROM gpu WHERE uuid = ?", (uuid,))
    if row is not None and row["host"] != host:
        held = tx.one(
            "SELECT 1 FROM lease_slot WHERE host = ? AND uuid = ? AND use <> 'freed' LIMIT 1", (row["host"], uuid)
        )
        if row["present"] or held is not None:
            return False, str(row["host"])
        tx.execute("UPDATE gpu SET host = ? WHERE uuid = ?", (host, uuid))
    if row is None:
        columns = {"uuid": uuid, "host": host, "first_seen_at_ms": now_ms, "last_seen_at_ms": now_ms, **values}
        tx.execute(
            f"INSERT INTO gpu ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", tuple(columns.values())
        )
    else:
        columns = {"last_seen_at_ms": now_ms, "present": 1, **values}
        tx.execute(f"UPDATE gpu SET {', '.join(f'{n} = ?' for n in columns)} WHERE uuid = ?", (*columns.values(), uuid))
    if row is None or not row["present"]:
        tx.changed |= {LIST, "cotenant://gpus"}
    return row is None, None


def absent(tx: Tx, host: str, seen: list[str]) -> list[str]:
    """Mark the cards of a host that are not in `seen` as gone; returns their UUIDs."""
    marks = ", ".join("?" * len(seen)) or "''"
    rows = tx.all(
        f"UPDATE gpu SET present = 0 WHERE host = ? AND present = 1 AND uuid NOT IN ({marks}) RETURNING uuid",
        (host, *seen),
    )
    if rows:
        tx.changed |= {LIST, "cotenant://gpus"}
    return [str(row[0]) for row in rows]


def without_entry(tx: Tx, names: list[str]) -> list[str]:
    """Mark the cards of hosts that the configuration names no more as gone; returns their UUIDs."""
    marks = ", ".join("?" * len(names))
    rows = tx.all(f"UPDATE gpu SET present = 0 WHERE present = 1 AND host NOT IN ({marks}) RETURNING uuid", names)
    return [str(row[0]) for row in rows]


def take_seq(tx: Tx, name: str, seq: int) -> bool:
    """Whether a report with this number is new; if so it counts as taken."""
    return tx.changes("UPDATE host SET control_seq = ? WHERE name = ? AND control_seq < ?", (seq, name, seq)) == 1


def facts_text(facts: dict[str, Any]) -> str:
    return dumps(facts)
