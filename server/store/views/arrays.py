"""Arrays as a caller may see them: the counts of one, and an element before it has a row of its own."""

from __future__ import annotations

import sqlite3
from typing import Any

from cotenant.server.errors import BadRequest, NotFound
from cotenant.server.model import answers as a
from cotenant.server.model.arrays import of_element
from cotenant.server.model.indices import Indices
from cotenant.server.model.text import clean
from cotenant.server.store import arrays


def array_answer(row: sqlite3.Row) -> a.ArrayAnswer:
    return a.ArrayAnswer(
        size=row["size"],
        indices=row["indices"],
        pending=row["pending"] + row["waiting"],
        held=row["held"],
        running=row["running"],
        succeeded=row["succeeded"],
        failed=row["failed"],
        cancelled=row["cancelled"],
        max_parallel=row["max_parallel"],
    )


def find_unstarted(connection: sqlite3.Connection, job_id: str) -> dict[str, Any] | None:
    """An element that has not started, as its job's row would be; None for any other id."""
    found = of_element(job_id)
    if found is None:
        return None
    array_id, index = found
    array = arrays.find(connection, array_id)
    if array is None or index not in Indices.parse(array["indices"]):
        return None
    job = connection.execute("SELECT * FROM job WHERE id = ?", (array_id,)).fetchone()
    row = {**dict(job), **arrays.element_row(connection, job, array, index)}
    if index in Indices.parse(array["dropped"]):
        end = job["ended_at_ms"] or job["changed_at_ms"]
        row |= {"state": "cancelled", "ended_at_ms": end, "message": "cancelled before it started"}
    elif index in Indices.parse(array["on_hold"]):
        row |= {"state": "held", "held_reason": "on hold"}
    else:
        row |= {"state": job["state"], "message": None}
    return row


def no_such_job(connection: sqlite3.Connection, job_id: str) -> NotFound:
    """The refusal of an id that names no job; of one that seems to mean an element it says which there are."""
    found = of_element(job_id)
    array = arrays.find(connection, found[0]) if found is not None else None
    hint = "list_jobs shows yours."
    if array is not None:
        hint = f"Its elements are {array['job_id']}.INDEX with the indices {array['indices'][:200]}."
    return NotFound(f'there is no job "{clean(job_id, 64)}"', code="no_such_job", hint=hint)


def no_such_array(array_id: str) -> NotFound:
    return NotFound(
        f'there is no array "{clean(array_id, 64)}"',
        code="no_such_job",
        hint="Give the id of the array itself, without an index; list_jobs shows arrays with their counts.",
    )


def index_of(cursor: str, array_id: str | None) -> int:
    """The index that a page of an array's elements ended with.

    Raises:
        BadRequest: the cursor is of another list.
    """
    found = of_element(cursor)
    if found is None or found[0] != array_id:
        raise BadRequest(
            "this cursor is not from the same list", code="bad_cursor", hint="Leave it out to start from the first."
        )
    return found[1]
