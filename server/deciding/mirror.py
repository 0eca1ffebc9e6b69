"""The world as a pass works on it: hosts as masks, sums of use, caps; kept from one pass to the next.

To build it anew costs in proportion to the fleet. One that is kept is told what changed (`see`, `hold`, `let_go`, `advance`)
and is then as one built from the changed world; tests/core/test_engine.py compares the two.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush

from cotenant.server.deciding import caps, reserved
from cotenant.server.deciding.fit import Fleet
from cotenant.server.deciding.usage import Use
from cotenant.server.deciding.world import (
    Ask,
    Holding,
    HostView,
    Policy,
    PoolRules,
    Reservation,
    Slot,
    Spent,
    World,
)

End = tuple[int, int, bool]
"""(when, units, held by a person)."""


class Mirror:
    """A world without its asks, ready for a pass at `now_ms`."""

    def __init__(self, world: World, now_ms: int, policy: Policy) -> None:
        self.policy = policy
        self.now_ms = now_ms
        self.pools = {pool.name: pool for pool in world.pools}
        self.owners = {owner.owner: owner for owner in world.owners}
        self.agents = {agent.agent: agent for agent in world.agents}
        self.reservations: tuple[Reservation, ...] = world.reservations
        self.use = Use(world)
        self.fleet = Fleet(world, policy, now_ms)
        self.living = {lease.id: lease for lease in world.holdings}
        self.cleaning = {lease.id: lease for lease in world.cleaning}
        self._limits: dict[tuple[str, str, bool, str, int], caps.Limits] = {}
        self._ends: dict[str, list[End]] = {}  # pool -> known ends of what lives there, sorted
        self._overdue: list[tuple[int, str]] | None = None  # a heap of (end, lease); made with the first `advance`

    def pool(self, name: str) -> PoolRules:
        """The rules of a pool; a pool that nobody configured has none."""
        return self.pools.get(name) or PoolRules(name)

    def limits(self, ask: Ask) -> caps.Limits:
        """The caps for the asker of `ask`; made once for each asker, their sums go along."""
        key = (ask.owner, ask.agent, ask.human, ask.pool, ask.own_cap)
        limits = self._limits.get(key)
        if limits is None:
            limits = self._limits[key] = caps.limits_for(
                self.use, self.pool(ask.pool), self.owners.get(ask.owner), self.agents.get(ask.agent), ask
            )
        return limits

    def stays(self, pool: str) -> list[reserved.Stay]:
        """What is held in a pool, by whom and until when."""
        return [
            reserved.Stay(lease.owner, self.use.units_of(lease.slots), self.fleet.until_ms[lease.id])
            for leases in (self.living, self.cleaning)
            for lease in leases.values()
            if lease.pool == pool
        ]

    def ends(self, pool: str) -> list[End]:
        """The known ends of what is held in a pool, sorted."""
        known = self._ends.get(pool)
        if known is None:
            known = self._ends[pool] = sorted(
                (until, self.use.units_of(lease.slots), lease.human)
                for lease in self.living.values()
                if lease.pool == pool and (until := self.fleet.until_ms[lease.id]) is not None
            )
        cleaning = [
            (until, self.use.units_of(lease.slots), lease.human)
            for lease in self.cleaning.values()
            if lease.pool == pool and (until := self.fleet.until_ms[lease.id]) is not None
        ]
        return sorted([*known, *cleaning]) if cleaning else known

    # ---- what changed -------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        """Let time go on: ends that have passed are known no more, and what is being cleaned takes from now on."""
        if self._overdue is None:
            self._overdue = []
            for lease in self.living.values():
                self._watch(lease)
        back = now_ms < self.now_ms
        self.now_ms = now_ms
        self.fleet.set_now(now_ms)
        if back:  # a clock that was set back: ends that had passed are still to come
            for lease in self.living.values():
                self._forget_end(lease)
                self.fleet.set_until(lease, self.fleet.until_of(lease, cleaning=False))
                self._note_end(lease)
        while self._overdue and self._overdue[0][0] <= now_ms:
            end, lease_id = heappop(self._overdue)
            holding = self.living.get(lease_id)
            if holding is not None and self.fleet.until_ms[lease_id] == end:
                self._forget_end(holding)
                self.fleet.set_until(holding, None)
        for lease in self.cleaning.values():
            self.fleet.set_until(lease, self.fleet.until_of(lease, cleaning=True))

    def see(self, slot: Slot) -> None:
        """A slot is in another state. It must be one of the fleet and differ in its state alone."""
        self.fleet.see(slot)

    def look(self, view: HostView) -> bool:
        """A host is in another state; False where that changes what fits on it, so that all has to be built anew."""
        return self.fleet.look(view)

    def hold(self, lease: Holding, *, cleaning: bool = False) -> None:
        """A lease is there, or its slots are being cleaned."""
        (self.cleaning if cleaning else self.living)[lease.id] = lease
        self.fleet.hold(lease, cleaning=cleaning)
        units = self.use.units_of(lease.slots)
        self.use.count(lease, units, 1, job=not cleaning)
        if cleaning:
            return
        self._note_end(lease)

    def let_go(self, lease_id: str) -> Holding:
        """A lease is over and its slots are clean, or it changed and is held anew. Gives what it was."""
        holding = self.living.get(lease_id)
        cleaning = holding is None
        if holding is None:
            holding = self.cleaning.pop(lease_id)
        else:
            self._forget_end(holding)
            del self.living[lease_id]
        self.use.count(holding, self.use.units_of(holding.slots), -1, job=not cleaning)
        self.fleet.let_go(holding)
        return holding

    def spend(self, spent: tuple[Spent, ...]) -> None:
        """The sums of past use are others."""
        self.use.spend(spent)

    def _watch(self, lease: Holding) -> None:
        until = self.fleet.until_ms[lease.id]
        if self._overdue is not None and until is not None:
            heappush(self._overdue, (until, lease.id))

    def _note_end(self, lease: Holding) -> None:
        ends, until = self._ends.get(lease.pool), self.fleet.until_ms[lease.id]
        if ends is not None and until is not None:
            insort(ends, (until, self.use.units_of(lease.slots), lease.human))
        self._watch(lease)

    def _forget_end(self, lease: Holding) -> None:
        ends, until = self._ends.get(lease.pool), self.fleet.until_ms[lease.id]
        if ends is not None and until is not None:
            del ends[bisect_left(ends, (until, self.use.units_of(lease.slots), lease.human))]
