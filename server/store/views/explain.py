"""Why a job stands where it stands: the values of the last pass, what each host lacks, and what to do about it."""

from __future__ import annotations

from cotenant.server.clock import iso
from cotenant.server.deciding.detail import host_by_host
from cotenant.server.deciding.world import Ask, Blocker, Booking
from cotenant.server.model import advice
from cotenant.server.model import answers as a
from cotenant.server.model.caller import Caller
from cotenant.server.model.states import JOB_FINAL, JOB_WAITING
from cotenant.server.model.text import quoted
from cotenant.server.store.views.base import blocker_answer
from cotenant.server.store.views.jobs import JobViews

#: Hosts that one answer holds; the rest is counted.
HOSTS_MAX = 40


class ExplainViews(JobViews):
    """The read behind explain_job."""

    async def explain_job(self, caller: Caller, job_id: str, *, detail: bool = False) -> a.ExplainAnswer:
        """Where a job stands and why; with `detail` also what each host lacks for one that waits.

        Raises:
            NotFound: no such job.
        """
        job = await self.get_job(caller, job_id)
        hosts, left_out = self._hosts(job.array_id or job.job_id) if detail and job.state in JOB_WAITING else ([], 0)
        return a.ExplainAnswer(
            job_id=job.job_id,
            state=job.state,
            summary=_summary(job),
            blockers=job.blockers,
            queue_position=job.queue_position,
            starts_by=self._starts_by(job),
            attempts=[_attempt(attempt) for attempt in job.attempts],
            next_actions=_next(job),
            hosts=hosts,
            hosts_left_out=left_out,
        )

    def _starts_by(self, job: a.JobAnswer) -> str | None:
        """When it starts at the latest, if nothing more urgent comes: as booked, or when all that is in its way is over."""
        booking: Booking | None = self._c.keeper.bookings.get(job.array_id or job.job_id)
        return _known_ends(job) if booking is None or job.state not in JOB_WAITING else iso(booking.at_ms)

    def _hosts(self, job_id: str) -> tuple[list[a.HostWhy], int]:
        keeper, now = self._c.keeper, self._c.now()
        keeper.refresh(now)
        ask: Ask | None = keeper.waiting.get(job_id)
        if ask is None:
            return [], 0
        found = host_by_host(keeper.world(waiting=False), ask, now, self._c.policy)
        return [_host(name, why) for name, why in found[:HOSTS_MAX]], max(0, len(found) - HOSTS_MAX)


def _host(name: str, why: tuple[Blocker, ...]) -> a.HostWhy:
    return a.HostWhy(name, not why, [blocker_answer(blocker) for blocker in why])


def _known_ends(job: a.JobAnswer) -> str | None:
    """When everything that is in its way is over by itself, where that is known of all of it."""
    ends = [blocker.until for blocker in job.blockers]
    known = [end for end in ends if end is not None]
    return max(known) if known and len(known) == len(ends) else None


def _summary(job: a.JobAnswer) -> str:
    """One sentence, with numbers."""
    if job.state in JOB_FINAL:
        how = f": {job.message}" if job.message else ""
        tries = f" after {len(job.attempts)} attempts" if len(job.attempts) > 1 else ""
        return f"{job.job_id} ended {job.state}{tries}{how}"
    if job.state in JOB_WAITING:
        place = f", number {job.queue_position} of the line" if job.queue_position is not None else ""
        more = f" ({len(job.blockers) - 1} more reasons)" if len(job.blockers) > 1 else ""
        main = f": {job.blockers[0].message}{more}" if job.blockers else ""
        return f"{job.job_id} is {job.state} in pool {quoted(job.pool)}{place}, asked for {_span(job.age_s)} ago{main}"
    where = f" on {quoted(job.host)}" if job.host else ""
    left = f", {_span(job.time_left_s)} of its {job.hours:g} h left" if job.time_left_s is not None else ""
    why = job.stop_reason if job.state == "stopping" else job.held_reason
    return f"{job.job_id} is {job.state}{where}{left}" + (f": {why}" if why else "")


def _span(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _attempt(attempt: a.AttemptAnswer) -> str:
    ended = f", exit code {attempt.exit_code}" if attempt.exit_code is not None else ""
    why = f": {attempt.message}" if attempt.message else ""
    failure = f" ({attempt.failure_class})" if attempt.failure_class else ""
    return f"attempt {attempt.epoch} on {quoted(attempt.host or '?')}: {attempt.state}{ended}{failure}{why}"


def _next(job: a.JobAnswer) -> list[str]:
    if job.state in JOB_FINAL:
        return advice.about_end(job.state, job.failure_class, job=job.job_id)
    if job.state in JOB_WAITING:
        codes = tuple(blocker.code for blocker in job.blockers)
        names = job.blockers[0].names if job.blockers else {}
        return advice.about_waiting(codes, names, job=job.job_id, pool=job.pool)
    return advice.about_living(job.state, job=job.job_id)
