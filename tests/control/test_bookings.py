"""What a lease takes of its hosts beside the slots: processors, memory, disk, the whole host; and which hosts may have it."""

from __future__ import annotations

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.server.config import HostSettings
from cotenant.server.control import grants
from cotenant.server.deciding.world import Needs
from cotenant.server.errors import QuotaExceeded

BOOKED = {"cpus": (16, 10), "memory_mib": (58_982, 40_000), "disk_mib": (90_000, 60_000)}
CODES = {"cpus": "host_cpu", "memory_mib": "host_memory", "disk_mib": "host_disk"}


async def state(bench: Bench, job: str) -> tuple[str, str | None]:
    """(state of the job, its main blocker's code)."""
    a = await bench.caller("a", "alice")
    shown = await bench.control.views.get_job(a, job)
    return shown.state, shown.blockers[0].code if shown.blockers else None


async def end(bench: Bench, job: str) -> None:
    bench.machine.finish(bench.attempt(job)["id"], 0)
    await bench.settle()


@pytest.mark.parametrize("what", list(BOOKED))
async def test_what_one_job_booked_another_waits_for_and_is_told_the_numbers(bench: Bench, what: str) -> None:
    total, wanted = BOOKED[what]
    a = await bench.caller("a", "alice")
    first = await bench.submit(a, gpus=1, **{what: wanted})
    second = await bench.submit(a, gpus=1, **{what: wanted}, name="second")
    assert await state(bench, first) == ("running", None)
    assert await state(bench, second) == ("queued", CODES[what])
    (blocker,) = (await bench.control.views.get_job(a, second)).blockers
    assert (blocker.numbers["wanted"], blocker.numbers["free"]) == (wanted, total - wanted)
    assert bench.lease(bench.attempt(first)["lease_id"])[what] == wanted
    await end(bench, first)
    assert await state(bench, second) == ("running", None)


async def test_bookings_outlive_a_restart_of_the_server(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    await bench.submit(a, gpus=1, cpus=10, memory_mib=40_000, disk_mib=60_000)
    await bench.restart(kill=True)
    (held,) = bench.control.context.keeper.living.values()
    assert (held.cpus, held.memory_mib, held.disk_mib, held.exclusive) == (10, 40_000, 60_000, False)
    second = await bench.submit(a, gpus=1, cpus=7, name="second")
    assert await state(bench, second) == ("queued", "host_cpu")


@pytest.mark.parametrize("what", list(BOOKED))
async def test_what_no_host_has_in_all_is_refused_at_once(bench: Bench, what: str) -> None:
    a = await bench.caller("a", "alice")
    with pytest.raises(QuotaExceeded) as refused:
        await bench.submit(a, gpus=1, **{what: BOOKED[what][0] + 1})
    assert refused.value.code == "no_such_gpu" and str(BOOKED[what][0]) in str(refused.value)


async def test_the_grant_counts_from_the_rows_whatever_was_decided(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    await bench.submit(a, gpus=1, cpus=10, memory_mib=40_000, disk_mib=60_000)
    context = bench.control.context
    views, slots = context.keeper.hosts, [s for s in context.keeper.slots() if s.kind == "gpu" and s.state == "free"]
    limited = {name: view.__class__(**{**view.__dict__, "max_jobs": 1}) for name, view in views.items()}

    async def lost(needs: Needs, using: dict = views) -> str:
        with pytest.raises(grants.GrantLost) as error:
            await context.db.write(lambda tx: grants.recheck_hosts(tx, using, slots, needs))
        return str(error.value)

    assert "10 of 16 cpus" in await lost(Needs(cpus=7))
    assert "40000 of 58982 memory_mib" in await lost(Needs(memory_mib=20_000))
    assert "60000 of 90000 disk_mib" in await lost(Needs(disk_mib=40_000))
    assert "one lease alone" in await lost(Needs(exclusive_host=True))
    assert "1 of 1 leases" in await lost(Needs(), limited)
    assert "not known" in await lost(Needs(), {})
    fits = Needs(cpus=6, memory_mib=18_982, disk_mib=30_000)
    assert await context.db.write(lambda tx: grants.recheck_hosts(tx, views, slots, fits)) == {
        "cpus": 6,
        "memory_mib": 18_982,
        "disk_mib": 30_000,
    }


async def test_an_exclusive_job_waits_until_its_host_is_empty_and_keeps_others_out(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    first = await bench.submit(a, gpus=1)
    alone = await bench.submit(a, gpus=1, exclusive_host=True, name="alone")
    assert await state(bench, alone) == ("queued", "busy")
    await end(bench, first)
    assert await state(bench, alone) == ("running", None)
    assert bench.lease(bench.attempt(alone)["lease_id"])["exclusive"] == 1
    other = await bench.submit(a, gpus=1, name="other")
    assert await state(bench, other) == ("queued", "busy")
    await bench.restart(kill=True)
    assert await state(bench, other) == ("queued", "busy")
    await end(bench, alone)
    assert await state(bench, other) == ("running", None)


async def test_an_exclusive_job_goes_to_the_empty_host(make_bench) -> None:
    bench = await make_bench(Machine("local", cards=2), Machine("second", cards=2))
    a = await bench.caller("a", "alice")
    first = await bench.submit(a, gpus=1)
    alone = await bench.submit(a, gpus=1, exclusive_host=True, name="alone")
    assert {bench.attempt(first)["host"], bench.attempt(alone)["host"]} == {"local", "second"}


@pytest.mark.parametrize(("taken", "given"), [(0, 4), (2, 2), (3, 1)])
async def test_a_job_that_takes_any_number_gets_the_most_that_is_free(make_bench, taken: int, given: int) -> None:
    bench = await make_bench(Machine("local", cards=4))
    a = await bench.caller("a", "alice")
    if taken:
        await bench.submit(a, gpus=taken)
    job = await bench.submit(a, gpus={"min": 1, "max": 8}, name="elastic")
    shown = await bench.control.views.get_job(a, job)
    assert (shown.state, shown.gpus, len(shown.slots), len(shown.attempts[0].slots)) == ("running", given, given, given)
    assert len(bench.machine.specs[bench.attempt(job)["id"]].slots) == given
    assert bench.lease(bench.attempt(job)["lease_id"])["gpus"] == given


# ---- which hosts


def labelled(**hosts: dict[str, str]) -> dict[str, HostSettings]:
    return {name: HostSettings(name=name, pool="default", labels=labels) for name, labels in hosts.items()}


async def test_a_job_goes_only_where_the_labels_are_that_it_needs(make_bench) -> None:
    hosts = labelled(local={"disk": "hdd"}, second={"disk": "nvme", "room": "2"})
    bench = await make_bench(Machine("local", cards=1), Machine("second", cards=1), hosts=hosts)
    a = await bench.caller("a", "alice")
    jobs = [await bench.submit(a, gpus=1, host_labels={"disk": "nvme"}, name=f"job {n}") for n in range(2)]
    assert bench.attempt(jobs[0])["host"] == "second"
    assert await state(bench, jobs[1]) == ("queued", "busy")
    with pytest.raises(QuotaExceeded) as refused:
        await bench.submit(a, gpus=1, host_labels={"disk": "tape"})
    assert refused.value.code == "no_such_gpu"


@pytest.mark.parametrize(
    ("wish", "fits", "where"),
    [
        ({"cuda": "12.4"}, True, "second"),
        ({"cuda": "12.8"}, False, None),
        ({"driver": "550.54"}, True, "second"),
        ({"driver": "551"}, False, None),
    ],
)
async def test_a_job_goes_only_where_the_driver_is_new_enough(make_bench, wish, fits, where) -> None:
    old = Machine("local", cards=1, driver="470.82.01", cuda="11.4")
    new = Machine("second", cards=1, driver="550.54.14", cuda="12.4")
    bench = await make_bench(old, new)
    a = await bench.caller("a", "alice")
    if fits:
        job = await bench.submit(a, gpus=1, **wish)
        assert bench.attempt(job)["host"] == where
    else:
        with pytest.raises(QuotaExceeded):
            await bench.submit(a, gpus=1, **wish)


async def test_what_is_preferred_is_read_from_the_job(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    await bench.submit(a, gpus=2)
    waiting = await bench.submit(a, gpus=1, prefer=("h2", "disk=nvme", "h1", "room=2"), name="picky")
    needs = bench.control.context.keeper.waiting.get(waiting).needs
    assert needs.prefer_hosts == ("h2", "h1")
    assert needs.prefer_labels == (("disk", "nvme"), ("room", "2"))
