"""When something that waits will start, how that came true, and what to ask for from what ran before."""

from __future__ import annotations

from datetime import datetime

import pytest
from bench import Bench

from cotenant.server.errors import BadRequest, Forbidden, NotFound


def seconds(stamp: str | None, bench: Bench) -> float:
    assert stamp is not None
    return datetime.fromisoformat(stamp).timestamp() - bench.clock.now_ms() / 1000


async def ran(bench: Bench, caller: object, minutes: float, code: int = 0, **spec: object) -> str:
    """A job that ran for so long and ended."""
    job = await bench.submit(caller, **spec)  # type: ignore[arg-type]
    await bench.advance(minutes * 60)
    bench.machine.finish(bench.attempt(job)["id"], code)
    await bench.settle()
    return job


async def test_a_waiting_job_gets_a_range_and_what_it_is_based_on(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    first = await bench.submit(a, gpus=2, hours=4)
    waits = await bench.submit(b, gpus=1, hours=1)
    found = await bench.control.foresight.estimate(b, job_id=waits)
    assert found.job_id == waits and found.wait_s is not None
    assert 4 * 3600 - 5 <= seconds(found.latest_at, bench) <= 4 * 3600 + 60
    assert found.earliest_at == found.likely_at == found.latest_at, "without a past all is taken to use its limit"
    assert any("no past runs" in line for line in found.basis)
    assert found.record == "no forecast has been compared with a true start yet"
    bench.machine.finish(bench.attempt(first)["id"], 0)
    await bench.settle()
    again = await bench.control.foresight.estimate(b, job_id=waits)
    assert again.likely_at is None and "waits for nothing" in again.basis[0]
    assert "of the last 1 forecasts 0 %" in again.record, "it started long before"


async def test_past_runs_of_the_same_name_make_it_shorter(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    for minutes in (10, 20, 30):
        await ran(bench, a, minutes, gpus=2, hours=10, name="train")
    await bench.submit(a, gpus=2, hours=10, name="train")
    waits = await bench.submit(b, gpus=1)
    found = await bench.control.foresight.estimate(b, job_id=waits)
    assert 0 < seconds(found.earliest_at, bench) <= 11 * 60
    assert 15 * 60 <= seconds(found.likely_at, bench) <= 21 * 60
    assert seconds(found.latest_at, bench) > 9 * 3600


async def test_one_that_is_only_thought_of_is_told_too_and_nothing_is_kept(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    now = await bench.control.foresight.estimate(a, gpus=2)
    assert now.wait_s == 0 and now.basis == ["nothing is in its way now"]
    await bench.submit(a, gpus=2, hours=1)
    later = await bench.control.foresight.estimate(a, gpus=1, hours=2)
    assert later.job_id is None and later.wait_s is not None and later.wait_s > 3000
    never = await bench.control.foresight.estimate(a, gpus=99)
    assert never.likely_at is None and "never" in never.basis[0]
    assert bench.rows("SELECT * FROM forecast") == []


async def test_what_nobody_can_know_has_no_number_but_a_reason(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, gpus=1, name="mine", after=[await bench.submit(a, gpus=2, hours=1)])
    assert (await bench.control.foresight.estimate(a, job_id=job)).likely_at is not None
    await bench.control.jobs.hold(a, job, "later")
    found = await bench.control.foresight.estimate(a, job_id=job)
    assert (found.earliest_at, found.likely_at, found.latest_at, found.wait_s) == (None, None, None, None)
    assert "on hold" in found.basis[0]


async def test_what_is_asked_again_and_again_counts_once(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    await bench.submit(a, gpus=2, hours=1)
    job = await bench.submit(a, gpus=1)
    for _ in range(5):
        await bench.control.foresight.estimate(a, job_id=job)
    assert len(bench.rows("SELECT * FROM forecast")) == 1
    await bench.advance(120)
    await bench.control.foresight.estimate(a, job_id=job)
    assert len(bench.rows("SELECT * FROM forecast")) == 2


async def test_what_cannot_be_meant_is_refused(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    with pytest.raises(NotFound):
        await bench.control.foresight.estimate(a, job_id="job_none")
    with pytest.raises(BadRequest):
        await bench.control.foresight.estimate(a, pool="no such")
    with pytest.raises(Forbidden):
        await bench.control.foresight.estimate(a, priority="critical")
    with pytest.raises(BadRequest):
        await bench.control.foresight.suggest(a, name="x", pool="no such")


async def test_a_suggestion_says_what_it_comes_from(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    empty = await bench.control.foresight.suggest(a, name="train")
    assert (empty.runs, empty.gpus, empty.hours) == (0, None, None) and "nothing to base" in empty.basis[0]
    assert empty.free_cards == 2
    await ran(bench, a, 30, gpus=2, hours=4, name="train", command=["python", "train.py", "--big"])
    await ran(bench, a, 60, gpus=1, hours=4, name="train", command=["python", "train.py"])
    await ran(bench, a, 200, code=1, gpus=1, hours=4, name="train", command=["python", "train.py", "--broken"])
    await ran(bench, b, 600, gpus=1, hours=24, name="train")
    found = await bench.control.foresight.suggest(a, name="train")
    assert (found.runs, found.gpus) == (3, 2)
    assert found.hours is not None and 1.2 <= found.hours <= 1.4, (
        "the longest good one and a quarter more; bob's is not alice's"
    )
    assert "2 of them with exit code 0" in found.basis[0]
    big = await bench.control.foresight.suggest(a, command="python train.py --big")
    assert (big.runs, big.gpus) == (1, 2)
    assert (await bench.control.foresight.suggest(a)).runs == 0
