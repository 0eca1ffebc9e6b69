"""Whether a job's processes stand still, in the records: what was ordered, and what its host says of it.

The order is written down before the host is asked, and stands until the host has confirmed it. The job is `suspended` from
the host's word on, not from the order.
"""

from __future__ import annotations

import sqlite3
from typing import Literal

from cotenant.hostd.protocol import AttemptReport
from cotenant.server.errors import Conflict
from cotenant.server.model.caller import LOOP, Caller
from cotenant.server.model.spec import parse_kept
from cotenant.server.model.states import JobState
from cotenant.server.model.text import quoted
from cotenant.server.store import events, jobs, leases
from cotenant.server.store.db import Tx

Order = Literal["suspend", "resume"]
HOUR_MS = 3_600_000
_EVENT = {"suspend": "job.suspending", "resume": "job.resuming"}


def order(
    tx: Tx, by: Caller, row: sqlite3.Row, what: Order, now: int, *, why: str = "", request_id: str | None = None
) -> None:
    """Write down that a running job is to stand still, or to go on. What is so already, or ordered already, stays as it is.

    Raises:
        Conflict: it has no process that could, or has stood still as long as it may.
    """
    if row["state"] not in ("running", "suspended"):
        raise _not_now(row)
    attempt = jobs.live_attempt(tx, row["id"])
    assert attempt is not None, "what runs has an attempt"
    shall_stand = what == "suspend"
    if attempt["suspend_asked"] == what or (
        attempt["suspend_asked"] == "" and shall_stand == (row["state"] == "suspended")
    ):
        return
    if shall_stand and row["state"] == "running":
        _check_allowance(row, attempt)
    jobs.update_attempt(tx, attempt["id"], suspend_asked=what)
    said = f": {quoted(why, 300)}" if why else ""
    jobs.update(tx, row["id"], held_reason=f"suspended by {by.name}{said}" if shall_stand else row["held_reason"])
    events.append(
        tx, _EVENT[what], by, now, owner=row["owner"], job_id=row["id"], attempt_id=attempt["id"], host=attempt["host"],
        pool=row["pool"], old=row["state"], reason=why or None, request_id=request_id,
    )  # fmt: skip


def _not_now(row: sqlite3.Row) -> Conflict:
    state = row["state"]
    hint = {
        "provisioning": "It is being started: try again in a few seconds.",
        "deploying": "It is being started: try again in a few seconds.",
        "lost": "Its host does not answer; list_hosts shows when it does.",
        "stopping": "It is being stopped already; wait_job tells when it has.",
    }.get(state, "get_job shows where it stands.")
    return Conflict(f"{row['id']} is {state}; only a running job can be suspended", code="not_running", hint=hint)


def _check_allowance(row: sqlite3.Row, attempt: sqlite3.Row) -> None:
    most = allowance_ms(row)
    if attempt["suspended_ms"] < most:
        return
    if most == 0:
        raise Conflict(
            f"{row['id']} may not be suspended: its max_suspend_h is 0",
            code="suspend_used_up",
            hint="signal_job or cancel_job are what is left.",
        )
    raise Conflict(
        f"{row['id']} was suspended for {attempt['suspended_ms'] / HOUR_MS:.2g} h; its max_suspend_h allows {most / HOUR_MS:g}",
        code="suspend_used_up",
        hint="It goes on; cancel_job gives its cards back.",
    )


def allowance_ms(row: sqlite3.Row) -> int:
    """How long an attempt of this job may stand still, in all its suspensions."""
    return parse_kept(row["spec"]).max_suspend_h * HOUR_MS


def take(tx: Tx, attempt: sqlite3.Row, job: sqlite3.Row, report: AttemptReport, now: int) -> None:
    """What a host says just now of a running attempt: does it stand still? Repeats change nothing.

    The end of its lease moves on by what was suspended. A report from before a suspension that is over changes nothing.
    """
    if report.suspended_ms < attempt["suspended_ms"]:
        return
    about = {
        "owner": job["owner"],
        "job_id": job["id"],
        "attempt_id": attempt["id"],
        "host": attempt["host"],
        "pool": job["pool"],
        "old": job["state"],
    }
    if report.suspended_ms > attempt["suspended_ms"]:
        moved = report.suspended_ms - attempt["suspended_ms"]
        lease = leases.get(tx, attempt["lease_id"])
        leases.update(tx, lease["id"], hard_end_at_ms=lease["hard_end_at_ms"] + moved)
        jobs.update_attempt(tx, attempt["id"], suspended_ms=report.suspended_ms)
    if report.suspended and job["state"] == "running":
        jobs.move(tx, job["id"], JobState.SUSPENDED, now, held_reason=job["held_reason"] or "suspended")
        asked = "" if attempt["suspend_asked"] == "suspend" else attempt["suspend_asked"]
        jobs.update_attempt(tx, attempt["id"], suspended_at_ms=attempt["suspended_at_ms"] or now, suspend_asked=asked)
        events.append(tx, "job.suspended", LOOP, now, new="suspended", reason=job["held_reason"], **about)
    elif not report.suspended and job["state"] == "suspended":
        ordered = attempt["suspend_asked"] == "resume"
        reason = None if ordered else f"it was suspended as long as it may be: {allowance_ms(job) / HOUR_MS:g} h"
        jobs.move(tx, job["id"], JobState.RUNNING, now, held_reason=None)
        # an order to suspend is older than this end of a suspension: it would begin another
        jobs.update_attempt(tx, attempt["id"], suspended_at_ms=None, suspend_asked="")
        events.append(
            tx, "job.resumed", LOOP, now, severity="info" if ordered else "warning", new="running", reason=reason,
            args={"suspended_s": report.suspended_ms // 1000}, **about,
        )  # fmt: skip
    elif not report.suspended and attempt["suspended_at_ms"] is not None:
        # it went on while its host was away
        jobs.update_attempt(tx, attempt["id"], suspended_at_ms=None)
        jobs.update(tx, job["id"], held_reason=None)
    else:
        return
    # whoever counts on its end has to look again: while it stands still nobody knows it
    leases.touch(tx, attempt["lease_id"])
