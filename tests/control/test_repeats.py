"""The same request twice is carried out once: by request_id, by an identical spec, one after the other or at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.server.errors import Busy, Conflict, Forbidden, NotFound, QuotaExceeded
from cotenant.server.model.caller import Caller
from cotenant.server.model.spec import JobSpec

Act = Callable[[Bench, Caller, dict[str, str], dict[str, Any]], Awaitable[Any]]

#: verb -> (the act with its usual arguments, other arguments for the same act)
ACTS: dict[str, tuple[Act, dict[str, Any]]] = {
    "acquire": (lambda b, c, o, k: b.control.leases.acquire(c, **({"gpus": 0} | k)), {"ttl_s": 99}),
    "acquire queued": (lambda b, c, o, k: b.control.leases.acquire(c, **({"gpus": 5, "when_full": "queue"} | k)), {"ttl_s": 99}),
    "release": (lambda b, c, o, k: b.control.leases.release(c, k.pop("lease", o["lease"]), **k), {"lease": "other_lease"}),
    "submit": (lambda b, c, o, k: b.control.jobs.submit(c, JobSpec(command=k.pop("command", "go"), gpus=0), **k), {"command": "other"}),
    "cancel": (lambda b, c, o, k: b.control.jobs.cancel(c, k.pop("job", o["running"]), confirmed=True, **k), {"job": "waiting"}),
    "cancel waiting": (lambda b, c, o, k: b.control.jobs.cancel(c, o["waiting"], confirmed=True, **k), {"reason": "another"}),
    "retry": (lambda b, c, o, k: b.control.jobs.retry(c, k.pop("job", o["ended"]), **k), {"job": "ended_too"}),
    "retry held": (lambda b, c, o, k: b.control.jobs.retry(c, k.pop("job", o["held"]), **k), {"job": "held_too"}),
    "signal": (lambda b, c, o, k: b.control.jobs.signal(c, o["running"], k.pop("signal", "HUP"), **k), {"signal": "USR1"}),
    "hold": (lambda b, c, o, k: b.control.jobs.hold(c, k.pop("job", o["waiting"]), "why", **k), {"job": "waiting_too"}),
    "unhold": (lambda b, c, o, k: b.control.jobs.unhold(c, k.pop("job", o["held"]), "why", **k), {"job": "held_too"}),
    "hand over": (lambda b, c, o, k: b.control.leases.hand_over(c, o["lease"], k.pop("to", "mate"), **k), {"to": "stranger"}),
    "offer": (lambda b, c, o, k: b.control.leases.hand_over(c, o["lease"], k.pop("to", "stranger"), **k), {"to": "mate"}),
}  # fmt: skip


async def objects(bench: Bench) -> tuple[Caller, dict[str, str]]:
    a = await bench.caller("a", "alice")
    await bench.caller("mate", "alice")
    await bench.caller("stranger", "bob")
    out = {
        "lease": (await bench.control.leases.acquire(a, gpus=1, ttl_s=86_400)).lease_id,
        "other_lease": (await bench.control.leases.acquire(a, gpus=1, ttl_s=86_400)).lease_id,
        "running": await bench.submit(a, "running", gpus=1),
    }
    for name in ("ended", "ended_too"):
        out[name] = await bench.submit(a, name, gpus=0)
        bench.machine.finish(bench.attempt(out[name])["id"], 1)
        await bench.settle()
    for name in ("waiting", "waiting_too", "held", "held_too"):
        out[name] = await bench.submit(a, name, gpus=5)
        if name.startswith("held"):
            await bench.control.jobs.hold(a, out[name], "first")
    return a, out


def identity(answer: Any) -> Any:
    """What of an answer names the thing that was done."""
    if isinstance(answer, dict):
        return answer["object_id"], answer["status"], answer["holder"]
    return tuple(getattr(answer, key, None) for key in ("lease_id", "job_id", "attempt_id", "fence"))


@pytest.mark.parametrize("verb", ACTS)
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_request_id_makes_every_write_safe_to_repeat(make_bench, verb: str, at_once: bool) -> None:
    bench = await make_bench(Machine(cards=5))
    a, known = await objects(bench)
    act, other = ACTS[verb]
    before = len(bench.events())
    again = {"request_id": "r-1"}
    if at_once:
        answers = await asyncio.gather(*[act(bench, a, known, dict(again)) for _ in range(3)])
    else:
        answers = [await act(bench, a, known, dict(again)) for _ in range(3)]
    assert len({identity(answer) for answer in answers}) == 1
    done = [e for e in bench.events()[before:] if e["request_id"] == "r-1"]
    assert len(done) == 1, [tuple(e)[:4] for e in done]
    if verb == "signal":
        assert bench.machine.asked["signal"] == 1
    await bench.settle()
    await bench.advance(600)  # also much later, and after a restart
    await bench.restart(kill=True)
    answer = await act(bench, bench.callers["a"], known, dict(again))
    assert identity(answer)[:2] == identity(answers[0])[:2]
    assert len([e for e in bench.events() if e["request_id"] == "r-1"]) == 1

    with pytest.raises(Conflict) as refused:
        wrong = {key: known.get(value, value) for key, value in other.items()}
        await act(bench, bench.callers["a"], known, {**wrong, "request_id": "r-1"})
    assert refused.value.code == "request_id_reused"
    for key in ("lease", "job"):
        if key in other:
            kind = "lease" if key == "lease" else "job"
            ended = bench.rows(f"SELECT ended_at_ms FROM {kind} WHERE id = ?", known[other[key]])[0][0]
            assert (ended is None) == (not other[key].startswith("ended")), "the other object was left alone"


async def test_request_ids_belong_to_their_caller_and_are_kept_seven_days(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    first = await bench.submit(a, "x", gpus=0, request_id="same")
    second = await bench.submit(b, "x", gpus=0, request_id="same")
    assert first != second
    with pytest.raises(Conflict):
        await bench.control.leases.acquire(a, request_id="same")
    bench.clock.advance(8 * 86_400)
    await bench.loop.turn()
    await bench.settle()
    assert bench.rows("SELECT * FROM request") == []
    assert await bench.submit(a, "x", gpus=0, request_id="same") != first


async def test_a_failed_request_may_be_sent_again(bench: Bench) -> None:
    a = await bench.caller("a")
    held = await bench.control.leases.acquire(a, gpus=2)
    with pytest.raises(Busy):
        await bench.control.leases.acquire(a, request_id="r")
    await bench.control.leases.release(a, held.lease_id)
    lease = await bench.control.leases.acquire(a, request_id="r")
    assert lease.state == "leased" and not lease.deduplicated


async def test_twins_for_the_last_card_get_one_lease_and_no_refusal(bench: Bench) -> None:
    a = await bench.caller("a")
    answers = await asyncio.gather(*[bench.control.leases.acquire(a, gpus=2, request_id="r") for _ in range(4)])
    assert len({answer.lease_id for answer in answers}) == 1
    assert sorted(answer.deduplicated for answer in answers) == [False, True, True, True]


async def test_an_identical_spec_within_three_minutes_is_the_same_job_while_it_is_not_over(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    spec = JobSpec(command="same", gpus=2)
    first = await bench.control.jobs.submit(a, spec)
    assert not first.deduplicated
    await bench.settle()
    for options in ({}, {"when_full": "refuse"}):
        again = await bench.control.jobs.submit(a, spec, **options)
        assert (again.job_id, again.deduplicated) == (first.job_id, True)
    assert (await bench.control.jobs.submit(b, spec)).job_id != first.job_id
    assert (await bench.control.jobs.submit(a, JobSpec(command="same", gpus=2, name="n"))).job_id != first.job_id
    await bench.advance(179)
    assert (await bench.control.jobs.submit(a, spec)).deduplicated
    await bench.advance(2)
    later = await bench.control.jobs.submit(a, spec)
    assert not later.deduplicated


async def test_an_identical_spec_after_the_end_is_a_new_job(bench: Bench) -> None:
    a = await bench.caller("a")
    first = await bench.submit(a, "same", gpus=0)
    bench.machine.finish(bench.attempt(first)["id"], 0)
    await bench.settle()
    assert await bench.submit(a, "same", gpus=0) != first


async def test_twins_without_an_id_are_one_job(bench: Bench) -> None:
    a = await bench.caller("a")
    spec = JobSpec(command="same", gpus=2)
    answers = await asyncio.gather(*[bench.control.jobs.submit(a, spec, when_full="refuse") for _ in range(5)])
    assert len({answer.job_id for answer in answers}) == 1
    await bench.settle()
    again = await bench.control.jobs.submit(a, spec, when_full="refuse")
    assert again.deduplicated, "what it would be refused for is itself"


# ---- hand over


async def test_another_owner_has_to_agree(bench: Bench) -> None:
    a, b, c = await bench.caller("a", "alice"), await bench.caller("b", "bob"), await bench.caller("c", "carla")
    lease = await bench.control.leases.acquire(a)
    over = bench.control.leases.hand_over
    with pytest.raises(Forbidden, match="not offered"):
        await over(b, lease.lease_id, "b")
    with pytest.raises(Forbidden):
        await over(b, lease.lease_id, "c")
    with pytest.raises(NotFound):
        await over(a, lease.lease_id, "nobody")
    offered = await over(a, lease.lease_id, "b")
    assert (offered["status"], offered["holder"]) == ("offered", "a")
    assert bench.lease(lease.lease_id)["caller"] == "a"
    with pytest.raises(Forbidden):
        await over(c, lease.lease_id, "c")
    taken = await over(b, lease.lease_id, "b")
    assert (taken["status"], taken["holder"]) == ("handed_over", "b")
    row = bench.lease(lease.lease_id)
    assert (row["caller"], row["owner"], row["fence"]) == ("b", "bob", lease.fence)
    with pytest.raises(Forbidden):
        await bench.control.leases.heartbeat(a, lease.lease_id)
    await bench.control.leases.heartbeat(b, lease.lease_id)
    assert [e["type"] for e in bench.events("lease.offered", "lease.handed_over")] == [
        "lease.offered",
        "lease.handed_over",
    ]
    status = await bench.control.views.quota_status(b)
    assert status.me.used_by_me == 1 and (await bench.control.views.quota_status(a)).me.used_by_me == 0


async def test_an_offer_ends_with_its_time_and_with_the_lease(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    over = bench.control.leases.hand_over
    first = await bench.control.leases.acquire(a, ttl_s=86_400)
    await over(a, first.lease_id, "b")
    await bench.advance(3601)
    with pytest.raises(Forbidden):
        await over(b, first.lease_id, "b")
    await over(a, first.lease_id, "b")
    await bench.control.leases.release(a, first.lease_id)
    with pytest.raises((Conflict, Forbidden)):
        await over(b, first.lease_id, "b")
    assert bench.rows("SELECT * FROM offer") == []


async def test_a_job_goes_with_its_lease_and_only_within_the_takers_caps(make_bench) -> None:
    bench = await make_bench(Machine(cards=4), toml="[owners.bob]\ncap = 1\n[owners.carla]\njobs = 1\n")
    a, b, c = await bench.caller("a", "alice"), await bench.caller("b", "bob"), await bench.caller("c", "carla")
    over = bench.control.leases.hand_over
    job = await bench.submit(a, gpus=2)
    lease_id = bench.attempt(job)["lease_id"]
    with pytest.raises(Conflict, match="belongs to a job"):
        await over(a, lease_id, "b")
    await over(a, job, "b")
    with pytest.raises(QuotaExceeded, match="1 cards"):
        await over(b, job, "b")
    assert bench.job(job)["caller"] == "a"
    await bench.control.leases.acquire(c)
    await over(a, job, "c")
    with pytest.raises(QuotaExceeded, match="at once"):
        await over(c, job, "c")
    mate = await bench.caller("mate", "alice")
    assert (await over(a, job, "mate"))["status"] == "handed_over"
    assert (bench.job(job)["caller"], bench.lease(lease_id)["caller"]) == ("mate", "mate")
    await bench.control.jobs.cancel(mate, job, confirmed=True)
    await bench.settle()
    with pytest.raises(Conflict, match="has ended"):
        await over(mate, job, "a")


async def test_a_waiting_job_changes_hands_and_counts_for_its_new_owner(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    held = await bench.control.leases.acquire(a, gpus=2)
    job = await bench.submit(a)
    await bench.control.leases.hand_over(a, job, "b")
    await bench.control.leases.hand_over(b, job, "b")
    await bench.control.leases.release(a, held.lease_id)
    await bench.settle()
    row = bench.lease(bench.attempt(job)["lease_id"])
    assert (row["caller"], row["owner"], bench.job(job)["state"]) == ("b", "bob", "running")


# ---- what the taker's token may have


async def things(bench: Bench, giver: Caller) -> dict[str, str]:
    """One of each that can be handed over, all in pool train."""
    return {
        "lease": (await bench.control.leases.acquire(giver, pool="train")).lease_id,
        "claim": await bench.queue(giver, pool="train", gpus=2),
        "running job": await bench.submit(giver, "runs", pool="train", gpus=0, priority="high"),
        "waiting job": await bench.submit(giver, "waits", pool="train", gpus=2, priority="high"),
    }


@pytest.mark.parametrize("what", ["lease", "claim", "running job", "waiting job"])
@pytest.mark.parametrize("owner", ["alice", "bob"])
async def test_nothing_is_handed_to_who_could_not_have_asked_for_it(make_bench, what: str, owner: str) -> None:
    bench = await make_bench(Machine(cards=2), toml="[server]\ndefault_pool = 'train'\n[pools.train]\n[pools.debug]\n")
    a = await bench.caller("a", "alice")
    thing = (await things(bench, a))[what]
    over = bench.control.leases.hand_over
    await bench.caller("elsewhere", owner, pools=["debug"])
    await bench.caller("humble", owner, pools=["train"], max_priority="normal")
    await bench.caller("able", owner, pools=["debug", "train"])
    gone = await bench.caller("gone", owner)
    await bench.control.tokens.revoke(await bench.person(), gone.name, "left")
    refused = {"elsewhere": "pool_out_of_reach", "gone": "no_living_token"}
    if "job" in what:
        refused["humble"] = "priority_too_high"
    before = bench.dump()
    for name, code in refused.items():
        with pytest.raises(Forbidden) as said:
            await over(a, thing, name)
        assert said.value.code == code and said.value.hint
    assert bench.dump() == before
    answer = await over(a, thing, "able")
    if owner == "bob":
        assert answer["status"] == "offered"
        answer = await over(bench.callers["able"], thing, "able")
    assert (answer["status"], answer["holder"]) == ("handed_over", "able")


async def test_an_offer_is_accepted_within_the_very_token_that_accepts(make_bench) -> None:
    bench = await make_bench(toml="[server]\ndefault_pool = 'train'\n[pools.train]\n[pools.debug]\n")
    a, able = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    lease = await bench.control.leases.acquire(a)
    await bench.control.leases.hand_over(a, lease.lease_id, "b")
    narrow = replace(able, pools=("debug",))  # another token of the same caller
    with pytest.raises(Forbidden) as said:
        await bench.control.leases.hand_over(narrow, lease.lease_id, "b")
    assert said.value.code == "pool_out_of_reach"
    assert (await bench.control.leases.hand_over(able, lease.lease_id, "b"))["status"] == "handed_over"


# ---- what is remembered between asks


async def test_a_repeat_of_a_retry_is_answered_from_the_first_whatever_the_job_has_become(bench: Bench) -> None:
    a = await bench.caller("a")
    blocking = await bench.submit(a, "blocks", gpus=2)
    job = await bench.submit(a, "held", gpus=2)
    await bench.control.jobs.hold(a, job, "wait")
    first = await bench.control.jobs.retry(a, job, request_id="r")
    bench.machine.finish(bench.attempt(blocking)["id"], 0)
    await bench.settle()
    bench.machine.finish(bench.attempt(job)["id"], 1)
    await bench.settle()
    again = await bench.control.jobs.retry(a, job, request_id="r")
    assert (first.job_id, again.job_id, again.state, again.deduplicated) == (job, job, "failed", True)
    anew = await bench.control.jobs.retry(a, job, request_id="s")
    assert anew.job_id != job
    other = await bench.submit(a, "other", gpus=0)
    bench.machine.finish(bench.attempt(other)["id"], 1)
    await bench.settle()
    for wrong in (bench.control.jobs.retry(a, other, request_id="s"), bench.control.jobs.submit(a, JobSpec(command="held", gpus=2), request_id="s")):  # fmt: skip
        with pytest.raises(Conflict):
            await wrong


async def test_an_inventory_that_changes_without_growing_is_noticed(bench: Bench) -> None:
    a = await bench.caller("a")
    wish = {"gpus": 1, "gpu_memory_mib": 60_000}
    await bench.submit(a, "first", **wish)
    whole = bench.machine.card
    bench.machine.card = lambda n: replace(whole(n), memory_mib=24_576)  # type: ignore[method-assign]
    await bench.disconnect()
    await bench.connect()
    with pytest.raises(QuotaExceeded) as refused:
        await bench.submit(a, "second", **wish)
    assert refused.value.code == "no_such_gpu"
    bench.machine.card = whole  # type: ignore[method-assign]
    await bench.disconnect()
    await bench.connect()
    assert await bench.submit(a, "third", **wish)
