"""Jobs and their attempts."""

from __future__ import annotations

import sqlite3
from typing import Any

from cotenant.server.errors import IllegalMove, NotFound, StaleFence
from cotenant.server.model.addresses import list_of
from cotenant.server.model.states import JOB_FINAL, JOB_NEXT, AttemptState, JobState
from cotenant.server.store.db import Tx


def get(tx: Tx, job_id: str) -> sqlite3.Row:
    """
    Raises:
        NotFound: no such job.
    """
    row = tx.one("SELECT * FROM job WHERE id = ?", (job_id,))
    if row is None:
        raise NotFound(f'there is no job "{job_id[:64]}"', code="no_such_job", hint="list_jobs shows yours.")
    return row


def insert(tx: Tx, job: dict[str, Any]) -> None:
    tx.execute(f"INSERT INTO job ({', '.join(job)}) VALUES ({', '.join('?' * len(job))})", tuple(job.values()))
    tx.opens = True
    _note(tx, job["id"], job["pool"], job["owner"])


def find_same(tx: Tx, caller: str, spec_hash: str, since_ms: int) -> str | None:
    """A job of the caller with the same spec, submitted after `since_ms` and not final."""
    row = tx.one(
        "SELECT id FROM job WHERE caller = ? AND spec_hash = ? AND submitted_at_ms >= ?"
        " AND state NOT IN ('succeeded', 'failed', 'cancelled') ORDER BY submitted_at_ms DESC LIMIT 1",
        (caller, spec_hash, since_ms),
    )
    return None if row is None else str(row[0])


def move(
    tx: Tx, job_id: str, to: JobState, now_ms: int, *, by_epoch: int | None = None, row: sqlite3.Row | None = None, **values: Any
) -> sqlite3.Row:  # fmt: skip
    """Move a job to `to` and set `values`; returns the row as it was before.

    `by_epoch` names the attempt on whose word the job moves; only the newest may. `row` is the job's, where this
    transaction has it already.

    Raises:
        StaleFence: a newer attempt owns the job.
        IllegalMove: `to` cannot follow the state it has.
        NotFound: no such job.
    """
    row = row or get(tx, job_id)
    if by_epoch is not None and by_epoch != row["epoch"]:
        raise StaleFence(f"attempt {by_epoch} of {job_id} was superseded by attempt {row['epoch']}")
    if to not in JOB_NEXT[JobState(row["state"])]:
        raise IllegalMove(f"job {job_id}: {row['state']} -> {to}")
    if to in JOB_FINAL:
        values["ended_at_ms"] = now_ms
    tx.opens = tx.opens or to in JOB_FINAL or to is JobState.QUEUED
    names = ["state", "changed_at_ms", *values]
    tx.execute(
        f"UPDATE job SET {', '.join(f'{n} = ?' for n in names)} WHERE id = ?",
        (to.value, now_ms, *values.values(), job_id),
    )
    _note(tx, job_id, row["pool"], row["owner"])
    return row


def update(tx: Tx, job_id: str, **values: Any) -> None:
    """Set columns other than the state."""
    tx.execute(f"UPDATE job SET {', '.join(f'{n} = ?' for n in values)} WHERE id = ?", (*values.values(), job_id))
    tx.dirty.add(("job", job_id))
    tx.changed.add(f"cotenant://jobs/{job_id}")


# ---- attempts ---------------------------------------------------------------------------------


def insert_attempt(tx: Tx, attempt: dict[str, Any]) -> None:
    """
    Raises:
        sqlite3.IntegrityError: the job has a live attempt already, or the epoch or fence was used.
    """
    tx.execute(
        f"INSERT INTO attempt ({', '.join(attempt)}) VALUES ({', '.join('?' * len(attempt))})", tuple(attempt.values())
    )


def find_attempt(tx: Tx, attempt_id: str) -> sqlite3.Row | None:
    return tx.one("SELECT * FROM attempt WHERE id = ?", (attempt_id,))


def live_attempt(tx: Tx, job_id: str) -> sqlite3.Row | None:
    return tx.one("SELECT * FROM attempt WHERE job_id = ? AND state <> 'ended'", (job_id,))


def move_attempt(tx: Tx, attempt_id: str, to: AttemptState, **values: Any) -> sqlite3.Row:
    """Set an attempt's state and `values`; returns the row as it is now. An ended attempt stays ended."""
    names = ["state", *values]
    row = tx.one(
        f"UPDATE attempt SET {', '.join(f'{n} = ?' for n in names)} WHERE id = ? AND state <> 'ended' RETURNING *",
        (to.value, *values.values(), attempt_id),
    )
    if row is None:
        raise IllegalMove(f"attempt {attempt_id} is not there or ended already: -> {to}")
    return row


def update_attempt(tx: Tx, attempt_id: str, **values: Any) -> None:
    """Set columns of an attempt other than its state."""
    tx.execute(
        f"UPDATE attempt SET {', '.join(f'{n} = ?' for n in values)} WHERE id = ?", (*values.values(), attempt_id)
    )


def attempts_on(connection: sqlite3.Connection, host: str) -> list[sqlite3.Row]:
    """Attempts of a host that are not known to have ended; those on several hosts are in `ranks.living`."""
    return connection.execute(
        "SELECT a.*, j.state AS job_state, j.stop_reason AS job_stop_reason FROM attempt a JOIN job j ON j.id = a.job_id"
        " WHERE a.host = ? AND a.state <> 'ended' AND a.nodes = 1 ORDER BY a.fence",
        (host,),
    ).fetchall()


def _note(tx: Tx, job_id: str, pool: str, owner: str) -> None:
    tx.dirty.add(("job", job_id))
    tx.changed |= {f"cotenant://jobs/{job_id}", f"cotenant://queues/{pool}", "cotenant://quota/me", list_of(owner)}
