"""States of jobs, leases, slots and attempts, and which may follow which. docs/states.md draws them.

A move that is not in these tables is a mistake of ours and is refused by the store.
"""

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is. `SUCCEEDED`, `FAILED` and `CANCELLED` are final."""

    HELD = "held"
    QUEUED = "queued"
    PROVISIONING = "provisioning"
    DEPLOYING = "deploying"
    RUNNING = "running"
    SUSPENDED = "suspended"
    STOPPING = "stopping"
    PREEMPTED = "preempted"
    LOST = "lost"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class LeaseState(StrEnum):
    """Where a lease is. `QUEUED` is a claim that waits; `LEASED` and `RUNNING` hold slots; the rest is final."""

    QUEUED = "queued"
    LEASED = "leased"
    RUNNING = "running"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"
    WITHDRAWN = "withdrawn"


class SlotUse(StrEnum):
    """What a row of lease_slot says: the lease holds the slot, or it is being cleaned, or it is free again."""

    HELD = "held"
    CLEANING = "cleaning"
    OCCUPIED = "occupied"
    FREED = "freed"


class AttemptState(StrEnum):
    """Where one try of a job is. `INTENDED` is on disk before any host is asked."""

    INTENDED = "intended"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    LOST = "lost"
    ENDED = "ended"


class LinkState(StrEnum):
    """How the server stands with a host."""

    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"
    LOST = "lost"


JOB_FINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
#: An attempt exists and may have a process.
JOB_ACTIVE = frozenset(
    {JobState.PROVISIONING, JobState.DEPLOYING, JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPING, JobState.LOST}
)
JOB_WAITING = frozenset({JobState.HELD, JobState.QUEUED, JobState.PREEMPTED})

_ENDS = JOB_FINAL
#: Which states may follow which. `lost` is left when the host speaks again, or a person abandons the job.
JOB_NEXT: dict[JobState, frozenset[JobState]] = {
    JobState.HELD: frozenset({JobState.QUEUED, JobState.CANCELLED, JobState.FAILED}),
    JobState.QUEUED: frozenset(
        {JobState.HELD, JobState.PROVISIONING, JobState.DEPLOYING, JobState.CANCELLED, JobState.FAILED}
    ),
    JobState.PROVISIONING: frozenset(
        {JobState.DEPLOYING, JobState.STOPPING, JobState.QUEUED, JobState.HELD, JobState.LOST} | _ENDS
    ),
    JobState.DEPLOYING: frozenset(
        {JobState.RUNNING, JobState.STOPPING, JobState.QUEUED, JobState.HELD, JobState.LOST} | _ENDS
    ),
    JobState.RUNNING: frozenset(
        {JobState.SUSPENDED, JobState.STOPPING, JobState.LOST, JobState.QUEUED, JobState.HELD} | _ENDS
    ),
    JobState.SUSPENDED: frozenset(
        {JobState.RUNNING, JobState.STOPPING, JobState.LOST, JobState.QUEUED, JobState.HELD} | _ENDS
    ),
    JobState.STOPPING: frozenset({JobState.PREEMPTED, JobState.QUEUED, JobState.HELD, JobState.LOST} | _ENDS),
    JobState.PREEMPTED: frozenset({JobState.QUEUED, JobState.HELD, JobState.CANCELLED, JobState.FAILED}),
    JobState.LOST: frozenset({JobState.RUNNING, JobState.STOPPING, JobState.QUEUED, JobState.HELD} | _ENDS),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

LEASE_HOLDING = frozenset({LeaseState.LEASED, LeaseState.RUNNING})
LEASE_FINAL = frozenset({LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.REVOKED, LeaseState.WITHDRAWN})
LEASE_NEXT: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.QUEUED: frozenset({LeaseState.LEASED, LeaseState.WITHDRAWN, LeaseState.EXPIRED}),
    # back to queued: granted, but not picked up in time; it keeps its place
    LeaseState.LEASED: frozenset({LeaseState.RUNNING, LeaseState.QUEUED} | LEASE_FINAL),
    LeaseState.RUNNING: frozenset({LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.REVOKED}),
    LeaseState.RELEASED: frozenset(),
    LeaseState.EXPIRED: frozenset(),
    LeaseState.REVOKED: frozenset(),
    LeaseState.WITHDRAWN: frozenset(),
}

#: The words of MCP tasks for a job's state.
TASK_STATUS: dict[JobState, str] = {
    **dict.fromkeys(JobState, "working"),
    JobState.SUCCEEDED: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}

PRIORITIES: dict[str, int] = {"critical": 30, "high": 20, "normal": 10, "batch": 0}
