"""Suspending a running job: ordered on record first, suspended from the host's word on, and never forgotten in between."""

from __future__ import annotations

import random

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.server.errors import Conflict, Forbidden
from cotenant.server.model.caller import Caller

HOUR_MS = 3_600_000
ACTS = [
    "suspend",
    "suspend",
    "resume",
    "resume",
    "lose",
    "drop",
    "cut",
    "mend",
    "hold",
    "bring",
    "time",
    "restart",
    "patience",
]


def told(bench: Bench, job: str) -> list[str]:
    return [e["type"] for e in bench.events() if e["job_id"] == job]


def stands(bench: Bench, job: str) -> bool:
    """Whether the job's processes stand still, whatever the records say."""
    return bench.machine.attempts[bench.attempt(job)["id"]].suspended


def agree(bench: Bench, job: str) -> None:
    """The records say what the machine does, and nothing is left to be ordered."""
    bench.control.context.keeper.refresh(bench.clock.now_ms())
    row, attempt, report = bench.job(job), bench.attempt(job), bench.machine.attempts[bench.attempt(job)["id"]]
    assert attempt["suspend_asked"] == ""
    assert (row["state"] == "suspended") == report.suspended == (attempt["suspended_at_ms"] is not None), row["state"]
    assert attempt["suspended_ms"] == report.suspended_ms
    lease = bench.lease(attempt["lease_id"])
    assert lease["hard_end_at_ms"] == lease["granted_at_ms"] + row["hours_ms"] + report.suspended_ms
    assert bench.control.context.keeper.living[lease["id"]].suspended is report.suspended
    assert lease["state"] == "running" and bench.uses()[0] == "held", "its card stays taken"


async def test_a_job_is_suspended_and_goes_on_and_its_lease_ends_later(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, hours=2)
    shown = await bench.control.jobs.hold(a, job, "the data is being moved", suspend=True)
    assert (shown.state, shown.held_reason) == ("suspended", 'suspended by a: "the data is being moved"')
    agree(bench, job)
    await bench.advance(600)
    shown = await bench.control.views.get_job(a, job)
    assert (shown.time_left_s, shown.suspended_s) == (7200, 600)
    assert (await bench.control.views.list_gpus(a)).gpus[0].until is None, "nobody knows when it ends"
    bench.machine.stands_ms = 600_000
    shown = await bench.control.jobs.unhold(a, job, "there it is")
    assert (shown.state, shown.held_reason, shown.time_left_s, shown.suspended_s) == ("running", None, 7200, 600)
    agree(bench, job)
    assert told(bench, job)[3:] == ["job.suspending", "job.suspended", "job.resuming", "job.resumed"]
    assert [e["reason"] for e in bench.events("job.suspending", "job.resuming")] == [
        "the data is being moved",
        "there it is",
    ]


async def test_a_waiting_job_waits_on_while_the_end_is_unknown(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    jobs = [await bench.submit(a, f"c{n}", hours=1) for n in range(2)]
    waits = await bench.submit(a, "waits", hours=1)
    (blocker,) = (await bench.control.views.get_job(a, waits)).blockers
    assert blocker.until is not None
    for job in jobs:
        await bench.control.jobs.hold(a, job, "", suspend=True)
    await bench.settle()
    (blocker,) = (await bench.control.views.get_job(a, waits)).blockers
    assert blocker.code == "busy" and blocker.until is None
    await bench.control.jobs.unhold(a, jobs[0])
    await bench.settle()
    (blocker,) = (await bench.control.views.get_job(a, waits)).blockers
    assert blocker.until is not None


async def test_without_suspend_a_running_job_is_not_held_and_the_answer_says_how(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a)
    with pytest.raises(Conflict, match="only a waiting job") as said:
        await bench.control.jobs.hold(a, job, "")
    assert said.value.code == "not_waiting" and "suspend=true" in said.value.hint
    waiting = await bench.submit(a, "more", gpus=2)
    assert (await bench.control.jobs.hold(a, waiting, "", suspend=True)).state == "held", "a waiting one is held"


async def test_only_its_owner_and_people_suspend_a_job(bench: Bench) -> None:
    a, b, person = await bench.caller("a", "alice"), await bench.caller("b", "bob"), await bench.person()
    job = await bench.submit(a)
    for act in (bench.control.jobs.hold(b, job, "", suspend=True), bench.control.jobs.unhold(b, job)):
        with pytest.raises(Forbidden):
            await act
    assert (await bench.control.operate(person, "job.suspend", {"job_id": job}, "a demo"))["state"] == "suspended"
    assert (await bench.control.operate(person, "job.resume", {"job_id": job}, "over"))["state"] == "running"
    assert [e["caller"] for e in bench.events("job.suspending", "job.resuming")] == ["paula", "paula"]


async def test_a_repeat_with_the_same_request_id_suspends_once(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a)
    for _ in range(2):
        await bench.control.jobs.hold(a, job, "", suspend=True, request_id="s")
    await bench.control.jobs.unhold(a, job, request_id="r")
    assert (await bench.control.jobs.hold(a, job, "", suspend=True, request_id="s")).state == "running"
    assert len(bench.events("job.suspending")) == 1 and bench.machine.asked["suspend"] == 1
    with pytest.raises(Conflict):
        await bench.control.jobs.hold(a, job, "", request_id="s")


@pytest.mark.parametrize("what", ["suspend", "resume"])
@pytest.mark.parametrize("how", ["lose", "drop", "away", "deaf"])
@pytest.mark.parametrize("then", ["the tick", "a restart", "a kill"])
async def test_an_order_stands_until_the_host_has_confirmed_it(bench: Bench, what: str, how: str, then: str) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, hours=2)
    if what == "resume":
        await bench.control.jobs.hold(a, job, "", suspend=True)
        if how == "deaf":
            return
    host = bench.hosts["local"]
    bench.reports_held = how == "drop"
    if how in ("lose", "drop"):
        getattr(host, how).add(what)
    elif how == "away":
        await bench.disconnect()
    else:
        bench.machine.deaf = True
    act = bench.control.jobs.hold(a, job, "", suspend=True) if what == "suspend" else bench.control.jobs.unhold(a, job)
    shown = await act
    assert shown.state == ("running" if what == "suspend" else "suspended")
    assert "not confirmed" in (shown.held_reason or "")
    bench.machine.deaf = bench.reports_held = False
    if how == "away" and then == "the tick":
        await bench.connect()
    if then != "the tick":
        await bench.restart(kill=then == "a kill")
        if how == "away":
            await bench.connect()
    await bench.advance(7)
    assert bench.job(job)["state"] == ("suspended" if what == "suspend" else "running")
    agree(bench, job)
    assert len(bench.events("job.suspended" if what == "suspend" else "job.resumed")) == 1


async def test_an_order_can_be_taken_back_before_it_is_confirmed(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, hours=2)
    await bench.disconnect()
    await bench.control.jobs.hold(a, job, "", suspend=True)
    shown = await bench.control.jobs.unhold(a, job)
    assert (shown.state, shown.held_reason) == ("running", "it is to go on; its host has not confirmed it yet")
    await bench.connect()
    await bench.advance(7)
    assert bench.machine.asked["suspend"] == 0 and not stands(bench, job)
    agree(bench, job)


async def test_it_goes_on_by_itself_and_that_is_told(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, hours=2, max_suspend_h=1)
    await bench.control.jobs.hold(a, job, "", suspend=True)
    bench.machine.stands_ms = HOUR_MS
    bench.machine.stand(bench.attempt(job)["id"], False)  # its shim
    await bench.settle()
    agree(bench, job)
    (event,) = bench.events("job.resumed")
    assert event["severity"] == "warning" and "as long as it may be: 1 h" in event["reason"]
    with pytest.raises(Conflict, match="suspended for 1 h") as said:
        await bench.control.jobs.hold(a, job, "", suspend=True)
    assert said.value.code == "suspend_used_up"
    never = await bench.submit(a, "never", max_suspend_h=0)
    with pytest.raises(Conflict, match="max_suspend_h is 0"):
        await bench.control.jobs.hold(a, never, "", suspend=True)


async def test_it_goes_on_while_nobody_listens(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, hours=2)
    await bench.control.jobs.hold(a, job, "", suspend=True)
    await bench.disconnect()
    await bench.advance(60)
    assert bench.job(job)["state"] == "lost"
    bench.machine.stand(bench.attempt(job)["id"], False)
    await bench.connect()
    await bench.settle()
    assert bench.job(job)["state"] == "running"
    agree(bench, job)


async def test_what_is_suspended_is_suspended_still_when_its_host_is_back(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, hours=2)
    await bench.control.jobs.hold(a, job, "", suspend=True)
    await bench.disconnect()
    await bench.advance(60)
    await bench.connect()
    await bench.settle()
    assert bench.job(job)["state"] == "suspended" and bench.job(job)["held_reason"] == "suspended by a"
    agree(bench, job)
    assert (await bench.control.views.get_job(a, job)).suspended_s == 60


async def test_a_report_of_before_changes_nothing(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, hours=2)
    attempt = bench.attempt(job)["id"]
    await bench.control.jobs.hold(a, job, "", suspend=True)
    bench.machine.report("attempt", bench.machine.attempts[attempt])
    await bench.control.jobs.unhold(a, job)
    await bench.settle()  # the report says suspended, and came late
    assert bench.job(job)["state"] == "running"
    agree(bench, job)


@pytest.mark.parametrize("end", ["cancel", "exit", "killed", "quick failures"])
async def test_what_is_suspended_can_end(bench: Bench, end: str) -> None:
    a = await bench.caller("a", "alice", autopilot=True)
    job = await bench.submit(a, max_attempts=9, retry_on=["signal"])
    await bench.control.jobs.hold(a, job, "", suspend=True)
    attempt = bench.attempt(job)["id"]
    if end == "cancel":
        await bench.control.jobs.cancel(a, job)
    elif end == "exit":
        bench.machine.finish(attempt, 0)
    elif end == "killed":
        bench.machine.finish(attempt, None, signal=9, sender="outside")
    else:
        await bench.control.context.db.write(lambda tx: tx.execute("UPDATE job SET quick_failures = 2"))
        bench.machine.finish(attempt, None, signal=9, sender="outside")
    await bench.settle()
    states = {"cancel": "cancelled", "exit": "succeeded", "killed": "queued", "quick failures": "held"}
    assert bench.job(job)["state"] == states[end]
    assert bench.uses() == ["free", "free"]


@pytest.mark.parametrize("state", ["deploying", "stopping", "lost", "succeeded"])
async def test_what_has_no_process_that_runs_is_refused_with_what_to_do(make_bench, state: str) -> None:
    bench = await make_bench(Machine(starts_slowly=state == "deploying", obeys_stops=False))
    a = await bench.caller("a", "alice", autopilot=True)
    job = await bench.submit(a)
    if state == "stopping":
        await bench.control.jobs.cancel(a, job)
    elif state == "lost":
        await bench.disconnect()
        await bench.advance(60)
    elif state == "succeeded":
        bench.machine.finish(bench.attempt(job)["id"])
        await bench.settle()
    with pytest.raises(Conflict, match=state) as said:
        await bench.control.jobs.hold(a, job, "", suspend=True)
    assert said.value.hint and bench.machine.asked["suspend"] == 0


async def test_a_host_that_cannot_ends_the_order(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a)

    async def suspend(attempt_id: str, max_s: float) -> object:
        from cotenant.server.backends.base import HostRefused

        raise HostRefused("op: 'suspend' is not known to this hostd", code="bad_request", data={})

    bench.hosts["local"].suspend = suspend  # type: ignore[assignment, method-assign]
    with pytest.raises(Conflict, match="not known"):
        await bench.control.jobs.hold(a, job, "", suspend=True)
    assert [e["type"] for e in bench.events("job.suspend_failed", "job.suspending")] == [
        "job.suspending",
        "job.suspend_failed",
    ]
    agree(bench, job)
    assert (await bench.control.views.get_job(a, job)).held_reason is None


async def test_cont_is_refused_while_it_is_suspended(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a)
    await bench.control.jobs.hold(a, job, "", suspend=True)
    with pytest.raises(Conflict, match="time limit stands still") as said:
        await bench.control.jobs.signal(a, job, "CONT")
    assert "release_job" in said.value.hint
    assert (await bench.control.jobs.signal(a, job, "USR1")).delivered, "it waits for the process to go on"


@pytest.mark.parametrize("seed", range(25))
async def test_whatever_is_lost_the_records_and_the_machine_agree_in_the_end(bench: Bench, seed: int) -> None:
    """Orders, lost requests and answers, held reports, cut cables, restarts and shims that lose patience, in any order."""
    chance = random.Random(seed)
    a: Caller = await bench.caller("a", "alice")
    job = await bench.submit(a, hours=100, max_suspend_h=700)
    wanted = "running"
    for _ in range(40):
        act = chance.choice(ACTS)
        a = bench.callers["a"]
        state = bench.job(job)["state"]
        if act in ("suspend", "resume") and state in ("running", "suspended"):
            if act == "suspend":
                await bench.control.jobs.hold(a, job, "", suspend=True)
            else:
                await bench.control.jobs.unhold(a, job)
            wanted = "suspended" if act == "suspend" else "running"
        elif act in ("lose", "drop") and "local" in bench.hosts:
            getattr(bench.hosts["local"], act).update({"suspend", "resume"})
        elif act == "cut":
            await bench.disconnect()
        elif act == "mend" and "local" not in bench.hosts:
            await bench.connect()
        elif act == "hold":
            bench.reports_held = True
        elif act == "bring":
            bench.reports_held = False
            await bench.settle()
        elif act == "time":
            await bench.advance(chance.choice([1, 8, 30]))
        elif act == "restart":
            await bench.restart(kill=chance.random() < 0.5)
        elif act == "patience" and stands(bench, job):
            bench.machine.stand(bench.attempt(job)["id"], False)
            wanted = "either"
    bench.reports_held = False
    if "local" not in bench.hosts:
        await bench.connect()
    bench.hosts["local"].lose.clear()
    bench.hosts["local"].drop.clear()
    await bench.settle()
    await bench.advance(12)
    agree(bench, job)
    assert wanted in ("either", bench.job(job)["state"])


async def test_all_hosts_of_a_job_stand_still_together(make_bench) -> None:
    bench: Bench = await make_bench(Machine("h1"), Machine("h2"), Machine("local", cards=0))
    one, two, _ = bench.machines
    a = await bench.caller("a", "alice", autopilot=True)
    job = await bench.submit(a, gpus=2, nodes=2, hours=2)
    two.deaf = True
    shown = await bench.control.jobs.hold(a, job, "", suspend=True)
    assert shown.state == "running" and "not confirmed" in (shown.held_reason or "")
    assert [r.suspended for m in (one, two) for r in m.attempts.values()] == [True, False]
    two.deaf = False
    await bench.advance(7)
    assert bench.job(job)["state"] == "suspended" and bench.attempt(job)["suspend_asked"] == ""
    bench.hosts["h1"].lose.add("resume")
    one.stands_ms, two.stands_ms = 70_000, 60_000
    assert (await bench.control.jobs.unhold(a, job)).state == "suspended", "one of them stands still"
    await bench.advance(7)
    assert bench.job(job)["state"] == "running" and bench.attempt(job)["suspend_asked"] == ""
    lease = bench.lease(bench.attempt(job)["lease_id"])
    assert lease["hard_end_at_ms"] == lease["granted_at_ms"] + 2 * HOUR_MS + 70_000, "as late as the last of them"
    assert [e["type"] for e in bench.events("job.suspended", "job.resumed")] == ["job.suspended", "job.resumed"]
    await bench.control.jobs.hold(a, job, "", suspend=True)
    await bench.control.jobs.cancel(a, job)
    await bench.settle()
    assert bench.job(job)["state"] == "cancelled"


async def test_an_element_of_an_array_is_suspended_by_its_own_id(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, "each", array={"n": 3, "max_parallel": 1})
    first = f"{array}.0"
    assert (await bench.control.jobs.hold(a, first, "", suspend=True)).state == "suspended"
    agree(bench, first)
    assert bench.job(array)["state"] == "queued"
    assert (await bench.control.jobs.unhold(a, first)).state == "running"
    agree(bench, first)
