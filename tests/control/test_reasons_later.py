"""Why everybody waits is worked out apart from who starts: later where it is dear, and at once for whoever asks."""

from __future__ import annotations

from typing import Any

import pytest
from bench import Bench

from cotenant.server import loop as loops


@pytest.fixture
def dear(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> list[int]:
    """Every working out of reasons takes a second of the bench's clock; how often it was done."""
    real = loops.decide
    times: list[int] = []

    def slow(*args: Any) -> Any:
        times.append(bench.clock.now_ms())
        bench.clock.advance(1)
        return real(*args)

    monkeypatch.setattr(loops, "decide", slow)
    return times


async def crowd(bench: Bench) -> list[str]:
    """Two that run and six that wait, each of its own kind."""
    a = await bench.caller("a", "alice")
    return [await bench.submit(a, f"job{n}", gpus=1, hours=n + 1) for n in range(8)]


async def test_starts_do_not_wait_for_reasons_and_a_reader_gets_them(bench: Bench, dear: list[int]) -> None:
    jobs = await crowd(bench)
    worked_out = len(dear)
    bench.machine.finish(bench.attempt(jobs[0])["id"], 0)
    await bench.settle()
    assert bench.job(jobs[2])["state"] == "running"
    assert len(dear) == worked_out, "it was done a moment ago, and takes long"
    a = await bench.caller("reader", "alice")
    shown = await bench.control.views.get_job(a, jobs[-1])
    assert [blocker.code for blocker in shown.blockers] == ["busy"]
    assert len(dear) == worked_out + 1, "now somebody asked"
    await bench.control.views.get_job(a, jobs[-2])
    assert len(dear) == worked_out + 1, "nothing has changed since"


async def test_they_are_worked_out_by_themselves_a_fifth_of_the_time(bench: Bench, dear: list[int]) -> None:
    jobs = await crowd(bench)
    before = len(dear)
    for number in range(4):
        bench.machine.finish(bench.attempt(jobs[number])["id"], 0)
        await bench.settle()
    assert len(dear) == before
    assert bench.control.context.keeper.waiting.explain is not None
    await bench.advance(30)
    assert bench.control.context.keeper.waiting.explain is None, "nobody had to ask"
    assert before < len(dear) <= before + 7
