"""Callers and their tokens. Of a token only the SHA-256 is kept."""

from __future__ import annotations

import sqlite3
from typing import Any

from cotenant.server.errors import Conflict
from cotenant.server.model.caller import Caller
from cotenant.server.store.db import Tx
from cotenant.server.store.requests import secret_hash


def put_caller(tx: Tx, name: str, kind: str, owner: str, now_ms: int) -> None:
    """Make the caller, or check that it is the same one.

    Raises:
        Conflict: the name belongs to another owner or kind; what it holds must not change hands by a token.
    """
    row = tx.one("SELECT kind, owner FROM caller WHERE name = ?", (name,))
    if row is None:
        tx.execute(
            "INSERT INTO caller (name, kind, owner, created_at_ms) VALUES (?, ?, ?, ?)", (name, kind, owner, now_ms)
        )
    elif (row["kind"], row["owner"]) != (kind, owner):
        raise Conflict(
            f'caller "{name}" exists as {row["kind"]} of owner "{row["owner"]}"',
            code="caller_exists",
            hint="Choose another name, or repeat its kind and owner.",
        )


def put_token(tx: Tx, token_id: str, secret: str, values: dict[str, Any]) -> None:
    tx.execute(
        "INSERT INTO token (id, hash, caller, scopes, toolset, pools, max_priority, autopilot, own_only, created_at_ms, created_by,"
        " expires_at_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            token_id, secret_hash(secret), values["caller"], ",".join(values["scopes"]), values["toolset"], ",".join(values["pools"]),
            values["max_priority"], int(values["autopilot"]), int(values["own_only"]), values["created_at_ms"],
            values["created_by"], values["expires_at_ms"],
        ),
    )  # fmt: skip


def as_caller(row: sqlite3.Row, door: str) -> Caller:
    """A row of `list_tokens` as the caller it names."""
    return Caller(
        name=row["caller"],
        kind=row["kind"],
        owner=row["owner"],
        scopes=frozenset(filter(None, row["scopes"].split(","))),
        token_id=row["id"],
        toolset=row["toolset"],
        pools=tuple(filter(None, row["pools"].split(","))),
        max_priority=row["max_priority"],
        autopilot=bool(row["autopilot"]),
        own_only=bool(row["own_only"]),
        door=door,
    )


def living_tokens(tx: Tx, caller: str, now_ms: int) -> list[sqlite3.Row]:
    """A caller's tokens that are neither revoked nor expired, oldest first."""
    return tx.all(
        "SELECT id FROM token WHERE caller = ? AND revoked_at_ms IS NULL AND (expires_at_ms IS NULL OR expires_at_ms > ?)"
        " ORDER BY created_at_ms, id",
        (caller, now_ms),
    )


def living_as_caller(connection: sqlite3.Connection, name: str, now_ms: int) -> list[Caller]:
    """A caller once for each of its tokens that counts now."""
    rows = connection.execute(
        "SELECT t.*, c.kind, c.owner FROM token t JOIN caller c ON c.name = t.caller WHERE t.caller = ?"
        " AND t.revoked_at_ms IS NULL AND (t.expires_at_ms IS NULL OR t.expires_at_ms > ?)",
        (name, now_ms),
    )
    return [as_caller(row, "") for row in rows]


def revoke(tx: Tx, id_or_caller: str, now_ms: int) -> list[sqlite3.Row]:
    """Revoke one token by id, or all living ones of a caller; returns their rows."""
    return tx.all(
        "UPDATE token SET revoked_at_ms = ? WHERE (id = ? OR caller = ?) AND revoked_at_ms IS NULL RETURNING *",
        (now_ms, id_or_caller, id_or_caller),
    )


def list_tokens(connection: sqlite3.Connection) -> list[sqlite3.Row]:
    return connection.execute(
        "SELECT t.*, c.kind, c.owner, c.last_seen_at_ms FROM token t JOIN caller c ON c.name = t.caller ORDER BY t.created_at_ms, t.id"
    ).fetchall()


def owners(connection: sqlite3.Connection) -> int:
    """How many owners there are; with one, everything is open among his agents."""
    return int(connection.execute("SELECT count(DISTINCT owner) FROM caller").fetchone()[0])
