"""Everything at one look, as the page, `cotenant top` and the resource `cotenant://overview` show it.

The same rules as for all answers (answers.py): frozen, times in UTC with an age, None for "not known", never 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.server.model.answers import BlockerAnswer, EventAnswer, GpuAnswer, HostAnswer, MyQuota, SlotAnswer


@dataclass(frozen=True)
class PoolNow:
    """A pool in numbers of cards. `known` is false while a host of it does not answer: `free` is then what is known to be."""

    pool: str
    cards: int
    free: int
    known: bool
    cap: int
    used: int
    reserved: int
    running: int  # jobs and direct leases that hold something
    waiting: int
    paused: bool
    near_cap: bool
    simulated: bool


@dataclass(frozen=True)
class Work:
    """What holds cards or a place now: a job with an attempt, or a direct lease (its `name` is its purpose)."""

    id: str
    kind: str  # job | lease
    state: str
    name: str
    holder: str
    owner: str
    pool: str
    priority: str
    gpus: int
    host: str | None
    slots: list[SlotAnswer]
    since: str | None  # the command's start, or the lease's grant; null: not started yet
    for_s: int | None
    until: str | None  # it must be gone by then; a direct lease ends earlier without a heartbeat
    left_s: int | None
    draining: bool
    simulated: bool
    purpose: str = ""  # of a job: why


@dataclass(frozen=True)
class Waiter:
    """What waits: a job or a claim. `blocker` is the first reason why."""

    id: str
    kind: str  # job | claim
    state: str
    name: str
    holder: str
    owner: str
    pool: str
    priority: str
    gpus: int
    since: str
    waiting_s: int
    blocker: BlockerAnswer | None
    purpose: str = ""


@dataclass(frozen=True)
class FailureCount:
    """Failed jobs of one class; null where the caller may not see the class."""

    failure_class: str | None
    count: int


@dataclass(frozen=True)
class Ended:
    """Jobs that ended since `since`."""

    since: str
    succeeded: int
    failed: int
    cancelled: int
    failures: list[FailureCount]


@dataclass(frozen=True)
class Alert:
    """Something that a person should look at. `what` is our sentence, `reason` may quote a driver or a person."""

    severity: str  # warning | critical
    about: str
    what: str
    reason: str | None


@dataclass(frozen=True)
class Overview:
    """`at` is when this was read; each card and host says itself when it was observed. Lists are cut, totals are not.

    `headline` is the whole in one sentence, and changes only when something that counts has changed.
    """

    at: str
    headline: str
    alerts: list[Alert]
    me: MyQuota
    pools: list[PoolNow]
    gpus: list[GpuAnswer]
    gpus_free: int
    gpus_total: int
    gpus_stale: list[str]  # UUIDs of cards that may look otherwise by now
    hosts: list[HostAnswer]
    working: list[Work]
    working_total: int
    waiting: list[Waiter]
    waiting_total: int
    ended: Ended
    events: list[EventAnswer]  # newest first
