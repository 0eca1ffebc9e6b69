"""From what a person types to a simulation: which reader a trace needs, and the rules of a policy file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cotenant.server.config import load, parse
from cotenant.server.deciding.world import PoolRules
from cotenant.server.model.rules import Rules
from cotenant.server.simulating import alibaba, synthetic
from cotenant.server.simulating.trace import Trace, TraceError, divided, fleet_of, read_lines, thinned


def open_trace(
    name: str,
    *,
    seed: int = 0,
    hosts: int | None = None,
    cards: int | None = None,
    estimate: float = 2.0,
    people: float = 0.0,
    default_hours: int = 24,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """The trace that `name` means: `synthetic[:…]`, a folder or file of the cluster trace of 2023, or a file of JSON lines.

    `people` is for the cluster trace: see `alibaba.read`.

    Raises:
        TraceError: it is none of these, or cannot be used.
        OSError: it cannot be read.
    """
    if name.partition(":")[0] == "synthetic":
        return divided(thinned(synthetic.read(name, seed), hosts=hosts, cards=cards, seed=seed))
    path = Path(name)
    if not path.exists():
        raise TraceError(f"there is no file or folder {name}; an invented trace is named synthetic:jobs=1000,cards=64.")
    if path.is_dir() or path.suffix == ".csv":
        trace = alibaba.read_folder(path, estimate=estimate, people=people, seed=seed)
        return divided(thinned(trace, hosts=hosts, cards=cards, seed=seed))
    with path.open(encoding="utf-8") as lines:
        try:
            trace = read_lines(lines, path.name, default_hours, progress)
        except UnicodeDecodeError as exc:
            raise TraceError(f"{name}: not a text file in UTF-8.") from exc
    if not trace.hosts:
        if cards is None:
            raise TraceError(f"{name} has no line with a host: say how many cards there are with --cards N.")
        note = f"the trace has no hosts: {cards} cards in hosts of 8 were invented"
        return divided(replace(trace, hosts=fleet_of(cards), notes=(*trace.notes, note)))
    return thinned(trace, hosts=hosts, cards=cards, seed=seed)


def open_rules(file: str | None) -> Rules:
    """The rules of a policy file: the keys of cotenant.toml, of which pools, owners and agents count. None: the defaults.

    Raises:
        ConfigError: it cannot be read, or something in it cannot be meant.
    """
    here = Path.cwd()
    settings = (
        load(data_dir=here, config_file=Path(file)) if file is not None else parse("", data_dir=here, file="defaults")
    )
    return settings.rules


def pools_for(rules: Rules, trace: Trace) -> tuple[PoolRules, ...]:
    """The rules of the pools of a trace; a pool that the file does not name has those of its default pool."""
    names = dict.fromkeys([*(host.pool for host in trace.hosts), *(job.pool for job in trace.jobs)])
    first = next(iter(rules.pools.values()))
    given = rules.pools.get("default", first)
    return tuple(rules.pools.get(name) or replace(given, name=name) for name in names)
