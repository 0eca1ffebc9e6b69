"""Lease grants: acquire and release inside the server from 16 askers at once, beside the same with one COMMIT each.

Both go through the server's own use cases on a real `control.db` with synchronous=FULL: caps rechecked, events written,
16 places without a card so that nobody has to wait for a host's hold. "one commit each" is the same server whose writer
takes one transaction at a time; the floor is bare sqlite3 with a grant's statements and a COMMIT each.

How much grouping gains depends on what a sync costs: `--sync-ms` SIMULATES a slower disk by a pause before each COMMIT, in
every variant alike. What a write and fdatasync of 4 KiB take on this disk is measured and shown beside.

    .venv/bin/python benchmarks/grants.py [--rounds 5] [--n 2000] [--sync-ms 0]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Result, percentile, rotate, save, table

from cotenant.server import config
from cotenant.server.model.caller import Caller
from cotenant.server.services import services
from cotenant.server.store import db as store

ASKERS = 16


def cotenant(n: int, group: int, sync_s: float) -> Result:
    """Grants and releases per second from 16 askers, with `group` transactions in a COMMIT at most."""

    async def run(folder: Path) -> Result:
        settings = config.parse(f"[hosts.local]\ncpu_jobs = {ASKERS}\n", data_dir=folder, simulate_gpus=0)
        took: list[float] = []
        async with services(settings) as control:
            slow_down(control.context.db, sync_s)
            callers = [Caller(f"a{k}", "agent", f"o{k}", frozenset({"read", "write"}), f"t{k}") for k in range(ASKERS)]

            async def asker(caller: Caller, rounds: int) -> None:
                for _ in range(rounds):
                    began = time.perf_counter()
                    lease = await control.leases.acquire(caller, gpus=0, ttl_s=600)
                    took.append(time.perf_counter() - began)
                    await control.leases.release(caller, lease.lease_id)

            await asyncio.gather(*(asker(caller, 5) for caller in callers))
            took.clear()
            began = time.perf_counter()
            await asyncio.gather(*(asker(caller, n // ASKERS) for caller in callers))
            seconds = time.perf_counter() - began
        return {"grant+release a second": len(took) / seconds, "grant p50 ms": percentile(took, 50) * 1e3}

    folder = Path(tempfile.mkdtemp(prefix="cotenant-grants-"))
    before = store.GROUP_MAX
    store.GROUP_MAX = group  # type: ignore[misc]
    try:
        return asyncio.run(run(folder / "data"))
    finally:
        store.GROUP_MAX = before  # type: ignore[misc]
        shutil.rmtree(folder, ignore_errors=True)


def slow_down(db: store.Database, sync_s: float) -> None:
    """A pause before each COMMIT, in the thread that waits for the disk."""
    if not sync_s:
        return
    commit = db._writer.commit

    async def slowly() -> None:
        await db._writer._execute(time.sleep, sync_s)  # type: ignore[no-untyped-call]
        await commit()

    db._writer.commit = slowly  # type: ignore[method-assign]


def sync_ms() -> float:
    """The median time of a 4 KiB write and its fdatasync in the directory that the databases are in."""
    took = []
    with tempfile.NamedTemporaryFile(prefix="cotenant-sync-") as file:
        for _ in range(100):
            began = time.perf_counter()
            os.pwrite(file.fileno(), b"x" * 4096, 0)
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return percentile(took, 50) * 1e3


def floor(n: int, sync_s: float) -> Result:
    """A grant's and a release's rows in bare sqlite3, one after the other, a synced COMMIT each."""
    folder = Path(tempfile.mkdtemp(prefix="cotenant-grants-"))
    connection = sqlite3.connect(folder / "floor.db", isolation_level=None)
    store.configure(connection)
    store.migrate(connection, folder / "floor.db")
    began = time.perf_counter()
    for number in range(n):
        lease, at = f"lse_{number}", 1_800_000_000_000 + number
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE counter SET value = value + 1 WHERE name = 'fence'")
        connection.execute(
            "INSERT INTO lease (id, kind, state, caller, owner, human, pool, priority, needs, gpus, fence, hours_ms, hours_from,"
            " queued_at_ms, granted_at_ms, hard_end_at_ms) VALUES (?, 'direct', 'leased', 'a', 'o', 0, 'default', 10, '{}', 0, ?, 1,"
            " 'hours', ?, ?, ?)",
            (lease, number + 1, at, at, at),
        )
        connection.execute("INSERT INTO lease_slot VALUES (?, 'local', 'cpu', 0, 1, NULL, 'held', ?, '')", (lease, at))
        connection.execute(_EVENT, (at, "lease.granted", lease))
        time.sleep(sync_s)
        connection.execute("COMMIT")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE lease SET state = 'released', ended_at_ms = ? WHERE id = ?", (at, lease))
        connection.execute("UPDATE lease_slot SET use = 'freed' WHERE lease_id = ?", (lease,))
        connection.execute(_EVENT, (at, "lease.released", lease))
        time.sleep(sync_s)
        connection.execute("COMMIT")
    seconds = time.perf_counter() - began
    connection.close()
    shutil.rmtree(folder, ignore_errors=True)
    return {"grant+release a second": n / seconds}


_EVENT = (
    "INSERT INTO event (at_ms, type, severity, caller, owner, door, lease_id) VALUES (?, ?, 'info', 'a', 'o', 'mcp', ?)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--sync-ms", type=float, default=0, help="simulate a disk whose sync takes this much longer")
    parser.add_argument("--save", help="write the raw numbers to this file")
    options = parser.parse_args()
    pause_s = options.sync_ms / 1000
    variants: dict[str, Callable[[], Result]] = {
        "bare sqlite3, one commit each": lambda: floor(options.n, pause_s),
        "cotenant, one commit each": lambda: cotenant(options.n, 1, pause_s),
        "cotenant, grouped (default)": lambda: cotenant(options.n, store.GROUP_MAX, pause_s),
    }
    print(f"a 4 KiB write and fdatasync here: {sync_ms():.2f} ms")
    results = rotate(variants, options.rounds)
    slower = f", each sync made {options.sync_ms:g} ms longer (simulated)" if pause_s else ""
    print(table(f"grant and release, {ASKERS} askers, full durability{slower}", results, "cotenant, one commit each"))
    save(options.save, "grants", results)


if __name__ == "__main__":
    main()
