"""How long one pass of deciding takes, beside a naive scheduler in the same run.

The naive one sorts the queue, looks at every host for every ask, and knows nothing of owners, caps, reasons or
guards; it is what the pass is compared with (goal: not slower at 10,000 asks on 1,000 cards). Variants run in turn;
CPU time, median and range of the rounds.

After that: how a pass grows with the queue; one event on a full fleet, by a cold pass and by the engine that goes on from
the one before; and how fast the simulation runs on it.

usage: .venv/bin/python benchmarks/deciding.py [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from cotenant.server.deciding.decide import decide, equal_key
from cotenant.server.deciding.engine import Engine
from cotenant.server.deciding.world import (
    Ask,
    Holding,
    HostView,
    Needs,
    OwnerRules,
    Policy,
    PoolRules,
    Slot,
    Start,
    World,
)
from cotenant.server.simulating.run import Simulation
from cotenant.server.simulating.synthetic import read
from cotenant.server.waiting import Waiting

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
SIZES = (1, 1, 1, 1, 2, 2, 4, 8)
PRIORITIES = (20, 10, 0)


def naive(free: list[int], queue: list[tuple[tuple[int, int, str], int]]) -> list[tuple[str, int]]:
    """Strict priority, best fit on one host, what does not fit is skipped: (ask id, host) of those that start."""
    free = list(free)
    placed: list[tuple[str, int]] = []
    for key, need in sorted(queue):
        best, best_free = -1, 1 << 30
        for host, cards in enumerate(free):
            if need <= cards < best_free:
                best, best_free = host, cards
        if best >= 0:
            free[best] -= need
            placed.append((key[2], best))
    return placed


def fleet(hosts: int, cards: int = 8) -> World:
    """An empty fleet with one pool whose cap and reserve bind nobody yet, but are looked at."""
    names = [f"gpu{n:03d}" for n in range(hosts)]
    return World(
        hosts=tuple(HostView(name, cpus=64, memory_mib=512_000, disk_mib=1_000_000) for name in names),
        slots=tuple(
            Slot(name, f"GPU-{name}-{i}", 0, 1, i, "main", "gpu", 81_559, "NVIDIA H100 80GB HBM3", 90)
            for name in names
            for i in range(cards)
        ),
        pools=(PoolRules("main", cap=hosts * cards, reserve=0, owner_cap=hosts * cards),),
        owners=tuple(OwnerRules(f"owner{n}", cap=hosts * cards) for n in range(4)),
    )


def asks(count: int, owners: int, shared: bool, sizes: tuple[int, ...] = SIZES) -> tuple[Ask, ...]:
    """A queue of asks in a few classes; `shared`: equal needs are one object, as the store makes them."""
    dice = random.Random(1)
    needs = {n: Needs(gpus_min=n, gpus_max=n) for n in sizes}
    found: list[Ask] = []
    for i in range(count):
        size, owner = dice.choice(sizes), f"owner{dice.randrange(owners)}"
        mine = needs[size] if shared else Needs(gpus_min=size, gpus_max=size)
        priority = dice.choice(PRIORITIES)
        found.append(Ask(f"j{i:06d}", "job", owner, owner, False, "main", mine, priority, NOW_MS - count + i, HOUR_MS))
    return tuple(found)


def full(world: World, freed: int) -> World:
    """The same fleet with every card held but `freed` of the first host."""
    keys = [slot.key for slot in world.slots[freed:]]
    holdings = tuple(
        Holding(f"l{i:05d}", "job", "owner0", "owner0", False, "main", (key,), NOW_MS - HOUR_MS, NOW_MS + HOUR_MS + i)
        for i, key in enumerate(keys)
    )
    slots = tuple(slot if i < freed else replace(slot, state="held") for i, slot in enumerate(world.slots))
    return replace(world, slots=slots, holdings=holdings)


def measure(variants: dict[str, Callable[[], object]], rounds: int, repeat: int) -> dict[str, list[float]]:
    """CPU milliseconds of one call of each variant, by round; the variants take turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():
        variant()
    for _ in range(rounds):
        for name, variant in variants.items():
            gc.collect()
            begin = time.process_time_ns()
            for _ in range(repeat):
                variant()
            times[name].append((time.process_time_ns() - begin) / repeat / 1e6)
    return times


def after_an_end(classes: int, rounds: int) -> tuple[int, list[float], list[float]]:
    """One of 1,000 jobs ends while 10,000 wait, again and again: (classes of equal asks, ms cold, ms of the engine).

    Cold is `decide` over the first two of each class, as many as could start; the engine is told the whole world and
    finds out itself what changed. `classes` more hours are dealt out, so that fewer asks are alike.
    """
    world = full(fleet(125), 0)
    queue = asks(10_000, 4, True)
    if classes:
        queue = tuple(replace(ask, hours_ms=HOUR_MS + i % classes * 1000) for i, ask in enumerate(queue))
    waiting = Waiting()
    for ask in queue:
        waiting.put(ask)
    engine = Engine(replace(world, asks=queue), NOW_MS, Policy())
    slots, leases = {slot.key: slot for slot in world.slots}, {lease.id: lease for lease in world.holdings}
    ended = random.Random(2).sample(list(leases), rounds)
    cold_ms, engine_ms, now = [], [], NOW_MS
    for number, lease_id in enumerate(ended):
        now += 1000
        for key in leases.pop(lease_id).slots:
            slots[key] = replace(slots[key], state="free")
        here = replace(world, slots=tuple(slots.values()), holdings=tuple(leases.values()))
        begin = time.process_time_ns()
        engine.sync(here, now)
        decided = engine.turn(now)
        engine_ms.append((time.process_time_ns() - begin) / 1e6)
        if number < 5 or not classes:
            begin = time.process_time_ns()
            cold = decide(replace(here, asks=waiting.heads(2)), now, Policy())
            cold_ms.append((time.process_time_ns() - begin) / 1e6)
            assert [d for d in cold.decisions if isinstance(d, Start)] == list(decided.decisions)
        for start in decided.decisions:
            assert isinstance(start, Start)
            ask = waiting.get(start.ask_id)
            assert ask is not None
            waiting.drop(ask.id)
            engine.drop(ask.id)
            leases[ask.id] = Holding(
                ask.id, "job", ask.owner, ask.agent, False, "main", start.slots, now, now + ask.hours_ms
            )
            for key in start.slots:
                slots[key] = replace(slots[key], state="held")
    return len({equal_key(ask) for ask in queue}), cold_ms, engine_ms


def simulated(order: str, preempt: bool) -> tuple[int, int, float]:
    """(events, passes, CPU seconds) of 5,000 invented jobs on 64 cards with caps, reserve and hours."""
    trace = read("synthetic:jobs=5000,cards=64", 0)
    rules = PoolRules(
        trace.jobs[0].pool, cap=64, reserve=4, order=order, owner_cap=48, gpu_hours=64 * 24, preempt="within" if preempt else "off",
    )  # type: ignore[arg-type]  # fmt: skip
    gc.collect()
    begin = time.process_time_ns()
    outcome = Simulation(trace, (rules,)).run()
    return outcome.events, outcome.passes, (time.process_time_ns() - begin) / 1e9


def growth(rounds: int) -> list[tuple[int, float]]:
    """(asks, ms of a cold pass) with 8 of 1,000 cards free."""
    world = full(fleet(125), 8)
    found = []
    for count in (1_000, 10_000, 100_000):
        here = replace(world, asks=asks(count, 4, True))
        times = measure({"decide": lambda here=here: decide(here, NOW_MS, Policy())}, rounds, 1)  # type: ignore[misc]
        found.append((count, statistics.median(times["decide"])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    policy = Policy()
    big, small = fleet(125), fleet(8)
    cases: list[tuple[str, World, int]] = [
        ("10,000 asks in 48 classes, 1,000 free cards", replace(big, asks=asks(10_000, 4, True)), 1),
        ("the same, no two asks share their needs object", replace(big, asks=asks(10_000, 4, False)), 1),
        ("10,000 asks of one card, 1,000 free cards", replace(big, asks=asks(10_000, 1, True, (1,))), 1),
        ("10,000 asks, 1,000 cards, 8 of them free", replace(full(big, 8), asks=asks(10_000, 4, True)), 1),
        ("200 asks on 64 cards, 8 of them free", replace(full(small, 8), asks=asks(200, 4, True)), 20),
        (
            "1,000 equal asks, 2 cards",
            replace(fleet(1, 2), asks=tuple(replace(a, priority=10) for a in asks(1_000, 1, True, (1,)))),
            20,
        ),
    ]
    results: list[dict[str, object]] = []
    for name, world, repeat in cases:
        free = [sum(1 for s in world.slots if s.host == h.name and s.state == "free") for h in world.hosts]
        queue = [((-a.priority, a.queued_at_ms, a.id), a.needs.gpus_min) for a in world.asks]
        variants: dict[str, Callable[[], object]] = {
            "naive": lambda free=free, queue=queue: naive(free, queue),  # type: ignore[misc]
            "decide": lambda world=world: decide(world, NOW_MS, policy),  # type: ignore[misc]
        }
        times = measure(variants, args.rounds, repeat)
        starts = sum(isinstance(d, Start) for d in decide(world, NOW_MS, policy).decisions)
        ratios = [mine / base for mine, base in zip(times["decide"], times["naive"], strict=True)]
        results.append(
            {
                "case": name,
                "starts": starts,
                "naive_ms": round(statistics.median(times["naive"]), 3),
                "decide_ms": round(statistics.median(times["decide"]), 3),
                "decide_ms_range": [round(min(times["decide"]), 3), round(max(times["decide"]), 3)],
                "ratio": round(statistics.median(ratios), 3),
            }
        )
    if args.json:
        print(json.dumps(results))
        return
    print("| case | started | naive ms | decide ms (range) | ratio |\n|---|---|---|---|---|")
    for row in results:
        low, high = row["decide_ms_range"]  # type: ignore[misc]
        print(
            f"| {row['case']} | {row['starts']} | {row['naive_ms']} | {row['decide_ms']} ({low}-{high}) | {row['ratio']} |"
        )
    print("\n| asks, 1,000 cards | decide ms |\n|---|---|")
    for count, cost in growth(args.rounds):
        print(f"| {count:,} | {cost:.1f} |")
    print("\n| one job ends, 10,000 wait | classes | decide ms | engine ms | ratio |\n|---|---|---|---|---|")
    for name, classes in (("few kinds", 0), ("20 time limits", 20), ("400 time limits", 400)):
        count, cold, kept = after_an_end(classes, 40)
        middle = statistics.median(cold), statistics.median(kept)
        print(f"| {name} | {count:,} | {middle[0]:.1f} | {middle[1]:.2f} | {middle[0] / middle[1]:.0f} |")
    print("\n| simulated, 5,000 jobs on 64 cards | events | passes | events a CPU second |\n|---|---|---|---|")
    for order in ("fifo", "fairshare"):
        for preempt in (False, True):
            events, passes, cpu_s = simulated(order, preempt)
            name = f"{order}, caps, reserve, hours{', preemption' if preempt else ''}"
            print(f"| {name} | {events:,} | {passes:,} | {events / cpu_s:,.0f} |")


if __name__ == "__main__":
    main()
