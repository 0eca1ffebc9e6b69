"""Writing a grant down: the lease, its slots and its fence, checked once more inside the transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from cotenant.server.config import Settings
from cotenant.server.deciding.world import UNITS_PER_CARD, Holding, HostView, Needs, Slot, SlotKey
from cotenant.server.errors import Conflict
from cotenant.server.store import rules as rule_rows
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
    # as they stand in this very transaction: a cap that was lowered since the decision holds
    now_in_force = rule_rows.of(tx, settings.rules, pool, owner, caller)
    rules, of_owner, of_agent = (
        now_in_force.pools[pool],
        now_in_force.owners.get(owner),
        now_in_force.agents.get(caller),
    )
    used: defaultdict[str, int] = defaultdict(int)
    rows = tx.all(
        # "<> 'freed'" is the condition of the partial index: without it every slot ever leased would be looked at
        "SELECT owner, caller, human, pool, units, state FROM lease WHERE id <> ?"
        " AND id IN (SELECT lease_id FROM lease_slot WHERE use <> 'freed' AND use IN ('held', 'cleaning'))",
        (own_lease,),
    )
    for row in rows:
        alive = row["state"] in ("leased", "running")  # one that is being cleaned holds cards, but is no lease any more
        if row["owner"] == owner:
            used["owner everywhere"] += row["units"]
            used["jobs of the owner everywhere"] += alive
        if row["caller"] == caller:
            used["agent everywhere"] += row["units"]
            used["jobs of the agent everywhere"] += alive
        if row["pool"] != pool:
            continue
        used["pool"] += row["units"]
        used["jobs of the pool"] += alive
        used["agents"] += 0 if row["human"] else row["units"]
        if row["owner"] == owner:
            used["owner"] += row["units"]
            used["jobs of the owner"] += alive
        if row["caller"] == caller:
            used["agent"] += row["units"]
            used["jobs of the agent"] += alive
    agents_cap = None
    if not human and (rules.cap is not None or rules.reserve):
        agents_cap = _cards_of(tx, pool) if rules.cap is None else rules.cap
        agents_cap = max(0, agents_cap - rules.reserve)
    cards = (
        ("pool", rules.cap),
        ("agents", agents_cap),
        ("owner", rules.owner_cap),
        ("agent", None if human else rules.agent_cap),
        ("owner everywhere", of_owner.cap if of_owner else None),
        ("agent everywhere", of_agent.cap if of_agent else None),
    )
    at_once = (
        ("jobs of the owner", rules.owner_jobs),
        ("jobs of the agent", None if human else rules.agent_jobs),
        ("jobs of the owner everywhere", of_owner.jobs if of_owner else None),
        ("jobs of the agent everywhere", of_agent.jobs if of_agent else None),
        ("jobs of the pool", rules.jobs),
    )
    for name, limit in cards:
        if units and limit is not None and used[name] + units > limit * UNITS_PER_CARD:
            raise GrantLost(f"the cap of {limit} cards ({name}) is reached")
    for name, limit in at_once:
        if limit is not None and used[name] + 1 > limit:
            raise GrantLost(f"the cap of {limit} {name} at once is reached")
    numbers = {"units": units, "used_units": used["pool"], "agents_units": used["agents"], "owner_units": used["owner"]}
    if rules.cap is not None:
        numbers |= {"cap": rules.cap, "reserve": rules.reserve}
    if agents_cap is not None:
        numbers["agents_cap"] = agents_cap
    return numbers


def _cards_of(tx: Tx, pool: str) -> int:
    row = tx.one("SELECT count(*) FROM gpu WHERE pool = ? AND present = 1", (pool,))
    return 0 if row is None else int(row[0])


def booked(needs: Needs) -> dict[str, int]:
    """The columns of a lease that say what it books on each of its hosts."""
    return {
        "cpus": needs.cpus,
        "memory_mib": needs.memory_mib,
        "disk_mib": needs.disk_mib,
        "exclusive": int(needs.exclusive_host),
    }


def recheck_hosts(
    tx: Tx, views: Mapping[str, HostView], slots: list[Slot], needs: Needs, own_lease: str = ""
) -> dict[str, int]:
    """What is booked on the hosts of these slots once more, from the rows themselves; returns the numbers for the event.

    `views` says what each host has in all. Slots that are still being cleaned count, as everywhere.

    Raises:
        GrantLost: a host's processors, memory, disk or places are booked by others, or one has it to himself.
    """
    for host in sorted({slot.host for slot in slots}):
        view = views.get(host)
        if view is None:
            raise GrantLost(f"host {host} is not known")
        rows = tx.all(
            # "<> 'freed'" is the condition of the partial index over (host, uuid, share)
            "SELECT cpus, memory_mib, disk_mib, exclusive FROM lease WHERE id <> ? AND id IN"
            " (SELECT lease_id FROM lease_slot WHERE host = ? AND use <> 'freed' AND use IN ('held', 'cleaning'))",
            (own_lease, host),
        )
        wants = (
            ("cpus", needs.cpus, view.cpus),
            ("memory_mib", needs.memory_mib, view.memory_mib),
            ("disk_mib", needs.disk_mib, view.disk_mib),
        )
        for name, wanted, total in wants:
            used = sum(row[name] for row in rows)
            if wanted and used + wanted > total:
                raise GrantLost(f"{used} of {total} {name} of host {host} are booked, {wanted} more wanted")
        if view.max_jobs and len(rows) >= view.max_jobs:
            raise GrantLost(f"host {host} has {len(rows)} of {view.max_jobs} leases at once")
        if rows and (needs.exclusive_host or any(row["exclusive"] for row in rows)):
            raise GrantLost(f"host {host} is wanted for one lease alone, and has others")
    return {key: value for key, value in booked(needs).items() if value}


def holding_of(
    lease_id: str, kind: str, slots: tuple[SlotKey, ...], values: dict[str, Any], *, job_id: str | None = None, stop_s: int = 10,
    needs: Needs | None = None, array: str = "",
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
        cpus=needs.cpus if needs else 0,
        memory_mib=needs.memory_mib if needs else 0,
        disk_mib=needs.disk_mib if needs else 0,
        exclusive=needs.exclusive_host if needs else False,
        array=array,
    )


def slots_for_event(held: tuple[HeldSlot, ...]) -> list[list[Any]]:
    return [[s.host, s.index, s.uuid, s.share] for s in held]
