"""Jobs: submit, wait, cancel, retry, signal, hold. What the loop and the hosts do to them is in `placing` and `outcomes`."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from dataclasses import replace
from typing import Final, Literal

from cotenant.server.control import conditions, elements, placing, standing
from cotenant.server.control.context import Context, check_request_id, said, secret_refused
from cotenant.server.control.leases import Leases, Progress, not_yours
from cotenant.server.control.logs import Logs
from cotenant.server.control.modifying import Modifying
from cotenant.server.control.secrets import check_secrets
from cotenant.server.control.signalling import Signalling
from cotenant.server.control.stopping import order_stop
from cotenant.server.control.suspending import Suspending
from cotenant.server.control.templates import Templates
from cotenant.server.deciding.blockers import could_ever, outlook
from cotenant.server.deciding.world import Ask, Blocker, World
from cotenant.server.errors import BadRequest, ConfirmationRequired, Conflict, CotenantError
from cotenant.server.model.answers import CancelAnswer, JobAnswer, RankAnswer, SignalAnswer
from cotenant.server.model.arrays import of_element
from cotenant.server.model.caller import Caller, may_operate, owns
from cotenant.server.model.indices import ALL_INDICES, Indices
from cotenant.server.model.spec import JobSpec, parse_kept
from cotenant.server.model.states import JOB_ACTIVE, JOB_FINAL, PRIORITIES, JobState
from cotenant.server.model.text import quoted
from cotenant.server.store import arrays, dependencies, events, jobs, requests
from cotenant.server.store.db import Tx, dumps
from cotenant.server.store.views import Views
from cotenant.server.store.worlds import needs_of

log = logging.getLogger(__name__)

#: Without a request_id an identical spec within this time is taken for a repeat (design section 5).
SAME_SPEC_MS: Final = 180_000
WAIT_MAX_S: Final = 45.0
TAIL_LINES: Final = 20


class Jobs:
    """Use cases over jobs."""

    def __init__(self, context: Context, views: Views, leases: Leases, logs: Logs) -> None:
        self._context = context
        self._views = views
        self._leases = leases
        self._logs = logs
        self._signalling = Signalling(context)
        self.templates = Templates(context.settings.data_dir)
        self.suspending = Suspending(context)
        self.modify = Modifying(context, views, leases, _kept_text).modify
        self._possible: tuple[object, ...] | None = None  # the last ask that could start some day

    async def submit(
        self,
        caller: Caller,
        spec: JobSpec,
        *,
        request_id: str | None = None,
        when_full: Literal["refuse", "queue"] = "queue",
        wait_s: float = 0,
        dry_run: bool = False,
        on_progress: Progress | None = None,
        again: str | None = None,
        part: elements.Part | None = None,
    ) -> JobAnswer:
        """Take a job in. It starts when the loop says so; with `wait_s` the answer waits for its end, 45 s at most.

        `again` names the job that is tried once more: the request is then a retry of it, not a submit; of an array's
        elements those of `part`.

        Raises:
            BadRequest: a value cannot be meant, or looks like a secret.
            QuotaExceeded: more than the owner could ever hold; with when_full="refuse" also more than now.
            Busy: nothing free now, with when_full="refuse".
        """
        context = self._context
        check_request_id(request_id)
        spec = self.templates.resolve(spec)
        if (found := spec.find_secret()) is not None:
            raise secret_refused(*found)
        pool = context.pool_of(caller, spec.pool)
        spec = spec.model_copy(
            update={
                "pool": pool,
                "name": said(spec.name, "name", 200) or spec.program,
                "purpose": said(spec.purpose, "purpose", 2000),
                "project": said(spec.project, "project", 200),
                "experiment": said(spec.experiment, "experiment", 200),
            }
        )
        priority = PRIORITIES[spec.priority]
        context.check_priority(caller, priority)
        hours_ms, hours_from = context.hours_ms(pool, spec.hours)
        text = _kept_text(spec)
        same_spec = requests.args_hash("spec", text if part is None else [text, part.name])
        many = spec.many
        if many is not None:
            text = _kept_text(spec.model_copy(update={"array": many.kept()}))
        verb = "submit_job" if again is None else "retry_job"
        digest = requests.args_hash(verb, [text, when_full] if again is None else again if part is None else part.name)
        now = context.now()
        job_id = context.ids.new("job", now)
        ask = Ask(job_id, "job", caller.owner, caller.name, caller.human, pool, needs_of(spec), priority, now, hours_ms)
        if many is not None:
            ask = replace(
                ask, count=many.size if part is None else len(part.which), array=job_id, array_room=many.max_parallel
            )
        after, (opens, closes) = spec.after or (), conditions.window(spec.start_window, now)
        if after or opens or closes is not None:
            waits = context.db.peek(lambda c: conditions.resolve(Tx(c), after))
            unmet = tuple(on.what for on in waits if not on.met)
            ask = replace(ask, after=unmet, not_before_ms=opens, not_before_why="start_window", not_after_ms=closes)
        answer = await self._at_once(
            caller,
            ask,
            spec,
            dry_run=dry_run,
            when_full=when_full,
            request_id=request_id,
            digest=digest,
            same_spec=same_spec,
        )
        if answer is not None:
            return answer
        row = {
            "id": job_id,
            "state": "queued",
            "name": spec.name,
            "caller": caller.name,
            "owner": caller.owner,
            "human": int(caller.human),
            "pool": pool,
            "priority": priority,
            "spec": text,
            "spec_hash": same_spec,
            "hours_ms": hours_ms,
            "hours_from": hours_from,
            "attempts_left": spec.max_attempts,
            "submitted_at_ms": now,
            "queued_at_ms": now,
            "changed_at_ms": now,
            "array_id": None if many is None else job_id,
            "retry_of": again,
            "message": None if part is None else f"tries elements {str(part.which)[:300]} of {part.array_id} again",
            "opens_at_ms": opens,
            "closes_at_ms": closes,
        }

        def write(tx: Tx) -> str:
            known = requests.find(tx, caller.name, request_id, "submit_job", digest)
            if known is None and request_id is None:
                known = jobs.find_same(tx, caller.name, same_spec, now - SAME_SPEC_MS)
            if known is not None:
                return known
            waits = conditions.resolve(tx, after)
            jobs.insert(tx, row | {"waits_for": sum(not on.met for on in waits)})
            dependencies.insert(tx, job_id, waits)
            if part is not None:
                arrays.insert_again(tx, job_id, arrays.get(tx, part.array_id), part.which)
            elif many is not None:
                arrays.insert(tx, job_id, many.size, Indices(((0, many.size - 1),)), many.max_parallel, many.sets())
            requests.keep(tx, caller.name, request_id, verb, digest, job_id, now)
            events.append(
                tx, "job.submitted", caller, now, job_id=job_id, pool=pool, new="queued", request_id=request_id,
                args={"gpus": spec.gpus_min, "priority": spec.priority} | ({} if many is None else {"array": ask.count}),
            )  # fmt: skip
            return job_id

        kept = await context.db.write(write)
        if wait_s > 0:
            answer = await self.wait(caller, kept, min(wait_s, WAIT_MAX_S), on_progress)
        else:
            answer = await self._views.get_job(caller, kept)
        return replace(answer, deduplicated=kept != job_id)

    async def _at_once(
        self,
        caller: Caller,
        ask: Ask,
        spec: JobSpec,
        *,
        dry_run: bool,
        when_full: str,
        request_id: str | None,
        digest: str,
        same_spec: str,
    ) -> JobAnswer | None:
        """Refuse what can never be; answer a dry run; with when_full="refuse" refuse what cannot be now. None = go on."""
        context = self._context
        now = ask.queued_at_ms

        def first(connection: sqlite3.Connection) -> str | None:
            """The job that this request, or its twin of a moment ago, has made already."""
            if request_id is not None:
                return requests.find(Tx(connection), caller.name, request_id, "submit_job", digest)
            return None if dry_run else jobs.find_same(Tx(connection), caller.name, same_spec, now - SAME_SPEC_MS)

        if (known := context.db.peek(first)) is not None:
            return replace(await self._views.get_job(caller, known), deduplicated=True)
        check_secrets(spec.secrets, context.settings.data_dir)
        context.keeper.refresh(now)
        # a job that just queues is compared with caps and cards, not with who waits
        world = context.keeper.world(waiting=dry_run or when_full == "refuse")
        if (never := self._never(world, ask)) is not None:
            raise self._leases.impossible(caller, world, ask, never)
        if not dry_run and when_full == "queue":
            return None
        refusals, version = self._leases.refusals, context.keeper.version
        if not dry_run and (refused := refusals.again(caller.name, digest, now, version)) is not None:
            raise refused
        keys, why = outlook(world, ask, now, context.policy)
        if dry_run:
            return self._views.dry_run(caller, ask, spec, keys, why, now)
        if keys is None:
            # a twin of this request may be what is in its way; its transaction stands before this one in the line
            if (known := await context.db.write(lambda tx: first(tx.connection))) is not None:
                return replace(await self._views.get_job(caller, known), deduplicated=True)
            raise refusals.remember(caller.name, digest, self._leases.refusal(caller, world, ask, why), now, version)
        return None

    def _never(self, world: World, ask: Ask) -> Blocker | None:
        """`could_ever`, not asked again for equal asks while hosts, cards and rules stay the same."""
        key = (world.hosts, self._context.keeper.inventory, ask.owner, ask.agent, ask.human, ask.pool, ask.needs)
        if self._possible == key:
            return None
        found = could_ever(world, ask)
        if found is None:
            self._possible = key
        return found

    async def get(self, caller: Caller, job_id: str) -> JobAnswer:
        """A job; of a failed one also the last lines that it wrote, for those who may look inside.

        Raises:
            NotFound: no such job.
        """
        answer = await self._views.get_job(caller, job_id)
        if answer.state != JobState.FAILED or answer.command is None or not answer.attempts:
            return answer
        failed = next((r.rank for r in answer.attempts[-1].ranks if _named(r, answer)), None)
        for stream in ("err", "out"):
            try:
                page = await self._logs.tail(caller, job_id, stream=stream, rank=failed, lines=TAIL_LINES)
            except CotenantError as error:
                log.info("no last lines of %s: %s", job_id, error)  # the host is away; the rest is known all the same
                return answer
            if page.lines:
                return replace(answer, log_tail=page.lines)
        return answer

    async def wait(
        self, caller: Caller, job_id: str, max_wait_s: float = WAIT_MAX_S, on_progress: Progress | None = None
    ) -> JobAnswer:
        """Until the job is final, at most `max_wait_s`; returns where it stands. Ending the wait never ends the job."""
        context = self._context
        end = context.clock.monotonic_s() + max_wait_s
        whole = of_element(job_id)  # an element that has not started moves with its array
        while True:
            tickets = {context.turnstile.ticket(f"cotenant://jobs/{key}") for key in (job_id, *(whole or ())[:1])}
            try:
                state = self._views.find_state(job_id)
                left = end - context.clock.monotonic_s()
                if state is None or state in JOB_FINAL or left <= 0:
                    return await self.get(caller, job_id)
                if on_progress is not None:
                    await on_progress(max_wait_s - left, max_wait_s, state)
                await asyncio.wait(tickets, timeout=min(left, 10), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for ticket in tickets:
                    ticket.cancel()

    # ---- ending

    async def cancel(
        self, caller: Caller, job_id: str, *, confirmed: bool = False, confirm_token: str | None = None, request_id: str | None = None,
        reason: str = "", indices: str | None = None,
    ) -> CancelAnswer:  # fmt: skip
        """Cancel a job, or of an array the elements of `indices`.

        An agent is asked twice: pass `confirmed` where a door asked, or the token it was given.

        Raises:
            ConfirmationRequired: neither was given and the caller's token does not spare it (autopilot).
            Forbidden: not the caller's.
        """
        check_request_id(request_id)
        context, now = self._context, self._context.now()
        reason = said(reason, "reason", 500)

        part = context.db.peek(lambda c: elements.part_of(Tx(c), job_id, indices))
        target, name = (job_id, job_id) if part is None else (part.array_id, part.name)
        stopping: list[str] = []

        def write(tx: Tx) -> tuple[str, str]:
            row = self._own(tx, caller, target)
            known = requests.find(
                tx, caller.name, request_id, "cancel_job", requests.args_hash("cancel_job", [name, reason])
            )
            if row["state"] in JOB_FINAL:
                # a repeat of the request that ended it is answered as the first was
                return "cancelled" if known and row["state"] == "cancelled" else "already_final", row["state"]
            if known or (row["stop_reason"] == "cancel" and (row["state"] == "stopping" or arrays.is_array(row))):
                return "stopping", row["state"]
            if part is not None and elements.is_over(tx, part):
                return "already_final", row["state"]
            how = (
                "autopilot"
                if caller.autopilot
                else "twice"
                if confirmed
                else "person"
                if may_operate(caller) and caller.door != "mcp"
                else ""
            )
            if not how:
                if confirm_token is None:
                    raise ConfirmationRequired(f"{target} is {row['state']}", data={"state": row["state"]})
                requests.spend(tx, caller.name, "cancel_job", name, row["state"], confirm_token, now)
                how = "twice"
            requests.once(tx, caller.name, request_id, "cancel_job", [name, reason], target, now)
            if part is None:
                return order_stop(tx, caller, row, "cancel", now, confirmed=how, why=reason, request_id=request_id)
            _, found = elements.cancel(tx, caller, row, part, now, confirmed=how, why=reason, request_id=request_id)
            stopping.extend(found)
            return "stopping" if found else "cancelled", str(jobs.get(tx, target)["state"])

        status, state = await context.db.write(write)
        context.wake()
        if part is not None:
            await asyncio.gather(*map(self.carry_out_stop, stopping))
        elif status == "stopping":
            await self.carry_out_stops(job_id)
        what = "The job" if part is None else f"What waited of {name[:200]}"
        said_it = {
            "already_final": f"The job had ended before: {state}."
            if part is None
            else f"Nothing of {name[:200]} waits or runs.",
            "stopping": "Its processes are being stopped; wait_job tells when they are gone.",
            "cancelled": f"{what} is cancelled.",
        }[status]
        return CancelAnswer(job_id=target, status=status, state=state, message=said_it)

    def meant(self, job_id: str, indices: str | None) -> tuple[str, str]:
        """(what a confirmation is bound to, the job whose state it is bound to).

        Raises:
            BadRequest: indices of what is no array, or none at all.
        """
        part = self._context.db.peek(lambda c: elements.part_of(Tx(c), job_id, indices))
        return (job_id, job_id) if part is None else (part.name, part.array_id)

    async def carry_out_stops(self, job_id: str) -> None:
        """Pass the ordered stops of a job, or of all elements of an array, to their hosts."""
        ids = self._context.db.peek(lambda c: [row["id"] for row in arrays.living(Tx(c), job_id)])
        await asyncio.gather(*map(self.carry_out_stop, ids or [job_id]))

    async def carry_out_stop(self, job_id: str) -> None:
        """Pass an ordered stop to the host. Repeated by the loop until the host has taken it."""
        context = self._context
        row = context.db.peek(
            lambda c: c.execute(
                "SELECT a.id, a.host, j.spec, j.stop_reason FROM attempt a JOIN job j ON j.id = a.job_id"
                " WHERE a.job_id = ? AND a.state <> 'ended' AND j.state = 'stopping'",
                (job_id,),
            ).fetchone()
        )
        if row is not None:
            await placing.stop_attempt(
                context, row["id"], row["host"], row["stop_reason"], json.loads(row["spec"]).get("stop_grace_s", 10)
            )

    async def retry(
        self, caller: Caller, job_id: str, *, only: str | None = None, indices: str | None = None, request_id: str | None = None
    ) -> JobAnswer:  # fmt: skip
        """A final job once more, as a new job with the same spec; a held one is released.

        Of an array all elements, those of `indices`, or with `only="failed"` those that failed: a new array with just
        these, under the same indices. Without a request_id a repeat within 180 s answers the new job while that is not final.

        Raises:
            Conflict: it, or an element that is meant, is not over.
        """
        context = self._context
        check_request_id(request_id)
        part = context.db.peek(lambda c: elements.to_retry(Tx(c), job_id, only, indices))
        row = context.db.peek(lambda c: jobs.get(Tx(c), job_id if part is None else part.array_id))
        digest = requests.args_hash("retry_job", job_id if part is None else part.name)
        if not owns(caller, owner=row["owner"], name=row["caller"]):
            raise not_yours(job_id)
        known = context.db.peek(lambda c: requests.find(Tx(c), caller.name, request_id, "retry_job", digest))
        if known is not None:  # whatever has become of it since
            return replace(await self._views.get_job(caller, known), deduplicated=True)
        if part is None and row["state"] == "held":
            return await self._unhold(caller, job_id, "retry", request_id, "retry_job", digest)
        if part is None and row["state"] not in JOB_FINAL:
            raise Conflict(
                f"{job_id} is {row['state']} and not over",
                code="not_final",
                hint="Wait for its end, or cancel_job first.",
            )
        # what it waited for, and its time, are past
        spec = parse_kept(row["spec"]).model_copy(update={"after": None, "start_window": None})
        return await self.submit(caller, spec, request_id=request_id, again=job_id, part=part)

    async def signal(self, caller: Caller, job_id: str, signal: str, *, request_id: str | None = None) -> SignalAnswer:
        """Send a signal to the processes of a running job: see `signalling.Signalling.signal`."""
        return await self._signalling.signal(caller, job_id, signal, request_id=request_id)

    # ---- holding

    async def hold(
        self, caller: Caller, job_id: str, reason: str, *, suspend: bool = False, request_id: str | None = None,
        indices: str | None = None,
    ) -> JobAnswer:  # fmt: skip
        """Keep a waiting job from starting; with `suspend` a running one's processes stand still, and keep their cards.

        Of an array only the elements of `indices`, where these are given.

        Raises:
            Conflict: it runs and `suspend` was not said, or it cannot be suspended (now).
            Forbidden: not the caller's.
        """
        check_request_id(request_id)
        context, now = self._context, self._context.now()
        reason = said(reason, "reason", 500)
        part = context.db.peek(lambda c: elements.part_of(Tx(c), job_id, indices))
        target, name = (job_id, job_id) if part is None else (part.array_id, part.name)
        args = [name, reason, *(["suspend"] if suspend else [])]
        why = f"held by {caller.name}{f': {quoted(reason, 300)}' if reason else ''}"

        def write(tx: Tx) -> None:
            row = self._own(tx, caller, target)
            if requests.once(tx, caller.name, request_id, "hold_job", args, target, now):
                return
            if part is not None:
                elements.hold(tx, caller, row, part, now, reason, why, request_id)
                return
            if row["state"] == "held":
                return
            if suspend and row["state"] in JOB_ACTIVE:
                standing.order(tx, caller, row, "suspend", now, why=reason, request_id=request_id)
                return
            if row["state"] not in ("queued", "preempted"):
                runs = row["state"] in ("running", "suspended")
                raise Conflict(
                    f"{job_id} is {row['state']}; only a waiting job can be held", code="not_waiting",
                    hint="With suspend=true its processes stand still and it keeps its cards; cancel_job ends it." if runs
                    else "get_job shows where it stands.",
                )  # fmt: skip
            if arrays.is_array(row):
                elements.hold_waiting(tx, caller, job_id, ALL_INDICES, now, reason, why)
            jobs.move(tx, job_id, JobState.HELD, now, held_reason=why)
            events.append(tx, "job.held", caller, now, owner=row["owner"], job_id=job_id, old=row["state"], new="held", reason=reason,
                          request_id=request_id)  # fmt: skip

        await context.db.write(write)
        context.wake()
        await self.suspending.carry_out(job_id)
        return await self._views.get_job(caller, job_id)

    async def unhold(
        self,
        caller: Caller,
        job_id: str,
        reason: str = "",
        *,
        request_id: str | None = None,
        indices: str | None = None,
    ) -> JobAnswer:
        """Let a held job queue again, at its old place, counts of quick failures start anew; a suspended one goes on.

        Of an array everything that is on hold, or only the elements of `indices`.
        """
        check_request_id(request_id)
        reason = said(reason, "reason", 500)
        part = self._context.db.peek(lambda c: elements.part_of(Tx(c), job_id, indices))
        if part is None:
            digest = requests.args_hash("release_job", [job_id, reason])
            return await self._unhold(caller, job_id, reason, request_id, "release_job", digest)
        digest = requests.args_hash("release_job", [part.name, reason])
        return await self._unhold(caller, part.array_id, reason, request_id, "release_job", digest, part.which)

    async def _unhold(
        self, caller: Caller, job_id: str, reason: str, request_id: str | None, verb: str, digest: str, which: Indices = ALL_INDICES,
    ) -> JobAnswer:  # fmt: skip
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> None:
            row = self._own(tx, caller, job_id)
            if requests.find(tx, caller.name, request_id, verb, digest) is not None:
                return
            requests.keep(tx, caller.name, request_id, verb, digest, job_id, now)
            if row["state"] in ("running", "suspended"):
                standing.order(tx, caller, row, "resume", now, why=reason, request_id=request_id)
                return
            if arrays.is_array(row):
                elements.release(tx, caller, row, which, now, reason, request_id)
            if row["state"] != "held" or which is not ALL_INDICES:
                return
            jobs.move(tx, job_id, JobState.QUEUED, now, held_reason=None, quick_failures=0, not_before_ms=0,
                      attempts_left=max(1, row["attempts_left"]))  # fmt: skip
            events.append(tx, "job.unheld", caller, now, owner=row["owner"], job_id=job_id, old="held", new="queued", reason=reason,
                          request_id=request_id)  # fmt: skip

        await context.db.write(write)
        context.wake()
        await self.suspending.carry_out(job_id)
        return await self._views.get_job(caller, job_id)

    def _own(self, tx: Tx, caller: Caller, job_id: str) -> sqlite3.Row:
        row = jobs.get(tx, job_id)
        if not owns(caller, owner=row["owner"], name=row["caller"]) and not may_operate(caller):
            raise not_yours(job_id)
        return row


def _named(rank: RankAnswer, job: JobAnswer) -> bool:
    """Whether a job's verdict is on this rank."""
    return bool(job.message and job.message.startswith(f"rank {rank.rank} on {rank.host}: "))


def _kept_text(spec: JobSpec) -> str:
    """The spec as it is kept: canonical JSON.

    Raises:
        BadRequest: a value that JSON or UTF-8 cannot hold; SQLite could never read it back.
    """
    try:
        # pydantic alone would turn NaN into null without a word
        json.dumps(spec.config, allow_nan=False)
        text = dumps(spec.model_dump(mode="json", exclude_defaults=True))
        text.encode("utf-8")
    except (ValueError, TypeError) as error:
        raise BadRequest(
            "the job holds a number or text that JSON cannot carry (NaN, an infinity, or half a surrogate pair)",
            hint='Give such numbers as text, such as "inf".',
        ) from error
    return text
