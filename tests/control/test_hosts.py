"""What hosts do to jobs: away and back, rebooted, forgetful, ahead of the records, and reports late, twice or out of order."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.hostd.protocol import CardProcess
from cotenant.server.errors import Conflict, Unreachable
from cotenant.server.services import DATABASE
from cotenant.server.store.db import StoreRefused
from cotenant.server.version import version


def stale(bench: Bench) -> int:
    return len(bench.events("write.stale"))


async def test_a_host_is_told_which_server_greets_it(bench: Bench) -> None:
    assert bench.control.hosts.hello("local").server_version == version() != ""


# ---- away


async def test_a_short_absence_changes_nothing(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    await bench.disconnect()
    await bench.advance(15)
    assert bench.job(job)["state"] == "running"
    bench.machine.finish(bench.attempt(job)["id"], 0)
    await bench.connect()
    await bench.settle()
    assert bench.job(job)["state"] == "succeeded" and bench.events("host.lost", "job.lost") == []


async def test_a_lost_host_makes_jobs_lost_and_gives_nothing_away(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    job = await bench.submit(a, gpus=1)
    await bench.disconnect()
    await bench.advance(25)
    assert bench.job(job)["state"] == "lost" and bench.attempt(job)["state"] == "lost"
    assert bench.uses() == ["held", "free"]
    waiting = await bench.submit(b, "w")
    shown = await bench.control.views.get_job(b, waiting)
    assert (shown.state, shown.blockers[0].code) == ("queued", "host_down")
    await bench.connect()
    await bench.settle()
    assert bench.job(job)["state"] == "running" and bench.job(waiting)["state"] == "running"
    assert [e["type"] for e in bench.events("host.lost", "host.up")] == ["host.up", "host.lost", "host.up"]


async def test_an_end_during_the_absence_is_told_at_the_return(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    await bench.disconnect()
    await bench.advance(25)
    bench.machine.finish(bench.attempt(job)["id"], 3)
    await bench.connect()
    await bench.settle()
    assert (bench.job(job)["state"], bench.job(job)["exit_code"]) == ("failed", 3)
    assert bench.uses() == ["free", "free"] and stale(bench) == 0


async def test_stopping_a_lost_job_is_recorded_and_waits(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    await bench.disconnect()
    await bench.advance(25)
    with pytest.raises(Conflict):
        await bench.control.jobs.signal(a, job, "HUP")
    answer = await bench.control.jobs.cancel(a, job, confirmed=True)
    assert answer.state == "stopping"
    await bench.advance(60)
    assert bench.job(job)["state"] == "stopping"
    await bench.connect()
    await bench.settle()
    assert bench.job(job)["state"] == "cancelled" and bench.machine.processes == {}


async def test_a_signal_to_a_host_that_is_away_says_so(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    await bench.disconnect()
    with pytest.raises(Unreachable):
        await bench.control.jobs.signal(a, job, "HUP")
    assert bench.events("job.signalled") == []


async def test_a_start_while_the_host_is_away_is_made_when_it_is_back(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.hosts["local"].away = True  # the link has not noticed yet
    job = await bench.submit(a)
    assert bench.job(job)["state"] == "deploying"
    await bench.disconnect()
    await bench.advance(25)
    assert bench.job(job)["state"] == "deploying", "no host has heard of it: nothing can be lost"
    await bench.connect()
    await bench.settle()
    assert bench.job(job)["state"] == "running" and len(bench.machine.history) == 1


async def test_a_person_gives_a_lost_job_up_and_what_comes_back_is_stopped(bench: Bench) -> None:
    a, person = await bench.caller("a"), await bench.person()
    job = await bench.submit(a, max_attempts=2, retry_on=("lost",))
    old = bench.attempt(job)
    with pytest.raises(Conflict, match="not lost"):
        await bench.control.operate(person, "job.abandon", {"job_id": job}, "x")
    await bench.disconnect()
    await bench.advance(25)
    await bench.control.operate(person, "job.abandon", {"job_id": job}, "the machine burnt down")
    row = bench.job(job)
    assert (row["state"], row["attempts_left"]) == ("queued", 1)
    assert bench.uses() == ["cleaning", "free"]
    await bench.connect()  # it did not
    await bench.settle()
    assert old["id"] not in bench.machine.processes, "given up in the records: stopped on the host"
    assert stale(bench) == 1
    await bench.advance(40)
    assert (bench.job(job)["state"], bench.attempt(job)["epoch"]) == ("running", 2)
    assert len(bench.machine.processes) == 1


# ---- reports


async def test_reports_late_twice_and_out_of_order_change_nothing_more(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.reports_held = True
    bench.machine.starts_slowly = True
    job = await bench.submit(a)
    attempt = bench.attempt(job)["id"]
    bench.machine.starts_slowly = False
    bench.machine._put(
        bench.machine.attempts[attempt].__class__(**{**bench.machine.attempts[attempt].__dict__, "state": "running"})
    )
    bench.machine.finish(attempt, 7)
    assert len(bench.machine.outbox) == 3
    saved = list(bench.machine.outbox)
    await bench.deliver(bench.machine, [2])
    assert (bench.job(job)["state"], bench.job(job)["exit_code"]) == ("failed", 7)
    events = len(bench.events())
    for report in (saved[0], saved[1], saved[2], saved[0]):
        await bench._bring(bench.machine, report)
    assert (bench.job(job)["state"], bench.job(job)["exit_code"]) == ("failed", 7)
    assert len(bench.events()) == events
    bench.reports_held = False


async def test_a_report_for_a_superseded_attempt_moves_nothing_and_is_noted(bench: Bench) -> None:
    """The host went, a person gave the attempt up, another runs elsewhere: what the old one says is kept with it alone."""
    a = await bench.caller("a")
    job = await bench.submit(a, max_attempts=3, retry_on=("lost",))
    bench.control.context.db.peek(lambda c: None)
    old = bench.attempt(job)["id"]

    def supersede(tx) -> None:  # as a restore of other records can leave it
        tx.execute("UPDATE job SET epoch = 2 WHERE id = ?", (job,))

    await bench.control.context.db.write(supersede)
    bench.machine.finish(old, 0)
    await bench.settle()
    assert bench.job(job)["state"] == "running" and bench.job(job)["exit_code"] is None
    row = bench.rows("SELECT * FROM attempt WHERE id = ?", old)[0]
    assert (row["state"], row["superseded"], row["exit_code"]) == ("ended", 1, 0)
    assert stale(bench) == 1
    await bench.control.context.db.write(
        lambda tx: tx.execute(
            "UPDATE job SET state = 'succeeded', exit_code = 0, epoch = 2, ended_at_ms = 1 WHERE id = ?", (job,)
        )
    )
    bench.check = lambda: None  # type: ignore[method-assign]  # the records were bent by hand


async def test_a_lost_supervisor_is_class_lost(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    bench.machine.shim_dies(bench.attempt(job)["id"])
    await bench.settle()
    assert (bench.job(job)["state"], bench.job(job)["failure_class"]) == ("failed", "lost")


# ---- reboot and amnesia


async def test_after_a_reboot_everything_of_the_old_boot_is_dead(bench: Bench) -> None:
    a = await bench.caller("a")
    remembered = await bench.submit(a, "1", gpus=1)
    forgotten = await bench.submit(a, "2", gpus=1)
    await bench.disconnect()
    del bench.machine.attempts[bench.attempt(forgotten)["id"]]
    bench.machine.reboot()
    await bench.connect()
    await bench.settle()
    for job in (remembered, forgotten):
        assert (bench.job(job)["state"], bench.job(job)["failure_class"]) == ("failed", "lost")
    assert bench.uses() == ["free", "free"]


@pytest.mark.parametrize("word", ["set_floor", "probe"])
async def test_a_word_that_is_lost_after_a_lost_memory_is_said_again(bench: Bench, word: str) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a, gpus=1, max_attempts=2)
    await bench.disconnect()
    bench.machine.lose_memory()
    await bench.connect()
    assert bench.job(job)["state"] == "lost"
    bench.machine.processes.clear()
    bench.hosts["local"].lose.add(word)
    await bench.advance(10)
    assert word not in bench.hosts["local"].lose and bench.job(job)["state"] == "lost"
    assert bench.control.context.live.hosts["local"].needs_floor, "asked again by the tick"
    await bench.advance(10)
    assert bench.job(job)["state"] == "queued"
    assert not bench.control.context.live.hosts["local"].needs_floor


async def test_a_lost_memory_is_no_proof_and_nothing_starts_until_the_sweep_finds_nothing(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a, gpus=1, max_attempts=2)
    attempt = bench.attempt(job)["id"]
    waiting = await bench.submit(a, "w", gpus=2)
    for _ in range(3):  # a second and third hello must not take silence for an end either
        await bench.disconnect()
        if bench.machine.states == 1:
            bench.machine.lose_memory()
        await bench.connect()
        await bench.advance(10)
        assert bench.job(job)["state"] == "lost"
        assert bench.uses() == ["held", "free"]
    assert len(bench.events("host.amnesia")) == 1
    other = await bench.submit(a, "o", gpus=1)
    shown = await bench.control.views.get_job(a, other)
    assert shown.state == "queued" and bench.machine.asked["start"] == 1
    (host,) = (await bench.control.views.list_hosts(a)).hosts
    assert "memory" in (host.reason or "")
    assert bench.machine.floor >= bench.attempt(job)["fence"]

    bench.machine.processes.clear()  # what ran of before has ended
    await bench.advance(10)
    assert bench.job(job)["state"] == "queued", "certainly gone: another attempt"
    assert bench.rows("SELECT failure_class FROM attempt WHERE id = ?", attempt)[0][0] == "lost"
    await bench.advance(40)
    states = [bench.job(j)["state"] for j in (job, waiting, other)]
    assert "running" in states and bench.machine.asked["start"] > 1
    (host,) = (await bench.control.views.list_hosts(a)).hosts
    assert host.reason is None


async def test_a_start_that_nobody_answered_before_the_memory_was_lost_is_unknown(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.reports_held = True
    bench.hosts["local"].drop.add("start")
    job = await bench.submit(a)
    assert bench.job(job)["state"] == "deploying" and len(bench.machine.processes) == 1
    await bench.disconnect()
    bench.machine.lose_memory()
    await bench.connect()
    bench.reports_held = False
    await bench.advance(60)
    assert bench.job(job)["state"] == "lost" and len(bench.machine.history) == 1
    bench.machine.processes.clear()
    await bench.advance(10)
    assert (bench.job(job)["state"], bench.job(job)["failure_class"]) == ("failed", "lost")


async def test_a_memory_lost_with_nothing_running_ends_its_attempts_at_once(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    await bench.disconnect()
    bench.machine.processes.clear()
    bench.machine.lose_memory()
    await bench.connect()
    await bench.settle()
    assert (bench.job(job)["state"], bench.job(job)["failure_class"]) == ("failed", "lost")
    await bench.advance(3)
    assert bench.uses() == ["free", "free"]
    again = await bench.submit(a, "again")
    assert bench.job(again)["state"] == "running"


async def test_an_attempt_that_the_host_forgot_by_itself_is_lost(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    await bench.disconnect()
    bench.machine.attempts.clear()
    bench.machine.processes.clear()
    await bench.connect()
    await bench.settle()
    assert (bench.job(job)["state"], bench.job(job)["failure_class"]) == ("failed", "lost")


# ---- restarts of the server


async def test_running_jobs_run_on_through_a_restart(bench: Bench) -> None:
    a = await bench.caller("a")
    running, ended = await bench.submit(a, "1"), await bench.submit(a, "2")
    waiting = await bench.submit(a, "3")
    await bench.close(kill=True)
    bench.machine.finish(next(x for x in bench.machine.processes if bench.machine.specs[x].job_id == ended), 4)
    await bench.open()
    assert bench.job(running)["state"] == "running"
    assert (bench.job(ended)["state"], bench.job(ended)["exit_code"]) == ("failed", 4)
    assert bench.job(waiting)["state"] == "running"
    assert len(bench.machine.history) == 3


@pytest.mark.parametrize("how", ["before the start", "after the start"])
async def test_a_crash_around_a_start_runs_the_job_once(bench: Bench, how: str) -> None:
    a = await bench.caller("a")
    bench.reports_held = True
    (bench.hosts["local"].lose if how == "before the start" else bench.hosts["local"].drop).add("start")
    job = await bench.submit(a)
    await bench.restart(kill=True)
    bench.reports_held = False
    await bench.settle()
    assert bench.job(job)["state"] == "running" and len(bench.machine.history) == 1


async def test_incarnations_rise_and_no_fence_repeats(bench: Bench) -> None:
    a = await bench.caller("a")
    fences = []
    for _ in range(3):
        lease = await bench.control.leases.acquire(a)
        fences.append(lease.fence)
        await bench.control.leases.release(a, lease.lease_id)
        await bench.restart(kill=True)
    assert fences == sorted(set(fences))
    assert bench.machine.incarnation == 4


async def test_work_without_an_end_survives_a_server_that_was_away_long(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    await bench.restart(down_s=3 * 86_400, kill=True, connect=False)
    await bench.advance(5)
    assert bench.job(job)["state"] == "running"
    await bench.connect()
    assert bench.job(job)["state"] == "running"


# ---- another past


async def copied(bench: Bench) -> None:
    """Keep the database as it is now, to be put back later."""
    await bench.close()
    shutil.copy(bench.folder / DATABASE, bench.folder.parent / "copy.db")
    await bench.open()


async def put_back(bench: Bench, *, connect: bool = True) -> None:
    await bench.close(kill=True)
    for name in bench.folder.glob(f"{DATABASE}*"):
        name.unlink()
    shutil.copy(bench.folder.parent / "copy.db", bench.folder / DATABASE)
    await bench.open(connect=connect)


async def take_over(bench: Bench) -> None:
    """What a person does once the host refuses a restored past."""
    hosts = bench.control.hosts

    class Link:
        def retry_now(self) -> None:
            pass

    hosts.links["local"] = Link()  # type: ignore[assignment]
    await bench.control.operate(await bench.person(), "host.take-over", {"host": "local"}, "restored the backup")
    assert await bench.connect()
    await bench.settle()


async def test_an_older_database_is_refused_until_a_person_takes_over(bench: Bench) -> None:
    a = await bench.caller("a")
    await bench.person()
    await copied(bench)
    await bench.restart()
    await bench.submit(a, "later")
    highest = bench.attempt(bench.one("SELECT id FROM job"))["fence"]
    await put_back(bench)
    assert not await bench.connect()
    assert [e["new"] for e in bench.events("host.refused")] == ["old_incarnation"]
    assert bench.machine.processes, "and nothing of it was touched"
    await take_over(bench)
    lease = await bench.control.leases.acquire(bench.callers["a"])
    assert lease.fence is not None and lease.fence > highest


async def test_attempts_that_the_records_have_lost_are_found_and_keep_their_cards(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    await bench.person()
    await copied(bench)
    await bench.restart()
    unknown = await bench.submit(a, "unknown", gpus=1)
    attempt = bench.attempt(unknown)
    await put_back(bench)
    await take_over(bench)
    row = bench.job(unknown)
    assert (row["state"], row["owner"], row["epoch"], row["fence"]) == ("running", "cotenant", 1, attempt["fence"])
    assert bench.uses() == ["held", "free"]
    assert bench.events("job.found")[0]["severity"] == "critical"
    bench.machine.finish(attempt["id"], 0)
    await bench.settle()
    assert bench.job(unknown)["state"] == "succeeded" and bench.uses() == ["free", "free"]


@pytest.mark.parametrize("before", ["queued", "held", "running"])
@pytest.mark.parametrize("after", ["running", "ended"])
async def test_a_newer_attempt_of_a_known_job_wins_over_the_older_records(
    bench: Bench, before: str, after: str
) -> None:
    a = await bench.caller("a")
    await bench.person()
    blocking = await bench.control.leases.acquire(a, gpus=2) if before != "running" else None
    job = await bench.submit(a, gpus=2, max_attempts=3, retry_on=("code",))
    if before == "held":
        await bench.control.jobs.hold(a, job, "later")
    assert bench.job(job)["state"] == before
    await copied(bench)
    await bench.restart()
    a = bench.callers["a"]
    if before == "held":
        await bench.control.jobs.unhold(a, job)
    if blocking is not None:
        await bench.control.leases.release(a, blocking.lease_id)
        await bench.settle()
    else:
        bench.machine.finish(bench.attempt(job)["id"], 1)
        await bench.settle()
        await bench.advance(40)
        await bench.advance(3)
    newest = bench.attempt(job)
    assert newest["state"] == "running"
    if after == "ended":
        bench.reports_held = True
        bench.machine.finish(newest["id"], 0)
    await put_back(bench)
    await take_over(bench)
    bench.reports_held = False
    await bench.settle()
    assert bench.attempt(job)["id"] == newest["id"]
    assert bench.job(job)["state"] == ("running" if after == "running" else "succeeded")
    assert len({h[1] for h in bench.machine.history}) == len(bench.machine.history), "nothing was started again"
    assert bench.uses() == (["held", "held"] if after == "running" else ["free", "free"])


async def test_an_attempt_older_than_the_records_is_stopped(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    old = bench.attempt(job)["id"]
    report = bench.machine.attempts[old]
    process = bench.machine.processes[old]
    bench.machine.finish(old, 0)
    await bench.settle()
    await bench.disconnect()
    stray = "att_stray"
    bench.machine.attempts[stray] = report.__class__(**{**report.__dict__, "attempt_id": stray})
    bench.machine.processes[stray] = process
    await bench.connect()
    await bench.settle()
    assert bench.machine.attempts.get(stray) is None or bench.machine.attempts[stray].state == "exited"
    assert bench.job(job)["state"] == "succeeded" and stale(bench) >= 1
    assert bench.events("write.stale")[0]["severity"] == "warning"


async def test_a_copied_directory_is_refused_beside_the_original(bench: Bench, tmp_path) -> None:
    await bench.close()
    shutil.copytree(bench.folder, tmp_path / "twin")
    await bench.open()
    twin = Bench(tmp_path / "twin", bench.machine, seed=77, clock=bench.clock)
    with pytest.raises(StoreRefused, match="is a copy of"):
        await twin.open()
    job = await bench.submit(await bench.caller("a"))
    assert bench.job(job)["state"] == "running"


# ---- cards


async def test_cards_that_come_later_or_go_are_followed(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.machine.cards = 3
    bench.telemetry()
    await bench.settle()
    assert [g.uuid for g in (await bench.control.views.list_gpus(a)).gpus][-1] == "SIM-local-2"
    lease = await bench.control.leases.acquire(a, gpus=3)
    assert len(lease.slots) == 3
    bench.machine.cards = 2
    bench.telemetry()
    await bench.settle()
    assert [g.state for g in (await bench.control.views.list_gpus(a)).gpus] == ["held", "held", "held"]
    await bench.control.leases.release(a, lease.lease_id)
    await bench.disconnect()
    await bench.connect()
    await bench.settle()
    assert [g.uuid for g in (await bench.control.views.list_gpus(a)).gpus] == ["SIM-local-0", "SIM-local-1"]


async def test_a_driver_that_hangs_at_the_hello_takes_no_card_from_the_records(bench: Bench) -> None:
    a = await bench.caller("a")
    await bench.disconnect()
    bench.machine.nvml, bench.machine.cards = "hanging", 0
    await bench.connect()
    await bench.settle()
    assert len((await bench.control.views.list_gpus(a)).gpus) == 2
    job = await bench.submit(a)
    assert bench.job(job)["state"] == "queued", "it may come back: this is no request that can never be met"
    bench.machine.nvml, bench.machine.cards = "simulated", 2
    bench.telemetry()
    await bench.settle()
    assert bench.job(job)["state"] == "running"


async def test_a_sick_card_takes_only_itself_out(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.machine.card_states["SIM-local-0"] = ("sick", "Xid 79: fallen off the bus")
    bench.telemetry()
    await bench.settle()
    lease = await bench.control.leases.acquire(a)
    assert lease.slots[0].uuid == "SIM-local-1"
    (event,) = bench.events("gpu.changed")
    assert (event["severity"], event["new"], event["gpu_uuid"]) == ("critical", "sick", "SIM-local-0")
    bench.machine.dirty["SIM-local-1"] = [CardProcess(3, "eve", "x", 1)]
    bench.telemetry()
    assert bench.lease(lease.lease_id)["state"] == "leased"
    bench.machine.dirty.clear()
    bench.machine.card_states.clear()


async def test_a_card_belongs_to_one_host_entry(make_bench) -> None:
    first, second = Machine("local", cards=1), Machine("second", cards=1)
    second.__class__ = type("Twin", (Machine,), {"uuids": property(lambda self: ["SIM-local-0"])})
    bench = await make_bench(first, second)
    a = await bench.caller("a")
    assert [(g.host, g.uuid) for g in (await bench.control.views.list_gpus(a)).gpus] == [("local", "SIM-local-0")]
    assert bench.events("gpu.changed")[0]["new"] == "refused"


@pytest.mark.parametrize("restarts", [1, 2])
async def test_a_host_that_lost_its_memory_before_any_grant_obeys_the_next_start_too(
    tmp_path: Path, restarts: int
) -> None:
    """Its floor is a fence that the records know, so that no later start looks like an older past to it."""
    machine = Machine()
    machine.lose_memory()
    async with Bench(tmp_path, machine) as bench:
        for _ in range(restarts):
            await bench.restart(kill=True)
        a = await bench.caller("a")
        assert bench.job(await bench.submit(a))["state"] == "running"
        bench.check()


async def test_what_joins_cards_reaches_the_world_with_the_hello_and_when_it_changes(make_bench) -> None:
    machine = Machine("local", cards=3)
    machine.links = ((machine.uuids[0], machine.uuids[1], 4),)
    bench = await make_bench(machine)
    one, two, three = machine.uuids

    def links() -> tuple:
        return bench.control.context.keeper.hosts["local"].links

    assert links() == ((one, two, 4),)
    machine.report("links", {"links": [{"a": three, "b": one, "links": 2}]})
    await bench.settle()
    assert links() == ((one, three, 2),)
    await bench.restart()
    assert links() == ((one, two, 4),)
