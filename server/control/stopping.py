"""Ordering a job to stop, and the question that is asked before."""

from __future__ import annotations

import sqlite3

from cotenant.server.clock import iso
from cotenant.server.control.context import Context
from cotenant.server.errors import Conflict
from cotenant.server.model.caller import Caller
from cotenant.server.model.indices import ALL_INDICES
from cotenant.server.model.states import JOB_ACTIVE, JOB_FINAL, AttemptState, JobState
from cotenant.server.store import arrays, events, jobs, requests
from cotenant.server.store.db import Tx


def order_stop(
    tx: Tx,
    by: Caller,
    row: sqlite3.Row,
    reason: str,
    now: int,
    *,
    confirmed: str = "",
    why: str = "",
    request_id: str | None = None,
) -> tuple[str, str]:
    """Record that a job must stop; returns (status, state). One without an attempt is over at once.

    Of an array what has not started is over at once, and what runs is stopped.
    """
    if arrays.is_array(row):
        return _order_array(tx, by, row, reason, now, confirmed=confirmed, why=why, request_id=request_id)
    if row["state"] in JOB_ACTIVE:
        if row["state"] != "stopping":
            jobs.move(tx, row["id"], JobState.STOPPING, now, stop_reason=reason, stop_confirmed=confirmed)
        else:
            jobs.update(tx, row["id"], stop_reason=reason, stop_confirmed=confirmed)
        live = jobs.live_attempt(tx, row["id"])
        assert live is not None, "an active job has an attempt"
        jobs.move_attempt(tx, live["id"], AttemptState.STOPPING, stop_reason=reason)
        tx.dirty.add(("lease", live["lease_id"]))  # who ends is no victim any more
        events.append(
            tx, "job.stopping", by, now, owner=row["owner"], job_id=row["id"], attempt_id=live["id"], host=live["host"], old=row["state"],
            new="stopping", reason=why or reason, request_id=request_id, args={"confirmed": confirmed, "stop": reason},
        )  # fmt: skip
        return "stopping", "stopping"
    jobs.move(tx, row["id"], JobState.CANCELLED, now, stop_reason=reason, stop_confirmed=confirmed, held_reason=None,
              message=f"cancelled by {by.name} before it started")  # fmt: skip
    events.append(
        tx, "job.cancelled", by, now, owner=row["owner"], job_id=row["id"], old=row["state"], new="cancelled", reason=why or reason,
        request_id=request_id, args={"confirmed": confirmed},
    )  # fmt: skip
    return "cancelled", "cancelled"


def _order_array(
    tx: Tx, by: Caller, row: sqlite3.Row, reason: str, now: int, *, confirmed: str, why: str, request_id: str | None
) -> tuple[str, str]:
    said = f"cancelled by {by.name}" if reason == "cancel" else reason
    jobs.update(tx, row["id"], stop_reason=reason, stop_confirmed=confirmed, message=said)
    events.append(
        tx, "job.array_stopping", by, now, owner=row["owner"], job_id=row["id"], pool=row["pool"], old=row["state"],
        reason=why or reason, request_id=request_id, args={"confirmed": confirmed, "stop": reason},
    )  # fmt: skip
    for element in arrays.living(tx, row["id"]):
        if element["state"] != "stopping":
            order_stop(tx, by, element, reason, now, confirmed=confirmed, why=why)
    current = jobs.get(tx, row["id"])
    if current["state"] not in JOB_FINAL:
        jobs.drop_elements(tx, current, ALL_INDICES, by, now, said)
    state = str(jobs.get(tx, row["id"])["state"])
    return ("cancelled" if state in JOB_FINAL else "stopping"), state


class Confirmations:
    """Questions that are asked before a final act: bound to caller, act, object and its state; answered once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._open: dict[tuple[str, str, str], tuple[str, int]] = {}  # (caller, act, object) -> (secret, until)

    async def mint(self, caller: Caller, act: str, object_id: str, job_id: str | None = None) -> tuple[str, str]:
        """(token, until when it may be given back as ISO time). The object's state now is part of the question; of a part of
        a job (`object_id` names it) that is the state of the job.

        Whoever asks again before it was answered gets the same question with a new time, and no row more. The tokens
        themselves are only in memory: after a restart a question is asked anew, and an old answer still counts.
        """
        context, now = self._context, self._context.now()
        for key in [key for key, (_, until) in self._open.items() if until < now]:
            del self._open[key]
        known = self._open.get((caller.name, act, object_id))
        fresh = f"yes_{context.ids.secret(16)}"

        def write(tx: Tx) -> tuple[str, int]:
            row = jobs.get(tx, job_id or object_id)
            if row["state"] in JOB_FINAL:
                raise Conflict(f"{object_id} has ended already: {row['state']}", code="already_final")
            if known is not None:
                until = requests.ask_again(tx, row["state"], known[0], now)
                if until is not None:
                    return known[0], until
            return fresh, requests.ask(tx, caller.name, act, object_id, row["state"], fresh, now)

        secret, until = await context.db.write(write)
        self._open[caller.name, act, object_id] = secret, until
        return secret, iso(until)
