"""Changing a job that was taken in: what counts afterwards is the new, at the old place, within the caller's grant."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.server.config import HostSettings
from cotenant.server.errors import BadRequest, Conflict, CotenantError, Forbidden
from cotenant.server.model.changes import ANY_TIME, JobChange
from cotenant.server.model.spec import JobSpec

TWO_POOLS = """
[pools.default]
cap = 2
[pools.other]
cap = 2
default_hours = 7
"""


async def modify(bench: Bench, caller: Any, job: str, *, request_id: str | None = None, **change: Any) -> Any:
    return await bench.control.jobs.modify(caller, job, JobChange(**change), reason="a test", request_id=request_id)


async def full(bench: Bench) -> list[str]:
    """Two jobs that have all the cards."""
    a = await bench.caller("a", "alice")
    return [await bench.submit(a, f"c{n}") for n in range(2)]


async def test_a_waiting_job_keeps_its_place_and_the_next_pass_sees_the_new(bench: Bench) -> None:
    running = await full(bench)
    a = bench.callers["a"]
    first, second = await bench.submit(a, "first"), await bench.submit(a, "second")
    at = bench.job(first)["queued_at_ms"]
    shown = await modify(
        bench, a, second, priority="high", name="urgent", purpose="the deadline", hours=3, labels={"a": "b"}
    )
    assert (shown.priority, shown.name, shown.purpose, shown.hours, shown.hours_from, shown.labels, shown.queue_position) == (
        "high", "urgent", "the deadline", 3, "hours", {"a": "b"}, 1,
    )  # fmt: skip
    bench.machine.finish(bench.attempt(running[0])["id"])
    await bench.settle()
    assert (bench.job(second)["state"], bench.job(first)["state"]) == ("running", "queued")
    assert bench.machine.specs[bench.attempt(second)["id"]].time_limit_s == 3 * 3600
    await modify(bench, a, first, hours=1)
    assert bench.job(first)["queued_at_ms"] == at
    (event, _) = bench.events("job.modified")
    args = json.loads(event["args"])
    assert args["old"]["priority"] == "normal" and args["new"]["priority"] == "high" and event["reason"] == "a test"
    assert set(args["new"]) == {"priority", "name", "purpose", "hours", "labels"}


async def test_fewer_cards_let_it_start_at_once(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    await bench.submit(a, "one")
    waits = await bench.submit(a, "two", gpus=2)
    assert bench.job(waits)["state"] == "queued"
    await modify(bench, a, waits, gpus=1)
    await bench.settle()
    assert bench.job(waits)["state"] == "running"


async def test_another_pool_is_another_line(make_bench) -> None:
    other = HostSettings(name="h2", pool="other")
    bench: Bench = await make_bench(Machine(), Machine("h2"), toml=TWO_POOLS, hosts={"h2": other})
    await full(bench)
    a = bench.callers["a"]
    held, waits = await bench.submit(a, "held", hours=1), await bench.submit(a, "waits")
    await bench.control.jobs.hold(a, held, "")
    at = bench.job(waits)["queued_at_ms"]
    bench.clock.advance(5)
    shown = await modify(bench, a, held, pool="other")
    assert (shown.pool, shown.hours, bench.job(held)["queued_at_ms"]) == ("other", 1, bench.clock.now_ms())
    shown = await modify(bench, a, waits, pool="other")
    await bench.settle()
    assert (shown.hours, shown.hours_from) == (7, "pool default")
    job = bench.job(waits)
    assert job["state"] == "running" and bench.attempt(waits)["host"] == "h2" and job["queued_at_ms"] == at + 5000
    with pytest.raises(CotenantError) as said:
        await modify(bench, a, held, gpus=3)
    assert said.value.code == "quota_exceeded"


async def test_what_runs_takes_only_what_says_nothing_of_its_attempt(bench: Bench) -> None:
    (job, _) = await full(bench)
    a = bench.callers["a"]
    shown = await modify(bench, a, job, name="n", purpose="p", labels={"x": "y"}, priority="batch", max_attempts=3)
    assert (shown.name, shown.priority, shown.attempts_left) == ("n", "batch", 3)
    lease = bench.attempt(job)["lease_id"]
    bench.control.context.keeper.refresh(bench.clock.now_ms())
    assert bench.control.context.keeper.living[lease].priority == 0
    for field, value in (("hours", 1), ("gpus", 2), ("pool", "default"), ("cpus", 1), ("gpu_memory_mib", 1)):
        with pytest.raises(Conflict, match=f"running; {field} can be changed only while it waits") as said:
            await modify(bench, a, job, **{field: value})
        assert said.value.code == "not_waiting" and "priority" in said.value.hint
    bench.machine.finish(bench.attempt(job)["id"])
    await bench.settle()
    with pytest.raises(Conflict, match="has ended") as said:
        await modify(bench, a, job, name="x")
    assert said.value.code == "already_final"


async def test_nobody_gets_more_than_by_a_submit(bench: Bench) -> None:
    await full(bench)
    a = await bench.caller("low", "alice", max_priority="normal")
    job = await bench.submit(a, "waits")
    for change, code in (
        ({"priority": "high"}, "priority_too_high"),
        ({"pool": "nowhere"}, "no_such_pool"),
        ({"gpus": 3}, "no_such_gpu"),
        ({"gpu_memory_mib": 10**6}, "no_such_gpu"),
        ({"gpu_model": "H100"}, "no_such_gpu"),
        ({"purpose": "token sk-abcdefghijklmnopqrstuvwxyz0123456789"}, "secret_in_arguments"),
        ({"hours": 1e-6}, "bad_hours"),
    ):
        with pytest.raises(CotenantError) as said:
            await modify(bench, a, job, **change)
        assert said.value.code == code, change
    assert bench.events("job.modified") == []
    b, person = await bench.caller("b", "bob"), await bench.person()
    with pytest.raises(Forbidden):
        await modify(bench, b, job, name="mine")
    made = await bench.control.operate(person, "job.modify", {"job_id": job, "change": {"priority": "batch"}}, "now")
    assert made["priority"] == "batch"
    for bad in ({"job_id": job}, {"job_id": job, "change": {"command": "x"}}, {"job_id": job, "change": {"gpus": -1}}):
        with pytest.raises(BadRequest, match="change"):
            await bench.control.operate(person, "job.modify", bad, "now")


async def test_a_repeat_changes_nothing_and_no_change_leaves_no_event(bench: Bench) -> None:
    await full(bench)
    a = bench.callers["a"]
    job = await bench.submit(a, "waits")
    for _ in range(2):
        await modify(bench, a, job, priority="high", request_id="m")
    await modify(bench, a, job, priority="batch")
    assert (await modify(bench, a, job, priority="high", request_id="m")).priority == "batch"
    await modify(bench, a, job, priority="batch")
    assert len(bench.events("job.modified")) == 2
    with pytest.raises(Conflict) as said:
        await modify(bench, a, job, priority="normal", request_id="m")
    assert said.value.code == "request_id_reused"
    with pytest.raises(BadRequest, match="nothing to change"):
        await modify(bench, a, job)


async def test_tries_that_were_made_stay_made(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, max_attempts=3, retry_on=["code"])
    bench.machine.finish(bench.attempt(job)["id"], 1)
    await bench.settle()
    assert bench.job(job)["state"] == "queued"
    assert (await modify(bench, a, job, max_attempts=5)).attempts_left == 4
    with pytest.raises(BadRequest, match="has made 1 of its tries"):
        await modify(bench, a, job, max_attempts=1)


async def test_it_survives_a_restart(bench: Bench) -> None:
    await full(bench)
    job = await bench.submit(bench.callers["a"], "waits")
    await modify(bench, bench.callers["a"], job, gpus=2, priority="high")
    await bench.restart(kill=True)
    ask = bench.control.context.keeper.waiting.get(job)
    assert ask is not None and (ask.needs.gpus_min, ask.priority) == (2, 20)


def test_a_change_names_fields_of_a_job_and_keeps_their_limits() -> None:
    of_the_array = {"max_parallel"}
    assert set(JobChange.model_fields) - of_the_array <= set(JobSpec.model_fields)
    assert set(JobChange.model_fields) >= ANY_TIME
    spec = JobSpec(command="x", gpus=2)
    assert JobChange(gpus=1).applied_to(spec).gpus == 1 and JobChange(name="n").applied_to(spec).gpus == 2


async def test_of_an_array_what_has_not_started_takes_the_new(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(
        a, ["train", "--lr", "{lr}"], array={"grid": {"lr": [1, 2, 3]}, "max_parallel": 1}, hours=2, gpus=1
    )
    shown = await modify(bench, a, array, hours=5, gpus=2, priority="batch", name="slower")
    assert (shown.hours, shown.priority, shown.name) == (5, "batch", "slower")
    first = f"{array}.0"
    assert bench.machine.specs[bench.attempt(first)["id"]].time_limit_s == 2 * 3600, "it runs already"
    bench.machine.finish(bench.attempt(first)["id"])
    await bench.settle()
    spec = bench.machine.specs[bench.attempt(f"{array}.1")["id"]]
    assert (spec.time_limit_s, len(spec.slots), spec.argv[-1]) == (5 * 3600, 2, "2")
    with pytest.raises(CotenantError):
        await modify(bench, a, f"{array}.2", hours=1)
