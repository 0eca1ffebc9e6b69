"""Idle leases: their holders are told first, then they are taken back. Who is idle is decided in `deciding.idle`."""

from __future__ import annotations

from typing import Any

from cotenant.server.control.context import Context
from cotenant.server.control.leases import Leases
from cotenant.server.control.preempting import Preempting
from cotenant.server.control.stopping import order_stop
from cotenant.server.deciding.world import Notice, Reclaim
from cotenant.server.model.caller import LOOP
from cotenant.server.model.states import LeaseState
from cotenant.server.store import events, jobs, leases
from cotenant.server.store.db import Tx


class Idling:
    """Carries out what was decided over idle leases."""

    def __init__(self, context: Context, leases_: Leases, preempting: Preempting) -> None:
        self._context = context
        self._leases = leases_
        self._preempting = preempting

    async def notice(self, decision: Notice) -> None:
        """Tell the holder, by an event and in its answers, that it is idle, who waits and what it costs."""
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> None:
            row = leases.get(tx, decision.lease_id)
            if row["state"] not in ("leased", "running"):
                return
            leases.update(tx, row["id"], idle_notice_ms=now)
            if row["job_id"] is not None:
                tx.changed.add(f"cotenant://jobs/{row['job_id']}")
            args: dict[str, Any] = {
                "idle_s": decision.idle_s,
                "waiting": list(decision.waiting),
                "gpu_seconds_idle": decision.idle_s * row["units"] // 840,
            }
            events.append(tx, "lease.idle", LOOP, now, owner=row["owner"], severity="warning", lease_id=row["id"],
                          job_id=row["job_id"], host=row["host"], pool=row["pool"], reason=f"no sign of work for {decision.idle_s} s",
                          args=args)  # fmt: skip

        await context.db.write(write)

    async def reclaim(self, decision: Reclaim) -> None:
        """Take an idle lease back: a direct one is revoked, a job is evicted, with time to save where it can."""
        context, now = self._context, self._context.now()
        row = context.db.peek(lambda c: leases.get(Tx(c), decision.lease_id))
        if row["state"] not in ("leased", "running") or row["idle_notice_ms"] is None:
            return
        reason = f"idle: no sign of work for {decision.idle_s} s while others waited"
        if row["kind"] == "direct":
            await self._leases.end(LOOP, row["id"], LeaseState.REVOKED, reason)
            context.wake()
            return
        job_id = str(row["job_id"])
        if await self._preempting.evict(LOOP, job_id, reason):
            return

        def write(tx: Tx) -> None:
            job = jobs.get(tx, job_id)
            if job["state"] == "running":
                order_stop(tx, LOOP, job, "evict", now, why=reason)

        await context.db.write(write)
        await self._preempting.carry_out_stop(job_id)
        context.wake()
