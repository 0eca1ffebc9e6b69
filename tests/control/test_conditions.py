"""Jobs that wait for others, and for their time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from bench import Bench

from cotenant import tools
from cotenant.server.errors import BadRequest, Conflict, NotFound
from cotenant.server.model.conditions import AfterSpec
from cotenant.server.model.spec import JobSpec, parse_kept
from cotenant.server.store import dependencies, events, jobs
from cotenant.server.store.db import Tx


async def end(bench: Bench, *jobs: str, code: int = 0) -> None:
    for job in jobs:
        bench.machine.finish(bench.attempt(job)["id"], code)
    await bench.settle()


def state(bench: Bench, job: str) -> str:
    return str(bench.job(job)["state"])


@pytest.mark.parametrize(
    ("when", "code", "then"),
    [
        ("ok", 0, "running"),
        ("ok", 1, "cancelled"),
        ("any", 0, "running"),
        ("any", 1, "running"),
        ("failed", 1, "running"),
        ("failed", 0, "cancelled"),
    ],
)
async def test_a_job_starts_after_another_or_never(bench: Bench, when: str, code: int, then: str) -> None:
    a = await bench.caller("a", "alice")
    first = await bench.submit(a, "first")
    second = await bench.submit(a, "second", after=[{"job": first, "when": when}])
    shown = await bench.control.views.get_job(a, second)
    assert (shown.state, [b.code for b in shown.blockers]) == ("queued", ["dependency"])
    assert [(on.job, on.when, on.met) for on in shown.after] == [(first, when, False)]
    await end(bench, first, code=code)
    shown = await bench.control.views.get_job(a, second)
    assert shown.state == then
    if then == "cancelled":
        assert shown.message is not None and shown.message.startswith(f"dependency: {first}")
        assert [e["reason"] for e in bench.events("job.cancelled")] == [shown.message]
    else:
        assert [on.met for on in shown.after] == [True]
    bench.check()


async def test_a_chain_of_a_thousand_ends_with_its_first(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    first = await bench.submit(a, "first")
    chain = [first, *(f"job_chain{n}" for n in range(1000))]

    def write(tx: Tx) -> None:
        row = {key: value for key, value in dict(jobs.get(tx, first)).items() if key not in ("started_at_ms", "fence")}
        for before, job in pairwise(chain):
            jobs.insert(tx, row | {"id": job, "state": "queued", "epoch": 0, "waits_for": 1})
            dependencies.insert(tx, job, [dependencies.On(before, "ok")])
            events.append(tx, "job.submitted", a, bench.clock.now_ms(), job_id=job, new="queued")

    await bench.control.context.db.write(write)
    await end(bench, first, code=1)
    assert bench.one("SELECT count(*) FROM job WHERE state = 'cancelled'") == 1000
    assert bench.job(chain[2])["message"] == f"dependency: {chain[1]} was cancelled, and this job needs it to succeed"
    bench.check()


async def test_a_job_waits_for_an_array_its_elements_and_ranges_of_them(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, array=6)
    one = await bench.submit(a, "one", after=f"{array}.1", gpus=0)
    some = await bench.submit(a, "some", after=[f"{array}.0-3"], gpus=0)
    bad = await bench.submit(a, "bad", after={"job": f"{array}.0-3", "when": "failed"}, gpus=0)
    whole = await bench.submit(a, "whole", after=[{"job": array, "when": "any"}], gpus=0)
    await end(bench, f"{array}.0", f"{array}.1")
    assert (state(bench, one), state(bench, some)) == ("running", "queued")
    await end(bench, f"{array}.3", f"{array}.2")
    assert (state(bench, some), state(bench, bad)) == ("running", "cancelled")
    assert bench.job(bad)["message"].startswith(f"dependency: {array}.0-3 did not fail")
    await end(bench, some, one)
    await end(bench, f"{array}.4", f"{array}.5", code=1)
    assert (state(bench, array), state(bench, whole)) == ("failed", "running")
    late = await bench.submit(a, "late", after=[f"{array}.0-3"])
    assert bench.job(late)["waits_for"] == 0, "what had ended well before is no wait"
    bench.check()


async def test_an_array_waits_as_a_whole(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    first = await bench.submit(a, "first")
    array = await bench.submit(a, array=3, after=[first])
    after = await bench.submit(a, "after", after=[f"{array}.2"])
    assert len(bench.machine.history) == 1
    await end(bench, first, code=1)
    assert (state(bench, array), state(bench, after)) == ("cancelled", "cancelled")
    assert (await bench.control.views.get_job(a, f"{array}.1")).state == "cancelled"
    bench.check()


async def test_dependencies_live_through_a_kill(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    first = await bench.submit(a, "first")
    second = await bench.submit(a, "second", after=[first])
    await bench.restart(kill=True)
    assert [b.code for b in (await bench.control.views.get_job(a, second)).blockers] == ["dependency"]
    await end(bench, first)
    assert state(bench, second) == "running"


async def test_what_cannot_be_waited_for_is_refused_with_a_reason(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    first = await bench.submit(a, "first")
    array = await bench.submit(a, array=3)
    await end(bench, first, code=1)
    for after, error, said in (
        (["job_01aaaaaaaaaaaaaa"], NotFound, "there is no job"),
        ([f"{array}.1-5"], NotFound, f"there is no element {array}.3"),
        ([f"{first}.1"], NotFound, "is no array"),
        ([first], Conflict, "failed already"),
        ([array, {"job": array, "when": "any"}], BadRequest, "twice"),
    ):
        with pytest.raises(error, match=said):
            await bench.submit(a, "second", after=after)
        with pytest.raises(error, match=said):
            await bench.control.jobs.submit(a, JobSpec(command="x", after=after), dry_run=True)
    for after in ("nothing", ["job_x.9-3"], [{"job": "job_x", "when": "later"}], [{"on": "job_x"}]):
        with pytest.raises(ValueError, match="after"):
            JobSpec(command="x", after=after)


@pytest.mark.parametrize(
    "after", ["job_x", ["job_x", "job_y.0-3"], {"job": "job_x", "when": "any"}, [{"job": "job_x"}]]
)
def test_conditions_are_read_as_agents_write_them(after: object) -> None:
    tool = next(tool for tool in tools.ALL if tool.name == "submit_job")
    spec = tool.parse({"command": "x", "after": after})["spec"]
    assert spec.after[0].job == "job_x" and spec.after[0].when in ("ok", "any")
    assert parse_kept(spec.model_dump_json(exclude_defaults=True)).after == spec.after
    with pytest.raises(BadRequest, match=r"after: item 1\.job: must be a job's id"):
        tool.parse({"command": "x", "after": ["job_x", "the last one"]})


async def test_who_would_wait_for_himself_is_found(bench: Bench) -> None:
    from cotenant.server.control import conditions

    a = await bench.caller("a", "alice")
    await bench.submit(a, "long", gpus=2)
    first = await bench.submit(a, "first")
    second = await bench.submit(a, array=2, after=[first])
    third = await bench.submit(a, "third", after=[f"{second}.1"])
    with pytest.raises(Conflict, match="neither could ever start") as refused:
        await bench.control.context.db.write(lambda tx: conditions.resolve(tx, [AfterSpec(job=third)], first))
    assert refused.value.code == "dependency_cycle"


# ---- start windows


async def test_a_job_starts_when_its_window_opens(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, start_window={"not_before": 60})
    shown = await bench.control.views.get_job(a, job)
    assert [(b.code, b.until) for b in shown.blockers] == [("start_window", shown.not_before)]
    await bench.advance(59)
    assert state(bench, job) == "queued"
    await bench.advance(2)
    assert state(bench, job) == "running"


async def test_a_job_that_did_not_start_in_its_window_is_given_up(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    long = await bench.submit(a, "long", gpus=2)
    iso = "2027-01-15T08:02:00Z"  # the clock of these tests stands at 08:00
    job = await bench.submit(a, "short", start_window={"not_after": iso})
    array = await bench.submit(a, array=3, start_window={"not_after": iso})
    waits = await bench.submit(a, "waits", after=[job])
    await bench.advance(100)
    await end(bench, long)
    await bench.submit(a, "other")
    await bench.advance(30)
    shown = await bench.control.views.get_job(a, array)
    assert (state(bench, job), shown.array and shown.array.cancelled) == ("running", 2), "what started goes on"
    assert state(bench, waits) == "queued"
    await end(bench, f"{array}.0")
    assert state(bench, array) == "cancelled"
    blocked = await bench.submit(a, "late", gpus=2, start_window={"not_after": 5})
    await bench.advance(10)
    assert state(bench, blocked) == "cancelled" and "start window closed" in bench.job(blocked)["message"]
    bench.check()


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ({}, "not_before, not_after or both"),
        ({"not_before": "soon"}, "ISO 8601"),
        ({"not_after": -1}, "within a year"),
        ({"not_before": float("nan")}, "finite"),
        ({"from": 3}, "Extra inputs"),
    ],
)
def test_a_window_that_is_none_is_refused(window: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        JobSpec(command="x", start_window=window)


async def test_a_window_that_is_over_is_refused(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    for window in ({"not_after": "2020-01-01T00:00:00Z"}, {"not_before": 60, "not_after": 30}):
        with pytest.raises(BadRequest, match="is not later than"):
            await bench.submit(a, start_window=window)
