"""A full disk refuses and changes nothing; a failed COMMIT ends the process; kill -9 loses nothing that was acknowledged."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from cotenant.server import doctor
from cotenant.server.errors import Unavailable
from cotenant.server.services import DATABASE
from cotenant.server.store.db import Database, Tx

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".pkg"), str(ROOT / "tests" / "control")])}
KILL_ROUNDS = int(os.environ.get("COTENANT_KILL_ROUNDS", "5"))


def put(tx: Tx, key: str, size: int = 10) -> str:
    tx.execute("INSERT INTO meta (key, value) VALUES (?, ?)", (key, "x" * size))
    return key


def keys(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as other:
        return {row[0] for row in other.execute("SELECT key FROM meta")}


async def test_a_full_disk_refuses_all_that_shared_the_commit_and_changes_nothing(tmp_path: Path) -> None:
    """SQLite's own limit on pages gives the very error that a full disk gives."""
    db = await Database.open(tmp_path / DATABASE)
    await db.write(partial(put, key="before"))
    pages = await db.write(lambda tx: tx.execute("PRAGMA page_count").fetchone()[0])
    await db._writer.execute(f"PRAGMA max_page_count = {pages + 2}")
    told: list[set[str]] = []
    db.on_commit(lambda changed, dirty: told.append(changed))
    results = await asyncio.gather(
        db.submit(partial(put, key="small")), db.submit(partial(put, key="large", size=100_000)), return_exceptions=True
    )
    assert [getattr(r, "code", None) for r in results] == ["storage_full", "storage_full"]
    assert all(isinstance(r, Unavailable) and r.retry_after_s for r in results)
    assert keys(db.path) == {"before"} and told == []
    await db._writer.execute(f"PRAGMA max_page_count = {pages + 1000}")
    assert await db.write(partial(put, key="after", size=100_000)) == "after"
    assert keys(db.path) == {"before", "after"}
    await db.close()


_FAILING = """
import asyncio, os, resource, signal, sys
from pathlib import Path
from cotenant.server.store.db import Database

def put(tx):
    tx.execute("INSERT INTO meta VALUES ('lost', ?)", ("x" * 300_000,))

async def main():
    db = await Database.open(Path(sys.argv[1]))
    await db.write(lambda tx: tx.execute("INSERT INTO meta VALUES ('kept', '')"))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = os.path.getsize(sys.argv[1] + "-wal")
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50_000, size + 50_000))  # a write beyond fails with EFBIG: an I/O error
    await db.write(put)
    print("answered", flush=True)

asyncio.run(main())
"""


def test_an_io_error_in_a_commit_ends_the_process_before_anybody_is_answered(tmp_path: Path) -> None:
    path = tmp_path / DATABASE
    done = subprocess.run(
        [sys.executable, "-c", _FAILING, str(path)], capture_output=True, text=True, env=ENV, timeout=60, check=False
    )
    assert done.returncode == 74, done.stderr
    assert done.stdout == ""
    assert "failed to commit" in done.stderr
    assert keys(path) == {"kept"}


_WRITER = """
import asyncio, sys
from pathlib import Path
from bench import Bench
from cotenant.server.errors import CotenantError
from cotenant.server.model.spec import JobSpec

def ack(*words):
    print(*words, flush=True)

async def agent(bench, caller, number):
    control = bench.control
    while True:
        try:
            lease = await control.leases.acquire(caller, when_full="queue" if number % 2 else "refuse")
            ack("lease", lease.lease_id, lease.state, lease.fence)
            if lease.state == "leased":
                await control.leases.heartbeat(caller, lease.lease_id)
                ack("lease", lease.lease_id, "running", lease.fence)
            ended = await control.leases.release(caller, lease.lease_id)
            ack("lease", lease.lease_id, ended.state, ended.fence)
            job = await control.jobs.submit(caller, JobSpec(command="train", gpus=0, labels={"n": str(number)}), request_id=lease.lease_id)
            ack("job", job.job_id, "any", None)
            cancelled = await control.jobs.cancel(caller, job.job_id, confirmed=True)
            ack("job", job.job_id, cancelled.state, None)
        except CotenantError:
            await asyncio.sleep(0)

async def main():
    bench = Bench(Path(sys.argv[1]), seed=int(sys.argv[2]))
    await bench.open()
    callers = [await bench.caller(f"agent{n}", f"owner{n % 3}") for n in range(6)]
    agents = [asyncio.create_task(agent(bench, c, n)) for n, c in enumerate(callers)]
    ack("ready")
    while True:
        await bench.settle()
        await asyncio.sleep(0.001)
        for machine in bench.machines:
            for attempt in list(machine.processes):
                machine.finish(attempt)

asyncio.run(main())
"""
#: An acknowledged state may since have been left for one of these.
_LATER = {
    "queued": {"queued", "leased", "running", "withdrawn", "released"},
    "leased": {"leased", "running", "released"},
    "running": {"running", "released"},
    "stopping": {"stopping", "cancelled", "succeeded"},
}


@pytest.mark.parametrize("seed", range(KILL_ROUNDS))
async def test_kill_9_at_any_moment_loses_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    from bench import Bench, Machine

    folder, chance = tmp_path / "data", random.Random(seed)
    writer = subprocess.Popen(  # noqa: ASYNC220 (nothing else runs on this loop)
        [sys.executable, "-c", _WRITER, str(folder), str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    acknowledged: list[list[str]] = []
    assert writer.stdout is not None and writer.stderr is not None
    try:
        assert writer.stdout.readline() == "ready\n", writer.stderr.read()
        deadline = time.monotonic() + chance.uniform(0.05, 0.5)
        while time.monotonic() < deadline or len(acknowledged) <= 3:
            acknowledged.append(writer.stdout.readline().split())
    finally:
        writer.kill()
    acknowledged += [line.split() for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    writer.wait()
    writer.stderr.close()
    writer.stdout.close()

    assert [f for f in doctor.examine(folder) if not f.ok] == [], f"seed {seed}"
    with closing(sqlite3.connect(folder / DATABASE)) as c:
        states = dict(c.execute("SELECT id, state FROM lease UNION ALL SELECT id, state FROM job"))
        fences = dict(c.execute("SELECT id, fence FROM lease"))
    assert len(acknowledged) > 3
    for kind, object_id, state, fence in acknowledged:
        now = states.get(object_id)
        assert now is not None, f"{kind} {object_id} was acknowledged and is gone (seed {seed})"
        assert state == "any" or now in _LATER.get(state, {state}), f"{object_id}: {state}, then {now} (seed {seed})"
        assert fence == "None" or fences[object_id] == int(fence)

    highest = max(f or 0 for f in fences.values())
    async with Bench(folder, Machine(boot=2, states=9), seed=seed + 1000) as bench:  # and it goes on from there
        await bench.advance(5)
        caller = await bench.caller("after", "after")
        lease = await bench.control.leases.acquire(caller, when_full="queue")
        assert lease.fence is None or lease.fence > highest
        bench.check()
