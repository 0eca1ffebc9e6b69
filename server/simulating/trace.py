"""What is simulated: a fleet and the jobs that come to it, whatever format they were read from.

The plain format is JSON lines, in any order, times in seconds from the beginning::

    {"host": "gpu1", "cards": 8, "model": "H100", "memory_mib": 81559, "cpus": 96, "host_memory_mib": 1000000}
    {"job": "a", "submit_s": 0, "runs_s": 3600, "owner": "ann", "priority": 10, "gpus": 1, "hours": 2}
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from cotenant.server.deciding.world import HostView, Needs, Slot

POOL = "main"
HOUR_MS = 3_600_000
MAX_LINES = 5_000_000


class TraceError(Exception):
    """The trace cannot be used; the text says where and what to do instead."""


@dataclass(frozen=True)
class SimJob:
    """One job as it came. `runs_ms` is how long its work takes, `hours_ms` how long it says that it may take.

    `after_ms` is a time before which it did not want to start.
    """

    id: str
    submit_ms: int
    runs_ms: int
    hours_ms: int
    needs: Needs
    owner: str = "owner0"
    agent: str = ""
    human: bool = False
    priority: int = 10
    pool: str = POOL
    preemptible: bool = False
    default_hours: bool = False
    after_ms: int = 0


@dataclass(frozen=True)
class SimHost:
    """One machine: its cards are alike. `shares` per card in the order of the cards; 1 = whole."""

    name: str
    cards: int
    model: str = ""
    memory_mib: int = 81_559  # of a card
    cpus: int = 64
    host_memory_mib: int = 512_000
    shares: tuple[int, ...] = ()
    places: int = 2  # for jobs without a card
    pool: str = POOL

    def view(self) -> HostView:
        return HostView(self.name, cpus=self.cpus, memory_mib=self.host_memory_mib, disk_mib=1 << 40)

    def slots(self) -> list[Slot]:
        """Its slots, all free."""
        found = []
        for index in range(self.cards):
            parts = self.shares[index] if index < len(self.shares) else 1
            for share in range(parts):
                found.append(
                    Slot(
                        self.name, f"GPU-{self.name}-{index}", share, parts, index, self.pool, "gpu",
                        self.memory_mib // parts, self.model,
                    )
                )  # fmt: skip
        found += [Slot(self.name, "cpu", n, self.places, None, self.pool, "cpu", 0) for n in range(self.places)]
        return found


@dataclass(frozen=True)
class Trace:
    """A fleet and its jobs in the order of their submits; `notes` say how the source was read as this model."""

    source: str
    hosts: tuple[SimHost, ...]
    jobs: tuple[SimJob, ...]
    notes: tuple[str, ...] = ()

    @property
    def cards(self) -> int:
        return sum(host.cards for host in self.hosts)


def thinned(trace: Trace, *, hosts: int | None = None, cards: int | None = None, seed: int = 0) -> Trace:
    """The same jobs on fewer hosts: `hosts` of them, or as many as have `cards` cards, drawn by `seed`.

    The host that passes the number of cards keeps only as many as are missing, with their part of its processors and memory.

    Raises:
        TraceError: the fleet has not so many.
    """
    if hosts is None and cards is None:
        return trace
    if hosts is not None and not 1 <= hosts <= len(trace.hosts):
        raise TraceError(f"the trace has {len(trace.hosts)} hosts: --hosts must be 1 to {len(trace.hosts)}.")
    if cards is not None and not 1 <= cards <= trace.cards:
        raise TraceError(f"the trace has {trace.cards} cards: --cards must be 1 to {trace.cards}.")
    order = sorted(trace.hosts, key=lambda host: host.name)
    random.Random(seed).shuffle(order)
    kept: list[SimHost] = []
    left = cards if cards is not None else trace.cards
    for host in order[:hosts]:
        if left <= 0:
            break
        if host.cards > left:
            part = left
            host = replace(
                host, cards=part, cpus=host.cpus * part // host.cards, shares=host.shares[:part],
                host_memory_mib=host.host_memory_mib * part // host.cards,
            )  # fmt: skip
        left -= host.cards
        kept.append(host)
    fleet = tuple(sorted(kept, key=lambda host: host.name))
    note = f"the fleet was thinned from {trace.cards} to {sum(h.cards for h in fleet)} cards on {len(fleet)} of {len(trace.hosts)} hosts"
    return replace(trace, hosts=fleet, notes=(*trace.notes, note))


def divided(trace: Trace) -> Trace:
    """The fleet with as many cards in shares as the jobs that ask for a part of a card would use, by their time.

    A job that names a memory of at most a half of the smallest card takes one share of a card in 2, 4 or 8; the time that
    all of these hold, against that of all jobs, is the part of the cards that is divided.
    """
    memory = min((host.memory_mib for host in trace.hosts if host.cards), default=0)
    time = {1: 0, 2: 0, 4: 0, 8: 0}
    for job in trace.jobs:
        if job.needs.gpus_min:
            parts = parts_for(job.needs.gpu_memory_mib, memory) if job.needs.gpu_memory_mib else 1
            held = min(job.runs_ms, job.hours_ms)
            time[parts] += held * job.needs.gpus_min * job.needs.nodes // parts
    every = sum(time.values())
    if every == time[1]:
        return trace
    wanted = {parts: -(-trace.cards * time[parts] // every) for parts in (8, 4, 2) if time[parts]}
    left = dict(wanted)
    hosts = []
    # the small hosts first, so that the large ones stay whole for jobs over many cards
    shares: dict[str, tuple[int, ...]] = {}
    for host in sorted(trace.hosts, key=lambda host: (host.cards, host.name)):
        mine = []
        for _ in range(host.cards):
            parts = next((p for p in (8, 4, 2) if left.get(p, 0) > 0), 1)
            if parts > 1:
                left[parts] -= 1
            mine.append(parts)
        shares[host.name] = tuple(mine)
    for host in trace.hosts:
        hosts.append(replace(host, shares=shares[host.name]))
    told = ", ".join(f"{count} in {parts}" for parts, count in sorted(wanted.items()))
    return replace(
        trace,
        hosts=tuple(hosts),
        notes=(*trace.notes, f"cards divided into shares, as the time asked of parts is to all time asked: {told}"),
    )


def parts_for(memory_mib: int, card_mib: int) -> int:
    """Into how many shares (1, 2, 4, 8) a card of `card_mib` may be divided so that one has `memory_mib`."""
    return next((parts for parts in (8, 4, 2) if memory_mib <= card_mib // parts), 1)


# ---- the plain format -------------------------------------------------------------------------

_HOST: dict[str, tuple[type, Any]] = {
    "host": (str, None), "cards": (int, 8), "model": (str, ""), "memory_mib": (int, 81_559), "cpus": (int, 64),
    "host_memory_mib": (int, 512_000), "shares": (int, 1), "cpu_jobs": (int, 2), "pool": (str, POOL),
}  # fmt: skip
_JOB: dict[str, tuple[type, Any]] = {
    "job": (str, None), "submit_s": (float, None), "runs_s": (float, None), "hours": (float, 0), "owner": (str, "owner0"),
    "agent": (str, ""), "human": (bool, False), "priority": (int, 10), "gpus": (int, 1), "nodes": (int, 1),
    "gpu_memory_mib": (int, 0), "gpu_model": (str, ""), "cpus": (int, 0), "memory_mib": (int, 0), "pool": (str, POOL),
    "preemptible": (bool, False),
}  # fmt: skip


def read_lines(
    lines: Iterable[str], source: str, default_hours: int, progress: Callable[[int], None] | None = None
) -> Trace:
    """A trace in the plain format. `default_hours` is the limit of a job that names none.

    Raises:
        TraceError: a line is not of the format; the text has its number.
    """
    hosts: list[SimHost] = []
    jobs: list[SimJob] = []
    seen: set[tuple[str, str]] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if number > MAX_LINES:
            raise TraceError(f"{source}: more than {MAX_LINES} lines: split it.")
        where = f"{source}:{number}"
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise TraceError(f"{where}: not a JSON object on a line of its own: {exc}.") from exc
        if not isinstance(row, dict) or not ("host" in row or "job" in row):
            raise TraceError(f'{where}: a line is a JSON object with "host" or with "job".')
        kind = "host" if "cards" in row or "job" not in row else "job"
        given = _checked(row, _HOST if kind == "host" else _JOB, where)
        if (kind, given[kind]) in seen:
            raise TraceError(f"{where}: {kind} {json.dumps(given[kind])} stands there twice.")
        seen.add((kind, given[kind]))
        if kind == "host":
            hosts.append(
                SimHost(
                    given["host"], given["cards"], given["model"], given["memory_mib"], given["cpus"], given["host_memory_mib"],
                    _shares(given, where), given["cpu_jobs"], given["pool"],
                )
            )  # fmt: skip
        else:
            jobs.append(_job(given, default_hours))
        if progress is not None and number % 1000 == 0:
            progress(number)
    if not jobs:
        raise TraceError(f"{source}: there is no job in it.")
    jobs.sort(key=lambda job: (job.submit_ms, job.id))
    return Trace(source, tuple(hosts), tuple(jobs))


def _checked(row: dict[str, Any], keys: dict[str, tuple[type, Any]], where: str) -> dict[str, Any]:
    for key in row:
        if key not in keys:
            raise TraceError(f"{where}: unknown key {json.dumps(key)}; known: {', '.join(keys)}.")
    out = {}
    for key, (kind, default) in keys.items():
        value = row.get(key, default)
        if value is None:
            raise TraceError(f"{where}: {key} is missing.")
        sound = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not sound or (isinstance(value, bool) and kind is not bool):
            raise TraceError(
                f"{where}: {key} must be {'a number' if kind in (int, float) else 'text' if kind is str else 'true or false'}."
            )
        if kind in (int, float) and not 0 <= value < 1e12:
            raise TraceError(f"{where}: {key} is {value}: it must be 0 or more, and below 10^12.")
        out[key] = value
    return out


def _shares(given: dict[str, Any], where: str) -> tuple[int, ...]:
    if not 1 <= given["shares"] <= 8:
        raise TraceError(f"{where}: shares is {given['shares']}: a card is whole (1) or divided into 2 to 8.")
    shares: int = given["shares"]
    return (shares,) * int(given["cards"])


def _job(given: dict[str, Any], default_hours: int) -> SimJob:
    gpus = given["gpus"]
    hours = given["hours"] or default_hours
    needs = Needs(
        gpus_min=gpus, gpus_max=gpus, gpu_memory_mib=given["gpu_memory_mib"], cpus=given["cpus"], memory_mib=given["memory_mib"],
        nodes=max(1, given["nodes"]), models=(given["gpu_model"],) if given["gpu_model"] else (),
    )  # fmt: skip
    return SimJob(
        given["job"], round(given["submit_s"] * 1000), max(1, round(given["runs_s"] * 1000)), max(1, round(hours * HOUR_MS)),
        needs, given["owner"], given["agent"] or f"agent-of-{given['owner']}", given["human"], given["priority"], given["pool"],
        given["preemptible"], not given["hours"],
    )  # fmt: skip


def fleet_of(cards: int, memory_mib: int = 81_559) -> tuple[SimHost, ...]:
    """Hosts of eight cards, the last of what is left."""
    count = -(-cards // 8)
    return tuple(
        SimHost(f"gpu{n:03d}", min(8, cards - 8 * n), "H100", memory_mib, 96, 1_000_000, places=8) for n in range(count)
    )
