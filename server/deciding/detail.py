"""What each host lacks for one ask: the pass of `decide` again, over one host at a time and without the rules of pools."""

from __future__ import annotations

from dataclasses import replace

from cotenant.server.deciding.blockers import blockers
from cotenant.server.deciding.world import Ask, Blocker, Holding, Policy, Slot, World


def host_by_host(world: World, ask: Ask, now_ms: int, policy: Policy) -> tuple[tuple[str, tuple[Blocker, ...]], ...]:
    """(host, what is in the way there) for every host that has slots of the ask's pool, by name.

    Nothing in the way means that the host itself would do now: then caps, the queue, or those before it are the reason.
    Of an ask for several hosts each is looked at for its own part.
    """
    alone = replace(
        ask, human=True, held="", not_before_ms=0, not_after_ms=None, after=(), own_cap=0, count=1, array_room=None,
        needs=replace(ask.needs, nodes=1, hosts=()),
    )  # fmt: skip
    slots: dict[str, list[Slot]] = {}
    for slot in world.slots:
        slots.setdefault(slot.host, []).append(slot)
    living, ending = _by_host(world.holdings), _by_host(world.cleaning)
    found = []
    for host in sorted(world.hosts, key=lambda view: view.name):
        if ask.needs.hosts and host.name not in ask.needs.hosts:
            continue
        mine = tuple(slots.get(host.name, ()))
        if not any(slot.pool == ask.pool for slot in mine):
            continue
        here = World(
            hosts=(host,), slots=mine, holdings=living.get(host.name, ()), cleaning=ending.get(host.name, ())
        )  # fmt: skip
        found.append((host.name, blockers(here, alone, now_ms, policy)))
    return tuple(found)


def _by_host(leases: tuple[Holding, ...]) -> dict[str, tuple[Holding, ...]]:
    out: dict[str, list[Holding]] = {}
    for lease in leases:
        for name in dict.fromkeys(key[0] for key in lease.slots):
            out.setdefault(name, []).append(lease)
    return {name: tuple(found) for name, found in out.items()}
