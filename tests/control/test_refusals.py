"""A refused ask that comes again at once is answered from memory and counted; one that could be granted never is."""

from __future__ import annotations

import pytest
from bench import Bench

from cotenant.server.control import leases as module
from cotenant.server.control.refusals import REMEMBERED, Refusals
from cotenant.server.errors import Busy, CotenantError, QuotaExceeded
from cotenant.server.model.spec import JobSpec


class Counted:
    """Counts how often the pass is run for an ask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = 0
        real = module.outlook

        def outlook(*args: object) -> object:
            self.passes += 1
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(module, "outlook", outlook)


async def refused(bench: Bench, caller: object, **ask: object) -> CotenantError:
    with pytest.raises((Busy, QuotaExceeded)) as caught:
        await bench.control.leases.acquire(caller, **ask)  # type: ignore[arg-type]
    return caught.value


async def test_the_same_ask_is_looked_at_once_while_nothing_changes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    await bench.control.leases.acquire(a, gpus=2, hours=1)
    counted = Counted(monkeypatch)
    first = await refused(bench, b)
    assert counted.passes == 1 and "asked" not in first.data
    bench.clock.advance(3)
    again = await refused(bench, b)
    assert counted.passes == 1
    assert (again.code, again.message, again.data["asked"]) == (first.code, first.message, 2)
    assert "Asked 2 times" in again.hint and first.hint in again.hint
    assert again.retry_after_s is not None and first.retry_after_s is not None
    assert again.retry_after_s <= first.retry_after_s
    other = await refused(bench, b, gpus=2)
    assert counted.passes == 2 and "asked" not in other.data, "another ask is another ask"
    await refused(bench, await bench.caller("c", "bob"))
    assert counted.passes == 3, "and another caller's too"


async def test_what_became_free_is_granted_at_once(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    lease = await bench.control.leases.acquire(a, gpus=2)
    await refused(bench, b)
    await bench.control.leases.release(a, lease.lease_id)
    await bench.settle()
    assert (await bench.control.leases.acquire(b)).state == "leased"


async def test_a_job_that_will_not_queue_is_told_alike(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    await bench.control.leases.acquire(a, gpus=2)
    for asked in (1, 2, 3):
        with pytest.raises(Busy) as caught:
            await bench.control.jobs.submit(b, JobSpec(command="true", gpus=1), when_full="refuse")
        assert caught.value.data.get("asked", 1) == asked
    queued = await bench.control.jobs.submit(b, JobSpec(command="true", gpus=1))
    assert queued.state == "queued", "who queues is never refused from memory"


async def test_to_queue_is_never_answered_from_memory(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    await bench.control.leases.acquire(a, gpus=2)
    await refused(bench, b)
    assert (await bench.control.leases.acquire(b, when_full="queue")).state == "queued"


def test_a_refusal_is_forgotten_after_its_time_and_the_oldest_first() -> None:
    known = Refusals()
    known.remember("a", "x", Busy("full", retry_after_s=10), 1_000, 1)
    assert known.again("a", "x", 10_999, 1) is not None
    assert known.again("a", "x", 11_000, 1) is None, "its time is over"
    assert known.again("a", "x", 999, 1) is None, "the clock was set back"
    assert known.again("a", "x", 2_000, 1) is not None and known.again("a", "x", 2_000, 2) is None, "something changed"
    known.remember("a", "never", Busy("no time given"), 1_000, 1)
    assert known.again("a", "never", 1_001, 1) is None
    for number in range(REMEMBERED + 1):
        known.remember("b", str(number), Busy("full", retry_after_s=10), 1_000, 1)
    assert known.again("b", "0", 1_001, 1) is None and known.again("b", str(REMEMBERED), 1_001, 1) is not None
