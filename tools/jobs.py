"""submit_job, get_job, list_jobs, wait_job, cancel_job, retry_job, modify_job, signal_job, checkpoint_job, hold_job, release_job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cotenant.server.errors import ConfirmationRequired, Unavailable
from cotenant.server.mcp.call import Call
from cotenant.server.mcp.tasks import TASKS, BecameTask
from cotenant.server.mcp.tool import Flat, tool
from cotenant.server.model import text
from cotenant.server.model.answers import (
    CancelAnswer,
    ExplainAnswer,
    JobAnswer,
    JobList,
    LeaseAnswer,
    SaveAnswer,
    SignalAnswer,
)
from cotenant.server.model.changes import JobChange
from cotenant.server.model.spec import NOT_YET, JobSpec
from cotenant.server.model.states import JOB_WAITING
from cotenant.tools.tasks import as_task
from cotenant.tools.waiting import LEASE, Reporter, is_over, standing, waited
from cotenant.tools.words import (
    Cursor,
    HolderFilter,
    HostFilter,
    IndicesOf,
    JobId,
    OwnerFilter,
    PoolFilter,
    Reason,
    RequestId,
    Since,
)

#: Parsed, so that each gets its sentence, but not advertised while nothing can honour them.
_HIDDEN = (*NOT_YET, "runner", "on_host_loss")
#: The longest that one call is held, however long the caller would wait; a protocol task holds nothing and may last.
_HELD_MAX_S = 600.0
JobFilter = Literal[
    "active", "waiting", "final", "held", "queued", "provisioning", "deploying", "running", "suspended", "stopping",
    "preempted", "lost", "succeeded", "failed", "cancelled",
]  # fmt: skip


@tool(
    title="Run a command as a job",
    scope="write",
    core=True,
    brief=True,
    core_arguments=(
        "command",
        "name",
        "purpose",
        "gpus",
        "gpu_memory_mib",
        "pool",
        "priority",
        "hours",
        "workdir",
        "env",
        "labels",
        "max_attempts",
        "when_full",
        "wait_s",
        "dry_run",
        "request_id",
    ),
)
async def submit_job(
    call: Call,
    spec: Annotated[JobSpec, Flat(*_HIDDEN)],
    when_full: Annotated[
        Literal["queue", "refuse"], Field(description="when nothing is free: wait in line, or be refused")
    ] = "queue",
    wait_s: Annotated[
        float, Field(ge=0, le=45, description="seconds to wait for a short job's end within this call")
    ] = 0,
    dry_run: Annotated[bool, Field(description="change nothing; say what would happen")] = False,
    request_id: RequestId = None,
) -> JobAnswer:
    """Run a command detached on leased cards: the normal way to train, evaluate or export. Queues by itself.

    It goes on when you disconnect. Give gpus (0 for work without a card), hours (time limit), name and purpose. The
    command finds its cards in CUDA_VISIBLE_DEVICES and gets no terminal. Returns a handle at once: keep job_id, then
    wait_job, tail_logs or get_job; blockers say why it waits. Do not submit again because it waits: an identical job
    of yours within 180 s answers the first one (deduplicated). dry_run tells where it would run and what blocks it.
    Refused with quota_exceeded: it can never or not now fit your caps; the numbers say what would. Put no secrets into
    command or env: use secrets, which names files on the host.
    """
    report = Reporter(call.peer, wait_s or None)
    return await call.patiently(
        report.during(
            call.control.jobs.submit(
                call.caller,
                spec,
                request_id=request_id,
                when_full=when_full,
                wait_s=wait_s,
                dry_run=dry_run,
                on_progress=report.relay if wait_s else None,
            )
        )
        if wait_s
        else call.control.jobs.submit(
            call.caller, spec, request_id=request_id, when_full=when_full, wait_s=0, dry_run=dry_run, on_progress=None
        )
    )


@tool(title="Look at one job: state, result, attempts", scope="read", core=True)
async def get_job(call: Call, job_id: JobId) -> JobAnswer:
    """See one job whole: state, where it runs, attempts with exit codes, why it failed, time left, blockers.

    state is held, queued, provisioning, deploying, running, suspended, stopping, preempted, lost (the host does not
    answer: unknown, not failed) or one of the final succeeded, failed, cancelled. blockers: the first is the main
    reason it waits, helps says what would remove it. failure_class, message and log_tail say why it failed. Inside
    fields (command, workdir …) are null for another owner's job. To wait for the end use wait_job.
    """
    return await call.control.jobs.get(call.caller, job_id)


@tool(title="Explain why a job waits or how it ended", scope="read", core=True)
async def explain_job(
    call: Call,
    job_id: JobId,
    detail: Annotated[bool, Field(description="also each host, and what fails there")] = False,
) -> ExplainAnswer:
    """Why is a job still waiting (queued, held, not starting), when could it start, and what would help?

    blockers hold every reason with numbers, who set the limit (set_by) and what helps; the first is the main one.
    starts_by is known only where all of them end by themselves. next_actions are calls that make sense now.
    """
    return await call.control.views.explain_job(call.caller, job_id, detail=detail)


@tool(title="List jobs: running, waiting, failed", scope="read", core=True)
async def list_jobs(
    call: Call,
    state: Annotated[JobFilter | None, Field(description="a state, or active, waiting or final; default: all")] = None,
    pool: PoolFilter = None,
    owner: OwnerFilter = None,
    holder: HolderFilter = None,
    label: Annotated[str | None, Field(max_length=400, description="only with this label: KEY=VALUE")] = None,
    host: HostFilter = None,
    since: Since = None,
    array: Annotated[
        str | None, Field(max_length=64, pattern=r"^[A-Za-z0-9_-]+$", description="the elements of this array")
    ] = None,
    limit: Annotated[int, Field(ge=1, le=200, description="jobs at most")] = 20,
    cursor: Cursor = None,
) -> JobList:
    """Find jobs, newest first: yours after a pause (holder = your name), what runs, what waits, what failed.

    Each row has its main blocker or exit code; get_job has the rest of one. An array is one row with counts; give array
    for its elements that have started. Give cursor back for the next page.
    """
    return await call.control.views.list_jobs(
        call.caller,
        state=state,
        pool=pool,
        owner=owner,
        holder=holder,
        label=label,
        host=host,
        since=since,
        array=array,
        limit=limit,
        cursor=cursor,
    )


@tool(
    title="Wait for a job or a queued lease",
    scope="read",
    core=True,
    output=(JobAnswer, LeaseAnswer),
    brief=True,
    extra_output={"done": {"type": "boolean"}, "waited_s": {"type": "number"}, "cursor": {"type": "string"}},
)
async def wait_job(
    call: Call,
    job_id: Annotated[
        str,
        Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$", description="job id, or lease id of a claim"),
    ],
    max_wait_s: Annotated[
        float, Field(ge=0, le=86_400, description="seconds to wait at most; one call is held 600 s at most")
    ] = 45,
) -> dict[str, Any]:
    """Wait until a job ends, or until a queued lease is granted. Better than asking again and again.

    Returns early when it happens, else after max_wait_s with where things stand: done says which. Not done is no
    error: call it again, or do something else meanwhile; list_events(since=cursor) tells what happened during the
    wait. Ending the wait never ends the job. Many clients give a call up after 60 s, so stay below that unless you know
    better.
    """
    since = (await call.control.views.list_events(call.caller, limit=1)).cursor
    if max_wait_s > 0 and call.peer.declares(TASKS):
        await _as_task(call, job_id, since, max_wait_s)
    max_wait_s = min(max_wait_s, _HELD_MAX_S)
    report = Reporter(call.peer, max_wait_s)
    waiting: Any
    if job_id.startswith(LEASE):
        waiting = call.control.leases.wait(call.caller, job_id, max_wait_s, report.relay)
    else:
        waiting = call.control.jobs.wait(call.caller, job_id, max_wait_s, report.relay)
    answer: JobAnswer | LeaseAnswer
    try:
        answer = await call.patiently(report.during(waiting))
    except Unavailable as exc:
        exc.data = {**exc.data, "job_id": job_id}
        raise
    return waited(answer, report.elapsed_s(), since)


async def _as_task(call: Call, subject: str, since: str, max_wait_s: float) -> None:
    """Let the call go on as a protocol task, unless there is nothing to wait for or the caller has too many of them.

    Raises:
        BecameTask: it does.
    """
    if is_over(await standing(call.control, call.caller, subject)):
        return
    wait = await call.control.waits.begin(call.caller, subject, since, max_wait_s)
    if wait is not None:
        raise BecameTask(as_task(call.control, wait))


@tool(title="Cancel a job", scope="write", core=True, destructive=True, idempotent=True)
async def cancel_job(
    call: Call,
    job_id: JobId,
    indices: IndicesOf = None,
    confirm_token: Annotated[
        str | None, Field(min_length=1, max_length=128, description="from the first call's answer; not for inventing")
    ] = None,
    reason: Reason = "",
    request_id: RequestId = None,
) -> CancelAnswer:
    """Stop a job for good, running or waiting; it cannot be undone, though retry_job runs the same again as a new job.

    Asked twice: a person may be asked through your client; else status is confirmation_required with a confirm_token
    and what will be lost. If that is what is wanted, call again with the token before confirm_by; it works once, for
    this job in this state. status stopping means that the command is being told to end (TERM, then KILL after its
    stop_grace_s); wait_job tells when it has. Only your owner's jobs: refused with not_yours otherwise.
    """
    jobs = call.control.jobs
    reply = call.peer.reply() if confirm_token is None else None
    if reply is not None:  # the second round of a protocol that asks by ending the call
        if not reply.yes:
            return await _not_cancelled(call, job_id, reply.yes)
        confirm_token = reply.state
    try:
        return await jobs.cancel(
            call.caller, job_id, confirm_token=confirm_token, reason=reason, request_id=request_id, indices=indices
        )
    except ConfirmationRequired:
        if confirm_token is not None:
            raise
    name, target = jobs.meant(job_id, indices)
    token, until = await call.control.confirmations.mint(call.caller, "cancel_job", name, target)
    job = await call.control.views.get_job(call.caller, job_id)
    loses = _what_is_lost(job)
    if call.peer.can_ask():
        yes = await call.peer.ask(f"Cancel job {name[:200]} ({text.quoted(job.name)}, {job.state})? {loses}", token)
        if not yes:
            return await _not_cancelled(call, job_id, yes)
        return await jobs.cancel(
            call.caller, job_id, confirm_token=token, reason=reason, request_id=request_id, indices=indices
        )
    return CancelAnswer(
        job_id=job_id,
        status="confirmation_required",
        state=job.state,
        message=f"{loses} If that is what is wanted, call cancel_job again with this confirm_token.",
        confirm_token=token,
        confirm_by=until,
    )


def _what_is_lost(job: JobAnswer) -> str:
    """A plain sentence of what a cancel will do."""
    if job.array is not None:
        return "What has not started never will, what runs is stopped, and what that has not saved is lost."
    if job.state in JOB_WAITING:
        return "The job has not started; it will leave the queue for good."
    ran = f" after {job.running_s} s" if job.running_s is not None else ""
    return f"Its processes will be stopped{ran} and what they have not saved is lost."


async def _not_cancelled(call: Call, job_id: str, answer: bool | None) -> CancelAnswer:
    job = await call.control.views.get_job(call.caller, job_id)
    said = "The question was answered with no" if answer is False else "The question was closed without an answer"
    return CancelAnswer(job_id=job_id, status="not_cancelled", state=job.state, message=f"{said}; nothing was changed.")


@tool(title="Run a job again", scope="write", brief=True)
async def retry_job(
    call: Call,
    job_id: JobId,
    only: Annotated[Literal["failed"] | None, Field(description="of an array: only what failed")] = None,
    indices: IndicesOf = None,
    request_id: RequestId = None,
) -> JobAnswer:
    """Run an ended job once more, with the same spec, as a new job. It starts from zero, not from a checkpoint.

    Use it after you mended what made it fail outside the spec (data, a full disk); for another command or other
    settings use submit_job. Returns the new job. A held job is released instead and stays the same job. Of an array the
    elements that are meant become a new array, under the same indices.
    Refused with not_final: it has not ended yet, so wait_job, or cancel_job first.
    """
    return await call.control.jobs.retry(call.caller, job_id, only=only, indices=indices, request_id=request_id)


@tool(title="Change a job: priority, needs, pool", scope="write", idempotent=True, brief=True)
async def modify_job(
    call: Call,
    job_id: JobId,
    change: Annotated[JobChange, Flat()],
    reason: Reason = "",
    request_id: RequestId = None,
) -> JobAnswer:
    """Change what a job asks for, without losing its place in the line: raise or lower its priority, fewer cards, hours.

    Give only what shall be different; units as in submit_job. A job that runs takes name, purpose, labels, priority and
    max_attempts, else not_waiting. Refusals are those of submit_job: priority_too_high, quota_exceeded, no_such_gpu.
    """
    return await call.control.jobs.modify(call.caller, job_id, change, reason=reason, request_id=request_id)


@tool(title="Send a signal to a job", scope="write", destructive=True)
async def signal_job(
    call: Call,
    job_id: JobId,
    signal: Annotated[
        str, Field(min_length=1, max_length=16, pattern=r"^[A-Za-z0-9+]+$", description="USR1, USR2, HUP, INT, CONT …")
    ],
    request_id: RequestId = None,
) -> SignalAnswer:
    """Send a signal to the processes of a running job. To make it save a checkpoint use checkpoint_job.

    It reaches the newest attempt only; an answer means that it was delivered. To end a job use cancel_job. Refused with
    not_running: there is no process yet or any more, get_job says which; with bad_signal: the text names the possible
    ones; with outcome_unknown: it may have arrived, so look in tail_logs before you send it again.
    """
    return await call.control.jobs.signal(call.caller, job_id, signal, request_id=request_id)


@tool(title="Save a checkpoint now", scope="write", brief=True)
async def checkpoint_job(call: Call, job_id: JobId, request_id: RequestId = None) -> SaveAnswer:
    """Make a running job save a checkpoint now, without stopping it, by its checkpoint.signal and notice file.

    get_job shows the new checkpoint. Refused with no_checkpoints: it was submitted without checkpoint.
    """
    return await call.control.preempting.save_now(call.caller, job_id, request_id=request_id)


@tool(title="Hold a waiting job, or suspend a running one", scope="write", idempotent=True, brief=True)
async def hold_job(
    call: Call,
    job_id: JobId,
    suspend: Annotated[bool, Field(description="freeze a running job's processes where they stand")] = False,
    indices: IndicesOf = None,
    reason: Reason = "",
    request_id: RequestId = None,
) -> JobAnswer:
    """Keep a waiting job from starting, or with suspend=true pause a running one. release_job lets it go on.

    A suspended job keeps its cards and their memory and goes on counting against your quota; only its time limit stands
    still, at most max_suspend_h, then it goes on by itself. Refused with not_waiting: it runs and suspend was not given.
    """
    return await call.control.jobs.hold(
        call.caller, job_id, reason, suspend=suspend, request_id=request_id, indices=indices
    )


@tool(title="Let a held or suspended job go on", scope="write", idempotent=True, brief=True)
async def release_job(
    call: Call, job_id: JobId, indices: IndicesOf = None, reason: Reason = "", request_id: RequestId = None
) -> JobAnswer:
    """Put a held job back into its queue, or resume (continue) a suspended one. Harmless for any other.

    To give cards back use release_lease; to run an ended job again use retry_job.
    """
    return await call.control.jobs.unhold(call.caller, job_id, reason, request_id=request_id, indices=indices)
