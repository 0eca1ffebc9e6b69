"""Suspending and resuming: an order that is on record is passed to the host, until the host has confirmed it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from typing import Final
from weakref import WeakValueDictionary

from cotenant.server.backends.base import HostRefused
from cotenant.server.control import outcomes, standing
from cotenant.server.control.context import Context
from cotenant.server.errors import Conflict, OutcomeUnknown, Unreachable
from cotenant.server.model.caller import LOOP
from cotenant.server.model.text import clean
from cotenant.server.store import events, jobs, ranks
from cotenant.server.store.db import Tx

log = logging.getLogger(__name__)

#: How long after a host did not confirm an order it is asked again.
AGAIN_S: Final = 5.0
#: Refusals that say only that the attempt is not running (any more): its end is reported by itself.
_OVER: Final = frozenset({"not_running", "unknown_attempt", "not_greeted", "superseded"})


class Suspending:
    """Carries orders out. Of one job one is under way at a time, so that none overtakes another."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._again_s: dict[str, float] = {}  # attempt -> when it is asked again

    async def carry_out(self, job_id: str) -> None:
        """Pass the order that stands for this job to its host. A host that is away hears of it when it is back.

        Raises:
            Conflict: the host cannot do it; the order is off.
        """
        async with self._locks.setdefault(job_id, asyncio.Lock()):
            row = self._context.db.peek(lambda c: _ordered(c, job_id))
            if row is None:
                return
            seats = self._context.db.peek(lambda c: ranks.seats(c, row["attempt_id"]))
            asked = await asyncio.gather(*(self._ask(row, at, host) for at, host in seats))
            if all(asked):
                await self._confirmed(row)
                self._again_s.pop(row["attempt_id"], None)
            else:
                self._again_s[row["attempt_id"]] = self._context.clock.monotonic_s() + AGAIN_S

    async def _ask(self, row: sqlite3.Row, at: str, host: str) -> bool:
        """Ask one host of the attempt, where it is called `at`; True once it has done what was ordered, or it is over there.

        Raises:
            Conflict: the host cannot; the order is off.
        """
        what, context = row["suspend_asked"], self._context
        link = context.hosts.get(host)
        if link is None:
            return False
        try:
            if what == "suspend":
                report = await link.suspend(at, standing.allowance_ms(row) / 1000)
            else:
                report = await link.resume(at)
        except (Unreachable, OutcomeUnknown) as error:
            log.info("host %s has not confirmed to %s %s yet: %s", host, what, at, error)
            return False
        except HostRefused as refused:
            if refused.code in _OVER:
                log.info("host %s: %s", host, refused.message)
                return False
            await self._give_up(row, refused)
            raise Conflict(refused.message, code=refused.code, hint="get_job shows its state.") from refused
        now = context.now()
        await context.db.write(lambda tx: outcomes.take(tx, context, host, report, now, fresh=True))
        return report.suspended == (what == "suspend") or report.state not in outcomes.LIVING

    async def _confirmed(self, row: sqlite3.Row) -> None:
        """All of its hosts have done it: the order is carried out."""
        what = row["suspend_asked"]

        def write(tx: Tx) -> None:
            attempt = jobs.find_attempt(tx, row["attempt_id"])
            if attempt is not None and attempt["suspend_asked"] == what:
                jobs.update_attempt(tx, row["attempt_id"], suspend_asked="")
                if what == "resume":
                    jobs.update(tx, row["id"], held_reason=None)

        await self._context.db.write(write)
        self._context.wake()

    async def _give_up(self, row: sqlite3.Row, refused: HostRefused) -> None:
        now = self._context.now()

        def write(tx: Tx) -> None:
            jobs.update_attempt(tx, row["attempt_id"], suspend_asked="")
            events.append(
                tx, "job.suspend_failed", LOOP, now, owner=row["owner"], severity="warning", job_id=row["id"], attempt_id=row["attempt_id"],
                host=row["host"], pool=row["pool"], old=row["suspend_asked"], reason=clean(f"{refused.code}: {refused.message}", 300),
            )  # fmt: skip

        await self._context.db.write(write)

    def due(self, connection: sqlite3.Connection) -> list[str]:
        """Jobs with an order that no host has confirmed and that may be asked about now."""
        now = self._context.clock.monotonic_s()
        rows = connection.execute("SELECT id, job_id FROM attempt WHERE suspend_asked <> '' AND state = 'running'")
        return [row["job_id"] for row in rows if self._again_s.get(row["id"], 0.0) <= now]


def _ordered(connection: sqlite3.Connection, job_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute(
        "SELECT j.id, j.owner, j.pool, j.spec, a.id AS attempt_id, a.host, a.suspend_asked FROM attempt a"
        " JOIN job j ON j.id = a.job_id WHERE a.job_id = ? AND a.state = 'running' AND a.suspend_asked <> ''"
        " AND j.state IN ('running', 'suspended')",
        (job_id,),
    ).fetchone()
    return row
