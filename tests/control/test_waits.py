"""Waits that are followed as tasks: how long an id is known, and how many a caller may have."""

from __future__ import annotations

import pytest
from bench import Bench

from cotenant.server.control.waits import KEPT_MS
from cotenant.server.store import waits


async def test_an_id_is_known_for_a_time_after_the_end_and_then_forgotten(bench: Bench) -> None:
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "alice")
    job = await bench.submit(a, gpus=0)
    wait = await bench.control.waits.begin(a, job, "0", 30)
    assert wait is not None and wait.state == "working" and wait.expires_at_ms == wait.until_ms + KEPT_MS
    assert wait.until_ms - wait.created_at_ms == 30_000 and bench.control.waits.standing(wait) == "running"
    assert bench.control.waits.find(b, wait.id) is None, "not even for another agent of the same owner"
    assert not bench.control.waits.over(wait)
    await bench.advance(31)
    assert bench.control.waits.over(wait)
    ended = await bench.control.waits.complete(a, wait, '{"first":1}')
    assert (await bench.control.waits.complete(a, wait, '{"second":2}')).result == ended.result == '{"first":1}'
    assert (await bench.control.waits.cancel(a, wait)).state == "completed"
    assert bench.job(job)["state"] == "running"
    assert wait.id not in bench.dump(), "only its hash is kept"
    await bench.advance(KEPT_MS / 1000)
    assert bench.control.waits.find(a, wait.id) is None
    await bench.control.context.db.write(lambda tx: waits.forget_old(tx, bench.control.context.now() + 1))
    assert bench.rows("SELECT * FROM wait") == []


async def test_a_caller_has_so_many_and_not_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "OPEN_MAX", 2)
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "alice")
    job = await bench.submit(a, gpus=0)
    first = await bench.control.waits.begin(a, job, "0", 30)
    assert first is not None and await bench.control.waits.begin(a, job, "0", 30) is not None
    assert await bench.control.waits.begin(a, job, "0", 30) is None
    assert await bench.control.waits.begin(b, job, "0", 30) is not None
    await bench.control.waits.cancel(a, first)
    assert await bench.control.waits.begin(a, job, "0", 30) is not None
    await bench.advance(31)
    assert await bench.control.waits.begin(a, job, "0", 30) is not None, "those whose time is over do not count"
