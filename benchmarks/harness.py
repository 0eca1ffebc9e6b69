"""Runs variants in turn (A B C A B C …), so that a machine's drift meets all of them alike, and reports ratios.

A variant is a callable that returns {metric: value}. Ratios are taken round by round, then their median: on a shared
machine speeds move by a factor of two within minutes, the ratio of neighbours hardly does.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

Result = dict[str, float]
Results = dict[str, list[Result]]


def rotate(variants: Mapping[str, Callable[[], Result]], rounds: int, *, warm: int = 1) -> Results:
    """Every variant once a round; the first `warm` rounds are not counted."""
    out: Results = {name: [] for name in variants}
    for turn in range(-warm, rounds):
        for name, run in variants.items():
            gc.collect()
            result = run()
            if turn >= 0:
                out[name].append(result)
            print(
                f"  round {turn} {name}: " + " ".join(f"{k}={v:.4g}" for k, v in result.items()),
                file=sys.stderr,
                flush=True,
            )
    return out


def table(title: str, results: Results, reference: str) -> str:
    """A Markdown table per metric: median (min-max), and the median of the round-by-round ratios to `reference`."""
    metrics = list(dict.fromkeys(m for rounds in results.values() for one in rounds for m in one))
    lines = [f"### {title}", ""]
    for metric in metrics:
        lines += [f"{metric}:", "", f"| variant | median (min-max) | ratio to {reference} |", "|---|---|---|"]
        for name, rounds in results.items():
            values = [one[metric] for one in rounds if metric in one]
            if not values:
                continue
            pairs = [
                (mine[metric], theirs[metric])
                for mine, theirs in zip(rounds, results.get(reference, []), strict=False)
                if metric in mine and theirs.get(metric)
            ]
            ratio = f"{statistics.median(a / b for a, b in pairs):.3g}" if pairs else ""
            lines.append(
                f"| {name} | {statistics.median(values):.4g} ({min(values):.4g}-{max(values):.4g}) | {ratio} |"
            )
        lines.append("")
    return "\n".join(lines)


def spawn_two_at_a_time(program: str, n: int) -> None:
    """The floor of every launcher: `n` bare processes of `program`, two living at most; returns when all have ended."""
    living = 0
    for _ in range(n):
        os.posix_spawn(program, [program], os.environ)
        living += 1
        if living == 2:
            os.wait()
            living -= 1
    while living:
        os.wait()
        living -= 1


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def save(path: str | None, title: str, results: Results) -> None:
    """Keep the raw numbers beside the table."""
    if path:
        Path(path).write_text(json.dumps({"title": title, "results": results}, indent=1))
