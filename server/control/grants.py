"""Writing a grant down: the lease, its slots and its fence, checked once more inside the transaction."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from cotenant.server.config import Settings
from cotenant.server.deciding.world import UNITS_PER_CARD, Holding, Slot, SlotKey
from cotenant.server.errors import Conflict
from cotenant.server.store.db import Tx
from cotenant.server.store.leases import HeldSlot


class GrantLost(Conflict):
    """The world moved between the decision and its transaction; decide again."""

    code = "grant_lost"


def held_slots(slots: list[Slot]) -> tuple[HeldSlot, ...]:
    return tuple(HeldSlot(s.host, s.uuid, s.share, s.shares, s.index, s.units) for s in slots)


def cards(slots: list[Slot]) -> int:
    """How many different cards these slots are on."""
    return len({s.uuid for s in slots if s.kind == "gpu"})


def recheck(
    tx: Tx, settings: Settings, *, pool: str, owner: str, caller: str, human: bool, units: int, own_lease: str = ""
) -> dict[str, int]:
    """The caps once more, from the rows themselves; returns the numbers for the event.

    Raises:
        GrantLost: a cap would be exceeded.
    """
    rules = settings.pools[pool]
    used: defaultdict[str, int] = defaultdict(int)
    for row in tx.all(
        "SELECT id, owner, caller, human, pool, units FROM lease WHERE id <> ?"
        " AND id IN (SELECT lease_id FROM lease_slot WHERE use IN ('held', 'cleaning'))",
        (own_lease,),
    ):
        if row["pool"] == pool:
            used["all"] += row["units"]
            used["agents"] += 0 if row["human"] else row["units"]
            used["owner"] += row["units"] if row["owner"] == owner else 0
            used["agent"] += row["units"] if row["caller"] == caller else 0
        used["owner everywhere"] += row["units"] if row["owner"] == owner else 0
    owner_rules = settings.owners.get(owner)
    limits = (
        ("all", rules.cap),
        ("agents", None if human or rules.cap is None else rules.cap - rules.reserve),
        ("owner", rules.owner_cap),
        ("agent", rules.agent_cap),
        ("owner everywhere", owner_rules.cap if owner_rules else None),
    )
    for name, limit in limits:
        if units and limit is not None and used[name] + units > limit * UNITS_PER_CARD:
            raise GrantLost(f"the cap of {name} was reached meanwhile")
    numbers = {"units": units, "used_units": used["all"], "agents_units": used["agents"], "owner_units": used["owner"]}
    if rules.cap is not None:
        numbers |= {"cap": rules.cap, "reserve": rules.reserve}
    return numbers


def holding_of(
    lease_id: str, kind: str, slots: tuple[SlotKey, ...], values: dict[str, Any], *, job_id: str | None = None, stop_s: int = 10,
    cpus: int = 0, memory_mib: int = 0, disk_mib: int = 0,
) -> Holding:  # fmt: skip
    """What the keeper assumes until the row is read back."""
    return Holding(
        id=lease_id,
        kind="job" if kind == "job" else "direct",
        owner=values["owner"],
        agent=values["caller"],
        human=bool(values["human"]),
        pool=values["pool"],
        slots=slots,
        granted_at_ms=values["granted_at_ms"],
        hard_end_ms=values["hard_end_at_ms"],
        expires_ms=values.get("expires_at_ms"),
        job_id=job_id,
        priority=values["priority"],
        stop_s=stop_s,
        cpus=cpus,
        memory_mib=memory_mib,
        disk_mib=disk_mib,
    )


def slots_for_event(held: tuple[HeldSlot, ...]) -> list[list[Any]]:
    return [[s.host, s.index, s.uuid, s.share] for s in held]
