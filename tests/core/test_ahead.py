"""Forecasts: what the world run forward says, against what then happens when everything runs as assumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from happenings import HOUR, Lab

from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.engine import Engine
from cotenant.server.deciding.world import Ask, Holding, HostView, Needs, Policy, PoolRules, Slot, World
from cotenant.server.simulating.ahead import Ahead, Ran, RunTimes, forecast
from cotenant.server.simulating.run import BEGIN_MS, Simulation
from cotenant.server.simulating.synthetic import read

NOTHING = RunTimes(())


def nobody(_: str) -> str:
    return ""


@pytest.mark.parametrize("seed", range(4))
def test_if_all_use_their_limits_it_is_what_happens(seed: int) -> None:
    """The same trace, simulated: the forecast for each that waits once all have arrived is when it starts."""
    trace = read("synthetic:jobs=40,cards=8,load=4,batch=0,high=0.3", seed)
    trace = replace(trace, jobs=tuple(replace(job, runs_ms=job.hours_ms) for job in trace.jobs))
    rules = PoolRules(trace.jobs[0].pool, cap=7, reserve=1, owner_cap=5)
    last = BEGIN_MS + max(job.submit_ms for job in trace.jobs)
    seen: list[World] = []

    class Watched(Simulation):
        def _decide(self, now: int) -> None:
            super()._decide(now)
            if now == last:
                seen.append(self._world())

    outcome = Watched(trace, (rules,)).run()
    then = {stay.job.id: stay.begun_ms for stay in outcome.stays}
    world = seen[-1]
    assert len(world.asks) > 5
    for ask in world.asks:
        found = forecast(world, ask.id, last, Policy(), NOTHING, nobody)
        assert found.earliest_ms == found.likely_ms == found.latest_ms == then.get(ask.id)


@pytest.mark.parametrize("seed", range(20))
def test_it_comes_to_an_end_in_any_world_and_says_now_where_it_starts_now(seed: int) -> None:
    lab = Lab(seed)
    engine = Engine(lab.world(), lab.now, Policy())
    for _ in range(25):
        lab.happen()
        lab.tell(engine)
        lab.carry_out(engine.turn(lab.now))
    world = lab.world()
    decided = decide(world, lab.now, Policy())
    waits = set(decided.blockers)
    for ask in world.asks[:8]:
        found = forecast(world, ask.id, lab.now, Policy(), NOTHING, nobody)
        if ask.id not in waits and not (ask.not_after_ms is not None and ask.not_after_ms <= lab.now):
            assert found.latest_ms == lab.now
        if ask.held:
            assert found.likely_ms is None


def small(*asks: Ask, until_h: float = 10) -> World:
    slots = tuple(Slot("h", f"c{n}", 0, 1, n, "main", "gpu", 80_000) for n in range(2))
    lease = Holding(
        "l", "job", "ann", "a", False, "main", (slots[0].key, slots[1].key), 0, int(until_h * HOUR), job_id="j0"
    )
    held = tuple(replace(slot, state="held", lease_id="l") for slot in slots)
    return World((HostView("h"),), held, (PoolRules("main"),), holdings=(lease,), asks=asks)


def ask(name: str, gpus: int = 1, **more: object) -> Ask:
    it = Ask(name, "job", "bob", "b", False, "main", Needs(gpus, gpus), 10, 1, HOUR)
    return replace(it, **more)  # type: ignore[arg-type]


def test_what_like_jobs_took_is_what_is_assumed() -> None:
    times = RunTimes([Ran("ann", "train", minutes * 60_000, 10 * HOUR) for minutes in (30, 60, 90, 120, 180)])
    world = small(ask("mine"))
    found = forecast(world, "mine", 45 * 60_000, Policy(), times, lambda name: "train" if name == "j0" else "")
    # after 45 minutes only the four longer ones are left
    assert (found.earliest_ms, found.likely_ms, found.latest_ms) == (HOUR, 2 * HOUR, 10 * HOUR)
    longer = forecast(world, "mine", 4 * HOUR, Policy(), times, lambda _: "train")
    assert longer.likely_ms == 10 * HOUR, "it has run longer than any before: only its limit is known"


def test_a_name_without_a_past_takes_the_owners_share_of_his_limits() -> None:
    times = RunTimes([Ran("ann", f"other{n}", HOUR, 4 * HOUR) for n in range(3)])
    assert forecast(small(ask("mine")), "mine", 1, Policy(), times, nobody).likely_ms == 10 * HOUR // 4


def test_an_order_a_dependency_and_an_array_are_followed() -> None:
    first = ask("first", 2)
    many = ask("many", 1, queued_at_ms=2, count=3, array="many", array_room=1)
    after = ask("after", 1, queued_at_ms=3, after=("many",))
    world = small(first, many, after, until_h=1)
    found = {name: forecast(world, name, 1, Policy(), NOTHING, nobody).likely_ms for name in ("first", "many", "after")}
    assert found == {"first": HOUR, "many": 2 * HOUR, "after": 5 * HOUR}


def test_what_nobody_can_know_has_no_number() -> None:
    world = small(ask("mine"))
    lost = replace(world, holdings=tuple(replace(one, lost=True) for one in world.holdings))
    assert forecast(lost, "mine", 1, Policy(), NOTHING, nobody).likely_ms is None
    assert forecast(small(ask("mine", 3)), "mine", 1, Policy(), NOTHING, nobody).likely_ms is None
    assert Ahead(world, 1, Policy(), NOTHING, nobody, None).start_of("mine", lambda: False) is None
