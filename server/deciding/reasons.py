"""The blockers of an ask: what it says about itself, its queue, its caps, and the hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cotenant.server.deciding import hosts as bits
from cotenant.server.deciding.fit import Fleet
from cotenant.server.deciding.hosts import Kind
from cotenant.server.deciding.shape import Shape, card_misses, host_misses, version
from cotenant.server.deciding.words import at_text, cards_text, cards_up, plural, quoted
from cotenant.server.deciding.world import UNITS_PER_CARD, Ask, Blocker, Needs, PoolRules, Reservation

_CODES = {
    bits.HOST_CPU: "host_cpu",
    bits.HOST_MEMORY: "host_memory",
    bits.HOST_DISK: "host_disk",
    bits.LIMIT: "host_limit",
    bits.OCCUPIED: "occupied",
    bits.SICK: "host_sick",
    bits.DRAINING: "host_draining",
    bits.POLICY: "host_policy",
    bits.DOWN: "host_down",
}


def of_itself(ask: Ask, now_ms: int) -> list[Blocker]:
    """What the ask waits for whatever the hosts have: a hold, other jobs, a time."""
    found: list[Blocker] = []
    if ask.held:
        found.append(Blocker("held", "on hold", helps="release it (release_job), or ask who put it on hold"))
    if ask.after:
        count = len(ask.after)
        found.append(
            Blocker(
                "dependency",
                f"waits for {plural(count, 'job', 'jobs')} to end: {quoted(min(ask.after))}"
                + (f" and {count - 1} more" if count > 1 else ""),
                (("jobs", count),),
                (("job", min(ask.after)),),
                helps="wait for the end of that job, or submit this one without the condition",
            )
        )
    if ask.not_before_ms > now_ms:
        when = at_text(ask.not_before_ms)
        if ask.not_before_why == "start_window":
            said = f"the start window opens at {when}"
        else:
            said = f"the next attempt is not made before {when}"
        helps = "wait: it starts by itself after that time"
        found.append(Blocker(ask.not_before_why, said, until_ms=ask.not_before_ms, helps=helps))
    return found


def array_full(ask: Ask) -> Blocker:
    """As many elements of the ask's array run as it allows."""
    return Blocker(
        "array_limit",
        f"as many elements of {quoted(ask.array)} run as it allows at once",
        (("waiting", ask.count),),
        (("array", ask.array),),
        helps="wait: the next starts when one ends; or have it run more at once with modify_job",
    )


def window_closed(ask: Ask) -> str:
    """Why an ask is given up whose start window has closed."""
    return f"its start window closed at {at_text(ask.not_after_ms or 0)} before it could start"


def of_queue(pool: PoolRules, opens_at_ms: int = 0, now_ms: int = 0) -> list[Blocker]:
    """A queue that starts nothing; `opens_at_ms` is when its next start window opens, `now_ms` or before while one is open."""
    names = (("pool", pool.name),)
    found: list[Blocker] = []
    if pool.paused:
        helps = "a person has to resume the queue; what runs is not touched"
        found.append(
            Blocker(
                "queue_paused", f"the queue of pool {quoted(pool.name)} is paused", (), names, None, pool.set_by, helps
            )
        )
    if pool.draining:
        helps = "use another pool, or wait until a person opens the queue again"
        said = f"the queue of pool {quoted(pool.name)} is draining: what runs may finish, nothing new starts"
        found.append(Blocker("queue_draining", said, (), names, None, pool.set_by, helps))
    if opens_at_ms > now_ms:
        said = f"pool {quoted(pool.name)} starts nothing before {at_text(opens_at_ms)}: its start window is closed"
        helps = "wait: it starts by itself after that time; or use another pool"
        found.append(Blocker("start_window", said, (), names, opens_at_ms, pool.who_set("windows"), helps))
    return found


def behind(pool: str, ask_id: str, at_ms: int = -1) -> Blocker:
    """The ask whose turn is before this one's, and when it will start at the latest (-1: nobody knows)."""
    if at_ms >= 0:
        return Blocker(
            "reserved_for",
            f"{quoted(ask_id)} came first in the queue of pool {quoted(pool)} and starts at {at_text(at_ms)} at the latest;"
            " this would still use then what is kept for it",
            names=(("pool", pool), ("ahead", ask_id)),
            until_ms=at_ms,
            helps="wait for its turn, or give fewer hours: what is over by then may start now",
        )
    return Blocker(
        "behind",
        f"{quoted(ask_id)} came first in the queue of pool {quoted(pool)} and waits for what this would take",
        names=(("pool", pool), ("ahead", ask_id)),
        helps="wait for its turn, or ask for what the first cannot use: another pool, another host, no card",
    )


def reserved_in_advance(reservation: Reservation, wanted: int, left: int, now_ms: int) -> Blocker:
    """Cards that a person booked for somebody else, for a time in which this ask would still run. Units of 1/840 card."""
    begin, end = at_text(reservation.begin_ms), at_text(reservation.end_ms)
    helps = "wait until its end"
    if reservation.begin_ms > now_ms:
        helps = "give fewer hours: what is over before it begins may start now; or wait until its end"
    return Blocker(
        "reserved_for",
        f"{plural(reservation.cards, 'card', 'cards')} of pool {quoted(reservation.pool)} are reserved for the owner"
        f" {quoted(reservation.owner)} from {begin} to {end}: {cards_text(left, noun=False)} left beside them,"
        f" {cards_text(wanted, noun=False)} wanted",
        (("reserved", reservation.cards), ("wanted", cards_up(wanted)), ("free", left // UNITS_PER_CARD)),
        (("pool", reservation.pool), ("owner", reservation.owner), ("reservation", reservation.id)),
        until_ms=reservation.end_ms,
        set_by=reservation.set_by,
        helps=helps,
    )


def of_hosts(fleet: Fleet, shape: Shape, obstacles: tuple[int, ...], ends_ms: int) -> list[Blocker]:
    """The obstacles that `Fleet.obstacles` found, told with their numbers, in their order."""
    found: list[Blocker] = []
    for obstacle in obstacles:
        if obstacle == bits.BEHIND:
            if (claim := fleet.first_claim(shape, ends_ms)) is not None:
                found.append(behind(shape.pool, claim.ask_id, claim.at_ms))
        elif obstacle == bits.BUSY:
            found.append(_busy(fleet, shape))
        else:
            found.append(_of_host(fleet, shape, obstacle))
    return found


def _noun(shape: Shape, count: int) -> str:
    return (
        plural(count, "place without a card", "places without a card") if shape.cpu else plural(count, "card", "cards")
    )


def _wanted(shape: Shape) -> int:
    return shape.low * shape.nodes


def _busy(fleet: Fleet, shape: Shape) -> Blocker:
    holder, free, in_use = fleet.earliest(shape)
    numbers = (("wanted", _wanted(shape)), ("free", free), ("in_use", in_use))
    names: tuple[tuple[str, str], ...] = (("pool", shape.pool),)
    until_ms: int | None = None
    message = (
        f"{_noun(shape, _wanted(shape))} wanted in pool {quoted(shape.pool)}: {free} that fit free, {in_use} in use"
    )
    if shape.nodes > 1:
        message += f"; {shape.low} on each of {shape.nodes} hosts wanted"
    elif free >= _wanted(shape):
        message += ", not enough on one host" if not shape.needs.exclusive_host else ", no host without others"
    if holder is not None:
        names += (("holder", holder.agent),)
        until_ms = holder.until_ms
        if until_ms is None:
            message += f"; nobody knows when {quoted(holder.agent)} ends"
        else:
            message += f"; enough is free once {quoted(holder.agent)} ends, at the latest at {at_text(until_ms)}"
    helps = "wait in the queue, it starts by itself; or ask for fewer, or release what you do not use"
    return Blocker("host_cpu_jobs" if shape.cpu else "busy", message, numbers, names, until_ms, helps=helps)


def _of_host(fleet: Fleet, shape: Shape, obstacle: int) -> Blocker:
    hosts = [seat.host for seat in shape.seats]
    needs = shape.needs
    code = _CODES[obstacle]
    names: tuple[tuple[str, str], ...] = (("pool", shape.pool),)
    if obstacle in (bits.HOST_CPU, bits.HOST_MEMORY, bits.HOST_DISK):
        hosts = [host for host in hosts if not host.gate]
        if obstacle == bits.HOST_CPU:
            what, wanted, left = "processors", needs.cpus, max((h.cpus_left for h in hosts), default=0)
        elif obstacle == bits.HOST_MEMORY:
            what, wanted, left = "MiB of memory", needs.memory_mib, max((h.memory_left for h in hosts), default=0)
        else:
            what, wanted, left = "MiB of disk", needs.disk_mib, max((h.disk_left for h in hosts), default=0)
        left = max(0, left)
        return Blocker(
            code,
            f"{wanted} {what} wanted on a host of pool {quoted(shape.pool)}: at most {left} not booked",
            (("wanted", wanted), ("free", left)),
            names,
            helps="ask for less, or wait until work on these hosts ends",
        )
    if obstacle == bits.LIMIT:
        full = [host for host in hosts if not host.gate and host.room_for <= 0]
        most = max((host.view.max_jobs for host in full), default=0)
        return Blocker(
            code,
            f"hosts of pool {quoted(shape.pool)} that fit have as many leases as they may, at most {most}",
            (("hosts", len(full)), ("limit", most)),
            names,
            set_by="configuration",
            helps="wait until work on these hosts ends, or have a person raise the host's limit",
        )
    if obstacle in (bits.OCCUPIED, bits.SICK):
        masks = [
            (
                seat.host,
                (seat.host.occupied if obstacle == bits.OCCUPIED else seat.host.sick) & (seat.cards | seat.shares),
            )
            for seat in shape.seats
        ]
        count = sum(mask.bit_count() for _, mask in masks)
        first = next((host.name for host, mask in masks if mask), "")
        if obstacle == bits.OCCUPIED:
            said = "used by processes that nobody leased them for, or not verified"
            helps = "a person has to end those processes or clear the slot; list_gpus tells who"
        else:
            said, helps = "sick", "a person has to repair or reset them; list_gpus tells what is wrong"
        place = _noun(shape, count)
        return Blocker(
            code,
            f"{_noun(shape, _wanted(shape))} wanted in pool {quoted(shape.pool)}: {place} that fit are {said},"
            f" the first on host {quoted(first)}",
            (("wanted", _wanted(shape)), ("count", count)),
            (*names, ("host", first)),
            helps=helps,
        )
    closed = [host for host in hosts if host.gate & obstacle]
    first = closed[0].name if closed else ""
    said, helps = {
        bits.DRAINING: ("get no new work", "a person has to end the draining of the host"),
        bits.POLICY: ("take no work of this kind", "a person has to classify the host or end its quarantine"),
        bits.DOWN: ("do not answer", "wait until the link is back, or have a person look at the host"),
    }[obstacle]
    if obstacle == bits.POLICY and closed and closed[0].view.mode == "quarantined":
        helps = "list_hosts says why the host is quarantined and what ends that"
    others = f" and {len(closed) - 1} more" if len(closed) > 1 else ""
    mode = f" ({closed[0].view.mode})" if closed and obstacle != bits.DOWN else ""
    return Blocker(
        code,
        f"hosts of pool {quoted(shape.pool)} that fit {said}: {quoted(first)}{mode}{others}",
        (("hosts", len(closed)),),
        (*names, ("host", first)),
        helps=helps,
    )


def never(fleet: Fleet, shape: Shape) -> Blocker:
    """Why no host of the pool can ever give this: the first need that leaves nothing, with numbers."""
    needs, pool = shape.needs, quoted(shape.pool)

    def refuse(need: str, said: str, wanted: int, most: int, helps: str) -> Blocker:
        numbers = (("wanted", wanted), ("most", most))
        return Blocker(
            "no_such_gpu",
            said,
            numbers,
            (("pool", shape.pool), ("need", need)),
            helps=f"{helps}; list_gpus shows what there is",
        )

    here: list[tuple[str, Kind, int]] = []  # (host, kind of slot, how many) of the pool
    missed: list[str] = []
    for host in fleet.hosts:
        miss = host_misses(needs, host.view)
        for kind, mask in host.kinds.items():
            if kind[0] == shape.pool and (kind[1] == "cpu") == shape.cpu:
                if miss:
                    missed.append(miss)
                else:
                    divided = mask & host.mig if shape.low > 1 else 0  # only one part of it can be used
                    here.append((host.name, kind, (mask & ~divided).bit_count() or min(1, divided)))
    if not here and not missed:
        what = "place for jobs without a card" if shape.cpu else "card"
        return refuse("pool", f"pool {pool} has no {what}", _wanted(shape), 0, "use another pool")
    if not here:
        need = max(missed, key=_HOST_NEEDS.index)  # the need that the host which comes nearest fails at
        return _host_never(fleet, shape, need, refuse)
    fitting = [(host, kind, count) for host, kind, count in here if shape.cpu or not card_misses(needs, kind)]
    if not fitting:
        need = max((card_misses(needs, kind) for _, kind, _ in here), key=_CARD_NEEDS.index)
        if need == "models":
            wanted = ", ".join(quoted(model) for model in needs.models)
            return refuse(need, f"no card of pool {pool} is of the model {wanted}", 1, 0, "name another model or none")
        passed = [kind for _, kind, _ in here if not card_misses(_only_before(needs, need), kind)]
        if need == "gpu_memory_mib":
            most = max((kind[4] for kind in passed), default=0)
            said = f"no card of pool {pool} that fits otherwise has {needs.gpu_memory_mib} MiB: the largest has {most}"
            return refuse(need, said, needs.gpu_memory_mib, most, "ask for less memory")
        most = max((kind[5] for kind in passed), default=0)
        said = f"no card of pool {pool} that fits otherwise has compute capability {_tenths(needs.capability)}: the newest has {_tenths(most)}"
        return refuse(need, said, needs.capability, most, "ask for a lower capability")
    whole: dict[str, int] = {}
    for name, kind, count in fitting:
        if kind[2] == 1:
            whole[name] = whole.get(name, 0) + count
    if not whole:
        said = f"the cards of pool {pool} that fit are given out in shares only, {shape.low} whole wanted"
        return refuse("gpus", said, shape.low, 0, "ask for one card and say how much memory it needs (gpu_memory_mib)")
    enough = [name for name, count in whole.items() if count >= shape.low]
    if enough:
        said = f"{shape.nodes} hosts with {_noun(shape, shape.low)} each wanted: pool {pool} has {len(enough)}"
        return refuse("nodes", said, shape.nodes, len(enough), "ask for fewer hosts")
    most = max(whole.values())
    said = f"{_noun(shape, shape.low)} on one host wanted: no host of pool {pool} has more than {most} that fit"
    return refuse("gpus", said, shape.low, most, f"ask for at most {most}")


_HOST_NEEDS = ("hosts", "labels", "driver", "cuda", "cpus", "memory_mib", "disk_mib")
_CARD_NEEDS = ("models", "gpu_memory_mib", "capability")

Refuse = Callable[[str, str, int, int, str], Blocker]


def _only_before(needs: Needs, need: str) -> Needs:
    """These needs of cards without `need` and those that are looked at after it."""
    return replace(needs, gpu_memory_mib=0 if need == "gpu_memory_mib" else needs.gpu_memory_mib, capability=0)


def _tenths(value: int) -> str:
    return f"{value // 10}.{value % 10}"


def _host_never(fleet: Fleet, shape: Shape, need: str, refuse: Refuse) -> Blocker:
    """No host of the pool meets `need`, or one before it."""
    needs, pool = shape.needs, quoted(shape.pool)
    views = [
        host.view
        for host in fleet.hosts
        if any(kind[0] == shape.pool and (kind[1] == "cpu") == shape.cpu for kind in host.kinds)
    ]
    near = [view for view in views if host_misses(needs, view) == need]
    if need == "hosts":
        wanted = ", ".join(quoted(name) for name in sorted(needs.hosts))
        return refuse(
            need, f"none of the hosts {wanted} has what is wanted in pool {pool}", 1, 0, "name other hosts or none"
        )
    if need == "labels":
        wanted = ", ".join(quoted(f"{name}={value}") for name, value in sorted(needs.labels))
        return refuse(need, f"no host of pool {pool} has all the labels {wanted}", 1, 0, "ask for other labels or none")
    if need == "driver":
        newest = max((view.driver for view in near), key=version, default="")
        said = f"no host of pool {pool} that fits otherwise has driver {quoted(needs.driver)}: the newest is {quoted(newest)}"
        return refuse(need, said, 1, 0, "ask for an older driver")
    if need == "cuda":
        most = max((view.cuda for view in near), default=0)
        said = f"no host of pool {pool} that fits otherwise has CUDA {_cuda(needs.cuda)}: the newest is {_cuda(most)}"
        return refuse(need, said, needs.cuda, most, "ask for an older CUDA")
    wanted_n, most, what = {
        "cpus": (needs.cpus, max((view.cpus for view in near), default=0), "processors"),
        "memory_mib": (needs.memory_mib, max((view.memory_mib for view in near), default=0), "MiB of memory"),
        "disk_mib": (needs.disk_mib, max((view.disk_mib for view in near), default=0), "MiB of disk"),
    }[need]
    said = f"no host of pool {pool} that fits otherwise has {wanted_n} {what} to book: the largest has {most}"
    return refuse(need, said, wanted_n, most, "ask for less")


def _cuda(value: int) -> str:
    return f"{value // 1000}.{value % 1000 // 10}"
