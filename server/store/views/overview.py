"""Everything at one look: what the page and `cotenant top` show, read in a fixed number of queries."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from functools import partial
from typing import Any, Final

from cotenant.server.clock import iso, iso_or_none
from cotenant.server.deciding.order import Order
from cotenant.server.deciding.world import Ask, World
from cotenant.server.model import overview as o
from cotenant.server.model.answers import GpuAnswer, GpuList, HostAnswer, PoolQuota
from cotenant.server.model.caller import Caller
from cotenant.server.model.text import clean, mask
from cotenant.server.store.views.base import PRIORITY_NAMES, UNDECIDED, blocker_answer, left_s, slot_answer
from cotenant.server.store.views.events import EventViews
from cotenant.server.store.views.fleet import FleetViews
from cotenant.server.store.views.quota import QuotaViews

#: Rows of each list; a page longer than this is not read at one look.
MOST_ROWS: Final = 50
MOST_EVENTS: Final = 20
ENDED_WITHIN_MS: Final = 24 * 3600 * 1000
#: A card is looked at every 5 s at least: six misses are no accident.
STALE_S: Final = 30

_WORKING_JOBS = """
SELECT j.*, t.host, t.lease_id, t.started_at_ms AS begun_at_ms, t.suspended_at_ms, t.suspended_ms
FROM job j LEFT JOIN attempt t ON t.job_id = j.id AND t.epoch = j.epoch
WHERE j.state NOT IN ('succeeded', 'failed', 'cancelled')
  AND j.state IN ('provisioning', 'deploying', 'running', 'suspended', 'stopping', 'lost')
ORDER BY coalesce(j.started_at_ms, j.queued_at_ms) DESC, j.id DESC
"""
_DIRECT_LEASES = """
SELECT * FROM lease WHERE kind = 'direct' AND state IN ('queued', 'leased', 'running') AND state <> 'queued'
ORDER BY granted_at_ms DESC, id DESC
"""
_ENDED = """
SELECT state, failure_class, caller, owner, pool, count(*) AS jobs FROM job WHERE ended_at_ms >= ?
GROUP BY state, failure_class, caller, owner, pool
"""


class OverviewViews(QuotaViews, FleetViews, EventViews):
    """The read of the whole."""

    async def overview(self, caller: Caller) -> o.Overview:
        """What there is, who has it, who waits and why, what ended and what happened."""
        now: int = self._c.now()
        since = now - ENDED_WITHIN_MS

        def read(c: sqlite3.Connection) -> tuple[list[sqlite3.Row], ...]:
            waiting = (
                "SELECT id, name, state FROM job WHERE state NOT IN ('succeeded', 'failed', 'cancelled')"
                " AND state IN ('queued', 'held', 'preempted')"
            )
            slots = "SELECT * FROM lease_slot WHERE use <> 'freed' ORDER BY host, idx, uuid, share"
            queries: tuple[tuple[str, tuple[Any, ...]], ...] = (
                (_WORKING_JOBS, ()), (_DIRECT_LEASES, ()), (slots, ()), (waiting, ()), (_ENDED, (since,)),
            )  # fmt: skip
            return tuple(c.execute(sql, values).fetchall() for sql, values in queries)

        quota = await self.quota_status(caller)
        cards = await self.list_gpus(caller)
        hosts = (await self.list_hosts(caller)).hosts
        events = (await self.list_events(caller, limit=MOST_EVENTS)).events
        jobs, leases, slot_rows, waiting, ended = await self._c.db.read(read)

        slots: dict[str, list[sqlite3.Row]] = {}
        for row in slot_rows:
            slots.setdefault(row["lease_id"], []).append(row)
        working = [self._job_works(row, slots.get(row["lease_id"], []), now) for row in jobs]
        working += [self._lease_works(row, slots.get(row["id"], []), now) for row in leases]
        # After its last await this reads memory only: what waits is as of one moment.
        world: World = self._c.keeper.world()
        named = {row["id"]: row for row in waiting}
        asks = [ask for ask in world.asks if ask.kind == "claim" or ask.id in named]
        key = Order(world, now).key
        order = sorted(asks, key=lambda ask: (ask.pool, key(ask)))
        specs = self._c.db.peek(partial(_specs, ids=[ask.id for ask in order[:MOST_ROWS]]))
        links = {host.host: host.link for host in hosts}
        pools = [self._pool_now(pool, cards.gpus, links, world) for pool in quota.pools]
        return o.Overview(
            at=iso(now),
            headline=_headline(cards, all(pool.known for pool in pools), len(working), len(order)),
            alerts=[*_hosts_away(hosts), *_cards_amiss(cards.gpus, links)],
            me=quota.me,
            pools=pools,
            gpus=cards.gpus,
            gpus_free=cards.free,
            gpus_total=cards.total,
            gpus_stale=[gpu.uuid for gpu in cards.gpus if _stale(gpu, links.get(gpu.host, ""))],
            hosts=hosts,
            working=working[:MOST_ROWS],
            working_total=len(working),
            waiting=[self._waiter(ask, named.get(ask.id), specs.get(ask.id), now) for ask in order[:MOST_ROWS]],
            waiting_total=len(order),
            ended=self._ended(caller, ended, since),
            events=list(reversed(events)),
        )

    def _pool_now(self, quota: PoolQuota, gpus: list[GpuAnswer], links: dict[str, str], world: World) -> o.PoolNow:
        mine = [gpu for gpu in gpus if gpu.pool == quota.pool]
        return o.PoolNow(
            pool=quota.pool,
            cards=len(mine),
            free=sum(1 for gpu in mine if gpu.state == "free"),
            known=all(links.get(gpu.host) == "up" for gpu in mine),
            cap=quota.cap,
            used=quota.used,
            reserved=quota.reserved,
            running=sum(1 for holding in world.holdings if holding.pool == quota.pool),
            waiting=quota.waiting,
            paused=quota.paused,
            near_cap=quota.near_cap,
            simulated=quota.simulated,
        )

    def _job_works(self, row: sqlite3.Row, slots: list[sqlite3.Row], now: int) -> o.Work:
        begun = row["begun_at_ms"]
        # while it is suspended its time limit stands still, and nobody knows its end
        stands = row["suspended_at_ms"] is not None
        until = None if begun is None or stands else begun + row["hours_ms"] + row["suspended_ms"]
        return o.Work(
            id=row["id"],
            kind="job",
            state=row["state"],
            name=mask(clean(row["name"], 200)),
            holder=row["caller"],
            owner=row["owner"],
            pool=row["pool"],
            priority=PRIORITY_NAMES.get(row["priority"], str(row["priority"])),
            gpus=len({slot["uuid"] for slot in slots} - {"cpu"}),
            host=row["host"],
            slots=[slot_answer(slot) for slot in slots],
            since=iso_or_none(begun),
            for_s=None if begun is None else max(0, (now - begun) // 1000),
            until=iso_or_none(until),
            left_s=left_s(until, now),
            draining=row["lease_id"] is not None and self._drains(row["lease_id"]),
            simulated=any(self._simulated(slot["uuid"]) for slot in slots),
            purpose=_purpose(row["spec"]),
        )

    def _lease_works(self, row: sqlite3.Row, slots: list[sqlite3.Row], now: int) -> o.Work:
        until = min(row["hard_end_at_ms"], row["expires_at_ms"] or row["hard_end_at_ms"])
        return o.Work(
            id=row["id"],
            kind="lease",
            state=row["state"],
            name=mask(clean(row["purpose"], 200)),
            holder=row["caller"],
            owner=row["owner"],
            pool=row["pool"],
            priority=PRIORITY_NAMES.get(row["priority"], str(row["priority"])),
            gpus=row["gpus"],
            host=row["host"],
            slots=[slot_answer(slot) for slot in slots],
            since=iso_or_none(row["granted_at_ms"]),
            for_s=max(0, (now - row["granted_at_ms"]) // 1000),
            until=iso(until),
            left_s=left_s(until, now),
            draining=self._drains(row["id"]),
            simulated=any(self._simulated(slot["uuid"]) for slot in slots),
        )

    def _waiter(self, ask: Ask, row: sqlite3.Row | None, spec: str | None, now: int) -> o.Waiter:
        why = self._c.keeper.waiting.blockers(ask.id) or (UNDECIDED,)
        return o.Waiter(
            id=ask.id,
            kind=ask.kind,
            state=row["state"] if row is not None else "queued",
            name=mask(clean(row["name"], 200)) if row is not None else "",
            holder=ask.agent,
            owner=ask.owner,
            pool=ask.pool,
            priority=PRIORITY_NAMES.get(ask.priority, str(ask.priority)),
            gpus=ask.needs.gpus_min,
            since=iso(ask.queued_at_ms),
            waiting_s=max(0, (now - ask.queued_at_ms) // 1000),
            blocker=blocker_answer(why[0]),
            purpose=_purpose(spec),
        )

    def _ended(self, caller: Caller, rows: list[sqlite3.Row], since: int) -> o.Ended:
        by_state: Counter[str] = Counter()
        by_class: Counter[str | None] = Counter()
        for row in rows:
            by_state[row["state"]] += row["jobs"]
            if row["state"] == "failed":
                # why another owner's job failed is a verdict: for those who may look inside
                inside = self._eyes.sees_inside(caller, owner=row["owner"], name=row["caller"], pool=row["pool"])
                by_class[row["failure_class"] if inside else None] += row["jobs"]
        failures = sorted(by_class.items(), key=lambda item: (-item[1], item[0] or "~"))
        return o.Ended(
            since=iso(since),
            succeeded=by_state["succeeded"],
            failed=by_state["failed"],
            cancelled=by_state["cancelled"],
            failures=[o.FailureCount(name, count) for name, count in failures],
        )


def _specs(c: sqlite3.Connection, ids: list[str]) -> dict[str, str]:
    if not ids:
        return {}
    marks = ", ".join("?" * len(ids))
    return {row["id"]: row["spec"] for row in c.execute(f"SELECT id, spec FROM job WHERE id IN ({marks})", ids)}


def _purpose(spec: str | None) -> str:
    return mask(clean(json.loads(spec).get("purpose", ""), 200)) if spec is not None else ""


def _headline(cards: GpuList, known: bool, working: int, waiting: int) -> str:
    if cards.total:
        said = f"{cards.free} of {cards.total} {'card' if cards.total == 1 else 'cards'} free"
        said += "" if known else ", some unknown"
    else:
        said = "No cards"
    return (
        f"{said}, {f'{working} at work' if working else 'nothing at work'},"
        f" {f'{waiting} waiting' if waiting else 'nobody waits'}"
    )


def _stale(gpu: GpuAnswer, link: str) -> bool:
    """Simulated cards are not looked at again: nothing on them moves by itself."""
    if link != "up" or gpu.age_s is None:
        return True
    return gpu.age_s > STALE_S and not gpu.simulated


def _hosts_away(hosts: list[HostAnswer]) -> list[o.Alert]:
    found = []
    for host in hosts:
        if host.link != "up":
            what = f"the link is {host.link}; what is shown of this host may be old, and nothing starts on it"
            severity = "critical" if host.link == "lost" else "warning"
            found.append(o.Alert(severity, f"Host {host.host}", what, host.reason))
        elif host.mode != "ready":
            found.append(
                o.Alert("warning", f"Host {host.host}", f"the host is {host.mode.replace('_', ' ')}", host.reason)
            )
    return found


def _cards_amiss(gpus: list[GpuAnswer], links: dict[str, str]) -> list[o.Alert]:
    """Cards that nobody can get although their host answers."""
    return [
        o.Alert(
            "critical" if gpu.state in ("sick", "lost") else "warning",
            f"Card {gpu.host}:{gpu.index}",
            gpu.state,
            gpu.reason,
        )
        for gpu in gpus
        if gpu.state in ("sick", "lost", "occupied", "unverified") and links.get(gpu.host) == "up"
    ]
