"""Preemption: whose work a higher priority stops, which slots are kept for it, and when it is given up.

The conditions of design section 6. Whether enough comes free is not estimated here: the candidates are taken out of the
world, and the pass itself (`fits`) says whether the asker would start there, under every cap and the reserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, islice

from cotenant.server.deciding.hosts import Host
from cotenant.server.deciding.passes import Pass
from cotenant.server.deciding.trials import Trials
from cotenant.server.deciding.world import (
    Ask,
    Holding,
    Needs,
    OwnerRules,
    PoolRules,
    Preempt,
    Preemption,
    SlotKey,
    Start,
    Wait,
    Withdraw,
)

#: Nobody is stopped within this time of something being written to his checkpoints (design section 6).
WRITING_MS = 30_000
#: Sets of victims that are tried by a pass each before the asker simply waits; the best come first.
TRIES = 8
#: Sets of victims that are compared on one host. Eight cards with eight holders have 255.
SETS_PER_HOST = 300
#: Those of them that whoever ends in the pool lifts, on whatever host.
CAPS = frozenset({"quota_pool", "reserve"})
#: What an ask may wait for so that stopping others can help it.
HELPED = frozenset({"busy", "quota_pool", "reserve", "host_cpu", "host_memory", "host_disk", "host_limit"})


def keep(
    trials: Trials, state: Pass, preemptions: Sequence[Preemption], asks: Mapping[str, Ask]
) -> tuple[list[Start | Withdraw], frozenset[str]]:
    """What becomes of the askers of preemptions under way, before anybody else is looked at; and the asks that start so.

    Slots of a running preemption are kept: to all others they look held from then on. An asker that starts now, on them or
    elsewhere, has started in `state`; its preemption is withdrawn where nobody was told to end yet. So is one whose end
    would not let its asker start any more: somebody has held it, paused its queue or lowered its cap.
    """
    if not preemptions:
        return [], frozenset()
    running = sorted(preemptions, key=lambda p: p.id)
    found: list[Start | Withdraw] = []
    gone: set[str] = set()
    met: set[str] = set()
    for preemption in running:
        ask = asks.get(preemption.ask_id)
        if ask is None or ask.id in met:
            if not preemption.stopping:
                gone.add(preemption.id)
                found.append(Withdraw(preemption.id, "its asker is gone"))
            continue
        trials.keep_back(other for other in running if other.id not in gone and other.id != preemption.id)
        look = trials.look(ask)
        if look.where is not None:
            gone.add(preemption.id)
            met.add(ask.id)
            found.append(Start(ask.id, ask.kind, state.start(ask, look)))
            if not preemption.stopping:
                found.append(Withdraw(preemption.id, "its asker fits without it"))
        elif not preemption.stopping and _answer(trials, preemption) and not _enough(trials, preemption, ask):
            gone.add(preemption.id)
            found.append(Withdraw(preemption.id, "its asker could not start any more when the victims are gone"))
    trials.keep_back(one for one in running if one.id not in gone)
    return found, frozenset(met)


def choose(
    trials: Trials, asks: Mapping[str, Ask], waits: Iterable[Wait], preemptions: Sequence[Preemption]
) -> tuple[list[Preempt], int | None]:
    """For the first ask of each pool that does not fit: whom to stop for it; and when to look again, or None.

    `trials` is of the world as it stands after the starts of this pass, `waits` in the order in which the asks were looked
    at. One preemption at a time in a pool. Equal worlds give equal answers.
    """
    mirror, now_ms = trials.mirror, trials.mirror.now_ms
    pools = {name: pool for name, pool in mirror.pools.items() if pool.preempt != "off"}
    if not pools:
        return [], None
    spoken = {name for one in preemptions for name in one.victims}
    passed = {one.pool for one in preemptions}
    found: list[Preempt] = []
    due: list[int] = []
    for wait in waits:
        ask = asks[wait.ask_ids[0]]
        pool = pools.get(ask.pool)
        if pool is None or ask.pool in passed or any(blocker.code not in HELPED for blocker in wait.blockers):
            continue
        passed.add(ask.pool)  # whatever comes of it: who is behind it does not pass it
        right = _right_ms(ask, mirror.owners)
        if right > now_ms:
            due.append(right)
            continue
        victims, later = candidates(mirror.living.values(), ask, pool, now_ms, spoken)
        due.extend(later)
        capped = any(blocker.code in CAPS for blocker in wait.blockers)
        chosen = _best(trials, ask, victims, now_ms, capped) if victims else None
        if chosen is not None:
            found.append(chosen)
            spoken |= set(chosen.victims)
    return found, min((at for at in due if at > now_ms), default=None)


def _right_ms(ask: Ask, owners: Mapping[str, OwnerRules]) -> int:
    owner = owners.get(ask.owner)
    return 0 if owner is None else owner.no_preempt_until_ms


def candidates(
    living: Iterable[Holding], ask: Ask, pool: PoolRules, now_ms: int, spoken: set[str]
) -> tuple[list[Holding], list[int]]:
    """(who may be stopped for `ask` now, by id; when others may be)."""
    allowed = {pool.name, *(pool.preempt_from if pool.preempt == "from" else ())}
    found: list[Holding] = []
    later: list[int] = []
    for lease in living:
        if lease.priority >= ask.priority or lease.pool not in allowed or lease.id in spoken:
            continue
        if lease.kind != "job" or not (lease.preemptible and lease.resumable):
            continue
        if lease.stopping or lease.suspended or lease.lost:
            continue
        free_ms = lease.immune_until_ms
        if lease.writing_ms is not None:
            free_ms = max(free_ms, lease.writing_ms + WRITING_MS)
        if free_ms > now_ms:
            later.append(free_ms)
        else:
            found.append(lease)
    return sorted(found, key=lambda lease: lease.id), later


def lost_ms(lease: Holding, now_ms: int) -> int:
    """The work that would be lost if the lease ended now without another save."""
    since = lease.granted_at_ms if lease.checkpoint_ms is None else lease.checkpoint_ms
    return max(0, now_ms - since)


def _best(trials: Trials, ask: Ask, victims: Sequence[Holding], now_ms: int, capped: bool) -> Preempt | None:
    """The fewest, lowest, least lost of the sets of victims whose end lets `ask` start; None when none does."""

    def cost(some: tuple[Holding, ...]) -> tuple[object, ...]:
        return (
            len(some),
            max(lease.priority for lease in some),
            sum(lease.priority for lease in some),
            sum(lost_ms(lease, now_ms) for lease in some),
            tuple(lease.id for lease in some),
        )

    sets = {_by_id(some) for some in _sets(trials, ask, victims, now_ms, trials.usable(ask), capped) if some}
    for some in sorted(sets, key=cost)[:TRIES]:
        keys = trials.fits(ask, some)
        if keys:
            return Preempt(ask.id, tuple(lease.id for lease in some), keys)
    return None


def _by_id(some: Iterable[Holding]) -> tuple[Holding, ...]:
    """Each of them once: a job over several hosts is among the victims of each."""
    return tuple(sorted({lease.id: lease for lease in some}.values(), key=lambda lease: lease.id))


def _sets(
    trials: Trials,
    ask: Ask,
    victims: Sequence[Holding],
    now_ms: int,
    allowed: Mapping[str, frozenset[SlotKey]],
    capped: bool,
) -> list[tuple[Holding, ...]]:
    """Sets of victims that may be enough: on one host, over hosts for a job that wants several, and where a cap is short."""
    nodes = max(1, ask.needs.nodes)
    if capped:
        in_pool = sorted(
            (lease for lease in victims if lease.pool == ask.pool),
            key=lambda lease: (lease.priority, lost_ms(lease, now_ms), lease.id),
        )
        widest = sorted(in_pool, key=lambda lease: -len(lease.slots))  # stable: the cheapest of equals first
        cards = max(1, ask.needs.gpus_min) * nodes
        sets: list[tuple[Holding, ...]] = [(lease,) for lease in in_pool[: TRIES // 2]]
        for count in range(1, min(len(widest), cards) + 1):
            sets.append(tuple(widest[:count]))
    else:
        sets = []
    cheap: list[tuple[tuple[int, int, int, str], tuple[Holding, ...]]] = []
    there = _Hosts(trials, victims)
    for host in sorted(allowed.keys() & there.victims.keys()):
        on_it = _on_host(there, ask, host, allowed[host], now_ms)
        sets += on_it
        if on_it:
            least = min(on_it, key=lambda some: _price(some, now_ms))
            cheap.append(((*_price(least, now_ms), host), least))
    if nodes > 1:
        # hosts that are free as they are cost nothing: the cheapest make up what is missing
        cheap.sort(key=lambda one: one[0])
        for count in range(1, min(nodes, len(cheap)) + 1):
            sets.append(tuple(lease for _, some in cheap[:count] for lease in some))
    return sets


class _Hosts:
    """What is on each host, gathered once."""

    def __init__(self, trials: Trials, victims: Sequence[Holding]) -> None:
        self.trials = trials
        self.hosts = trials.hosts()
        self.victims = _by_host(victims)


def _by_host(leases: Iterable[Holding]) -> dict[str, list[Holding]]:
    found: dict[str, list[Holding]] = {}
    for lease in leases:
        for host in dict.fromkeys(key[0] for key in lease.slots):
            found.setdefault(host, []).append(lease)
    return found


def _price(some: tuple[Holding, ...], now_ms: int) -> tuple[int, int, int]:
    return (
        len(some),
        max((lease.priority for lease in some), default=0),
        sum(lost_ms(lease, now_ms) for lease in some),
    )


def _on_host(there: _Hosts, ask: Ask, host: str, allowed: frozenset[SlotKey], now_ms: int) -> list[tuple[Holding, ...]]:
    """Smallest sets of victims on one host whose end leaves enough there, by what they hold and booked."""
    here = there.victims[host]
    needs = ask.needs
    if needs.exclusive_host:
        return [tuple(here)] if len(here) == there.trials.living_on(there.hosts[host]) else []
    on_it = there.hosts[host]
    free = sum(1 for _, slot in on_it.keys(on_it.free) if slot.key in allowed)
    missing = max(1, needs.gpus_min) - free
    short = _short(on_it, needs)

    def gives(lease: Holding) -> int:
        return sum(1 for key in lease.slots if key in allowed)

    def enough(some: tuple[Holding, ...]) -> bool:
        return (
            sum(gives(lease) for lease in some) >= missing
            and sum(lease.cpus for lease in some) >= short[0]
            and sum(lease.memory_mib for lease in some) >= short[1]
            and sum(lease.disk_mib for lease in some) >= short[2]
        )

    order = sorted(here, key=lambda lease: (lease.priority, lost_ms(lease, now_ms), lease.id))
    most = sorted((gives(lease) for lease in here), reverse=True)
    for count in range(1, len(order) + 1):
        if sum(most[:count]) < missing:
            continue
        # the cheapest come first, so that the bound on their number cuts off the dearest
        found = [some for some in islice(combinations(order, count), SETS_PER_HOST) if enough(some)]
        if found:
            return found
    widest = sorted(here, key=lambda lease: (-gives(lease), lease.priority, lost_ms(lease, now_ms), lease.id))
    for count in range(1, len(widest) + 1):
        if enough(tuple(widest[:count])):
            return [tuple(widest[:count])]
    return []


def _short(host: Host, needs: Needs) -> tuple[int, int, int]:
    """What of processors, memory and disk is missing on a host."""
    return (
        needs.cpus - host.cpus_left if needs.cpus else 0,
        needs.memory_mib - host.memory_left if needs.memory_mib else 0,
        needs.disk_mib - host.disk_left if needs.disk_mib else 0,
    )


def _answer(trials: Trials, preemption: Preemption) -> bool:
    """Whether its hosts are there: of one that is silent for a moment, as after a restart, nothing can be said."""
    hosts = trials.hosts()
    return all(key[0] in hosts and hosts[key[0]].view.link == "up" for key in preemption.slots)


def _enough(trials: Trials, preemption: Preemption, ask: Ask) -> bool:
    """Whether the asker starts once the preemption has come to its end: the victims gone, its slots clean where they can be."""
    living = trials.mirror.living
    victims = [living[name] for name in preemption.victims if name in living]
    return bool(trials.fits(ask, victims, preemption.slots))
