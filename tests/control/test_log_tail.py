"""The answer about a failed job brings its last lines along, for those who may look inside, and never fails for want of them."""

from __future__ import annotations

from bench import Bench


async def test_a_failed_job_shows_its_last_lines_to_its_owner_alone(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    job = await bench.submit(a)
    bench.machine.finish(bench.attempt(job)["id"], 3)
    await bench.settle()
    answer = await bench.control.jobs.get(a, job)
    assert answer.state == "failed" and answer.log_tail
    assert (await bench.control.jobs.get(b, job)).log_tail is None


async def test_a_host_that_is_away_costs_only_the_lines(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a)
    bench.machine.finish(bench.attempt(job)["id"], 3)
    await bench.settle()
    await bench.disconnect()
    answer = await bench.control.jobs.get(a, job)
    assert (answer.state, answer.exit_code, answer.log_tail) == ("failed", 3, None)


async def test_a_job_that_succeeded_brings_no_lines(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a)
    bench.machine.finish(bench.attempt(job)["id"], 0)
    await bench.settle()
    assert (await bench.control.jobs.get(a, job)).log_tail is None
