"""What hosts say about attempts, taken into the records: who may move a job, what an end means, who gets another try."""

from __future__ import annotations

import dataclasses
import json
import logging
import sqlite3
from typing import Any, Final

from cotenant.hostd.protocol import AttemptReport, ExitRecord, to_wire
from cotenant.server.backends.base import HostRefused
from cotenant.server.control import adopting, standing, victims
from cotenant.server.control.context import Context
from cotenant.server.control.holds import end_lease, free_slots
from cotenant.server.model.caller import LOOP
from cotenant.server.model.spec import parse_kept
from cotenant.server.model.states import JOB_FINAL, AttemptState, JobState, LeaseState
from cotenant.server.model.text import signal_name
from cotenant.server.store import events, jobs, leases, meta
from cotenant.server.store import ranks as rank_rows
from cotenant.server.store.db import Tx, dumps

log = logging.getLogger(__name__)

#: Seconds before the next attempt, by how many were made (design section 5).
BACK_OFF_S: Final = (30, 60, 120)
#: An attempt that fails within this time of its start counts as a quick failure; three of them hold the job.
QUICK_MS: Final = 60_000
QUICK_FAILURES: Final = 3
#: How long a job waits whose start a host refused for the cards' sake; by then the cards were observed anew.
REFUSED_AGAIN_MS: Final = 5000
#: Refusals of a start that say nothing about the job: it simply waits on, and they are no attempt of it.
NOT_THE_JOBS_FAULT: Final = frozenset(
    {"occupied", "sick", "unverified", "no_such_card", "locked", "needs_floor", "stale_fence", "storage"}
)


#: Refusals of the link, not of the start: another connection or server is in charge, the next hello settles it.
OF_THE_LINK: Final = frozenset({"superseded", "not_greeted", "other_cluster", "old_incarnation"})
LIVING: Final = frozenset({"starting", "ready", "running", "stopping"})


async def attempt_report(context: Context, host: str, report: AttemptReport, seq: int | None = None) -> None:
    """Take one report in; see `take`. Where it is the end of a rank that the others do not survive, stop them."""
    from cotenant.server.control import ranks  # which settles the job of a rank with what stands here

    now = context.now()
    if await context.db.write(lambda tx: take(tx, context, host, report, now, seq)) == "stop":
        await ranks.stop_others(context, report.attempt_id)


def take(
    tx: Tx, context: Context, host: str, report: AttemptReport, now: int, seq: int | None = None, *, fresh: bool = False
) -> str | None:
    """Move attempt, job and lease to what the host says, in one transaction. Repeats change nothing.

    Answers "stray" for an attempt that has no right to run and must be stopped, and of ranks what `ranks.take` does. `fresh` says that the host has just
    been asked; a numbered report is fresh by its number, an answer to a start may have been overtaken by an end.

    Only the newest attempt moves its job; an older one's report is kept with the attempt and leaves `write.stale`.
    """
    if (
        seq is not None
        and tx.changes("UPDATE host SET control_seq = ? WHERE name = ? AND control_seq < ?", (seq, host, seq)) == 0
    ):
        return None
    fresh = fresh or seq is not None
    if rank_rows.attempt_of(report.attempt_id) is not None:
        from cotenant.server.control import ranks

        return ranks.take(tx, context, host, report, now, fresh=fresh)
    attempt = jobs.find_attempt(tx, report.attempt_id)
    if attempt is None:
        if not (report.state in LIVING or adopting.is_news(tx, report)):
            return None
        if adopting.adopt(tx, context, host, report, now) == "stray":
            return "stray"
        attempt = jobs.find_attempt(tx, report.attempt_id)
        assert attempt is not None
        if report.state in LIVING:
            # a stop that is under way there is seen through there; here it runs until its end is told
            report = dataclasses.replace(report, state="running")
    if attempt["state"] == "ended":
        if report.clean and report.state not in LIVING:
            free_slots(tx, attempt["lease_id"], now)
        if report.state in ("starting", "running") and fresh:
            job = jobs.get(tx, attempt["job_id"])
            stale(tx, job, report, host, now, "the records have given this attempt up; it is being stopped")
            return "stray"
        return None
    job = jobs.get(tx, attempt["job_id"])
    newest = attempt["epoch"] == job["epoch"] and job["state"] not in JOB_FINAL
    if not newest:
        tx.execute("UPDATE attempt SET superseded = 1 WHERE id = ?", (attempt["id"],))
        stale(tx, job, report, host, now, "a newer attempt owns the job, or it is over")
    if report.state in ("running", "starting") or (report.state == "stopping" and attempt["state"] != "stopping"):
        if newest:
            _running(tx, attempt, job, report, now, fresh=fresh)
        else:
            return "stray"
    elif report.state in ("exited", "lost", "never"):
        _ended(tx, context, attempt, job, report, now, newest)
    return None


def stale(tx: Tx, job: sqlite3.Row, report: AttemptReport, host: str, now: int, reason: str) -> None:
    """Put on record that a report changed nothing."""
    events.append(
        tx, "write.stale", LOOP, now, owner=job["owner"], severity="warning", job_id=job["id"], attempt_id=report.attempt_id, host=host,
        pool=job["pool"], new=report.state, reason=reason,
    )  # fmt: skip


def _running(tx: Tx, attempt: sqlite3.Row, job: sqlite3.Row, report: AttemptReport, now: int, *, fresh: bool) -> None:
    facts = {"pid": report.pid, "start_ticks": report.start_ticks, "boot_id": report.boot_id}
    started = attempt["started_at_ms"] or now - (report.running_for_ms or 0)
    if job["state"] == "stopping":
        # the stop was ordered before the start was known; the stop goes on
        tx.execute(
            "UPDATE attempt SET pid = ?, start_ticks = ?, boot_id = ?, started_at_ms = ? WHERE id = ?",
            (*facts.values(), started, attempt["id"]),
        )
        return
    if report.state == "starting":
        if attempt["state"] == "intended":
            jobs.move_attempt(tx, attempt["id"], AttemptState.STARTING, **facts)
        return
    if attempt["state"] == "running" and job["state"] in ("running", "suspended"):
        if fresh:  # an answer to a start may be older than what came since
            standing.take(tx, attempt, job, report, now)
        return
    attempt = jobs.move_attempt(tx, attempt["id"], AttemptState.RUNNING, started_at_ms=started, **facts)
    began(tx, attempt, job, started, now)
    if fresh:
        standing.take(tx, attempt, jobs.get(tx, job["id"]), report, now)


def began(tx: Tx, attempt: sqlite3.Row, job: sqlite3.Row, started: int, now: int) -> None:
    """An attempt runs, which is on record: so do its job and its lease."""
    jobs.move(
        tx,
        job["id"],
        JobState.RUNNING,
        now,
        by_epoch=attempt["epoch"],
        row=job,
        started_at_ms=job["started_at_ms"] or started,
        resumed=0,
    )
    lease = leases.get(tx, attempt["lease_id"])
    if lease["state"] == "leased":
        leases.move(tx, lease["id"], LeaseState.RUNNING, row=lease)
    events.append(
        tx, "job.running", LOOP, now, owner=job["owner"], job_id=job["id"], attempt_id=attempt["id"], lease_id=lease["id"],
        host=attempt["host"], old=job["state"], new="running",
    )  # fmt: skip


def _ended(
    tx: Tx, context: Context, attempt: sqlite3.Row, job: sqlite3.Row, report: AttemptReport, now: int, newest: bool
) -> None:
    record = report.exit or ExitRecord()
    failure, message = classify(report, record)
    code = record.code if report.exit is not None else None
    attempt = jobs.move_attempt(  # with the start that may only be known by now
        tx, attempt["id"], AttemptState.ENDED, ended_at_ms=now, exit=dumps(to_wire(record)) if report.exit else None, exit_code=code,
        failure_class=failure, message=message, pid=report.pid or attempt["pid"], start_ticks=report.start_ticks or attempt["start_ticks"],
        boot_id=report.boot_id or attempt["boot_id"],
        # one that ended before its start was reported ran all the same
        started_at_ms=attempt["started_at_ms"] or (now - int(record.duration_s * 1000) if report.exit and not record.exec_error else None),
        checkpoint=victims.checkpoint_json(report.progress, now) or attempt["checkpoint"],
    )  # fmt: skip
    stopped = victims.ended(tx, attempt, job, report, record, failure, now)
    if newest and stopped is not None and job["state"] == "running":
        jobs.move(tx, job["id"], JobState.STOPPING, now, stop_reason=stopped)
        job = jobs.get(tx, job["id"])
        failure, message = "preempted", f"{message} after a notice"
    lease = leases.get(tx, attempt["lease_id"])
    if lease["state"] in ("leased", "running"):
        end_lease(tx, LOOP, lease, LeaseState.RELEASED, failure or "succeeded", now, clean=bool(report.clean))
    if newest:
        settle(tx, context, job, attempt, failure, message, code, now, started=report.state != "never")


#: What is known of who sent a deadly signal (ExitRecord.sender).
_SENDERS: Final = {
    "fault": ": a crash or abort() of its own, unless another process sent it",
    "cotenant": ", sent through Cotenant",
    "shim": ", sent by its keeper",
    "outside": ", not sent by Cotenant",
}


def classify(report: AttemptReport, record: ExitRecord) -> tuple[str | None, str]:
    """(failure class, or None for success; what happened in a sentence of ours)."""
    if report.state == "never":
        return "start", report.message or "it was stopped before it started"
    if report.state == "lost":
        return "lost", report.message or "its supervisor died: the process is gone and its exit code is not known"
    if record.exec_error is not None:
        return "start", f"the command could not be started: {record.exec_error}"
    if record.reason == "time_limit":
        stood = f" and {record.suspended_s:.0f} s suspended" if record.suspended_s >= 0.5 else ""
        return "time_limit", f"stopped at its time limit after {record.duration_s - record.suspended_s:.0f} s{stood}"
    if record.reason in ("cancel", "evict", "preempt", "self_stop", "rank_failed"):
        return ("preempted" if record.reason == "preempt" else "signal"), f"stopped: {record.reason}"
    if record.code == 0:
        return None, "ended with 0"
    if record.sender == "kernel_oom":
        return "oom", "killed by the kernel: the host ran out of memory"
    if record.signal is not None:
        return "signal", f"ended by {signal_name(record.signal)}{_SENDERS.get(record.sender or '', '')}"
    return "code", f"ended with exit code {record.code}"


def settle(
    tx: Tx, context: Context, job: sqlite3.Row, attempt: sqlite3.Row | dict[str, Any], failure: str | None, message: str, code: int | None, now: int, *,
    started: bool = True,
) -> None:  # fmt: skip
    """What becomes of a job whose newest attempt has ended: final, another try, or on hold."""
    spec = parse_kept(job["spec"])
    values: dict[str, Any] = {"exit_code": code, "failure_class": failure, "message": message}
    values["started_at_ms"] = (
        job["started_at_ms"] or attempt["started_at_ms"]
    )  # it may have ended before its start was told
    about: dict[str, Any] = {
        "owner": job["owner"],
        "job_id": job["id"],
        "attempt_id": attempt["id"],
        "host": attempt["host"],
        "old": job["state"],
    }
    stop = job["stop_reason"] if job["state"] == "stopping" else None
    if stop in ("cancel", "evict"):
        # a job that came to its own good end before the stop reached it did succeed
        if failure is None:
            _finish(tx, job, JobState.SUCCEEDED, now, values, about)
        else:
            by = "evicted" if stop == "evict" else "cancelled"
            said = f"{by}: {message}"
            if message == f"stopped: {stop}":  # nothing but the stop itself
                said = "evicted" if stop == "evict" else "cancelled as asked"
            _finish(
                tx,
                job,
                JobState.CANCELLED,
                now,
                {**values, "failure_class": None, "message": said},
                about,
            )
        return
    if failure is None:
        _finish(tx, job, JobState.SUCCEEDED, now, values, about)
        return
    if stop == "preempt":
        # a planned stop is no attempt that failed; it goes to the head of its priority
        jobs.move(tx, job["id"], JobState.PREEMPTED, now, resumed=1, not_before_ms=0, stop_reason=None, **values)
        victims.preempted(tx, job, values, {**about, "now": now})
        return
    quick = started and attempt["started_at_ms"] is not None and now - attempt["started_at_ms"] < QUICK_MS
    quick_failures = job["quick_failures"] + 1 if quick else 0
    left = job["attempts_left"] - 1
    if left <= 0 or failure not in spec.retry_on:
        if left > 0:
            values["message"] = f"{message}; class {failure} is not in retry_on"
        _finish(tx, job, JobState.FAILED, now, {**values, "attempts_left": max(left, 0)}, about)
        return
    again: dict[str, Any] = {**values, "attempts_left": left, "quick_failures": quick_failures}
    if failure in ("gpu", "host", "lost"):
        slots = [s for s in leases.slots(tx.connection, attempt["lease_id"]) if s["host"] == attempt["host"]]
        cards = [s["uuid"] for s in slots if s["uuid"] != "cpu"]
        at_fault = cards if failure == "gpu" else [attempt["host"]]
        # with a single host or card, avoiding it would wait for ever
        if _elsewhere(tx, job["pool"], at_fault, failure):
            again["avoid"] = json.dumps(sorted({*json.loads(job["avoid"]), *at_fault}))
    if quick_failures >= QUICK_FAILURES:
        reason = f"{quick_failures} attempts failed within a minute of their start"
        jobs.move(tx, job["id"], JobState.HELD, now, held_reason=reason, **again)
        events.append(
            tx, "job.held", LOOP, now, severity="warning", new="held", reason=reason, args={"class": failure}, **about
        )
        return
    wait_s = BACK_OFF_S[min(spec.max_attempts - left, len(BACK_OFF_S)) - 1]
    jobs.move(tx, job["id"], JobState.QUEUED, now, not_before_ms=now + wait_s * 1000, stop_reason=None, **again)
    events.append(tx, "job.requeued", LOOP, now, severity="warning", new="queued", reason=message,
                  args={"class": failure, "attempts_left": left, "back_off_s": wait_s}, **about)  # fmt: skip


def _elsewhere(tx: Tx, pool: str, at_fault: list[str], failure: str) -> bool:
    column = "uuid" if failure == "gpu" else "host"
    marks = ", ".join("?" * len(at_fault)) or "''"
    return (
        tx.one(
            f"SELECT 1 FROM gpu WHERE pool = ? AND present = 1 AND {column} NOT IN ({marks}) LIMIT 1", (pool, *at_fault)
        )
        is not None
    )


def _finish(tx: Tx, job: sqlite3.Row, to: JobState, now: int, values: dict[str, Any], about: dict[str, Any]) -> None:
    jobs.move(tx, job["id"], to, now, row=job, **values)
    tx.changed.add(f"cotenant://jobs/{job['id']}/log")
    args = {"exit_code": values["exit_code"], "class": values["failure_class"]}
    severity = "warning" if to is JobState.FAILED else "info"
    events.append(
        tx, f"job.{to.value}", LOOP, now, severity=severity, new=to.value, reason=values["message"], args=args, **about
    )


# ---- starts that were not made ----------------------------------------------------------------


async def start_refused(context: Context, attempt_id: str, refused: HostRefused) -> None:
    """The host will not start it. What is not the job's fault sends it back to its place in the queue."""
    log.info("start of %s refused: %s %s", attempt_id, refused.code, refused.message)
    if refused.code in OF_THE_LINK:
        return
    fault = refused.code not in NOT_THE_JOBS_FAULT
    if refused.code == "stale_fence":
        # the host has seen more than these records: go on above it
        seen = max(refused.data.get("fence", 0), refused.data.get("floor", 0))
        await context.db.write(lambda tx: meta.lift(tx, "fence", seen))
    await attempt_never(
        context, attempt_id, "start" if fault else "host", f"{refused.code}: {refused.message}", counts=fault
    )


async def attempt_never(context: Context, attempt_id: str, failure: str, message: str, *, counts: bool = True) -> None:
    """An intended attempt certainly never ran and never will."""
    now = context.now()

    def write(tx: Tx) -> None:
        attempt = jobs.find_attempt(tx, attempt_id)
        if attempt is None or attempt["state"] == "ended":
            return
        never(tx, context, attempt, failure, message, now, counts=counts, clean=True)

    await context.db.write(write)
    context.wake()


def never(
    tx: Tx, context: Context, attempt: sqlite3.Row, failure: str, message: str, now: int, *, counts: bool, clean: bool
) -> None:
    """An attempt that never ran is over. Where that `counts` it was one of the job's tries; else the job waits on.

    `clean`: nothing of it can be on its slots, so they are free at once.
    """
    attempt = jobs.move_attempt(
        tx, attempt["id"], AttemptState.ENDED, ended_at_ms=now, failure_class=failure, message=message
    )
    lease = leases.get(tx, attempt["lease_id"])
    if lease["state"] in ("leased", "running"):
        end_lease(tx, LOOP, lease, LeaseState.RELEASED, "never started", now, clean=clean)
    job = jobs.get(tx, attempt["job_id"])
    victims.ended(tx, attempt, job, AttemptReport(attempt["id"], "never"), ExitRecord(), failure, now)
    if job["epoch"] != attempt["epoch"] or job["state"] in JOB_FINAL:
        return
    if counts or job["state"] == "stopping":
        settle(tx, context, job, attempt, failure, message, None, now, started=False)
        return
    jobs.move(tx, job["id"], JobState.QUEUED, now, not_before_ms=now + REFUSED_AGAIN_MS, message=message)
    events.append(
        tx, "job.requeued", LOOP, now, owner=job["owner"], severity="warning", job_id=job["id"], attempt_id=attempt["id"],
        host=attempt["host"], old=job["state"], new="queued", reason=message, args={"class": failure, "attempts_left": job["attempts_left"]},
    )  # fmt: skip
