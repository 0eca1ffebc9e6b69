"""Preemption: whom it stops, whom it spares, and what it never does."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.preempt import WRITING_MS
from cotenant.server.deciding.world import (
    Ask,
    Decided,
    Holding,
    HostView,
    Needs,
    OwnerRules,
    Policy,
    PoolRules,
    Preempt,
    Preemption,
    Slot,
    Start,
    Wait,
    Withdraw,
    World,
)

NOW = 1_800_000_000_000
HOUR = 3_600_000
POLICY = Policy()


def cards(host: str, count: int, *, pool: str = "main") -> tuple[Slot, ...]:
    return tuple(Slot(host, f"{host}-c{n}", 0, 1, n, pool, "gpu", 80_000) for n in range(count))


def job(lease_id: str, *slots: Slot, **more: Any) -> Holding:
    values: dict[str, Any] = {
        "kind": "job", "owner": "bob", "agent": "bob-bot", "human": False, "pool": "main", "granted_at_ms": NOW - HOUR,
        "hard_end_ms": NOW + HOUR, "priority": 0, "preemptible": True, "resumable": True, "job_id": f"job-{lease_id}",
    }  # fmt: skip
    return Holding(lease_id, slots=tuple(s.key for s in slots), **{**values, **more})


def ask(
    ask_id: str = "a", gpus: int = 1, priority: int = 20, *, needs: dict[str, Any] | None = None, **more: Any
) -> Ask:
    values: dict[str, Any] = {"owner": "alice", "agent": "alice-bot", "human": False, "pool": "main", **more}
    wish = Needs(**{"gpus_min": gpus, "gpus_max": gpus, **(needs or {})})
    return Ask(
        ask_id,
        "job",
        needs=wish,
        priority=priority,
        queued_at_ms=values.pop("queued_at_ms", NOW),
        hours_ms=HOUR,
        **values,
    )


def world(
    slots: tuple[Slot, ...], leases: tuple[Holding, ...], *asks: Ask, pool: dict[str, Any] | None = None, **more: Any
) -> World:
    hosts = tuple(HostView(name, cpus=8) for name in sorted({slot.host for slot in slots}))
    taken = {key: lease.id for lease in leases for key in lease.slots}
    seen = tuple(replace(s, state="held", lease_id=taken[s.key]) if s.key in taken else s for s in slots)
    rules = more.pop("pools", (PoolRules("main", preempt="within", **(pool or {})),))
    return World(hosts, seen, rules, holdings=leases, asks=asks, **more)


def without(here: World, victims: list[Holding]) -> World:
    """The world once these leases have ended and their slots are clean; nobody else asks in it."""
    gone = {lease.id for lease in victims}
    keys = {key for lease in victims for key in lease.slots}
    return replace(
        here,
        asks=(),
        holdings=tuple(lease for lease in here.holdings if lease.id not in gone),
        slots=tuple(replace(s, state="free", lease_id=None) if s.key in keys else s for s in here.slots),
    )


def preempted(here: World) -> list[tuple[str, ...]]:
    return [d.victims for d in decide(here, NOW, POLICY).decisions if isinstance(d, Preempt)]


H1 = cards("h1", 4)
FULL = tuple(job(f"l{n}", H1[n]) for n in range(4))


def changed(n: int, **more: Any) -> tuple[Holding, ...]:
    return tuple(replace(lease, **more) if lease.id == f"l{n}" else lease for lease in FULL)


TABLE: dict[str, tuple[World, list[tuple[str, ...]]]] = {
    "one victim for one card, the first by id of equals": (world(H1, FULL, ask()), [("l0",)]),
    "the least lost work": (world(H1, changed(2, checkpoint_ms=NOW - 60_000), ask()), [("l2",)]),
    "the lowest priority before the least lost work": (
        world(
            H1,
            tuple(replace(v, priority=10, checkpoint_ms=NOW - 60_000) for v in FULL[:3]) + FULL[3:],
            ask(),
        ),
        [("l3",)],
    ),
    "the fewest victims before their priority": (
        world(H1, (job("wide", *H1[:2], priority=10), job("l2", H1[2]), job("l3", H1[3])), ask(gpus=2)),
        [("wide",)],
    ),
    "only as many as are missing": (world(H1, FULL[:3], ask(gpus=2)), [("l0",)]),
    "on one host, where one host is asked for": (
        world((*cards("h1", 1), *cards("h2", 2)), (job("x", *cards("h1", 1)), job("y", *cards("h2", 2)[:1]), job("z", *cards("h2", 2)[1:])), ask(gpus=2)),
        [("y", "z")],
    ),
    "nobody where the pool says off": (world(H1, FULL, ask(), pools=(PoolRules("main"),)), []),
    "nobody of the same priority": (world(H1, FULL, ask(priority=0)), []),
    "nobody who cannot resume": (world(H1, tuple(replace(v, resumable=False) for v in FULL), ask()), []),
    "nobody who may not be preempted": (world(H1, tuple(replace(v, preemptible=False) for v in FULL), ask()), []),
    "nobody of another pool": (world(H1, tuple(replace(v, pool="side") for v in FULL), ask()), []),
    "somebody of another pool where the pool names it": (
        world(
            H1,
            tuple(replace(v, pool="side") for v in FULL),
            ask(),
            pools=(PoolRules("main", preempt="from", preempt_from=("side",)), PoolRules("side")),
        ),
        [("l0",)],
    ),
    "nobody who wrote to his checkpoints a moment ago": (world(H1, changed(0, writing_ms=NOW - 1000), ask()), [("l1",)]),
    "nobody who was preempted too often": (world(H1, changed(0, immune_until_ms=NOW + 1), ask()), [("l1",)]),
    "nobody who ends already, sleeps or is lost": (
        world(H1, (replace(FULL[0], stopping=True), replace(FULL[1], suspended=True), replace(FULL[2], lost=True), FULL[3]), ask()),
        [("l3",)],
    ),
    "nobody for an owner who lost the right": (
        world(H1, FULL, ask(), owners=(OwnerRules("alice", no_preempt_until_ms=NOW + 1),)),
        [],
    ),
    "nobody for one who waits for his own cap": (world(H1, FULL, ask(), pool={"owner_cap": 0}), []),
    "nobody for one who is held": (world(H1, FULL, ask(held="by a person")), []),
    "nobody when it does not suffice": (world(H1, (*FULL[:2], replace(FULL[2], preemptible=False), FULL[3]), ask(gpus=4)), []),
    "nobody for one who fits": (world(H1, FULL[:3], ask()), []),
    "never out of the reserve: agents hold their part already": (
        world(H1, tuple(replace(v, human=True) for v in FULL[:2]), ask(gpus=1), pool={"cap": 2, "reserve": 2}),
        [],
    ),
    "an agent's victim makes room under the reserve": (
        world(H1, FULL[:2], ask(), pool={"cap": 4, "reserve": 2}),
        [("l0",)],
    ),
    "a cap of the pool is lifted by a victim": (world(H1, FULL[:2], ask(), pool={"cap": 2}), [("l0",)]),
    "one at a time in a pool": (
        world(H1, FULL, ask(), preemptions=(Preemption("p", "main", "b", ("l3",), (H1[3].key,), NOW),), ),
        [],
    ),
    "for the first that does not fit, and for nobody behind it": (
        world(H1, changed(0, preemptible=False), ask("a", 4, 30), ask("b", 1, 20)),
        [],
    ),
    "one that can never fit is no first": (world(H1, FULL, ask("a", 8, 30), ask("b", 1, 20)), [("l0",)]),
    "a whole host, though its cards are many people's": (
        world((*H1, *cards("h2", 4)), (*FULL, *(job(f"m{n}", c) for n, c in enumerate(cards("h2", 4)))), ask(gpus=4)),
        [("l0", "l1", "l2", "l3")],
    ),
    "processors too": (
        world(H1, (job("l0", H1[0], cpus=2), job("l1", H1[1], cpus=6)), ask(needs={"cpus": 4})),
        [("l1",)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TABLE)
def test_victims(what: str) -> None:
    here, expected = TABLE[what]
    assert preempted(here) == expected


def test_it_looks_again_when_somebody_may_be_stopped_later() -> None:
    here = world(H1, tuple(replace(v, writing_ms=NOW - 10_000) for v in FULL), ask())
    assert decide(here, NOW, POLICY).wake_at_ms == NOW - 10_000 + WRITING_MS


def running(*, stopping: bool = False, slots: tuple[Slot, ...] = H1[:1]) -> Preemption:
    return Preemption("p", "main", "a", ("l0",), tuple(s.key for s in slots), NOW - 1000, stopping)


def of(decided: Decided, kind: type[Any]) -> list[Any]:
    return [d for d in decided.decisions if isinstance(d, kind)]


def test_slots_of_a_running_preemption_are_kept_for_the_asker() -> None:
    """The victim has ended: its slot is free, and somebody of a higher priority who came meanwhile does not get it."""
    here = world(H1, FULL[1:], ask(), ask("b", 1, 30), preemptions=(running(stopping=True),))
    decided = decide(here, NOW, POLICY)
    assert of(decided, Start) == [Start("a", "job", (H1[0].key,))]
    assert [wait.ask_ids for wait in of(decided, Wait)] == [("b",)]
    assert not of(decided, Withdraw)


def test_it_is_withdrawn_when_the_asker_is_gone_or_fits_without() -> None:
    assert of(decide(world(H1, FULL, preemptions=(running(),)), NOW, POLICY), Withdraw) == [
        Withdraw("p", "its asker is gone")
    ]
    here = world(H1, FULL[:3], ask(), preemptions=(running(),))
    decided = decide(here, NOW, POLICY)
    assert of(decided, Start) == [Start("a", "job", (H1[3].key,))]
    assert [w.preemption_id for w in of(decided, Withdraw)] == ["p"]


@pytest.mark.parametrize("change", ["held", "paused", "cap"])
def test_it_is_withdrawn_when_the_asker_could_not_start_any_more(change: str) -> None:
    pool = {"paused": True} if change == "paused" else {"owner_cap": 0} if change == "cap" else {}
    asker = ask(held="by a person") if change == "held" else ask()
    decided = decide(world(H1, FULL, asker, pool=pool, preemptions=(running(),)), NOW, POLICY)
    assert [w.preemption_id for w in of(decided, Withdraw)] == ["p"]


def test_it_is_not_withdrawn_while_its_host_is_silent_for_a_moment() -> None:
    here = world(H1, FULL, ask(held="by a person"), preemptions=(running(),))
    silent = replace(here, hosts=tuple(replace(host, link="connecting") for host in here.hosts))
    assert not of(decide(silent, NOW, POLICY), Withdraw)


def test_it_is_not_withdrawn_while_a_victim_that_has_ended_is_cleaned_up() -> None:
    here = world(H1, FULL[1:], ask(gpus=2), preemptions=(replace(running(slots=H1[:2]), victims=("l0", "l1")),))
    cleaning = tuple(replace(s, state="cleaning", lease_id="l0") if s.key == H1[0].key else s for s in here.slots)
    assert not of(decide(replace(here, slots=cleaning, cleaning=(FULL[0],)), NOW, POLICY), Withdraw)


def test_it_is_not_withdrawn_after_term() -> None:
    assert not of(decide(world(H1, FULL, preemptions=(running(stopping=True),)), NOW, POLICY), Withdraw)
    decided = decide(world(H1, FULL[:3], ask(), preemptions=(running(stopping=True),)), NOW, POLICY)
    assert of(decided, Start) and not of(decided, Withdraw)


# ---- never

look = settings(
    max_examples=int(os.environ.get("COTENANT_EXAMPLES", "60")),
    deadline=None,
    derandomize="COTENANT_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    slots: tuple[Slot, ...] = ()
    for n in range(draw(st.integers(1, 3))):
        slots += cards(f"h{n}", draw(st.integers(1, 4)))
    leases: list[Holding] = []
    left = list(slots)
    while left:
        size = draw(st.integers(1, 2))
        host = left[0].host
        mine = [s for s in left if s.host == host][:size]
        left = [s for s in left if s not in mine]
        if draw(st.integers(0, 5)) == 0:
            continue
        owner = draw(st.sampled_from(("alice", "bob")))
        leases.append(
            job(
                f"l{len(leases)}", *mine, owner=owner, agent=f"{owner}-bot", human=draw(st.booleans()),
                priority=draw(st.sampled_from((0, 10, 20))), preemptible=draw(st.integers(0, 4)) > 0,
                resumable=draw(st.integers(0, 4)) > 0, cpus=draw(st.integers(0, 4)),
                checkpoint_ms=draw(st.sampled_from((None, NOW - 60_000))),
                writing_ms=draw(st.sampled_from((None, None, NOW - 1000, NOW - HOUR))),
                immune_until_ms=draw(st.sampled_from((0, 0, NOW + 5))), stopping=draw(st.integers(0, 8)) == 0,
            )
        )  # fmt: skip
    asks = tuple(
        ask(
            f"a{n}", draw(st.integers(1, 3)), draw(st.sampled_from((0, 10, 20, 30))), human=draw(st.booleans()),
            queued_at_ms=NOW - n, needs={"cpus": draw(st.sampled_from((0, 0, 5))), "nodes": draw(st.sampled_from((1, 1, 1, 2)))},
        )
        for n in range(draw(st.integers(1, 3)))
    )  # fmt: skip
    pool = {"cap": draw(st.sampled_from((None, None, 2, 4))), "reserve": draw(st.sampled_from((0, 0, 1, 2)))}
    preemptions: tuple[Preemption, ...] = ()
    if leases and draw(st.integers(0, 3)) == 0:
        victim = leases[0]
        preemptions = (Preemption("p", "main", "a0", (victim.id,), victim.slots, NOW, draw(st.booleans())),)
        if draw(st.booleans()):
            leases = leases[1:]
    return world(slots, tuple(leases), *asks, pool=pool, preemptions=preemptions)


@look
@given(worlds())
def test_a_preemption_frees_enough_or_does_not_happen(here: World) -> None:
    decided = decide(here, NOW, POLICY)
    leases = {lease.id: lease for lease in here.holdings}
    by_ask = {one.id: one for one in here.asks}
    started = {d.ask_id for d in of(decided, Start)}
    for found in of(decided, Preempt):
        asker = by_ask[found.ask_id]
        assert found.victims and not here.preemptions and asker.id not in started
        for name in found.victims:
            victim = leases[name]
            assert victim.priority < asker.priority and victim.preemptible and victim.resumable
            assert not victim.stopping and victim.immune_until_ms <= NOW
            assert victim.writing_ms is None or victim.writing_ms + WRITING_MS <= NOW
        # with them gone, and what starts in this pass there, the asker starts on exactly these slots
        after = here
        for start in of(decided, Start):
            other = by_ask[start.ask_id]
            held = job(f"s-{other.id}", owner=other.owner, agent=other.agent, human=other.human, cpus=other.needs.cpus)
            after = replace(
                after,
                holdings=(*after.holdings, replace(held, slots=start.slots)),
                slots=tuple(replace(s, state="held") if s.key in start.slots else s for s in after.slots),
            )
        after = without(after, [leases[name] for name in found.victims])
        assert of(decide(replace(after, asks=(asker,)), NOW, POLICY), Start) == [Start(asker.id, "job", found.slots)]
        rules = here.pools[0]
        used = [(lease.human, len(lease.slots)) for lease in after.holdings] + [(asker.human, len(found.slots))]
        cap = len(here.slots) if rules.cap is None else rules.cap
        if rules.cap is not None:
            assert sum(n for _, n in used) <= cap
        if rules.reserve and not asker.human:
            assert sum(n for human, n in used if not human) <= cap - rules.reserve
    assert len(of(decided, Preempt)) <= 1


@look
@given(worlds(), st.randoms(use_true_random=False))
def test_equal_worlds_give_equal_preemptions_in_any_order(here: World, dice: Any) -> None:
    def shuffled(items: tuple[Any, ...]) -> tuple[Any, ...]:
        found = list(items)
        dice.shuffle(found)
        return tuple(found)

    assert decide(World(**{k: shuffled(v) for k, v in vars(here).items()}), NOW, POLICY) == decide(here, NOW, POLICY)


@look
@given(worlds())
def test_kept_slots_go_to_nobody_else(here: World) -> None:
    kept = {key: one.ask_id for one in here.preemptions for key in one.slots}
    decided = decide(here, NOW, POLICY)
    over = bool(of(decided, Withdraw)) or any(start.ask_id in kept.values() for start in of(decided, Start))
    for start in of(decided, Start):
        for key in start.slots:
            assert kept.get(key) in (None, start.ask_id) or over
    answered = [name for d in of(decided, Wait) for name in d.ask_ids] + [d.ask_id for d in of(decided, Start)]
    assert sorted(answered) == sorted(one.id for one in here.asks)


def test_a_job_over_several_hosts_is_one_victim_for_one_over_several_hosts() -> None:
    h2 = cards("h2", 2)
    h1 = cards("h1", 2)
    gang = job("gang", *h1, *h2)
    here = world((*h1, *h2), (gang,), ask(gpus=2, needs={"nodes": 2}))
    assert preempted(here) == [("gang",)]
