"""Ordering a job to stop, and the question that is asked before."""

from __future__ import annotations

import sqlite3

from cotenant.server.clock import iso
from cotenant.server.control.context import Context
from cotenant.server.errors import Conflict
from cotenant.server.model.caller import Caller
from cotenant.server.model.states import JOB_ACTIVE, JOB_FINAL, AttemptState, JobState
from cotenant.server.store import events, jobs, requests
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
    """Record that a job must stop; returns (status, state). One without an attempt is over at once."""
    if row["state"] in JOB_ACTIVE:
        if row["state"] != "stopping":
            jobs.move(tx, row["id"], JobState.STOPPING, now, stop_reason=reason, stop_confirmed=confirmed)
        else:
            jobs.update(tx, row["id"], stop_reason=reason, stop_confirmed=confirmed)
        live = jobs.live_attempt(tx, row["id"])
        assert live is not None, "an active job has an attempt"
        jobs.move_attempt(tx, live["id"], AttemptState.STOPPING, stop_reason=reason)
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


class Confirmations:
    """Questions that are asked before a final act: bound to caller, act, object and its state; answered once."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def mint(self, caller: Caller, act: str, object_id: str) -> tuple[str, str]:
        """(token, until when it may be given back as ISO time). The object's state now is part of the question."""
        context, now = self._context, self._context.now()
        secret = f"yes_{context.ids.secret(16)}"

        def write(tx: Tx) -> int:
            row = jobs.get(tx, object_id)
            if row["state"] in JOB_FINAL:
                raise Conflict(f"{object_id} has ended already: {row['state']}", code="already_final")
            return requests.ask(tx, caller.name, act, object_id, row["state"], secret, now)

        return secret, iso(await context.db.write(write))

    async def spend(self, caller: Caller, act: str, object_id: str, token: str) -> None:
        """Use a token up outside an act's own transaction; prefer the act's `confirm_token`."""
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> None:
            requests.spend(tx, caller.name, act, object_id, jobs.get(tx, object_id)["state"], token, now)

        await context.db.write(write)
