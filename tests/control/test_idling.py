"""Idle leases end to end: what is seen of a card's work, the notice, taking back; and preemptions that were for nothing."""

from __future__ import annotations

from typing import Any

from bench import Bench
from fakehost import Machine
from test_preempting import POOL, train

IDLE = "[pools.default]\nidle_s = 600\nidle_grace_s = 300\n"


async def pass_time(bench: Bench, seconds: int, **work: Any) -> None:
    """Time passes while the machine tells its cards every now and then, busy ones by `util`."""
    for _ in range(seconds // 20):
        await bench.advance(20)
        bench.telemetry()
        await bench.settle()


async def beat(bench: Bench, caller: Any, lease_id: str, seconds: int) -> None:
    """The holder sends heartbeats, which are no work."""
    for _ in range(seconds // 300):
        await pass_time(bench, 300)
        if bench.lease(lease_id)["state"] == "running":
            await bench.control.leases.heartbeat(caller, lease_id)


async def held(bench: Bench) -> tuple[Any, str]:
    a = await bench.caller("a")
    lease = (await bench.control.leases.acquire(a, ttl_s=900, hours=5)).lease_id
    await bench.control.leases.heartbeat(a, lease)
    bench.telemetry()
    return a, lease


async def test_an_idle_direct_lease_is_told_then_taken_back_for_who_waits(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=IDLE)
    a, lease = await held(bench)
    await beat(bench, a, lease, 1200)
    assert bench.lease(lease)["state"] == "running" and not bench.events("lease.idle"), "nobody waits for it"
    job = await bench.submit(await bench.caller("b"))
    await bench.advance(1)
    (told,) = bench.events("lease.idle")
    assert job in told["args"]
    notice = (await bench.control.leases.heartbeat(a, lease)).notice
    assert notice is not None and "no sign of work" in notice and "taken back from" in notice
    await beat(bench, a, lease, 600)
    row = bench.lease(lease)
    assert row["state"] == "revoked" and row["end_reason"].startswith("idle: ") and bench.job(job)["state"] == "running"


async def test_work_on_the_card_puts_it_off(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=IDLE)
    a, lease = await held(bench)
    await bench.submit(await bench.caller("b"))
    await pass_time(bench, 620)
    assert len(bench.events("lease.idle")) == 1
    bench.machine.util[bench.machine.uuids[0]] = 40
    bench.telemetry()
    await bench.settle()
    assert (await bench.control.leases.heartbeat(a, lease)).notice is None
    await pass_time(bench, 580)
    assert bench.lease(lease)["state"] == "running" and len(bench.events("lease.idle")) == 1


async def test_a_card_that_does_not_tell_its_use_makes_nobody_idle(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=IDLE)
    bench.machine.util[bench.machine.uuids[0]] = None
    a, lease = await held(bench)
    await bench.submit(await bench.caller("b"))
    await beat(bench, a, lease, 1800)
    assert bench.lease(lease)["state"] == "running" and not bench.events("lease.idle")


async def test_an_idle_job_is_told_and_left_unless_its_pool_takes_jobs_back(make_bench) -> None:
    for toml, state in ((IDLE, "running"), (IDLE + "idle_jobs = true\n", "cancelled")):
        bench = await make_bench(Machine(cards=1), toml=toml)
        job = await bench.submit(await bench.caller("a"))
        bench.telemetry()
        await bench.submit(await bench.caller("b"))
        await pass_time(bench, 620)
        assert "no sign of work" in (await bench.control.views.get_job(bench.callers["a"], job)).idle_notice
        await pass_time(bench, 340)
        assert bench.job(job)["state"] == state


async def test_log_lines_are_work(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=IDLE)
    job = await bench.submit(await bench.caller("a"))
    bench.telemetry()
    await bench.submit(await bench.caller("b"))
    for _ in range(5):
        await pass_time(bench, 300)
        await bench.tell(bench.attempt(job)["id"], log_ago_ms=1000)
    assert not bench.events("lease.idle")


async def test_three_preemptions_for_nothing_cost_the_owner_the_right(make_bench) -> None:
    bench = await make_bench(Machine(cards=1), toml=POOL)
    victim, _ = await train(bench)
    b = await bench.caller("b")
    for n in range(3):
        asker = await bench.submit(b, f"sleeps{n}", priority="high")
        await bench.tell(bench.attempt(victim)["id"], path=f"/ck/{n}.npz", saved=True)
        assert bench.job(asker)["state"] == "running", n
        bench.telemetry()
        await pass_time(bench, 640)
        assert len(bench.events("preemption.wasted")) == n + 1
        bench.machine.finish(bench.attempt(asker)["id"])
        await bench.settle()
        await pass_time(bench, 1800)
    asker = await bench.submit(b, "again", priority="high")
    await bench.advance(5)
    assert bench.job(asker)["state"] == "queued" and len(bench.machine.notices) == 3
    await bench.submit(await bench.caller("c"), "another's", priority="high")
    await bench.advance(5)
    assert len(bench.machine.notices) == 3, "the first of the pool has no right, and nobody passes it"
    await bench.sleep_through(24 * 3600)
    await bench.advance(5)
    assert len(bench.machine.notices) == 4
