"""The public trace of a GPU cluster of 2023 (cluster-trace-gpu-v2023): a table of nodes and one of pods."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cotenant.server.deciding.world import Needs
from cotenant.server.simulating.trace import HOUR_MS, SimHost, SimJob, Trace, TraceError

#: Memory that every card counts with: a request in thousandths of a card becomes that part of it.
CARD_MIB = 16_000
PRIORITY = {"LS": 10, "Guaranteed": 10, "Burstable": 10, "BE": 0}
OWNERS = 8
_NODE = {"sn", "cpu_milli", "memory_mib", "gpu", "model"}
_POD = {"name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "qos", "creation_time", "deletion_time"}


def is_pods(header: str) -> bool:
    """Whether a file with this first line is a table of pods."""
    return {"name", "num_gpu", "gpu_milli"} <= set(header.strip().split(","))


def is_nodes(header: str) -> bool:
    """Whether a file with this first line is a table of nodes."""
    return {"sn", "gpu", "model"} <= set(header.strip().split(","))


def read(
    nodes: Iterable[str],
    pods: Iterable[str],
    source: str,
    *,
    estimate: float = 2.0,
    owners: int = OWNERS,
    people: float = 0.0,
    seed: int = 0,
) -> Trace:
    """Fleet and jobs from the lines of both tables.

    `estimate`: how many times its running time a pod says that it may take, rounded up to hours. `owners`: among so many
    owners the pods are dealt out by `seed`, the first the busiest; the trace names none. `people`: this part of the pods
    is asked for by the owners themselves, not by their agents; also dealt out.

    Raises:
        TraceError: a table has not the columns, or a row not the numbers, that are needed.
    """
    hosts = []
    for where, row in _rows(nodes, _NODE, f"{source}: nodes"):
        cards = _int(row, "gpu", where)
        if not cards:
            continue
        cpus = _int(row, "cpu_milli", where) // 1000
        hosts.append(
            SimHost(row["sn"], cards, row["model"], CARD_MIB, cpus, _int(row, "memory_mib", where), places=max(2, cpus // 8))
        )  # fmt: skip
    dice, asker = random.Random(seed), random.Random(f"{seed} asker")
    names = [f"owner{n}" for n in range(owners)]
    weights = [1 / (n + 1) for n in range(owners)]
    jobs = []
    without = never = 0
    for where, row in _rows(pods, _POD, f"{source}: pods"):
        owner, human = dice.choices(names, weights)[0], asker.random() < people
        gpus, milli = _int(row, "num_gpu", where), _int(row, "gpu_milli", where)
        submit = _int(row, "creation_time", where)
        begun = row.get("scheduled_time") or ""
        runs = _int(row, "deletion_time", where) - (_int(row, "scheduled_time", where) if begun else submit)
        never += not begun
        without += not gpus
        runs_ms = max(1, runs) * 1000
        spec = row.get("gpu_spec") or ""
        needs = Needs(
            gpus_min=gpus, gpus_max=gpus, cpus=-(-_int(row, "cpu_milli", where) // 1000), memory_mib=_int(row, "memory_mib", where),
            gpu_memory_mib=-(-milli * CARD_MIB // 1000) if gpus == 1 and milli < 1000 else 0,
            models=tuple(sorted(set(spec.split("|")))) if spec else (),
        )  # fmt: skip
        hours_ms = max(1, -(-round(runs_ms * estimate) // HOUR_MS)) * HOUR_MS
        jobs.append(
            SimJob(
                row["name"], submit * 1000, runs_ms, hours_ms, needs, owner, owner if human else f"agent-of-{owner}", human,
                priority=PRIORITY.get(row["qos"], 10), preemptible=row["qos"] == "BE",
            )
        )  # fmt: skip
    if not hosts or not jobs:
        raise TraceError(f"{source}: there is no {'node with a card' if not hosts else 'pod'} in it.")
    jobs.sort(key=lambda job: (job.submit_ms, job.id))
    began = f"each runs from scheduled_time to deletion_time, {never} that were never placed there from creation_time"
    parts = (
        "at most an eighth, a quarter or a half takes one share of a card divided in 8, 4 or 2, more takes a whole card"
    )
    notes = (
        f"{len(jobs)} pods, {without} of them without a card; {began}",
        f"gpu_milli of a single card is a part of a card: {parts}",
        "qos BE is priority batch (0) and preemptible, all others normal (10)",
        f"the trace names no owners: {owners} were dealt out, the n-th with a weight of 1/n",
        *(
            [f"{100 * people:g} % of the pods are asked for by people, the others by their agents; dealt out too"]
            if people
            else []
        ),
        f"the trace names no time limits: each pod's is {estimate:g} times its running time, rounded up to hours",
    )
    return Trace(source, tuple(hosts), tuple(jobs), notes)


def read_folder(path: Path, **options: Any) -> Trace:
    """From a folder with both tables, or from a file of pods beside the table of nodes.

    Of several tables of pods the one named `…default.csv` is read, else the first by name; give another as the file itself.

    Raises:
        TraceError, OSError: a table is missing, or cannot be read.
    """
    folder = path if path.is_dir() else path.parent
    firsts = {}
    for file in sorted(folder.glob("*.csv")):
        with file.open(encoding="utf-8-sig", errors="replace") as stream:
            firsts[file] = stream.readline(4096)
    nodes = [file for file, first in firsts.items() if is_nodes(first)]
    pods = [path] if path.is_file() else [file for file, first in firsts.items() if is_pods(first)]
    if not nodes or not pods:
        raise TraceError(
            f"{folder}: there is no table of {'nodes (sn, cpu_milli, memory_mib, gpu, model)' if not nodes else 'pods'} in it."
        )
    chosen = next((file for file in pods if file.stem.endswith("default")), pods[0])
    with nodes[0].open(encoding="utf-8-sig") as node_lines, chosen.open(encoding="utf-8-sig") as pod_lines:
        return read(node_lines, pod_lines, chosen.name, **options)


def _rows(lines: Iterable[str], wanted: set[str], where: str) -> Iterable[tuple[str, dict[str, str]]]:
    table = csv.DictReader(lines)
    missing = wanted - set(table.fieldnames or ())
    if missing:
        raise TraceError(
            f"{where}: the column {min(missing)} is missing"
            f"{': without times nothing can be simulated' if 'creation_time' in missing else ''}."
        )
    for number, row in enumerate(table, 2):
        if None in row.values():
            raise TraceError(f"{where}, line {number}: it has fewer columns than the first line.")
        yield f"{where}, line {number}", row


def _int(row: dict[str, str], key: str, where: str) -> int:
    try:
        return int(float(row[key]))
    except (ValueError, OverflowError) as exc:
        raise TraceError(f"{where}: {key} is {row[key]!r}, not a number.") from exc
