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


async def test_the_end_of_a_failed_attempts_stdout_says_so_and_that_stderr_holds_more(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a)
    bench.machine.finish(bench.attempt(job)["id"], 3)
    await bench.settle()
    first = await bench.control.logs.tail(a, job)
    assert first.final and first.note is not None
    assert "exit code 3" in first.note and 'stream="err"' in first.note
    followed = await bench.control.logs.tail(a, job, cursor=first.cursor)
    assert followed.note == first.note, "a reader that came with a cursor reads the end too"
    assert (await bench.control.logs.tail(a, job, stream="err")).note is None, "there is nothing else to point at"


async def test_a_log_that_goes_on_or_ended_well_has_no_note(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a)
    assert (await bench.control.logs.tail(a, job)).note is None
    bench.machine.finish(bench.attempt(job)["id"], 0)
    await bench.settle()
    assert (await bench.control.logs.tail(a, job)).note is None


async def test_a_list_says_how_jobs_failed_to_those_who_may_look_inside(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    job = await bench.submit(a)
    bench.machine.finish(bench.attempt(job)["id"], 3)
    await bench.settle()
    mine = (await bench.control.views.list_jobs(a)).jobs[0]
    assert (mine.failure_class, mine.exit_code) == ("code", 3) and "exit code 3" in (mine.message or "")
    theirs = (await bench.control.views.list_jobs(b)).jobs[0]
    assert (theirs.failure_class, theirs.message) == (None, None)
