"""Rows of arrays: which indices are left, how many elements are where, and the parameters of each."""

from __future__ import annotations

import functools
import json
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from cotenant.server.model.arrays import element_id, pattern_of
from cotenant.server.model.indices import Indices
from cotenant.server.model.placeholders import Scalar
from cotenant.server.model.states import JOB_ACTIVE, JOB_FINAL, JOB_WAITING, JobState
from cotenant.server.store.db import Tx, dumps

PART: Final = 64
#: The column that counts elements in each state of a job.
COLUMN: Final[dict[str, str]] = {
    **{state.value: "waiting" for state in JOB_WAITING},
    **{state.value: "running" for state in JOB_ACTIVE},
    **{state.value: state.value for state in JOB_FINAL},
}


def is_array(row: sqlite3.Row) -> bool:
    """Whether a job's row is that of an array."""
    return row["array_id"] is not None and row["array_index"] is None


def find(connection: sqlite3.Connection, array_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM array WHERE job_id = ?", (array_id,)).fetchone()
    return row


def get(tx: Tx, array_id: str) -> sqlite3.Row:
    row = find(tx.connection, array_id)
    assert row is not None, "the job's row says that it is an array"
    return row


def insert(
    tx: Tx, array_id: str, size: int, indices: Indices, max_parallel: int | None, sets: Sequence[dict[str, Scalar]]
) -> None:
    """Write a new array down; its job's row is there already. `sets` are the parameters by index, or empty."""
    text = str(indices)
    tx.execute(
        "INSERT INTO array (job_id, size, indices, max_parallel, todo, pending, has_params) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (array_id, size, text, max_parallel, text, len(indices), int(bool(sets))),
    )
    tx.connection.executemany(
        "INSERT INTO array_params (array_id, part, params) VALUES (?, ?, ?)",
        ((array_id, at // PART, dumps(sets[at : at + PART])) for at in range(0, len(sets), PART)),
    )


def insert_again(tx: Tx, array_id: str, before: sqlite3.Row, indices: Indices) -> None:
    """An array that tries some elements of an earlier one again, under the same indices."""
    text = str(indices)
    tx.execute(
        "INSERT INTO array (job_id, size, indices, max_parallel, todo, pending, has_params) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (array_id, before["size"], text, before["max_parallel"], text, len(indices), before["has_params"]),
    )
    tx.execute(
        "INSERT INTO array_params (array_id, part, params) SELECT ?, part, params FROM array_params WHERE array_id = ?",
        (array_id, before["job_id"]),
    )


def take(tx: Tx, array: sqlite3.Row, count: int) -> list[int]:
    """The next `count` indices, which leave the waiting ones and count as running from now on; fewer if there are no more.

    Above `max_parallel` none is given.
    """
    room = count if array["max_parallel"] is None else min(count, array["max_parallel"] - array["running"])
    todo, at = Indices.parse(array["todo"]), array["next_index"]
    taken: list[int] = []
    while len(taken) < room and (index := todo.first(at)) is not None:
        taken.append(index)
        at = index + 1
    if taken:
        tx.execute(
            "UPDATE array SET next_index = ?, pending = pending - ?, running = running + ? WHERE job_id = ?",
            (at, len(taken), len(taken), array["job_id"]),
        )
        note(tx, array["job_id"], array["max_parallel"] is not None and array["waiting"] > 0)
    return taken


def todo_of(array: sqlite3.Row) -> Indices:
    """The indices that wait to be started."""
    return Indices.parse(array["todo"]).start(array["next_index"])


def move_element(tx: Tx, array_id: str, before: str, after: str) -> sqlite3.Row | None:
    """Count an element that goes from one state to another; the array as it is then, or None if nothing changed."""
    source, target = COLUMN[before], COLUMN[after]
    if source == target:
        return None
    row = tx.one(
        f"UPDATE array SET {source} = {source} - 1, {target} = {target} + 1 WHERE job_id = ? RETURNING *", (array_id,)
    )
    assert row is not None, "an element's array is there"
    note(tx, array_id, row["max_parallel"] is not None and row["waiting"] > 0)
    return row


def drop(tx: Tx, array: sqlite3.Row, which: Indices) -> sqlite3.Row:
    """Cancel those of `which` that have not started; the array as it is then."""
    todo, on_hold = todo_of(array), Indices.parse(array["on_hold"])
    gone, unheld = todo & which, on_hold & which
    dropped = Indices.parse(array["dropped"]) | gone | unheld
    return _rewrite(tx, array, todo - gone, on_hold - unheld, dropped)


def hold(tx: Tx, array: sqlite3.Row, which: Indices) -> sqlite3.Row:
    """Keep those of `which` that have not started from starting."""
    todo = todo_of(array)
    return _rewrite(
        tx, array, todo - which, Indices.parse(array["on_hold"]) | (todo & which), Indices.parse(array["dropped"])
    )


def release(tx: Tx, array: sqlite3.Row, which: Indices) -> sqlite3.Row:
    """Let those of `which` that are on hold start again."""
    on_hold = Indices.parse(array["on_hold"])
    tx.opens = True
    return _rewrite(tx, array, todo_of(array) | (on_hold & which), on_hold - which, Indices.parse(array["dropped"]))


def limit(tx: Tx, array_id: str, most: int | None) -> None:
    """Let `most` elements run at once from now on. Where more do they go on, and none is added."""
    tx.execute("UPDATE array SET max_parallel = ? WHERE job_id = ?", (most, array_id))
    tx.opens = True
    note(tx, array_id, True)


def _rewrite(tx: Tx, array: sqlite3.Row, todo: Indices, on_hold: Indices, dropped: Indices) -> sqlite3.Row:
    fewer = len(Indices.parse(array["dropped"]))
    row = tx.one(
        "UPDATE array SET todo = ?, next_index = 0, on_hold = ?, dropped = ?, pending = ?, held = ?, cancelled = cancelled + ?"
        " WHERE job_id = ? RETURNING *",
        (
            str(todo), str(on_hold), str(dropped), len(todo), len(on_hold), len(dropped) - fewer, array["job_id"],
        ),
    )  # fmt: skip
    assert row is not None
    note(tx, array["job_id"], False)
    return row


def is_over(array: sqlite3.Row) -> bool:
    """Whether nothing of it waits or runs any more."""
    return not (array["pending"] or array["held"] or array["waiting"] or array["running"])


def end_of(array: sqlite3.Row, *, stopped: bool) -> tuple[JobState, str]:
    """What an array that is over has come to, and a sentence that says so."""
    counts = [f"{array[name]} {name}" for name in ("succeeded", "failed", "cancelled") if array[name]]
    said = f"{', '.join(counts)} of {len(Indices.parse(array['indices']))} elements"
    if array["failed"] == array["cancelled"] == 0:
        return JobState.SUCCEEDED, said
    if stopped or not array["failed"]:
        return JobState.CANCELLED, said
    return JobState.FAILED, said


def living(tx: Tx, array_id: str) -> list[sqlite3.Row]:
    """The elements that have started and are not over."""
    return tx.all(
        "SELECT * FROM job WHERE array_id = ? AND array_index IS NOT NULL AND state NOT IN ('succeeded', 'failed', 'cancelled')"
        " ORDER BY array_index",
        (array_id,),
    )


def states(connection: sqlite3.Connection, array_id: str, first: int, last: int) -> dict[str, int]:
    """How many of the elements `first` to `last` that have started are in each state."""
    rows = connection.execute(
        "SELECT state, count(*) FROM job INDEXED BY one_job_per_element WHERE array_id = ? AND array_index BETWEEN ? AND ?"
        " GROUP BY state",
        (array_id, first, last),
    )
    return {row[0]: row[1] for row in rows}


def ended(connection: sqlite3.Connection, array_id: str) -> dict[int, str]:
    """The final state of every element that has started and is over, by index."""
    rows = connection.execute(
        "SELECT array_index, state FROM job INDEXED BY one_job_per_element WHERE array_id = ? AND array_index IS NOT NULL"
        " AND state IN ('succeeded', 'failed', 'cancelled')",
        (array_id,),
    )
    return {row[0]: row[1] for row in rows}


def newest(connection: sqlite3.Connection, array_id: str) -> list[sqlite3.Row]:
    """Elements that are worth a look: those that live, and of the last thousand that started those that failed or ended last."""
    return connection.execute(
        "SELECT id, state FROM (SELECT id, state, array_index FROM job INDEXED BY one_job_per_element WHERE array_id = ?"
        " AND array_index IS NOT NULL ORDER BY array_index DESC LIMIT 1000)"
        " ORDER BY state <> 'failed', state IN ('succeeded', 'cancelled'), array_index DESC LIMIT 20",
        (array_id,),
    ).fetchall()


def note(tx: Tx, array_id: str, others: bool) -> None:
    """Tell that an array's counts moved. `others`: its elements in the queue have another number of places left."""
    tx.dirty.add(("job", array_id))
    tx.changed.add(f"cotenant://jobs/{array_id}")
    if others:
        tx.dirty |= {("job", row["id"]) for row in living(tx, array_id) if COLUMN[row["state"]] == "waiting"}


# ---- elements ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> list[dict[str, Scalar]]:
    found: list[dict[str, Scalar]] = json.loads(text)
    return found


def params_of(connection: sqlite3.Connection, array: sqlite3.Row, index: int) -> dict[str, Scalar]:
    """The parameters of one element; empty where the array has none."""
    if not array["has_params"]:
        return {}
    row = connection.execute(
        "SELECT params FROM array_params WHERE array_id = ? AND part = ?", (array["job_id"], index // PART)
    ).fetchone()
    return _parsed(row["params"])[index % PART]


def element_row(connection: sqlite3.Connection, job: sqlite3.Row, array: sqlite3.Row, index: int) -> dict[str, Any]:
    """An element as a job's row, as it is before it starts: what it inherits, with its own id, index and spec."""
    spec = pattern_of(job["spec"]).element(index, params_of(connection, array, index))
    return {
        "id": element_id(job["id"], index), "state": "queued", "name": job["name"], "caller": job["caller"], "owner": job["owner"],
        "human": job["human"], "pool": job["pool"], "priority": job["priority"], "spec": spec, "spec_hash": "",
        "hours_ms": job["hours_ms"], "hours_from": job["hours_from"], "attempts_left": job["attempts_left"],
        "submitted_at_ms": job["submitted_at_ms"],
        # one that has to start again goes before those that have not started yet
        "queued_at_ms": job["queued_at_ms"] - 1, "array_id": job["id"], "array_index": index,
    }  # fmt: skip
