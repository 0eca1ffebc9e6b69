"""A pass runs inside the group that lets something start: one COMMIT for both, and no belief in what never was."""

from __future__ import annotations

import asyncio

import pytest
from bench import Bench

from cotenant.server import loop as loops
from cotenant.server.deciding.engine import Engine
from cotenant.server.errors import Unavailable
from cotenant.server.model.spec import JobSpec


def groups(bench: Bench) -> int:
    return bench.control.context.db.groups


async def next_group(bench: Bench, before: int) -> None:
    for _ in range(100_000):
        if groups(bench) > before:
            return
        await asyncio.sleep(0)
    raise AssertionError("nothing was committed")


async def test_a_job_that_can_start_at_once_is_taken_in_and_placed_by_one_commit(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    before = groups(bench)
    bench.cut.add("local")  # nothing comes back, so that nothing else is written
    bench.hosts["local"].away = True
    job = await bench.submit(a, gpus=1)
    assert bench.job(job)["state"] == "deploying"
    assert groups(bench) == before + 1


async def test_an_end_and_the_start_that_follows_share_one_commit(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    first = [await bench.submit(a, f"first {n}", gpus=1) for n in range(2)]
    last = await bench.submit(a, "last", gpus=1)
    assert bench.job(last)["state"] == "queued"
    bench.reports_held = True
    bench.machine.finish(bench.attempt(first[0])["id"])
    before = groups(bench)
    ended = asyncio.create_task(bench.deliver(bench.machine))
    await next_group(bench, before)
    assert bench.job(first[0])["state"] == "succeeded"
    assert bench.job(last)["state"] == "deploying", "as of the same COMMIT"
    await ended
    await bench.settle()
    assert bench.job(last)["state"] == "running"
    bench.check()


async def test_nobody_is_told_before_the_commit(bench: Bench) -> None:
    """Whoever was told earlier would read what is not there yet, and hear of the rest a second later."""
    a = await bench.caller("a", "alice")
    for number in range(2):
        await bench.submit(a, f"first {number}", gpus=1)
    db, told, early = bench.control.context.db, set[str](), list[set[str]]()
    unsubscribe = bench.control.changes.subscribe(told.update)
    commit = db._writer.commit

    async def committing() -> None:
        early.append(set(told))
        await commit()

    db._writer.commit = committing  # type: ignore[method-assign]
    try:
        job = (await bench.control.jobs.submit(a, bench_spec())).job_id
    finally:
        db._writer.commit = commit  # type: ignore[method-assign]
        unsubscribe()
    assert early[0] == set() and {f"cotenant://jobs/{job}", "cotenant://queues/default"} <= told
    assert (await bench.control.jobs.get(a, job)).blockers[0].code == "busy", "the pass saw it all the same"


async def test_what_could_not_be_committed_is_not_believed(bench: Bench) -> None:
    """The pass saw the job and gave it a card; then the disk was full."""
    a = await bench.caller("a", "alice")
    context = bench.control.context
    writer = context.db._writer
    pages = (await (await writer.execute("PRAGMA page_count")).fetchone())[0]
    await writer.execute(f"PRAGMA max_page_count = {pages}")
    refused = 0
    for number in range(40):  # some fit into the pages that are there
        try:
            await bench.submit(a, "big " + "x" * 3000, gpus=1, name=f"n{number}")
        except Unavailable as error:
            assert error.code == "storage_full"
            refused += 1
    assert refused
    await writer.execute(f"PRAGMA max_page_count = {pages + 1000}")
    await bench.settle()
    keeper = context.keeper
    keeper.refresh(bench.clock.now_ms())
    assert sorted(keeper.living) == [
        r["id"] for r in bench.rows("SELECT id FROM lease WHERE state IN ('leased', 'running') ORDER BY id")
    ]
    assert {ask.id for ask in keeper.world().asks} == {
        r["id"] for r in bench.rows("SELECT id FROM job WHERE state = 'queued'")
    }
    bench.check()
    for row in bench.rows("SELECT id FROM attempt WHERE state <> 'ended'"):
        bench.machine.finish(row["id"])
    await bench.settle()
    bench.check()


@pytest.mark.parametrize("what", ["who starts", "why the others wait"])
async def test_a_pass_that_fails_takes_nobodys_write_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    a = await bench.caller("a", "alice")

    def broken(*args: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        if what == "who starts":
            patch.setattr(Engine, "turn", broken)
        else:
            patch.setattr(loops, "decide", broken)
        job = (await bench.control.jobs.submit(a, bench_spec())).job_id
        assert bench.job(job)["state"] in ("queued", "deploying")
    assert any("planted" in line for line in bench.mistakes.found)
    bench.mistakes.found.clear()
    await bench.settle()
    assert bench.job(job)["state"] == "running", "the next turn decides from the database"


async def test_rows_read_as_they_were_while_the_commit_was_under_way_are_read_again(bench: Bench) -> None:
    """A full reading from the committed side must not outlive a COMMIT that it could not see."""
    a = await bench.caller("a", "alice")
    context = bench.control.context
    keeper, db = context.keeper, context.db
    commit = db._writer.commit

    async def meanwhile() -> None:
        keeper.distrust()
        keeper.refresh(bench.clock.now_ms())
        await commit()

    db._writer.commit = meanwhile  # type: ignore[method-assign]
    try:
        jobs = [await bench.submit(a, f"train {n}", gpus=1) for n in range(4)]
    finally:
        db._writer.commit = commit  # type: ignore[method-assign]
    await bench.settle()
    keeper.refresh(bench.clock.now_ms())
    assert len(keeper.living) == 2
    assert {ask.id for ask in keeper.world().asks} == {j for j in jobs if bench.job(j)["state"] == "queued"}
    bench.check()


def bench_spec() -> JobSpec:
    return JobSpec(command="train", gpus=1)
