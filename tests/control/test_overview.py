"""Everything at one look: true, the same for every door, and unknown where it is not known."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.server.clock import iso
from cotenant.server.store.views.overview import STALE_S, _stale
from cotenant.ui.panel import pages


async def test_it_counts_what_there_is(tmp_path: Path) -> None:
    async with Bench(tmp_path, Machine(cards=4)) as bench:
        alice, bob = await bench.caller("alice"), await bench.caller("bob")
        job = await bench.submit(alice, gpus=2, name="trains")
        lease = await bench.control.leases.acquire(bob, gpus=1, purpose="looks around")
        waits = await bench.submit(bob, gpus=3, name="too many")
        claim = await bench.queue(alice, gpus=2)
        held = await bench.submit(alice, gpus=1, name="not yet")
        await bench.control.jobs.hold(alice, held, "later")
        await bench.settle()
        seen = await bench.control.views.overview(bob)
        assert {work.id: work.kind for work in seen.working} == {job: "job", lease.lease_id: "lease"}
        assert {item.id: item.kind for item in seen.waiting} == {waits: "job", claim: "claim", held: "job"}
        assert all(item.blocker is not None and item.blocker.message for item in seen.waiting)
        assert next(item for item in seen.waiting if item.id == held).state == "held"
        assert seen.working_total == 2 and seen.waiting_total == 3
        assert seen.headline == f"{seen.gpus_free} of 4 cards free, 2 at work, 3 waiting"
        (pool,) = seen.pools
        assert (pool.cards, pool.free, pool.running, pool.waiting) == (4, 1, 2, 3)
        assert seen.at == iso(bench.clock.now_ms())
        assert seen.events[0].id > seen.events[-1].id, "newest first"


async def test_a_host_that_does_not_answer_is_said_and_its_cards_are_unknown(tmp_path: Path) -> None:
    async with Bench(tmp_path, Machine(cards=2)) as bench:
        alice = await bench.caller("alice")
        await bench.disconnect()
        await bench.settle()
        seen = await bench.control.views.overview(await bench.person())
        assert seen.gpus_free == 0 and "some unknown" in seen.headline
        assert set(seen.gpus_stale) == {gpu.uuid for gpu in seen.gpus}
        assert [alert.about for alert in seen.alerts] == [f"Host {bench.machine.name}"]
        assert "cable was pulled" in (seen.alerts[0].reason or "")
        html = pages.Pages().fragment(pages.board(seen, base="", form=""))
        assert html.count("stale") >= 2 and "Needs a look" in html and "cable was pulled" in html
        told = await bench.control.views.overview(alice)  # what a link last said is for who operates
        assert "cable was pulled" not in repr(told) and "does not answer" in (told.alerts[0].reason or "")


@pytest.mark.parametrize(
    ("link", "age_s", "simulated", "stale"),
    [("up", 0, False, False), ("up", STALE_S, False, False), ("up", STALE_S + 1, False, True), ("up", 9999, True, False),
     ("up", None, False, True), ("up", None, True, True), ("lost", 0, True, True), ("suspect", 0, False, True), ("", 0, False, True)],
)  # fmt: skip
async def test_what_may_look_otherwise_by_now_is_stale(
    tmp_path: Path, link: str, age_s: int | None, simulated: bool, stale: bool
) -> None:
    async with Bench(tmp_path, Machine(cards=1)) as bench:
        (gpu,) = (await bench.control.views.list_gpus(await bench.caller("alice"))).gpus
        assert _stale(replace(gpu, age_s=age_s, simulated=simulated), link) is stale


async def test_why_anothers_job_failed_is_counted_and_not_told(tmp_path: Path) -> None:
    async with Bench(tmp_path, toml='[pools.default]\nvisibility = "owner"\n') as bench:
        alice, bob = await bench.caller("alice"), await bench.caller("bob")
        person = await bench.person()
        job = await bench.submit(alice, gpus=1, name="fails")
        bench.machine.finish(bench.attempt(job)["id"], code=3)
        await bench.settle()
        for caller, told in ((alice, "code"), (person, "code"), (bob, None)):
            ended = (await bench.control.views.overview(caller)).ended
            assert ended.failed == 1
            assert [(count.failure_class, count.count) for count in ended.failures] == [(told, 1)]
        bench.clock.advance(24 * 3600 + 1)
        assert (await bench.control.views.overview(alice)).ended.failed == 0


async def test_no_reading_is_longer_than_one_look(tmp_path: Path) -> None:
    async with Bench(tmp_path, Machine(cards=1)) as bench:
        alice = await bench.caller("alice")
        for number in range(60):
            await bench.submit(alice, gpus=1, name=f"job {number}")
        seen = await bench.control.views.overview(alice)
        assert len(seen.waiting) == 50 and seen.waiting_total == 59
        assert "And 9 more." in pages.Pages().fragment(pages.board(seen, base="", form=""))
        assert len(str(asdict(seen))) < 100_000


async def test_a_suspended_job_has_no_end_and_purposes_are_shown(tmp_path: Path) -> None:
    async with Bench(tmp_path, Machine(cards=1)) as bench:
        alice = await bench.caller("alice")
        job = await bench.submit(alice, hours=2, name="trains", purpose="the paper's second table")
        waits = await bench.submit(alice, name="later", purpose="only <b>if</b> there is room")
        before = (await bench.control.views.overview(alice)).working[0]
        assert before.until is not None
        await bench.control.jobs.hold(alice, job, "lunch", suspend=True)
        bench.clock.advance(600)
        seen = await bench.control.views.overview(alice)
        (work,), (item,) = seen.working, seen.waiting
        assert (work.state, work.until, work.left_s, work.purpose) == (
            "suspended",
            None,
            None,
            "the paper's second table",
        )
        assert (item.id, item.purpose) == (waits, "only <b>if</b> there is room")
        html = pages.Pages().fragment(pages.board(seen, base="", form=""))
        assert "suspended" in html and "second table" in html and "&lt;b&gt;if" in html and "<b>if" not in html
        bench.machine.stands_ms = 600_000
        await bench.control.jobs.unhold(alice, job)
        after = (await bench.control.views.overview(alice)).working[0]
        assert after.until is not None and 7199 <= (after.left_s or 0) <= 7200
