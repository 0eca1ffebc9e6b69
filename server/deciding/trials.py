"""What if: whether an ask would start if certain leases were over. Tried on the mirror itself, which is left as it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cotenant.server.deciding.hosts import Host
from cotenant.server.deciding.mirror import Mirror
from cotenant.server.deciding.passes import Look, Pass
from cotenant.server.deciding.world import Ask, Holding, Preemption, Slot, SlotKey


class Trials:
    """Questions to the world of one pass. What the pass has started counts; what it keeps for those who wait does not."""

    def __init__(self, mirror: Mirror, state: Pass) -> None:
        self.mirror = mirror
        self._state = state
        self._kept_back: dict[SlotKey, Slot] = {}  # slots of preemptions under way, as they are

    def keep_back(self, preemptions: Iterable[Preemption]) -> None:
        """Let the free slots of these preemptions, and of no others, look held."""
        self.let_out()
        for one in preemptions:
            for key in one.slots:
                slot = self.mirror.fleet.slot(key)
                if slot is not None and slot.state == "free" and key not in self.mirror.fleet.holder:
                    self._kept_back[key] = slot
                    self.mirror.see(replace(slot, state="held", lease_id=one.id))

    def let_out(self) -> None:
        """Let them look as they are again."""
        for slot in self._kept_back.values():
            self.mirror.see(slot)
        self._kept_back.clear()

    def look(self, ask: Ask) -> Look:
        """What stands between `ask` and a start if nobody else asked."""
        alone = self._state.alone()
        return alone.look(ask, self.mirror.fleet.shape(ask.pool, ask.needs))

    def fits(self, ask: Ask, gone: Sequence[Holding] = (), clean: Iterable[SlotKey] = ()) -> tuple[SlotKey, ...]:
        """The slots that `ask` would get if nobody else asked, these leases were over and clean, and the slots in `clean` too;
        empty when it would wait."""
        mirror, fleet = self.mirror, self.mirror.fleet
        clean = frozenset(clean)
        ending = [lease for lease in mirror.cleaning.values() if clean and not clean.isdisjoint(lease.slots)]
        keys = clean.union(*(lease.slots for lease in gone))
        before: list[Slot] = []
        for lease in (*gone, *ending):
            mirror.let_go(lease.id)
        for key in sorted(keys):
            slot = fleet.slot(key)
            if slot is not None and slot.state in ("held", "cleaning"):
                before.append(slot)
                mirror.see(replace(slot, state="free", lease_id=None, reason=""))
        try:
            where = self.look(ask).where
            found = [] if where is None else [slot.key for host, mask in where for _, slot in host.keys(mask)]
        finally:
            for slot in before:
                mirror.see(slot)
            for lease in gone:
                mirror.hold(lease)
            for lease in ending:
                mirror.hold(lease, cleaning=True)
        return tuple(found)

    def usable(self, ask: Ask) -> dict[str, frozenset[SlotKey]]:
        """By host, the slots that an ask's needs allow, whatever their state."""
        seats = self.mirror.fleet.shape(ask.pool, ask.needs).seats
        return {
            seat.host.name: frozenset(slot.key for _, slot in seat.host.keys(seat.cards | seat.shares))
            for seat in seats
        }

    def hosts(self) -> dict[str, Host]:
        """The hosts by name."""
        return {host.name: host for host in self.mirror.fleet.hosts}

    def living_on(self, host: Host) -> int:
        """How many leases are on a host that are not over."""
        return sum(1 for tenant in host.tenants if tenant.id not in self.mirror.cleaning)
