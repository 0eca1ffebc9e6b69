"""Acts on parts of an array: cancel, hold, release some of its elements, and which of them a retry means."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from cotenant.server.control.stopping import order_stop
from cotenant.server.errors import BadRequest, Conflict, NotFound
from cotenant.server.model.arrays import element_id, of_element
from cotenant.server.model.caller import Caller
from cotenant.server.model.indices import Indices
from cotenant.server.model.states import JOB_FINAL, JOB_WAITING, JobState
from cotenant.server.store import arrays, events, jobs
from cotenant.server.store.db import Tx


@dataclass(frozen=True)
class Part:
    """Some elements of an array."""

    array_id: str
    which: Indices

    @property
    def name(self) -> str:
        """What a confirmation and a repeated request are bound to."""
        return f"{self.array_id}.{self.which}"


def part_of(tx: Tx, job_id: str, indices: str | None) -> Part | None:
    """The part of an array that is meant, or None where `job_id` is meant as it is.

    An element that has not started has no job of its own yet: it is a part of its array.

    Raises:
        BadRequest: indices that are none, or of a job that is no array.
        NotFound: the array has no such elements.
    """
    if indices is None:
        found = of_element(job_id)
        if found is None or tx.one("SELECT 1 FROM job WHERE id = ?", (job_id,)) is not None:
            return None
        array_id, which = found[0], Indices.of([found[1]])
    else:
        array_id = job_id
        try:
            which = Indices.parse(indices)
        except ValueError as error:
            raise BadRequest(str(error), hint="get_job shows an array's indices.") from None
        if not arrays.is_array(jobs.get(tx, array_id)):
            raise BadRequest(f"{array_id} is no array: indices make no sense", hint="Leave indices out.")
    array = arrays.find(tx.connection, array_id)
    if array is None:
        raise NotFound(f'there is no job "{job_id[:64]}"', code="no_such_job", hint="list_jobs shows yours.")
    missing = which - Indices.parse(array["indices"])
    if missing or not which:
        name = element_id(array_id, next(iter(missing))) if missing else "without an index"
        hint = f"The indices of {array_id} are {array['indices'][:200]}."
        raise NotFound(f"there is no element {name}", code="no_such_job", hint=hint)
    return Part(array_id, which)


def cancel(
    tx: Tx, by: Caller, row: sqlite3.Row, part: Part, now: int, *, confirmed: str, why: str, request_id: str | None
) -> tuple[int, list[str]]:
    """Cancel a part; returns how many elements are cancelled at once, and the ids of those that are being stopped."""
    before = arrays.get(tx, part.array_id)["cancelled"]
    stopping = []
    for element in arrays.living(tx, part.array_id):
        if element["array_index"] in part.which and element["state"] != "stopping":
            status, _ = order_stop(tx, by, element, "cancel", now, confirmed=confirmed, why=why, request_id=request_id)
            if status == "stopping":
                stopping.append(str(element["id"]))
    jobs.drop_elements(tx, row, part.which, by, now, why or f"cancelled by {by.name}")
    return arrays.get(tx, part.array_id)["cancelled"] - before, stopping


def is_over(tx: Tx, part: Part) -> bool:
    """Whether nothing of a part waits or runs, or all that does is being stopped."""
    array = arrays.get(tx, part.array_id)
    if (arrays.todo_of(array) | Indices.parse(array["on_hold"])) & part.which:
        return False
    living = (row for row in arrays.living(tx, part.array_id) if row["array_index"] in part.which)
    return all(row["state"] == "stopping" for row in living)


def hold(
    tx: Tx, by: Caller, row: sqlite3.Row, part: Part, now: int, reason: str, why: str, request_id: str | None
) -> None:
    """Keep what waits of a part from starting; `why` is what is shown.

    Raises:
        Conflict: nothing of it waits.
    """
    before = arrays.get(tx, part.array_id)
    array = arrays.hold(tx, before, part.which)
    held = hold_waiting(tx, by, part.array_id, part.which, now, reason, why)
    if array["held"] == before["held"] and not held and not Indices.parse(array["on_hold"]) & part.which:
        raise Conflict(
            f"no element of {part.name[:200]} waits", code="not_waiting", hint="list_jobs(array=…) shows them."
        )
    if array["held"] != before["held"]:
        _event(tx, "job.elements_held", by, row, now, Indices.parse(array["on_hold"]) - Indices.parse(before["on_hold"]), reason,
               request_id)  # fmt: skip


def hold_waiting(tx: Tx, by: Caller, array_id: str, which: Indices, now: int, reason: str, why: str) -> int:
    """Hold those elements that have started once and are in the queue again; returns how many."""
    count = 0
    for element in arrays.living(tx, array_id):
        if element["array_index"] in which and element["state"] in ("queued", "preempted"):
            jobs.move(tx, element["id"], JobState.HELD, now, row=element, held_reason=why)
            events.append(tx, "job.held", by, now, owner=element["owner"], job_id=element["id"], old=element["state"], new="held",
                          reason=reason)  # fmt: skip
            count += 1
    return count


def release(
    tx: Tx, by: Caller, row: sqlite3.Row, which: Indices, now: int, reason: str, request_id: str | None
) -> None:
    """Let elements on hold start again."""
    before = arrays.get(tx, row["id"])
    array = arrays.release(tx, before, which)
    if array["held"] != before["held"]:
        _event(tx, "job.elements_unheld", by, row, now, Indices.parse(before["on_hold"]) - Indices.parse(array["on_hold"]), reason,
               request_id)  # fmt: skip
    for element in arrays.living(tx, row["id"]):
        if element["array_index"] in which and element["state"] == "held":
            jobs.move(tx, element["id"], JobState.QUEUED, now, row=element, held_reason=None, quick_failures=0, not_before_ms=0,
                      attempts_left=max(1, element["attempts_left"]))  # fmt: skip
            events.append(tx, "job.unheld", by, now, owner=element["owner"], job_id=element["id"], old="held", new="queued",
                          reason=reason)  # fmt: skip


def to_retry(tx: Tx, job_id: str, only: str | None, indices: str | None) -> Part | None:
    """Which elements a retry means; None for a job that is no array.

    Raises:
        BadRequest: `only` or `indices` of a job that is no array.
        Conflict: some of them are not over, or there is none.
    """
    row = tx.one("SELECT * FROM job WHERE id = ?", (job_id,))
    part = part_of(tx, job_id, indices)
    if part is None and row is not None and row["array_index"] is not None:
        part = Part(row["array_id"], Indices.of([row["array_index"]]))
    if part is None and row is not None and arrays.is_array(row):
        part = Part(job_id, Indices.parse(arrays.get(tx, job_id)["indices"]))
    if part is None:
        if only is not None:
            raise BadRequest(f"{job_id} is no array: only makes no sense", hint="Leave it out.")
        return None
    array = arrays.get(tx, part.array_id)
    ended = arrays.ended(tx.connection, part.array_id)
    over = Indices.of(ended) | Indices.parse(array["dropped"])
    which = part.which
    if only == "failed":
        which &= Indices.of(index for index, state in ended.items() if state == "failed")
        if not which:
            raise Conflict(
                f"no element of {part.array_id} has failed", code="not_final", hint="get_job shows how they stand."
            )
    if missing := which - over:
        raise Conflict(
            f"{element_id(part.array_id, next(iter(missing)))} is not over, nor are {len(missing) - 1} others",
            code="not_final",
            hint='Wait for their end, cancel_job them first, or give only="failed".',
        )
    return Part(part.array_id, which)


def describe(tx: Tx, array_id: str) -> str:
    """Which elements of an array to look at: those that failed, run, or ended last, as ids."""
    found: dict[str, list[str]] = {}
    for row in arrays.newest(tx.connection, array_id):
        kind = row["state"] if row["state"] in JOB_FINAL else "waiting" if row["state"] in JOB_WAITING else "running"
        found.setdefault(kind, []).append(row["id"])
    parts = [f"{kind}: {', '.join(ids[:3])}" for kind, ids in found.items()]
    return "; ".join(parts) or "none has started yet"


def _event(
    tx: Tx, kind: str, by: Caller, row: sqlite3.Row, now: int, which: Indices, reason: str, request_id: str | None
) -> None:
    events.append(tx, kind, by, now, owner=row["owner"], job_id=row["id"], pool=row["pool"], reason=reason, request_id=request_id,
                  args={"indices": str(which)[:1000], "count": len(which)})  # fmt: skip
