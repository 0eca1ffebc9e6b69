"""Preemption from the notice to the asker's start and the victim's return; eviction with a grace; a save that is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.server.errors import Conflict, Forbidden

POOL = '[pools.default]\npreempt = "within"\ngrace_s = 60\n'
SAVES = {"dir": "/ck", "resume_arg": "--resume={path}", "signal": "SIGUSR1"}
USR1 = 10


async def train(bench: Bench, owner: str = "a", **spec: Any) -> tuple[str, str]:
    """A running resumable job of low priority: (job, attempt)."""
    spec = {"priority": "batch", "resumable": True, "checkpoint": SAVES, "command": ("train", "-v"), **spec}
    job = await bench.submit(await bench.caller(owner), **spec)
    return job, bench.attempt(job)["id"]


async def stage(make_bench: Any, toml: str = POOL, **spec: Any) -> tuple[Bench, str, str, str]:
    """One card, a victim on it and an asker for it: (bench, victim, its attempt, asker)."""
    bench = await make_bench(Machine(cards=1), toml=toml)
    victim, attempt = await train(bench, **spec)
    assert bench.job(victim)["state"] == "running"
    asker = await bench.submit(await bench.caller("b"), "urgent", priority="high")
    return bench, victim, attempt, asker


async def seen(bench: Bench, owner: str, job: str) -> Any:
    """The job's newest preemption as its owner sees it."""
    return SimpleNamespace(**(await bench.control.views.get_job(bench.callers[owner], job)).preemptions[0])


async def test_notice_save_stop_asker_and_back_from_that_checkpoint(make_bench) -> None:
    bench, victim, attempt, asker = await stage(make_bench)
    machine = bench.machine
    assert [(a, what) for a, what, _ in machine.notices] == [(attempt, "stop")] and machine.signals == [(attempt, USR1)]
    both = await seen(bench, "a", victim), await seen(bench, "b", asker)
    assert [(p.role, p.state, p.victim, p.asker) for p in both] == [
        ("victim", "noticed", victim, asker),
        ("asker", "noticed", victim, asker),
    ]
    assert both[0].slots and both[0].stop_by is not None and not both[0].saved
    await bench.tell(attempt, writing_ago_ms=100)
    await bench.advance(5)
    assert bench.job(victim)["state"] == "running"
    await bench.tell(attempt, path="/ck/step-7.npz", saved=True, age_ms=2000)
    # the fake machine obeys: it is over, cleaned, and the asker has the card
    assert bench.job(asker)["state"] == "running"
    row = bench.job(victim)
    assert (row["state"], row["resumed"], row["attempts_left"]) == ("preempted", 1, 1)
    told = await seen(bench, "a", victim)
    assert (told.state, told.saved, told.checkpoint, told.lost_s) == ("done", True, "/ck/step-7.npz", 2)
    assert told.grace_used_s == 5 and told.outcome == "stopped"
    assert (await seen(bench, "b", asker)).checkpoint is None or bench.callers["b"].owner == bench.callers["a"].owner
    assert (await seen(bench, "b", asker)).outcome == "the asker started"
    machine.finish(bench.attempt(asker)["id"])
    await bench.settle()
    again = bench.attempt(victim)
    assert bench.job(victim)["state"] == "running" and again["epoch"] == 2 and bench.job(victim)["resumed"] == 0
    assert machine.specs[again["id"]].argv == ("train", "-v", "--resume=/ck/step-7.npz")
    assert machine.specs[again["id"]].resume_path == "/ck/step-7.npz"
    answer = await bench.control.views.get_job(bench.callers["a"], victim)
    assert answer.attempts[-1].resumed_from == "/ck/step-7.npz"
    assert answer.attempts[-1].message == "goes on from step-7.npz"
    assert [e["type"] for e in bench.events("job.noticed", "job.saved", "job.preempted")] == [
        "job.noticed",
        "job.saved",
        "job.preempted",
    ]


async def test_one_that_does_not_save_is_stopped_after_its_grace(make_bench) -> None:
    bench, victim, attempt, asker = await stage(make_bench)
    await bench.tell(attempt, path="/ck/old.npz", age_ms=600_000)
    await bench.advance(59)
    assert bench.job(victim)["state"] == "running"
    await bench.advance(3)
    assert bench.job(victim)["state"] == "preempted" and bench.job(asker)["state"] == "running"
    told = await seen(bench, "a", victim)
    assert not told.saved and told.checkpoint == "/ck/old.npz" and told.lost_s >= 600


async def test_a_save_that_goes_on_is_waited_for_and_not_for_ever(make_bench) -> None:
    bench, victim, attempt, _ = await stage(make_bench)
    for _ in range(43):
        await bench.tell(attempt, writing_ago_ms=0)
        await bench.advance(4)
    assert bench.job(victim)["state"] == "running", "172 s: within three times the grace"
    await bench.tell(attempt, writing_ago_ms=0)
    await bench.advance(10)
    assert bench.job(victim)["state"] == "preempted"
    assert (await seen(bench, "a", victim)).grace_used_s >= 180


async def test_it_is_withdrawn_when_the_asker_is_gone_before_the_stop(make_bench) -> None:
    bench, victim, attempt, asker = await stage(make_bench)
    await bench.control.jobs.cancel(bench.callers["b"], asker, confirmed=True)
    await bench.settle()
    assert bench.job(victim)["state"] == "running"
    assert [what for _, what, _ in bench.machine.notices] == ["stop", "none"]
    told = await seen(bench, "a", victim)
    assert (told.state, told.outcome) == ("withdrawn", "it goes on")
    await bench.tell(attempt, path="/ck/late.npz", saved=True)
    await bench.advance(300)
    assert bench.job(victim)["state"] == "running"
    assert [e["type"] for e in bench.events("job.notice_withdrawn")] == ["job.notice_withdrawn"]


async def test_it_is_withdrawn_when_the_asker_fits_without(make_bench) -> None:
    bench = await make_bench(Machine(cards=2), toml=POOL)
    victim, _ = await train(bench)
    other = await bench.submit(await bench.caller("c"), "other", priority="high")
    asker = await bench.submit(await bench.caller("b"), "urgent", priority="high")
    assert bench.machine.notices
    bench.machine.finish(bench.attempt(other)["id"])
    await bench.settle()
    assert bench.job(asker)["state"] == "running" and bench.job(victim)["state"] == "running"
    assert (await seen(bench, "a", victim)).state == "withdrawn"


async def test_after_the_stop_the_slots_are_kept_for_the_asker(make_bench) -> None:
    bench, victim, attempt, asker = await stage(make_bench)
    bench.machine.obeys_stops = False
    await bench.tell(attempt, path="/ck/a.npz", saved=True)
    assert bench.job(victim)["state"] == "stopping"
    critical = await bench.submit(await bench.caller("c", max_priority="critical"), "more urgent", priority="critical")
    bench.machine.finish(attempt, None, signal=15, sender="shim", reason="preempt")
    await bench.settle()
    assert bench.job(asker)["state"] == "running" and bench.job(critical)["state"] == "queued"


async def test_an_asker_that_is_gone_after_the_stop_leaves_the_card_to_the_victim(make_bench) -> None:
    bench, victim, attempt, asker = await stage(make_bench)
    bench.machine.obeys_stops = False
    await bench.tell(attempt, path="/ck/a.npz", saved=True)
    await bench.control.jobs.cancel(bench.callers["b"], asker, confirmed=True)
    bench.machine.finish(attempt, None, signal=15, sender="shim", reason="preempt")
    await bench.settle()
    await bench.advance(2)
    assert bench.job(victim)["state"] == "running" and bench.attempt(victim)["epoch"] == 2
    assert bench.one("SELECT outcome FROM preemption") == "the asker was gone when the slots came free"


@pytest.mark.parametrize("when", ["noticed", "saved", "stopping", "freed"])
@pytest.mark.parametrize("kill", [True, False])
async def test_a_server_that_dies_goes_on_where_it_was(make_bench, when: str, kill: bool) -> None:
    bench, victim, attempt, asker = await stage(make_bench)
    machine = bench.machine
    machine.obeys_stops = False
    if when == "noticed":
        await bench.restart(kill=kill, down_s=5)
        machine.works(attempt, path="/ck/a.npz", saved=True)
    elif when == "saved":
        machine.works(attempt, path="/ck/a.npz", saved=True)  # nobody hears of it
        await bench.restart(kill=kill, down_s=5)
    else:
        await bench.tell(attempt, path="/ck/a.npz", saved=True)
        if when == "stopping":
            await bench.restart(kill=kill, down_s=5)
        else:
            bench.cut.add(machine.name)
            bench.hosts[machine.name].away = True
            machine.finish(attempt, None, signal=15, sender="shim", reason="preempt")
            await bench.restart(kill=kill, down_s=5, connect=False)
            await bench.connect(machine)
    if when in ("noticed", "saved"):
        await bench.tell(attempt)
        await bench.advance(2)
    assert [what for _, what, _ in machine.notices] == ["stop"], "the same notice, once"
    if when != "freed":
        assert bench.job(victim)["state"] == "stopping"
        machine.finish(attempt, None, signal=15, sender="shim", reason="preempt")
    await bench.settle()
    await bench.advance(2)
    assert bench.job(asker)["state"] == "running" and bench.job(victim)["state"] == "preempted"
    assert bench.one("SELECT state FROM preemption") == "done"
    assert (await seen(bench, "a", victim)).saved


async def test_a_host_that_is_away_is_told_later_or_the_preemption_is_given_up(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=POOL)
    victim, _ = await train(bench)
    bench.hosts["local"].lose.add("notice")
    await bench.submit(await bench.caller("b"), "urgent", priority="high")
    assert not bench.machine.notices
    await bench.advance(2)
    assert len(bench.machine.notices) == 1
    await bench.disconnect()
    await bench.advance(40)
    assert bench.job(victim)["state"] == "lost"
    assert bench.one("SELECT state FROM preemption") == "withdrawn"


async def test_a_victim_that_saves_and_ends_by_itself_is_preempted_too(make_bench) -> None:
    bench, victim, attempt, asker = await stage(make_bench)
    bench.machine.works(attempt, path="/ck/own.npz", saved=True)
    bench.machine.finish(attempt, 143)
    await bench.settle()
    await bench.advance(2)
    assert bench.job(victim)["state"] == "preempted" and bench.job(asker)["state"] == "running"
    assert (await seen(bench, "a", victim)).outcome == "stopped"


async def test_a_victim_that_dies_of_the_signal_is_preempted_and_one_that_finishes_is_done(make_bench) -> None:
    bench, victim, attempt, _ = await stage(make_bench)
    bench.machine.finish(attempt, None, signal=USR1, sender="cotenant")
    await bench.settle()
    assert bench.job(victim)["state"] == "preempted"
    bench, victim, attempt, asker = await stage(make_bench)
    bench.machine.finish(attempt, 0)
    await bench.settle()
    assert bench.job(victim)["state"] == "succeeded" and bench.job(asker)["state"] == "running"


async def test_a_crash_of_its_own_is_no_preemption(make_bench) -> None:
    bench, victim, attempt, asker = await stage(make_bench)
    bench.machine.finish(attempt, 1)
    await bench.settle()
    assert bench.job(victim)["state"] == "failed" and bench.job(asker)["state"] == "running"
    assert (await seen(bench, "a", victim)).outcome == "it ended by itself: code"


async def test_three_in_half_an_hour_make_a_job_immune_for_a_while(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=POOL)
    victim, _ = await train(bench)
    for n in range(3):
        asker = await bench.submit(await bench.caller("b"), f"urgent{n}", priority="high")
        await bench.tell(bench.attempt(victim)["id"], path=f"/ck/{n}.npz", saved=True, writing_ago_ms=None)
        assert bench.job(asker)["state"] == "running", n
        bench.machine.finish(bench.attempt(asker)["id"])
        await bench.settle()
        await bench.advance(60)
        assert bench.job(victim)["state"] == "running"
    asker = await bench.submit(bench.callers["b"], "urgent4", priority="high")
    await bench.advance(60)
    assert len(bench.machine.notices) == 3 and bench.job(asker)["state"] == "queued"
    await bench.advance(31 * 60)
    assert len(bench.machine.notices) == 4


async def test_a_checkpoint_that_is_not_on_the_host_means_from_zero_and_is_said(make_bench) -> None:
    bench, victim, attempt, asker = await stage(make_bench)
    await bench.tell(attempt, path="/ck/gone.npz", saved=True)
    bench.machine.lost_files.add("/ck/gone.npz")
    bench.machine.finish(bench.attempt(asker)["id"])
    await bench.settle()
    again = bench.attempt(victim)
    assert bench.job(victim)["state"] == "running" and bench.machine.specs[again["id"]].argv == ("train", "-v")
    assert "starts from zero: /ck/gone.npz is not on host" in again["message"]
    assert len(bench.events("job.not_resumed")) == 1


async def test_a_claim_can_be_an_asker(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=POOL)
    victim, attempt = await train(bench)
    claim = await bench.queue(await bench.caller("b"))
    await bench.tell(attempt, path="/ck/a.npz", saved=True)
    assert bench.job(victim)["state"] == "preempted" and bench.lease(claim)["state"] == "leased"


# ---- eviction


async def test_an_evicted_job_may_save_first(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=POOL)
    job, attempt = await train(bench)
    paula = await bench.person()
    await bench.control.operate(paula, "job.evict", {"job_id": job}, "for a demo")
    assert bench.job(job)["state"] == "running" and len(bench.machine.notices) == 1
    await bench.control.operate(paula, "job.evict", {"job_id": job}, "again")
    assert len(bench.machine.notices) == 1, "one eviction at a time"
    await bench.tell(attempt, path="/ck/a.npz", saved=True)
    assert bench.job(job)["state"] == "cancelled"
    told = await seen(bench, "a", job)
    assert (told.reason, told.state, told.saved, told.asker) == ("evict", "done", True, None)


async def test_an_eviction_now_skips_the_grace_and_one_that_cannot_save_gets_none(make_bench) -> None:
    bench = await make_bench(Machine(cards=2), toml=POOL)
    job, _ = await train(bench)
    plain, _ = await train(bench, checkpoint=None, resumable=False)
    paula = await bench.person()
    await bench.control.operate(paula, "job.evict", {"job_id": job, "now": True}, "at once")
    await bench.control.operate(paula, "job.evict", {"job_id": plain}, "it cannot save")
    await bench.settle()
    assert [bench.job(j)["state"] for j in (job, plain)] == ["cancelled", "cancelled"] and not bench.machine.notices


# ---- save now


async def test_a_save_that_is_asked_for_does_not_stop_the_job(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=POOL)
    job, attempt = await train(bench)
    a = bench.callers["a"]
    first = await bench.control.preempting.save_now(a, job, request_id="r1")
    assert (first.status, first.told) == ("noticed", True)
    assert [what for _, what, _ in bench.machine.notices] == ["save"] and bench.machine.signals == [(attempt, USR1)]
    await bench.tell(attempt, path="/ck/a.npz", saved=True)
    again = await bench.control.preempting.save_now(a, job, request_id="r1")
    assert (again.status, again.checkpoint, again.notice_id) == ("saved", "/ck/a.npz", first.notice_id)
    assert bench.job(job)["state"] == "running" and len(bench.machine.notices) == 1
    later = await bench.control.preempting.save_now(a, job)
    await bench.advance(130)
    assert bench.one("SELECT outcome FROM preemption WHERE id = ?", later.notice_id) == "it did not save in time"
    assert (await bench.control.views.get_job(a, job)).preemptions == []
    assert (await bench.control.views.get_job(a, job)).checkpoint["path"] == "/ck/a.npz"


async def test_only_the_own_running_job_that_says_where_it_saves_can_be_asked(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=POOL)
    job, _ = await train(bench)
    other = await bench.caller("b")
    with pytest.raises(Forbidden):
        await bench.control.preempting.save_now(other, job)
    waiting = await bench.submit(other, "x", priority="batch")
    with pytest.raises(Conflict, match="no process"):
        await bench.control.preempting.save_now(other, waiting)
    await bench.control.jobs.cancel(bench.callers["a"], job, confirmed=True)
    await bench.settle()
    with pytest.raises(Conflict) as refused:
        await bench.control.preempting.save_now(other, waiting)
    assert refused.value.code == "no_checkpoints"


async def test_a_person_may_agree_to_the_preemption_of_what_cannot_resume(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=POOL)
    victim, _ = await train(bench, resumable=False, checkpoint=None)
    asker = await bench.submit(await bench.caller("b"), "urgent", priority="high")
    assert bench.job(asker)["state"] == "queued" and not bench.machine.notices
    await bench.control.operate(await bench.person(), "job.agree-preemption", {"job_id": victim}, "it may start again")
    await bench.settle()
    await bench.advance(2)
    assert bench.job(asker)["state"] == "running" and bench.job(victim)["state"] == "preempted"
    bench.machine.finish(bench.attempt(asker)["id"])
    await bench.settle()
    assert bench.attempt(victim)["message"] == "starts from zero: the job is not resumable"
