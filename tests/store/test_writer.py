"""The writer: commits are grouped, answers follow the COMMIT, one failure is undone alone, order is kept."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from cotenant.server.errors import Unavailable
from cotenant.server.store.db import GROUP_MAX, Database, Tx


def put(tx: Tx, key: str, value: str = "") -> str:
    tx.execute("INSERT INTO meta (key, value) VALUES (?, ?)", (key, value))
    tx.changed.add(f"cotenant://{key}")
    return key


def keys(db: Database) -> list[str]:
    """What another connection sees: the committed truth."""
    with closing(sqlite3.connect(db.path)) as other:
        return [row[0] for row in other.execute("SELECT key FROM meta ORDER BY rowid")]


async def test_what_waits_at_once_shares_a_commit_and_keeps_its_order(db: Database) -> None:
    before = db.groups
    done = [db.submit(partial(put, key=f"k{n:03}")) for n in range(GROUP_MAX)]
    assert await asyncio.gather(*done) == [f"k{n:03}" for n in range(GROUP_MAX)]
    assert db.groups - before == 1
    assert keys(db) == [f"k{n:03}" for n in range(GROUP_MAX)]


async def test_a_group_has_an_end(db: Database) -> None:
    before = db.groups
    await asyncio.gather(*[db.submit(partial(put, key=f"k{n}")) for n in range(GROUP_MAX + 1)])
    assert db.groups - before == 2


async def test_an_answer_comes_after_its_commit_only(db: Database) -> None:
    seen: list[list[str]] = []
    future = db.submit(partial(put, key="a"))
    future.add_done_callback(lambda _: seen.append(keys(db)))
    await future
    await asyncio.sleep(0)
    assert seen == [["a"]]


async def test_one_failing_transaction_is_undone_alone(db: Database) -> None:
    def half(tx: Tx) -> None:
        put(tx, "half")
        raise ValueError("changed my mind")

    results = await asyncio.gather(
        db.submit(partial(put, key="a")), db.submit(half), db.submit(partial(put, key="b")),
        db.submit(partial(put, key="a")), db.submit(partial(put, key="c")), return_exceptions=True,
    )  # fmt: skip
    assert [type(r) for r in results] == [str, ValueError, str, sqlite3.IntegrityError, str]
    assert keys(db) == ["a", "b", "c"]


async def test_a_cancelled_waiter_spoils_nothing_for_others(db: Database) -> None:
    first, second, third = (db.submit(partial(put, key=k)) for k in "abc")
    second.cancel()
    assert await first == "a" and await third == "c"
    assert keys(db) == ["a", "b", "c"]


async def test_listeners_hear_of_what_was_committed_before_the_answers_go_out(db: Database) -> None:
    heard: list[Any] = []
    db.on_commit(lambda changed, dirty: heard.append((sorted(changed), keys(db))))

    def fails(tx: Tx) -> None:
        put(tx, "x")
        raise ValueError

    ok, bad = db.submit(partial(put, key="a")), db.submit(fails)
    ok.add_done_callback(lambda _: heard.append("answer"))
    await asyncio.gather(ok, bad, return_exceptions=True)
    assert heard == [(["cotenant://a"], ["a"]), "answer"]


async def test_a_listener_that_fails_does_not_end_the_writer(db: Database, caplog: pytest.LogCaptureFixture) -> None:
    def broken(changed: set[str], dirty: set[tuple[str, str]]) -> None:
        raise RuntimeError("listener")

    db.on_commit(broken)
    assert await db.write(partial(put, key="a")) == "a"
    assert await db.write(partial(put, key="b")) == "b"
    assert "a listener to commits failed" in caplog.text


async def test_a_read_is_one_snapshot_and_sees_all_that_was_committed_before(db: Database) -> None:
    await db.write(partial(put, key="a"))

    def count_twice(c: sqlite3.Connection) -> tuple[int, int]:
        first = c.execute("SELECT count(*) FROM meta").fetchone()[0]
        with closing(sqlite3.connect(db.path)) as other:
            other.execute("INSERT INTO meta VALUES ('from outside', '')")
            other.commit()
        return first, c.execute("SELECT count(*) FROM meta").fetchone()[0]

    assert await db.read(count_twice) == (1, 1)
    assert db.peek(lambda c: c.execute("SELECT count(*) FROM meta").fetchone()[0]) == 2


async def test_readers_cannot_write(db: Database) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        await db.read(lambda c: c.execute("INSERT INTO meta VALUES ('a', 'b')"))
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        db.peek(lambda c: c.execute("INSERT INTO meta VALUES ('a', 'b')"))
    assert db.peek(lambda c: c.execute("SELECT count(*) FROM meta").fetchone()[0]) == 0


async def test_closing_writes_what_waits_and_refuses_what_comes(tmp_path: Any) -> None:
    db = await Database.open(tmp_path / "control.db")
    waiting = [db.submit(partial(put, key=f"k{n}")) for n in range(600)]
    await db.close()
    assert [f.result() for f in waiting] == [f"k{n}" for n in range(600)]
    assert len(keys(db)) == 600
    with pytest.raises(Unavailable, match="shutting down"):
        db.submit(partial(put, key="late"))


async def test_a_lock_held_by_another_program_refuses_and_does_not_end_the_server(tmp_path: Any) -> None:
    db = await Database.open(tmp_path / "control.db")
    await db.write(lambda tx: tx.execute("PRAGMA user_version"))
    await db._writer.execute("PRAGMA busy_timeout = 50")
    with closing(sqlite3.connect(db.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable) as refused:
            await db.write(partial(put, key="a"))
        assert refused.value.code == "storage_busy"
        other.execute("ROLLBACK")
    assert await db.write(partial(put, key="b")) == "b"
    assert keys(db) == ["b"]
    await db.close()
