"""What jobs wait for: other jobs, elements, ranges of elements. Which ends let them go on, and which end them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cotenant.server.model.states import JobState
from cotenant.server.store.db import Tx

#: Rows of one job, at most: each end of a job looks for those who wait for it.
MOST: Final = 1000


@dataclass(frozen=True)
class On:
    """One thing that is waited for: a job as a whole (`first` is -1), or elements `first` to `last` of array `job_id`.

    `todo` of them are not over, `failed` and `cancelled` of the others ended so.
    """

    job_id: str
    needs: str  # ok | any | failed
    first: int = -1
    last: int = -1
    todo: int = 1
    failed: int = 0
    cancelled: int = 0

    @property
    def met(self) -> bool:
        if self.needs == "ok":
            return self.todo == 0 and not (self.failed or self.cancelled)
        return self.todo == 0 and (self.needs == "any" or self.failed > 0)

    @property
    def hopeless(self) -> bool:
        """Whether it can never be met."""
        if self.needs == "ok":
            return bool(self.failed or self.cancelled)
        return self.needs == "failed" and self.todo == 0 and not self.failed

    @property
    def what(self) -> str:
        """Its name: an id, with the range of elements."""
        if self.first < 0:
            return self.job_id
        return f"{self.job_id}.{self.first}" + (f"-{self.last}" if self.last > self.first else "")

    def why_hopeless(self) -> str:
        """A sentence for the job that waited."""
        if self.needs == "failed":
            return f"dependency: {self.what} did not fail, and this job was to run only if it did"
        ended = "failed" if self.failed else "was cancelled"
        return f"dependency: {self.what} {ended}, and this job needs it to succeed"


def insert(tx: Tx, job_id: str, waits: Iterable[On]) -> int:
    """Keep what `job_id` waits for; returns how many of them are not met yet."""
    rows = [
        (job_id, on.job_id, on.first, on.last, on.needs, on.todo, on.failed, on.cancelled, int(on.met)) for on in waits
    ]
    tx.connection.executemany("INSERT INTO dependency VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    return sum(1 for row in rows if not row[-1])


def of_job(connection: sqlite3.Connection, job_id: str) -> list[On]:
    """Everything that a job waits or waited for."""
    rows = connection.execute("SELECT * FROM dependency WHERE job_id = ? ORDER BY on_job, first", (job_id,))
    return [_on(row) for row in rows]


def unmet(connection: sqlite3.Connection, job_ids: list[str]) -> dict[str, tuple[str, ...]]:
    """By job, what it still waits for."""
    out: dict[str, list[str]] = {}
    for start in range(0, len(job_ids), 500):
        part = job_ids[start : start + 500]
        marks = ", ".join("?" * len(part))
        for row in connection.execute(
            f"SELECT * FROM dependency WHERE met = 0 AND job_id IN ({marks}) ORDER BY job_id, on_job, first", part
        ):
            out.setdefault(row["job_id"], []).append(_on(row).what)
    return {job_id: tuple(what) for job_id, what in out.items()}


def end(tx: Tx, job: sqlite3.Row, to: JobState) -> list[tuple[str, On]]:
    """`job` (its row from before) has ended as `to`. Whoever waited for nothing else may start now.

    Returns the jobs that can never start any more, each with what made it so.
    """
    if job["array_index"] is None:
        which: str = "first = -1"
        values: tuple[str | int, ...] = (job["id"],)
    else:
        at = job["array_index"]
        which, values = "first BETWEEN 0 AND ? AND last >= ?", (job["array_id"], at, at)
    rows = tx.all(
        "UPDATE dependency SET todo = todo - 1, failed = failed + ?, cancelled = cancelled + ?"
        f" WHERE on_job = ? AND {which} AND met = 0 AND todo > 0 RETURNING *",
        (to is JobState.FAILED, to is JobState.CANCELLED, *values),
    )
    return _after(tx, rows)


def end_range(tx: Tx, array_id: str, first: int, last: int) -> list[tuple[str, On]]:
    """Elements `first` to `last` of an array were cancelled before they started; returns as `end`."""
    rows = tx.all(
        "UPDATE dependency SET todo = todo - (min(last, ?) - max(first, ?) + 1), cancelled = cancelled + (min(last, ?) - max(first, ?) + 1)"
        " WHERE on_job = ? AND first BETWEEN 0 AND ? AND last >= ? AND met = 0 RETURNING *",
        (last, first, last, first, array_id, last, first),
    )
    return _after(tx, rows)


def _after(tx: Tx, rows: list[sqlite3.Row]) -> list[tuple[str, On]]:
    hopeless: list[tuple[str, On]] = []
    for row in rows:
        on = _on(row)
        if on.hopeless:
            hopeless.append((row["job_id"], on))
        elif on.met:
            tx.execute(
                "UPDATE dependency SET met = 1 WHERE job_id = ? AND on_job = ? AND first = ? AND last = ?",
                (row["job_id"], row["on_job"], row["first"], row["last"]),
            )
            tx.execute("UPDATE job SET waits_for = waits_for - 1 WHERE id = ?", (row["job_id"],))
            tx.dirty.add(("job", row["job_id"]))
            tx.changed.add(f"cotenant://jobs/{row['job_id']}")
            tx.opens = True
    return hopeless


def _on(row: sqlite3.Row) -> On:
    return On(row["on_job"], row["needs"], row["first"], row["last"], row["todo"], row["failed"], row["cancelled"])
