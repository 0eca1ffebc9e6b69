"""Jobs: taken in, started, ended, tried again, cancelled, and what their hosts' words do to them."""

from __future__ import annotations

import asyncio
import json

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.hostd.protocol import CardProcess
from cotenant.server.errors import BadRequest, Busy, ConfirmationRequired, Conflict, Forbidden, NotFound, QuotaExceeded
from cotenant.server.model.spec import JobSpec
from cotenant.server.store import requests


async def end(bench: Bench, job: str, code: int | None = 0, **record) -> None:
    bench.machine.finish(bench.attempt(job)["id"], code, **record)
    await bench.settle()


# ---- a job's life


async def test_a_job_runs_and_succeeds_and_every_step_left_one_event(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, gpus=1, hours=2, env={"X": "1"}, workdir="/tmp", stop_grace_s=5)
    attempt = bench.attempt(job)
    spec = bench.machine.specs[attempt["id"]]
    assert (spec.argv, spec.env, spec.workdir, spec.time_limit_s, spec.stop_grace_s) == (
        ("/bin/sh", "-c", "train"), {"X": "1"}, "/tmp", 7200, 5,
    )  # fmt: skip
    assert (spec.fence, spec.epoch, spec.lease_id) == (attempt["fence"], 1, attempt["lease_id"])
    shown = await bench.control.views.get_job(a, job)
    assert (shown.state, shown.host, len(shown.slots), shown.task.status) == ("running", "local", 1, "working")
    await end(bench, job, 0)
    shown = await bench.control.views.get_job(a, job)
    assert (shown.state, shown.exit_code, shown.attempts[0].exit_code, shown.task.status) == (
        "succeeded",
        0,
        0,
        "completed",
    )
    types = [e["type"] for e in bench.events() if e["job_id"] == job]
    assert types == ["job.submitted", "job.placed", "job.running", "lease.released", "job.succeeded"]
    assert bench.uses() == ["free", "free"]
    await bench.advance(2)
    assert bench.machine.attempts == {}, "an end that is written down is forgotten by the host"


@pytest.mark.parametrize(
    ("record", "state", "failure"),
    [
        ({"code": 0}, "succeeded", None),
        ({"code": 3}, "failed", "code"),
        ({"signal": 11, "sender": "outside"}, "failed", "signal"),
        ({"signal": 9, "sender": "kernel_oom"}, "failed", "oom"),
        ({"signal": 15, "sender": "shim", "reason": "time_limit"}, "failed", "time_limit"),
        ({"exec_error": "[Errno 2] No such file"}, "failed", "start"),
    ],
)
async def test_how_it_ended_says_what_became_of_it(bench: Bench, record: dict, state: str, failure: str | None) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    await end(bench, job, record.pop("code", None), **record)
    row = bench.job(job)
    assert (row["state"], row["failure_class"]) == (state, failure)
    assert row["message"]


async def test_jobs_wait_in_order_of_priority_then_time(bench: Bench) -> None:
    a = await bench.caller("a", max_priority="critical")
    blocking = await bench.submit(a, gpus=2)
    normal = await bench.submit(a, "n", gpus=2)
    high = await bench.submit(a, "h", gpus=2, priority="high")
    later = await bench.submit(a, "l", gpus=2)
    started = []
    for job in (blocking, high, normal, later):
        assert bench.job(job)["state"] == "running"
        started.append(job)
        await end(bench, job)
    waiting = await bench.submit(a, "x", gpus=2, priority="batch")
    assert bench.job(waiting)["state"] == "running"


async def test_a_waiting_job_says_why(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    await bench.control.leases.acquire(a, gpus=2)
    job = await bench.submit(b)
    shown = await bench.control.views.get_job(b, job)
    assert (shown.state, shown.queue_position, shown.blockers[0].code) == ("queued", 1, "busy")
    (row,) = (await bench.control.views.list_jobs(b)).jobs
    assert (row.job_id, row.blocker) == (job, "busy")
    (queue,) = (await bench.control.views.list_queues(b)).queues
    assert [entry.id for entry in queue.entries] == [job]


async def test_refuse_means_now_or_not_at_all(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    await bench.control.leases.acquire(a, gpus=2)
    with pytest.raises(Busy):
        await bench.control.jobs.submit(b, JobSpec(command="x"), when_full="refuse")
    with pytest.raises(QuotaExceeded):
        await bench.control.jobs.submit(b, JobSpec(command="x", gpus=3))
    with pytest.raises(Forbidden, match="priority"):
        await bench.control.jobs.submit(b, JobSpec(command="x", priority="critical"))
    assert bench.rows("SELECT * FROM job") == []


async def test_a_dry_run_says_what_would_happen_and_changes_nothing(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    before = bench.dump()
    spec = JobSpec(command="train --lr 3", gpus=2, env={"A": "b"})
    answer = await bench.control.jobs.submit(a, spec, dry_run=True, request_id="r")
    assert (answer.dry_run, answer.would_start, answer.host, len(answer.slots)) == (True, True, "local", 2)
    assert bench.dump() == before and bench.machine.asked["start"] == 0
    await bench.control.leases.acquire(b)
    answer = await bench.control.jobs.submit(a, spec, dry_run=True)
    assert not answer.would_start and answer.blockers[0].code == "busy"
    with pytest.raises(QuotaExceeded):
        await bench.control.jobs.submit(a, JobSpec(command="x", gpus=9), dry_run=True)


async def test_submit_can_wait_for_the_end(bench: Bench) -> None:
    a = await bench.caller("a")
    seen: list[str] = []

    async def progress(done: float, total: float | None, message: str) -> None:
        seen.append(message)

    waiting = asyncio.create_task(bench.control.jobs.submit(a, JobSpec(command="x"), wait_s=45, on_progress=progress))
    for _ in range(100):
        await bench.settle()
        await asyncio.sleep(0.001)
        if bench.machine.processes:
            break
    bench.machine.finish(next(iter(bench.machine.processes)), 5)
    await bench.settle()
    answer = await asyncio.wait_for(waiting, 5)
    assert (answer.state, answer.exit_code) == ("failed", 5)
    assert "running" in seen


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "\ud800", [{"deep": float("-inf")}]])
async def test_what_json_cannot_carry_is_refused(bench: Bench, bad: object) -> None:
    a = await bench.caller("a")
    with pytest.raises(BadRequest, match="JSON cannot carry"):
        await bench.control.jobs.submit(a, JobSpec(command="x", config={"x": bad}))
    assert bench.rows("SELECT * FROM job") == []


# ---- trying again


async def test_a_class_in_retry_on_gets_another_attempt_after_a_pause(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a, max_attempts=4, retry_on=("code",))
    for number, pause in enumerate((30, 60, 120), 1):
        await bench.advance(61)
        await end(bench, job, 1)
        row = bench.job(job)
        assert (row["state"], row["attempts_left"], row["quick_failures"]) == ("queued", 4 - number, 0)
        assert row["not_before_ms"] - bench.clock.now_ms() == pause * 1000
        assert (await bench.control.views.get_job(a, job)).blockers[0].code == "backing_off"
        await bench.advance(pause - 1)
        assert bench.job(job)["state"] == "queued"
        await bench.advance(2)
        assert (bench.job(job)["state"], bench.attempt(job)["epoch"]) == ("running", number + 1)
    await bench.advance(61)
    await end(bench, job, 1)
    assert (bench.job(job)["state"], bench.job(job)["attempts_left"]) == ("failed", 0)
    epochs = bench.rows("SELECT epoch, fence FROM attempt ORDER BY epoch")
    assert [row["fence"] for row in epochs] == sorted({row["fence"] for row in epochs})


async def test_a_class_not_in_retry_on_is_final(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a, max_attempts=3)
    await end(bench, job, 1)
    row = bench.job(job)
    assert row["state"] == "failed" and "not in retry_on" in row["message"]


@pytest.mark.parametrize("at_once", [False, True])
async def test_three_quick_failures_hold_the_job(bench: Bench, at_once: bool) -> None:
    """Also where the end is known before the start was ever reported."""
    a = await bench.caller("a")
    bench.machine.exits_at_once = 1 if at_once else None
    job = await bench.submit(a, max_attempts=9, retry_on=("code",))
    for _ in range(3):
        if not at_once:
            await end(bench, job, 1)
        await bench.advance(61)
    row = bench.job(job)
    assert (row["state"], row["quick_failures"], row["attempts_left"]) == ("held", 3, 6)
    assert "within a minute" in row["held_reason"]
    bench.machine.exits_at_once = None
    await bench.control.jobs.unhold(a, job)
    await bench.settle()
    assert (bench.job(job)["state"], bench.job(job)["quick_failures"]) == ("running", 0)


@pytest.mark.parametrize("code", [0, 1])
async def test_a_job_that_ended_before_its_start_was_told_ran_all_the_same(bench: Bench, code: int) -> None:
    a = await bench.caller("a")
    bench.machine.exits_at_once = code
    job = await bench.submit(a, ("sh", "-c", "exit $0"))
    await bench.settle()
    answer = await bench.control.views.get_job(a, job)
    assert answer.state == ("failed" if code else "succeeded")
    assert answer.started_at == answer.attempts[0].started_at is not None
    assert answer.running_s == answer.attempts[0].exit.duration_s  # type: ignore[union-attr]


async def test_an_ask_that_no_pass_has_looked_at_says_so_and_does_not_call_itself_new(bench: Bench) -> None:
    a = await bench.caller("a")
    await bench.submit(a, gpus=len(bench.machine.uuids))
    job = await bench.submit(a)
    bench.control.context.keeper.waiting.drop(job)  # as between two passes
    [blocker] = (await bench.control.views.get_job(a, job)).blockers
    assert blocker.code == "behind" and "next pass decides" in blocker.message and "just" not in blocker.message


async def test_a_command_in_words_is_shown_as_one_types_it(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a, ("python", "-c", "raise SystemExit(3)"))
    assert (await bench.control.views.get_job(a, job)).command == "python -c 'raise SystemExit(3)'"


async def test_a_retry_is_a_new_job_with_the_same_spec(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    job = await bench.submit(a, "go", gpus=0, labels={"x": "1"})
    with pytest.raises(Conflict, match="not over"):
        await bench.control.jobs.retry(a, job)
    await end(bench, job, 1)
    with pytest.raises(Forbidden):
        await bench.control.jobs.retry(b, job)
    again = await bench.control.jobs.retry(a, job)
    assert again.job_id != job and bench.job(again.job_id)["spec"] == bench.job(job)["spec"]
    assert (await bench.control.jobs.retry(a, job)).job_id == again.job_id, "a repeat while it is not over"
    await bench.settle()
    await end(bench, again.job_id, 1)
    third = await bench.control.jobs.retry(a, job)
    assert third.job_id not in (job, again.job_id) and not third.deduplicated
    with pytest.raises(NotFound):
        await bench.control.jobs.retry(a, "job_none")


# ---- hold, signal


async def test_a_held_job_waits_at_its_place(bench: Bench) -> None:
    a = await bench.caller("a")
    blocking = await bench.submit(a, gpus=2)
    first, second = await bench.submit(a, "1", gpus=2), await bench.submit(a, "2", gpus=2)
    await bench.control.jobs.hold(a, first, "not yet")
    await bench.control.jobs.hold(a, first, "not yet")
    assert len(bench.events("job.held")) == 1
    with pytest.raises(Conflict, match="only a waiting job"):
        await bench.control.jobs.hold(a, blocking, "x")
    await end(bench, blocking)
    assert (bench.job(first)["state"], bench.job(second)["state"]) == ("held", "running")
    third = await bench.submit(a, "3", gpus=2)
    await bench.control.jobs.unhold(a, first)
    await end(bench, second)
    assert (bench.job(first)["state"], bench.job(third)["state"]) == ("running", "queued")


async def test_a_signal_reaches_the_newest_attempt_and_nothing_else(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    job = await bench.submit(a)
    answer = await bench.control.jobs.signal(a, job, "usr1")
    assert (answer.signal, answer.attempt_id) == ("SIGUSR1", bench.attempt(job)["id"])
    for wrong in ("KILL", "SIGSTOP", "9", "", "usr3"):
        with pytest.raises(BadRequest, match="not a signal"):
            await bench.control.jobs.signal(a, job, wrong)
    with pytest.raises(Forbidden):
        await bench.control.jobs.signal(b, job, "HUP")
    await end(bench, job)
    with pytest.raises(Conflict, match="no process"):
        await bench.control.jobs.signal(a, job, "HUP")
    assert bench.machine.asked["signal"] == 1


# ---- cancel


async def test_cancelling_asks_twice_and_the_token_is_bound(bench: Bench) -> None:
    a, b = await bench.caller("a", "o"), await bench.caller("b", "o")
    cancel, mint = bench.control.jobs.cancel, bench.control.confirmations.mint
    job, other = await bench.submit(a, gpus=1), await bench.submit(a, "other", gpus=0)
    with pytest.raises(ConfirmationRequired):
        await cancel(a, job)
    token, until = await mint(a, "cancel_job", job)
    assert until.startswith("20")
    for caller, target in ((b, job), (a, other)):
        with pytest.raises(BadRequest) as refused:
            await cancel(caller, target, confirm_token=token)
        assert refused.value.code == "wrong_confirm_token"
    with pytest.raises(BadRequest):
        await cancel(a, job, confirm_token="yes_guess")
    done = await cancel(a, job, confirm_token=token, reason="slip")
    assert done.status == "stopping"
    await bench.settle()
    row = bench.job(job)
    assert (row["state"], row["stop_confirmed"], row["message"]) == ("cancelled", "twice", "cancelled as asked")
    (event,) = bench.events("job.stopping")
    assert (json.loads(event["args"])["confirmed"], event["reason"], event["caller"]) == ("twice", "slip", "a")
    assert (await cancel(a, job, confirm_token=token)).status == "already_final"


async def test_a_confirmation_ends_with_its_use_its_time_and_the_state_it_was_asked_in(bench: Bench) -> None:
    a = await bench.caller("a")
    cancel, mint = bench.control.jobs.cancel, bench.control.confirmations.mint
    bench.machine.obeys_stops = False
    blocking = await bench.submit(a, gpus=2)
    job = await bench.submit(a, "next", gpus=2)
    queued, _ = await mint(a, "cancel_job", job)
    used, _ = await mint(a, "cancel_job", blocking)
    await bench.control.context.db.write(
        lambda tx: requests.spend(tx, "a", "cancel_job", blocking, "running", used, bench.clock.now_ms())
    )
    with pytest.raises(Conflict) as refused:
        await cancel(a, blocking, confirm_token=used)
    assert refused.value.code == "confirm_token_used"
    await end(bench, blocking)
    assert bench.job(job)["state"] == "running"
    with pytest.raises(Conflict) as refused:
        await cancel(a, job, confirm_token=queued)
    assert refused.value.code == "changed_since_asked"
    fresh, _ = await mint(a, "cancel_job", job)
    await bench.advance(301)
    with pytest.raises(Conflict) as refused:
        await cancel(a, job, confirm_token=fresh)
    assert refused.value.code == "confirm_token_expired"
    assert bench.job(job)["state"] == "running"
    with pytest.raises(Conflict, match="ended already"):
        await mint(a, "cancel_job", blocking)


async def test_a_question_that_is_open_is_not_asked_beside_itself(bench: Bench) -> None:
    a, b = await bench.caller("a", "o"), await bench.caller("b", "o")
    mint = bench.control.confirmations.mint
    job, other = await bench.submit(a, gpus=1), await bench.submit(a, "other", gpus=0)
    token, first = await mint(a, "cancel_job", job)
    bench.clock.advance(200)
    again, second = await mint(a, "cancel_job", job)
    assert again == token and second > first
    for _ in range(20):
        await asyncio.gather(mint(a, "cancel_job", job), mint(b, "cancel_job", job), mint(a, "cancel_job", other))
    assert bench.one("SELECT count(*) FROM confirmation") == 3
    bench.clock.advance(200)  # the answer to the first question would be too late, were it not asked again
    assert (await bench.control.jobs.cancel(a, job, confirm_token=token)).status == "stopping"
    bench.clock.advance(400)
    anew, _ = await mint(a, "cancel_job", other)
    assert (await bench.control.jobs.cancel(a, other, confirm_token=anew)).status == "stopping"


async def test_autopilot_and_people_are_not_asked(bench: Bench) -> None:
    a, pilot, person = await bench.caller("a", "o"), await bench.caller("p", "o", autopilot=True), await bench.person()
    first, second = await bench.submit(a, "1", gpus=0), await bench.submit(a, "2", gpus=0)
    await bench.control.jobs.cancel(pilot, first)
    await bench.control.operate(person, "job.cancel", {"job_id": second}, "cleaning up")
    await bench.settle()
    confirmed = [json.loads(e["args"])["confirmed"] for e in bench.events("job.stopping")]
    assert confirmed == ["autopilot", "twice"]
    assert bench.events("job.stopping")[1]["door"] == "operate"


async def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_when_it_is_gone(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    bench.machine.obeys_stops = False
    running, waiting = await bench.submit(a, gpus=2), await bench.submit(a, "next")
    with pytest.raises(Forbidden):
        await bench.control.jobs.cancel(b, running, confirmed=True)
    assert (await bench.control.jobs.cancel(a, waiting, confirmed=True)).state == "cancelled"
    assert (await bench.control.jobs.cancel(a, running, confirmed=True)).state == "stopping"
    await bench.advance(5)
    assert bench.job(running)["state"] == "stopping" and bench.uses() == ["held", "held"]
    assert bench.machine.asked["stop"] > 1, "passed on again until it is over"
    await end(bench, running, None, signal=9, sender="shim", reason="cancel")
    assert bench.job(running)["state"] == "cancelled" and bench.uses() == ["free", "free"]


async def test_a_job_that_came_to_its_good_end_first_did_succeed(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.machine.obeys_stops = False
    job = await bench.submit(a)
    await bench.control.jobs.cancel(a, job, confirmed=True)
    await end(bench, job, 0)
    assert bench.job(job)["state"] == "succeeded"


# ---- starts that are refused


@pytest.mark.parametrize("what", ["occupied", "sick"])
async def test_a_start_refused_for_the_card_costs_no_attempt(bench: Bench, what: str) -> None:
    a = await bench.caller("a")
    if what == "occupied":
        bench.machine.dirty["SIM-local-0"] = [CardProcess(9, "eve", "miner", 5)]
    else:
        bench.machine.card_states["SIM-local-0"] = ("sick", "Xid 79")
    job = await bench.submit(a)
    first = bench.attempt(job)
    assert first["state"] == "ended" and first["failure_class"] == "host"
    assert (bench.job(job)["state"], bench.job(job)["attempts_left"]) == ("queued", 1)
    await bench.advance(6)
    assert bench.job(job)["state"] == "running"
    slots = [s.uuid for s in (await bench.control.views.get_job(a, job)).slots]
    assert slots == ["SIM-local-1"], "the other card: what the host said of the first was heard"


async def test_a_start_refused_for_the_job_is_its_failure(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a, workdir="/missing")
    row = bench.job(job)
    assert (row["state"], row["failure_class"]) == ("failed", "start") and "bad_workdir" in row["message"]
    assert bench.uses() == ["free", "free"]


async def test_a_start_behind_a_tombstone_ends_the_job(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.hosts["local"].lose.add("start")
    job = await bench.submit(a)
    await bench.control.jobs.cancel(a, job, confirmed=True)
    await bench.settle()
    assert bench.job(job)["state"] == "cancelled"
    assert bench.machine.history == []


async def test_a_start_below_a_fence_that_the_host_has_seen_lifts_the_counter(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.machine.fences["SIM-local-0/0"] = 5000
    job = await bench.submit(a)
    await bench.advance(6)
    assert bench.job(job)["state"] == "running"
    assert bench.attempt(job)["fence"] > 5000


@pytest.mark.parametrize("how", ["lose", "drop"])
async def test_a_start_without_an_answer_is_asked_for_again_and_runs_once(bench: Bench, how: str) -> None:
    a = await bench.caller("a")
    bench.reports_held = True
    getattr(bench.hosts["local"], how).add("start")
    job = await bench.submit(a)
    assert bench.job(job)["state"] == "deploying"
    await bench.advance(40)
    assert bench.job(job)["state"] == "running"
    assert len(bench.machine.history) == 1
    bench.reports_held = False


# ---- unclean ends


async def test_an_unclean_end_keeps_its_slots_until_the_host_says_clean(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    attempt = bench.attempt(job)["id"]
    await end(bench, job, 0, clean=False)
    assert bench.job(job)["state"] == "succeeded"
    await bench.advance(10)
    assert bench.uses() == ["cleaning", "free"]
    await bench.advance(60)
    assert bench.uses() == ["occupied", "free"]
    bench.machine.got_clean(attempt)
    await bench.settle()
    assert bench.uses() == ["free", "free"]


async def test_hosts_of_old_jobs_are_avoided_where_there_is_another(make_bench) -> None:
    bench = await make_bench(Machine("local", cards=1), Machine("second", cards=1))
    a = await bench.caller("a")
    job = await bench.submit(a, max_attempts=2, retry_on=("lost",))
    host = bench.attempt(job)["host"]
    machine = next(m for m in bench.machines if m.name == host)
    machine.shim_dies(bench.attempt(job)["id"])
    await bench.settle()
    await bench.advance(40)
    assert bench.attempt(job)["host"] not in (host, None) and bench.job(job)["state"] == "running"
