"""Jobs and their attempts."""

from __future__ import annotations

import sqlite3
from typing import Any

from cotenant.server.errors import IllegalMove, NotFound, StaleFence
from cotenant.server.model.addresses import list_of
from cotenant.server.model.caller import LOOP, Caller
from cotenant.server.model.indices import ALL_INDICES, Indices
from cotenant.server.model.states import JOB_FINAL, JOB_NEXT, AttemptState, JobState
from cotenant.server.store import arrays, dependencies, events
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
        "SELECT id FROM job WHERE array_index IS NULL AND caller = ? AND spec_hash = ? AND submitted_at_ms >= ?"
        " AND state NOT IN ('succeeded', 'failed', 'cancelled') ORDER BY submitted_at_ms DESC LIMIT 1",
        (caller, spec_hash, since_ms),
    )
    return None if row is None else str(row[0])


def move(
    tx: Tx, job_id: str, to: JobState, now_ms: int, *, by_epoch: int | None = None, row: sqlite3.Row | None = None, **values: Any
) -> sqlite3.Row:  # fmt: skip
    """Move a job to `to` and set `values`; returns the row as it was before.

    An element's array counts it, and is over with its last one. An end reaches those who wait for it: they may start
    now, or never any more, which ends them too.

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
    _set(tx, row, to, now_ms, values)
    if to in JOB_FINAL:
        _follow(tx, _ended(tx, row, to, now_ms), now_ms)
    elif row["array_index"] is not None:
        arrays.move_element(tx, row["array_id"], row["state"], to.value)
    return row


def _set(tx: Tx, row: sqlite3.Row, to: JobState, now_ms: int, values: dict[str, Any]) -> None:
    if to in JOB_FINAL:
        values["ended_at_ms"] = now_ms
    tx.opens = tx.opens or to in JOB_FINAL or to is JobState.QUEUED
    names = ["state", "changed_at_ms", *values]
    tx.execute(
        f"UPDATE job SET {', '.join(f'{n} = ?' for n in names)} WHERE id = ?",
        (to.value, now_ms, *values.values(), row["id"]),
    )
    _note(tx, row["id"], row["pool"], row["owner"])


def _ended(tx: Tx, row: sqlite3.Row, to: JobState, now_ms: int) -> list[tuple[str, str]]:
    """A job has ended: count it in its array. Returns (id, reason) of jobs that can never start any more."""
    doomed = dependencies.end(tx, row, to)
    if row["array_index"] is not None:
        array = arrays.move_element(tx, row["array_id"], row["state"], to.value)
        if array is not None and arrays.is_over(array):
            doomed += _end_array(tx, array, now_ms)
    return [(job_id, on.why_hopeless()) for job_id, on in doomed]


def _end_array(tx: Tx, array: sqlite3.Row, now_ms: int) -> list[tuple[str, dependencies.On]]:
    """Nothing of an array waits or runs any more: it is over too."""
    job = get(tx, array["job_id"])
    to, said = arrays.end_of(array, stopped=job["stop_reason"] is not None)
    _set(tx, job, to, now_ms, {"message": said, "held_reason": None})
    severity = "warning" if to is JobState.FAILED else "info"
    events.append(tx, f"job.{to.value}", LOOP, now_ms, owner=job["owner"], job_id=job["id"], pool=job["pool"], old=job["state"],
                  new=to.value, severity=severity, reason=said)  # fmt: skip
    return dependencies.end(tx, job, to)


def _follow(tx: Tx, doomed: list[tuple[str, str]], now_ms: int) -> None:
    """End jobs that can never start any more, and those that wait for them, however long the chain."""
    at = 0
    while at < len(doomed):
        job_id, why = doomed[at]
        at += 1
        job = get(tx, job_id)
        if job["state"] not in JOB_FINAL:
            doomed += _end_waiting(tx, job, LOOP, now_ms, why, {})


def end_waiting(tx: Tx, job: sqlite3.Row, by: Caller, now_ms: int, why: str, **values: Any) -> None:
    """End a job that has no attempt, for `why`. What has started of an array goes on, and the array ends with it."""
    _follow(tx, _end_waiting(tx, job, by, now_ms, why, values), now_ms)


def _end_waiting(
    tx: Tx, job: sqlite3.Row, by: Caller, now_ms: int, why: str, values: dict[str, Any]
) -> list[tuple[str, str]]:
    if arrays.is_array(job):
        return _drop(tx, job, ALL_INDICES, by, now_ms, why)
    _set(tx, job, JobState.CANCELLED, now_ms, {"message": why, "held_reason": None, **values})
    events.append(tx, "job.cancelled", by, now_ms, owner=job["owner"], job_id=job["id"], pool=job["pool"], old=job["state"],
                  new="cancelled", reason=why)  # fmt: skip
    return _ended(tx, job, JobState.CANCELLED, now_ms)


def drop_elements(tx: Tx, job: sqlite3.Row, which: Indices, by: Caller, now_ms: int, why: str) -> None:
    """Cancel those elements of `which` that have not started."""
    _follow(tx, _drop(tx, job, which, by, now_ms, why), now_ms)


def _drop(tx: Tx, job: sqlite3.Row, which: Indices, by: Caller, now_ms: int, why: str) -> list[tuple[str, str]]:
    before = arrays.get(tx, job["id"])
    array = arrays.drop(tx, before, which)
    gone = Indices.parse(array["dropped"]) - Indices.parse(before["dropped"])
    if not gone:
        return []
    events.append(tx, "job.elements_cancelled", by, now_ms, owner=job["owner"], job_id=job["id"], pool=job["pool"], reason=why,
                  args={"indices": str(gone)[:1000], "count": len(gone)})  # fmt: skip
    doomed = [item for first, last in gone.runs for item in dependencies.end_range(tx, job["id"], first, last)]
    if arrays.is_over(array):
        doomed += _end_array(tx, array, now_ms)
    return [(job_id, on.why_hopeless()) for job_id, on in doomed]


def update(tx: Tx, job_id: str, **values: Any) -> None:
    """Set columns other than the state."""
    tx.execute(f"UPDATE job SET {', '.join(f'{n} = ?' for n in values)} WHERE id = ?", (*values.values(), job_id))
    tx.dirty.add(("job", job_id))
    tx.changed.add(f"cotenant://jobs/{job_id}")


def modify(tx: Tx, row: sqlite3.Row, values: dict[str, Any]) -> None:
    """Set columns of a job that say what it asks for: it may start now, or somewhere else."""
    update(tx, row["id"], **values)
    tx.opens = True
    _note(tx, row["id"], row["pool"], row["owner"])
    _note(tx, row["id"], values.get("pool", row["pool"]), row["owner"])


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
