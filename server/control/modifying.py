"""Changing a job that was taken in: within the caller's grant, at its place in the line."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from cotenant.server.control.context import Context, check_request_id, said, secret_refused
from cotenant.server.control.leases import Leases, not_yours
from cotenant.server.deciding.blockers import could_ever
from cotenant.server.deciding.world import Ask
from cotenant.server.errors import BadRequest, Conflict
from cotenant.server.model.answers import JobAnswer
from cotenant.server.model.caller import Caller, may_operate, owns
from cotenant.server.model.changes import ANY_TIME, JobChange
from cotenant.server.model.spec import JobSpec, parse_kept
from cotenant.server.model.states import JOB_FINAL, JOB_WAITING, PRIORITIES
from cotenant.server.store import arrays, events, jobs, leases, requests
from cotenant.server.store.db import Tx
from cotenant.server.store.views import Views
from cotenant.server.store.worlds import needs_of


class Modifying:
    """The use case of `modify_job`. `kept_text` gives the text of a spec as it is kept, or refuses it."""

    def __init__(self, context: Context, views: Views, leases_: Leases, kept_text: Callable[[JobSpec], str]) -> None:
        self._context = context
        self._views = views
        self._leases = leases_
        self._kept_text = kept_text

    async def modify(
        self, caller: Caller, job_id: str, change: JobChange, *, reason: str = "", request_id: str | None = None
    ) -> JobAnswer:
        """Give a job new values; it keeps its place in the line unless it goes to another pool.

        Raises:
            BadRequest: nothing to change, a value that cannot be meant, or one that looks like a secret.
            Forbidden: not the caller's, or above what its token may ask for.
            Conflict: it is over, or runs and cannot be changed so any more.
            QuotaExceeded: more than its owner could ever hold, or no card like that.
        """
        context, now = self._context, self._context.now()
        check_request_id(request_id)
        reason = said(reason, "reason", 500)
        given = change.given()
        if not given:
            raise BadRequest("there is nothing to change", hint="Give at least one new value.")
        if change.priority is not None:
            context.check_priority(caller, PRIORITIES[change.priority])
        pool = context.pool_of(caller, change.pool) if change.pool is not None else None
        row = context.db.peek(lambda c: jobs.get(Tx(c), job_id))
        self._check(caller, row, given)
        self._refuse_what_can_never_be(caller, row, change, pool, now)
        digest = [job_id, given]

        def write(tx: Tx) -> None:
            row = jobs.get(tx, job_id)
            if requests.once(tx, caller.name, request_id, "modify_job", digest, job_id, now):
                return
            self._check(caller, row, given)
            before = parse_kept(row["spec"])
            after = self._after(before, change, pool)
            old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
            names = ["array" if name == "max_parallel" else name for name in given]
            changed = [name for name in names if old[name] != new[name]]
            if not changed:
                return
            self._write(tx, row, before, after, now)
            events.append(
                tx, "job.modified", caller, now, owner=row["owner"], job_id=job_id, pool=row["pool"], reason=reason or None,
                request_id=request_id, args={"old": {n: old[n] for n in changed}, "new": {n: new[n] for n in changed}},
            )  # fmt: skip

        await context.db.write(write)
        context.wake()
        return await self._views.get_job(caller, job_id)

    def _check(self, caller: Caller, row: sqlite3.Row, given: dict[str, Any]) -> None:
        job_id, state = row["id"], row["state"]
        if not owns(caller, owner=row["owner"], name=row["caller"]) and not may_operate(caller):
            raise not_yours(job_id)
        if state in JOB_FINAL:
            raise Conflict(
                f"{job_id} has ended: {state}", code="already_final",
                hint="submit_job with the new values starts another.",
            )  # fmt: skip
        fixed = sorted(set(given) - ANY_TIME)
        if fixed and state not in JOB_WAITING:
            raise Conflict(
                f"{job_id} is {state}; {', '.join(fixed)} can be changed only while it waits", code="not_waiting",
                hint=f"Of a job that runs: {', '.join(sorted(ANY_TIME))}. For other needs cancel it and submit it anew.",
            )  # fmt: skip

    def _after(self, before: JobSpec, change: JobChange, pool: str | None) -> JobSpec:
        after = change.applied_to(before)
        after = after.model_copy(
            update={
                "pool": pool or before.pool,
                "name": said(after.name, "name", 200) or after.program,
                "purpose": said(after.purpose, "purpose", 2000),
            }
        )
        if (found := after.find_secret()) is not None:
            raise secret_refused(*found)
        return after

    def _refuse_what_can_never_be(
        self, caller: Caller, row: sqlite3.Row, change: JobChange, pool: str | None, now: int
    ) -> None:
        if row["state"] not in JOB_WAITING:
            return
        context = self._context
        spec = self._after(parse_kept(row["spec"]), change, pool)
        context.keeper.refresh(now)
        kept = context.keeper.waiting.get(row["id"])
        ask = Ask(
            row["id"], "job", row["owner"], row["caller"], bool(row["human"]), pool or row["pool"], needs_of(spec),
            row["priority"], row["queued_at_ms"], row["hours_ms"], own_cap=kept.own_cap if kept is not None else 0,
        )  # fmt: skip
        world = context.keeper.world(waiting=False)
        if (never := could_ever(world, ask)) is not None:
            raise self._leases.impossible(caller, world, ask, never)

    def _write(self, tx: Tx, row: sqlite3.Row, before: JobSpec, after: JobSpec, now: int) -> None:
        text = self._kept_text(after)
        values: dict[str, Any] = {
            "spec": text,
            "spec_hash": requests.args_hash("spec", text),
            "name": after.name,
            "priority": PRIORITIES[after.priority],
        }
        if after.max_attempts != before.max_attempts:
            left = row["attempts_left"] + after.max_attempts - before.max_attempts
            if left < 1:
                raise BadRequest(
                    f"{row['id']} has made {before.max_attempts - row['attempts_left']} of its tries already;"
                    f" max_attempts cannot be {after.max_attempts}"
                )
            values["attempts_left"] = left
        if after.hours != before.hours:
            values["hours_ms"], values["hours_from"] = self._context.hours_ms(row["pool"], after.hours)
        if after.pool != row["pool"] and after.pool is not None:
            values["pool"], values["queued_at_ms"] = after.pool, now
            if after.hours is None:
                values["hours_ms"], values["hours_from"] = self._context.hours_ms(after.pool, None)
        jobs.modify(tx, row, values)
        if after.array != before.array and after.many is not None:
            arrays.limit(tx, row["id"], after.many.max_parallel)
        attempt = jobs.live_attempt(tx, row["id"])
        if attempt is not None:
            leases.touch(tx, attempt["lease_id"])  # the priority of its job counts when another wants its place
