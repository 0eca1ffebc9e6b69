"""Waiting for a job or a lease: calls of at most 45 s one after the other, over a server's restart, with progress."""

from __future__ import annotations

import sys
import time

from cotenant.ui.cli import show
from cotenant.ui.cli.client import Client, patiently
from cotenant.ui.cli.problems import Problem, Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    from typing import Any

    Answer = dict[str, Any]

JOB_FINAL = ("succeeded", "failed", "cancelled")
LEASE_ENDED = ("released", "expired", "revoked", "withdrawn")
#: One call's wait, as the server bounds it by default.
WAIT_S = 45


class Progress:
    """What is being waited for, on standard error: one line that changes on a terminal, a new line per change elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._begun = time.monotonic()
        self._last = ""

    def __call__(self, text: str) -> None:
        text = show.ours(text).strip()
        if not text:
            return
        if self._live:
            shown = f"{show.span(time.monotonic() - self._begun):>6}  {text}"
            sys.stderr.write("\r\033[K" + shown[: show.columns(sys.stderr) - 1])
            sys.stderr.flush()
        elif text != self._last:
            show.say(text)
        self._last = text

    def done(self) -> None:
        """Leave a clean line behind."""
        if self._live and self._last:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def reason(answer: Answer) -> str:
    """Why it waits, or what it does, in one line."""
    first = next(iter(answer.get("blockers") or ()), None)
    state = str(answer.get("state"))
    if first is None:
        return state
    place = answer.get("queue_position")
    return f"{state}{'' if place is None else f', number {place} in line'}: {first.get('message') or first.get('code')}"


def once(client: Client, object_id: str, wait_s: float, progress: Progress | None) -> Answer:
    """One wait of at most `wait_s` seconds for a job or lease; where it stands then."""
    answer: Answer = patiently(
        lambda: client.call_tool(
            "wait_job", {"job_id": object_id, "max_wait_s": wait_s}, on_progress=progress, wait_s=wait_s
        ),
        say=show.say,
    )
    if progress is not None:
        progress(reason(answer))
    return answer


def for_job(client: Client, job_id: str, *, timeout_s: float | None = None) -> Answer:
    """The job once it is final, or after `timeout_s` as it then is."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    progress = Progress()
    try:
        while True:
            left = WAIT_S if deadline is None else min(WAIT_S, max(0.0, deadline - time.monotonic()))
            job = once(client, job_id, left, progress)
            if "task" not in job:
                raise Usage(f"{job_id} is a lease. Wait for it with: cotenant lease wait {job_id}")
            if job["state"] in JOB_FINAL or (deadline is not None and time.monotonic() >= deadline):
                return job
    finally:
        progress.done()


def for_lease(client: Client, lease_id: str, *, keep: bool = False) -> Answer:
    """A queued claim once it is granted and picked up, with its environment.

    Interrupted, or failed, the claim is withdrawn, since nobody would pick it up; with `keep` it stays in line.

    Raises:
        Problem: the claim ended without a grant.
    """
    progress = Progress()
    try:
        while True:
            lease = once(client, lease_id, WAIT_S, progress)
            if lease["state"] == "leased":
                picked = client.call_tool("heartbeat", {"lease_id": lease_id})
                if picked["state"] in ("leased", "running"):  # and not back in line in this very moment
                    return {
                        **lease,
                        **{k: picked[k] for k in ("state", "expires_at", "expires_in_s", "fence")},
                        "pickup_by": None,
                    }
            elif lease["state"] == "running":
                return lease
            elif lease["state"] in LEASE_ENDED:
                raise Problem(
                    f"The claim {lease_id} ended ({lease['state']}: {lease.get('end_reason') or 'no reason given'})."
                )
    except BaseException:
        progress.done()
        if not keep:
            withdraw(client, lease_id)
        raise
    finally:
        progress.done()


def withdraw(client: Client, lease_id: str) -> None:
    """Give a lease or claim back; a failure is told, not raised: the lease then ends by itself."""
    try:
        client.twin().call_tool("release_lease", {"lease_id": lease_id})
    except Problem as problem:
        if getattr(problem, "code", "") not in ("not_found", "conflict"):
            show.say(f"{lease_id} could not be released and ends by itself: {problem.text}")


def exit_code(job: Answer) -> int:
    """The exit code that a final job stands for: its own, 128 + n for signal n, 1 where there is neither, 0 for success."""
    if job["state"] == "succeeded":
        return 0
    code = job.get("exit_code")
    if code:
        return int(code) if 0 < int(code) < 256 else 1
    ended = [attempt["exit"] for attempt in job.get("attempts") or () if attempt.get("exit")]
    if ended and ended[-1].get("signal"):
        return 128 + int(ended[-1]["signal"])
    return 1
