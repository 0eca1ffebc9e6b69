"""A host keeps the cards of every living direct lease, also when a word was lost or the host lost its memory."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.hostd.protocol import CardProcess
from cotenant.server.errors import Unavailable

STRANGER = CardProcess(50, "eve", "python", 100)


@pytest.mark.parametrize("word", ["lose", "drop"])
@pytest.mark.parametrize("how", ["at once", "from the queue"])
async def test_a_hold_that_was_not_answered_is_said_again_while_the_link_stays_up(
    bench: Bench, word: str, how: str
) -> None:
    a = await bench.caller("a")
    before = await bench.control.leases.acquire(a, gpus=2) if how == "from the queue" else None
    waiting = await bench.queue(a) if before else None
    getattr(bench.hosts["local"], word).add("hold")
    if before is not None:
        await bench.control.leases.release(a, before.lease_id)
        await bench.settle()
    lease_id = waiting or (await bench.control.leases.acquire(a)).lease_id
    assert bench.lease(lease_id)["state"] == "leased"
    await bench.advance(3)
    assert list(bench.machine.holds) == [lease_id]
    asked = bench.machine.asked["hold"]
    await bench.advance(120)
    assert bench.machine.asked["hold"] == asked, "what is kept is not asked for again"
    assert bench.events("lease.unkept") == []


async def test_a_lease_that_ends_before_the_word_is_said_again_is_not_kept(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.hosts["local"].lose.add("hold")
    lease = await bench.control.leases.acquire(a)
    await bench.control.leases.release(a, lease.lease_id)
    await bench.advance(60)
    assert bench.machine.holds == {} and bench.machine.asked["hold"] == 1


async def test_what_a_host_refuses_to_keep_is_recorded_once_and_asked_again(bench: Bench) -> None:
    a = await bench.caller("a")
    bench.hosts["local"].lose.add("hold")
    lease = await bench.control.leases.acquire(a, ttl_s=86_400)
    bench.machine.dirty["SIM-local-0"] = [STRANGER]
    await bench.advance(120)
    (event,) = bench.events("lease.unkept")
    assert (event["severity"], event["new"], event["lease_id"]) == ("warning", "occupied", lease.lease_id)
    assert bench.lease(lease.lease_id)["state"] == "leased", "the holder has it, whoever is there besides"
    bench.machine.dirty.clear()
    await bench.advance(40)
    assert list(bench.machine.holds) == [lease.lease_id] and len(bench.events("lease.unkept")) == 1


@pytest.mark.parametrize("orphans", [False, True])
async def test_leases_below_the_floor_of_a_host_that_lost_its_memory_are_kept_anew(bench: Bench, orphans: bool) -> None:
    a = await bench.caller("a")
    first = await bench.control.leases.acquire(a, ttl_s=86_400)
    second = await bench.control.leases.acquire(a, ttl_s=86_400)
    job = await bench.submit(a, gpus=0)  # the newest fence: both leases are below the floor
    await bench.disconnect()
    if not orphans:
        bench.machine.processes.clear()
    bench.machine.lose_memory()
    await bench.connect()
    await bench.settle()
    if orphans:
        assert bench.machine.holds == {}, "nothing begins while processes of before are there"
        bench.machine.processes.clear()
        await bench.advance(10)  # the host is asked whether they are gone …
        await bench.advance(2)  # … and then about the leases
    assert set(bench.machine.holds) == {first.lease_id, second.lease_id}
    newest = bench.attempt(job)["fence"]
    for lease in (first, second):
        beat = await bench.control.leases.heartbeat(a, lease.lease_id)
        assert beat.fence == bench.machine.holds[lease.lease_id][0] > newest
    assert len({e["new"] for e in bench.events("lease.refenced")}) == 2
    for lease in (first, second):
        await bench.control.leases.release(a, lease.lease_id)
    await bench.settle()
    assert bench.uses() == ["free", "free"] and bench.machine.holds == {}
    third = await bench.control.leases.acquire(a)
    assert third.fence == bench.one("SELECT max(fence) FROM lease") > newest


# ---- what is in memory before it is on disk


async def test_a_host_is_lost_only_once_that_is_on_record(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    await bench.disconnect()

    def full(fn: object) -> None:
        raise Unavailable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(bench.control.context.db, "submit", full)
        await bench.advance(40)
        assert bench.job(job)["state"] == "running"
    await bench.advance(2)
    assert bench.job(job)["state"] == "lost" and len(bench.events("host.lost")) == 1
    (host,) = (await bench.control.views.list_hosts(a)).hosts
    assert host.link == "lost"
    await bench.connect()
    await bench.settle()
    assert bench.job(job)["state"] == "running"


async def test_a_host_that_is_back_before_its_loss_is_written_is_not_lost(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    await bench.disconnect()
    bench.clock.advance(25)
    losing = asyncio.create_task(bench.loop.turn())
    await bench.connect()
    await losing
    await bench.settle()
    await bench.advance(5)
    assert bench.job(job)["state"] == "running"
    (host,) = (await bench.control.views.list_hosts(a)).hosts
    assert host.link == "up"


async def test_a_refusal_that_could_not_be_recorded_is_recorded_the_next_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = bench.control.hosts

    def full(fn: object) -> None:
        raise Unavailable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(bench.control.context.db, "submit", full)
        with pytest.raises(Unavailable):
            await hosts.refused("local", "other_cluster", "it obeys another", {})
    for _ in range(2):
        await hosts.refused("local", "other_cluster", "it obeys another", {})
    assert len(bench.events("host.refused")) == 1


# ---- cards that another host entry has


def _twins() -> tuple[Machine, Machine]:
    first, second = Machine("local", cards=1), Machine("second", cards=1)
    second.__class__ = type("Twin", (Machine,), {"uuids": property(lambda self: ["SIM-local-0"])})
    return first, second


async def test_a_card_of_another_host_entry_is_told_once_not_with_every_telemetry(make_bench) -> None:
    first, second = _twins()
    bench = await make_bench(first, second)
    for _ in range(5):
        bench.telemetry(second)
        await bench.advance(2)
    await bench.disconnect(second)
    await bench.connect(second)
    await bench.settle()
    assert [(e["host"], e["new"]) for e in bench.events("gpu.changed")] == [("second", "refused")]
    second.cards = 0  # somebody puts it right, and later wrong again: that is a change
    bench.telemetry(second)
    second.cards = 1
    bench.telemetry(second)
    await bench.settle()
    assert [e["new"] for e in bench.events("gpu.changed")] == ["refused", "refused"]


async def test_cards_are_written_once_for_a_hello_and_again_only_when_they_are_new(bench: Bench) -> None:
    written: list[str] = []
    sightings = bench.control.hosts._sightings
    greet = sightings.greet

    def counted(tx, name, cards, now, *, all_of_them):
        written.extend(card.uuid for card in cards)
        return greet(tx, name, cards, now, all_of_them=all_of_them)

    await bench.restart(connect=False)
    sightings = bench.control.hosts._sightings
    greet = sightings.greet
    sightings.greet = counted  # type: ignore[method-assign]
    both = ["SIM-local-0", "SIM-local-1"]
    await bench.connect()
    await bench.settle()
    assert written == both
    bench.telemetry()
    await bench.settle()
    assert written == both
    bench.machine.cards = 3
    for _ in range(3):
        bench.telemetry()
        await bench.settle()
    assert written == [*both, "SIM-local-2"]


# ---- the end of the server


async def test_work_that_is_cancelled_before_its_first_step_leaves_no_warning(bench: Bench) -> None:
    context, hosts = bench.control.context, bench.control.hosts

    async def work() -> None:
        raise AssertionError("it must not begin")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tasks = [context.background_task(work())]
        hosts._once("a", work())
        hosts._once("a", work())  # the same is under way: given up at once
        tasks += [task for task in context.background if task not in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del tasks
        gc.collect()
    assert hosts._checking == set()
