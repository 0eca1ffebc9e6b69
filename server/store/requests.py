"""Repeats: the same request_id of a caller is answered from the first, and a confirmation is spent once."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from cotenant.server.errors import BadRequest, Conflict
from cotenant.server.store.db import Tx, dumps

KEPT_MS: Final = 7 * 24 * 3600 * 1000
CONFIRM_MS: Final = 5 * 60 * 1000


def args_hash(verb: str, args: Any) -> str:
    """What makes two requests the same."""
    return hashlib.sha256(dumps([verb, args]).encode()).hexdigest()


def find(tx: Tx, caller: str, request_id: str | None, verb: str, digest: str) -> str | None:
    """The object that the first request with this id made or changed; None for a first.

    Raises:
        Conflict: the id was used with another verb or other arguments.
    """
    if request_id is None:
        return None
    row = tx.one(
        "SELECT verb, args_hash, object_id FROM request WHERE caller = ? AND request_id = ?", (caller, request_id)
    )
    if row is None:
        return None
    if row["args_hash"] != digest:
        raise Conflict(
            f"this request_id was used for {row['verb']} with other arguments",
            code="request_id_reused",
            hint="Send a new request_id for a new request.",
            data={"object_id": row["object_id"]},
        )
    return str(row["object_id"])


def keep(tx: Tx, caller: str, request_id: str | None, verb: str, digest: str, object_id: str, now_ms: int) -> None:
    if request_id is not None:
        tx.execute(
            "INSERT INTO request (caller, request_id, verb, args_hash, object_id, created_at_ms) VALUES (?, ?, ?, ?, ?, ?)",
            (caller, request_id, verb, digest, object_id, now_ms),
        )


def once(tx: Tx, caller: str, request_id: str | None, verb: str, args: Any, object_id: str, now_ms: int) -> bool:
    """Whether this request was carried out before; if not, it counts as carried out with this transaction.

    Raises:
        Conflict: the id was used with another verb or other arguments.
    """
    digest = args_hash(verb, args)
    if find(tx, caller, request_id, verb, digest) is not None:
        return True
    keep(tx, caller, request_id, verb, digest, object_id, now_ms)
    return False


def conclude(tx: Tx, caller: str, request_id: str | None, outcome: str) -> None:
    """Write down what came of a request whose effect lies outside the records: sent, delivered or unknown."""
    if request_id is not None:
        tx.execute("UPDATE request SET outcome = ? WHERE caller = ? AND request_id = ?", (outcome, caller, request_id))


def outcome(tx: Tx, caller: str, request_id: str | None) -> str | None:
    """What `conclude` wrote last."""
    row = tx.one("SELECT outcome FROM request WHERE caller = ? AND request_id = ?", (caller, request_id))
    return None if row is None else row["outcome"]


def forget(tx: Tx, caller: str, request_id: str | None) -> None:
    """The request certainly did nothing: a repeat is a first again."""
    tx.execute("DELETE FROM request WHERE caller = ? AND request_id = ?", (caller, request_id))


def forget_old(tx: Tx, now_ms: int) -> int:
    """Drop what is older than 7 days; returns how many rows went."""
    gone = tx.changes("DELETE FROM request WHERE created_at_ms < ?", (now_ms - KEPT_MS,))
    gone += tx.changes("DELETE FROM confirmation WHERE expires_at_ms < ?", (now_ms - KEPT_MS,))
    return gone + tx.changes("DELETE FROM offer WHERE expires_at_ms < ?", (now_ms,))


def secret_hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def ask(tx: Tx, caller: str, act: str, object_id: str, object_state: str, secret: str, now_ms: int) -> int:
    """Remember a question; returns until when (ms) it may be answered."""
    expires = now_ms + CONFIRM_MS
    tx.execute(
        "INSERT INTO confirmation (hash, caller, act, object_id, object_state, created_at_ms, expires_at_ms) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (secret_hash(secret), caller, act, object_id, object_state, now_ms, expires),
    )
    return expires


def ask_again(tx: Tx, object_state: str, secret: str, now_ms: int) -> int | None:
    """Give a question that is still open its whole time anew; None where it was answered, is too old, or of another state."""
    expires = now_ms + CONFIRM_MS
    renewed = tx.changes(
        "UPDATE confirmation SET expires_at_ms = ? WHERE hash = ? AND used_at_ms IS NULL AND expires_at_ms >= ? AND object_state = ?",
        (expires, secret_hash(secret), now_ms, object_state),
    )
    return expires if renewed else None


def spend(tx: Tx, caller: str, act: str, object_id: str, object_state: str, secret: str, now_ms: int) -> None:
    """Use up a confirmation, in the transaction of the act itself.

    Raises:
        BadRequest: no such confirmation for this caller, act and object.
        Conflict: it was used, is too old, or the object changed since it was asked.
    """
    row = tx.one("SELECT * FROM confirmation WHERE hash = ?", (secret_hash(secret),))
    again = "Call without confirm_token to be asked anew."
    if row is None or (row["caller"], row["act"], row["object_id"]) != (caller, act, object_id):
        raise BadRequest(
            "this confirm_token was not given for this act and object", code="wrong_confirm_token", hint=again
        )
    if row["used_at_ms"] is not None:
        raise Conflict("this confirm_token was used already", code="confirm_token_used", hint=again)
    if now_ms > row["expires_at_ms"]:
        raise Conflict("this confirm_token is older than 5 minutes", code="confirm_token_expired", hint=again)
    if row["object_state"] != object_state:
        raise Conflict(
            f"the object was {row['object_state']} when you were asked and is {object_state} now",
            code="changed_since_asked",
            hint=again,
        )
    used = tx.changes(
        "UPDATE confirmation SET used_at_ms = ? WHERE hash = ? AND used_at_ms IS NULL", (now_ms, row["hash"])
    )
    assert used == 1, "read and write share one transaction"
