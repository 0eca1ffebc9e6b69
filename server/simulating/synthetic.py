"""An invented trace: arrivals at random times, running times of every length, a few busy owners. Equal seed, equal trace."""

from __future__ import annotations

import math
import random

from cotenant.server.deciding.world import Needs
from cotenant.server.simulating.trace import HOUR_MS, SimJob, Trace, TraceError, fleet_of

#: What may stand behind `synthetic:`, with its default and what it is.
OPTIONS: dict[str, tuple[float, str]] = {
    "jobs": (1000, "how many jobs"),
    "cards": (64, "cards of the fleet, in hosts of 8"),
    "load": (1.2, "card time asked for, as a multiple of what the fleet has while jobs arrive"),
    "minutes": (30, "median running time"),
    "spread": (1.5, "sigma of the logarithm of the running time"),
    "owners": (5, "owners; the first is the busiest"),
    "people": (0, "part of the jobs that people ask for themselves, 0 to 1"),
    "batch": (0.3, "part of the jobs of priority batch, preemptible"),
    "high": (0.1, "part of the jobs of priority high"),
    "shares": (0, "part of the single-card jobs that want a quarter of a card"),
}
SIZES = (1, 1, 1, 1, 1, 2, 2, 4, 8)
CARD_MIB = 81_559


def read(text: str, seed: int) -> Trace:
    """The trace that `synthetic` or `synthetic:jobs=…,cards=…` names.

    Raises:
        TraceError: an option is unknown or no number in its range.
    """
    values = {key: default for key, (default, _) in OPTIONS.items()}
    for part in filter(None, text.partition(":")[2].split(",")):
        key, _, value = part.partition("=")
        if key not in OPTIONS:
            raise TraceError(f"synthetic has no option {key!r}; it has: {', '.join(OPTIONS)}.")
        try:
            values[key] = float(value)
        except ValueError as exc:
            raise TraceError(f"synthetic: {key} must be a number, not {value!r}.") from exc
        if not 0 <= values[key] <= 10_000_000:
            raise TraceError(f"synthetic: {key} is {value}: it must be 0 to 10,000,000.")
    for key in ("jobs", "cards", "owners", "load", "minutes"):
        if values[key] < (0.01 if key in ("load", "minutes") else 1):
            raise TraceError(f"synthetic: {key} is {values[key]:g}: too small.")
    return generated(seed=seed, **values)


def generated(
    *, seed: int, jobs: float, cards: float, load: float, minutes: float, spread: float, owners: float, people: float,
    batch: float, high: float, shares: float,
) -> Trace:  # fmt: skip
    """Poisson arrivals, lognormal running times, sizes of 1 to 8 cards; limits that are too generous by 1 to 3 times."""
    dice = random.Random(seed)
    count, fleet = int(jobs), fleet_of(int(cards), CARD_MIB)
    largest = max(host.cards for host in fleet)
    sizes = [size for size in SIZES if size <= largest]
    mean_ms = minutes * 60_000 * math.exp(spread * spread / 2)
    every_ms = mean_ms * (sum(sizes) / len(sizes)) / (int(cards) * load)
    names = [f"owner{n}" for n in range(int(owners))]
    weights = [1 / (n + 1) for n in range(len(names))]
    at = 0.0
    found = []
    for number in range(count):
        at += dice.expovariate(1) * every_ms
        size = dice.choice(sizes)
        runs_ms = max(1000, round(minutes * 60_000 * math.exp(spread * dice.gauss(0, 1))))
        limit_ms = -(-round(runs_ms * dice.uniform(1, 3)) // HOUR_MS) * HOUR_MS
        owner = dice.choices(names, weights)[0]
        human = dice.random() < people
        draw, part = dice.random(), dice.random()
        priority = 0 if draw < batch else 20 if draw > 1 - high else 10
        memory = CARD_MIB // 4 if size == 1 and part < shares else 0
        found.append(
            SimJob(
                f"job{number:06d}", round(at), runs_ms, limit_ms, Needs(gpus_min=size, gpus_max=size, gpu_memory_mib=memory), owner,
                owner if human else f"agent-of-{owner}", human, priority, preemptible=priority == 0,
            )
        )  # fmt: skip
    notes = (
        f"{count} jobs at random times, one in {every_ms / 1000:.1f} s on average; running times lognormal, median {minutes:g} min",
        "each job's time limit is 1 to 3 times its running time, rounded up to hours",
    )
    return Trace("synthetic", fleet, tuple(found), notes)
