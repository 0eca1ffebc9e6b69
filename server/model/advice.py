"""What a caller can do about a blocker or an end, as tool calls. In our own words: what others wrote stands nowhere in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cotenant.server.model.text import quoted

_WAIT: Final = "wait_job(job_id={job}): it starts by itself."
_PERSON: Final = "Ask a person; nothing that you can call changes it."
#: By blocker code. `{job}` is the job's id, `{pool}` its pool, `{other}` what it waits for.
_WAITING: Final[dict[str, tuple[str, ...]]] = {
    "held": ("release_job(job_id={job}) lets it queue again, if what it was held for is over.",),
    "dependency": ("wait_job(job_id={other}): its end is what this waits for.",),
    "start_window": (_WAIT,),
    "backing_off": (_WAIT, "get_job(job_id={job}) says why the attempt before failed."),
    "quota_owner": ("quota_status shows the cap and what is used.", "release_lease or cancel_job what is no longer used; or " + _WAIT),
    "quota_agent": ("quota_status shows the cap and what is used.", "release_lease or cancel_job what is no longer used; or " + _WAIT),
    "quota_pool": (_WAIT, "quota_status names pools with room: modify_job(job_id={job}, pool=…)."),
    "reserve": ("quota_status names pools with room: modify_job(job_id={job}, pool=…).", _WAIT),
    "jobs_at_once": (_WAIT, "list_jobs(state=\"active\") shows what counts; cancel_job what is not needed."),
    "gpu_hours": (_WAIT, "Fewer hours or cards count less: modify_job(job_id={job}, hours=…)."),
    "no_such_gpu": ("list_gpus(pool={pool}) shows what there is.", "modify_job(job_id={job}, …) to needs that a card there meets, or cancel_job."),
    "busy": (_WAIT, "modify_job(job_id={job}, gpus=…) if fewer cards will do."),
    "behind": (_WAIT, "list_queues(pool={pool}) shows who is before it."),
    "reserved_for": (_WAIT, "hours lets a short job pass: modify_job(job_id={job}, hours=…)."),
    "host_cpu": ("modify_job(job_id={job}, cpus=…) if fewer will do.", _WAIT),
    "host_memory": ("modify_job(job_id={job}, memory_mib=…) if less will do.", _WAIT),
    "host_disk": ("modify_job(job_id={job}, disk_mib=…) if less will do.", _WAIT),
    "host_cpu_jobs": (_WAIT,),
    "host_limit": (_WAIT,),
    "host_policy": ("list_hosts says what the hosts take.", _PERSON),
    "host_down": ("list_hosts says since when and why; it starts by itself when the link is back.",),
    "host_draining": ("modify_job(job_id={job}, pool=…) where another pool has room.", _WAIT),
    "host_sick": ("list_gpus(pool={pool}) says what is wrong.", _PERSON),
    "occupied": ("list_gpus(pool={pool}) says who is on the cards.", _PERSON),
    "queue_paused": ("Ask a person to resume the queue, or modify_job(job_id={job}, pool=…).",),
    "queue_draining": ("modify_job(job_id={job}, pool=…): this queue starts nothing new.",),
    "array_limit": (_WAIT,),
    "approval": (_PERSON,),
    "provisioning": (_WAIT,),
}  # fmt: skip
_LIVING: Final[dict[str, tuple[str, ...]]] = {
    "running": ("tail_logs(job_id={job}) shows what it prints.", "wait_job(job_id={job}) tells its end."),
    "suspended": ("release_job(job_id={job}) lets it go on.", "cancel_job gives its cards back."),
    "stopping": ("wait_job(job_id={job}) tells when its processes are gone.",),
    "lost": ("list_hosts shows its host.", "Wait: nobody knows whether it runs. Do not submit it elsewhere."),
    "deploying": ("wait_job(job_id={job}); it is being started.",),
    "provisioning": ("wait_job(job_id={job}); a machine is being brought up.",),
}
_ENDED: Final[dict[str, tuple[str, ...]]] = {
    "code": ('tail_logs(job_id={job}, stream="err") shows the error; mend it, then submit_job anew.',),
    "oom": ("Make it smaller, or submit_job with more memory_mib or gpu_memory_mib.",),
    "time_limit": ("submit_job with more hours, from a checkpoint where it has one.",),
    "gpu": ("retry_job(job_id={job}): the card was at fault.",),
    "host": ("retry_job(job_id={job}): the host was at fault.",),
    "lost": ("retry_job(job_id={job}): its host lost it.",),
    "start": ("get_job(job_id={job}) says why it could not start; mend command or workdir, then submit_job anew.",),
    "signal": ("list_events(job_id={job}) says who stopped it.",),
    "preempted": ("list_events(job_id={job}) says for whom it was stopped; retry_job runs it again.",),
}


def about_waiting(codes: tuple[str, ...], names: Mapping[str, str], *, job: str, pool: str) -> list[str]:
    """What to do about these blockers, the main one first. `names` are those of the main one."""
    other = names.get("job") or names.get("ahead") or ""
    said = [step for code in codes for step in _WAITING.get(code, (_WAIT,))]
    return _filled(said, job=job, pool=pool, other=other)


def about_living(state: str, *, job: str) -> list[str]:
    """What to do with a job that has an attempt."""
    return _filled(list(_LIVING.get(state, ())), job=job)


def about_end(state: str, failure_class: str | None, *, job: str) -> list[str]:
    """What to do after its end."""
    if state == "cancelled":
        return _filled(
            ["list_events(job_id={job}) says who cancelled it.", "retry_job(job_id={job}) runs it again."], job=job
        )
    return _filled(list(_ENDED.get(failure_class or "", ())), job=job)


def _filled(said: list[str], *, job: str, pool: str = "", other: str = "") -> list[str]:
    values = {"{job}": quoted(job), "{pool}": quoted(pool), "{other}": quoted(other)}
    out = []
    for step in dict.fromkeys(said):
        for mark, value in values.items():
            step = step.replace(mark, value)
        out.append(step)
    return out[:6]
