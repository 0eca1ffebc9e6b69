"""Cards, hosts, queues and callers."""

from __future__ import annotations

import sqlite3

from cotenant.server.clock import iso, iso_or_none
from cotenant.server.deciding.order import in_order
from cotenant.server.deciding.usage import usage
from cotenant.server.deciding.world import UNITS_PER_CARD, Ask, Booking, World
from cotenant.server.errors import BadRequest
from cotenant.server.live import LiveHost, Seen
from cotenant.server.model import answers as a
from cotenant.server.model.caller import Caller, may_operate
from cotenant.server.model.states import LinkState
from cotenant.server.model.text import clean, mask
from cotenant.server.store import hosts as host_rows
from cotenant.server.store.views.base import (
    PRIORITY_NAMES,
    View,
    cards_up,
    checked_limit,
    one_of,
    units_of,
)

_ONLINE_MS = 120_000


def _why(caller: Caller, live: LiveHost) -> str:
    """Why a host is not well. What a link or hostd last said can name paths and programs: it is for who operates.

    Everybody is told one of a few sentences of ours.
    """
    if may_operate(caller) or not live.reason:
        return live.reason
    if live.needs_floor:
        return "it lost its memory of what it runs: nothing starts until what ran before has ended"
    if live.link == LinkState.CONNECTING:
        return "there is no connection to it yet"
    return "it does not answer; whoever operates this server sees why"


class FleetViews(View):
    """Reads of what there is and who uses it."""

    async def list_gpus(
        self, caller: Caller, *, host: str | None = None, pool: str | None = None, state: str | None = None
    ) -> a.GpuList:
        """Every card: who holds it, until when, and what is on it."""
        gpus, held = self._kept("cards", _cards)
        wanted = [g for g in gpus if host in (None, g["host"]) and pool in (None, g["pool"])]
        cards = [self._gpu(caller, g, held.get(g["uuid"], [])) for g in wanted]
        if state is not None:
            one_of(state, "state", ("free", "held", "cleaning", "occupied", "sick", "lost", "unverified", "unknown"))
            cards = [card for card in cards if card.state == state]
        return a.GpuList(cards, free=sum(1 for card in cards if card.state == "free"), total=len(cards))

    async def find_gpu(self, caller: Caller, host: str, index: int) -> a.GpuAnswer | None:
        """One card by its number on its host now; None where there is none."""
        gpus, held = self._kept("cards", _cards)
        for row in gpus:
            if row["host"] == host:
                live = self._c.live.cards.get(row["uuid"])
                if (live.state.index if live is not None else row["idx"]) == index:
                    return self._gpu(caller, row, held.get(row["uuid"], []))
        return None

    def _gpu(self, caller: Caller, row: sqlite3.Row, held: list[sqlite3.Row]) -> a.GpuAnswer:
        now = self._c.now()
        live = self._c.live.cards.get(row["uuid"])
        seen = live.state if live is not None else None
        link = self._c.live.hosts.get(row["host"])
        first = held[0] if held else None
        if first is not None and len(held) >= row["shares"]:
            state = first["use"]
        elif seen is None or link is None or link.link != "up":
            state = "unknown"
        else:
            state = "free" if seen.state == "ok" else seen.state
        reason = (first["detail"] if first is not None and first["detail"] else None) or (
            seen.reason if seen is not None else None
        )
        if state == "unknown" and link is not None and link.reason:
            reason = _why(caller, link)
        holding = first is not None and first["use"] == "held"
        until = None
        if first is not None and holding and first["job_state"] != "suspended":  # its time limit stands still
            until = min(
                t
                for t in (first["hard_end_at_ms"], first["expires_at_ms"] if first["kind"] == "direct" else None)
                if t is not None
            )
        return a.GpuAnswer(
            host=row["host"],
            index=seen.index if seen is not None else row["idx"],
            uuid=row["uuid"],
            model=row["name"],
            pool=row["pool"],
            memory_mib=row["memory_mib"],
            memory_used_mib=seen.memory_used_mib if seen is not None else None,
            util_pct=seen.util_pct if seen is not None else None,
            temperature_c=seen.temperature_c if seen is not None else None,
            power_w=seen.power_w if seen is not None else None,
            state=state,
            reason=clean(reason, 300) if reason else None,
            lease_id=first["id"] if first is not None else None,
            holder=first["caller"] if first is not None else None,
            owner=first["owner"] if first is not None else None,
            job_id=first["job_id"] if first is not None else None,
            job_name=mask(first["job_name"]) if first is not None and first["job_name"] else None,
            until=iso_or_none(until),
            shares=row["shares"],
            simulated=bool(row["simulated"]),
            observed_at=iso_or_none(live.at_ms if live is not None else None),
            age_s=None if live is None else max(0, (now - live.at_ms) // 1000),
            processes=[
                a.CardProcessAnswer(
                    p.pid, p.user, clean(p.program, 80) if p.program else None, p.memory_mib, p.lease_id
                )
                for p in (seen.processes if seen is not None else ())
            ],
        )

    async def list_hosts(self, caller: Caller) -> a.HostList:
        """Every host: its link, its machine, its driver."""
        hosts, gpus = self._kept("hosts", lambda c: (host_rows.all_hosts(c), host_rows.all_gpus(c)))
        self._c.keeper.refresh(self._c.now())
        slots = self._c.keeper.slots()
        now = self._c.now()
        out = []
        for row in hosts:
            live = self._c.live.hosts.get(row["name"])
            facts = live.facts if live is not None else None
            mine = [g for g in gpus if g["host"] == row["name"]]
            places = [s for s in slots if s.host == row["name"] and s.kind == "cpu"]
            busy = {s.uuid for s in slots if s.host == row["name"] and s.kind == "gpu" and s.state != "free"}
            out.append(
                a.HostAnswer(
                    host=row["name"],
                    link=live.link.value if live is not None else "connecting",
                    mode=row["mode"],
                    reason=clean(row["mode_reason"] or (_why(caller, live) if live is not None else ""), 300) or None,
                    gpus=len(mine),
                    free_gpus=sum(1 for g in mine if g["uuid"] not in busy),
                    cpus=facts.cpus if facts else None,
                    memory_mib=facts.memory_mib if facts else None,
                    memory_available_mib=facts.memory_available_mib if facts else None,
                    disk_free_mib=facts.disk_free_mib if facts else None,
                    load_1m=facts.load_1m if facts else None,
                    driver=facts.driver if facts else None,
                    cuda=facts.cuda if facts else None,
                    nvml=facts.nvml if facts else None,
                    nvml_message=clean(facts.nvml_message, 300) if facts and facts.nvml_message else None,
                    isolation="none",
                    simulated=any(g["simulated"] for g in mine),
                    observed_at=iso_or_none(live.at_ms if live is not None and live.at_ms else None),
                    age_s=None if live is None or not live.at_ms else max(0, (now - live.at_ms) // 1000),
                    cpu_places=len(places),
                    cpu_places_free=sum(1 for s in places if s.state == "free"),
                )
            )
        return a.HostList(out)

    async def list_queues(self, caller: Caller, *, pool: str | None = None, limit: int = 20) -> a.QueueList:
        """The waiting line of each pool, in the order in which it was last decided."""
        if pool is not None and pool not in self._c.settings.pools:
            raise BadRequest(
                f'there is no pool "{clean(pool, 64)}"',
                code="no_such_pool",
                hint=f"Pools: {', '.join(sorted(self._c.settings.pools))}.",
            )
        self._c.keeper.refresh(self._c.now())
        world: World = self._c.keeper.world()
        now = self._c.now()
        names = await self._names([ask.id for ask in world.asks if ask.kind == "job"])
        queues = []
        for name in sorted(self._c.settings.pools) if pool is None else [pool]:
            rules = self._c.keeper.rules.pools[name]
            waiting = in_order(world, now, [ask for ask in world.asks if ask.pool == name])
            use = usage(world, name)
            queues.append(
                a.QueueAnswer(
                    pool=name,
                    order=rules.order,
                    paused=rules.paused,
                    draining=rules.draining,
                    running=sum(1 for h in world.holdings if h.pool == name),
                    waiting=len(waiting),
                    entries=[self._entry(ask, names, now) for ask in waiting[: checked_limit(limit, 500)]],
                    cap=use.cap // UNITS_PER_CARD,
                    used=cards_up(use.used),
                    reserved=rules.reserve,
                    set_by=rules.set_by,
                    reservations=[
                        a.ReservationAnswer(r.id, r.owner, r.cards, iso(r.begin_ms), iso(r.end_ms), r.set_by)
                        for r in sorted(world.reservations, key=lambda r: (r.begin_ms, r.id))
                        if r.pool == name and r.end_ms > now
                    ],
                )
            )
        return a.QueueList(queues)

    def _entry(self, ask: Ask, names: dict[str, str], now: int) -> a.QueueEntry:
        why = self._c.keeper.waiting.blockers(ask.id)
        booking: Booking | None = self._c.keeper.bookings.get(ask.id)
        return a.QueueEntry(
            id=ask.id,
            kind=ask.kind,
            name=mask(names.get(ask.id, "")),
            holder=ask.agent,
            owner=ask.owner,
            gpus=ask.needs.gpus_min,
            priority=PRIORITY_NAMES.get(ask.priority, str(ask.priority)),
            waiting_s=max(0, (now - ask.queued_at_ms) // 1000),
            blocker=why[0].code if why else "",
            why=why[0].message if why else "",
            starts_by=iso(booking.at_ms) if booking is not None else None,
        )

    async def _names(self, ids: list[str]) -> dict[str, str]:
        def read(c: sqlite3.Connection) -> dict[str, str]:
            return {
                row["id"]: row["name"]
                for row in c.execute(
                    "SELECT id, name FROM job WHERE state NOT IN ('succeeded', 'failed', 'cancelled')"
                    " AND state IN ('queued', 'held', 'preempted')"
                )
            }

        return await self._c.db.read(read) if ids else {}

    async def list_agents(self, caller: Caller) -> a.AgentList:
        """Who there is, who is on line, who holds what."""
        callers = await self._c.db.read(lambda c: c.execute("SELECT * FROM caller ORDER BY name").fetchall())
        self._c.keeper.refresh(self._c.now())
        world: World = self._c.keeper.world()
        now = self._c.now()
        out = []
        for row in callers:
            seen = self._c.live.seen.get(row["name"]) or Seen(row["last_seen_at_ms"], row["client"])
            at = seen.at_ms
            # Where somebody works is a path, and no pool's: the rule for all that no pool has set otherwise.
            inside = self._eyes.sees_inside(caller, owner=row["owner"], name=row["name"], pool="")
            held = [h for h in world.holdings if h.agent == row["name"]]
            out.append(
                a.AgentAnswer(
                    name=row["name"],
                    kind=row["kind"],
                    owner=row["owner"],
                    online=at is not None and now - at < _ONLINE_MS,
                    last_seen_at=iso_or_none(at),
                    age_s=None if at is None else max(0, (now - at) // 1000),
                    client=mask(clean(seen.client, 80)) if seen.client else None,
                    host=mask(clean(seen.host, 64)) if seen.host else None,
                    cwd=mask(clean(seen.cwd, 240)) if seen.cwd and inside else None,
                    leases=sum(1 for h in held if h.kind == "direct"),
                    gpus=cards_up(sum(units_of(world, h.slots, self._c) for h in held)),
                    running_jobs=sum(1 for h in held if h.kind == "job"),
                    waiting_jobs=sum(1 for ask in world.asks if ask.agent == row["name"] and ask.kind == "job"),
                )
            )
        return a.AgentList(out)


def _cards(c: sqlite3.Connection) -> tuple[list[sqlite3.Row], dict[str, list[sqlite3.Row]]]:
    """Every card, and by card the slots in use (index slots_in_use) with who has them."""
    held: dict[str, list[sqlite3.Row]] = {}
    for row in c.execute(
        "SELECT s.uuid, s.use, s.detail, l.id, l.caller, l.owner, l.hard_end_at_ms, l.expires_at_ms, l.kind, l.job_id,"
        " j.name AS job_name, j.state AS job_state FROM lease_slot s JOIN lease l ON l.id = s.lease_id LEFT JOIN job j ON j.id = l.job_id"
        " WHERE s.use <> 'freed' ORDER BY s.share"
    ):
        held.setdefault(row["uuid"], []).append(row)
    return host_rows.all_gpus(c), held
