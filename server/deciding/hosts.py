"""Hosts during one pass, as bit masks of slots, and the obstacles that can keep a slot from being granted.

A host's slots are numbered in the order of card index; free, held, occupied, sick and guarded slots are integers with
one bit each, so that "how many of the cards that fit are free" is an `and` and a bit count.
"""

from __future__ import annotations

from collections.abc import Iterator
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
LADDER = (BEHIND, HOST_CPU, HOST_MEMORY, HOST_DISK, BUSY, OCCUPIED, SICK, DRAINING, POLICY, DOWN)
"""From what goes away by itself soonest to what may never: the last one that has to be ignored is the main reason."""
EVERYTHING = 1023
SHARED = BEHIND | HOST_CPU | HOST_MEMORY | HOST_DISK | BUSY
"""What other asks could take away again when it comes free: an ask that waits for nothing else guards its slots."""

_MODE = {"ready": 0, "draining": DRAINING, "drained": DRAINING}

Kind = tuple[str, str, int, str, int, int]
"""What placement knows of a slot: (pool, gpu or cpu, shares, model, memory in MiB, capability)."""


@dataclass(frozen=True)
class Holder:
    """Who has a slot, and when it is free again at the latest (None: nobody knows)."""

    agent: str
    until_ms: int | None


class Host:
    """One host during one pass. Masks are over `slots`; `*_left` is what is not booked."""

    __slots__ = (
        "cpus_left",
        "disk_left",
        "exclusive",
        "free",
        "gate",
        "guarded",
        "held",
        "holders",
        "kinds",
        "memory_left",
        "name",
        "occupied",
        "sick",
        "slots",
        "version",
        "view",
    )

    def __init__(self, view: HostView, slots: list[Slot], taken: dict[SlotKey, Holder]) -> None:
        self.view = view
        self.version = 0  # rises with every change
        self.name = view.name
        self.slots = slots
        self.gate = _MODE.get(view.mode, POLICY) | (0 if view.link == "up" else DOWN)
        self.free = self.held = self.occupied = self.sick = self.guarded = 0
        self.cpus_left = view.cpus
        self.memory_left = view.memory_mib
        self.disk_left = view.disk_mib
        self.holders = 0
        self.exclusive = False
        self.kinds: dict[Kind, int] = {}
        bit = 1
        for slot in slots:
            state = slot.state
            if (slot.host, slot.uuid, slot.share) in taken or state == "held" or state == "cleaning":
                self.held |= bit
            elif state == "free":
                self.free |= bit
            elif state == "occupied" or state == "unverified":
                self.occupied |= bit
            else:
                self.sick |= bit
            kind = (slot.pool, slot.kind, slot.shares, slot.model, slot.memory_mib, slot.capability)
            self.kinds[kind] = self.kinds.get(kind, 0) | bit
            bit <<= 1

    def book(self, cpus: int, memory_mib: int, disk_mib: int, exclusive: bool) -> None:
        """Take a lease's share of the host, once for each host of the lease."""
        self.cpus_left -= cpus
        self.memory_left -= memory_mib
        self.disk_left -= disk_mib
        self.holders += 1
        self.exclusive = self.exclusive or exclusive

    def keys(self, mask: int) -> Iterator[tuple[int, Slot]]:
        """The slots of a mask with their bits, in order."""
        while mask:
            bit = mask & -mask
            yield bit, self.slots[bit.bit_length() - 1]
            mask ^= bit

    def closed(self, needs: Needs, ignored: int) -> bool:
        """Whether the host gives nothing to an ask with these needs, the obstacles in `ignored` apart."""
        if self.gate & ~ignored:
            return True
        if needs.cpus > self.cpus_left and not ignored & HOST_CPU:
            return True
        if needs.memory_mib > self.memory_left and not ignored & HOST_MEMORY:
            return True
        if needs.disk_mib > self.disk_left and not ignored & HOST_DISK:
            return True
        return not ignored & BUSY and (self.exclusive or (needs.exclusive_host and self.holders > 0))

    def open_mask(self, ignored: int) -> int:
        """The slots that can be granted, the obstacles in `ignored` apart."""
        mask = self.free
        if ignored & BUSY:
            mask |= self.held
        if ignored & OCCUPIED:
            mask |= self.occupied
        if ignored & SICK or self.gate & DOWN:  # a host that does not answer has lost slots, not sick ones
            mask |= self.sick
        return mask if ignored & BEHIND else mask & ~self.guarded
