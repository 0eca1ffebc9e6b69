"""What a job waits for, checked: the jobs that must end first, and the time in which it may start."""

from __future__ import annotations

from collections.abc import Iterable

from cotenant.server.clock import iso
from cotenant.server.errors import BadRequest, Conflict, NotFound
from cotenant.server.model.arrays import element_id
from cotenant.server.model.conditions import AfterSpec, WindowSpec
from cotenant.server.model.indices import Indices
from cotenant.server.model.states import JOB_FINAL
from cotenant.server.store import arrays, dependencies, jobs
from cotenant.server.store.db import Tx
from cotenant.server.store.dependencies import On


def window(spec: WindowSpec | None, now: int) -> tuple[int, int | None]:
    """(the first moment at which the job may start, the moment from which it may not).

    Raises:
        BadRequest: the time is over, or there is none.
    """
    if spec is None:
        return 0, None
    opens, closes = spec.from_ms(now), spec.until_ms(now)
    if closes is not None and closes <= max(opens, now):
        what = f"not_before {iso(opens)}" if opens >= now else f"now, {iso(now)}"
        raise BadRequest(
            f"start_window: not_after {iso(closes)} is not later than {what}", hint="Give a later not_after."
        )
    return opens, closes


def resolve(tx: Tx, after: Iterable[AfterSpec], job_id: str | None = None) -> list[On]:
    """What `after` names, as it stands now. `job_id` is the job that shall wait, where it is there already.

    Raises:
        NotFound: no such job or element.
        Conflict: it can never be met, or the job would wait for itself.
    """
    found: dict[tuple[str, int, int], On] = {}
    for item in after:
        on = _standing(tx, item)
        key = (on.job_id, on.first, on.last)
        if key in found and found[key].needs != on.needs:
            raise BadRequest(f"after names {on.what} twice, with different conditions", hint="Give each job once.")
        if on.hopeless:
            ended = "failed" if on.failed else "was cancelled" if on.cancelled else "did not fail"
            raise Conflict(
                f"after: {on.what} {ended} already, so this job could never start",
                code="dependency_failed",
                hint='Leave it out, give when="any", or retry_job that one and name the new job.',
            )
        if job_id is not None and reaches(tx, on.job_id, job_id):
            raise Conflict(
                f"after: {on.what} itself waits for {job_id}, so neither could ever start",
                code="dependency_cycle",
                hint="get_job shows what a job waits for under after.",
            )
        found[key] = on
    if len(found) > dependencies.MOST:
        raise BadRequest(
            f"after names {len(found)} jobs; at most {dependencies.MOST}", hint="Name an array as a whole."
        )
    return list(found.values())


def reaches(tx: Tx, start: str, target: str) -> bool:
    """Whether the job `start` waits, directly or through others, for the job or array `target` or an element of it."""
    whole = target.partition(".")[0]
    seen, line = {start}, [start]
    while line:
        job_id = line.pop()
        if job_id == whole:
            return True
        for on in dependencies.of_job(tx.connection, job_id):
            if not on.met and on.job_id not in seen:
                seen.add(on.job_id)
                line.append(on.job_id)
    return False


def _standing(tx: Tx, item: AfterSpec) -> On:
    job_id, first, last = item.parts
    row = jobs.get(tx, job_id)
    if first < 0:
        over = row["state"] in JOB_FINAL
        return On(
            job_id, item.when, todo=int(not over), failed=int(row["state"] == "failed"),
            cancelled=int(row["state"] == "cancelled"),
        )  # fmt: skip
    if not arrays.is_array(row):
        raise NotFound(f"{job_id} is no array and has no elements", code="no_such_job", hint=f"Name {job_id} itself.")
    array = arrays.get(tx, job_id)
    wanted = Indices(((first, last),))
    if missing := wanted - Indices.parse(array["indices"]):
        raise NotFound(
            f"there is no element {element_id(job_id, next(iter(missing)))}",
            code="no_such_job",
            hint=f"The indices of {job_id} are {array['indices'][:200]}.",
        )
    states = arrays.states(tx.connection, job_id, first, last)
    dropped = len(Indices.parse(array["dropped"]) & wanted)
    cancelled = states.get("cancelled", 0) + dropped
    failed, succeeded = states.get("failed", 0), states.get("succeeded", 0)
    return On(
        job_id, item.when, first, last, len(wanted) - cancelled - failed - succeeded, failed=failed, cancelled=cancelled
    )
