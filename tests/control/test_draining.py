"""What drains finishes what it has and says so everywhere: a draining pool, and use above a cap that was lowered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.server import config
from cotenant.server.errors import Busy
from cotenant.server.model.caller import Caller


async def restarted_with(bench: Bench, toml: str) -> None:
    """A person edits cotenant.toml and starts the server anew."""
    settings = config.parse(toml, data_dir=bench.folder)
    bench.settings = replace(settings, hosts=bench.settings.hosts)
    await bench.restart()


async def marks(bench: Bench, caller: Caller, *lease_ids: str) -> list[bool]:
    """Whether each lease drains; every door has to say the same."""
    views = bench.control.views
    await views.quota_status(caller)
    listed = {lease.lease_id: lease.draining for lease in (await views.list_leases(caller)).leases}
    shown = {work.id: work.draining for work in (await views.overview(caller)).working}
    out = []
    for lease_id in lease_ids:
        beat = await bench.control.leases.heartbeat(caller, lease_id)
        lease = await views.get_lease(caller, lease_id)
        assert beat.draining == lease.draining == listed[lease_id] == shown[lease.job_id or lease_id]
        assert ("draining" in (beat.notice or "")) == (beat.draining and lease.kind == "direct")
        out.append(beat.draining)
    return out


async def test_a_draining_pool_finishes_what_it_has_and_says_so(make_bench) -> None:
    bench = await make_bench(Machine(cards=3))
    a = await bench.caller("a")
    lease = (await bench.control.leases.acquire(a, ttl_s=600, hours=1)).lease_id
    job = await bench.submit(a, "fails", max_attempts=3, retry_on=("code",))
    job_lease = bench.attempt(job)["lease_id"]
    assert await marks(bench, a, lease, job_lease) == [False, False]
    await restarted_with(bench, "[pools.default]\ndraining = true\n")
    a = bench.callers["a"]
    assert await marks(bench, a, lease, job_lease) == [True, True]
    (pool,) = (await bench.control.views.quota_status(a)).pools
    (queue,) = (await bench.control.views.list_queues(a)).queues
    assert pool.draining and queue.draining and pool.you_can_start == 0
    with pytest.raises(Busy) as refused:
        await bench.control.leases.acquire(a)
    assert refused.value.code == "queue_draining"
    waiting = await bench.submit(a, "new", gpus=1)
    assert [b.code for b in (await bench.control.views.get_job(a, waiting)).blockers][0] == "queue_draining"

    bench.machine.finish(bench.attempt(job)["id"], 1)  # it may be tried again, but not now
    await bench.settle()
    await bench.advance(300)
    assert (bench.job(job)["state"], bench.attempt(job)["epoch"]) == ("queued", 1)
    for _ in range(200):  # renewed as ever, and over at its hard end
        if bench.lease(lease)["state"] != "running":
            break
        await bench.control.leases.heartbeat(a, lease)
        await bench.advance(60)
    row = bench.lease(lease)
    assert (row["state"], row["end_reason"]) == ("expired", "its hard end was reached")
    assert row["ended_at_ms"] - row["granted_at_ms"] >= 3_600_000
    await bench.advance(5)
    assert bench.uses() == ["free"] * 3, "nothing new was given meanwhile"

    await restarted_with(bench, "")
    await bench.advance(5)
    assert {bench.job(j)["state"] for j in (job, waiting)} == {"running"}
    assert bench.attempt(job)["epoch"] == 2


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[pools.default]\ncap = 3\n", [False, False, False, False]),
        ("[pools.default]\ncap = 2\n", [False, True, False, False]),
        ("[pools.default]\ncap = 1\n", [True, True, False, False]),
        ("[pools.default]\ncap = 0\n", [True, True, True, False]),
        ("[pools.default]\ncap = 3\nreserve = 2\n", [True, True, False, False]),
        ("[pools.default]\nagent_cap = 1\n", [False, True, False, False]),
        ("[pools.default]\nowner_cap = 1\n", [False, True, False, False]),
        ("[owners.alice]\ncap = 0\n", [True, True, False, False]),
    ],
)
async def test_use_above_a_lowered_cap_drains_the_newest_of_the_lowest_priority(
    make_bench, toml: str, expected: list[bool]
) -> None:
    bench = await make_bench(Machine(cards=3))
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    older = (await bench.control.leases.acquire(a, ttl_s=86_400)).lease_id
    bench.clock.advance(1)
    newer = (await bench.control.leases.acquire(a, ttl_s=86_400)).lease_id
    bench.clock.advance(1)
    high = bench.attempt(await bench.submit(b, "high", priority="high"))["lease_id"]
    place = bench.attempt(await bench.submit(b, "place", gpus=0))["lease_id"]
    await restarted_with(bench, toml)
    a, b = bench.callers["a"], bench.callers["b"]
    assert await marks(bench, a, older, newer) + await marks(bench, b, high, place) == expected
    assert bench.uses() == ["held"] * 3, "nothing is interrupted"
