"""Leases and the slots they hold."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

from cotenant.server.errors import IllegalMove, NotFound
from cotenant.server.model.addresses import list_of
from cotenant.server.model.states import LEASE_FINAL, LEASE_NEXT, LeaseState
from cotenant.server.store.db import Tx


@dataclass(frozen=True)
class HeldSlot:
    """A slot as a lease takes it."""

    host: str
    uuid: str
    share: int
    shares: int
    index: int | None
    units: int


def get(tx: Tx, lease_id: str) -> sqlite3.Row:
    """
    Raises:
        NotFound: no such lease.
    """
    row = tx.one("SELECT * FROM lease WHERE id = ?", (lease_id,))
    if row is None:
        raise NotFound(f'there is no lease "{lease_id[:64]}"', code="no_such_lease", hint="list_leases shows yours.")
    return row


def slots(connection: sqlite3.Connection, lease_id: str) -> list[sqlite3.Row]:
    return connection.execute(
        "SELECT * FROM lease_slot WHERE lease_id = ? ORDER BY host, idx, uuid, share", (lease_id,)
    ).fetchall()


def insert(tx: Tx, lease: dict[str, Any], held: tuple[HeldSlot, ...]) -> None:
    """Write a new lease down, with its slots if it is granted at once.

    Raises:
        sqlite3.IntegrityError: a slot is in another living lease (index one_lease_per_slot).
    """
    columns = ", ".join(lease)
    tx.execute(f"INSERT INTO lease ({columns}) VALUES ({', '.join('?' * len(lease))})", tuple(lease.values()))
    tx.opens = tx.opens or not held
    _take(tx, lease["id"], held, lease["granted_at_ms"] if held else 0)
    _note(tx, lease["id"], lease["pool"], lease["owner"], held)


def grant(tx: Tx, lease_id: str, held: tuple[HeldSlot, ...], values: dict[str, Any], now_ms: int) -> None:
    """A claim that waited gets its slots.

    Raises:
        sqlite3.IntegrityError: a slot is in another living lease.
    """
    row = move(tx, lease_id, LeaseState.LEASED, **values)
    # a claim that missed its pick-up comes back with other slots: its old rows are history of another grant
    tx.execute("DELETE FROM lease_slot WHERE lease_id = ? AND use = 'freed'", (lease_id,))
    _take(tx, lease_id, held, now_ms)
    _note(tx, lease_id, row["pool"], row["owner"], held)


def _take(tx: Tx, lease_id: str, held: tuple[HeldSlot, ...], now_ms: int) -> None:
    tx.connection.executemany(
        "INSERT INTO lease_slot (lease_id, host, uuid, share, shares, idx, use, since_ms) VALUES (?, ?, ?, ?, ?, ?, 'held', ?)",
        [(lease_id, s.host, s.uuid, s.share, s.shares, s.index, now_ms) for s in held],
    )


def move(tx: Tx, lease_id: str, to: LeaseState, *, row: sqlite3.Row | None = None, **values: Any) -> sqlite3.Row:
    """Move a lease to `to` and set `values`; returns the row as it was before.

    `row` is the lease's, where this transaction has it already.

    Raises:
        IllegalMove: `to` cannot follow the state it has.
        NotFound: no such lease.
    """
    row = row or get(tx, lease_id)
    if to != row["state"] and to not in LEASE_NEXT[LeaseState(row["state"])]:
        raise IllegalMove(f"lease {lease_id}: {row['state']} -> {to}")
    assert (to in LEASE_FINAL) == ("ended_at_ms" in values), "an end has a time, and only an end"
    tx.opens = tx.opens or to in LEASE_FINAL or to is LeaseState.QUEUED
    names = ["state", *values]
    tx.execute(
        f"UPDATE lease SET {', '.join(f'{n} = ?' for n in names)} WHERE id = ?", (to.value, *values.values(), lease_id)
    )
    _note(tx, lease_id, row["pool"], row["owner"], ())
    return row


def end_slots(tx: Tx, lease_id: str, use: str, now_ms: int, detail: str = "") -> list[sqlite3.Row]:
    """Set the use of all slots that the lease still has (held, cleaning or occupied); returns them."""
    rows = tx.all(
        "UPDATE lease_slot SET use = ?, since_ms = ?, detail = ? WHERE lease_id = ? AND use <> 'freed' RETURNING *",
        (use, now_ms, detail, lease_id),
    )
    return _noted(tx, lease_id, rows)


def free_slots(tx: Tx, lease_id: str, now_ms: int, host: str | None = None) -> list[sqlite3.Row]:
    """Free the slots that the lease had once and no longer holds (cleaning, occupied); returns them."""
    rows = tx.all(
        "UPDATE lease_slot SET use = 'freed', since_ms = ?, detail = '' WHERE lease_id = ? AND use IN ('cleaning', 'occupied')"
        " AND coalesce(?, host) = host RETURNING *",
        (now_ms, lease_id, host),
    )
    return _noted(tx, lease_id, rows)


def call_occupied(tx: Tx, lease_id: str, host: str, now_ms: int, who: str) -> list[sqlite3.Row]:
    """Slots of a host that did not come clean in time are occupied, by `who`; returns them."""
    rows = tx.all(
        "UPDATE lease_slot SET use = 'occupied', since_ms = ?, detail = ? WHERE lease_id = ? AND host = ?"
        " AND use = 'cleaning' RETURNING *",
        (now_ms, who, lease_id, host),
    )
    return _noted(tx, lease_id, rows)


def update(tx: Tx, lease_id: str, **values: Any) -> None:
    """Set columns other than the state."""
    tx.execute(f"UPDATE lease SET {', '.join(f'{n} = ?' for n in values)} WHERE id = ?", (*values.values(), lease_id))
    tx.dirty.add(("lease", lease_id))
    tx.changed.add(f"cotenant://leases/{lease_id}")


def touch(tx: Tx, lease_id: str) -> None:
    """What a lease counts for is another now, though its row is the same."""
    row = get(tx, lease_id)
    _note(tx, lease_id, row["pool"], row["owner"], ())
    note_slots(tx, slots(tx.connection, lease_id))


def _noted(tx: Tx, lease_id: str, rows: list[sqlite3.Row]) -> list[sqlite3.Row]:
    """Tell of slots whose use changed: what may be had now is another too."""
    tx.dirty.add(("lease", lease_id))
    tx.opens = True
    note_slots(tx, rows)
    if rows:
        tx.changed |= {f"cotenant://leases/{lease_id}", "cotenant://quota/me"}
    return rows


def _note(tx: Tx, lease_id: str, pool: str, owner: str, held: tuple[HeldSlot, ...]) -> None:
    tx.dirty.add(("lease", lease_id))
    tx.changed |= {
        f"cotenant://leases/{lease_id}",
        f"cotenant://queues/{pool}",
        "cotenant://quota/me",
        "cotenant://gpus",
        list_of(owner),
    }
    for slot in held:
        _note_slot(tx, slot.host, slot.index)


def note_slots(tx: Tx, rows: list[sqlite3.Row]) -> None:
    """Tell that these slots, and the cards they are of, look different."""
    for row in rows:
        _note_slot(tx, row["host"], row["idx"])


def _note_slot(tx: Tx, host: str, index: int | None) -> None:
    tx.changed |= {"cotenant://gpus", f"cotenant://hosts/{host}"}
    if index is not None:
        tx.changed.add(f"cotenant://hosts/{host}/gpus/{index}")
