"""The read side of every door: rows and live observations as frozen answers, seen with one caller's eyes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from cotenant.server.clock import iso, iso_or_none
from cotenant.server.deciding.blockers import room_now
from cotenant.server.deciding.usage import usage
from cotenant.server.deciding.world import UNITS_PER_CARD, Ask, Blocker, SlotKey, World
from cotenant.server.errors import BadRequest, NotFound
from cotenant.server.model import answers as a
from cotenant.server.model.caller import Caller, may_operate, owns
from cotenant.server.model.spec import JobSpec
from cotenant.server.model.states import JOB_FINAL, PRIORITIES, TASK_STATUS, JobState
from cotenant.server.model.text import clean, mask
from cotenant.server.store import hosts as host_rows
from cotenant.server.store import leases as lease_rows

_PRIORITY_NAMES = {number: name for name, number in PRIORITIES.items()}
_ONLINE_MS = 120_000
_ACTIVE_LEASES = ("queued", "leased", "running")
_JOB_GROUPS = {
    "active": "j.state NOT IN ('succeeded', 'failed', 'cancelled')",
    "waiting": "j.state IN ('queued', 'held', 'preempted')",
    "running": "j.state IN ('running', 'suspended')",
    "final": "j.state IN ('succeeded', 'failed', 'cancelled')",
    "all": "1",
}


class Eyes(Protocol):
    """Who may look inside what; `control.auth.Auth` decides."""

    def sees_inside(self, caller: Caller, *, owner: str, name: str, pool: str) -> bool: ...


class Views:
    """Every read of every door. Needs the context for clock, world and live observations only."""

    def __init__(self, context: Any, eyes: Eyes) -> None:
        self._c = context
        self._eyes = eyes
        self._near: tuple[int, dict[str, bool]] | None = None  # pools near their cap, by the keeper's version

    # ---- leases

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
            where.append("state IN ('queued', 'leased', 'running')")
        elif state != "all":
            _one_of(
                state,
                "state",
                ("active", "all", "queued", "leased", "running", "released", "expired", "revoked", "withdrawn"),
            )
            where.append("state = ?")
            values.append(state)
        for column, value in (("caller", holder), ("owner", owner), ("pool", pool), ("host", host)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if cursor is not None:
            where.append("id < ?")
            values.append(_cursor_id(cursor, "lse"))
        limit = _limit(limit, 200)

        def read(c: sqlite3.Connection) -> list[tuple[sqlite3.Row, list[sqlite3.Row]]]:
            found = c.execute(
                f"SELECT * FROM lease WHERE {' AND '.join(where)} ORDER BY id DESC LIMIT ?", (*values, limit + 1)
            ).fetchall()
            return [(row, lease_rows.slots(c, row["id"])) for row in found]

        found = await self._c.db.read(read)
        page = [replace(self._lease(caller, row, slots), env=None) for row, slots in found[:limit]]
        return a.LeaseList(page, page[-1].lease_id if len(found) > limit else None)

    def _lease(self, caller: Caller, row: sqlite3.Row, slots: list[sqlite3.Row]) -> a.LeaseAnswer:
        now = self._c.now()
        living = row["state"] in ("leased", "running")
        held = [s for s in slots if s["use"] != "freed" or not living]
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
            slots=[_slot(s) for s in held],
            purpose=mask(row["purpose"]),
            granted_at=iso_or_none(row["granted_at_ms"]),
            expires_at=iso_or_none(expires),
            expires_in_s=_left(expires, now),
            hard_end_at=iso_or_none(hard_end),
            hard_end_in_s=_left(hard_end, now),
            hard_end_from=row["hours_from"],
            draining=bool(row["draining"]),
            job_id=row["job_id"],
            pickup_by=iso_or_none(row["pickup_by_ms"]) if living else None,
            ended_at=iso_or_none(row["ended_at_ms"]),
            end_reason=row["end_reason"],
            blockers=[_blocker(b) for b in self._c.blockers.get(row["id"], ())] if row["state"] == "queued" else [],
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
        by_uuid = by_uuid or (
            host is not None and host.cuda_visible_by == "uuid" and not any(self._simulated(s["uuid"]) for s in cards)
        )
        names = []
        for s in sorted(cards, key=lambda s: (s["idx"], s["uuid"])):
            live = self._c.live.cards.get(s["uuid"])
            name = s["uuid"] if by_uuid else str(live.state.index if live is not None else s["idx"])
            if name not in names:
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
        elif row["draining"]:
            notice = "The lease is draining: finish what you have; it is not renewed past its hard end."
        elif expires is not None and expires >= row["hard_end_at_ms"]:
            notice = "The hard end comes before a whole ttl: finish by then, a new lease has to be asked for."
        return a.HeartbeatAnswer(
            row["id"],
            row["fence"],
            row["state"],
            iso_or_none(expires),
            _left(expires, now),
            iso(row["hard_end_at_ms"]),
            bool(row["draining"]),
            notice,
        )

    # ---- quota

    async def quota_status(self, caller: Caller) -> a.QuotaStatus:
        """Caps, use, reserve, and what this caller may start now."""
        await self._c.keeper.refresh(self._c.now())
        world: World = self._c.keeper.world()
        pools = [
            self._pool(caller, world, name)
            for name in sorted(self._c.settings.pools)
            if not caller.pools or name in caller.pools
        ]
        mine = [h for h in world.holdings if h.agent == caller.name and h.owner == caller.owner]
        owned = [h for h in world.holdings if h.owner == caller.owner]
        owner_rules = self._c.settings.owners.get(caller.owner)
        me = a.MyQuota(
            name=caller.name,
            kind=caller.kind,
            owner=caller.owner,
            scopes=sorted(caller.scopes),
            used_by_me=_cards_up(sum(_units(world, h.slots, self._c) for h in mine)),
            used_by_owner=_cards_up(sum(_units(world, h.slots, self._c) for h in owned)),
            owner_cap=owner_rules.cap if owner_rules else None,
            running_jobs=sum(1 for h in mine if h.kind == "job"),
            waiting_jobs=sum(1 for ask in world.asks if ask.agent == caller.name and ask.kind == "job"),
            leases=sorted(h.id for h in mine if h.kind == "direct"),
            max_priority=_PRIORITY_NAMES.get(caller.max_priority, "high"),
            pools=list(caller.pools) or None,
        )
        can = sum(p.you_can_start for p in pools)
        advice = (
            f"You can start {can} card{'s' if can != 1 else ''} now."
            if can
            else 'No card for you now: submit_job queues, and so does acquire_lease with when_full="queue".'
        )
        return a.QuotaStatus(pools, me, advice)

    def _pool(self, caller: Caller, world: World, name: str) -> a.PoolQuota:
        rules = self._c.settings.pools[name]
        use = usage(world, name)
        slots = [s for s in world.slots if s.pool == name and s.kind == "gpu"]
        by_card: dict[tuple[str, str], list[str]] = {}
        for slot in slots:
            by_card.setdefault((slot.host, slot.uuid), []).append(slot.state)
        up = {h.name for h in world.hosts if h.link == "up"}
        free = sum(
            1 for (host, _), states in by_card.items() if host in up and all(state == "free" for state in states)
        )
        limit = use.cap if caller.human else use.agents_cap
        used_of_kind = use.used if caller.human else max(use.used_by_agents, use.used - (use.cap - use.agents_cap))
        return a.PoolQuota(
            pool=name,
            cap=use.cap // UNITS_PER_CARD,
            used=_cards_up(use.used),
            reserved=rules.reserve,
            available=max(0, (limit - used_of_kind) // UNITS_PER_CARD),
            you_can_start=room_now(world, caller.owner, caller.name, caller.human, name),
            free_cards=free,
            near_cap=self._near_cap(name),
            owner_cap=rules.owner_cap,
            agent_cap=rules.agent_cap,
            waiting=sum(1 for ask in world.asks if ask.pool == name),
            paused=rules.paused,
            order=rules.order,
            default_hours=rules.default_hours,
            set_by=rules.set_by,
            simulated=any(self._simulated(s.uuid) for s in slots),
        )

    def _near_cap(self, pool: str) -> bool:
        """Told from 90 % of the cap on (design section 6)."""
        if pool not in self._c.settings.pools:
            return False
        keeper = self._c.keeper
        if self._near is None or self._near[0] != keeper.version:
            self._near = (keeper.version, {})
        known = self._near[1].get(pool)
        if known is None:
            use = usage(keeper.world(), pool)
            known = self._near[1][pool] = use.cap > 0 and use.used * 10 >= use.cap * 9
        return known

    # ---- fleet

    async def list_gpus(
        self, caller: Caller, *, host: str | None = None, pool: str | None = None, state: str | None = None
    ) -> a.GpuList:
        """Every card: who holds it, until when, and what is on it."""

        def read(c: sqlite3.Connection) -> tuple[list[sqlite3.Row], dict[str, list[sqlite3.Row]]]:
            held: dict[str, list[sqlite3.Row]] = {}
            for row in c.execute(
                "SELECT s.uuid, s.use, s.detail, l.id, l.caller, l.owner, l.hard_end_at_ms, l.expires_at_ms, l.kind, l.job_id,"
                " j.name AS job_name FROM lease_slot s JOIN lease l ON l.id = s.lease_id LEFT JOIN job j ON j.id = l.job_id"
                " WHERE s.use <> 'freed' ORDER BY s.share"
            ):
                held.setdefault(row["uuid"], []).append(row)
            return host_rows.all_gpus(c), held

        gpus, held = await self._c.db.read(read)
        wanted = [g for g in gpus if host in (None, g["host"]) and pool in (None, g["pool"])]
        cards = [self._gpu(g, held.get(g["uuid"], [])) for g in wanted]
        if state is not None:
            _one_of(state, "state", ("free", "held", "cleaning", "occupied", "sick", "lost", "unverified", "unknown"))
            cards = [card for card in cards if card.state == state]
        return a.GpuList(cards, free=sum(1 for card in cards if card.state == "free"), total=len(cards))

    def _gpu(self, row: sqlite3.Row, held: list[sqlite3.Row]) -> a.GpuAnswer:
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
            reason = link.reason
        holding = first is not None and first["use"] == "held"
        until = None
        if first is not None and holding:
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

        def read(c: sqlite3.Connection) -> tuple[list[sqlite3.Row], list[sqlite3.Row]]:
            return host_rows.all_hosts(c), host_rows.all_gpus(c)

        hosts, gpus = await self._c.db.read(read)
        await self._c.keeper.refresh(self._c.now())
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
                    reason=row["mode_reason"] or (live.reason if live is not None else "") or None,
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
        await self._c.keeper.refresh(self._c.now())
        world: World = self._c.keeper.world()
        now = self._c.now()
        names = await self._names([ask.id for ask in world.asks if ask.kind == "job"])
        queues = []
        for name in sorted(self._c.settings.pools) if pool is None else [pool]:
            rules = self._c.settings.pools[name]
            waiting = sorted(
                (ask for ask in world.asks if ask.pool == name),
                key=lambda ask: (-ask.priority, not ask.resumed, ask.queued_at_ms, ask.id),
            )
            entries = [
                a.QueueEntry(
                    id=ask.id,
                    kind=ask.kind,
                    name=mask(names.get(ask.id, "")),
                    holder=ask.agent,
                    owner=ask.owner,
                    gpus=ask.needs.gpus_min,
                    priority=_PRIORITY_NAMES.get(ask.priority, str(ask.priority)),
                    waiting_s=max(0, (now - ask.queued_at_ms) // 1000),
                    blocker=self._c.blockers[ask.id][0].code if self._c.blockers.get(ask.id) else "",
                )
                for ask in waiting[: _limit(limit, 500)]
            ]
            running = sum(1 for h in world.holdings if h.pool == name)
            queues.append(a.QueueAnswer(name, rules.order, rules.paused, running, len(waiting), entries))
        return a.QueueList(queues)

    async def _names(self, ids: list[str]) -> dict[str, str]:
        def read(c: sqlite3.Connection) -> dict[str, str]:
            return {
                row["id"]: row["name"]
                for row in c.execute("SELECT id, name FROM job WHERE state IN ('queued', 'held', 'preempted')")
            }

        return await self._c.db.read(read) if ids else {}

    async def list_agents(self, caller: Caller) -> a.AgentList:
        """Who there is, who is on line, who holds what."""
        callers = await self._c.db.read(lambda c: c.execute("SELECT * FROM caller ORDER BY name").fetchall())
        await self._c.keeper.refresh(self._c.now())
        world: World = self._c.keeper.world()
        now = self._c.now()
        out = []
        for row in callers:
            at, client = self._c.live.seen.get(row["name"], (row["last_seen_at_ms"], row["client"]))
            held = [h for h in world.holdings if h.agent == row["name"]]
            out.append(
                a.AgentAnswer(
                    name=row["name"],
                    kind=row["kind"],
                    owner=row["owner"],
                    online=at is not None and now - at < _ONLINE_MS,
                    last_seen_at=iso_or_none(at),
                    age_s=None if at is None else max(0, (now - at) // 1000),
                    client=clean(client, 80) if client else None,
                    leases=sum(1 for h in held if h.kind == "direct"),
                    gpus=_cards_up(sum(_units(world, h.slots, self._c) for h in held)),
                    running_jobs=sum(1 for h in held if h.kind == "job"),
                    waiting_jobs=sum(1 for ask in world.asks if ask.agent == row["name"] and ask.kind == "job"),
                )
            )
        return a.AgentList(out)

    # ---- jobs

    async def get_job(self, caller: Caller, job_id: str) -> a.JobAnswer:
        """
        Raises:
            NotFound: no such job.
        """

        def read(c: sqlite3.Connection) -> tuple[sqlite3.Row | None, list[sqlite3.Row], dict[str, list[sqlite3.Row]]]:
            row = c.execute("SELECT * FROM job WHERE id = ?", (job_id,)).fetchone()
            attempts = c.execute(
                "SELECT * FROM attempt WHERE job_id = ? ORDER BY epoch DESC LIMIT 20", (job_id,)
            ).fetchall()
            return row, attempts, {t["lease_id"]: lease_rows.slots(c, t["lease_id"]) for t in attempts}

        row, attempts, slots = self._c.db.peek(read)
        if row is None:
            raise NotFound(f'there is no job "{clean(job_id, 64)}"', code="no_such_job", hint="list_jobs shows yours.")
        return self._job(caller, row, attempts, slots)

    def _job(
        self, caller: Caller, row: sqlite3.Row, attempts: list[sqlite3.Row], slots: dict[str, list[sqlite3.Row]]
    ) -> a.JobAnswer:
        now = self._c.now()
        spec = json.loads(row["spec"])
        inside = self._eyes.sees_inside(caller, owner=row["owner"], name=row["caller"], pool=row["pool"])
        newest = attempts[0] if attempts else None
        held = slots.get(newest["lease_id"], []) if newest is not None else []
        active = newest is not None and newest["state"] != "ended"
        waiting = row["state"] in ("queued", "held", "preempted")
        gpus = spec.get("gpus", 1)
        end = row["ended_at_ms"] or now
        return a.JobAnswer(
            job_id=row["id"],
            state=row["state"],
            name=mask(row["name"]),
            purpose=mask(spec.get("purpose", "")),
            holder=row["caller"],
            owner=row["owner"],
            pool=row["pool"],
            priority=_PRIORITY_NAMES.get(row["priority"], str(row["priority"])),
            gpus=len({s["uuid"] for s in held} - {"cpu"}) if active else gpus if isinstance(gpus, int) else gpus["min"],
            task=self._task(row),
            submitted_at=iso(row["submitted_at_ms"]),
            age_s=max(0, (now - row["submitted_at_ms"]) // 1000),
            started_at=iso_or_none(row["started_at_ms"]),
            ended_at=iso_or_none(row["ended_at_ms"]),
            running_s=None if row["started_at_ms"] is None else max(0, (end - row["started_at_ms"]) // 1000),
            hours=row["hours_ms"] / 3_600_000,
            hours_from=row["hours_from"],
            time_left_s=max(0, (newest["started_at_ms"] + row["hours_ms"] - now) // 1000)
            if newest is not None and active and newest["started_at_ms"] is not None
            else None,
            host=newest["host"] if newest is not None and active else None,
            slots=[_slot(s) for s in held] if active else [],
            exit_code=row["exit_code"],
            failure_class=row["failure_class"],
            message=clean(row["message"], 500) if row["message"] else None,
            attempts=[self._attempt(t, slots.get(t["lease_id"], [])) for t in reversed(attempts)],
            attempts_left=row["attempts_left"],
            blockers=[_blocker(b) for b in self._blockers(row)] if waiting else [],
            stop_reason=row["stop_reason"],
            held_reason=row["held_reason"] if row["state"] == "held" else None,
            project=mask(spec.get("project", "")),
            experiment=mask(spec.get("experiment", "")),
            kind=spec.get("kind", "custom"),
            labels={clean(k, 100): mask(clean(v, 200)) for k, v in spec.get("labels", {}).items()},
            command=mask(clean(_command_line(spec), 2000)) if inside else None,
            workdir=spec.get("workdir") if inside else None,
            env_names=sorted(spec.get("env", {})) + [s["env"] for s in spec.get("secrets", ())] if inside else None,
            config=spec.get("config", {}) if inside else None,
            simulated=any(self._simulated(s["uuid"]) for s in held),
            near_cap=self._near_cap(row["pool"]) if waiting else False,
            queue_position=self._position(row) if waiting else None,
        )

    def _blockers(self, row: sqlite3.Row) -> tuple[Blocker, ...]:
        found: tuple[Blocker, ...] = self._c.blockers.get(row["id"], ())
        if found:
            return found
        if row["state"] == "held":
            return (Blocker("held", row["held_reason"] or "on hold", helps="release_job lets it queue again"),)
        return (Blocker("behind", "it has just been queued; the next pass decides", helps="ask again in a second"),)

    def _position(self, row: sqlite3.Row) -> int | None:
        ask: Ask | None = self._c.keeper.asks.get(row["id"])
        if ask is None:
            return None
        mine = (-ask.priority, not ask.resumed, ask.queued_at_ms, ask.id)
        return 1 + sum(
            1
            for other in self._c.keeper.asks.values()
            if other.pool == ask.pool and (-other.priority, not other.resumed, other.queued_at_ms, other.id) < mine
        )

    def _task(self, row: sqlite3.Row) -> a.TaskAnswer:
        final = row["state"] in JOB_FINAL
        age = self._c.now() - row["submitted_at_ms"]
        # short at first, then slower: a job that has run for an hour need not be asked every second
        poll = 0 if final else min(30_000, max(1000, age // 20))
        return a.TaskAnswer(row["id"], TASK_STATUS[JobState(row["state"])], poll, None)

    def _attempt(self, row: sqlite3.Row, slots: list[sqlite3.Row]) -> a.AttemptAnswer:
        record = json.loads(row["exit"]) if row["exit"] else None
        return a.AttemptAnswer(
            attempt_id=row["id"],
            epoch=row["epoch"],
            fence=row["fence"],
            lease_id=row["lease_id"],
            state=row["state"],
            exit_code=row["exit_code"],
            host=row["host"],
            slots=[_slot(s) for s in slots],
            started_at=iso_or_none(row["started_at_ms"]),
            ended_at=iso_or_none(row["ended_at_ms"]),
            exit=None
            if record is None
            else a.ExitAnswer(
                code=record.get("code"),
                signal=record.get("signal"),
                exec_error=record.get("exec_error"),
                sender=record.get("sender"),
                reason=record.get("reason"),
                cpu_s=round(record.get("cpu_user_s", 0) + record.get("cpu_sys_s", 0), 3),
                peak_memory_mib=record.get("peak_memory_mib", 0),
                peak_card_memory_mib=record.get("peak_card_memory_mib", {}),
                duration_s=record.get("duration_s", 0.0),
            ),
            failure_class=row["failure_class"],
            message=clean(row["message"], 500) if row["message"] else None,
        )

    async def list_jobs(
        self, caller: Caller, *, state: str | None = None, pool: str | None = None, owner: str | None = None, holder: str | None = None,
        label: str | None = None, host: str | None = None, since: str | None = None, limit: int = 20, cursor: str | None = None,
    ) -> a.JobList:  # fmt: skip
        """Jobs, newest first. `state`: active, waiting, running, final, all (default), or one state; `label` is KEY=VALUE."""
        where: list[str] = ["1"]
        values: list[Any] = []
        if state is not None:
            if state in _JOB_GROUPS:
                where.append(_JOB_GROUPS[state])
            else:
                _one_of(state, "state", (*_JOB_GROUPS, *(s.value for s in JobState)))
                where.append("j.state = ?")
                values.append(state)
        for column, value in (("j.pool", pool), ("j.owner", owner), ("j.caller", holder), ("t.host", host)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if label is not None:
            key, equals, wanted = label.partition("=")
            where.append("json_extract(j.spec, ?) " + ("= ?" if equals else "IS NOT NULL"))
            values.append(f"$.labels.{json.dumps(key)}")
            if equals:
                values.append(wanted)
        if since is not None:
            where.append("j.submitted_at_ms >= ?")
            values.append(_time(since))
        limit = _limit(limit, 200)
        count_where, count_values = list(where), list(values)
        if cursor is not None:
            where.append("j.id < ?")
            values.append(_cursor_id(cursor, "job"))
        source = " FROM job j LEFT JOIN attempt t ON t.job_id = j.id AND t.epoch = j.epoch WHERE "

        def read(c: sqlite3.Connection) -> tuple[list[sqlite3.Row], int]:
            found = c.execute(
                f"SELECT j.*, t.host AS host{source}{' AND '.join(where)} ORDER BY j.id DESC LIMIT ?",
                (*values, limit + 1),
            ).fetchall()
            total = c.execute(f"SELECT count(*){source}{' AND '.join(count_where)}", count_values).fetchone()[0]
            return found, int(total)

        found, total = await self._c.db.read(read)
        now = self._c.now()
        page = []
        for row in found[:limit]:
            gpus = json.loads(row["spec"]).get("gpus", 1)
            blockers = self._blockers(row) if row["state"] in ("queued", "held", "preempted") else ()
            page.append(
                a.JobRow(
                    job_id=row["id"],
                    state=row["state"],
                    name=mask(row["name"]),
                    holder=row["caller"],
                    owner=row["owner"],
                    pool=row["pool"],
                    priority=_PRIORITY_NAMES.get(row["priority"], str(row["priority"])),
                    gpus=gpus if isinstance(gpus, int) else gpus["min"],
                    host=row["host"],
                    submitted_at=iso(row["submitted_at_ms"]),
                    age_s=max(0, (now - row["submitted_at_ms"]) // 1000),
                    running_s=None
                    if row["started_at_ms"] is None
                    else max(0, ((row["ended_at_ms"] or now) - row["started_at_ms"]) // 1000),
                    exit_code=row["exit_code"],
                    blocker=blockers[0].code if blockers else None,
                )
            )
        return a.JobList(page, page[-1].job_id if len(found) > limit else None, total)

    def dry_run(
        self,
        caller: Caller,
        ask: Ask,
        spec: JobSpec,
        keys: tuple[SlotKey, ...] | None,
        why: tuple[Blocker, ...],
        now: int,
    ) -> a.JobAnswer:
        """What a submit would answer, with nothing written."""
        slots = [self._c.keeper.slot(key) for key in keys or ()]
        return a.JobAnswer(
            job_id="", state="queued", name=mask(spec.name), purpose=mask(spec.purpose), holder=caller.name, owner=caller.owner, pool=ask.pool,
            priority=spec.priority, gpus=len({s.uuid for s in slots if s.kind == "gpu"}) if keys else spec.gpus_min,
            task=a.TaskAnswer("", "working", 0, None), submitted_at=iso(now), age_s=0, started_at=None, ended_at=None, running_s=None,
            hours=ask.hours_ms / 3_600_000, hours_from="hours" if spec.hours is not None else "pool default", time_left_s=None,
            host=slots[0].host if slots else None,
            slots=[a.SlotAnswer(s.host, s.index, s.uuid, s.share if s.shares > 1 else None) for s in slots], exit_code=None,
            failure_class=None, message="Nothing was submitted: this was a dry run.", attempts=[], attempts_left=spec.max_attempts,
            blockers=[_blocker(b) for b in why], stop_reason=None, held_reason=None, project=spec.project, experiment=spec.experiment,
            kind=spec.kind, labels=dict(spec.labels), command=mask(spec.command_line), workdir=spec.workdir, env_names=sorted(spec.env),
            config=dict(spec.config), simulated=any(self._simulated(s.uuid) for s in slots),
            spec=spec.model_dump(mode="json", exclude={"env", "secrets"}, exclude_none=True), dry_run=True, would_start=keys is not None,
        )  # fmt: skip

    # ---- events

    async def list_events(
        self, caller: Caller, *, since: str | None = None, types: Iterable[str] | None = None, severity: str | None = None,
        job_id: str | None = None, run_id: str | None = None, host: str | None = None, limit: int = 100,
    ) -> a.EventList:  # fmt: skip
        """Events after `since` (a cursor, or an ISO time), oldest first; without it the newest `limit`.

        `types` may end in ``.*``. `severity` is the least. The cursor goes on where this answer ends, even when it is empty.
        """
        where: list[str] = ["1"]
        values: list[Any] = []
        if since is not None and since.isdigit():
            where.append("id > ?")
            values.append(int(since))
        elif since is not None:
            where.append("at_ms >= ?")
            values.append(_time(since))
        if types:
            parts = []
            for kind in types:
                if kind.endswith(".*"):
                    parts.append("type GLOB ?")
                    values.append(kind.replace("[", "[[]").replace("?", "[?]"))
                else:
                    parts.append("type = ?")
                    values.append(kind)
            where.append(f"({' OR '.join(parts)})")
        if severity is not None:
            order = ("info", "warning", "critical")
            _one_of(severity, "severity", order)
            least = order[order.index(severity) :]
            where.append(f"severity IN ({', '.join('?' * len(least))})")
            values.extend(least)
        for column, value in (("job_id", job_id), ("run_id", run_id), ("host", host)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        limit = _limit(limit, 1000)
        newest = since is None

        def read(c: sqlite3.Connection) -> tuple[list[sqlite3.Row], int]:
            order = "DESC" if newest else "ASC"
            found = c.execute(
                f"SELECT * FROM event WHERE {' AND '.join(where)} ORDER BY id {order} LIMIT ?", (*values, limit)
            ).fetchall()
            last = c.execute("SELECT coalesce(max(id), 0) FROM event").fetchone()[0]
            return found, int(last)

        found, last = await self._c.db.read(read)
        if newest:
            found.reverse()
        cursor = str(found[-1]["id"] if len(found) == limit and not newest else last)
        return a.EventList([self._event(caller, row) for row in found], cursor)

    def _event(self, caller: Caller, row: sqlite3.Row) -> a.EventAnswer:
        inside = (
            row["owner"] == caller.owner
            or may_operate(caller)
            or self._eyes.sees_inside(caller, owner=row["owner"], name=row["caller"], pool=row["pool"] or "")
        )
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

    def _simulated(self, uuid: str) -> bool:
        live = self._c.live.cards.get(uuid)
        return bool(live.state.simulated) if live is not None else uuid.startswith("SIM-")


# ---- small pieces -----------------------------------------------------------------------------


def _slot(row: sqlite3.Row) -> a.SlotAnswer:
    return a.SlotAnswer(
        row["host"], row["idx"], row["uuid"], row["share"] if row["shares"] > 1 and row["uuid"] != "cpu" else None
    )


def _blocker(b: Blocker) -> a.BlockerAnswer:
    return a.BlockerAnswer(
        b.code, b.message, dict(b.numbers), dict(b.names), iso_or_none(b.until_ms), b.set_by, b.helps
    )


def _left(at_ms: int | None, now: int) -> int | None:
    return None if at_ms is None else max(0, (at_ms - now) // 1000)


def _cards_up(units: int) -> int:
    return -(-units // UNITS_PER_CARD)


def _units(world: World, slots: tuple[SlotKey, ...], context: Any) -> int:
    total = 0
    for key in slots:
        if key[1] != "cpu":
            try:
                total += context.keeper.slot(key).units
            except KeyError:  # a card that is in no inventory any more
                total += UNITS_PER_CARD
    return total


def _command_line(spec: dict[str, Any]) -> str:
    command = spec.get("command", "")
    return command if isinstance(command, str) else " ".join(command)


def _limit(limit: int, most: int) -> int:
    if not 1 <= limit <= most:
        raise BadRequest(f"limit is {limit}; it must be 1 to {most}", hint="Use the cursor for more.")
    return limit


def _one_of(value: str, what: str, known: Iterable[str]) -> None:
    if value not in known:
        raise BadRequest(f'{what} "{clean(value, 40)}" is not known', hint=f"Possible: {', '.join(known)}.")


def _cursor_id(cursor: str, prefix: str) -> str:
    if not cursor.startswith(f"{prefix}_") or len(cursor) > 64:
        raise BadRequest(
            "this cursor is not from the same list", code="bad_cursor", hint="Leave it out to start from the newest."
        )
    return cursor


def _time(text: str) -> int:
    """An ISO 8601 time as milliseconds; without a zone it is UTC."""
    from datetime import UTC, datetime

    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise BadRequest(
            f'"{clean(text, 40)}" is no time', hint="Give ISO 8601, such as 2026-11-30T12:00:00Z, or a cursor."
        ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
