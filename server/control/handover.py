"""Passing a lease or a job to another caller, who has to agree when it has another owner."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from cotenant.server.clock import iso
from cotenant.server.control import grants
from cotenant.server.control.context import Context, check_request_id
from cotenant.server.errors import Conflict, Forbidden, NotFound, QuotaExceeded
from cotenant.server.model.addresses import list_of
from cotenant.server.model.caller import Caller, owns
from cotenant.server.model.text import quoted
from cotenant.server.store import arrays, callers, events, jobs, leases, requests
from cotenant.server.store.db import Tx

OFFER_MS: Final = 3_600_000


async def hand_over(
    context: Context, caller: Caller, object_id: str, to: str, *, request_id: str | None = None
) -> dict[str, Any]:
    """Pass a lease or job on: the holder offers (`to` = the other), the other accepts (`to` = itself).

    Between agents of one owner it is done at once. Answers `status` offered or handed_over.

    Raises:
        NotFound: no such object or caller.
        Forbidden: neither the caller's nor offered to it.
        Conflict: it has ended, or is a job's lease.
        QuotaExceeded: the taker's caps do not allow it.
        Forbidden: no token of the taker reaches the pool, or may ask for the priority.
    """
    check_request_id(request_id)
    now = context.now()

    def write(tx: Tx) -> dict[str, Any]:
        table = "job" if object_id.startswith("job_") else "lease"
        row = jobs.get(tx, object_id) if table == "job" else leases.get(tx, object_id)
        mine = owns(caller, owner=row["owner"], name=row["caller"])
        offer = tx.one("SELECT * FROM offer WHERE object_id = ? AND expires_at_ms >= ?", (object_id, now))
        if requests.once(tx, caller.name, request_id, "hand_over", [object_id, to], object_id, now):
            return _stands(row, to, offer)
        if table == "lease" and row["kind"] == "job":
            raise Conflict("this lease belongs to a job", code="job_lease", hint=f"Hand over {row['job_id']} instead.")
        if table == "job" and row["array_index"] is not None:
            raise Conflict(f"{object_id} is an element of an array", hint=f"Hand over {row['array_id']} as a whole.")
        if table == "job" and arrays.is_array(row) and arrays.living(tx, object_id):
            raise Conflict(
                f"elements of {object_id} run",
                hint="Hold it, and hand it over when none runs: what ran stays its holder's.",
            )
        accepting = to == caller.name and not mine
        if accepting and (offer is None or offer["receiver"] != caller.name):
            raise Forbidden(
                f"{object_id} was not offered to you",
                code="not_offered",
                hint="Its holder has to call hand_over with your name first.",
            )
        if not (mine or accepting):
            raise Forbidden(
                f"{object_id} is not yours", code="not_yours", hint="Only its owner's agents may hand it over."
            )
        if row["ended_at_ms"] is not None:
            raise Conflict(f"{object_id} has ended ({row['state']})", code="already_final")
        other = tx.one("SELECT * FROM caller WHERE name = ?", (to,))
        if other is None:
            raise NotFound(
                f"there is no caller {quoted(to)}", code="no_such_caller", hint="list_agents shows who there is."
            )
        if row["caller"] == to:
            return _stands(row, to, None)
        _check_reach(tx, table, row, caller if accepting else None, other, now)
        if accepting or other["owner"] == caller.owner:
            _take_over(tx, context, table, row, other, caller, now, request_id)
            return {"object_id": object_id, "status": "handed_over", "holder": to, "until": None}
        tx.execute(
            "INSERT INTO offer (object_id, giver, receiver, created_at_ms, expires_at_ms) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (object_id) DO UPDATE SET giver = excluded.giver, receiver = excluded.receiver,"
            " created_at_ms = excluded.created_at_ms, expires_at_ms = excluded.expires_at_ms",
            (object_id, caller.name, to, now, now + OFFER_MS),
        )
        events.append(tx, "lease.offered", caller, now, owner=row["owner"], **_about(table, object_id), pool=row["pool"],
                      new=to, request_id=request_id)  # fmt: skip
        return {"object_id": object_id, "status": "offered", "holder": row["caller"], "until": iso(now + OFFER_MS)}

    answer = await context.db.write(write)
    context.wake()
    return answer


def _stands(row: sqlite3.Row, to: str, offer: sqlite3.Row | None) -> dict[str, Any]:
    """Where the object stands now: what a repeat is answered with."""
    status = "handed_over" if row["caller"] == to else "offered"
    until = iso(offer["expires_at_ms"]) if offer is not None and status == "offered" else None
    return {"object_id": row["id"], "status": status, "holder": row["caller"], "until": until}


def _take_over(
    tx: Tx, context: Context, table: str, row: sqlite3.Row, receiver: sqlite3.Row, by: Caller, now: int,
    request_id: str | None,
) -> None:  # fmt: skip
    """The object changes hands, if the receiver's caps allow what it holds."""
    lease = (
        row
        if table == "lease"
        else tx.one(
            "SELECT l.* FROM attempt a JOIN lease l ON l.id = a.lease_id WHERE a.job_id = ? AND a.state <> 'ended'"
            " AND l.state IN ('leased', 'running')",
            (row["id"],),
        )
    )
    if lease is not None and lease["state"] in ("leased", "running"):
        try:
            grants.recheck(
                tx, context.settings, pool=lease["pool"], owner=receiver["owner"], caller=receiver["name"],
                human=receiver["kind"] == "human", units=lease["units"], own_lease=lease["id"],
            )  # fmt: skip
        except grants.GrantLost as error:
            raise QuotaExceeded(
                f"{quoted(receiver['name'])} cannot take it: {error.message}", hint="Release something first."
            ) from error
    new = {"caller": receiver["name"], "owner": receiver["owner"], "human": int(receiver["kind"] == "human")}
    if table == "job":
        jobs.update(tx, row["id"], **new)
    if lease is not None:
        leases.update(tx, lease["id"], **new)
        leases.note_slots(tx, leases.slots(tx.connection, lease["id"]))  # who holds them is shown with the cards
    tx.changed |= {
        f"cotenant://queues/{row['pool']}", "cotenant://quota/me", list_of(row["owner"]), list_of(receiver["owner"])
    }  # fmt: skip
    tx.execute("DELETE FROM offer WHERE object_id = ?", (row["id"],))
    events.append(
        tx, f"{table}.handed_over", by, now, owner=receiver["owner"], **_about(table, row["id"]), pool=row["pool"], old=row["caller"],
        new=receiver["name"], request_id=request_id,
    )  # fmt: skip


def _check_reach(
    tx: Tx, table: str, row: sqlite3.Row, accepting: Caller | None, receiver: sqlite3.Row, now: int
) -> None:
    """What a token could not have asked for does not come to its caller from another's hand either.

    The taker is asked by the token it accepts with, else by all its living tokens.

    Raises:
        Forbidden: the pool is out of reach, or a job's priority above what may be asked for.
    """
    tokens = [accepting] if accepting is not None else callers.living_as_caller(tx.connection, receiver["name"], now)
    name, pool = quoted(receiver["name"]), quoted(row["pool"])
    if not tokens:
        raise Forbidden(
            f"{name} has no token that counts, so it could do nothing with it", code="no_living_token",
            hint="A person can make one: cotenant token create.",
        )  # fmt: skip
    reaching = [token for token in tokens if not token.pools or row["pool"] in token.pools]
    if not reaching:
        raise Forbidden(f"no token of {name} reaches pool {pool}", code="pool_out_of_reach",
                        hint="Hand it to a caller that works in this pool; list_agents shows who there is.")  # fmt: skip
    # a direct lease has the usual priority, whoever asks for it
    if table == "job" and all(token.max_priority < row["priority"] for token in reaching):
        raise Forbidden(
            f"no token of {name} may ask for the priority of {row['id']}", code="priority_too_high",
            hint="Lower the job's priority first, or have a person raise what the taker may ask for.",
            data={"max_priority": max(token.max_priority for token in reaching)},
        )  # fmt: skip


def _about(table: str, object_id: str) -> dict[str, Any]:
    return {f"{table}_id": object_id}
