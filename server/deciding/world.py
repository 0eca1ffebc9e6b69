"""What a decision is made from, and what it can be: the input and output of `decide`.

A world is built by `server.store.worlds` from one snapshot; nothing here reads anything. Cards are counted
in units of 1/840 so that the shares of a card (2 to 8 of them) add up without floats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

UNITS_PER_CARD = 840

SlotKey: TypeAlias = tuple[str, str, int]
"""(host, uuid, share): one slot. A cpu place has the uuid ``cpu``."""

SlotState: TypeAlias = Literal["free", "held", "cleaning", "occupied", "sick", "unverified", "lost"]


@dataclass(frozen=True)
class Slot:
    """One slot as the scheduler sees it. `state` other than free says why it cannot be granted."""

    host: str
    uuid: str
    share: int
    shares: int
    index: int | None
    pool: str
    kind: Literal["gpu", "cpu"]
    memory_mib: int  # of this slot: the card's memory over its shares; 0 for a cpu place
    model: str = ""
    capability: int = 0  # compute capability x 10, 0 when unknown
    state: SlotState = "free"
    lease_id: str | None = None  # who holds it or is being cleaned off it
    reason: str = ""
    mig: bool = False  # one instance of a card that is divided by the driver; a program can use only one of them

    @property
    def key(self) -> SlotKey:
        return (self.host, self.uuid, self.share)

    @property
    def units(self) -> int:
        return UNITS_PER_CARD // self.shares if self.kind == "gpu" else 0


@dataclass(frozen=True)
class HostView:
    """A host. Only one that is up and ready gets new work."""

    name: str
    link: Literal["connecting", "up", "suspect", "lost"] = "up"
    mode: Literal["ready", "draining", "drained", "quarantined", "unclassified", "read_only"] = "ready"
    reason: str = ""
    cpus: int = 0
    memory_mib: int = 0  # what may be booked: the total less a reserve
    disk_mib: int = 0
    driver: str = ""
    cuda: int = 0  # driver's CUDA version x 1000, as NVML gives it; 0 when unknown
    labels: tuple[tuple[str, str], ...] = ()
    max_jobs: int = 0  # leases at once on this host, with cards or without; 0 = as many as fit
    links: tuple[tuple[str, str, int], ...] = ()  # (uuid, uuid, NVLinks between the two cards)


@dataclass(frozen=True)
class Window:
    """When a pool may start something: from `begin_min` to `end_min` (minutes of the day) on these days.

    Monday is 0. An end at or before its begin is on the next day.
    """

    days: tuple[int, ...]
    begin_min: int
    end_min: int


@dataclass(frozen=True)
class PoolRules:
    """A pool's rules. `cap` and `reserve` are cards; None = no cap below the cards there are.

    An agent's grant needs agents' use + ask <= cap - reserve and everybody's use + ask <= cap.
    """

    name: str
    cap: int | None = None
    reserve: int = 0
    order: Literal["fifo", "fairshare", "shortest"] = "fifo"
    default_hours: int = 24
    paused: bool = False
    draining: bool = False
    owner_cap: int | None = None  # cards per owner in this pool
    agent_cap: int | None = None  # cards per agent in this pool
    owner_jobs: int | None = None  # jobs and direct leases at once, per owner
    agent_jobs: int | None = None
    starve_h: int = 24
    set_by: str = "configuration"
    jobs: int | None = None  # jobs and direct leases at once, everybody together
    gpu_hours: int | None = None  # in a rolling 24 h, everybody together
    owner_gpu_hours: int | None = None  # per owner in this pool
    agent_gpu_hours: int | None = None  # per agent in this pool
    windows: tuple[Window, ...] = ()  # when something may start; none = always
    timezone: str = "UTC"  # of the windows, an IANA name
    preempt: Literal["off", "within", "from"] = "off"  # whose work a higher priority here may stop
    preempt_from: tuple[str, ...] = ()  # the other pools, for "from"; this one is then among the victims too
    grace_s: int = 120  # from the notice to TERM, for a save
    idle_s: int = 0  # without progress for so long: a notice; 0 = never
    idle_grace_s: int = 600  # from the notice to taking back
    idle_jobs: bool = False  # take back idle jobs too, not only direct leases
    half_life_h: int = 168  # of past use, for fairshare
    set_by_key: tuple[tuple[str, str], ...] = ()  # (key, who set it) where that is another than `set_by`

    def who_set(self, key: str) -> str:
        """Who set the rule `key`, a field of this class."""
        return next((who for name, who in self.set_by_key if name == key), self.set_by)


@dataclass(frozen=True)
class OwnerRules:
    """Caps of one owner over all pools. None = none."""

    owner: str
    cap: int | None = None
    jobs: int | None = None
    gpu_hours: int | None = None  # in a rolling 24 h
    set_by: str = "configuration"
    no_preempt_until_ms: int = 0  # wasted preemptions took the right to ask for more until then
    max_priority: str | None = None  # a grant above what tokens allow; decides nothing, it is checked when asked for


@dataclass(frozen=True)
class AgentRules:
    """Caps of one caller over all pools. None = none."""

    agent: str
    cap: int | None = None
    jobs: int | None = None
    gpu_hours: int | None = None  # in a rolling 24 h
    set_by: str = "configuration"
    max_priority: str | None = None  # as of an owner


@dataclass(frozen=True)
class Reservation:
    """Cards of a pool that a person booked for an owner from `begin_ms` to `end_ms`."""

    id: str
    pool: str
    owner: str
    cards: int
    begin_ms: int
    end_ms: int
    set_by: str = ""


@dataclass(frozen=True)
class Spent:
    """Card-milliseconds that one caller has used in one pool. What runs counts up to the time of the world."""

    owner: str
    agent: str
    pool: str
    day_ms: int  # in the last 24 h
    decayed_ms: int = 0  # all there is, halved for every half-life of the pool


@dataclass(frozen=True)
class Preemption:
    """A preemption under way: from the notice on its slots are kept for `ask_id`."""

    id: str
    pool: str
    ask_id: str
    victims: tuple[str, ...]  # lease ids
    slots: tuple[SlotKey, ...]
    noticed_ms: int
    stopping: bool = False  # TERM was sent: too late to withdraw


@dataclass(frozen=True)
class Needs:
    """What an ask wants of a host and its cards. Zero or empty = no wish. Hashable: equal needs share one Wait."""

    gpus_min: int = 1
    gpus_max: int = 1
    gpu_memory_mib: int = 0
    models: tuple[str, ...] = ()
    capability: int = 0
    cuda: int = 0
    driver: str = ""
    cpus: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    nodes: int = 1
    exclusive_host: bool = False
    hosts: tuple[str, ...] = ()  # only these
    avoid_hosts: tuple[str, ...] = ()
    avoid_cards: tuple[str, ...] = ()
    prefer_hosts: tuple[str, ...] = ()
    prefer_labels: tuple[tuple[str, str], ...] = ()  # in order, after the hosts
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Ask:
    """Something that waits for slots: a queued job, or a claim made by `acquire_lease(when_full="queue")`."""

    id: str  # job id, or lease id of a claim
    kind: Literal["job", "claim"]
    owner: str
    agent: str  # the caller's name
    human: bool
    pool: str
    needs: Needs
    priority: int
    queued_at_ms: int
    hours_ms: int  # how long it may hold what it gets
    held: str = ""  # not empty: why it is held
    not_before_ms: int = 0  # backing off, or a start window
    resumed: bool = False  # a preempted job on its way back
    own_cap: int = 0  # cards at once that the caller's token allows it over all pools; 0 = not limited by the token
    after: tuple[str, ...] = ()  # job ids that it still waits for
    not_before_why: Literal["backing_off", "start_window"] = "backing_off"
    not_after_ms: int | None = None  # given up when it has not started by then
    default_hours: bool = False  # hours_ms is the pool's default: nobody said how long it takes
    count: int = 1  # equal elements of an array that wait as one; each gets its own Start
    array: str = ""  # the array that it is an element of, or that it is
    array_room: int | None = None  # elements of that array that may still start beside those that run; None = any

    def startable(self, now_ms: int) -> bool:
        """Whether nothing of its own keeps it: no hold, no other job, no time that has not come."""
        return not (self.held or self.after or self.not_before_ms > now_ms)


@dataclass(frozen=True)
class Holding:
    """A living lease, with what it counts for."""

    id: str
    kind: Literal["job", "direct"]
    owner: str
    agent: str
    human: bool
    pool: str
    slots: tuple[SlotKey, ...]
    granted_at_ms: int
    hard_end_ms: int
    expires_ms: int | None = None  # direct leases: end of the ttl
    pickup_ms: int | None = None  # a granted claim that nobody picked up yet
    missed_pickups: int = 0
    job_id: str | None = None
    priority: int = 10
    lost: bool = False  # its host does not answer
    draining: bool = False
    cpus: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    stop_s: int = 10  # the stop ladder, for known ends
    exclusive: bool = False  # nobody else gets anything on its hosts
    array: str = ""
    preemptible: bool = False
    resumable: bool = False
    checkpoint_ms: int | None = None  # when the newest complete checkpoint was written
    writing_ms: int | None = None  # when something was last seen written to its checkpoint directory
    immune_until_ms: int = 0  # preempted too often lately
    stopping: bool = False  # a stop is under way
    suspended: bool = False
    progress_ms: int | None = None  # last sign of work; None = not observed
    idle_notice_ms: int | None = None  # when its holder was told that it is idle


@dataclass(frozen=True)
class World:
    """Everything that a decision may look at. Tuples are in any order; `decide` sorts what it needs."""

    hosts: tuple[HostView, ...] = ()
    slots: tuple[Slot, ...] = ()
    pools: tuple[PoolRules, ...] = ()
    owners: tuple[OwnerRules, ...] = ()
    holdings: tuple[Holding, ...] = ()
    cleaning: tuple[Holding, ...] = ()  # ended leases whose slots are still cleaning: they count for their holder
    asks: tuple[Ask, ...] = ()
    agents: tuple[AgentRules, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    spent: tuple[Spent, ...] = ()


@dataclass(frozen=True)
class Policy:
    """Rules that hold for the whole server."""

    pickup_s: int = 600
    cleaning_s: int = 30  # allowance in known ends
    backfill: bool = True


# ---- blockers ---------------------------------------------------------------------------------

BLOCKERS: dict[str, str] = {
    "held": "a person or the server put the job on hold",
    "dependency": "another job must end first",
    "start_window": "the start window has not come",
    "quota_owner": "the owner's cap on cards is reached",
    "quota_agent": "the agent's cap on cards is reached",
    "quota_pool": "the pool's cap is reached",
    "reserve": "what is left is kept for people",
    "jobs_at_once": "the cap on jobs at once is reached",
    "gpu_hours": "the GPU-hours of the last 24 h are used up",
    "no_such_gpu": "no card in the pool can ever fit",
    "busy": "the cards that fit are in use",
    "behind": "earlier asks of the same queue come first",
    "reserved_for": "the free cards are kept for an ask that came first",
    "host_cpu": "the processors of the hosts that fit are booked",
    "host_memory": "the memory of the hosts that fit is booked",
    "host_disk": "the disk of the hosts that fit is booked",
    "host_cpu_jobs": "the places for jobs without a card are taken",
    "host_limit": "the host's limit is reached",
    "host_policy": "the hosts that fit take no work of this kind",
    "host_down": "the hosts that fit do not answer",
    "host_draining": "the hosts that fit get no new work",
    "host_sick": "the cards that fit are sick",
    "occupied": "somebody unknown uses the cards that fit",
    "queue_paused": "the queue is paused",
    "queue_draining": "the queue is draining",
    "array_limit": "as many elements of the array run as it allows",
    "backing_off": "the job waits before its next attempt",
    "approval": "a person has to approve",
    "provisioning": "a machine is being brought up",
    "backend": "the engine behind the pool gives this reason",
}


@dataclass(frozen=True)
class Blocker:
    """Why an ask does not start now. The first of a list is the main one.

    `numbers` and `names` carry the values (cap, used, wanted; pool, host, owner), `until_ms` the time at which
    it ends by itself where that is known, `helps` what would remove it, in plain words without foreign text.
    Numbers of cards are whole: a part of a card counts up in `used` and `wanted`, down in `free`; the message has it exact.
    """

    code: str
    message: str
    numbers: tuple[tuple[str, int], ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    until_ms: int | None = None
    set_by: str = ""
    helps: str = ""


# ---- decisions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Give these slots to this ask; of an array to its next element that waits, one Start for each."""

    ask_id: str
    kind: Literal["job", "claim"]
    slots: tuple[SlotKey, ...]


@dataclass(frozen=True)
class Wait:
    """These asks wait, all for the same reasons. Asks with equal needs, owner, pool and limits share one."""

    ask_ids: tuple[str, ...]
    blockers: tuple[Blocker, ...]


@dataclass(frozen=True)
class Expire:
    """End this direct lease: its ttl or its hard end has passed, or it was not picked up."""

    lease_id: str
    why: Literal["ttl", "hard_end", "pickup", "pickup_twice"]


@dataclass(frozen=True)
class Drain:
    """Mark this lease: it finishes what it has and gets nothing new."""

    lease_id: str
    why: str


@dataclass(frozen=True)
class Preempt:
    """Stop these leases so that `ask_id` can start on their slots."""

    ask_id: str
    victims: tuple[str, ...]
    slots: tuple[SlotKey, ...]


@dataclass(frozen=True)
class Withdraw:
    """Give a preemption up before TERM: its asker is gone, or fits without it."""

    preemption_id: str
    why: str


@dataclass(frozen=True)
class GiveUp:
    """End this waiting ask: its start window closed before it could start."""

    ask_id: str
    why: str


@dataclass(frozen=True)
class Notice:
    """Tell the holder of this lease that it is idle, who waits for it and what it costs."""

    lease_id: str
    idle_s: int
    waiting: tuple[str, ...]  # ids of the asks that its slots would start


@dataclass(frozen=True)
class Reclaim:
    """Take back an idle lease after a notice."""

    lease_id: str
    idle_s: int


@dataclass(frozen=True)
class Provision:
    """Bring up a machine for this ask."""

    ask_id: str
    provider: str


@dataclass(frozen=True)
class Release:
    """Give a machine back."""

    host: str


Decision: TypeAlias = (
    Start | Wait | Expire | Drain | Preempt | Withdraw | GiveUp | Notice | Reclaim | Provision | Release
)


@dataclass(frozen=True)
class Booking:
    """What backfill keeps for the first ask of a pool that does not fit: these slots, from `at_ms` on."""

    ask_id: str
    at_ms: int
    slots: tuple[SlotKey, ...]


@dataclass(frozen=True)
class Decided:
    """The outcome of one pass: what changes, and when to look again if nothing happens before."""

    decisions: tuple[Decision, ...] = ()
    wake_at_ms: int | None = None
    blockers: dict[str, tuple[Blocker, ...]] = field(default_factory=dict)  # ask id -> why it waits
    bookings: tuple[Booking, ...] = ()
