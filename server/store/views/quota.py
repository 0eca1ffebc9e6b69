"""Caps, use, reserve, and what a caller may start now."""

from __future__ import annotations

from cotenant.server.deciding.blockers import room_now
from cotenant.server.deciding.usage import usage
from cotenant.server.deciding.world import UNITS_PER_CARD, World
from cotenant.server.model import answers as a
from cotenant.server.model.caller import Caller
from cotenant.server.store.views.base import (
    PRIORITY_NAMES,
    View,
    cards_up,
    units_of,
)


class QuotaViews(View):
    """Reads of quotas."""

    async def quota_status(self, caller: Caller) -> a.QuotaStatus:
        """Caps, use, reserve, and what this caller may start now."""
        self._c.keeper.refresh(self._c.now())
        world: World = self._c.keeper.world()
        pools = [
            self._pool(caller, world, name)
            for name in sorted(self._c.settings.pools)
            if not caller.pools or name in caller.pools
        ]
        mine = [h for h in world.holdings if h.agent == caller.name and h.owner == caller.owner]
        owned = [h for h in world.holdings if h.owner == caller.owner]
        owner_rules = self._c.keeper.rules.owners.get(caller.owner)
        me = a.MyQuota(
            name=caller.name,
            kind=caller.kind,
            owner=caller.owner,
            scopes=sorted(caller.scopes),
            used_by_me=cards_up(sum(units_of(world, h.slots, self._c) for h in mine)),
            used_by_owner=cards_up(sum(units_of(world, h.slots, self._c) for h in owned)),
            owner_cap=owner_rules.cap if owner_rules else None,
            running_jobs=sum(1 for h in mine if h.kind == "job"),
            waiting_jobs=sum(1 for ask in world.asks if ask.agent == caller.name and ask.kind == "job"),
            leases=sorted(h.id for h in mine if h.kind == "direct"),
            max_priority=PRIORITY_NAMES.get(self._c.max_priority(caller), "high"),
            pools=list(caller.pools) or None,
        )
        can = sum(p.you_can_start for p in pools)
        if can:
            advice = f"You can start {can} card{'s' if can != 1 else ''} now."
        elif any(slot.kind == "gpu" for slot in world.slots):
            advice = 'No card for you now: submit_job queues, and so does acquire_lease with when_full="queue".'
        else:
            why = self._c.live.why_no_card() or "list_hosts shows the machines."
            advice = f"There is no card at all: only work without one (gpus=0) can run. {why}"
        return a.QuotaStatus(pools, me, advice)

    def _pool(self, caller: Caller, world: World, name: str) -> a.PoolQuota:
        rules = self._c.keeper.rules.pools[name]
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
            used=cards_up(use.used),
            reserved=rules.reserve,
            available=max(0, (limit - used_of_kind) // UNITS_PER_CARD),
            you_can_start=room_now(world, caller.owner, caller.name, caller.human, name),
            free_cards=free,
            near_cap=self._near_cap(name),
            owner_cap=rules.owner_cap,
            agent_cap=rules.agent_cap,
            waiting=sum(1 for ask in world.asks if ask.pool == name),
            paused=rules.paused,
            draining=rules.draining,
            order=rules.order,
            default_hours=rules.default_hours,
            set_by=rules.set_by,
            simulated=any(self._simulated(s.uuid) for s in slots),
        )
