"""Rows as the scheduler sees them: asks that wait, leases that hold, cards and hosts."""

from __future__ import annotations

import functools
import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from cotenant.server.deciding.caps import HOUR_MS
from cotenant.server.deciding.world import UNITS_PER_CARD, Ask, Holding, Needs, SlotKey, Spent
from cotenant.server.model.spec import JobSpec, parse_kept
from cotenant.server.store import dependencies, preemptions

# Each repeats the condition of the partial index over what lives, without which SQLite would walk all that ever was.
_JOBS = (
    "SELECT j.*, a.pending, a.running AS array_running, a.max_parallel FROM job j LEFT JOIN array a ON a.job_id = j.array_id"
    " WHERE j.state NOT IN ('succeeded', 'failed', 'cancelled') AND j.state IN ('queued', 'held', 'preempted')"
)
_CLAIMS = "SELECT * FROM lease WHERE state IN ('queued', 'leased', 'running') AND state = 'queued'"
_LIVING = (
    "SELECT l.*, j.priority AS job_priority, j.state AS job_state, j.spec AS job_spec, j.array_id, j.preempt_agreed AS job_agreed"
    " FROM lease l LEFT JOIN job j ON j.id = l.job_id WHERE {where}"
)


def needs_of(spec: JobSpec, avoid: Iterable[str] = ()) -> Needs:
    """What a job wants of its place. `avoid` holds hosts (names) and cards (UUIDs) that were at fault before."""
    avoid = tuple(sorted(avoid))
    return _same(_needs_of(spec, avoid))


@functools.lru_cache(maxsize=4096)
def _same(needs: Needs) -> Needs:
    """One object for equal needs: a pass compares them by identity first."""
    return needs


def _needs_of(spec: JobSpec, avoid: tuple[str, ...]) -> Needs:
    cards = tuple(a for a in avoid if a.startswith(("GPU-", "MIG-", "SIM-")))
    return Needs(
        gpus_min=spec.gpus_min,
        gpus_max=spec.gpus_max,
        gpu_memory_mib=spec.gpu_memory_mib,
        models=(spec.gpu_model,) if spec.gpu_model else (),
        capability=_tenths(spec.compute_capability),
        cuda=cuda_number(spec.cuda),
        driver=spec.driver,
        cpus=spec.cpus,
        memory_mib=spec.memory_mib,
        disk_mib=spec.disk_mib,
        nodes=spec.nodes,
        exclusive_host=spec.exclusive_host,
        avoid_hosts=tuple(a for a in avoid if a not in cards),
        avoid_cards=cards,
        prefer_hosts=spec.prefer_hosts,
        prefer_labels=spec.prefer_labels,
        labels=tuple(sorted(spec.host_labels.items())),
    )


def _tenths(version: str) -> int:
    major, _, minor = version.partition(".")
    return int(major) * 10 + int(minor or 0) if version else 0


def cuda_number(version: str) -> int:
    """12.4 as NVML counts it: 12040."""
    major, _, minor = version.partition(".")
    return int(major) * 1000 + int(minor or 0) * 10 if version else 0


def needs_json(needs: Needs) -> str:
    """A claim's wish for its row."""
    given = {k: v for k, v in needs.__dict__.items() if v != getattr(Needs, k, None)}
    return json.dumps(given, sort_keys=True)


def needs_from_json(text: str) -> Needs:
    given: dict[str, Any] = json.loads(text)
    for key, value in given.items():
        if isinstance(value, list):
            given[key] = tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return _same(Needs(**given))


def asks(
    connection: sqlite3.Connection, job_ids: list[str] | None = None, lease_ids: list[str] | None = None
) -> dict[str, Ask]:
    """Everything that waits (both None), or what waits among the given jobs and leases, by id."""
    out: dict[str, Ask] = {}
    rows = list(_rows(connection, _JOBS, "j.id", job_ids, everything=job_ids is None and lease_ids is None))
    unmet = dependencies.unmet(connection, [row["id"] for row in rows if row["waits_for"]])
    for row in rows:
        is_array = row["array_id"] is not None and row["array_index"] is None
        if is_array and not row["pending"]:
            continue  # all of it has started
        spec = parse_kept(row["spec"])
        window = row["opens_at_ms"] > row["not_before_ms"]
        out[row["id"]] = Ask(
            id=row["id"],
            kind="job",
            owner=row["owner"],
            agent=row["caller"],
            human=bool(row["human"]),
            pool=row["pool"],
            needs=needs_of(spec, json.loads(row["avoid"])),
            priority=row["priority"],
            queued_at_ms=row["queued_at_ms"],
            hours_ms=row["hours_ms"],
            held=row["held_reason"] or "" if row["state"] == "held" else "",
            not_before_ms=row["opens_at_ms"] if window else row["not_before_ms"],
            not_before_why="start_window" if window else "backing_off",
            not_after_ms=row["closes_at_ms"] if row["started_at_ms"] is None else None,
            resumed=bool(row["resumed"]),
            after=unmet.get(row["id"], ()),
            count=row["pending"] if is_array else 1,
            array=row["array_id"] or "",
            array_room=None if row["max_parallel"] is None else max(0, row["max_parallel"] - row["array_running"]),
        )
    for row in _rows(connection, _CLAIMS, "id", lease_ids, everything=job_ids is None and lease_ids is None):
        out[row["id"]] = Ask(
            id=row["id"],
            kind="claim",
            owner=row["owner"],
            agent=row["caller"],
            human=bool(row["human"]),
            pool=row["pool"],
            needs=needs_from_json(row["needs"]),
            priority=row["priority"],
            queued_at_ms=row["queued_at_ms"],
            hours_ms=row["hours_ms"],
        )
    return out


def holdings(
    connection: sqlite3.Connection, lease_ids: list[str] | None = None
) -> tuple[dict[str, Holding], dict[str, Holding], dict[SlotKey, tuple[str, str, str]]]:
    """(living leases, those whose slots are being cleaned, use of each taken slot as (use, lease id, detail)).

    Slots being cleaned count for their last holder, occupied ones for nobody (design section 6).

    All of them, or those among `lease_ids`.
    """
    uses: dict[SlotKey, tuple[str, str, str]] = {}
    of_use: dict[tuple[str, str], list[SlotKey]] = {}
    for row in _rows(
        connection, "SELECT * FROM lease_slot WHERE use <> 'freed'", "lease_id", lease_ids, everything=lease_ids is None
    ):
        key = (row["host"], row["uuid"], row["share"])
        uses[key] = (row["use"], row["lease_id"], row["detail"])
        of_use.setdefault((row["lease_id"], row["use"]), []).append(key)
    living: dict[str, Holding] = {}
    ended: dict[str, Holding] = {}
    wanted = list(dict.fromkeys(lease_id for lease_id, _ in of_use)) if lease_ids is None else lease_ids
    for row in _rows(connection, _LIVING.format(where="1"), "l.id", wanted, everything=False):
        alive = row["state"] in ("leased", "running")
        slots = of_use.get((row["id"], "held" if alive else "cleaning"), [])
        if not (alive or slots):
            continue
        spec = {} if row["job_spec"] is None else json.loads(row["job_spec"])
        holding = Holding(
            id=row["id"],
            kind=row["kind"],
            owner=row["owner"],
            agent=row["caller"],
            human=bool(row["human"]),
            pool=row["pool"],
            slots=tuple(slots),
            # a claim that missed its pick-up is no grant any more, but what it had may still be cleaned
            granted_at_ms=row["granted_at_ms"] or 0,
            hard_end_ms=row["hard_end_at_ms"] or 0,
            expires_ms=row["expires_at_ms"] if row["kind"] == "direct" else None,
            pickup_ms=row["pickup_by_ms"],
            missed_pickups=row["missed_pickups"],
            job_id=row["job_id"],
            priority=row["priority"] if row["job_priority"] is None else row["job_priority"],
            lost=row["job_state"] == "lost",
            suspended=row["job_state"] == "suspended",
            draining=bool(row["draining"]),
            cpus=row["cpus"],
            memory_mib=row["memory_mib"],
            disk_mib=row["disk_mib"],
            exclusive=bool(row["exclusive"]),
            array=row["array_id"] or "",
            stop_s=spec.get("stop_grace_s", 10),
            preemptible=row["job_state"] == "running" and spec.get("preemptible", True),
            resumable=spec.get("resumable", False) or row["job_agreed"] is not None,
            immune_until_ms=preemptions.immune_until_ms(connection, row["job_id"]) if row["job_id"] and alive else 0,
            stopping=row["job_state"] == "stopping",
            idle_notice_ms=row["idle_notice_ms"],
        )
        (living if alive else ended)[row["id"]] = holding
    return living, ended, uses


def spent(connection: sqlite3.Connection, now_ms: int, half_life_h: dict[str, int]) -> tuple[Spent, ...]:
    """What each caller has used in each pool: in the last 24 hours, and altogether with older use weighing less.

    Use counts half for every `half_life_h` (by pool, hours) since it ended, in steps of an eighth of that; what is older
    than eight of them is forgotten.
    """
    day = now_ms - 24 * HOUR_MS
    horizon = now_ms - 8 * max([24, *half_life_h.values()]) * HOUR_MS
    rows = connection.execute(
        "SELECT owner, caller, pool, granted_at_ms, coalesce(ended_at_ms, ?) AS until_ms, units FROM lease"
        " WHERE state IN ('queued', 'leased', 'running') AND granted_at_ms IS NOT NULL"
        " UNION ALL SELECT owner, caller, pool, granted_at_ms, ended_at_ms, units FROM lease"
        " WHERE ended_at_ms > ? AND granted_at_ms IS NOT NULL",
        (now_ms, horizon),
    )
    today: dict[tuple[str, str, str], int] = {}
    past: dict[tuple[str, str, str], int] = {}
    for owner, caller, pool, granted, until, units in rows:
        of = (owner, caller, pool)
        used = max(0, until - granted) * units // UNITS_PER_CARD
        today[of] = today.get(of, 0) + max(0, until - max(granted, day)) * units // UNITS_PER_CARD
        eighths = max(0, now_ms - until) * 8 // (half_life_h.get(pool, 168) * HOUR_MS)
        past[of] = past.get(of, 0) + (used * _WEIGHT[eighths % 8] >> 16 + eighths // 8)
    return tuple(Spent(*of, today[of], past[of]) for of in sorted(today))


#: 2 to the power of -n/8, in 1/65536: whole numbers, so that every machine decides the same.
_WEIGHT = (65536, 60097, 55109, 50535, 46341, 42495, 38968, 35734)


def _rows(
    connection: sqlite3.Connection, sql: str, column: str, ids: list[str] | None, *, everything: bool
) -> Iterable[sqlite3.Row]:
    if everything:
        yield from connection.execute(sql)
        return
    joiner = " AND " if " WHERE " in sql else " WHERE "
    for start in range(0, len(ids or ()), 500):
        part = (ids or [])[start : start + 500]
        yield from connection.execute(f"{sql}{joiner}{column} IN ({', '.join('?' * len(part))})", part)
