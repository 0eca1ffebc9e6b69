"""Jobs over several hosts: all ranks begin or none, one that fails ends all, a lost host makes the whole lost."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from dataclasses import replace
from typing import Any

import pytest
from bench import Bench
from fakehost import Machine
from pydantic import ValidationError

from cotenant.hostd.protocol import CardProcess
from cotenant.server.errors import NotFound, QuotaExceeded, Unreachable
from cotenant.server.model.spec import JobSpec
from cotenant.server.store import ranks


@pytest.fixture
async def pair(make_bench) -> Bench:
    return await make_bench(Machine("h1", cards=2), Machine("h2", cards=2), Machine("local", cards=0))


async def gang(bench: Bench, name: str = "gang", **spec: Any) -> str:
    a = await bench.caller("a", "alice", autopilot=True)
    return await bench.submit(a, **{"gpus": 2, "nodes": 2, "name": name, **spec})


async def shown(bench: Bench, job: str) -> Any:
    return await bench.control.views.get_job(await bench.caller("a", "alice"), job)


def machine(bench: Bench, name: str) -> Machine:
    return next(m for m in bench.machines if m.name == name)


def of(bench: Bench, job: str) -> list[Any]:
    """The ranks of the newest attempt."""
    return bench.rows("SELECT * FROM rank WHERE attempt_id = ? ORDER BY rank", bench.attempt(job)["id"])


def running(bench: Bench, job: str) -> list[str]:
    """Hosts that have a process of the job."""
    return sorted(m.name for m in bench.machines for p in m.processes.values() if p.job_id == job)


async def end(bench: Bench, job: str, rank: int, code: int | None = 0, **record: Any) -> None:
    row = of(bench, job)[rank]
    machine(bench, row["host"]).finish(row["id"], code, **record)
    await bench.settle()


# ---- a gang's life


async def test_a_job_over_two_hosts_is_one_attempt_one_lease_and_two_ranks(pair: Bench) -> None:
    job = await gang(pair, env={"X": "1", "MASTER_PORT": "1"})
    answer = await shown(pair, job)
    assert (answer.state, answer.gpus, len(answer.attempts)) == ("running", 4, 1)
    (attempt,) = answer.attempts
    assert [(r.rank, r.host, r.state) for r in attempt.ranks] == [(0, "h1", "running"), (1, "h2", "running")]
    assert sorted((s.host, s.index) for s in attempt.slots) == [("h1", 0), ("h1", 1), ("h2", 0), ("h2", 1)]
    lease = pair.lease(attempt.lease_id)
    assert (lease["gpus"], lease["units"], lease["state"]) == (4, 4 * 840, "running")
    specs = [machine(pair, r.host).specs[f"{attempt.attempt_id}.{r.rank}"] for r in attempt.ranks]
    assert len({(s.fence, s.lease_id, s.job_id, s.epoch, s.argv, s.time_limit_s) for s in specs}) == 1
    for rank, spec in enumerate(specs):
        assert spec.gate_s and len(spec.slots) == 2
        assert {k: v for k, v in spec.env.items() if not k.startswith("PET_")} == {
            "X": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NNODES": "2", "NODE_RANK": str(rank),
            "NPROC_PER_NODE": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": str(2 * rank),
        }  # fmt: skip
        assert spec.env["PET_NODE_RANK"] == str(rank) and spec.env["PET_MASTER_PORT"] == "29500"
    await end(pair, job, 1)
    assert (await shown(pair, job)).state == "running"
    assert pair.uses() == ["held"] * 4, "the lease lives with the whole"
    await end(pair, job, 0)
    answer = await shown(pair, job)
    assert (answer.state, answer.exit_code) == ("succeeded", 0)
    assert [(r.state, r.exit_code) for r in answer.attempts[0].ranks] == [("ended", 0)] * 2
    assert pair.uses() == ["free"] * 4
    types = [e["type"] for e in pair.events() if e["job_id"] == job]
    assert types == ["job.submitted", "job.placed", "job.ranks_ready", "job.running", "lease.released", "job.succeeded"]
    await pair.advance(3)
    assert all(m.attempts == {} for m in pair.machines), "hosts forget what is written down"


async def test_one_card_on_each_host_needs_no_launcher(pair: Bench) -> None:
    job = await gang(pair, gpus=1)
    specs = [machine(pair, row["host"]).specs[row["id"]] for row in of(pair, job)]
    assert [(s.env["RANK"], s.env["LOCAL_RANK"], s.env["WORLD_SIZE"]) for s in specs] == [
        ("0", "0", "2"),
        ("1", "0", "2"),
    ]


async def test_work_without_cards_can_be_on_several_hosts_too(pair: Bench) -> None:
    job = await gang(pair, gpus=0)
    assert (await shown(pair, job)).state == "running" and len(running(pair, job)) == 2
    assert {machine(pair, row["host"]).specs[row["id"]].env["WORLD_SIZE"] for row in of(pair, job)} == {"2"}


async def test_two_gangs_meet_at_different_ports(make_bench) -> None:
    toml = "[server]\ngang_port_from = 30000\ngang_port_to = 30001\n"
    bench = await make_bench(Machine("h1", cards=4), Machine("h2", cards=4), Machine("local", cards=0), toml=toml)
    jobs = [await gang(bench, f"gang {n}", gpus=1) for n in range(3)]
    assert [bench.attempt(job)["port"] for job in jobs] == [30000, 30001, None]
    third = await shown(bench, jobs[2])
    assert third.state == "queued" and "no port from 30000 to 30001" in third.message
    await end(bench, jobs[0], 0)
    await end(bench, jobs[0], 1)
    await bench.advance(10)
    assert bench.attempt(jobs[2])["port"] == 30000 and (await shown(bench, jobs[2])).state == "running"


async def test_a_gang_waits_until_enough_is_free_on_enough_hosts_and_books_on_each(pair: Bench) -> None:
    a = await pair.caller("a", "alice")
    first = await pair.submit(a, gpus=1, name="small", cpus=10)
    job = await gang(pair, cpus=8)
    answer = await shown(pair, job)
    assert answer.state == "queued" and answer.blockers[0].code == "busy"
    machine(pair, pair.attempt(first)["host"]).finish(pair.attempt(first)["id"])
    await pair.settle()
    assert (await shown(pair, job)).state == "running"
    views = pair.control.context.keeper
    (held,) = views.living.values()
    assert (held.cpus, {key[0] for key in held.slots}) == (8, {"h1", "h2"})
    second = await gang(pair, "second", gpus=0, cpus=9)
    assert (await shown(pair, second)).blockers[0].code in ("host_cpu", "busy")


async def test_the_elements_of_an_array_can_be_gangs(pair: Bench) -> None:
    array = await gang(pair, gpus=1, array=3)
    elements = [
        row["id"]
        for row in pair.rows(
            "SELECT id FROM job WHERE array_id = ? AND array_index IS NOT NULL ORDER BY array_index", array
        )
    ]
    assert [running(pair, job) for job in elements] == [["h1", "h2"]] * 2, "two fit at once"
    for rank in (0, 1):
        await end(pair, elements[0], rank)
    (third,) = [
        row["id"]
        for row in pair.rows("SELECT id FROM job WHERE array_id = ? AND array_index IS NOT NULL", array)
        if row["id"] not in elements
    ]
    assert running(pair, third) == ["h1", "h2"]
    for job in (elements[1], third):
        for rank in (0, 1):
            await end(pair, job, rank)
    assert (await shown(pair, array)).state == "succeeded"


async def test_more_hosts_than_there_are_is_refused(pair: Bench) -> None:
    with pytest.raises(QuotaExceeded) as refused:
        await gang(pair, nodes=3)
    assert refused.value.code == "no_such_gpu"


async def test_a_dry_run_names_all_hosts(pair: Bench) -> None:
    a = await pair.caller("a", "alice")
    answer = await pair.control.jobs.submit(a, JobSpec(command="x", gpus=2, nodes=2), dry_run=True)
    assert answer.would_start and sorted({s.host for s in answer.slots}) == ["h1", "h2"] and answer.gpus == 4


# ---- one rank fails


@pytest.mark.parametrize("rank", [0, 1])
async def test_the_first_rank_that_fails_ends_the_others_and_is_the_verdict(pair: Bench, rank: int) -> None:
    job = await gang(pair)
    await end(pair, job, rank, 3)
    answer = await shown(pair, job)
    host = answer.attempts[0].ranks[rank].host
    assert (answer.state, answer.exit_code, answer.failure_class) == ("failed", 3, "code")
    assert answer.message == f"rank {rank} on {host}: ended with exit code 3"
    others = [r for r in answer.attempts[0].ranks if r.rank != rank]
    assert [r.message for r in others] == ["stopped: rank_failed"]
    assert pair.attempt(job)["failed_rank"] == rank
    assert not running(pair, job) and pair.uses() == ["free"] * 4


async def test_a_gang_is_tried_again_as_a_whole_and_avoids_the_host_at_fault(make_bench) -> None:
    bench = await make_bench(*(Machine(f"h{n}", cards=2) for n in range(1, 4)), Machine("local", cards=0))
    job = await gang(bench, max_attempts=2, retry_on=["lost"])
    row = of(bench, job)[0]
    machine(bench, row["host"]).shim_dies(row["id"])
    await bench.settle()
    assert (await shown(bench, job)).state == "queued"
    await bench.advance(40)
    answer = await shown(bench, job)
    assert answer.state == "running" and [a.epoch for a in answer.attempts] == [1, 2]
    assert row["host"] not in {r["host"] for r in of(bench, job)}
    assert answer.attempts[0].failure_class == "lost" and answer.attempts[0].ranks[0].failure_class == "lost"


async def test_a_rank_that_cannot_be_executed_fails_the_whole(pair: Bench) -> None:
    job = await gang(pair)
    await end(pair, job, 0, None, exec_error="ENOENT: 'x': not found in PATH")
    answer = await shown(pair, job)
    assert (answer.state, answer.failure_class) == ("failed", "start") and "rank 0 on h1" in answer.message


async def test_one_host_whose_slots_do_not_get_clean_keeps_only_its_own(pair: Bench) -> None:
    job = await gang(pair)
    for rank, clean in ((0, True), (1, False)):
        row = of(pair, job)[rank]
        machine(pair, row["host"]).finish(row["id"], 0, clean=clean)
        await pair.settle()
    assert (await shown(pair, job)).state == "succeeded"
    assert pair.uses() == ["free", "free", "cleaning", "cleaning"]
    row = of(pair, job)[1]
    machine(pair, "h2").got_clean(row["id"])
    await pair.settle()
    assert pair.uses() == ["free"] * 4


async def test_only_the_host_on_which_something_stays_is_called_occupied(pair: Bench) -> None:
    job = await gang(pair)
    left = CardProcess(77, "me", "python", 100)
    for rank in (0, 1):
        row = of(pair, job)[rank]
        m = machine(pair, row["host"])
        m.finish(row["id"], 0, clean=False)
        m._put(replace(m.attempts[row["id"]], unclean=(left,) if rank else ()))
    await pair.settle()
    await pair.disconnect(machine(pair, "h1"))
    await pair.advance(70)
    assert pair.uses() == ["cleaning", "cleaning", "occupied", "occupied"]
    (event,) = pair.events("slot.occupied")
    assert event["host"] == "h2" and "pid 77" in event["reason"]
    for number, name in enumerate(("h1", "h2")):
        machine(pair, name).got_clean(of(pair, job)[number]["id"])
    await pair.connect(machine(pair, "h1"))
    await pair.advance(4)
    assert pair.uses() == ["free"] * 4


async def test_a_list_by_host_finds_a_gang_on_each_of_its_hosts(pair: Bench) -> None:
    job = await gang(pair)
    a = await pair.caller("a", "alice")
    for host, found in (("h1", [job]), ("h2", [job]), ("local", [])):
        listed = await pair.control.views.list_jobs(a, host=host)
        assert [row.job_id for row in listed.jobs] == found and listed.total == len(found)
    assert (await shown(pair, job)).nodes == 2


# ---- stops and signals


async def test_a_cancel_reaches_all_ranks(pair: Bench) -> None:
    job = await gang(pair)
    a = await pair.caller("a", "alice")
    await pair.control.jobs.cancel(a, job)
    await pair.settle()
    answer = await shown(pair, job)
    assert (answer.state, answer.message) == ("cancelled", "cancelled as asked")
    assert not running(pair, job) and pair.uses() == ["free"] * 4


async def test_a_cancel_waits_for_a_host_that_is_away_and_reaches_it_later(pair: Bench) -> None:
    job = await gang(pair)
    await pair.disconnect(machine(pair, "h2"))
    a = await pair.caller("a", "alice")
    await pair.control.jobs.cancel(a, job)
    await pair.settle()
    assert (await shown(pair, job)).state == "stopping" and running(pair, job) == ["h2"]
    await pair.connect(machine(pair, "h2"))
    await pair.settle()
    assert (await shown(pair, job)).state == "cancelled" and running(pair, job) == []


async def test_a_signal_reaches_all_ranks_that_run(pair: Bench) -> None:
    job = await gang(pair)
    a = await pair.caller("a", "alice")
    await pair.control.jobs.signal(a, job, "USR1", request_id="one")
    attempt = pair.attempt(job)["id"]
    assert [m.signals for m in pair.machines[:2]] == [[(f"{attempt}.0", 10)], [(f"{attempt}.1", 10)]]
    await pair.control.jobs.signal(a, job, "USR1", request_id="one")
    assert [len(m.signals) for m in pair.machines[:2]] == [1, 1], "a repeat sends nothing"
    await end(pair, job, 0)
    await pair.control.jobs.signal(a, job, "USR1")
    assert [len(m.signals) for m in pair.machines[:2]] == [1, 2]
    await pair.disconnect(machine(pair, "h2"))
    with pytest.raises(Unreachable):
        await pair.control.jobs.signal(a, job, "USR1")


async def test_each_rank_has_its_own_log(pair: Bench) -> None:
    job = await gang(pair)
    a = await pair.caller("a", "alice")
    tail = pair.control.logs.tail
    attempt = pair.attempt(job)["id"]
    for rank, host in ((None, 0), (0, 0), (1, 1)):
        page = await tail(a, job, rank=rank)
        assert page.lines == [f"out of {attempt}.{host}"] and page.attempt_id == attempt
        assert (await tail(a, job, cursor=page.cursor)).lines == page.lines
    with pytest.raises(NotFound) as refused:
        await tail(a, job, rank=2)
    assert refused.value.code == "no_such_rank" and "0 to 1" in (refused.value.hint or "")
    single = await pair.submit(a, gpus=0, name="single")
    assert (await tail(a, single, rank=0)).lines
    with pytest.raises(NotFound):
        await tail(a, single, rank=1)


# ---- between the two steps


async def test_no_rank_begins_while_one_cannot_be_made_ready(pair: Bench) -> None:
    machine(pair, "h2").card_states[machine(pair, "h2").uuids[1]] = ("occupied", "somebody is there")
    job = await gang(pair)
    answer = await shown(pair, job)
    assert answer.state == "queued" and "rank 1 on h2: occupied" in answer.message
    assert machine(pair, "h1").history == [] and running(pair, job) == []
    await pair.advance(4)
    assert machine(pair, "h1").attempts == {} or all(a.state == "never" for a in machine(pair, "h1").attempts.values())
    assert pair.uses() == ["free"] * 4
    assert [r.state for r in answer.attempts[0].ranks] == ["ended", "ended"]
    assert answer.attempts_left == 1, "it was no attempt of the job's"
    machine(pair, "h2").card_states.clear()
    pair.telemetry(machine(pair, "h2"))
    await pair.advance(10)
    assert (await shown(pair, job)).state == "running"


async def test_a_directory_that_one_host_lacks_is_the_jobs_fault(pair: Bench) -> None:
    job = await gang(pair, workdir="/missing")
    answer = await shown(pair, job)
    assert (answer.state, answer.failure_class) == ("failed", "start") and "bad_workdir" in answer.message
    await pair.advance(4)
    assert pair.uses() == ["free"] * 4


@pytest.mark.parametrize("how", ["lose", "drop"])
@pytest.mark.parametrize("word", ["prepare", "go", "free_port"])
async def test_a_word_that_gets_lost_is_said_again(pair: Bench, how: str, word: str) -> None:
    for host in pair.hosts.values():
        getattr(host, how).add(word)
    job = await gang(pair)
    await pair.advance(60)
    assert (await shown(pair, job)).state == "running" and len(running(pair, job)) == 2
    for m in pair.machines:
        assert len(m.history) <= 1


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("step", ["before the port", "one is ready", "all are ready", "one was let go"])
async def test_a_server_that_goes_down_between_the_steps_is_seen_through_by_the_next(
    pair: Bench, step: str, kill: bool
) -> None:
    hosts = pair.hosts
    if step == "before the port":
        hosts["h1"].lose.add("free_port")
    elif step == "one is ready":
        hosts["h2"].lose.add("prepare")
    elif step == "all are ready":
        hosts["h1"].lose.add("go")
        hosts["h2"].lose.add("go")
    else:
        hosts["h2"].lose.add("go")
        pair.reports_held = True  # the word that the first runs would have it said again
    job = await gang(pair)
    assert (await shown(pair, job)).state == "deploying"
    begun = running(pair, job)
    assert begun == (["h1"] if step == "one was let go" else [])
    pair.reports_held = False
    await pair.restart(down_s=5, kill=kill)
    answer = await shown(pair, job)
    assert answer.state == "running" and running(pair, job) == ["h1", "h2"]
    assert all(len(m.history) == 1 for m in pair.machines[:2]) and len(answer.attempts) == 1


async def test_a_rank_that_waited_too_long_at_the_gate_lets_the_whole_go_back(pair: Bench) -> None:
    pair.hosts["h2"].lose.add("prepare")
    job = await gang(pair)
    machine(pair, "h1").gate_closes(f"{pair.attempt(job)['id']}.0")
    await pair.settle()
    answer = await shown(pair, job)
    assert answer.state == "queued" and "the word did not come" in answer.message
    assert [m.history for m in pair.machines[:2]] == [[], []]
    await pair.advance(10)
    assert (await shown(pair, job)).state == "running" and len((await shown(pair, job)).attempts) == 2


async def test_one_whose_gate_closed_after_the_word_fails_the_whole(pair: Bench) -> None:
    pair.hosts["h2"].lose.add("go")
    pair.reports_held = True
    job = await gang(pair)
    assert running(pair, job) == ["h1"]
    machine(pair, "h2").gate_closes(f"{pair.attempt(job)['id']}.1")
    pair.reports_held = False
    await pair.settle()
    answer = await shown(pair, job)
    assert answer.state == "failed" and answer.message.startswith("rank 1 on h2: the word")
    assert running(pair, job) == []


async def test_a_cancel_between_the_steps_is_over_at_once(pair: Bench) -> None:
    pair.hosts["h2"].lose.add("prepare")
    job = await gang(pair)
    a = await pair.caller("a", "alice")
    await pair.control.jobs.cancel(a, job)
    await pair.settle()
    assert (await shown(pair, job)).state == "cancelled"
    await pair.advance(4)
    assert pair.uses() == ["free"] * 4 and running(pair, job) == []
    assert machine(pair, "h1").attempts == {} or machine(pair, "h1").history == []


async def test_a_host_that_goes_away_between_the_steps_holds_nothing_up(pair: Bench) -> None:
    pair.hosts["h2"].lose.add("prepare")
    job = await gang(pair)
    await pair.disconnect(machine(pair, "h2"))
    await pair.advance(25)
    answer = await shown(pair, job)
    assert answer.state == "queued" and "rank 1 on h2" in answer.message
    assert pair.uses()[:2] == ["free", "free"], "the cards of the other host are free again"
    await pair.connect(machine(pair, "h2"))
    await pair.advance(10)
    assert (await shown(pair, job)).state == "running"


# ---- hosts that go away


async def test_a_lost_host_makes_the_whole_lost_and_its_return_brings_it_back(pair: Bench) -> None:
    job = await gang(pair)
    await pair.disconnect(machine(pair, "h2"))
    await pair.advance(25)
    answer = await shown(pair, job)
    assert (answer.state, [r.state for r in answer.attempts[0].ranks]) == ("lost", ["running", "lost"])
    assert pair.uses() == ["held"] * 4
    await pair.connect(machine(pair, "h2"))
    await pair.settle()
    answer = await shown(pair, job)
    assert (answer.state, [r.state for r in answer.attempts[0].ranks]) == ("running", ["running", "running"])
    await end(pair, job, 0)
    await end(pair, job, 1)
    assert (await shown(pair, job)).state == "succeeded"


async def test_both_hosts_lost_and_one_back_is_still_lost(pair: Bench) -> None:
    job = await gang(pair)
    for name in ("h1", "h2"):
        await pair.disconnect(machine(pair, name))
    await pair.advance(25)
    await pair.connect(machine(pair, "h1"))
    await pair.settle()
    assert (await shown(pair, job)).state == "lost"
    await pair.connect(machine(pair, "h2"))
    await pair.settle()
    assert (await shown(pair, job)).state == "running"


async def test_a_rank_that_fails_while_another_host_is_lost_ends_the_whole_once_it_is_back(pair: Bench) -> None:
    job = await gang(pair)
    await pair.disconnect(machine(pair, "h2"))
    await pair.advance(25)
    await end(pair, job, 0, 7)
    assert (await shown(pair, job)).state == "stopping" and running(pair, job) == ["h2"]
    await pair.connect(machine(pair, "h2"))
    await pair.settle()
    answer = await shown(pair, job)
    assert (answer.state, answer.exit_code) == ("failed", 7) and running(pair, job) == []


async def test_a_host_that_was_restarted_fails_the_whole(pair: Bench) -> None:
    job = await gang(pair)
    await pair.disconnect(machine(pair, "h2"))
    machine(pair, "h2").reboot()
    await pair.connect(machine(pair, "h2"))
    await pair.settle()
    answer = await shown(pair, job)
    assert (answer.state, answer.failure_class) == ("failed", "lost") and answer.message.startswith("rank 1 on h2: ")
    assert running(pair, job) == []


async def test_a_lost_gang_can_be_given_up_and_what_is_left_of_it_is_stopped(pair: Bench) -> None:
    job = await gang(pair)
    await pair.disconnect(machine(pair, "h2"))
    await pair.advance(25)
    await pair.control.operate(await pair.person(), "job.abandon", {"job_id": job}, "the machine is gone")
    await pair.advance(4)
    answer = await shown(pair, job)
    assert answer.state == "failed" and {r.state for r in answer.attempts[0].ranks} == {"ended"}
    assert running(pair, job) == ["h2"] and pair.uses()[:2] == ["free", "free"]
    await pair.connect(machine(pair, "h2"))
    await pair.advance(4)
    assert running(pair, job) == [] and pair.uses() == ["free"] * 4


async def test_a_host_that_forgot_a_rank_fails_the_whole(pair: Bench) -> None:
    job = await gang(pair)
    await pair.disconnect(machine(pair, "h2"))
    machine(pair, "h2").processes.clear()
    machine(pair, "h2").lose_memory()
    await pair.connect(machine(pair, "h2"))
    await pair.advance(6)
    answer = await shown(pair, job)
    assert answer.state == "failed" and "rank 1 on h2" in answer.message


async def test_repeated_and_late_words_change_nothing(pair: Bench) -> None:
    job = await gang(pair)
    await end(pair, job, 0)
    await end(pair, job, 1, 4)
    before = pair.dump()
    rank = of(pair, job)[1]
    late = {"attempt_id": rank["id"], "state": "running", "job_id": job, "pid": 1}
    await pair.control.hosts.report("h2", "attempt", 10_000, late)
    await pair.settle()
    assert (await shown(pair, job)).state == "failed"
    after = [line for line in pair.dump().splitlines() if line not in before.splitlines()]
    assert all("write.stale" in line or "host" in line or "event" in line for line in after), after


async def test_a_rank_that_the_records_do_not_know_is_stopped(pair: Bench) -> None:
    report = {"attempt_id": "att_unknown.1", "state": "running", "job_id": "job_x", "lease_id": "lse_x", "pid": 1}
    await pair.control.hosts.report("h2", "attempt", 10_000, report)
    await pair.settle()
    assert machine(pair, "h2").asked["stop"] == 1


async def test_a_job_whose_ranks_the_records_lost_does_not_start_again_before_they_are_gone(pair: Bench) -> None:
    """An older database was put back: the job waits in it, and its ranks run."""
    job = await gang(pair)
    old = [m.processes.copy() for m in pair.machines]
    await pair.close(kill=True)
    with contextlib.closing(sqlite3.connect(pair.folder / "control.db")) as past:
        for trigger in ("job_epoch_only_rises", "rank_ended_is_ended", "attempt_ends_its_ranks"):
            past.execute(f"DROP TRIGGER {trigger}")
        for table in ("rank", "attempt", "lease_slot", "lease"):
            past.execute(f"DELETE FROM {table}")
        past.execute("UPDATE job SET state = 'queued', epoch = 0, fence = NULL, started_at_ms = NULL")
        past.commit()
    for m in pair.machines:
        m.obeys_stops = False
    await pair.open()
    assert running(pair, job) == ["h1", "h2"] and all(m.asked["stop"] for m in pair.machines[:2])
    assert [m.processes for m in pair.machines] == old
    answer = await shown(pair, job)
    assert (answer.state, answer.blockers[0].code) == ("queued", "backing_off")
    for m in pair.machines[:2]:
        for attempt_id in list(m.processes):
            m.finish(attempt_id, None, signal=9)
    await pair.advance(45)
    assert (await shown(pair, job)).state == "running" and not any(m.broken for m in pair.machines)


# ---- preempted, evicted, asked to save

SAVES = {"dir": "/ck", "resume_arg": "--resume={path}", "signal": "SIGUSR1"}
TRAIN = {"resumable": True, "checkpoint": SAVES, "priority": "batch", "command": ("train",)}


@pytest.fixture
async def rival(make_bench) -> Bench:
    """Two hosts in a pool with preemption."""
    toml = '[pools.default]\npreempt = "within"\ngrace_s = 60\n'
    return await make_bench(Machine("local", cards=1), Machine("h2", cards=1), toml=toml)


@pytest.mark.parametrize("asker", [{"gpus": 1}, {"gpus": 1, "nodes": 2}])
async def test_a_gang_is_preempted_as_one_and_goes_on_from_what_its_first_rank_saved(rival: Bench, asker: Any) -> None:
    job = await gang(rival, gpus=1, **TRAIN)
    first, second = of(rival, job)
    urgent = await rival.submit(await rival.caller("b"), "urgent", priority="high", **asker)
    for row in (first, second):
        m = machine(rival, row["host"])
        assert [(at, what) for at, what, _ in m.notices] == [(row["id"], "stop")] and m.signals == [(row["id"], 10)]
    await rival.tell(second["id"], machine(rival, second["host"]), path="/ck/shard", saved=True)
    assert rival.job(job)["state"] == "running", "the first rank's word counts"
    await rival.tell(first["id"], machine(rival, first["host"]), path="/ck/step-7", saved=True, age_ms=1000)
    await rival.advance(2)
    assert rival.job(urgent)["state"] == "running" and rival.job(job)["state"] == "preempted"
    answer = await shown(rival, job)
    (told,) = answer.preemptions
    assert (told["state"], told["saved"], told["checkpoint"], told["outcome"]) == (
        "done",
        True,
        "/ck/step-7",
        "stopped",
    )
    for row in of(rival, urgent) or [rival.attempt(urgent)]:
        machine(rival, row["host"]).finish(row["id"])
    await rival.settle()
    await rival.advance(4)
    assert rival.job(job)["state"] == "running" and rival.attempt(job)["epoch"] == 2
    assert rival.job(job)["resumed"] == 0, "it came back: from now on it stands in line like any other"
    for row in of(rival, job):
        assert machine(rival, row["host"]).specs[row["id"]].argv == ("train", "--resume=/ck/step-7")


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_obeys_the_notice_by_ending_is_no_failure(rival: Bench, rank: int) -> None:
    job = await gang(rival, gpus=1, **TRAIN)
    urgent = await rival.submit(await rival.caller("b"), "urgent", priority="high", gpus=1, nodes=2)
    await end(rival, job, rank, None, signal=10, sender="cotenant")
    await rival.advance(2)
    assert rival.job(job)["state"] == "preempted" and rival.job(urgent)["state"] == "running"


async def test_a_gang_that_cannot_save_is_stopped_after_its_grace(rival: Bench) -> None:
    job = await gang(rival, gpus=1, **TRAIN)
    urgent = await rival.submit(await rival.caller("b"), "urgent", priority="high")
    await rival.advance(58)
    assert rival.job(job)["state"] == "running"
    await rival.advance(6)
    assert rival.job(job)["state"] == "preempted" and rival.job(urgent)["state"] == "running"


async def test_a_notice_that_is_withdrawn_is_withdrawn_on_every_host(rival: Bench) -> None:
    job = await gang(rival, gpus=1, **TRAIN)
    b = await rival.caller("b", autopilot=True)
    urgent = await rival.submit(b, "urgent", priority="high")
    await rival.control.jobs.cancel(b, urgent)
    await rival.settle()
    await rival.advance(2)
    assert rival.job(job)["state"] == "running"
    assert [[what for _, what, _ in m.notices] for m in rival.machines] == [["stop", "none"]] * 2


async def test_a_gang_can_be_asked_to_save(rival: Bench) -> None:
    job = await gang(rival, gpus=1, **TRAIN)
    a = await rival.caller("a", "alice")
    asked = await rival.control.preempting.save_now(a, job)
    assert (asked.status, asked.told) == ("noticed", True)
    first = of(rival, job)[0]
    await rival.tell(first["id"], machine(rival, first["host"]), path="/ck/now", saved=True)
    again = await rival.control.preempting.save_now(a, job)
    assert (await shown(rival, job)).state == "running" and again.notice_id != asked.notice_id
    (saved,) = rival.events("job.saved")
    assert saved["job_id"] == job


# ---- the store


def test_which_ids_are_of_ranks() -> None:
    assert ranks.attempt_of("att_01.0") == "att_01" and ranks.attempt_of("att_01") is None


async def test_what_must_not_be_is_an_index(pair: Bench) -> None:
    job = await gang(pair)
    attempt, first = pair.attempt(job), of(pair, job)[0]
    write = pair.control.context.db.write

    for sql in (
        f"INSERT INTO rank (id, attempt_id, rank, host, state) VALUES ('x', '{attempt['id']}', 0, 'h9', 'intended')",
        f"INSERT INTO rank (id, attempt_id, rank, host, state) VALUES ('x', '{attempt['id']}', 5, 'h1', 'intended')",
        f"UPDATE rank SET ended_at_ms = 1 WHERE id = '{first['id']}'",
    ):
        with pytest.raises(sqlite3.IntegrityError):
            await write(lambda tx, sql=sql: tx.execute(sql))
    await end(pair, job, 0)
    with pytest.raises(sqlite3.IntegrityError):
        await write(
            lambda tx: tx.execute(f"UPDATE rank SET state = 'running', ended_at_ms = NULL WHERE id = '{first['id']}'")
        )
    await end(pair, job, 1)


async def test_the_placement_of_a_gang_is_in_its_event(pair: Bench) -> None:
    job = await gang(pair)
    (placed,) = pair.events("job.placed")
    assert len(json.loads(placed["args"])["slots"]) == 4
    assert placed["job_id"] == job


async def test_nodes_has_a_limit() -> None:
    with pytest.raises(ValidationError):
        JobSpec(command="x", nodes=65)
