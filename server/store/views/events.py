"""The event log as a caller may see it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from cotenant.server.clock import iso
from cotenant.server.model import answers as a
from cotenant.server.model.caller import Caller
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
        if since is not None and since.isascii() and since.isdigit() and len(since) <= 18:
            where.append("e.id > ?")
            values.append(int(since))
        elif since is not None:
            where.append("e.at_ms >= ?")
            values.append(time_ms(since))
        if types:
            parts = []
            for kind in types:
                if kind.endswith(".*"):
                    parts.append("e.type GLOB ?")
                    values.append(kind.replace("[", "[[]").replace("?", "[?]"))
                else:
                    parts.append("e.type = ?")
                    values.append(kind)
            where.append(f"({' OR '.join(parts)})")
        if severity is not None:
            order = ("info", "warning", "critical")
            one_of(severity, "severity", order)
            least = order[order.index(severity) :]
            where.append(f"e.severity IN ({', '.join('?' * len(least))})")
            values.extend(least)
        for column, value in (("job_id", job_id), ("run_id", run_id), ("host", host)):
            if value is not None:
                where.append(f"e.{column} = ?")
                values.append(value)
        limit = checked_limit(limit, 1000)
        newest = since is None

        def read(c: sqlite3.Connection) -> tuple[list[sqlite3.Row], int]:
            order = "DESC" if newest else "ASC"
            found = c.execute(
                # whose work it is about decides who sees inside, not who did it
                "SELECT e.*, coalesce(j.caller, l.caller, e.caller) AS holder, coalesce(e.pool, j.pool, l.pool, '') AS in_pool"
                " FROM event e LEFT JOIN job j ON j.id = e.job_id"
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
