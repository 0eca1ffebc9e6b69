"""Attempts that a host has and the records do not know: an older database was put back, and the host is ahead of it."""

from __future__ import annotations

import sqlite3

from cotenant.hostd.protocol import AttemptReport
from cotenant.server.control import grants
from cotenant.server.control.context import Context
from cotenant.server.control.holds import end_lease
from cotenant.server.model.caller import LOOP
from cotenant.server.model.spec import parse_kept
from cotenant.server.model.states import JOB_FINAL, AttemptState, JobState, LeaseState
from cotenant.server.store import events, jobs, leases, meta
from cotenant.server.store.db import Tx, dumps
from cotenant.server.store.worlds import needs_of


def is_news(tx: Tx, report: AttemptReport) -> bool:
    """Whether an end is told of an attempt that the records have yet to make: they are older than the host's."""
    job = tx.one("SELECT state, epoch FROM job WHERE id = ?", (report.job_id,))
    return (
        report.state in ("exited", "lost")
        and job is not None
        and job["state"] not in JOB_FINAL
        and report.epoch > job["epoch"]
    )


def adopt(tx: Tx, context: Context, host: str, report: AttemptReport, now: int) -> str:
    """The host has an attempt of this cluster that the records do not have (an older database was put back).

    It becomes a job again, with the fence it was started with, so that its cards are not given twice. What the records
    believe of its job and its slots is older than it and gives way. Answers "found", and the report can be taken like any
    other; or "stray" where the records are the newer ones.
    """
    meta.lift(tx, "fence", report.fence)
    job_id = report.job_id or f"job_{report.attempt_id[4:]}"
    job = tx.one("SELECT * FROM job WHERE id = ?", (job_id,))
    held = tuple(
        leases.HeldSlot(host, s.uuid, s.share, s.shares, _index(tx, s.uuid), 840 // s.shares if s.uuid != "cpu" else 0)
        for s in report.slots
    )
    cards = len({s.uuid for s in report.slots} - {"cpu"})
    if job is None:
        jobs.insert(
            tx,
            {
                "id": job_id, "state": "queued", "name": f"found on {host}", "caller": LOOP.name, "owner": LOOP.owner, "human": 1,
                "pool": _pool_of(tx, context, report), "priority": 10, "spec": dumps({"command": ["(not known)"], "gpus": cards}),
                "spec_hash": "", "hours_ms": 24 * 3_600_000, "hours_from": "pool default", "attempts_left": 1,
                "message": "found running; the records had lost it", "submitted_at_ms": now, "queued_at_ms": now, "changed_at_ms": now,
            },
        )  # fmt: skip
        job = jobs.get(tx, job_id)
    older = job["state"] in JOB_FINAL or report.epoch <= job["epoch"]
    if older or any(_fence_on(tx, slot) > report.fence for slot in held):
        events.append(tx, "write.stale", LOOP, now, owner=job["owner"], severity="warning", job_id=job["id"], attempt_id=report.attempt_id,
                      host=host, pool=job["pool"], new=report.state,
                      reason="the host runs an attempt that is older than the records; it is being stopped")  # fmt: skip
        return "stray"
    _give_way(tx, job, held, report, now)
    lease_id = report.lease_id or f"lse_{report.attempt_id[4:]}"
    if tx.one("SELECT 1 FROM lease WHERE id = ?", (lease_id,)) is None:
        leases.insert(
            tx,
            {
                "id": lease_id, "kind": "job", "state": "leased", "caller": job["caller"], "owner": job["owner"], "human": job["human"],
                "pool": job["pool"], "priority": job["priority"], "needs": "{}", "gpus": cards, "units": sum(h.units for h in held),
                "fence": report.fence, "job_id": job["id"], "host": host, "hours_ms": job["hours_ms"],
                "hours_from": job["hours_from"], "queued_at_ms": now, "granted_at_ms": now, "hard_end_at_ms": now + job["hours_ms"],
                **grants.booked(needs_of(parse_kept(job["spec"]))),
            },
            held,
        )  # fmt: skip
    jobs.insert_attempt(
        tx,
        {
            "id": report.attempt_id, "job_id": job["id"], "epoch": report.epoch, "lease_id": lease_id, "fence": report.fence, "host": host,
            "state": "intended", "created_at_ms": now,
        },
    )  # fmt: skip
    if jobs.get(tx, job["id"])["state"] != "queued":
        jobs.move(tx, job["id"], JobState.QUEUED, now, held_reason=None)
    jobs.move(tx, job["id"], JobState.DEPLOYING, now, epoch=report.epoch, fence=report.fence)
    events.append(tx, "job.found", LOOP, now, owner=job["owner"], severity="critical", job_id=job["id"], attempt_id=report.attempt_id,
                  lease_id=lease_id, host=host, pool=job["pool"], old=job["state"], new="found",
                  args={"fence": report.fence, "epoch": report.epoch})  # fmt: skip
    return "found"


def _give_way(tx: Tx, job: sqlite3.Row, held: tuple[leases.HeldSlot, ...], report: AttemptReport, now: int) -> None:
    """End what the records still have of the job's earlier attempt, and of earlier leases on the slots."""
    before = jobs.live_attempt(tx, job["id"])
    if before is not None:
        jobs.move_attempt(
            tx, before["id"], AttemptState.ENDED, ended_at_ms=now, failure_class="lost", superseded=1,
            message="the host runs a newer attempt of its job, so it had ended",
        )  # fmt: skip
        lease = leases.get(tx, before["lease_id"])
        if lease["state"] in ("leased", "running"):
            end_lease(tx, LOOP, lease, LeaseState.RELEASED, "a newer attempt was found", now, severity="warning")
    for slot in held:
        row = tx.one(
            "SELECT l.* FROM lease_slot s JOIN lease l ON l.id = s.lease_id WHERE s.host = ? AND s.uuid = ? AND s.share = ?"
            " AND s.use <> 'freed' AND l.id <> ?",
            (slot.host, slot.uuid, slot.share, report.lease_id),
        )
        if row is not None and row["state"] in ("leased", "running"):
            # the job of a job lease, if any, moves when the host says how its attempt ended
            end_lease(
                tx, LOOP, row, LeaseState.REVOKED, "a newer lease was found on its slot", now, severity="critical"
            )
        tx.execute(
            "UPDATE lease_slot SET use = 'freed', since_ms = ? WHERE host = ? AND uuid = ? AND share = ? AND use <> 'freed'",
            (now, slot.host, slot.uuid, slot.share),
        )


def _fence_on(tx: Tx, slot: leases.HeldSlot) -> int:
    """The fence of the living lease on a slot; 0 where there is none."""
    row = tx.one(
        "SELECT l.fence FROM lease_slot s JOIN lease l ON l.id = s.lease_id WHERE s.host = ? AND s.uuid = ? AND s.share = ?"
        " AND s.use = 'held'",
        (slot.host, slot.uuid, slot.share),
    )
    return 0 if row is None else int(row[0] or 0)


def _pool_of(tx: Tx, context: Context, report: AttemptReport) -> str:
    for slot in report.slots:
        row = tx.one("SELECT pool FROM gpu WHERE uuid = ?", (slot.uuid,))
        if row is not None and row["pool"] in context.settings.pools:
            return str(row["pool"])
    return context.settings.default_pool


def _index(tx: Tx, uuid: str) -> int | None:
    row = tx.one("SELECT idx FROM gpu WHERE uuid = ?", (uuid,))
    return None if row is None else int(row[0])
