"""Checks the invariants of the design on a live database: reads only, never waits for the server, never repairs."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cotenant.server.model.events import EVENT_TYPES
from cotenant.server.model.indices import Indices
from cotenant.server.model.states import JOB_ACTIVE, JOB_FINAL
from cotenant.server.services import DATABASE
from cotenant.server.store.arrays import COLUMN, todo_of
from cotenant.server.store.db import NETWORK_FILE_SYSTEMS as NETWORK
from cotenant.server.store.db import file_system_of, migrations, read_only_uri


@dataclass(frozen=True)
class Finding:
    """One check. `message` says what was found, `hint` what to do when it is not `ok`."""

    check: str
    ok: bool
    message: str
    hint: str = ""


def examine(data_dir: Path) -> list[Finding]:
    """Every check over the database in `data_dir`; safe beside a running server."""
    path = data_dir / DATABASE
    if not path.exists():
        return [Finding("database", False, f"there is no {path}", "Start the server once, or give the right --data.")]
    found = [_file_system(data_dir)]
    with contextlib.closing(sqlite3.connect(read_only_uri(path), uri=True, isolation_level=None)) as c:
        c.row_factory = sqlite3.Row
        version = c.execute("PRAGMA user_version").fetchone()[0]
        newest = len(migrations())
        if version != newest:
            return [
                *found,
                Finding(
                    "schema", False, f"schema {version}, this Cotenant knows {newest}", "Use the version that wrote it."
                ),
            ]
        c.execute("BEGIN")  # one snapshot for all checks
        result = c.execute("PRAGMA quick_check").fetchone()[0]
        found.append(Finding("database", result == "ok", f"SQLite says: {result}", "Restore a backup."))
        found += [
            _none(c, "one lease per slot (1)", _TWO_LEASES, "slots in two living leases"),
            _none(c, "living leases hold slots (1)", _EMPTY_LEASES, "living leases without a slot"),
            _none(c, "ended leases hold nothing (1)", _STILL_HELD, "ended leases whose slots are still held"),
            _fences(c),
            _none(
                c,
                "outcome from the newest attempt (3)",
                _SUPERSEDED,
                "final jobs whose result is not their newest attempt's",
            ),
            _none(c, "one live attempt per job (4)", _TWO_ATTEMPTS, "jobs with two live attempts"),
            _none(c, "active jobs have a live attempt (4)", _NO_ATTEMPT, "active jobs without a live attempt"),
            _none(
                c, "waiting jobs have no live attempt (4)", _STRAY_ATTEMPT, "waiting or final jobs with a live attempt"
            ),
            _none(c, "live attempts hold their lease (4)", _LEASELESS, "live attempts whose lease has ended"),
            _none(c, "a rank on each host (4)", _RANKS_MISSING, "attempts with more or fewer ranks than hosts"),
            _none(c, "ranks end with their attempt (4)", _RANKS_LEFT, "living ranks of ended attempts"),
            _none(c, "living ranks hold slots of their host (1)", _RANKS_SLOTLESS, "living ranks without a slot"),
            _none(c, "no rank before all are ready (4)", _RANKS_EARLY, "ranks that began before the word to begin"),
            _caps(c),
            _none(
                c, "an array's counts are those of its elements", _COUNTS, "arrays whose counts are not their elements'"
            ),
            _none(c, "no array runs more than it allows", _PARALLEL, "arrays above their max_parallel"),
            _arrays(c),
            _none(c, "final is final (8)", _AFTER_FINAL, "jobs with an event of another end after their first"),
            _events(c),
            _none(c, "every job has its events (11)", _UNAUDITED, "jobs whose state is not their last recorded move"),
        ]
        c.execute("COMMIT")
    return found


def _none(c: sqlite3.Connection, check: str, sql: str, what: str) -> Finding:
    rows = c.execute(sql).fetchall()
    if not rows:
        return Finding(check, True, "none")
    some = ", ".join(str(row[0]) for row in rows[:5])
    return Finding(
        check, False, f"{len(rows)} {what}: {some}", "Keep the data directory and report this: it must not happen."
    )


_TWO_LEASES = "SELECT host || ' ' || uuid || '/' || share FROM lease_slot WHERE use <> 'freed' GROUP BY host, uuid, share HAVING count(*) > 1"
_EMPTY_LEASES = (
    "SELECT id FROM lease l WHERE state IN ('leased', 'running')"
    " AND NOT EXISTS (SELECT 1 FROM lease_slot s WHERE s.lease_id = l.id AND s.use = 'held')"
)
_STILL_HELD = (
    "SELECT DISTINCT l.id FROM lease l JOIN lease_slot s ON s.lease_id = l.id"
    " WHERE l.state IN ('released', 'expired', 'revoked', 'withdrawn', 'queued') AND s.use = 'held'"
)
_SUPERSEDED = (
    "SELECT j.id FROM job j JOIN attempt a ON a.job_id = j.id AND a.epoch = j.epoch"
    " WHERE j.state IN ('succeeded', 'failed') AND j.exit_code IS NOT a.exit_code"
)
_TWO_ATTEMPTS = "SELECT job_id FROM attempt WHERE state <> 'ended' GROUP BY job_id HAVING count(*) > 1"
_NO_ATTEMPT = (
    f"SELECT id FROM job j WHERE state IN ({', '.join(repr(str(s)) for s in sorted(JOB_ACTIVE))})"
    " AND NOT EXISTS (SELECT 1 FROM attempt a WHERE a.job_id = j.id AND a.state <> 'ended')"
)
_STRAY_ATTEMPT = (
    "SELECT j.id FROM job j JOIN attempt a ON a.job_id = j.id AND a.state <> 'ended'"
    f" WHERE j.state IN ('queued', 'held', 'preempted', {', '.join(repr(str(s)) for s in sorted(JOB_FINAL))})"
)
_LEASELESS = "SELECT a.id FROM attempt a JOIN lease l ON l.id = a.lease_id WHERE a.state <> 'ended' AND l.state NOT IN ('leased', 'running')"
_RANKS_MISSING = (
    "SELECT id FROM attempt a WHERE nodes <> (SELECT max(1, count(*)) FROM rank r WHERE r.attempt_id = a.id)"
)
_RANKS_LEFT = (
    "SELECT r.id FROM rank r JOIN attempt a ON a.id = r.attempt_id WHERE r.state <> 'ended' AND a.state = 'ended'"
)
_RANKS_SLOTLESS = (
    "SELECT r.id FROM rank r JOIN attempt a ON a.id = r.attempt_id WHERE r.state <> 'ended' AND NOT EXISTS"
    " (SELECT 1 FROM lease_slot s WHERE s.lease_id = a.lease_id AND s.host = r.host AND s.use = 'held')"
)
_RANKS_EARLY = "SELECT r.id FROM rank r JOIN attempt a ON a.id = r.attempt_id WHERE a.go_at_ms IS NULL AND r.started_at_ms IS NOT NULL"
_IN = {
    name: ", ".join(f"'{state}'" for state, column in COLUMN.items() if column == name) for name in set(COLUMN.values())
}
_COUNTS = (
    "SELECT a.job_id FROM array a LEFT JOIN job j ON j.array_id = a.job_id AND j.array_index IS NOT NULL GROUP BY a.job_id HAVING "
    + " OR ".join(
        f"a.{name} <> sum(coalesce(j.state IN ({_IN[name]}), 0))"
        for name in ("waiting", "running", "succeeded", "failed")
    )
)
# a limit that was lowered later stops nothing
_PARALLEL = (
    "SELECT job_id FROM array a WHERE running > max_parallel"
    " AND NOT EXISTS (SELECT 1 FROM event e WHERE e.job_id = a.job_id AND e.type = 'job.modified')"
)
_AFTER_FINAL = "SELECT job_id FROM event WHERE type IN ('job.succeeded', 'job.failed', 'job.cancelled') GROUP BY job_id HAVING count(*) > 1"
# moves that carry the state in `new`; others (a signal, a hand-over) say nothing of the state
_UNAUDITED = (
    "SELECT j.id FROM job j JOIN (SELECT job_id, new, max(id) FROM event WHERE type IN ('job.submitted', 'job.held', 'job.unheld',"
    " 'job.placed', 'job.running', 'job.suspended', 'job.resumed', 'job.stopping', 'job.lost', 'job.requeued', 'job.preempted', 'job.succeeded', 'job.failed', 'job.cancelled')"
    " GROUP BY job_id) e ON e.job_id = j.id WHERE e.new <> j.state"
)


def _fences(c: sqlite3.Connection) -> Finding:
    """No fence repeats, none is above the counter, and grants in the log rise (invariant 2)."""
    counter = c.execute("SELECT value FROM counter WHERE name = 'fence'").fetchone()[0]
    highest = c.execute("SELECT coalesce(max(fence), 0) FROM lease").fetchone()[0]
    seen = [
        row[0]
        for row in c.execute(
            "SELECT json_extract(args, '$.fence') FROM event WHERE type IN ('lease.granted', 'job.placed') ORDER BY id"
        )
    ]
    if highest > counter:
        return Finding(
            "fences rise (2)", False, f"a lease has fence {highest}, the counter stands at {counter}", "Report this."
        )
    falls = [(a, b) for a, b in itertools.pairwise(seen) if b <= a]
    if falls:
        return Finding(
            "fences rise (2)",
            False,
            f"{len(falls)} grants whose fence does not rise, the first {falls[0]}",
            "Report this.",
        )
    return Finding("fences rise (2)", True, f"{len(seen)} grants, counter at {counter}")


def _caps(c: sqlite3.Connection) -> Finding:
    """Every grant of the log kept cap and reserve as they stood at that moment (invariant 5)."""
    checked = 0
    broken = []
    for row in c.execute("SELECT id, args FROM event WHERE type IN ('lease.granted', 'job.placed')"):
        numbers = json.loads(row["args"])
        cap, agents_cap, units = numbers.get("cap"), numbers.get("agents_cap"), numbers["units"]
        if not units or (cap is None and agents_cap is None):
            continue
        checked += 1
        over_all = cap is not None and numbers["used_units"] + units > cap * 840
        over_agents = agents_cap is not None and numbers["agents_units"] + units > agents_cap * 840
        if over_all or over_agents:
            broken.append(row["id"])
    if broken:
        return Finding(
            "caps at every grant (5)", False, f"{len(broken)} grants above a cap: events {broken[:5]}", "Report this."
        )
    return Finding("caps at every grant (5)", True, f"{checked} grants under a cap")


def _arrays(c: sqlite3.Connection) -> Finding:
    """Of each index of an array exactly one holds: it waits, it is on hold, it was cancelled, or it has a job."""
    broken, checked = [], 0
    for row in c.execute("SELECT * FROM array"):
        checked += 1
        todo, held, dropped = todo_of(row), Indices.parse(row["on_hold"]), Indices.parse(row["dropped"])
        started = Indices.of(
            job[0]
            for job in c.execute(
                "SELECT array_index FROM job WHERE array_id = ? AND array_index IS NOT NULL", (row["job_id"],)
            )
        )
        sets = (todo, held, dropped, started)
        whole = todo | held | dropped | started
        cancelled = c.execute(
            "SELECT count(*) FROM job WHERE array_id = ? AND array_index IS NOT NULL AND state = 'cancelled'",
            (row["job_id"],),
        ).fetchone()[0]
        numbers = (row["pending"], row["held"], row["cancelled"])
        if (
            sum(map(len, sets)) != len(whole)
            or whole != Indices.parse(row["indices"])
            or numbers != (len(todo), len(held), len(dropped) + cancelled)
        ):
            broken.append(row["job_id"])
    if broken:
        return Finding(
            "every index of an array is in one place", False, f"not so: {', '.join(broken[:5])}", "Report this."
        )
    return Finding("every index of an array is in one place", True, f"{checked} arrays")


def _events(c: sqlite3.Connection) -> Finding:
    """The log has no gap that a deletion would leave, and only known types (invariant 11)."""
    count, last = c.execute("SELECT count(*), coalesce(max(id), 0) FROM event").fetchone()
    by_type: defaultdict[str, int] = defaultdict(int)
    for row in c.execute("SELECT type, count(*) FROM event GROUP BY type"):
        by_type[row[0]] = row[1]
    unknown = sorted(set(by_type) - set(EVENT_TYPES))
    if unknown:
        return Finding(
            "events are of known types (11)", False, f"unknown: {', '.join(unknown)}", "A newer Cotenant wrote them."
        )
    if count != last:
        return Finding(
            "events are complete (11)", False, f"{count} rows, the newest is number {last}", "Somebody edited the log."
        )
    return Finding("events are complete (11)", True, f"{count} events")


def _file_system(data_dir: Path) -> Finding:
    kind = file_system_of(data_dir)
    return Finding(
        "file system", kind not in NETWORK, f"{data_dir} is on {kind or 'an unknown file system'}", "Use a local disk."
    )
