"""Hosts during one pass, as bit masks of slots, and the obstacles that can keep a slot from being granted.

A host's slots are numbered in the order of card index; free, held, occupied, sick and guarded slots are integers with
one bit each, so that "how many of the cards that fit are free" is an `and` and a bit count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cotenant.server.deciding.world import HostView, Needs, Slot, SlotKey

BEHIND = 1  # slots that an earlier ask waits for
HOST_CPU = 2
HOST_MEMORY = 4
HOST_DISK = 8
BUSY = 16  # slots that somebody holds or is being cleaned off, hosts that somebody has to himself
OCCUPIED = 32
SICK = 64
DRAINING = 128
POLICY = 256
DOWN = 512
LIMIT = 1024  # the host's limit on leases at once
LADDER = (BEHIND, HOST_CPU, HOST_MEMORY, HOST_DISK, LIMIT, BUSY, OCCUPIED, SICK, DRAINING, POLICY, DOWN)
"""From what goes away by itself soonest to what may never: the last one that has to be ignored is the main reason."""
EVERYTHING = 2047
SHARED = BEHIND | HOST_CPU | HOST_MEMORY | HOST_DISK | LIMIT | BUSY
"""What other asks could take away again when it comes free: an ask that waits for nothing else guards its slots."""

_MODE = {"ready": 0, "draining": DRAINING, "drained": DRAINING}

Kind = tuple[str, str, int, str, int, int]
"""What placement knows of a slot: (pool, gpu or cpu, shares, model, memory in MiB, capability)."""


@dataclass(frozen=True)
class Holder:
    """Who has a slot, and when it is free again at the latest (None: nobody knows)."""

    agent: str
    until_ms: int | None


@dataclass(slots=True)
class Tenant:
    """A lease on one host: what comes free there when it ends, and when that is at the latest (None: nobody knows)."""

    id: str
    until_ms: int | None
    mask: int
    cpus: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    exclusive: bool = False


@dataclass
class Claim:
    """What is kept on one host for an ask that came first: who would still run at `at_ms` has to leave it.

    `mask` are the slots; the other fields are what is left beside them for those who would, or NO_LIMIT.
    """

    ask_id: str
    at_ms: int
    mask: int
    cpus: int
    memory_mib: int
    disk_mib: int
    holders: int
    alone: bool = False  # the ask wants the host to itself

    def keeps_out(self, needs: Needs) -> bool:
        """Whether an ask with these needs that would still run then has no place beside it, slots apart."""
        return (
            self.alone
            or needs.exclusive_host
            or needs.cpus > self.cpus
            or needs.memory_mib > self.memory_mib
            or needs.disk_mib > self.disk_mib
            or self.holders <= 0
        )


NO_LIMIT = 1 << 62


class Host:
    """One host during one pass. Masks are over `slots`; `*_left` is what is not booked."""

    __slots__ = (
        "_bits",
        "alone",
        "claims",
        "cpus_left",
        "disk_left",
        "ends",
        "free",
        "gate",
        "held",
        "holders",
        "kinds",
        "memory_left",
        "mig",
        "name",
        "occupied",
        "sick",
        "slots",
        "tenants",
        "version",
        "view",
    )

    def __init__(self, view: HostView, slots: list[Slot], taken: dict[SlotKey, Holder]) -> None:
        self.view = view
        self.version = 0  # rises with every change
        self.ends = 0  # rises with every change but claims: of what `booking` looks at
        self.name = view.name
        self.slots = slots
        self.gate = _gate(view)
        self.free = self.held = self.occupied = self.sick = 0
        self.mig = 0  # parts of cards that the driver divides
        self.cpus_left = view.cpus
        self.memory_left = view.memory_mib
        self.disk_left = view.disk_mib
        self.holders = 0
        self.alone = 0  # leases that want the host for themselves
        self._bits: dict[SlotKey, int] = {}
        self.tenants: list[Tenant] = []
        self.claims: list[Claim] = []
        self.kinds: dict[Kind, int] = {}
        bit = 1
        for slot in slots:
            if slot.mig:
                self.mig |= bit
            self._see(bit, slot, (slot.host, slot.uuid, slot.share) in taken)
            kind = (slot.pool, slot.kind, slot.shares, slot.model, slot.memory_mib, slot.capability)
            self.kinds[kind] = self.kinds.get(kind, 0) | bit
            bit <<= 1

    def _see(self, bit: int, slot: Slot, taken: bool) -> None:
        state = slot.state
        if taken or state == "held" or state == "cleaning":
            self.held |= bit
        elif state == "free":
            self.free |= bit
        elif state == "occupied" or state == "unverified":
            self.occupied |= bit
        else:
            self.sick |= bit

    def see(self, bit: int, slot: Slot, taken: bool) -> None:
        """A slot that the host has already is in another state, or is `taken` by a lease or no longer."""
        self.slots[bit.bit_length() - 1] = slot
        self.free &= ~bit
        self.held &= ~bit
        self.occupied &= ~bit
        self.sick &= ~bit
        self._see(bit, slot, taken)

    def look(self, view: HostView) -> None:
        """The host itself is in another state; what its cards and labels allow is as it was."""
        self.view = view
        self.gate = _gate(view)

    def book(self, tenant: Tenant) -> None:
        """Take a lease's share of the host, once for each host of the lease. Its slots are counted elsewhere."""
        self.tenants.append(tenant)
        self.cpus_left -= tenant.cpus
        self.memory_left -= tenant.memory_mib
        self.disk_left -= tenant.disk_mib
        self.holders += 1
        self.alone += tenant.exclusive

    def leave(self, lease_id: str) -> None:
        """Give back what `book` took."""
        number = next(n for n, tenant in enumerate(self.tenants) if tenant.id == lease_id)
        tenant = self.tenants.pop(number)
        self.cpus_left += tenant.cpus
        self.memory_left += tenant.memory_mib
        self.disk_left += tenant.disk_mib
        self.holders -= 1
        self.alone -= tenant.exclusive

    @property
    def room_for(self) -> int:
        """Leases that the host's limit still allows; NO_LIMIT without one."""
        return self.view.max_jobs - self.holders if self.view.max_jobs else NO_LIMIT

    def mask_of(self, keys: Iterable[SlotKey]) -> int:
        """The bits of these slots; one that the host has no more is left out."""
        bits = self.bits()
        mask = 0
        for key in keys:
            mask |= bits.get(key, 0)
        return mask

    def bits(self) -> dict[SlotKey, int]:
        """The bit of each slot."""
        if not self._bits:
            self._bits = {slot.key: 1 << number for number, slot in enumerate(self.slots)}
        return self._bits

    def keys(self, mask: int) -> Iterator[tuple[int, Slot]]:
        """The slots of a mask with their bits, in order."""
        while mask:
            bit = mask & -mask
            yield bit, self.slots[bit.bit_length() - 1]
            mask ^= bit

    def closed(self, needs: Needs, ignored: int, ends_ms: int = NO_LIMIT) -> bool:
        """Whether the host gives nothing to an ask with these needs, the obstacles in `ignored` apart.

        `ends_ms` is when the ask would be over at the latest: before what is claimed for others begins, it may have it.
        """
        if self.gate & ~ignored:
            return True
        if needs.cpus > self.cpus_left and not ignored & HOST_CPU:
            return True
        if needs.memory_mib > self.memory_left and not ignored & HOST_MEMORY:
            return True
        if needs.disk_mib > self.disk_left and not ignored & HOST_DISK:
            return True
        if self.room_for <= 0 and not ignored & LIMIT:
            return True
        if not ignored & BUSY and (self.alone or (needs.exclusive_host and self.holders > 0)):
            return True
        return not ignored & BEHIND and any(c.at_ms < ends_ms and c.keeps_out(needs) for c in self.claims)

    def open_mask(self, ignored: int, ends_ms: int = NO_LIMIT) -> int:
        """The slots that can be granted, the obstacles in `ignored` apart; `ends_ms` as for `closed`."""
        mask = self.free
        if ignored & BUSY:
            mask |= self.held
        if ignored & OCCUPIED:
            mask |= self.occupied
        if ignored & SICK or self.gate & DOWN:  # a host that does not answer has lost slots, not sick ones
            mask |= self.sick
        if not ignored & BEHIND:
            for claim in self.claims:
                if claim.at_ms < ends_ms:
                    mask &= ~claim.mask
        return mask

    def gap(self, ends_ms: int) -> bool:
        """Whether an ask that is over by `ends_ms` may use what is claimed here: the best place for one."""
        return any(claim.at_ms >= ends_ms for claim in self.claims)


def _gate(view: HostView) -> int:
    return _MODE.get(view.mode, POLICY) | (0 if view.link == "up" else DOWN)
