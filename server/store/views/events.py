"""The event log as a caller may see it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from cotenant.server.clock import iso
from cotenant.server.model import answers as a
from cotenant.server.model.caller import Caller, may_operate
from cotenant.server.model.events import EVENT_TYPES, SEVERITIES
from cotenant.server.model.text import clean, mask
from cotenant.server.store.views.base import (
    View,
    checked_limit,
    one_of,
    time_ms,
)


class EventViews(View):
    """Reads of events."""

    async def list_events(
        self, caller: Caller, *, since: str | None = None, types: Iterable[str] | None = None, severity: str | None = None,
        job_id: str | None = None, run_id: str | None = None, host: str | None = None, limit: int = 100,
    ) -> a.EventList:  # fmt: skip
        """Events after `since` (a cursor, or an ISO time), oldest first; without it the newest `limit`.

        `types` may end in ``.*``. `severity` is the least. The cursor goes on where this answer ends, even when it is empty.
        """
        where: list[str] = ["1"]
        values: list[Any] = []
        index = ""  # SQLite cannot know how few there are of what is looked for
        if since is not None and since.isascii() and since.isdigit() and len(since) <= 18:
            where.append("e.id > ?")
            values.append(int(since))
        elif since is not None:
            where.append("e.at_ms >= ?")
            values.append(time_ms(since))
            index = "event_by_time"
        if severity is not None:
            one_of(severity, "severity", SEVERITIES)
            if severity != "info":
                # as the conditions of the partial indexes say it
                where.append("e.severity = 'critical'" if severity == "critical" else "e.severity <> 'info'")
                index = index or ("event_critical" if severity == "critical" else "event_notable")
        for column, value in (("job_id", job_id), ("run_id", run_id), ("host", host)):
            if value is not None:
                where.append(f"e.{column} = ?")
                values.append(value)
        index = "event_by_job" if job_id is not None else "event_by_run" if run_id is not None else index
        limit = checked_limit(limit, 1000)
        newest = since is None
        order = "DESC" if newest else "ASC"
        known = _types(types) if types else []
        if known and not index:
            # each type by its own index: one that is rare is found at once, and of one that is frequent no more is read
            one = f"SELECT e.id FROM event e WHERE e.type = ? AND {' AND '.join(where)} ORDER BY e.id {order} LIMIT ?"
            values = [value for kind in known for value in (kind, *values, limit)]
            where = [f"e.id IN ({' UNION ALL '.join([f'SELECT * FROM ({one})'] * len(known))})"]
        elif known:
            where.append(f"e.type IN ({', '.join('?' * len(known))})")
            values += known

        def read(c: sqlite3.Connection) -> tuple[list[sqlite3.Row], int]:
            found = c.execute(
                # whose work it is about decides who sees inside, not who did it
                "SELECT e.*, coalesce(j.caller, l.caller, e.caller) AS holder, coalesce(e.pool, j.pool, l.pool, '') AS in_pool"
                f" FROM event e{f' INDEXED BY {index}' if index else ''} LEFT JOIN job j ON j.id = e.job_id"
                f" LEFT JOIN lease l ON l.id = e.lease_id WHERE {' AND '.join(where)} ORDER BY e.id {order} LIMIT ?",
                (*values, limit),
            ).fetchall()
            last = c.execute("SELECT coalesce(max(id), 0) FROM event").fetchone()[0]
            return found, int(last)

        found, last = await self._c.db.read(read)
        if newest:
            found.reverse()
        cursor = str(found[-1]["id"] if len(found) == limit and not newest else last)
        return a.EventList([self._event(caller, row) for row in found], cursor)

    def _event(self, caller: Caller, row: sqlite3.Row) -> a.EventAnswer:
        inside = self._eyes.sees_inside(caller, owner=row["owner"], name=row["holder"], pool=row["in_pool"])
        if row["type"].startswith("host."):
            # why a link broke is told in the words of programs, with their paths: it is for who operates, see list_hosts
            inside = may_operate(caller)
        return a.EventAnswer(
            id=row["id"],
            at=iso(row["at_ms"]),
            type=row["type"],
            severity=row["severity"],
            caller=row["caller"],
            owner=row["owner"],
            door=row["door"],
            job_id=row["job_id"],
            attempt_id=row["attempt_id"],
            run_id=row["run_id"],
            lease_id=row["lease_id"],
            host=row["host"],
            pool=row["pool"],
            old=row["old"],
            new=row["new"],
            # a reason may quote what somebody wrote about his own work
            reason=mask(clean(row["reason"], 300)) if row["reason"] and inside else None,
            args=json.loads(row["args"]) if inside else {},
        )


def _types(wanted: Iterable[str]) -> list[str]:
    """The types that are meant, each once; ``job.*`` means all that begin so."""
    out: list[str] = []
    for kind in wanted:
        out += [known for known in EVENT_TYPES if known.startswith(kind[:-1])] if kind.endswith(".*") else [kind]
    # of a kind that there is not there are no events, which is not the same as any
    return list(dict.fromkeys(out)) or ["none"]
