"""Whatever a server asks its store in a busy life, it never walks a table that only grows."""

from __future__ import annotations

import contextlib
import re
import sqlite3

import pytest
from bench import Bench

from cotenant.server.errors import CotenantError
from cotenant.server.services import DATABASE
from cotenant.server.store import requests
from cotenant.server.store.db import _in_thread

GROWING = "job|lease|lease_slot|attempt|event|request|confirmation|offer|wait|token"
#: A table by its name or one of its usual short names, walked with nothing but (perhaps) an order.
SCAN = re.compile(rf"^SCAN ({GROWING}|[jlesta])(?: USING (?:COVERING )?INDEX (\w+))?$")
#: Partial indexes: they hold what lives, or what a page of the newest is taken from, and may be walked.
FEW = {
    "attempt_living",
    "attempt_to_suspend",
    "job_living",
    "lease_living",
    "slots_in_use",
    "one_live_attempt_per_job",
    "one_lease_per_slot",
    "event_notable",
    "event_critical",
}
#: What may walk a table all the same.
MAY = {
    "a page of all, newest first, ends when it is full": r"WHERE (1|j\.array_index IS NULL)( AND \+j\.state IN \([^)]*\))? ORDER BY (j\.|e\.)?id DESC LIMIT",
    "the exact number of all is what was asked for": r"^SELECT count\(\*\) FROM job j INDEXED BY job_listed WHERE j\.array_index IS NULL$",
    "every token is kept in memory": r"FROM token t JOIN caller c ON c\.name = t\.caller ORDER BY t\.created_at_ms",
}  # fmt: skip


@pytest.fixture
async def said(bench: Bench) -> list[str]:
    """All SQL that the server's connections carry out, with its values."""
    found: list[str] = []
    db = bench.control.context.db
    db._peeker.set_trace_callback(found.append)
    for connection in (db._reader, db._writer):
        await _in_thread(connection, lambda c: c.set_trace_callback(found.append))
    return found


def plans(bench: Bench, said: list[str]) -> list[tuple[str, str]]:
    """(statement, line of its plan) for each kind of statement."""
    kinds: dict[str, str] = {}
    for sql in said:
        if re.match(r"\s*(SELECT|UPDATE|DELETE|INSERT)", sql):
            kinds.setdefault(re.sub(r"'[^']*'|\b\d+\b", "?", sql), sql)
    with contextlib.closing(sqlite3.connect(bench.folder / DATABASE)) as c:
        return [(sql, row[3]) for sql in kinds.values() for row in c.execute(f"EXPLAIN QUERY PLAN {sql}")]


def walks(sql: str, line: str) -> bool:
    found = SCAN.match(line)
    if found is None or found[2] in FEW:
        return False
    return not any(re.search(may, " ".join(sql.split())) for may in MAY.values())


async def a_busy_life(bench: Bench) -> None:
    a, b, person = await bench.caller("a", "alice"), await bench.caller("b", "bob"), await bench.person()
    control = bench.control
    lease = await control.leases.acquire(a, request_id="l1")
    await control.leases.heartbeat(a, lease.lease_id)
    await control.leases.hand_over(a, lease.lease_id, "b", request_id="h1")
    await control.leases.hand_over(b, lease.lease_id, "b")
    runs, ends = await bench.submit(a, "runs", gpus=0, request_id="s1"), await bench.submit(a, "ends", gpus=0)
    waits = await bench.submit(a, "waits", gpus=2)
    claim = await bench.queue(b, gpus=2)
    await control.jobs.signal(a, runs, "HUP", request_id="g1")
    await control.jobs.hold(a, waits, "later")
    await control.jobs.retry(a, waits, request_id="t1")
    for _ in range(2):
        token, _ = await control.confirmations.mint(a, "cancel_job", waits)
    bench.machine.finish(bench.attempt(ends)["id"], 1)
    await bench.settle()
    again = (await control.jobs.retry(a, ends)).job_id
    await control.jobs.cancel(a, waits, confirm_token=token, request_id="c1")
    bench.hosts["local"].lose.add("hold")
    await bench.advance(5)
    await control.leases.release(b, claim, request_id="r1")
    bench.machine.card_states["SIM-local-1"] = ("occupied", "x")
    with contextlib.suppress(CotenantError):
        await control.leases.acquire(a, gpus=1, request_id="l2")  # refused by the host: its request is forgotten
    bench.machine.card_states.clear()
    bench.telemetry()
    await bench.disconnect()
    await bench.advance(40)
    await control.operate(person, "job.abandon", {"job_id": runs}, "gone")
    await bench.connect()
    await bench.settle()
    await control.operate(person, "lease.evict", {"lease_id": lease.lease_id}, "needed")
    await control.operate(person, "job.evict", {"job_id": again}, "needed") if bench.job(again)["ended_at_ms"] is None else None  # fmt: skip
    await control.tokens.revoke(person, "b", "left")
    await control.context.db.write(lambda tx: requests.forget_old(tx, bench.clock.now_ms()))
    control.context.keeper.distrust()
    await bench.loop.renew_all("a test")
    await bench.advance(700)
    await control.jobs.wait(a, runs, 0)
    await control.leases.wait(a, lease.lease_id, 0)
    views = control.views
    for state in (None, "active", "waiting", "running", "final", "all", "queued", "lost", "succeeded", "failed"):
        for filters in (
            {},
            {"holder": "a"},
            {"owner": "alice"},
            {"since": "2020-01-01T00:00:00Z"},
            {"cursor": "job_zz"},
        ):
            await views.list_jobs(a, state=state, **filters)
    for state in (None, "active", "all", "queued", "running", "released", "revoked"):
        for filters in ({}, {"holder": "a"}, {"owner": "alice"}, {"cursor": "lse_zz"}):
            await views.list_leases(a, state=state, **filters)
    for since in (None, "3", "2020-01-01T00:00:00Z"):
        for filters in (
            {},
            {"severity": "info"},
            {"severity": "warning"},
            {"severity": "critical"},
            {"job_id": runs},
            {"run_id": "run_x"},
        ):
            for types in (None, ["job.failed"], ["job.*", "lease.granted"]):
                await views.list_events(a, since=since, types=types, **filters)
    await views.get_job(a, runs)
    await views.get_lease(a, lease.lease_id)
    await views.quota_status(a)
    await views.list_gpus(a)
    await views.list_hosts(a)
    await views.list_queues(a)
    await views.list_agents(a)
    await views.overview(a)


async def test_nothing_that_a_busy_life_asks_walks_a_table_that_only_grows(bench: Bench, said: list[str]) -> None:
    await a_busy_life(bench)
    found = plans(bench, said)
    assert len({sql for sql, _ in found}) > 120
    bad = [f"{line}: {' '.join(sql.split())}" for sql, line in found if walks(sql, line)]
    assert not bad, "\n".join(bad)


async def test_the_look_at_plans_finds_a_walk(bench: Bench) -> None:
    """A test that cannot fail would be none."""
    for sql in ("SELECT * FROM job WHERE name = 'x'", "DELETE FROM request WHERE verb = 'x'", "SELECT * FROM lease l WHERE state = 'queued'"):  # fmt: skip
        assert any(walks(sql, line) for _, line in plans(bench, [sql])), sql
