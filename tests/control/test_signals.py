"""A signal is recorded before it is sent, is sent once for a request_id, and what nobody knows is said to be unknown."""

from __future__ import annotations

import asyncio
import signal as signals

import pytest
from bench import Bench

from cotenant.server.errors import Conflict, CotenantError, OutcomeUnknown, Unreachable

HUP = int(signals.SIGHUP)


async def sent_and_never_answered(bench: Bench, **options: str) -> tuple[str, asyncio.Task[object]]:
    """(job, the request for a signal that reached the host and waits for its answer)."""
    a = await bench.caller("a")
    job = await bench.submit(a)
    bench.hosts["local"].never_answers.add("signal")
    asking = asyncio.create_task(bench.control.jobs.signal(a, job, "HUP", **options))
    await bench.hosts["local"].kept_waiting.wait()
    return job, asking


async def ended(asking: asyncio.Task[object]) -> None:
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_the_intent_is_on_disk_before_the_host_is_asked(bench: Bench) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    host = bench.hosts["local"]
    seen: list[int] = []
    really = host.signal

    async def signal(attempt_id: str, number: int) -> object:
        seen.append(len(bench.events("job.signalled")) + len(bench.rows("SELECT * FROM request")))
        return await really(attempt_id, number)

    host.signal = signal  # type: ignore[assignment, method-assign]
    await bench.control.jobs.signal(a, job, "HUP", request_id="r")
    assert seen == [2] and bench.machine.signals == [(bench.attempt(job)["id"], HUP)]


@pytest.mark.parametrize("how", ["the asker went away", "the server was killed"])
async def test_a_repeat_of_what_nobody_answered_is_not_sent_again(bench: Bench, how: str) -> None:
    job, asking = await sent_and_never_answered(bench, request_id="r")
    await ended(asking)
    if how == "the server was killed":
        await bench.restart(kill=True)
    bench.hosts["local"].never_answers.clear()
    a = bench.callers["a"]
    for _ in range(2):
        with pytest.raises(OutcomeUnknown, match="may have arrived") as said:
            await bench.control.jobs.signal(a, job, "HUP", request_id="r")
        assert "request_id" in said.value.hint
    assert len(bench.machine.signals) == 1 and len(bench.events("job.signalled")) == 1
    await bench.control.jobs.signal(a, job, "HUP", request_id="another")
    assert len(bench.machine.signals) == 2


@pytest.mark.parametrize("lost", ["lose", "drop"])
@pytest.mark.parametrize("request_id", ["r", None])
async def test_an_unknown_outcome_is_told_and_written_down(bench: Bench, lost: str, request_id: str | None) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    getattr(bench.hosts["local"], lost).add("signal")
    for _ in range(2 if request_id else 1):
        with pytest.raises(OutcomeUnknown):
            await bench.control.jobs.signal(a, job, "HUP", request_id=request_id)
    assert bench.machine.asked["signal"] == 1
    assert [(e["type"], e["severity"], e["new"]) for e in bench.events("job.signalled", "job.signal_failed")] == [
        ("job.signalled", "info", "SIGHUP"),
        ("job.signal_failed", "warning", "unknown"),
    ]


@pytest.mark.parametrize("why", ["the process is gone", "the link broke"])
async def test_what_was_certainly_not_sent_may_be_asked_for_again(bench: Bench, why: str) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)
    host, attempt = bench.hosts["local"], bench.attempt(job)["id"]
    report = bench.machine.attempts[attempt]
    kind: type[CotenantError] = Unreachable
    if why == "the process is gone":
        kind = Conflict
        bench.machine.attempts.pop(attempt)
    else:
        host.away = True  # the link has not noticed yet
    with pytest.raises(kind):
        await bench.control.jobs.signal(a, job, "HUP", request_id="r")
    assert bench.machine.signals == []
    assert [e["new"] for e in bench.events("job.signal_failed")] == ["not sent"]
    bench.machine.attempts[attempt], host.away = report, False
    for _ in range(2):
        assert (await bench.control.jobs.signal(a, job, "HUP", request_id="r")).delivered
    assert bench.machine.signals == [(attempt, HUP)]


async def test_what_cannot_be_recorded_is_not_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    a = await bench.caller("a")
    job = await bench.submit(a)

    async def full(fn: object) -> None:
        raise Conflict("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(bench.control.context.db, "write", full)
        with pytest.raises(Conflict, match="full"):
            await bench.control.jobs.signal(a, job, "HUP", request_id="r")
    assert bench.machine.asked["signal"] == 0


async def test_twins_are_sent_once_and_the_second_waits_for_the_first(bench: Bench) -> None:
    job, asking = await sent_and_never_answered(bench, request_id="r")
    twin = asyncio.create_task(bench.control.jobs.signal(bench.callers["a"], job, "HUP", request_id="r"))
    await bench.control.context.db.write(lambda tx: None)
    assert not twin.done()
    await ended(asking)
    with pytest.raises(OutcomeUnknown):
        await twin
    assert len(bench.machine.signals) == 1
