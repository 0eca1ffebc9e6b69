"""What the schema itself forbids: every CHECK, partial unique index and trigger bites."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cotenant.server.errors import IllegalMove, StaleFence
from cotenant.server.model.states import JOB_FINAL, JOB_NEXT, LEASE_NEXT, JobState, LeaseState
from cotenant.server.store import jobs, leases, meta
from cotenant.server.store.db import Tx, configure, migrate

NOW = 1000


@pytest.fixture
def tx(tmp_path: Path) -> Iterator[Tx]:
    path = tmp_path / "control.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        configure(connection)
        migrate(connection, path)
        connection.row_factory = sqlite3.Row
        yield Tx(connection)


def insert(tx: Tx, table: str, **values: Any) -> None:
    tx.execute(
        f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", tuple(values.values())
    )


def lease(tx: Tx, lease_id: str = "lse_1", **values: Any) -> None:
    row: dict[str, Any] = {
        "id": lease_id, "kind": "direct", "state": "leased", "caller": "a", "owner": "o", "human": 0, "pool": "p", "priority": 10,
        "needs": "{}", "gpus": 1, "units": 840, "fence": int(lease_id[-1]), "hours_ms": 1, "hours_from": "hours", "queued_at_ms": NOW,
        "granted_at_ms": NOW, "hard_end_at_ms": NOW,
    }  # fmt: skip
    insert(tx, "lease", **(row | values))


def slot(tx: Tx, lease_id: str = "lse_1", **values: Any) -> None:
    row: dict[str, Any] = {
        "lease_id": lease_id,
        "host": "h",
        "uuid": "u",
        "share": 0,
        "shares": 1,
        "use": "held",
        "since_ms": NOW,
    }
    insert(tx, "lease_slot", **(row | values))


def job(tx: Tx, job_id: str = "job_1", **values: Any) -> None:
    row: dict[str, Any] = {
        "id": job_id, "state": "queued", "name": "n", "caller": "a", "owner": "o", "human": 0, "pool": "p", "priority": 10, "spec": "{}",
        "spec_hash": "", "hours_ms": 1, "hours_from": "hours", "attempts_left": 1, "submitted_at_ms": NOW, "queued_at_ms": NOW,
        "changed_at_ms": NOW,
    }  # fmt: skip
    insert(tx, "job", **(row | values))


def attempt(tx: Tx, attempt_id: str = "att_1", **values: Any) -> None:
    row: dict[str, Any] = {
        "id": attempt_id, "job_id": "job_1", "epoch": int(attempt_id[-1]), "lease_id": "lse_1", "fence": int(attempt_id[-1]), "host": "h",
        "state": "intended", "created_at_ms": NOW,
    }  # fmt: skip
    insert(tx, "attempt", **(row | values))


def event(tx: Tx, **values: Any) -> None:
    insert(
        tx,
        "event",
        **({"at_ms": 1, "type": "job.held", "severity": "info", "caller": "a", "owner": "o", "door": "mcp"} | values),
    )


BAD_ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "job state": (job, {"state": "sleeping"}),
    "job final without end": (job, {"state": "failed"}),
    "job waiting with end": (job, {"ended_at_ms": NOW}),
    "job held without reason": (job, {"state": "held"}),
    "job stopping without reason": (job, {"state": "stopping"}),
    "job human": (job, {"human": 2}),
    "job strict type": (job, {"hours_ms": "long"}),
    "lease kind": (lease, {"kind": "gift"}),
    "lease state": (lease, {"state": "borrowed"}),
    "lease granted without fence": (lease, {"fence": None}),
    "lease granted without hard end": (lease, {"hard_end_at_ms": None}),
    "lease ended without time": (lease, {"state": "released"}),
    "lease living with end": (lease, {"ended_at_ms": NOW}),
    "direct lease of a job": (lease, {"job_id": "job_1"}),
    "job lease without job": (lease, {"kind": "job"}),
    "lease draining": (lease, {"draining": 5}),
    "slot use": (slot, {"use": "borrowed"}),
    "slot of no lease": (slot, {"lease_id": "lse_9"}),
    "attempt state": (attempt, {"state": "gone"}),
    "attempt ended without time": (attempt, {"state": "ended"}),
    "attempt living with end": (attempt, {"ended_at_ms": NOW}),
    "attempt of no job": (attempt, {"job_id": "job_9"}),
    "attempt of no lease": (attempt, {"lease_id": "lse_9"}),
    "event severity": (event, {"severity": "loud"}),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_a_row_that_cannot_be_is_refused(tx: Tx, what: str) -> None:
    make, values = BAD_ROWS[what]
    if make is not lease:
        lease(tx)
    if make is attempt:
        job(tx)
    with pytest.raises(sqlite3.IntegrityError):
        make(tx, **values)
    make(tx)  # the same row without the fault is taken: nothing else was in its way


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("caller", {"name": "x", "kind": "robot", "owner": "o", "created_at_ms": 1}),
        ("host", {"name": "x", "mode": "asleep", "first_seen_at_ms": 1}),
        ("gpu", {"uuid": "x", "host": "nowhere", "idx": 0, "name": "n", "memory_mib": 1, "pool": "p", "first_seen_at_ms": 1, "last_seen_at_ms": 1}),
        ("counter", {"name": "x", "value": -1}),
        ("token", {"id": "x", "hash": "h", "caller": "nobody", "scopes": "read", "created_at_ms": 1, "created_by": "c"}),
    ],
)  # fmt: skip
def test_tables_around_hold_their_rules_too(tx: Tx, table: str, values: dict[str, Any]) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        insert(tx, table, **values)


def test_a_card_has_one_to_eight_shares(tx: Tx) -> None:
    insert(tx, "host", name="h", first_seen_at_ms=1)
    card = {
        "host": "h",
        "idx": 0,
        "name": "n",
        "memory_mib": 1,
        "pool": "p",
        "first_seen_at_ms": 1,
        "last_seen_at_ms": 1,
    }
    for shares in (0, 9):
        with pytest.raises(sqlite3.IntegrityError):
            insert(tx, "gpu", uuid=f"u{shares}", shares=shares, **card)
    insert(tx, "gpu", uuid="u", shares=8, **card)


@pytest.mark.parametrize("use", ["held", "cleaning", "occupied"])
def test_one_living_lease_per_slot(tx: Tx, use: str) -> None:
    lease(tx)
    lease(tx, "lse_2")
    slot(tx, use=use)
    with pytest.raises(sqlite3.IntegrityError, match="lease_slot"):
        slot(tx, "lse_2")
    slot(tx, "lse_2", share=1)
    tx.execute("UPDATE lease_slot SET use = 'freed' WHERE lease_id = 'lse_1'")
    slot(tx, "lse_2")
    with pytest.raises(sqlite3.IntegrityError):
        tx.execute("UPDATE lease_slot SET use = 'held' WHERE lease_id = 'lse_1'")


def test_one_living_attempt_per_job_and_no_epoch_or_fence_twice(tx: Tx) -> None:
    lease(tx)
    job(tx)
    job(tx, "job_2")
    attempt(tx)
    with pytest.raises(sqlite3.IntegrityError, match=r"attempt\.job_id"):
        attempt(tx, "att_2")
    tx.execute("UPDATE attempt SET state = 'ended', ended_at_ms = 1")
    attempt(tx, "att_2")
    tx.execute("UPDATE attempt SET state = 'ended', ended_at_ms = 1")
    with pytest.raises(sqlite3.IntegrityError, match="epoch"):
        attempt(tx, "att_3", epoch=2)
    with pytest.raises(sqlite3.IntegrityError, match="fence"):
        attempt(tx, "att_3", fence=2)


def test_events_are_never_changed_or_deleted(tx: Tx) -> None:
    event(tx)
    for sql in ("UPDATE event SET reason = 'other'", "DELETE FROM event", "UPDATE event SET id = 7"):
        with pytest.raises(sqlite3.IntegrityError, match="events are never"):
            tx.execute(sql)
    assert tx.one("SELECT count(*) FROM event")[0] == 1  # type: ignore[index]


def test_fences_epochs_and_counters_never_fall(tx: Tx) -> None:
    lease(tx, "lse_5")
    job(tx, epoch=3)
    for sql in (
        "UPDATE lease SET fence = 4",
        "UPDATE job SET epoch = 2",
        "UPDATE counter SET value = -1",
    ):
        with pytest.raises(sqlite3.IntegrityError, match=r"never falls|value >= 0"):
            tx.execute(sql)
    tx.execute("UPDATE counter SET value = 9 WHERE name = 'fence'")
    with pytest.raises(sqlite3.IntegrityError, match="never falls"):
        tx.execute("UPDATE counter SET value = 8 WHERE name = 'fence'")
    with pytest.raises(sqlite3.IntegrityError, match="fence"):
        lease(tx, "lse_6", fence=5)


def test_counters_rise_and_can_only_be_lifted(tx: Tx) -> None:
    assert [meta.next_of(tx, "fence") for _ in range(3)] == [1, 2, 3]
    assert meta.lift(tx, "fence", 2) == 3
    assert meta.lift(tx, "fence", 10) == 10
    assert meta.next_of(tx, "fence") == 11


@pytest.mark.parametrize("final", sorted(JOB_FINAL))
def test_final_is_final(tx: Tx, final: str) -> None:
    job(tx, state=final, ended_at_ms=NOW)
    with pytest.raises(sqlite3.IntegrityError, match="final"):
        tx.execute("UPDATE job SET state = 'queued', ended_at_ms = NULL")
    for to in JobState:
        with pytest.raises(IllegalMove):
            jobs.move(tx, "job_1", to, NOW)


def test_moves_of_jobs_follow_the_table_and_set_the_end(tx: Tx) -> None:
    for number, (state, follow) in enumerate(JOB_NEXT.items()):
        for to in JobState:
            job_id = f"job_{number}_{to}"
            ended = {"ended_at_ms": NOW} if state in JOB_FINAL else {}
            job(tx, job_id, state=state, held_reason="r", stop_reason="r", **ended)
            if to not in follow:
                with pytest.raises(IllegalMove):
                    jobs.move(tx, job_id, to, NOW)
                assert jobs.get(tx, job_id)["state"] == state
            else:
                jobs.move(tx, job_id, to, NOW + 5)
                row = jobs.get(tx, job_id)
                assert (row["state"], row["changed_at_ms"]) == (to, NOW + 5)
                assert (row["ended_at_ms"] == NOW + 5) == (to in JOB_FINAL)


def test_only_the_newest_attempt_moves_its_job(tx: Tx) -> None:
    job(tx, state="running", epoch=2)
    with pytest.raises(StaleFence):
        jobs.move(tx, "job_1", JobState.FAILED, NOW, by_epoch=1)
    assert jobs.get(tx, "job_1")["state"] == "running"


def test_moves_of_leases_follow_the_table(tx: Tx) -> None:
    for state, follow in LEASE_NEXT.items():
        for to in LeaseState:
            if to == state:
                continue
            tx.execute("DELETE FROM lease")
            ended = {} if state in ("queued", "leased", "running") else {"ended_at_ms": NOW}
            lease(tx, state=state, **ended)
            end = {} if to in ("queued", "leased", "running") else {"ended_at_ms": NOW}
            if to in follow:
                leases.move(tx, "lse_1", to, **end)
                assert leases.get(tx, "lse_1")["state"] == to
            else:
                with pytest.raises(IllegalMove):
                    leases.move(tx, "lse_1", to, **end)


def test_an_ended_attempt_stays_ended(tx: Tx) -> None:
    lease(tx)
    job(tx)
    attempt(tx, state="ended", ended_at_ms=NOW)
    with pytest.raises(IllegalMove):
        jobs.move_attempt(tx, "att_1", jobs.AttemptState.RUNNING)


def test_what_is_freed_is_what_a_lease_no_longer_holds(tx: Tx) -> None:
    lease(tx)
    for share, use in enumerate(("held", "cleaning", "occupied", "freed")):
        slot(tx, share=share, use=use)
    assert [row["share"] for row in leases.free_slots(tx, "lse_1", NOW)] == [1, 2]
    assert [row["use"] for row in leases.slots(tx.connection, "lse_1")] == ["held", "freed", "freed", "freed"]
