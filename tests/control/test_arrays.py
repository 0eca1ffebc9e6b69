"""Arrays: one row until their elements start, which then are jobs of their own."""

from __future__ import annotations

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.server.errors import BadRequest, ConfirmationRequired, Conflict, CotenantError, NotFound
from cotenant.server.model.changes import JobChange
from cotenant.server.model.spec import JobSpec

COUNTS = ("pending", "held", "running", "succeeded", "failed", "cancelled")


async def counts(bench: Bench, array: str) -> tuple[int, ...]:
    caller = next(iter(bench.callers.values()))
    answer = (await bench.control.views.get_job(caller, array)).array
    assert answer is not None
    return tuple(getattr(answer, name) for name in COUNTS)


async def end(bench: Bench, *elements: str, code: int = 0) -> None:
    for element in elements:
        bench.machine.finish(bench.attempt(element)["id"], code)
    await bench.settle()


def started(bench: Bench) -> list[str]:
    """The jobs that ran, in the order of their starts."""
    return [job for job, _, _ in bench.machine.history]


async def test_an_array_is_one_row_and_its_elements_become_jobs_as_they_start(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, ["train", "--shard", "{index}"], array=5, name="shards")
    assert started(bench) == [f"{array}.0", f"{array}.1"], "as many as there are cards"
    assert bench.one("SELECT count(*) FROM job") == 3
    assert await counts(bench, array) == (3, 0, 2, 0, 0, 0)
    assert (await bench.control.views.get_job(a, array)).state == "queued"
    spec = bench.machine.specs[bench.attempt(f"{array}.1")["id"]]
    assert spec.argv == ("train", "--shard", "1")
    assert {k: v for k, v in spec.env.items() if "ARRAY" in k} == {
        "COTENANT_ARRAY_ID": array, "COTENANT_ARRAY_INDEX": "1", "COTENANT_ARRAY_SIZE": "5",
    }  # fmt: skip
    await end(bench, f"{array}.0")
    assert started(bench)[2:] == [f"{array}.2"]
    await end(bench, f"{array}.1", f"{array}.2")
    await end(bench, f"{array}.3", f"{array}.4")
    assert await counts(bench, array) == (0, 0, 0, 5, 0, 0)
    job = await bench.control.views.get_job(a, array)
    assert (job.state, job.message, job.task.status) == ("succeeded", "5 succeeded of 5 elements", "completed")
    assert sorted(started(bench)) == [f"{array}.{n}" for n in range(5)], "each once"
    bench.check()


async def test_no_more_run_at_once_than_it_allows(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, array={"n": 3, "max_parallel": 1})
    other = await bench.submit(a, "other")
    assert started(bench) == [f"{array}.0", other], "what stands behind an array at its limit may start"
    shown = await bench.control.views.get_job(a, array)
    assert [b.code for b in shown.blockers] == ["array_limit", "busy"], "both cards are taken now"
    assert [b.code for b in (await bench.control.views.get_job(a, f"{array}.2")).blockers] == ["array_limit", "busy"]
    for n in range(3):
        await end(bench, f"{array}.{n}")
    assert (await bench.control.views.get_job(a, array)).state == "succeeded"
    bench.check()


@pytest.mark.parametrize(("codes", "state"), [((0, 0, 0), "succeeded"), ((0, 3, 0), "failed"), ((1, 1, 1), "failed")])
async def test_an_array_ends_as_its_elements_did(tmp_path, codes: tuple[int, ...], state: str) -> None:
    async with Bench(tmp_path, Machine(cards=3)) as bench:
        a = await bench.caller("a", "alice")
        array = await bench.submit(a, array=3)
        for n, code in enumerate(codes):
            assert bench.job(array)["state"] == "queued"
            await end(bench, f"{array}.{n}", code=code)
        assert bench.job(array)["state"] == state
        waited = await bench.control.jobs.wait(a, array, 0)
        assert waited.state == state and waited.array is not None and waited.array.failed == sum(map(bool, codes))
        bench.check()


async def test_an_element_can_be_asked_about_before_it_starts(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    await bench.submit(a, "long", gpus=2)
    array = await bench.submit(a, ["train", "{lr}"], array={"params": [{"lr": 0.1}, {"lr": 0.2}]})
    shown = await bench.control.jobs.get(a, f"{array}.1")
    assert (shown.state, shown.array_id, shown.array_index, shown.command) == ("queued", array, 1, "train 0.2")
    assert [b.code for b in shown.blockers] == ["busy"] and shown.config == {"lr": 0.2}
    with pytest.raises(NotFound) as none:
        await bench.control.jobs.get(a, f"{array}.2")
    assert none.value.hint is not None and "with the indices 0-1" in none.value.hint
    assert (await bench.control.jobs.wait(a, f"{array}.1", 0)).state == "queued"


async def test_parameters_and_a_grid_fill_command_environment_and_config(tmp_path) -> None:
    async with Bench(tmp_path, Machine(cards=6)) as bench:
        a = await bench.caller("a", "alice")
        array = await bench.submit(
            a,
            ["train", "--lr={lr}", "{{lr}}", "{other}", "${lr}"],
            env={"OUT": "/runs/{opt}-{index}"},
            config={"rate": "{lr}", "epochs": 3},
            array={"grid": {"opt": ["sgd", "adam"], "lr": [0.1, 1, True]}},
        )
        specs = [bench.machine.specs[bench.attempt(f"{array}.{n}")["id"]] for n in range(6)]
        assert specs[4].argv == ("train", "--lr=1", "{lr}", "{other}", "${lr}")
        assert [s.env["OUT"] for s in specs] == [f"/runs/{o}-{n}" for n, o in enumerate(["sgd"] * 3 + ["adam"] * 3)]
        assert [s.env["COTENANT_PARAM_LR"] for s in specs] == ["0.1", "1", "true"] * 2
        shown = await bench.control.views.get_job(a, f"{array}.3")
        assert shown.config == {"rate": 0.1, "lr": 0.1, "opt": "adam", "epochs": 3}, "a lone name keeps its type"
        assert specs[3].env["COTENANT_PARAM_OPT"] == "adam"


async def test_a_whole_array_is_cancelled_what_runs_and_what_waits(bench: Bench) -> None:
    a = await bench.caller("a", "alice", autopilot=True)
    array = await bench.submit(a, array=10)
    answer = await bench.control.jobs.cancel(a, array)
    assert answer.status == "stopping"
    await bench.settle()
    assert await counts(bench, array) == (0, 0, 0, 0, 0, 10)
    assert bench.job(array)["state"] == "cancelled" and len(started(bench)) == 2
    assert (await bench.control.views.get_job(a, f"{array}.7")).state == "cancelled"
    assert (await bench.control.jobs.cancel(a, array)).status == "already_final"
    bench.check()


async def test_lists_show_an_array_as_one_row_and_its_elements_on_demand(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, array=30)
    other = await bench.submit(a, "other")
    listed = await bench.control.views.list_jobs(a)
    assert [(row.job_id, row.array and row.array.size) for row in listed.jobs] == [(other, None), (array, 30)]
    for n in range(12):
        await end(bench, f"{array}.{n}")
    first = await bench.control.views.list_jobs(a, array=array, limit=10)
    rest = await bench.control.views.list_jobs(a, array=array, limit=10, cursor=first.cursor)
    assert [row.array_index for row in (*first.jobs, *rest.jobs)] == list(range(14)) and rest.cursor is None
    assert first.total == 14
    done = await bench.control.views.list_jobs(a, array=array, state="succeeded")
    assert len(done.jobs) == 12
    with pytest.raises(NotFound) as none:
        await bench.control.views.list_jobs(a, array=f"{array}.1")
    assert none.value.hint is not None and "without an index" in none.value.hint
    with pytest.raises(BadRequest, match="same list"):
        await bench.control.views.list_jobs(a, array=array, cursor=other)


async def test_an_element_that_tries_again_goes_before_those_that_have_not_started(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, array={"n": 4, "max_parallel": 1}, max_attempts=2, retry_on=["code"])
    await end(bench, f"{array}.0", code=1)
    assert started(bench) == [f"{array}.0", f"{array}.1"], "its place is free while it backs off"
    assert await counts(bench, array) == (3, 0, 1, 0, 0, 0)
    await bench.advance(31)
    assert len(started(bench)) == 2, "the limit holds for it too"
    await end(bench, f"{array}.1")
    assert started(bench)[2:] == [f"{array}.0"]
    for n in (0, 2, 3):
        await end(bench, f"{array}.{n}")
    assert bench.job(array)["state"] == "succeeded"
    bench.check()


async def test_an_array_goes_on_after_the_server_was_killed(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, array={"n": 6, "max_parallel": 2})
    await end(bench, f"{array}.0")
    await bench.restart(kill=True)
    assert await counts(bench, array) == (3, 0, 2, 1, 0, 0)
    for n in range(1, 6):
        await end(bench, f"{array}.{n}")
    assert bench.job(array)["state"] == "succeeded" and sorted(started(bench)) == [f"{array}.{n}" for n in range(6)]
    bench.check()


async def test_elements_on_a_lost_host_count_as_running(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, array={"n": 4, "max_parallel": 2})
    await bench.disconnect()
    await bench.advance(120)
    assert bench.job(f"{array}.0")["state"] == "lost"
    assert await counts(bench, array) == (2, 0, 2, 0, 0, 0)
    await bench.connect()
    await end(bench, f"{array}.0", f"{array}.1")
    await end(bench, f"{array}.2", f"{array}.3")
    assert bench.job(array)["state"] == "succeeded"
    bench.check()


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        ({}, "exactly one of n, params and grid"),
        ({"n": 3, "params": [{"a": 1}]}, "exactly one of"),
        ({"params": [{"a": 1}, {"b": 1}]}, r"params\[1\] has other names"),
        ({"params": [{"index": 1}]}, "cannot be a parameter's name"),
        ({"params": [{"a b": 1}]}, "cannot be a parameter's name"),
        ({"grid": {"a": []}}, "has no values"),
        ({"grid": {"a": list(range(400)), "b": list(range(400))}}, "160000 combinations"),
        ({"params": [{"lr": 1, "LR": 2}]}, "only in upper and lower case"),
        (0, "greater than or equal to 1"),
        (100_001, "less than or equal to 100000"),
    ],
)
def test_an_array_that_cannot_be_is_refused_with_a_sentence(array: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        JobSpec(command="x", array=array)


async def test_a_secret_among_the_parameters_is_refused(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    with pytest.raises(BadRequest, match=r"array\.key"):
        await bench.submit(a, array={"params": [{"key": "x"}, {"key": "ghp_" + "a1B2" * 9}]})


# ---- parts of an array


async def test_elements_are_cancelled_by_range_whether_they_run_or_wait(bench: Bench) -> None:
    a = await bench.caller("a", "alice", autopilot=True)
    array = await bench.submit(a, array=10)
    answer = await bench.control.jobs.cancel(a, array, indices="1-3,8")
    assert (answer.status, answer.job_id) == ("stopping", array)
    await bench.settle()
    assert await counts(bench, array) == (4, 0, 2, 0, 0, 4)
    assert started(bench) == [f"{array}.0", f"{array}.1", f"{array}.4"]
    assert [(await bench.control.views.get_job(a, f"{array}.{n}")).state for n in (1, 2, 5)] == [
        "cancelled", "cancelled", "queued",
    ]  # fmt: skip
    answer = await bench.control.jobs.cancel(a, f"{array}.9")
    assert (answer.status, await counts(bench, array)) == ("cancelled", (3, 0, 2, 0, 0, 5))
    assert (await bench.control.jobs.cancel(a, array, indices="8-9")).status == "already_final"
    for n in (0, 4, 5, 6, 7):
        await end(bench, f"{array}.{n}")
    assert bench.job(array)["state"] == "cancelled", "not all succeeded, none failed"
    assert bench.job(array)["message"] == "5 succeeded, 5 cancelled of 10 elements"
    bench.check()


async def test_a_range_is_asked_about_before_it_is_cancelled(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, array=10)
    with pytest.raises(ConfirmationRequired):
        await bench.control.jobs.cancel(a, array, indices="5-9")
    name, target = bench.control.jobs.meant(array, "5-9")
    token, _ = await bench.control.confirmations.mint(a, "cancel_job", name, target)
    with pytest.raises(CotenantError):
        await bench.control.jobs.cancel(a, array, indices="4-9", confirm_token=token)
    with pytest.raises(CotenantError):
        await bench.control.jobs.cancel(a, array, confirm_token=token)
    answer = await bench.control.jobs.cancel(a, array, indices="5-9", confirm_token=token)
    assert answer.status == "cancelled" and (await counts(bench, array))[-1] == 5


async def test_elements_are_held_and_released_by_range(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, array=6)
    shown = await bench.control.jobs.hold(a, array, "wait", indices="2-3")
    assert shown.array is not None and (shown.array.held, shown.array.pending) == (2, 2)
    assert (await bench.control.views.get_job(a, f"{array}.3")).state == "held"
    await end(bench, f"{array}.0", f"{array}.1")
    assert started(bench)[2:] == [f"{array}.4", f"{array}.5"]
    await end(bench, f"{array}.4", f"{array}.5")
    assert bench.job(array)["state"] == "queued" and await counts(bench, array) == (0, 2, 0, 4, 0, 0)
    await bench.control.jobs.unhold(a, f"{array}.3")
    await bench.settle()
    assert started(bench)[4:] == [f"{array}.3"]
    await bench.control.jobs.unhold(a, array)
    await bench.settle()
    await end(bench, f"{array}.2", f"{array}.3")
    assert bench.job(array)["state"] == "succeeded"
    with pytest.raises(Conflict, match="waits"):
        await bench.control.jobs.hold(a, array, "late", indices="2")
    bench.check()


async def test_a_held_array_starts_nothing_more(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, array=4)
    await bench.control.jobs.hold(a, array, "")
    await end(bench, f"{array}.0", f"{array}.1")
    assert len(started(bench)) == 2 and bench.job(array)["state"] == "held"
    await bench.control.jobs.unhold(a, array)
    await bench.settle()
    assert len(started(bench)) == 4
    bench.check()


async def test_what_failed_is_tried_again_under_its_old_indices(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, ["train", "{x}"], array={"params": [{"x": n * n} for n in range(150)]})
    for n in range(150):
        await end(bench, f"{array}.{n}", code=int(n in (3, 4, 5, 130)))
    assert bench.job(array)["state"] == "failed"
    again = await bench.control.jobs.retry(a, array, only="failed", request_id="r1")
    await bench.settle()
    assert again.array is not None
    assert (again.array.indices, again.array.size, again.retry_of) == ("3-5,130", 150, array)
    assert again.message == f"tries elements 3-5,130 of {array} again"
    assert (await bench.control.jobs.retry(a, array, only="failed", request_id="r1")).job_id == again.job_id
    assert (await bench.control.jobs.retry(a, array, only="failed")).job_id == again.job_id, "a repeat within 180 s"
    with pytest.raises(NotFound):
        await bench.control.jobs.get(a, f"{again.job_id}.6")
    await end(bench, f"{again.job_id}.3", f"{again.job_id}.4")
    await end(bench, f"{again.job_id}.5")
    spec = bench.machine.specs[bench.attempt(f"{again.job_id}.130")["id"]]
    assert (spec.argv, spec.env["COTENANT_ARRAY_SIZE"], spec.env["COTENANT_PARAM_X"]) == (
        ("train", "16900"),
        "150",
        "16900",
    )
    await end(bench, f"{again.job_id}.130")
    assert bench.job(again.job_id)["state"] == "succeeded" and bench.job(array)["state"] == "failed", "final is final"
    one = await bench.control.jobs.retry(a, f"{array}.7")
    assert one.array is not None and one.array.indices == "7"
    some = await bench.control.jobs.retry(a, array, indices="3-9")
    assert some.array is not None and some.array.indices == "3-9"
    bench.check()


async def test_what_cannot_be_tried_again_says_why(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, array=4)
    await end(bench, f"{array}.0")
    with pytest.raises(Conflict, match=f"{array}.1 is not over"):
        await bench.control.jobs.retry(a, array)
    with pytest.raises(Conflict, match="has failed"):
        await bench.control.jobs.retry(a, array, only="failed")
    with pytest.raises(NotFound, match=f"{array}.4"):
        await bench.control.jobs.retry(a, array, indices="0-4")
    with pytest.raises(BadRequest, match="numbers and ranges"):
        await bench.control.jobs.retry(a, array, indices="x")
    job = await bench.submit(a, "single")
    with pytest.raises(BadRequest, match="no array"):
        await bench.control.jobs.retry(a, job, only="failed")
    assert (await bench.control.jobs.retry(a, array, indices="0")).array is not None


async def test_a_log_is_an_elements(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, array=4)
    await end(bench, f"{array}.0", code=1)
    with pytest.raises(BadRequest, match="array") as refused:
        await bench.control.logs.tail(a, array)
    assert refused.value.hint is not None and f"Failed: {array}.0; running: {array}.2, {array}.1" in refused.value.hint
    page = await bench.control.logs.tail(a, f"{array}.3")
    assert page.lines == [] and not page.final


async def test_the_limit_of_an_array_can_be_changed(tmp_path) -> None:
    async with Bench(tmp_path, Machine(cards=5)) as bench:
        a = await bench.caller("a", "alice")
        array = await bench.submit(a, array={"n": 9, "max_parallel": 1})
        shown = await bench.control.jobs.modify(a, array, JobChange(max_parallel=4))
        await bench.settle()
        assert len(started(bench)) == 4 and shown.array is not None and shown.array.max_parallel == 4
        await bench.control.jobs.modify(a, array, JobChange(max_parallel=2, priority="batch"))
        await end(bench, f"{array}.0", f"{array}.1")
        assert len(started(bench)) == 4, "what runs goes on, and nothing is added"
        await end(bench, f"{array}.2")
        assert len(started(bench)) == 5
        assert bench.job(f"{array}.4")["priority"] == 0, "a change holds for what has not started"
        job = await bench.submit(a, "single", gpus=5)
        with pytest.raises(BadRequest, match="no array"):
            await bench.control.jobs.modify(a, job, JobChange(max_parallel=2))
        bench.check()


async def test_an_array_changes_hands_as_a_whole_while_none_of_it_runs(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "alice")
    array = await bench.submit(a, array=3)
    for job in (array, f"{array}.0"):
        with pytest.raises(Conflict, match="element"):
            await bench.control.leases.hand_over(a, job, "b")
    await bench.control.jobs.hold(a, array, "")
    await end(bench, f"{array}.0", f"{array}.1")
    await bench.control.leases.hand_over(a, array, "b")
    await bench.control.jobs.unhold(b, array)
    await bench.settle()
    assert bench.job(f"{array}.2")["caller"] == "b"


async def test_all_of_an_array_in_the_queue_share_its_room(tmp_path) -> None:
    async with Bench(tmp_path, Machine(cards=4)) as bench:
        a = await bench.caller("a", "alice")
        array = await bench.submit(a, array={"n": 8, "max_parallel": 3}, max_attempts=2, retry_on=["code"])
        for n in (0, 1):
            await end(bench, f"{array}.{n}", code=1)
        for seconds in (0, 35, 35):
            await bench.advance(seconds)
            keeper = bench.control.context.keeper
            kept = {ask.id: (ask.count, ask.array_room) for ask in keeper.world().asks}
            keeper.distrust()
            keeper.refresh(bench.clock.now_ms())
            assert kept == {ask.id: (ask.count, ask.array_room) for ask in keeper.world().asks} != {}
            living = [
                row["id"]
                for row in bench.rows("SELECT id FROM job WHERE array_index IS NOT NULL AND state = 'running'")
            ]
            assert len(living) == 3, "as many as may, and no more"
            await end(bench, living[0], code=0)
        bench.check()
