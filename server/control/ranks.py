"""What hosts say about ranks, taken into the records: a job over several hosts is one attempt, and stands or falls as one.

No rank begins before all are ready; the first that fails is the one by which all are judged, and ends the others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from dataclasses import replace
from typing import Any, Final

from cotenant.hostd.protocol import AttemptReport, CheckpointSeen, ExitRecord, Progress, from_wire, to_wire
from cotenant.server.backends.base import HostRefused
from cotenant.server.control import outcomes, standing, victims
from cotenant.server.control.context import Context
from cotenant.server.control.holds import end_lease, free_slots
from cotenant.server.control.outcomes import LIVING, attempt_report, began, classify, settle, stale
from cotenant.server.errors import OutcomeUnknown, Unreachable
from cotenant.server.model.caller import LOOP
from cotenant.server.model.spec import parse_kept
from cotenant.server.model.states import JOB_FINAL, AttemptState, JobState, LeaseState
from cotenant.server.store import events, jobs, leases, meta, preemptions, ranks
from cotenant.server.store.db import Tx, dumps

log = logging.getLogger(__name__)

#: Why the other ranks are stopped when one has failed, as hosts and `stop_reason` name it.
RANK_FAILED: Final = "rank_failed"
#: How long a rank that the records do not know may take to end, beyond its grace.
STRAY_S: Final = 30
#: Why a word about a rank changes nothing.
GIVEN_UP: Final = "the records have given this rank up, or a newer attempt owns the job"


def take(tx: Tx, context: Context, host: str, report: AttemptReport, now: int, *, fresh: bool) -> str | None:
    """Move rank, attempt, job and lease to what the host says. Repeats change nothing.

    Answers what is to be done after the commit: "stray", this rank has no right to run and must be stopped; "go", all
    are ready and shall begin; "stop", one has failed and the others must be stopped.
    """
    rank = ranks.find(tx, report.attempt_id)
    if rank is None:
        going_on = report.state in LIVING and report.state != "stopping"
        return _unknown(tx, host, report, now) if going_on and fresh else None
    attempt = jobs.find_attempt(tx, rank["attempt_id"])
    assert attempt is not None, "a rank has an attempt"
    job = jobs.get(tx, attempt["job_id"])
    over = report.state in ("exited", "lost", "never")
    if rank["state"] == "ended":
        if over and report.clean:
            free_slots(tx, attempt["lease_id"], now, host=host)
        if report.state in LIVING and report.state != "stopping" and fresh:
            stale(tx, job, report, host, now, GIVEN_UP)
            return "stray"
        return None
    if attempt["epoch"] != job["epoch"] or job["state"] in JOB_FINAL:
        tx.execute("UPDATE attempt SET superseded = 1 WHERE id = ?", (attempt["id"],))
        stale(tx, job, report, host, now, GIVEN_UP)
        if not over:
            return "stray"
    if over:
        return _ended(tx, context, rank, attempt, job, report, now)
    if report.state in LIVING:
        said = _alive(tx, rank, attempt, job, report, now)
        if fresh and report.state == "running":
            _standing(tx, rank, report, now)
        return said
    return None


def _unknown(tx: Tx, host: str, report: AttemptReport, now: int) -> str:
    """A host has a rank that the records do not: they are of an older past.

    What was started after it cannot be put together from one host's word, so it is stopped. Its job, if it waits in these
    records, does not start again before that is over.
    """
    meta.lift(tx, "fence", report.fence)
    job = tx.one("SELECT * FROM job WHERE id = ?", (report.job_id,))
    if job is not None and job["state"] in ("queued", "preempted", "held"):
        over = now + (parse_kept(job["spec"]).stop_grace_s + STRAY_S) * 1000
        jobs.update(tx, job["id"], not_before_ms=max(over, job["not_before_ms"]))
    events.append(
        tx, "write.stale", LOOP, now, owner=LOOP.owner if job is None else job["owner"], severity="warning",
        job_id=None if job is None else job["id"], attempt_id=report.attempt_id, host=host, new=report.state,
        reason="the host runs a rank that is not in the records; it is being stopped",
    )  # fmt: skip
    return "stray"


# ---- beginning --------------------------------------------------------------------------------


def _alive(
    tx: Tx, rank: sqlite3.Row, attempt: sqlite3.Row, job: sqlite3.Row, report: AttemptReport, now: int
) -> str | None:
    values: dict[str, Any] = {
        "pid": report.pid or rank["pid"],
        "start_ticks": report.start_ticks or rank["start_ticks"],
        "boot_id": report.boot_id or rank["boot_id"],
    }
    if report.state in ("running", "stopping"):
        values["started_at_ms"] = rank["started_at_ms"] or now - (report.running_for_ms or 0)
    later = {"starting": 1, "ready": 2, "running": 3, "stopping": 4}
    if attempt["state"] == "stopping":
        values["state"] = "stopping"
    elif later[report.state] > later.get(rank["state"], 0):
        values["state"] = report.state  # an answer that an end or a later word has overtaken moves nothing back
    ranks.update(tx, rank["id"], **values)
    if attempt["state"] == "stopping":
        return None
    if attempt["state"] == "intended":
        attempt = jobs.move_attempt(tx, attempt["id"], AttemptState.STARTING)
    if report.state == "running" and attempt["go_at_ms"] is None:
        # the word to begin was given by a server whose records were newer than these
        attempt = jobs.move_attempt(tx, attempt["id"], AttemptState(attempt["state"]), go_at_ms=now)
    states = {row["state"] for row in ranks.of(tx.connection, attempt["id"])}
    if attempt["go_at_ms"] is None:
        if states != {"ready"} or job["state"] != "deploying":
            return None
        jobs.move_attempt(tx, attempt["id"], AttemptState(attempt["state"]), go_at_ms=now)
        events.append(
            tx, "job.ranks_ready", LOOP, now, owner=job["owner"], job_id=job["id"], attempt_id=attempt["id"], host=attempt["host"],
            pool=job["pool"], args={"nodes": attempt["nodes"], "port": attempt["port"]},
        )  # fmt: skip
        return "go"
    if states <= {"running", "ended"} and attempt["state"] != "running":
        _runs(tx, attempt, job, now)
    return "go" if "ready" in states else None


def _standing(tx: Tx, rank: sqlite3.Row, report: AttemptReport, now: int) -> None:
    """Whether a running rank stands still. The job is suspended once all do, and goes on once none does any more."""
    if report.suspended_ms < rank["suspended_ms"]:
        return  # from before the end of a suspension
    ranks.update(tx, rank["id"], suspended=int(report.suspended), suspended_ms=report.suspended_ms)
    attempt = jobs.find_attempt(tx, rank["attempt_id"])
    assert attempt is not None, "a rank has an attempt"
    job = jobs.get(tx, attempt["job_id"])
    if attempt["state"] != "running" or job["state"] not in ("running", "suspended"):
        return
    living = [row for row in ranks.of(tx.connection, attempt["id"]) if row["state"] != "ended"]
    stands = [bool(row["suspended"]) for row in living]
    together = any(stands) if job["state"] == "suspended" else all(stands)
    longest = max(row["suspended_ms"] for row in living)
    standing.take(tx, attempt, job, replace(report, suspended=together, suspended_ms=longest), now)


def _runs(tx: Tx, attempt: sqlite3.Row, job: sqlite3.Row, now: int) -> None:
    """All ranks run: so do attempt and job. They may have been lost in between."""
    started = min(
        (row["started_at_ms"] for row in ranks.of(tx.connection, attempt["id"]) if row["started_at_ms"]), default=now
    )
    jobs.move_attempt(tx, attempt["id"], AttemptState.RUNNING, started_at_ms=attempt["started_at_ms"] or started)
    if job["state"] not in ("deploying", "lost"):
        return
    began(tx, attempt, job, started, now)


# ---- ending -----------------------------------------------------------------------------------


def _ended(
    tx: Tx, context: Context, rank: sqlite3.Row, attempt: sqlite3.Row, job: sqlite3.Row, report: AttemptReport, now: int
) -> str | None:
    record = report.exit or ExitRecord()
    failure, message = classify(report, record)
    ran = report.exit is not None and not record.exec_error
    ranks.update(
        tx, rank["id"], state="ended", ended_at_ms=now, exit=dumps(to_wire(record)) if report.exit else None,
        exit_code=record.code if report.exit else None, failure_class=failure, message=message, clean=int(bool(report.clean)),
        pid=report.pid or rank["pid"], boot_id=report.boot_id or rank["boot_id"],
        started_at_ms=rank["started_at_ms"] or (now - int(record.duration_s * 1000) if ran else None),
    )  # fmt: skip
    if rank["rank"] == 0 and report.progress is not None:
        attempt = _keep_progress(tx, attempt, report.progress, now)
    if attempt["go_at_ms"] is None and report.state == "exited":
        # the word to begin was given by a server whose records were newer than these
        attempt = jobs.move_attempt(tx, attempt["id"], AttemptState(attempt["state"]), go_at_ms=now)
    if attempt["go_at_ms"] is None:
        # none has begun, and none will
        why = f"rank {rank['rank']} on {rank['host']}: {message}"
        never(tx, context, attempt, "host", why, now, counts=False)
        return None
    stopping = job["state"] == "stopping"
    if failure is not None and attempt["failed_rank"] is None and not stopping:
        attempt = jobs.move_attempt(tx, attempt["id"], AttemptState(attempt["state"]), failed_rank=rank["rank"])
    all_ranks = ranks.of(tx.connection, attempt["id"])
    if all(row["state"] == "ended" for row in all_ranks):
        _finish(tx, context, attempt, job, all_ranks, now)
        return None
    if failure is None or stopping:
        if attempt["state"] != "running" and not stopping and {r["state"] for r in all_ranks} <= {"running", "ended"}:
            _runs(tx, attempt, job, now)
        return None
    why = victims.obeyed(tx, attempt["id"], record) or RANK_FAILED
    jobs.move(tx, job["id"], JobState.STOPPING, now, row=job, stop_reason=why)
    jobs.move_attempt(tx, attempt["id"], AttemptState.STOPPING, stop_reason=why)
    events.append(
        tx, "job.stopping", LOOP, now, owner=job["owner"], severity="warning", job_id=job["id"], attempt_id=attempt["id"], host=rank["host"],
        old=job["state"], new="stopping", reason=f"rank {rank['rank']} failed; the others are stopped",
        args={"stop": why, "rank": rank["rank"], "class": failure},
    )  # fmt: skip
    return "stop"


def _keep_progress(tx: Tx, attempt: sqlite3.Row, progress: Progress, now: int) -> sqlite3.Row:
    """What the first host saw last of the checkpoints, for the attempt and for the notices that it was given."""
    kept = victims.checkpoint_json(progress, now) or attempt["checkpoint"]
    for row in preemptions.of_attempt(tx.connection, attempt["id"]):
        if progress.saved and progress.notice == row["preemption_id"]:
            preemptions.update_victim(tx, row["preemption_id"], attempt["id"], saved=1)
    return jobs.move_attempt(tx, attempt["id"], AttemptState(attempt["state"]), checkpoint=kept)


def _progress(attempt: sqlite3.Row, now: int) -> Progress | None:
    kept = json.loads(attempt["checkpoint"]) if attempt["checkpoint"] else {}
    if "path" not in kept:
        return None
    seen = CheckpointSeen(kept["name"], kept["path"], kept["size_bytes"], max(0, now - kept["at_ms"]))
    return Progress(attempt["id"], attempt["lease_id"], checkpoint=seen)


def _finish(
    tx: Tx, context: Context, attempt: sqlite3.Row, job: sqlite3.Row, all_ranks: list[sqlite3.Row], now: int
) -> None:
    """All ranks have ended: the first that failed speaks for the attempt, else the first of all."""
    failed = [row for row in all_ranks if row["failure_class"] is not None]
    named = [row for row in failed if row["rank"] == attempt["failed_rank"]]
    subject = (named or failed or all_ranks)[0]
    failure, message = subject["failure_class"], subject["message"]
    if failure is not None and named:
        message = f"rank {subject['rank']} on {subject['host']}: {message}"
    started = [row["started_at_ms"] for row in all_ranks if row["started_at_ms"]]
    attempt = jobs.move_attempt(
        tx, attempt["id"], AttemptState.ENDED, ended_at_ms=now, exit=subject["exit"], exit_code=subject["exit_code"],
        failure_class=failure, message=message, started_at_ms=attempt["started_at_ms"] or min(started, default=None),
    )  # fmt: skip
    record = from_wire(ExitRecord, json.loads(subject["exit"])) if subject["exit"] else ExitRecord()
    whole = AttemptReport(attempt["id"], "exited", progress=_progress(attempt, now))
    obeyed = victims.ended(tx, attempt, job, whole, record, failure, now)
    newest = attempt["epoch"] == job["epoch"] and job["state"] not in JOB_FINAL
    if newest and obeyed is not None and job["state"] == "running":
        jobs.move(tx, job["id"], JobState.STOPPING, now, stop_reason=obeyed)
        job = jobs.get(tx, job["id"])
        failure, message = "preempted", f"{message} after a notice"
    lease = leases.get(tx, attempt["lease_id"])
    if lease["state"] in ("leased", "running"):
        clean = all(row["clean"] for row in all_ranks)
        end_lease(tx, LOOP, lease, LeaseState.RELEASED, failure or "succeeded", now, clean=clean)
        for row in all_ranks:
            if row["clean"] and not clean:
                free_slots(tx, lease["id"], now, host=row["host"])
    if newest:
        at_fault = {**dict(attempt), "host": subject["host"]}
        settle(tx, context, job, at_fault, failure, message, subject["exit_code"], now, started=bool(started))


def never(
    tx: Tx, context: Context, attempt: sqlite3.Row, failure: str, message: str, now: int, *, counts: bool
) -> None:
    """An attempt whose ranks were not told to begin never will: its hosts are told to let go of what they made ready.

    Must not be called once the word was given (`go_at_ms`): from then on some rank may run.
    """
    assert attempt["go_at_ms"] is None, "some rank may run"
    outcomes.never(tx, context, attempt, failure, message, now, counts=counts, clean=False)


# ---- stopping ---------------------------------------------------------------------------------


async def stop(context: Context, attempt_id: str, reason: str, grace_s: float) -> bool:
    """Pass a stop on to every rank; False when the attempt has none. A host that is away hears of it at its next hello.

    Where none was told to begin the attempt is over at once, and its hosts are told while its slots are cleaned.
    """
    attempt = context.db.peek(lambda c: jobs.find_attempt(Tx(c), attempt_id))
    if attempt is None or attempt["nodes"] == 1:
        return False
    if attempt["go_at_ms"] is None:
        await context.db.write(lambda tx: _never_began(tx, context, attempt_id, reason))
        context.wake()
    seats = context.db.peek(lambda c: ranks.seats(c, attempt_id))
    await asyncio.gather(*(stop_one(context, rank_id, host, reason, grace_s) for rank_id, host in seats))
    return True


def _never_began(tx: Tx, context: Context, attempt_id: str, reason: str) -> None:
    attempt = jobs.find_attempt(tx, attempt_id)
    if attempt is None or attempt["state"] == "ended" or attempt["go_at_ms"] is not None:
        return
    never(tx, context, attempt, "start", f"stopped: {reason}", context.now(), counts=True)


async def stop_one(context: Context, at: str, host: str, reason: str, grace_s: float) -> None:
    """Pass a stop to one host; `at` is the id there, of a rank or of an attempt without ranks."""
    link = context.hosts.get(host)
    if link is None:
        return
    try:
        report = await link.stop(at, reason, grace_s)
    except HostRefused as refused:
        log.warning("host %s refused to stop %s: %s", host, at, refused)
    except (Unreachable, OutcomeUnknown) as error:
        log.info("host %s did not take the stop of %s yet: %s", host, at, error)
    else:
        await attempt_report(context, host, report)


async def stop_others(context: Context, rank_id: str) -> None:
    """A rank has failed: the others end with their own grace."""
    attempt_id = ranks.attempt_of(rank_id)
    row = context.db.peek(
        lambda c: c.execute(
            "SELECT j.spec FROM attempt a JOIN job j ON j.id = a.job_id WHERE a.id = ?", (attempt_id,)
        ).fetchone()
    )
    if attempt_id is not None and row is not None:
        await stop(context, attempt_id, RANK_FAILED, parse_kept(row["spec"]).stop_grace_s)


# ---- silence ----------------------------------------------------------------------------------


def lose(tx: Tx, context: Context, rank: sqlite3.Row, said: str, now: int) -> None:
    """The host of a living rank does not answer. One that was not told to begin never will; else all is lost with it.

    `rank` is a row of `ranks.living`.
    """
    attempt, job = jobs.find_attempt(tx, rank["attempt_id"]), jobs.get(tx, rank["job_id"])
    assert attempt is not None, "a rank has an attempt"
    if attempt["go_at_ms"] is None:
        never(tx, context, attempt, "host", f"rank {rank['rank']} on {rank['host']}: {said}", now, counts=False)
        return
    if job["state"] == "stopping":
        return  # it is seen through once the host is back
    ranks.update(tx, rank["id"], state="lost")
    if job["state"] in ("running", "deploying", "suspended"):
        jobs.move_attempt(tx, attempt["id"], AttemptState.LOST)
        jobs.move(tx, job["id"], JobState.LOST, now, by_epoch=attempt["epoch"], message=said)
        events.append(tx, "job.lost", LOOP, now, owner=job["owner"], severity="warning", job_id=job["id"], attempt_id=attempt["id"],
                      host=rank["host"], old=job["state"], new="lost", reason=said)  # fmt: skip
