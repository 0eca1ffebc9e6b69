"""Forecasts that were given, how they came true, and the past runs that they are made from."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cotenant.server.store.db import Tx

#: Runs that are looked back at, the newest first.
PAST_MAX: Final = 2_000
#: Forecasts that the measured error is taken from, the newest first.
CHECKED_MAX: Final = 500
#: A forecast for a job is kept at most that often: an agent that asks again and again must not outweigh the others.
EVERY_MS: Final = 60_000
KEPT_MS: Final = 30 * 86_400_000


@dataclass(frozen=True)
class Record:
    """How forecasts came true: how many jobs have started since, how many of them between earliest and latest, and the
    median distance of the likely start from the true one, in ms (None: nothing to compare yet)."""

    checked: int
    inside: int
    median_error_ms: int | None


def keep(tx: Tx, job_id: str, now_ms: int, earliest_ms: int, likely_ms: int, latest_ms: int | None) -> bool:
    """Remember a forecast for a job that waits; False where one of a moment ago stands."""
    newest = tx.one("SELECT max(made_at_ms) FROM forecast WHERE job_id = ?", (job_id,))
    if newest is not None and newest[0] is not None and newest[0] > now_ms - EVERY_MS:
        return False
    tx.execute(
        "INSERT INTO forecast (job_id, made_at_ms, earliest_at_ms, likely_at_ms, latest_at_ms) VALUES (?, ?, ?, ?, ?)",
        (job_id, now_ms, earliest_ms, likely_ms, latest_ms),
    )
    return True


def record(connection: sqlite3.Connection) -> Record:
    """How the newest forecasts came true whose jobs have started."""
    rows = connection.execute(
        "SELECT f.earliest_at_ms, f.likely_at_ms, f.latest_at_ms, j.started_at_ms FROM forecast f JOIN job j ON j.id = f.job_id"
        " WHERE j.started_at_ms >= f.made_at_ms ORDER BY f.made_at_ms DESC LIMIT ?",
        (CHECKED_MAX,),
    ).fetchall()
    errors = sorted(abs(started - likely) for _, likely, _, started in rows)
    inside = sum(earliest <= started and (latest is None or started <= latest) for earliest, _, latest, started in rows)
    return Record(len(rows), inside, errors[len(errors) // 2] if errors else None)


def forget_old(tx: Tx, now_ms: int) -> int:
    """Drop those that are too old to say anything; returns how many."""
    return tx.changes("DELETE FROM forecast WHERE made_at_ms < ?", (now_ms - KEPT_MS,))


def runs(connection: sqlite3.Connection) -> list[sqlite3.Row]:
    """(owner, name, ran_ms, limit_ms) of the newest attempts that ran and are over, whatever they ended with."""
    return connection.execute(
        "SELECT j.owner, j.name, a.ended_at_ms - a.started_at_ms AS ran_ms, j.hours_ms AS limit_ms FROM attempt a"
        " JOIN job j ON j.id = a.job_id WHERE a.ended_at_ms IS NOT NULL AND a.started_at_ms IS NOT NULL"
        " ORDER BY a.ended_at_ms DESC LIMIT ?",
        (PAST_MAX,),
    ).fetchall()


def names(connection: sqlite3.Connection) -> dict[str, str]:
    """The names of all jobs that wait or run, by id."""
    found: Iterable[tuple[str, str]] = connection.execute(
        "SELECT id, name FROM job WHERE state NOT IN ('succeeded', 'failed', 'cancelled')"
    )
    return dict(found)


def like(connection: sqlite3.Connection, owner: str, name: str | None, command: str | None) -> list[sqlite3.Row]:
    """The newest ended attempts of an owner's jobs with this name, or this beginning of their command, as
    (name, command, gpus, hours_ms, ran_ms, state, failure_class, exit)."""
    return connection.execute(
        "SELECT j.name, j.spec, j.hours_ms, a.ended_at_ms - a.started_at_ms AS ran_ms, a.exit_code, a.failure_class, a.exit,"
        " l.units AS units FROM attempt a JOIN job j ON j.id = a.job_id JOIN lease l ON l.id = a.lease_id"
        " WHERE j.owner = ? AND (? IS NULL OR j.name = ?) AND a.ended_at_ms IS NOT NULL AND a.started_at_ms IS NOT NULL"
        " ORDER BY a.ended_at_ms DESC LIMIT ?",
        (owner, name, name, PAST_MAX if command else 200),
    ).fetchall()
