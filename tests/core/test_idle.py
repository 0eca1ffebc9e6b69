"""Idle leases: who is told, who is taken back, and who is left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.world import (
    Ask,
    Holding,
    HostView,
    Needs,
    Notice,
    Policy,
    PoolRules,
    Reclaim,
    Slot,
    World,
)

NOW = 1_800_000_000_000
POLICY = Policy()
CARDS = tuple(Slot("h", f"c{n}", 0, 1, n, "main", "gpu", 80_000) for n in range(2))
POOL = PoolRules("main", idle_s=600, idle_grace_s=60)


def lease(idle_s: int | None = 700, **more: Any) -> Holding:
    values: dict[str, Any] = {
        "kind": "direct", "owner": "bob", "agent": "bob-bot", "human": False, "pool": "main", "slots": (CARDS[0].key,),
        "granted_at_ms": NOW - 3_600_000, "hard_end_ms": NOW + 3_600_000, "expires_ms": NOW + 600_000,
        "progress_ms": None if idle_s is None else NOW - idle_s * 1000,
    }  # fmt: skip
    return Holding(**{"id": "l", **values, **more})


def world(one: Holding, *, waits: bool = True, gpus: int = 1, pool: PoolRules = POOL) -> World:
    other = lease(0, id="m", slots=(CARDS[1].key,))
    slots = tuple(replace(card, state="held", lease_id=who) for card, who in zip(CARDS, ("l", "m"), strict=True))
    asks = (
        (Ask("a", "job", "alice", "alice-bot", False, "main", Needs(gpus, gpus), 10, NOW, 3_600_000),) if waits else ()
    )
    return World((HostView("h"),), slots, (pool,), holdings=(one, other), asks=asks)


def outcome(here: World) -> list[Any]:
    return [d for d in decide(here, NOW, POLICY).decisions if isinstance(d, (Notice, Reclaim))]


TOLD = {"idle_notice_ms": NOW - 61_000}
JOB = {"kind": "job", "expires_ms": None, "job_id": "j"}

TABLE: dict[str, tuple[World, list[Any]]] = {
    "told first, with who waits": (world(lease()), [Notice("l", 700, ("a",))]),
    "taken back after the grace": (world(lease(**TOLD)), [Reclaim("l", 700)]),
    "not before the grace is over": (world(lease(idle_notice_ms=NOW - 59_000)), []),
    "a notice from before the last sign of work counts for nothing": (
        world(lease(idle_notice_ms=NOW - 800_000)),
        [Notice("l", 700, ("a",))],
    ),
    "not before its time": (world(lease(599)), []),
    "nobody waits": (world(lease(**TOLD), waits=False), []),
    "its card would help nobody": (world(lease(**TOLD), gpus=2), []),
    "nothing was ever observed": (world(lease(None, **TOLD)), []),
    "the pool does not ask": (world(lease(**TOLD), pool=PoolRules("main")), []),
    "a job is told": (world(lease(**JOB)), [Notice("l", 700, ("a",))]),
    "and left alone": (world(lease(**JOB, **TOLD)), []),
    "unless its pool takes jobs back": (
        world(lease(**JOB, **TOLD), pool=replace(POOL, idle_jobs=True)),
        [Reclaim("l", 700)],
    ),
    "one that is not picked up yet has its own deadline": (world(lease(pickup_ms=NOW + 5)), []),
    "one that sleeps, ends or is lost": (world(lease(suspended=True)), []),
    "just granted": (world(lease(granted_at_ms=NOW - 5000)), []),
}


@pytest.mark.parametrize("what", TABLE)
def test_idle(what: str) -> None:
    here, expected = TABLE[what]
    assert outcome(here) == expected


def test_it_looks_again_when_somebody_becomes_idle_and_when_a_grace_ends() -> None:
    assert decide(world(lease(590)), NOW, POLICY).wake_at_ms == NOW + 10_000
    assert decide(world(lease(idle_notice_ms=NOW - 59_000)), NOW, POLICY).wake_at_ms == NOW + 1000
