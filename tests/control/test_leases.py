"""Direct leases: granted, refused with numbers, queued and picked up, renewed, ended."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.hostd.protocol import CardProcess
from cotenant.server.errors import BadRequest, Busy, Conflict, Forbidden, NotFound, QuotaExceeded, Unavailable

MINUTE = 60.0


# ---- granted


async def test_a_grant_says_all_that_the_holder_needs(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    lease = await bench.control.leases.acquire(a, gpus=2, ttl_s=90, hours=2, purpose="try it")
    assert (lease.state, lease.fence, lease.holder, lease.owner, lease.gpus) == ("leased", 1, "a", "alice", 2)
    assert [(s.host, s.index, s.uuid) for s in lease.slots] == [("local", n, f"SIM-local-{n}") for n in range(2)]
    assert (lease.expires_in_s, lease.hard_end_in_s, lease.hard_end_from) == (90, 7200, "hours")
    assert lease.env == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "",  # simulated: a number would be a real card, where there is one
        "COTENANT_GPU_UUIDS": "SIM-local-0,SIM-local-1",
        "COTENANT_LEASE": lease.lease_id,
        "COTENANT_FENCE": "1",
    }
    assert bench.machine.holds[lease.lease_id][0] == 1
    (event,) = bench.events("lease.granted")
    assert (event["caller"], event["lease_id"], event["new"]) == ("a", lease.lease_id, "leased")


async def test_the_hard_end_is_the_pools_where_none_is_asked_for(make_bench) -> None:
    bench = await make_bench(toml="[pools.default]\ndefault_hours = 3\n")
    lease = await bench.control.leases.acquire(await bench.caller("a"))
    assert (lease.hard_end_in_s, lease.hard_end_from) == (3 * 3600, "pool default")


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl_s": 59}, {"ttl_s": 86_401}, {"gpus": -1}, {"gpus": 10**9}, {"hours": 0}, {"hours": -1}, {"hours": float("nan")},
        {"hours": float("inf")}, {"hours": 745}, {"pool": "nowhere"}, {"gpu_memory_mib": -5}, {"request_id": ""}, {"request_id": "x" * 129},
        {"request_id": "a\nb"},
    ],
)  # fmt: skip
async def test_what_cannot_be_meant_is_refused_and_changes_nothing(bench: Bench, wrong: dict) -> None:
    a = await bench.caller("a")
    before = bench.dump()
    with pytest.raises(BadRequest) as refused:
        await bench.control.leases.acquire(a, **wrong)
    assert refused.value.text()
    assert bench.dump() == before


async def test_a_ttl_never_reaches_beyond_the_hard_end(bench: Bench) -> None:
    a = await bench.caller("a")
    lease = await bench.control.leases.acquire(a, ttl_s=3600, hours=0.5)
    assert lease.expires_in_s == lease.hard_end_in_s == 1800
    await bench.advance(1750)
    beat = await bench.control.leases.heartbeat(a, lease.lease_id)
    assert beat.expires_in_s == 50 and "hard end" in (beat.notice or "")


async def test_a_lease_without_cards_takes_a_place(bench: Bench) -> None:
    a = await bench.caller("a")
    leases = [await bench.control.leases.acquire(a, gpus=0) for _ in range(2)]
    assert [lease.gpus for lease in leases] == [0, 0]
    with pytest.raises(Busy):
        await bench.control.leases.acquire(a, gpus=0)
    await bench.control.leases.release(a, leases[0].lease_id)
    await bench.control.leases.acquire(a, gpus=0)
    assert bench.machine.asked["hold"] == 0, "there is no card to keep"


# ---- refused


async def test_busy_says_who_holds_it_and_until_when(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    held = await bench.control.leases.acquire(a, gpus=2, hours=1)
    with pytest.raises(Busy) as refused:
        await bench.control.leases.acquire(b)
    text = refused.value.text()
    assert text.startswith("busy: ") and '"a"' in text and 'when_full="queue"' in text
    assert (held.hard_end_at or "")[:16] in text, "free by the hard end, at the latest, and some cleaning"
    assert refused.value.retry_after_s == 600
    assert bench.events("lease.queued") == []


@pytest.mark.parametrize(
    ("toml", "held", "asked", "code", "numbers"),
    [
        ("[pools.default]\ncap = 3\n", [("x", 3)], 1, "quota_pool", {"cap": 3, "used": 3, "wanted": 1}),
        ("[pools.default]\nowner_cap = 2\n", [("a", 2)], 1, "quota_owner", {"cap": 2, "used": 2, "wanted": 1}),
        ("[pools.default]\nowner_cap = 2\n", [("a2", 1)], 2, "quota_owner", {"cap": 2, "used": 1, "wanted": 2}),
        ("[pools.default]\nagent_cap = 1\n", [("a", 1)], 1, "quota_agent", {"cap": 1, "used": 1, "wanted": 1}),
        ("[owners.alice]\ncap = 1\n", [("a2", 1)], 1, "quota_owner", {"cap": 1, "used": 1, "wanted": 1}),
        ("[pools.default]\ncap = 4\nreserve = 1\n", [("x", 3)], 1, "reserve", {"cap": 3, "used": 3, "wanted": 1}),
        ("[pools.default]\nreserve = 2\n", [("x", 2)], 1, "reserve", {"cap": 2, "used": 2, "wanted": 1}),
        ("[pools.default]\nowner_jobs = 1\n", [("a2", 1)], 1, "jobs_at_once", {"cap": 1, "used": 1}),
        ("[pools.default]\nagent_jobs = 1\n", [("a", 1)], 1, "jobs_at_once", {"cap": 1, "used": 1}),
        ("[owners.alice]\njobs = 1\n", [("a2", 1)], 1, "jobs_at_once", {"cap": 1, "used": 1}),
    ],
)
async def test_a_cap_refuses_with_its_numbers(make_bench, toml, held, asked, code, numbers) -> None:
    bench = await make_bench(Machine(cards=4), toml=toml)
    owners = {"a": "alice", "a2": "alice", "x": "xaver"}
    for name, gpus in held:
        await bench.control.leases.acquire(await bench.caller(name, owners[name]), gpus=gpus)
    a = await bench.caller("a", "alice")
    before = bench.rows("SELECT count(*) FROM lease")[0][0]
    with pytest.raises(QuotaExceeded) as refused:
        await bench.control.leases.acquire(a, gpus=asked)
    assert refused.value.data["blocker"] == code
    assert {key: refused.value.data[key] for key in numbers} == numbers
    assert refused.value.text().startswith(f"quota_exceeded: {code}: ")
    assert bench.rows("SELECT count(*) FROM lease")[0][0] == before
    queued = await bench.control.views.get_lease(a, await bench.queue(a, gpus=asked))
    assert queued.state == "queued" and queued.blockers[0].code == code


async def test_the_reserve_is_for_people(make_bench) -> None:
    bench = await make_bench(Machine(cards=4), toml="[pools.default]\ncap = 3\nreserve = 1\n")
    agent, person = await bench.caller("a"), await bench.person()
    await bench.control.leases.acquire(agent, gpus=2)
    with pytest.raises(Exception, match="for people"):
        await bench.control.leases.acquire(agent)
    await bench.control.leases.acquire(person)
    with pytest.raises(Exception, match="at most 3 cards"):
        await bench.control.leases.acquire(person)


async def test_what_can_never_be_is_refused_even_with_a_queue(make_bench) -> None:
    bench = await make_bench(Machine(cards=4), toml="[pools.default]\nowner_cap = 2\n")
    a = await bench.caller("a")
    for wrong in ({"gpus": 3}, {"gpu_memory_mib": 200_000}, {"gpu_model": "H900"}, {"host": "elsewhere"}):
        with pytest.raises(QuotaExceeded) as refused:
            await bench.control.leases.acquire(a, when_full="queue", **wrong)
        code = refused.value.code if "gpus" not in wrong else refused.value.data["blocker"]
        assert code == ("quota_owner" if "gpus" in wrong else "no_such_gpu")
    assert bench.rows("SELECT * FROM lease") == []


async def test_a_refusal_names_pools_with_room(make_bench) -> None:
    toml = '[pools.default]\n[pools.other]\n[hosts.local]\ngpu_pools = { 1 = "other" }\n'
    bench = await make_bench(toml=toml)
    a = await bench.caller("a")
    await bench.control.leases.acquire(a)
    with pytest.raises(Busy, match="in use") as refused:
        await bench.control.leases.acquire(a)
    assert 'Pools with free cards: "other" (1).' in refused.value.text()


async def test_a_token_bound_to_pools_reaches_no_other(make_bench) -> None:
    bench = await make_bench(toml="[pools.default]\n[pools.other]\n")
    a = await bench.caller("a", pools=["other"])
    with pytest.raises(Forbidden, match="does not reach"):
        await bench.control.leases.acquire(a, pool="default")
    assert bench.control.context.pool_of(a, None) == "other"


# ---- the host has the last word


async def test_an_occupied_card_is_found_out_and_another_is_given(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.machine.dirty["SIM-local-0"] = [CardProcess(99, "eve", "miner", 500)]
    lease = await bench.control.leases.acquire(a)
    assert [s.uuid for s in lease.slots] == ["SIM-local-1"]
    revoked = bench.events("lease.revoked")
    assert len(revoked) == 1 and "occupied" in revoked[0]["reason"]
    bench.machine.card_states["SIM-local-0"] = ("occupied", "pid 99 (eve, 500 MiB)")
    bench.telemetry()
    await bench.control.leases.release(a, lease.lease_id)
    await bench.control.leases.acquire(await bench.caller("b"))
    with pytest.raises(Busy):
        await bench.control.leases.acquire(a)
    bench.machine.card_states.clear()
    bench.machine.dirty.clear()
    bench.telemetry()
    assert (await bench.control.leases.acquire(a)).slots[0].uuid == "SIM-local-0"


async def test_a_request_that_its_host_refused_may_be_repeated(bench: Bench) -> None:
    a = await bench.caller("a")
    for uuid in bench.machine.uuids:
        bench.machine.dirty[uuid] = [CardProcess(99, "eve", "miner", 500)]
    with pytest.raises(Busy):
        await bench.control.leases.acquire(a, request_id="r1")
    bench.machine.dirty.clear()
    bench.telemetry()
    await bench.advance(3)
    again = await bench.control.leases.acquire(a, request_id="r1")
    assert again.state == "leased" and not again.deduplicated


async def test_a_claim_that_its_host_refuses_keeps_its_place(bench: Bench) -> None:
    a, b, c = [await bench.caller(n) for n in "abc"]
    held = await bench.control.leases.acquire(a, gpus=2)
    first = await bench.queue(b, gpus=2)
    second = await bench.queue(c, gpus=2)
    await bench.control.leases.release(a, held.lease_id)
    bench.machine.dirty["SIM-local-0"] = [CardProcess(99, "eve", "miner", 500)]
    await bench.settle()
    row = bench.lease(first)
    assert (row["state"], row["missed_pickups"]) == ("queued", 0)
    assert "occupied" in bench.events("lease.requeued")[0]["reason"]
    bench.machine.dirty.clear()
    bench.telemetry()
    await bench.advance(5)
    assert (bench.lease(first)["state"], bench.lease(second)["state"]) == ("leased", "queued")


async def test_a_grant_stands_when_the_host_does_not_answer(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.hosts["local"].lose.add("hold")
    lease = await bench.control.leases.acquire(a)
    assert lease.state == "leased" and bench.machine.holds == {}
    await bench.disconnect()
    await bench.connect()
    assert list(bench.machine.holds) == [lease.lease_id]


async def test_a_card_that_its_host_never_kept_is_looked_at_before_it_is_free(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.hosts["local"].lose.add("hold")
    lease = await bench.control.leases.acquire(a)
    bench.machine.dirty["SIM-local-0"] = [CardProcess(50, "a", "python", 100)]
    ended = await bench.control.leases.release(a, lease.lease_id)
    assert ended.state == "released" and ended.cleaning
    assert bench.uses() == ["cleaning", "free"]


# ---- queue and pick-up


async def test_a_queued_claim_is_granted_in_turn_and_picked_up(bench: Bench) -> None:
    a, b, c = [await bench.caller(n) for n in "abc"]
    held = await bench.control.leases.acquire(a, gpus=2)
    first = await bench.queue(b, gpus=2, ttl_s=120)
    second = await bench.queue(c, gpus=1)
    waiting = await bench.control.views.get_lease(b, first)
    assert (waiting.state, waiting.fence, waiting.expires_at, waiting.env) == ("queued", None, None, None)
    with pytest.raises(Conflict, match="still waits"):
        await bench.control.leases.heartbeat(b, first)
    await bench.control.leases.release(a, held.lease_id)
    await bench.settle()
    granted = await bench.control.views.get_lease(b, first)
    assert (granted.state, granted.fence, granted.expires_at) == ("leased", 2, None)
    assert granted.pickup_by is not None and granted.env is not None
    assert bench.lease(second)["state"] == "queued"
    beat = await bench.control.leases.heartbeat(b, first)
    assert (beat.state, beat.expires_in_s) == ("running", 120)
    assert len(bench.events("lease.picked_up")) == 1
    assert (await bench.control.views.get_lease(b, first)).pickup_by is None


async def test_a_claim_missed_once_goes_back_and_missed_twice_ends(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    held = await bench.control.leases.acquire(a, gpus=2)
    claim = await bench.queue(b, gpus=1)
    await bench.control.leases.release(a, held.lease_id)
    await bench.settle()
    first = bench.lease(claim)
    await bench.advance(601)
    again = bench.lease(claim)
    assert (again["state"], again["missed_pickups"], again["queued_at_ms"]) == ("leased", 1, first["queued_at_ms"])
    assert again["fence"] > first["fence"]
    assert len(bench.events("lease.requeued")) == 1
    await bench.advance(601)
    ended = await bench.control.views.get_lease(b, claim)
    assert (ended.state, ended.end_reason) == ("expired", "not picked up twice")
    assert bench.uses() == ["free", "free"] and bench.machine.holds == {}
    with pytest.raises(Conflict, match="expired"):
        await bench.control.leases.heartbeat(b, claim)


async def test_a_missed_claim_lets_the_next_one_go_first_only_where_it_fits(bench: Bench) -> None:
    a, b, c = [await bench.caller(n) for n in "abc"]
    held = await bench.control.leases.acquire(a, gpus=2)
    first = await bench.queue(b, gpus=2)
    second = await bench.queue(c, gpus=2)
    await bench.control.leases.release(a, held.lease_id)
    await bench.settle()
    await bench.advance(601)
    assert (bench.lease(first)["state"], bench.lease(second)["state"]) == ("leased", "queued")
    await bench.advance(601)
    assert (bench.lease(first)["state"], bench.lease(second)["state"]) == ("expired", "leased")


async def test_a_missed_claims_cards_are_cleaned_before_others_get_them(bench: Bench) -> None:
    """Nobody knows what the holder did on them without a heartbeat."""
    a, b, c = [await bench.caller(n) for n in "abc"]
    held = await bench.control.leases.acquire(a, gpus=2)
    claim = await bench.queue(b, gpus=2)
    await bench.control.leases.release(a, held.lease_id)
    await bench.settle()
    bench.machine.dirty["SIM-local-0"] = [CardProcess(50, "b", "python", 100)]
    await bench.advance(601)
    assert bench.lease(claim)["state"] == "queued"
    assert bench.uses() == ["cleaning", "cleaning"]
    with pytest.raises(Busy):
        await bench.control.leases.acquire(c)
    bench.machine.dirty.clear()
    await bench.advance(5)
    granted = await bench.control.views.get_lease(b, claim)
    assert granted.state == "leased" and len(granted.slots) == 2


async def test_the_claim_of_a_revoked_token_ends_by_itself(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    held = await bench.control.leases.acquire(a, gpus=2)
    claim = await bench.queue(b, gpus=2)
    await bench.control.tokens.revoke(await bench.person(), "b")
    assert bench.control.auth.caller_of(bench.tokens["b"], door="mcp") is None
    await bench.control.leases.release(a, held.lease_id)
    await bench.settle()
    await bench.advance(1300)
    assert bench.lease(claim)["state"] == "expired"
    assert bench.uses() == ["free", "free"]


async def test_waiting_for_a_claim_returns_when_it_is_granted(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    held = await bench.control.leases.acquire(a, gpus=2)
    claim = await bench.queue(b)
    waiting = asyncio.create_task(bench.control.leases.wait(b, claim, 30))
    await bench.settle()
    assert not waiting.done()
    await bench.control.leases.release(a, held.lease_id)
    await bench.settle()
    assert (await asyncio.wait_for(waiting, 5)).state == "leased"
    with pytest.raises(NotFound):
        await bench.control.leases.wait(b, "lse_none", 1)
    await asyncio.sleep(0)
    assert bench.control.context.turnstile._waiting == {}, "nobody is left waiting"


async def test_an_already_passed_wait_answers_where_things_stand(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    await bench.control.leases.acquire(a, gpus=2)
    claim = await bench.queue(b)
    assert (await bench.control.leases.wait(b, claim, 0)).state == "queued"


# ---- heartbeat, end


async def test_heartbeats_keep_a_lease_and_silence_ends_it(bench: Bench) -> None:
    a = await bench.caller("a")
    lease = await bench.control.leases.acquire(a, ttl_s=60)
    for _ in range(5):
        await bench.advance(50)
        await bench.control.leases.heartbeat(a, lease.lease_id)
    await bench.advance(59)
    assert bench.lease(lease.lease_id)["state"] == "running"
    await bench.advance(2)
    ended = await bench.control.views.get_lease(a, lease.lease_id)
    assert (ended.state, ended.expires_at, ended.env) == ("expired", None, None)
    assert "ttl" in (ended.end_reason or "")
    assert bench.uses() == ["free", "free"] and bench.machine.holds == {}
    (event,) = bench.events("lease.expired")
    assert (event["caller"], event["severity"]) == ("cotenant", "warning")


async def test_the_hard_end_comes_whatever_the_heartbeats(bench: Bench) -> None:
    a = await bench.caller("a")
    lease = await bench.control.leases.acquire(a, ttl_s=600, hours=0.1)
    for _ in range(3):
        await bench.advance(100)
        await bench.control.leases.heartbeat(a, lease.lease_id)
    await bench.advance(61)
    assert bench.lease(lease.lease_id)["state"] == "expired"
    with pytest.raises(Conflict) as refused:
        await bench.control.leases.heartbeat(a, lease.lease_id)
    assert refused.value.code == "lease_ended" and "hard end" in refused.value.text()


async def test_a_renewal_that_overtakes_an_expiry_wins(bench: Bench) -> None:
    """The loop decided on the old end; by the time it writes, the holder has renewed."""
    a = await bench.caller("a")
    lease = await bench.control.leases.acquire(a, ttl_s=60)
    bench.clock.advance(20)
    await bench.loop.turn()
    bench.clock.advance(20)
    await bench.loop.turn()
    bench.clock.advance(20.5)
    turn = asyncio.create_task(bench.loop.turn())
    beat = asyncio.create_task(bench.control.leases.heartbeat(a, lease.lease_id))
    await asyncio.gather(turn, beat)
    await bench.settle()
    state = bench.lease(lease.lease_id)["state"]
    assert (state == "running") == (beat.exception() is None)


async def test_release_twice_is_harmless_and_others_may_not(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    lease = await bench.control.leases.acquire(a)
    for act in (bench.control.leases.heartbeat, bench.control.leases.release):
        with pytest.raises(Forbidden) as refused:
            await act(b, lease.lease_id)
        assert refused.value.code == "not_yours"
    assert (await bench.control.leases.release(a, lease.lease_id)).state == "released"
    events = len(bench.events())
    assert (await bench.control.leases.release(a, lease.lease_id)).state == "released"
    assert len(bench.events()) == events
    with pytest.raises(NotFound, match="no lease"):
        await bench.control.leases.release(a, "lse_unknown")


async def test_agents_of_one_owner_share_unless_a_token_is_bound_to_its_name(bench: Bench) -> None:
    a, other = await bench.caller("a", "alice"), await bench.caller("other", "alice")
    bound = await bench.caller("bound", "alice", own_only=True)
    lease = await bench.control.leases.acquire(a)
    with pytest.raises(Forbidden):
        await bench.control.leases.release(bound, lease.lease_id)
    assert (await bench.control.leases.release(other, lease.lease_id)).state == "released"


async def test_a_waiting_claim_is_withdrawn(bench: Bench) -> None:
    a = await bench.caller("a")
    await bench.control.leases.acquire(a, gpus=2)
    claim = await bench.queue(a)
    assert (await bench.control.leases.release(a, claim)).state == "withdrawn"
    assert bench.events("lease.withdrawn")[0]["lease_id"] == claim


async def test_a_jobs_lease_lives_with_its_job(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    lease_id = bench.attempt(job)["lease_id"]
    beat = await bench.control.leases.heartbeat(a, lease_id)
    assert beat.expires_at is None and "needs no heartbeat" in (beat.notice or "")
    with pytest.raises(Conflict) as refused:
        await bench.control.leases.release(a, lease_id)
    assert refused.value.code == "job_lease"


async def test_slots_that_do_not_come_clean_are_called_occupied_by_name_and_freed_later(bench: Bench) -> None:
    a, b = await bench.caller("a"), await bench.caller("b")
    lease = await bench.control.leases.acquire(a)
    bench.machine.dirty["SIM-local-0"] = [CardProcess(50, "a", "python", 300, state="D")]
    ended = await bench.control.leases.release(a, lease.lease_id)
    assert ended.cleaning and bench.uses() == ["cleaning", "free"]
    status = await bench.control.views.quota_status(a)
    assert status.me.used_by_me == 0 and status.pools[0].used == 1, "being cleaned counts for the pool"
    await bench.advance(70)
    assert bench.uses() == ["occupied", "free"]
    (event,) = bench.events("slot.occupied")
    assert event["severity"] == "critical" and "pid 50 (a, 300 MiB, state D)" in event["reason"]
    card = (await bench.control.views.list_gpus(b)).gpus[0]
    assert card.state == "occupied" and "pid 50" in (card.reason or "")
    assert (await bench.control.views.quota_status(a)).pools[0].used == 0, "occupied counts for nobody"
    bench.machine.dirty.clear()
    await bench.advance(5)
    assert bench.uses() == ["free", "free"]
    assert len(bench.events("slot.cleaned")) == 1


async def test_a_person_clears_a_slot_that_no_host_can_vouch_for(bench: Bench) -> None:
    a, person = await bench.caller("a"), await bench.person()
    lease = await bench.control.leases.acquire(a)
    with pytest.raises(Conflict, match="has not ended"):
        await bench.control.operate(person, "slot.clear", {"lease_id": lease.lease_id}, "looked myself")
    await bench.disconnect()
    await bench.control.leases.release(a, lease.lease_id)
    assert bench.uses() == ["cleaning", "free"]
    done = await bench.control.operate(person, "slot.clear", {"lease_id": lease.lease_id}, "looked myself")
    assert done["freed"] and bench.uses() == ["free", "free"]
    assert tuple(bench.events("slot.cleared")[0][k] for k in ("caller", "reason")) == ("paula", "looked myself")


async def test_a_person_evicts(bench: Bench) -> None:
    a, person = await bench.caller("a"), await bench.person()
    lease = await bench.control.leases.acquire(a)
    with pytest.raises(Forbidden, match="people"):
        await bench.control.operate(
            replace(a, scopes=frozenset({"operate"})), "lease.evict", {"lease_id": lease.lease_id}, "x"
        )
    with pytest.raises(BadRequest, match="reason"):
        await bench.control.operate(person, "lease.evict", {"lease_id": lease.lease_id}, " ")
    done = await bench.control.operate(person, "lease.evict", {"lease_id": lease.lease_id}, "needed for a demo")
    assert (done["state"], done["env"]) == ("revoked", None)
    await bench.settle()
    assert bench.uses() == ["free", "free"]
    with pytest.raises(Conflict, match="revoked"):
        await bench.control.leases.heartbeat(a, lease.lease_id)


# ---- the pause rule


async def test_downtime_counts_as_a_pause_and_hard_ends_do_not_move(bench: Bench) -> None:
    a = await bench.caller("a")
    short = await bench.control.leases.acquire(a, ttl_s=60, hours=10)
    hard = await bench.control.leases.acquire(a, ttl_s=60, hours=0.5)
    hard_end = bench.lease(short.lease_id)["hard_end_at_ms"]
    await bench.restart(down_s=3600, kill=True)
    await bench.settle()
    row = bench.lease(short.lease_id)
    assert (row["state"], row["hard_end_at_ms"]) == ("leased", hard_end)
    assert row["expires_at_ms"] == bench.clock.now_ms() + 60_000
    assert bench.lease(hard.lease_id)["state"] == "expired"
    await bench.advance(62)
    assert bench.lease(short.lease_id)["state"] == "expired"


@pytest.mark.parametrize("how", ["asleep", "clock set forward", "clock set back"])
async def test_a_late_tick_or_a_moved_clock_gives_every_lease_its_ttl_anew(bench: Bench, how: str) -> None:
    """Before it decides: a decision on the old ends would have let all leases run out."""
    a, b = await bench.caller("a"), await bench.caller("b")
    lease = await bench.control.leases.acquire(a, ttl_s=60)
    waiting = await bench.control.leases.acquire(a)
    claim = await bench.queue(b)
    await bench.control.leases.release(a, waiting.lease_id)
    await bench.settle()
    assert bench.lease(claim)["state"] == "leased"
    if how == "asleep":
        await bench.sleep_through(7200)
    else:
        bench.clock.step_wall(7200 if how == "clock set forward" else -7200)
        await bench.advance(1)
    row, granted = bench.lease(lease.lease_id), bench.lease(claim)
    assert row["state"] == "leased"
    assert abs(row["expires_at_ms"] - bench.clock.now_ms() - 60_000) <= 1000
    assert granted["state"] == "leased" and granted["missed_pickups"] == 0
    assert abs(granted["pickup_by_ms"] - bench.clock.now_ms() - 600_000) <= 1000
    assert len(bench.events("clock.jumped")) == 1


async def test_a_pause_is_not_forgotten_when_it_cannot_be_recorded_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await bench.control.leases.acquire(await bench.caller("a"), ttl_s=60)

    async def full(reason: str) -> None:
        raise Unavailable("the disk is full")

    bench.clock.advance(7200)
    with monkeypatch.context() as once:
        once.setattr(bench.loop, "renew_all", full)
        with pytest.raises(Unavailable):
            await bench.loop.turn()
    await bench.advance(1)
    assert bench.lease(lease.lease_id)["state"] == "leased"


async def test_a_tick_that_is_a_little_late_changes_nothing(bench: Bench) -> None:
    a = await bench.caller("a")
    lease = await bench.control.leases.acquire(a, ttl_s=60)
    expires = bench.lease(lease.lease_id)["expires_at_ms"]
    await bench.sleep_through(25)
    assert bench.lease(lease.lease_id)["expires_at_ms"] == expires
    assert bench.events("clock.jumped") == []


# ---- at once


async def test_many_at_once_never_get_the_same_card(make_bench) -> None:
    bench = await make_bench(Machine(cards=4))
    callers = [await bench.caller(f"a{n}") for n in range(12)]
    results = await asyncio.gather(*[bench.control.leases.acquire(c) for c in callers], return_exceptions=True)
    granted = [r for r in results if not isinstance(r, BaseException)]
    assert len(granted) == 4 and all(isinstance(r, Busy) for r in results if isinstance(r, BaseException))
    assert len({s.uuid for lease in granted for s in lease.slots}) == 4
    assert sorted(lease.fence for lease in granted) == [1, 2, 3, 4]


async def test_caps_hold_for_many_at_once(make_bench) -> None:
    bench = await make_bench(
        Machine(cards=8), toml="[pools.default]\ncap = 6\nreserve = 2\nowner_cap = 3\nowner_jobs = 2\n"
    )
    callers = [await bench.caller(f"a{n}", f"o{n % 2}") for n in range(12)]
    results = await asyncio.gather(*[bench.control.leases.acquire(c) for c in callers], return_exceptions=True)
    assert sum(not isinstance(r, BaseException) for r in results) == 4
    by_owner = bench.rows("SELECT owner, count(*) FROM lease WHERE state = 'leased' GROUP BY owner ORDER BY owner")
    assert [tuple(row) for row in by_owner] == [("o0", 2), ("o1", 2)]


async def test_a_grant_that_cannot_be_written_is_not_assumed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    a = await bench.caller("a")
    write = bench.control.context.db.write

    async def full(fn):
        raise Unavailable("full", code="storage_full")

    monkeypatch.setattr(bench.control.context.db, "write", full)
    with pytest.raises(Unavailable):
        await bench.control.leases.acquire(a, gpus=2)
    monkeypatch.setattr(bench.control.context.db, "write", write)
    assert (await bench.control.leases.acquire(a, gpus=2)).state == "leased"


@pytest.mark.parametrize("steps", range(6))
async def test_an_asker_that_goes_away_leaves_no_half_grant(bench: Bench, steps: int) -> None:
    """Cancelled at any moment: either nothing was granted, or the host keeps the cards of what was."""
    a = await bench.caller("a")
    asking = asyncio.create_task(bench.control.leases.acquire(a, request_id="r"))
    for _ in range(steps):
        await asyncio.sleep(0)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await bench.settle()
    living = [row["id"] for row in bench.rows("SELECT id FROM lease WHERE state = 'leased'")]
    assert list(bench.machine.holds) == living
    again = await bench.control.leases.acquire(a, request_id="r")
    assert [again.lease_id] == (living or [again.lease_id])
