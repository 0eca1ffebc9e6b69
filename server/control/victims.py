"""What a job's end, its next start and its asker's start mean for the notices it was given; and from where it goes on.

Functions inside the transactions of `outcomes` and `placing`. Who gives notices and waits for saves is `preempting`.
"""

from __future__ import annotations

import json
import posixpath
import shlex
import sqlite3
from dataclasses import dataclass
from typing import Any

from cotenant.hostd.protocol import AttemptReport, CheckpointRef, ExitRecord, Progress
from cotenant.server.model.caller import LOOP
from cotenant.server.model.spec import JobSpec
from cotenant.server.store import events, preemptions
from cotenant.server.store.db import Tx, dumps


@dataclass(frozen=True)
class Resume:
    """From where a new attempt goes on: `path`, or None for the beginning, and a sentence that says it."""

    path: str | None
    words: str


def checkpoint_ref(spec: JobSpec) -> CheckpointRef | None:
    """What the host watches of a job; None where it says nothing, or not where."""
    if spec.checkpoint is None:
        return None
    path = posixpath.normpath(posixpath.join(spec.workdir or "", spec.checkpoint.dir))
    return CheckpointRef(path, spec.checkpoint.manifest) if path.startswith("/") else None


def checkpoint_json(progress: Progress | None, now: int) -> str | None:
    """The newest complete checkpoint as an attempt's row keeps it."""
    if progress is None or (progress.checkpoint is None and not progress.skipped):
        return None
    seen = progress.checkpoint
    kept: dict[str, Any] = {"skipped": list(progress.skipped)}
    if seen is not None:
        kept |= {"name": seen.name, "path": seen.path, "size_bytes": seen.size_bytes, "at_ms": now - seen.age_ms}
    return dumps(kept)


def resume_point(tx: Tx, job_id: str, spec: JobSpec, epoch: int) -> Resume:
    """From where the next attempt of a job goes on: the newest checkpoint that one of its attempts proved complete."""
    if epoch <= 1:
        return Resume(None, "")
    if not spec.resumable:
        return Resume(None, "starts from zero: the job is not resumable")
    skipped: list[str] = []
    for row in tx.all("SELECT checkpoint FROM attempt WHERE job_id = ? ORDER BY epoch DESC LIMIT 20", (job_id,)):
        kept = json.loads(row["checkpoint"]) if row["checkpoint"] else {}
        skipped += kept.get("skipped", [])
        if "path" in kept:
            passed = f"; passed over: {', '.join(skipped[:5])}" if skipped else ""
            return Resume(kept["path"], f"goes on from {kept['name']}{passed}")
    passed = f"; passed over: {', '.join(skipped[:5])}" if skipped else ""
    return Resume(None, f"starts from zero: no complete checkpoint was seen{passed}")


def resumed_argv(spec: JobSpec, path: str | None) -> tuple[str, ...]:
    """What is executed, with the words that name the checkpoint to go on from."""
    pattern = spec.checkpoint.resume_arg if spec.checkpoint is not None else None
    if path is None or not pattern:
        return tuple(spec.argv)
    words = [word.replace("{path}", path) for word in shlex.split(pattern)]
    if "{path}" not in pattern:
        words.append(path)
    if isinstance(spec.command, str):
        return ("/bin/sh", "-c", f"{spec.command} {shlex.join(words)}")
    return (*spec.command, *words)


def ended(
    tx: Tx,
    attempt: sqlite3.Row,
    job: sqlite3.Row,
    report: AttemptReport,
    record: ExitRecord,
    failure: str | None,
    now: int,
) -> str | None:
    """Write down what an end means for the notices that the attempt was given.

    Returns why the job counts as stopped although no stop was ordered yet (preempt, evict), or None: a command may obey a
    notice by saving and ending by itself, and one without a handler for the signal ends of it.
    """
    found: str | None = None
    for row in preemptions.of_attempt(tx.connection, attempt["id"]):
        progress = report.progress
        seen = None if progress is None else progress.checkpoint
        saved = bool(row["saved"]) or (progress is not None and progress.saved)
        started = attempt["started_at_ms"] or now
        lost = seen.age_ms if seen is not None else max(0, now - started)
        by_itself = row["reason"] != "save" and row["stopped_at_ms"] is None and failure is not None
        if by_itself and (saved or record.sender == "cotenant"):
            found = str(row["reason"])
        stopped = row["stopped_at_ms"] is not None or found is not None
        finished = failure is None
        preemptions.update_victim(
            tx, row["preemption_id"], attempt["id"], ended_at_ms=now, saved=int(saved),
            checkpoint=None if seen is None else seen.path, lost_ms=0 if finished else lost,
            stopped_at_ms=row["stopped_at_ms"] if not found else row["stopped_at_ms"] or now,
            grace_used_ms=row["grace_used_ms"] if row["grace_used_ms"] is not None else max(0, now - (row["told_at_ms"] or now)),
            outcome="it finished by itself" if finished else "stopped" if stopped else f"it ended by itself: {failure}",
        )  # fmt: skip
        _all_ended(tx, row["preemption_id"], now)
    return found


def obeyed(tx: Tx, attempt_id: str, record: ExitRecord) -> str | None:
    """The reason (preempt, evict) of a notice that an end before the stop obeys: it has saved, or ended of the signal; or None."""
    for row in preemptions.of_attempt(tx.connection, attempt_id):
        if row["reason"] != "save" and row["stopped_at_ms"] is None and (row["saved"] or record.sender == "cotenant"):
            return str(row["reason"])
    return None


def _all_ended(tx: Tx, preemption_id: str, now: int) -> None:
    """What follows once the last victim has ended: an eviction is over, a preemption keeps its slots for the asker."""
    if tx.one("SELECT 1 FROM victim WHERE preemption_id = ? AND ended_at_ms IS NULL", (preemption_id,)) is not None:
        return
    row = preemptions.find(tx.connection, preemption_id)
    assert row is not None
    if row["reason"] != "preempt":
        preemptions.update(tx, preemption_id, state="done", ended_at_ms=now, outcome="the attempt ended")
    elif row["state"] == "noticed":
        preemptions.update(tx, preemption_id, state="stopping", stopping_at_ms=now)


def asker_started(tx: Tx, asker_id: str | None, lease_id: str, now: int) -> None:
    """The asker of a preemption got its slots."""
    if asker_id is None:
        return
    row = preemptions.of_asker(tx.connection, asker_id)
    if row is None or row["state"] != "stopping":
        return
    preemptions.update(
        tx, row["id"], state="done", ended_at_ms=now, asker_started_at_ms=now, asker_lease_id=lease_id,
        outcome="the asker started",
    )  # fmt: skip


def preempted(tx: Tx, job: sqlite3.Row, values: dict[str, Any], about: dict[str, Any]) -> None:
    """The event of a job that was preempted and waits to go on."""
    events.append(
        tx, "job.preempted", LOOP, about.pop("now"), severity="warning", new="preempted", reason=values["message"],
        args={"attempts_left": job["attempts_left"]}, **about,
    )  # fmt: skip
