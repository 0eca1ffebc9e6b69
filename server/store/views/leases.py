"""Leases as a caller may see them."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from typing import Any

from cotenant.server.clock import iso, iso_or_none
from cotenant.server.errors import NotFound
from cotenant.server.model import answers as a
from cotenant.server.model.caller import Caller, owns
from cotenant.server.model.text import clean, mask
from cotenant.server.store import leases as lease_rows
from cotenant.server.store.views.base import (
    UNDECIDED,
    View,
    blocker_answer,
    checked_limit,
    cursor_id,
    left_s,
    one_of,
    slot_answer,
)

_LIVING = "('queued', 'leased', 'running')"
_FINAL = "('released', 'expired', 'revoked', 'withdrawn')"


class LeaseViews(View):
    """Reads of leases."""

    async def get_lease(self, caller: Caller, lease_id: str) -> a.LeaseAnswer:
        """
        Raises:
            NotFound: no such lease.
        """

        def read(c: sqlite3.Connection) -> tuple[sqlite3.Row | None, list[sqlite3.Row]]:
            return c.execute("SELECT * FROM lease WHERE id = ?", (lease_id,)).fetchone(), lease_rows.slots(c, lease_id)

        row, slots = self._c.db.peek(read)
        if row is None:
            raise NotFound(
                f'there is no lease "{clean(lease_id, 64)}"', code="no_such_lease", hint="list_leases shows yours."
            )
        return self._lease(caller, row, slots)

    async def list_leases(
        self, caller: Caller, *, state: str | None = None, holder: str | None = None, owner: str | None = None, pool: str | None = None,
        host: str | None = None, limit: int = 50, cursor: str | None = None,
    ) -> a.LeaseList:  # fmt: skip
        """Leases, newest first. `state`: active (default), all, or one state."""
        where: list[str] = ["1"]
        values: list[Any] = []
        if state in (None, "active"):
            where.append(f"state IN {_LIVING}")
        elif state != "all":
            one_of(
                state,
                "state",
                ("active", "all", "queued", "leased", "running", "released", "expired", "revoked", "withdrawn"),
            )
            group = _LIVING if state in ("queued", "leased", "running") else _FINAL
            where.append(f"state IN {group} AND state = ?")
            values.append(state)
        for column, value in (("caller", holder), ("owner", owner), ("pool", pool), ("host", host)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if cursor is not None:
            where.append("id < ?")
            values.append(cursor_id(cursor, "lse"))
        limit = checked_limit(limit, 200)
        index = _index(state, holder=holder, owner=owner)

        def read(c: sqlite3.Connection) -> list[tuple[sqlite3.Row, list[sqlite3.Row]]]:
            found = c.execute(
                f"SELECT * FROM lease{index} WHERE {' AND '.join(where)} ORDER BY id DESC LIMIT ?", (*values, limit + 1)
            ).fetchall()
            return [(row, lease_rows.slots(c, row["id"])) for row in found]

        found = await self._c.db.read(read)
        page = [replace(self._lease(caller, row, slots), env=None) for row, slots in found[:limit]]
        return a.LeaseList(page, page[-1].lease_id if len(found) > limit else None)

    def _lease(self, caller: Caller, row: sqlite3.Row, slots: list[sqlite3.Row]) -> a.LeaseAnswer:
        now = self._c.now()
        living = row["state"] in ("leased", "running")
        held = [s for s in slots if s["use"] == "held" or not living]
        inside = self._eyes.sees_inside(caller, owner=row["owner"], name=row["caller"], pool=row["pool"])
        mine = owns(caller, owner=row["owner"], name=row["caller"])
        expires = row["expires_at_ms"] if row["kind"] == "direct" and living else None
        hard_end = row["hard_end_at_ms"] if living else None
        return a.LeaseAnswer(
            lease_id=row["id"],
            fence=row["fence"],
            state=row["state"],
            kind=row["kind"],
            holder=row["caller"],
            owner=row["owner"],
            pool=row["pool"],
            gpus=row["gpus"],
            slots=[slot_answer(s) for s in held],
            purpose=mask(row["purpose"]),
            granted_at=iso_or_none(row["granted_at_ms"]),
            expires_at=iso_or_none(expires),
            expires_in_s=left_s(expires, now),
            hard_end_at=iso_or_none(hard_end),
            hard_end_in_s=left_s(hard_end, now),
            hard_end_from=row["hours_from"],
            draining=living and self._drains(row["id"]),
            job_id=row["job_id"],
            pickup_by=iso_or_none(row["pickup_by_ms"]) if living else None,
            ended_at=iso_or_none(row["ended_at_ms"]),
            # of a job's lease it is the verdict on the attempt
            end_reason=row["end_reason"] if row["kind"] == "direct" or inside else None,
            blockers=[blocker_answer(b) for b in self._c.keeper.waiting.blockers(row["id"]) or (UNDECIDED,)]
            if row["state"] == "queued"
            else [],
            env=self._env(row, held) if mine and living and row["kind"] == "direct" else None,
            near_cap=self._near_cap(row["pool"]),
            simulated=any(self._simulated(s["uuid"]) for s in held),
            cleaning=not living and any(s["use"] in ("cleaning", "occupied") for s in slots),
        )

    def _env(self, row: sqlite3.Row, slots: list[sqlite3.Row]) -> dict[str, str]:
        """What the holder sets for every process that uses the cards."""
        cards = [s for s in slots if s["uuid"] != "cpu"]
        by_uuid = any(s["uuid"].startswith("MIG-") for s in cards)
        host = self._c.settings.hosts.get(row["host"])
        by_uuid = by_uuid or (host is not None and host.cuda_visible_by == "uuid")
        names: list[str] = []
        for s in sorted(cards, key=lambda s: (s["idx"], s["uuid"])):
            live = self._c.live.cards.get(s["uuid"])
            name = s["uuid"] if by_uuid else str(live.state.index if live is not None else s["idx"])
            # a simulated card has no number that CUDA may have: 0 would be a real card, where there is one
            if name not in names and not self._simulated(s["uuid"]):
                names.append(name)
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(names),
            "COTENANT_GPU_UUIDS": ",".join(dict.fromkeys(s["uuid"] for s in cards)),
            "COTENANT_LEASE": row["id"],
            "COTENANT_FENCE": str(row["fence"]),
        }

    def heartbeat_answer(self, row: sqlite3.Row, now: int) -> a.HeartbeatAnswer:
        expires = row["expires_at_ms"] if row["kind"] == "direct" else None
        notice = None
        if row["kind"] == "job":
            notice = "This lease belongs to a job and lives with it; it needs no heartbeat."
        elif (idle := self._idle_notice(row["id"])) is not None:
            notice = idle
        elif self._drains(row["id"]):
            notice = "The lease is draining: finish what you have; it is not renewed past its hard end, and nothing new is given."
        elif expires is not None and expires >= row["hard_end_at_ms"]:
            notice = "The hard end comes before a whole ttl: finish by then, a new lease has to be asked for."
        return a.HeartbeatAnswer(
            row["id"],
            row["fence"],
            row["state"],
            iso_or_none(expires),
            left_s(expires, now),
            iso(row["hard_end_at_ms"]),
            self._drains(row["id"]),
            notice,
        )


def _index(state: str | None, *, holder: str | None, owner: str | None) -> str:
    """The index that a list of leases goes by: SQLite knows nothing of how few live, or are somebody's."""
    if state in (None, "active", "queued", "leased", "running"):
        return " INDEXED BY lease_living"
    if holder is not None:
        return " INDEXED BY lease_by_holder"
    if owner is not None:
        return " INDEXED BY lease_by_owner"
    return "" if state == "all" else " INDEXED BY lease_final"
