"""`cotenant simulate`: the decision core over a trace, on a virtual clock. Needs no server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cotenant.ui.cli import show
from cotenant.ui.cli.problems import Problem, Usage

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator
    from typing import Any

    from cotenant.ui.cli.entry import Parser

WAIT_HEADS = ("", "JOBS", "MEAN WAIT", "MEDIAN", "P95", "LONGEST")


def configure(parser: Parser, _: str) -> None:
    it = parser.command(
        act,
        example="cotenant simulate synthetic:jobs=2000,cards=32 --policy mine.toml\n"
        "  cotenant simulate traces/cluster-2023 --cards 100 --schedule out.jsonl",
    )
    it.add_argument(
        "trace", metavar="TRACE", help="synthetic[:KEY=N,…], a folder or .csv of the 2023 cluster trace, or JSON lines"
    )
    it.add_argument(
        "--policy", metavar="FILE", help="rules with the keys of cotenant.toml, as [pools.main] (else the defaults)"
    )
    it.add_argument("--no-backfill", action="store_true", help="nobody passes the first that does not fit")
    it.add_argument("--schedule", metavar="OUT", help="write every job's start, end and slots there, as JSON lines")
    it.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn (0)")
    it.add_argument("--hosts", type=int, metavar="N", help="keep only N hosts of the fleet")
    it.add_argument("--cards", type=int, metavar="N", help="keep only hosts with N cards together")
    it.add_argument(
        "--estimate", type=float, default=2.0, metavar="F",
        help="time limits as a multiple of running times, where a trace has none (2)",
    )  # fmt: skip
    it.add_argument(
        "--people", type=float, default=0.0, metavar="F",
        help="of the cluster trace: the part that people ask for themselves, 0 to 1 (0)",
    )  # fmt: skip


def act(args: argparse.Namespace) -> int:
    from cotenant.server.config import ConfigError
    from cotenant.server.deciding.world import Policy
    from cotenant.server.simulating import opening, report
    from cotenant.server.simulating.run import Simulation
    from cotenant.server.simulating.trace import TraceError
    from cotenant.ui.cli.bar import Bar

    if args.url or args.token_file:
        raise Usage("simulate asks no server: it takes neither --url nor --token-file.")
    if not 0.1 <= args.estimate <= 100:
        raise Usage("--estimate must be 0.1 to 100.")
    if not 0 <= args.people <= 1:
        raise Usage("--people must be 0 to 1.")
    bar = Bar("simulating")
    try:
        rules = opening.open_rules(args.policy)
        trace = opening.open_trace(
            args.trace, seed=args.seed, hosts=args.hosts, cards=args.cards, estimate=args.estimate, people=args.people,
            default_hours=next(iter(rules.pools.values())).default_hours,
        )  # fmt: skip
        outcome = Simulation(
            trace,
            opening.pools_for(rules, trace),
            owners=tuple(rules.owners.values()),
            agents=tuple(rules.agents.values()),
            policy=Policy(backfill=not args.no_backfill),
            progress=bar.tell,
        ).run()
    except (TraceError, ConfigError) as exc:
        raise Usage(f"{str(exc)[:1].upper()}{str(exc)[1:]}") from exc
    except OSError as exc:
        raise Problem(f"{exc.strerror}: {exc.filename}.") from exc
    finally:
        bar.end()
    if args.schedule:
        _write(args.schedule, report.schedule(outcome))
    told = report.summary(outcome)
    if args.json:
        show.as_json({**told, "plot": report.plots(outcome)})
    else:
        print_summary(told)
    return 0


def _write(path: str, rows: Iterable[dict[str, Any]]) -> None:
    try:
        with open(path, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as exc:
        raise Problem(f"The schedule cannot be written: {exc.strerror}: {path}.") from exc


def print_summary(told: dict[str, Any]) -> None:
    """Figures for a person."""
    for note in told["notes"]:
        show.out(f"- {show.harmless(note)}")
    used = told["utilisation"]
    show.pairs(
        [
            ("trace", f"{told['trace']}: {told['jobs']} jobs on {told['cards']} cards of {told['hosts']} hosts"),
            ("started", f"{told['started']}, never {told['never_started']}"),
            ("never because", ", ".join(f"{code} {count}" for code, count in told["reasons"].items())),
            ("at their limit", told["ended_at_limit"] or None),
            ("backfilled", told["backfilled"]),
            ("preempted", told["preempted"]),
            ("cards in use", None if used is None else f"{100 * used:.1f} % while jobs arrived"),
            ("GPU-hours", told["gpu_hours"]),
            ("events", f"{told['events']} in {told['passes']} passes"),
        ]
    )
    show.out()
    show.table(list(wait_rows(told)), WAIT_HEADS, empty="Nothing started.")


def wait_rows(told: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Rows under WAIT_HEADS: all, by asker where there are both, by owner, by priority."""
    groups = [("all", told["wait_s"])]
    if len(told["by_asker"]) > 1:
        groups += list(told["by_asker"].items())
    groups += [(f"owner {show.harmless(name)}", waits) for name, waits in told["by_owner"].items()]
    groups += [(f"priority {name}", waits) for name, waits in told["by_priority"].items()]
    for name, waits in groups:
        yield (name, waits["count"], *(span(waits[key]) for key in ("mean", "p50", "p95", "max")))


def span(seconds: float | None) -> str | None:
    """Seconds as a person says them."""
    if seconds is None:
        return None
    if seconds < 120:
        return f"{seconds:.0f}s"
    if seconds < 7200:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.1f}h"
