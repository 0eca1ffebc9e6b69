"""Tokens without a running server: the command line opens the database itself, under the server's own lock."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from cotenant.server.clock import SystemClock
from cotenant.server.config import load
from cotenant.server.control.tokens import checked, revoke, token_view, write_token
from cotenant.server.ids import Ids
from cotenant.server.model.caller import Caller
from cotenant.server.services import DATABASE, prepare_directory, unix_user
from cotenant.server.store import callers
from cotenant.server.store.db import DataLock, Tx, configure, make_private, migrate, refuse_foreign

T = TypeVar("T")


def create_token(
    data_dir: Path, name: str, kind: str, owner: str, scopes: Iterable[str], *, reason: str = "", **options: Any
) -> dict[str, Any]:
    """A new token, as `control.tokens.Tokens.create` makes it; `token` is shown this once.

    Raises:
        StoreRefused: a server holds the data directory (then ask it), or the directory cannot be used.
        BadRequest, Conflict: see `checked` and `callers.put_caller`.
    """
    now = SystemClock().now_ms()
    pools = set(load(data_dir=data_dir).pools)
    values = checked(name, kind, owner, scopes, known_pools=pools, now=now, **options)
    return _write(data_dir, lambda tx: write_token(tx, _me(), values, Ids(), now, reason))


def list_tokens(data_dir: Path) -> list[dict[str, Any]]:
    """All tokens, without their secrets."""
    now = SystemClock().now_ms()
    return _write(data_dir, lambda tx: [token_view(row, now) for row in callers.list_tokens(tx.connection)])


def revoke_token(data_dir: Path, id_or_name: str, reason: str = "", *, every: bool = False) -> dict[str, Any]:
    """Revoke by id or by the name of a caller; see `control.tokens.revoke`."""
    now = SystemClock().now_ms()
    return _write(data_dir, lambda tx: {"revoked": revoke(tx, _me(), id_or_name, now, reason, every=every)})


def _me() -> Caller:
    """Who can write the data directory is admin; the audit names the unix user."""
    user = unix_user()
    return Caller(f"{user}@local", "human", user, frozenset({"admin"}), "", door="cli")


def _write(data_dir: Path, fn: Callable[[Tx], T]) -> T:
    prepare_directory(data_dir)
    lock = DataLock(data_dir)
    try:
        refuse_foreign(data_dir / DATABASE)
        make_private(data_dir / DATABASE)
        connection = sqlite3.connect(data_dir / DATABASE, isolation_level=None)
        try:
            configure(connection)
            migrate(connection, data_dir / DATABASE)
            connection.row_factory = sqlite3.Row
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = fn(Tx(connection))
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result
        finally:
            connection.close()
    finally:
        lock.release()
