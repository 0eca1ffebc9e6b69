"""The engine that goes on from event to event decides what `decide` decides on the whole world. COTENANT_EXAMPLES=2000 looks longer."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from happenings import Lab
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.engine import Engine
from cotenant.server.deciding.world import Decided, Policy, Start, Wait

EXAMPLES = int(os.environ.get("COTENANT_EXAMPLES", "60"))


def without_waits(decided: Decided) -> Decided:
    return replace(decided, decisions=tuple(d for d in decided.decisions if not isinstance(d, Wait)), blockers={})


def follow(seed: int, steps: int = 30, *, preempt: bool = False) -> int:
    """Compare at every step; gives how many started. With `preempt`: who is stopped, told or taken back, and with whose slots, too."""
    lab = Lab(seed, preempt=preempt)
    policy = Policy(backfill=lab.dice.random() < 0.8)
    engine = Engine(lab.world(), lab.now, policy)
    started = 0

    def turn() -> Decided:
        return without_waits(engine.turn(lab.now))

    for step in range(steps):
        lab.happen()
        lab.tell(engine)
        world = lab.world()
        found, expected = turn(), without_waits(decide(world, lab.now, policy))
        assert found == expected, f"seed {seed}, step {step}"
        assert turn() == expected, "a turn changes nothing by itself"
        if not any(isinstance(decision, Start) for decision in expected.decisions):
            newcomer = lab.arrive()
            if not engine.put(newcomer):
                again = turn()
                assert (again.decisions, again.bookings) == (expected.decisions, expected.bookings), (
                    f"seed {seed}, step {step}"
                )
            engine.drop(newcomer.id)
            turn()
        started += lab.carry_out(expected)
    return started


@settings(max_examples=EXAMPLES, deadline=None, derandomize="COTENANT_EXAMPLES" not in os.environ,
          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
@given(st.integers(0, 1_000_000_000), st.booleans())
def test_an_engine_decides_what_a_cold_pass_decides(seed: int, preempt: bool) -> None:
    follow(seed, preempt=preempt)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("preempt", [False, True])
def test_over_a_long_time(seed: int, preempt: bool) -> None:
    assert follow(seed, 200, preempt=preempt) > 5
