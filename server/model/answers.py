"""What every door shows: frozen views, the same for agents (JSON) and people (pages, tables).

Times are ISO 8601 UTC; beside each stands its age or what is left, in seconds, so that nobody has to compare
clocks. None means "not known" or "does not apply", never 0. Fields only ever get added.
Frozen but without slots: with slots the MCP SDK loses the output schema (measured on mcp 2.3.0).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SlotAnswer:
    """One slot. `index` is the card's number on its host now; `share` is null for a whole card."""

    host: str
    index: int | None
    uuid: str
    share: int | None = None


@dataclass(frozen=True)
class BlockerAnswer:
    """Why something waits. `code` is from a closed list; `helps` says what would remove it."""

    code: str
    message: str
    numbers: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    until: str | None = None
    set_by: str = ""
    helps: str = ""


@dataclass(frozen=True)
class LeaseAnswer:
    """A lease. `env` is there for its own holder only: set it for every process that uses the cards."""

    lease_id: str
    fence: int | None
    state: str  # queued | leased | running | released | expired | revoked | withdrawn
    kind: str  # direct | job
    holder: str
    owner: str
    pool: str
    gpus: int
    slots: list[SlotAnswer]
    purpose: str
    granted_at: str | None
    expires_at: str | None  # direct leases: renew with heartbeat before this
    expires_in_s: int | None
    hard_end_at: str | None  # nothing moves this
    hard_end_in_s: int | None
    hard_end_from: str  # "hours" as asked for, or "pool default"
    draining: bool
    job_id: str | None = None
    pickup_by: str | None = None  # a granted claim must be picked up with heartbeat before this
    ended_at: str | None = None
    end_reason: str | None = None
    blockers: list[BlockerAnswer] = field(default_factory=list)
    env: dict[str, str] | None = None
    near_cap: bool = False
    simulated: bool = False
    deduplicated: bool = False
    cleaning: bool = False  # the lease ended, its slots are not free yet


@dataclass(frozen=True)
class LeaseList:
    leases: list[LeaseAnswer]
    cursor: str | None = None


@dataclass(frozen=True)
class HeartbeatAnswer:
    lease_id: str
    fence: int | None
    state: str
    expires_at: str | None
    expires_in_s: int | None
    hard_end_at: str | None
    draining: bool
    notice: str | None = None


@dataclass(frozen=True)
class PoolQuota:
    """A pool's cards as numbers. `you_can_start` is what this caller may take now."""

    pool: str
    cap: int
    used: int
    reserved: int  # kept for people
    available: int  # for this caller's kind
    you_can_start: int
    free_cards: int
    near_cap: bool
    owner_cap: int | None
    agent_cap: int | None
    waiting: int
    paused: bool
    draining: bool  # what is held finishes, nothing new is given
    order: str
    default_hours: int
    set_by: str
    simulated: bool = False


@dataclass(frozen=True)
class MyQuota:
    name: str
    kind: str
    owner: str
    scopes: list[str]
    used_by_me: int
    used_by_owner: int
    owner_cap: int | None
    running_jobs: int
    waiting_jobs: int
    leases: list[str]
    max_priority: str
    pools: list[str] | None


@dataclass(frozen=True)
class QuotaStatus:
    pools: list[PoolQuota]
    me: MyQuota
    advice: str


@dataclass(frozen=True)
class CardProcessAnswer:
    pid: int
    user: str | None
    program: str | None
    memory_mib: int | None
    lease_id: str | None


@dataclass(frozen=True)
class GpuAnswer:
    """One card. `state`: free | held | cleaning | occupied | sick | lost | unverified | unknown."""

    host: str
    index: int
    uuid: str
    model: str
    pool: str
    memory_mib: int
    memory_used_mib: int | None
    util_pct: int | None
    temperature_c: int | None
    power_w: int | None
    state: str
    reason: str | None
    lease_id: str | None
    holder: str | None
    owner: str | None
    job_id: str | None
    job_name: str | None
    until: str | None  # when the holder must be gone
    shares: int
    simulated: bool
    observed_at: str | None
    age_s: int | None
    processes: list[CardProcessAnswer] = field(default_factory=list)


@dataclass(frozen=True)
class GpuList:
    gpus: list[GpuAnswer]
    free: int
    total: int
    cursor: str | None = None


@dataclass(frozen=True)
class HostAnswer:
    host: str
    link: str  # connecting | up | suspect | lost
    mode: str
    reason: str | None
    gpus: int
    free_gpus: int
    cpus: int | None
    memory_mib: int | None
    memory_available_mib: int | None
    disk_free_mib: int | None
    load_1m: float | None
    driver: str | None
    cuda: str | None
    nvml: str | None
    nvml_message: str | None
    isolation: str
    simulated: bool
    observed_at: str | None
    age_s: int | None
    cpu_places: int = 0
    cpu_places_free: int = 0


@dataclass(frozen=True)
class HostList:
    hosts: list[HostAnswer]


@dataclass(frozen=True)
class QueueEntry:
    id: str  # job id, or lease id of a claim
    kind: str  # job | claim
    name: str
    holder: str
    owner: str
    gpus: int
    priority: str
    waiting_s: int
    blocker: str
    why: str = ""  # the main blocker's sentence
    starts_by: str | None = None  # of the one that cards are booked for: when they are free at the latest


@dataclass(frozen=True)
class ReservationAnswer:
    """Cards that a person booked for an owner."""

    id: str
    owner: str
    cards: int
    begins_at: str
    ends_at: str
    set_by: str


@dataclass(frozen=True)
class QueueAnswer:
    """A waiting line. Cards are whole ones; `reserved` are kept for people."""

    pool: str
    order: str
    paused: bool
    draining: bool  # what is held finishes, nothing new is given
    running: int
    waiting: int
    entries: list[QueueEntry]
    cap: int = 0
    used: int = 0
    reserved: int = 0
    set_by: str = ""
    reservations: list[ReservationAnswer] = field(default_factory=list)


@dataclass(frozen=True)
class QueueList:
    queues: list[QueueAnswer]


@dataclass(frozen=True)
class AgentAnswer:
    name: str
    kind: str
    owner: str
    online: bool  # seen within two minutes
    last_seen_at: str | None
    age_s: int | None
    client: str | None  # program and version, in its own words
    host: str | None  # the machine where it sits, as it says; of those that come through `cotenant mcp-stdio`
    cwd: str | None  # the directory where it works, as it says; null where you may not see inside its work
    leases: int
    gpus: int
    running_jobs: int
    waiting_jobs: int


@dataclass(frozen=True)
class AgentList:
    agents: list[AgentAnswer]


@dataclass(frozen=True)
class TaskAnswer:
    """A handle in the words of MCP tasks. Ask again after `poll_interval_ms`."""

    id: str
    status: str  # working | input_required | completed | failed | cancelled
    poll_interval_ms: int
    ttl_ms: int | None


@dataclass(frozen=True)
class ExitAnswer:
    """How an attempt ended: exactly one of code, signal, exec_error."""

    code: int | None
    signal: int | None
    exec_error: str | None
    sender: str | None
    reason: str | None
    cpu_s: float
    peak_memory_mib: int
    peak_card_memory_mib: dict[str, int]
    duration_s: float
    signal_name: str | None = None  # SIGKILL for 9


@dataclass(frozen=True)
class RankAnswer:
    """The part of an attempt that runs on one of several hosts."""

    rank: int
    host: str
    state: str  # intended | starting | ready | running | stopping | lost | ended
    exit_code: int | None
    failure_class: str | None
    message: str | None


@dataclass(frozen=True)
class AttemptAnswer:
    attempt_id: str
    epoch: int
    fence: int | None
    lease_id: str | None
    state: str  # intended | starting | running | stopping | lost | ended
    exit_code: int | None
    host: str | None
    slots: list[SlotAnswer]
    started_at: str | None
    ended_at: str | None
    exit: ExitAnswer | None
    failure_class: str | None  # oom | gpu | host | signal | time_limit | code | start | lost | preempted
    message: str | None
    ranks: list[RankAnswer] = field(default_factory=list)  # of a job over several hosts
    resumed_from: str | None = None  # the checkpoint that it went on from


@dataclass(frozen=True)
class ParamAnswer:
    """A parameter of a template. One that is not required and has no default is an empty text."""

    name: str
    type: str  # int | float | str | bool | choice
    description: str
    required: bool
    default: str | int | float | bool | None
    min: float | None
    max: float | None
    pattern: str | None  # what the whole text must match
    choices: list[str | int | float | bool] | None


@dataclass(frozen=True)
class TemplateAnswer:
    """A template of jobs: submit_job(template=name, params={…}) fills `job` in. All of it is text that a person wrote."""

    name: str
    description: str
    params: list[ParamAnswer]
    job: dict[str, Any]


@dataclass(frozen=True)
class TemplateList:
    templates: list[TemplateAnswer]
    broken: dict[str, str]  # files that are no templates: what is wrong, and in which line


@dataclass(frozen=True)
class AfterAnswer:
    """Something that must end first: a job, an element, or elements of an array (JOB.0-9)."""

    job: str
    when: str  # ok | any | failed
    met: bool


@dataclass(frozen=True)
class ArrayAnswer:
    """How the elements of an array stand. Element i is job JOB_ID.i, also before it starts."""

    size: int  # indices are 0 to size-1
    indices: str  # of this array: all, or those that are tried again, as 3-9,12
    pending: int  # not started, or in the queue again
    held: int
    running: int
    succeeded: int
    failed: int
    cancelled: int
    max_parallel: int | None


@dataclass(frozen=True)
class CheckpointAnswer:
    """The newest complete checkpoint of a job. `skipped` names newer ones that are not complete, with the reason."""

    path: str | None
    size_bytes: int | None
    age_s: int | None
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PreemptionAnswer:
    """A stop for a higher priority, or an eviction: notice, save, stop. The same row stands in both jobs."""

    preemption_id: str
    reason: str  # preempt | evict
    state: str  # noticed | stopping | done | withdrawn
    role: str  # victim | asker
    victim: str  # job id
    asker: str | None  # job id, or lease id of a claim
    why: str
    slots: list[SlotAnswer]
    noticed_at: str
    stop_by: str | None  # when the grace ends, while it runs
    saved: bool  # a complete checkpoint newer than the notice
    checkpoint: str | None  # what the victim goes on from; null for callers who may not look inside
    grace_s: int
    grace_used_s: int | None
    lost_s: int | None  # seconds of work since that checkpoint
    outcome: str | None


@dataclass(frozen=True)
class SaveAnswer:
    """`status`: noticed (it was told, no new checkpoint yet), saved, not_saved (none came in time)."""

    job_id: str
    attempt_id: str
    notice_id: str
    status: str
    told: bool  # its host has given it the notice
    checkpoint: str | None = None


@dataclass(frozen=True)
class JobAnswer:
    """A job. Fields from `command` to `workdir` are null for callers who may not look inside."""

    job_id: str
    state: str
    name: str
    purpose: str
    holder: str
    owner: str
    pool: str
    priority: str
    gpus: int
    task: TaskAnswer
    submitted_at: str
    age_s: int
    started_at: str | None
    ended_at: str | None
    running_s: int | None
    hours: float
    hours_from: str  # "hours" as asked for, or "pool default"
    time_left_s: int | None
    host: str | None
    slots: list[SlotAnswer]
    exit_code: int | None
    failure_class: str | None
    message: str | None  # what happened, in our words
    attempts: list[AttemptAnswer]
    attempts_left: int
    blockers: list[BlockerAnswer]
    stop_reason: str | None
    held_reason: str | None
    project: str
    experiment: str
    kind: str
    labels: dict[str, str]
    command: str | None
    workdir: str | None
    env_names: list[str] | None
    config: dict[str, Any] | None
    log_tail: list[str] | None = None  # of a failed job: the last lines of its stderr, or else of its stdout
    simulated: bool = False
    deduplicated: bool = False
    near_cap: bool = False
    queue_position: int | None = None
    checkpoint: dict[str, Any] | None = None  # CheckpointAnswer; its schema would be long
    idle_notice: str | None = None  # nothing is seen of its work while others wait
    preemptions: list[dict[str, Any]] = field(default_factory=list)  # PreemptionAnswer; its schema would be long
    spec: dict[str, Any] | None = None  # in a dry run: the resolved spec
    dry_run: bool = False
    would_start: bool | None = None  # in a dry run
    suspended_s: int = 0  # how long its newest attempt stood still; the time limit stood still too
    array: ArrayAnswer | None = None  # of an array
    array_id: str | None = None  # of an element its array
    array_index: int | None = None
    retry_of: str | None = None  # the job that this one tries again
    nodes: int = 1  # hosts; while it waits, gpus is for each of them
    after: list[AfterAnswer] = field(default_factory=list)  # what must end first
    not_before: str | None = None  # start window
    not_after: str | None = None


@dataclass(frozen=True)
class HostWhy:
    """What one host lacks for a job. `fits`: it would do now; then caps, the queue or those before it are in the way."""

    host: str
    fits: bool
    blockers: list[BlockerAnswer]


@dataclass(frozen=True)
class ExplainAnswer:
    """Why a job stands where it stands. `blockers` are the very values that the last pass decided with."""

    job_id: str
    state: str
    summary: str
    blockers: list[BlockerAnswer]
    queue_position: int | None  # 1 = next
    starts_by: str | None  # when all that is in its way ends by itself, where that is known of all of it
    attempts: list[str]
    next_actions: list[str]
    hosts: list[HostWhy] = field(default_factory=list)  # with detail
    hosts_left_out: int = 0


@dataclass(frozen=True)
class EstimateAnswer:
    """When something starts, from the present world run forward. Null where nobody can know."""

    job_id: str | None
    wait_s: int | None  # until likely_at
    earliest_at: str | None
    likely_at: str | None
    latest_at: str | None
    basis: list[str]
    record: str  # how past forecasts came true


@dataclass(frozen=True)
class SuggestAnswer:
    """What to ask for. Null where there is nothing to base it on."""

    runs: int  # like it, that have ended
    gpus: int | None
    gpu_memory_mib: int | None
    memory_mib: int | None
    hours: float | None
    pool: str
    free_cards: int  # that you could take there now
    basis: list[str]


@dataclass(frozen=True)
class JobRow:
    """A job in a list."""

    job_id: str
    state: str
    name: str
    holder: str
    owner: str
    pool: str
    priority: str
    gpus: int
    host: str | None
    submitted_at: str
    age_s: int
    running_s: int | None
    exit_code: int | None
    blocker: str | None
    failure_class: str | None = None  # as in get_job; null for callers who may not look inside
    message: str | None = None  # of an ended job: how it ended; null for callers who may not look inside
    array: ArrayAnswer | None = None  # of an array, which is one row: list_jobs(array=JOB) has its elements
    array_index: int | None = None  # of an element


@dataclass(frozen=True)
class JobList:
    jobs: list[JobRow]
    cursor: str | None
    total: int


@dataclass(frozen=True)
class LogAnswer:
    """Log lines, whole ones only. Give `cursor` back to go on where this ends; `more` says that some are there already."""

    job_id: str
    attempt_id: str | None
    stream: str
    lines: list[str]
    cursor: str | None
    more: bool
    final: bool  # the attempt is over and nothing follows
    truncated_before: bool  # older lines were rotated away or cut by the limit
    note: str | None = None  # what this answer does not show: that the attempt failed, and that stderr holds lines


@dataclass(frozen=True)
class CancelAnswer:
    """`status`: cancelled | stopping | already_final | confirmation_required | not_cancelled."""

    job_id: str
    status: str
    state: str
    message: str
    confirm_token: str | None = None
    confirm_by: str | None = None


@dataclass(frozen=True)
class SignalAnswer:
    job_id: str
    attempt_id: str
    signal: str
    delivered: bool


@dataclass(frozen=True)
class EventAnswer:
    """One thing that happened. `old`, `new` and `args` hold foreign text as data."""

    id: int
    at: str
    type: str
    severity: str
    caller: str
    owner: str
    door: str
    job_id: str | None
    attempt_id: str | None
    run_id: str | None
    lease_id: str | None
    host: str | None
    pool: str | None
    old: str | None
    new: str | None
    reason: str | None
    args: dict[str, Any]


@dataclass(frozen=True)
class EventList:
    events: list[EventAnswer]
    cursor: str
