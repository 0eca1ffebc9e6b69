"""Notices to running jobs, and what came of them."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from cotenant.server.deciding.world import Preemption
from cotenant.server.store.db import Tx

_LIVING = "state IN ('noticed', 'stopping')"
#: Three preemptions within this time make a job immune for the same time (design section 6).
OFTEN_MS = 30 * 60_000
OFTEN = 3
#: So many wasted preemptions within this time cost an owner the right for the same time.
WASTED_MS = 24 * 3_600_000
WASTED = 3


def insert(tx: Tx, row: dict[str, Any], victims: list[dict[str, Any]]) -> None:
    """
    Raises:
        sqlite3.IntegrityError: another preemption is under way in the pool.
    """
    tx.execute(f"INSERT INTO preemption ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
    for victim in victims:
        tx.execute(
            "INSERT INTO victim (preemption_id, attempt_id, job_id, lease_id, host) VALUES (?, ?, ?, ?, ?)",
            (row["id"], victim["id"], victim["job_id"], victim["lease_id"], victim["host"]),
        )
    note(tx, row["id"])


def find(connection: sqlite3.Connection, preemption_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM preemption WHERE id = ?", (preemption_id,)).fetchone()
    return row


def victims(connection: sqlite3.Connection, preemption_id: str) -> list[sqlite3.Row]:
    return connection.execute(
        "SELECT v.*, j.state AS job_state, j.spec AS job_spec, j.owner, j.epoch AS job_epoch, a.epoch, a.state AS attempt_state"
        " FROM victim v JOIN job j ON j.id = v.job_id JOIN attempt a ON a.id = v.attempt_id"
        " WHERE v.preemption_id = ? ORDER BY v.attempt_id",
        (preemption_id,),
    ).fetchall()


def update(tx: Tx, preemption_id: str, **values: Any) -> None:
    """Set columns of a preemption."""
    tx.execute(
        f"UPDATE preemption SET {', '.join(f'{n} = ?' for n in values)} WHERE id = ?", (*values.values(), preemption_id)
    )
    note(tx, preemption_id)


def update_victim(tx: Tx, preemption_id: str, attempt_id: str, **values: Any) -> None:
    """Set columns of one victim."""
    tx.execute(
        f"UPDATE victim SET {', '.join(f'{n} = ?' for n in values)} WHERE preemption_id = ? AND attempt_id = ?",
        (*values.values(), preemption_id, attempt_id),
    )
    note(tx, preemption_id)


def note(tx: Tx, preemption_id: str) -> None:
    """Tell that both sides of it look different, and the world too."""
    tx.dirty.add(("preemption", preemption_id))
    tx.opens = True
    row = find(tx.connection, preemption_id)
    if row is not None and row["asker_id"] is not None:
        kind = "leases" if row["asker_id"].startswith("lse") else "jobs"
        tx.changed.add(f"cotenant://{kind}/{row['asker_id']}")
    for victim in tx.all("SELECT job_id FROM victim WHERE preemption_id = ?", (preemption_id,)):
        tx.changed.add(f"cotenant://jobs/{victim['job_id']}")


def living(connection: sqlite3.Connection) -> list[sqlite3.Row]:
    """All that are under way, oldest first."""
    return connection.execute(f"SELECT * FROM preemption WHERE {_LIVING} ORDER BY noticed_at_ms, id").fetchall()


def of_attempt(connection: sqlite3.Connection, attempt_id: str) -> list[sqlite3.Row]:
    """The notices under way to one attempt, with their victim's columns."""
    return connection.execute(
        "SELECT v.*, p.reason, p.state AS preemption_state, p.noticed_at_ms FROM victim v JOIN preemption p ON p.id = v.preemption_id"
        " WHERE v.attempt_id = ? AND p.state IN ('noticed', 'stopping') ORDER BY p.id",
        (attempt_id,),
    ).fetchall()


def of_asker(connection: sqlite3.Connection, asker_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute(
        f"SELECT * FROM preemption WHERE asker_id = ? AND {_LIVING}", (asker_id,)
    ).fetchone()
    return row


def of_job(connection: sqlite3.Connection, job_id: str, limit: int = 10) -> list[sqlite3.Row]:
    """The newest preemptions and evictions that a job was part of, one row for each victim."""
    return connection.execute(
        "SELECT p.*, v.attempt_id, v.job_id, v.lease_id, v.host, v.told_at_ms, v.saved, v.checkpoint, v.stopped_at_ms,"
        " v.grace_used_ms, v.ended_at_ms AS victim_ended_at_ms, v.lost_ms, v.outcome AS victim_outcome"
        " FROM victim v JOIN preemption p ON p.id = v.preemption_id"
        " WHERE (v.job_id = ? OR p.asker_id = ?) AND p.reason <> 'save' ORDER BY p.noticed_at_ms DESC, p.id, v.attempt_id LIMIT ?",
        (job_id, job_id, limit),
    ).fetchall()


def world(connection: sqlite3.Connection) -> tuple[Preemption, ...]:
    """Preemptions under way as the scheduler sees them."""
    found = []
    for row in living(connection):
        if row["reason"] != "preempt":
            continue
        leases = connection.execute(
            "SELECT lease_id FROM victim WHERE preemption_id = ? ORDER BY lease_id", (row["id"],)
        ).fetchall()
        found.append(
            Preemption(
                id=row["id"],
                pool=row["pool"],
                ask_id=row["asker_id"],
                victims=tuple(lease["lease_id"] for lease in leases),
                slots=tuple((host, uuid, share) for host, uuid, share in json.loads(row["slots"])),
                noticed_ms=row["noticed_at_ms"],
                stopping=row["state"] == "stopping",
            )
        )
    return tuple(found)


def immune_until_ms(connection: sqlite3.Connection, job_id: str) -> int:
    """Until when a job may not be preempted again, because it was too often of late; 0 = it may."""
    times = [
        row[0]
        for row in connection.execute(
            "SELECT v.stopped_at_ms FROM victim v JOIN preemption p ON p.id = v.preemption_id"
            " WHERE v.job_id = ? AND v.stopped_at_ms IS NOT NULL AND p.reason = 'preempt' ORDER BY v.stopped_at_ms DESC LIMIT ?",
            (job_id, OFTEN),
        )
    ]
    return times[0] + OFTEN_MS if len(times) == OFTEN and times[0] - times[-1] <= OFTEN_MS else 0


def unjudged(connection: sqlite3.Connection, started_before_ms: int) -> list[sqlite3.Row]:
    """Preemptions whose asker started before this, and of which nobody has said yet whether it was worth it."""
    return connection.execute(
        "SELECT * FROM preemption WHERE asker_started_at_ms IS NOT NULL AND judged = 0 AND asker_started_at_ms <= ?",
        (started_before_ms,),
    ).fetchall()


def wasted(connection: sqlite3.Connection, owner: str, now_ms: int) -> int:
    """How many preemptions of an owner were wasted in the last 24 hours."""
    row = connection.execute(
        "SELECT count(*) FROM preemption WHERE wasted_at_ms IS NOT NULL AND wasted_at_ms > ? AND asker_owner = ?",
        (now_ms - WASTED_MS, owner),
    ).fetchone()
    return int(row[0])


def without_right(connection: sqlite3.Connection) -> dict[str, int]:
    """Owners who wasted too many preemptions -> until when they get no more."""
    found: dict[str, list[int]] = {}
    for row in connection.execute(
        "SELECT asker_owner, wasted_at_ms FROM preemption WHERE wasted_at_ms IS NOT NULL ORDER BY wasted_at_ms DESC LIMIT 1000"
    ):
        found.setdefault(row["asker_owner"], []).append(row["wasted_at_ms"])
    return {
        owner: times[0] + WASTED_MS
        for owner, times in found.items()
        if len(times) >= WASTED and times[0] - times[WASTED - 1] <= WASTED_MS
    }
