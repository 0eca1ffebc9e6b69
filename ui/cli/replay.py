"""`cotenant replay`: what the server decided, decided again from its journal. Needs no server, and reads beside one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.ui.cli import place, show
from cotenant.ui.cli.problems import Problem, Usage

if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser


def configure(parser: Parser, _: str) -> None:
    it = parser.command(
        act,
        example="cotenant replay\n  cotenant replay --until 2026-12-01T09:30 --show\n  cotenant replay --policy other.toml",
    )
    it.add_argument("--from", dest="since", metavar="TIME", help="begin there: ISO 8601, UTC unless it says otherwise")
    it.add_argument("--until", metavar="TIME", help="stop there")
    it.add_argument("--show", action="store_true", help="print the world then: who holds, who waits, and why")
    it.add_argument(
        "--policy", metavar="FILE", help="run what was recorded under these rules: the keys of cotenant.toml"
    )
    it.add_argument("--any-version", action="store_true", help="compare also what another version decided")


def at_ms(text: str | None, option: str) -> int | None:
    """A time that a person typed, in ms since the epoch."""
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError as exc:
        raise Usage(f"{option} {text} is no time: write it as 2026-12-01T09:30, in UTC.") from exc
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)


def act(args: argparse.Namespace) -> int:
    from cotenant.server import segments
    from cotenant.server.config import ConfigError

    if args.url or args.token_file:
        raise Usage("replay reads the journal in --data and asks no server: it takes neither --url nor --token-file.")
    since, until = at_ms(args.since, "--from"), at_ms(args.until, "--until")
    if since is not None and until is not None and since > until:
        raise Usage("--from is after --until.")
    data = Path(place.data_dir(args.data))
    try:
        if not segments.segments(data):
            raise Problem(
                f"There is no journal in {data}. A server writes one as it decides; another --data may have it."
            )
        if args.policy:
            return _under(args, data, since, until)
        if args.show:
            return _show(args, data, until)
        return _compare(args, data, since, until)
    except ConfigError as exc:
        raise Usage(str(exc)) from exc
    except segments.OtherFormat as exc:
        raise Problem(str(exc)) from exc
    except OSError as exc:
        raise Problem(f"{exc.strerror}: {exc.filename}.") from exc


def _compare(args: argparse.Namespace, data: Path, since: int | None, until: int | None) -> int:
    from cotenant.server import journal, replaying, segments
    from cotenant.ui.cli.bar import Bar

    read = segments.Found()
    files = segments.segments(data, since_ms=since, until_ms=until)
    bar = Bar("deciding again")

    def ticks() -> Any:
        for number, path in enumerate(files):
            bar.tell(number, len(files))
            for tick in segments.ticks(path, read):
                if (since is None or tick.at_ms >= since) and (until is None or tick.at_ms <= until):
                    yield tick

    try:
        found = replaying.compare(ticks(), journal.deciding_version(), any_version=args.any_version)
    finally:
        bar.end()
    same = found.differs_at_ms is None
    code = 0 if same and not read.damaged else 1
    if args.json:
        show.as_json({"matches": same, **found.__dict__, **read.__dict__})
        return code
    for remark in (*read.torn, *read.damaged):
        show.say(remark)
    skipped = sum(found.other_versions.values())
    lost = f"; {found.lost} passes were never written" if found.lost else ""
    if skipped:
        names = ", ".join(f"{count} by {name}" for name, count in sorted(found.other_versions.items()))
        show.out(
            f"{skipped} passes were decided by another version ({names}) and not compared: --any-version compares them too."
        )
    if not same:
        show.out(f"The pass at {_iso(found.differs_at_ms)} is decided differently now (- as recorded, + now):")
        for line in found.difference.splitlines():
            show.out(show.harmless(line))
    elif (again := found.ticks - skipped) or not skipped:
        show.out(f"{again} passes with {found.decisions} decisions, decided again: every byte the same{lost}.")
    return code


def _show(args: argparse.Namespace, data: Path, until: int | None) -> int:
    from cotenant.server import replaying, segments

    last = segments.last_tick(data, segments.Found(), until_ms=until)
    if last is None:
        raise Problem("The journal begins later than that.")
    world = replaying.shown(last)
    if args.json:
        show.as_json(world)
        return 0
    show.out(f"as of the pass at {_iso(world['at_ms'])} (version {world['version']})")
    show.out()
    show.table(
        [
            (
                h["lease"],
                h["job"],
                h["owner"],
                h["agent"],
                " ".join(h["slots"]),
                _iso(h["since_ms"]),
                _iso(h["hard_end_ms"]),
            )
            for h in world["holders"]
        ],
        ("LEASE", "JOB", "OWNER", "AGENT", "SLOTS", "SINCE", "HARD END"),
        empty="Nobody held anything.",
    )
    show.out()
    show.table(
        [
            (w["id"], w["owner"], w["pool"], w["priority"], w["gpus"], _iso(w["since_ms"]), w["why"][0]["message"] if w["why"] else "")
            for w in world["waiting"]
        ],
        ("WAITED", "OWNER", "POOL", "PRIORITY", "GPUS", "SINCE", "WHY"),
        empty="Nobody waited.",
    )  # fmt: skip
    return 0


def _under(args: argparse.Namespace, data: Path, since: int | None, until: int | None) -> int:
    from cotenant.server import replaying, segments
    from cotenant.server.simulating import opening, report
    from cotenant.server.simulating.run import Simulation
    from cotenant.ui.cli import simulate
    from cotenant.ui.cli.bar import Bar

    rules = opening.open_rules(args.policy)
    try:
        past = replaying.recorded(segments.all_ticks(data, since_ms=since, until_ms=until))
    except ValueError as exc:
        raise Problem(f"{str(exc)[:1].upper()}{str(exc)[1:]}.") from exc
    trace, fleet, then = past.trace, past.fleet, past.waited_ms
    recorded = {pool.name: pool for pool in fleet.pools}
    # the pool that is there where a file names none is no mistake of the file
    if unknown := sorted(rules.pools.keys() - recorded.keys() - {"default"}):
        raise Usage(
            f"{args.policy}: there is no pool {unknown[0]} in what was recorded; it has {', '.join(sorted(recorded))}."
        )
    bar = Bar("simulating")

    def run(pools: Any, owners: Any, agents: Any) -> Any:
        return Simulation(
            trace, pools, owners=owners, agents=agents, fleet=fleet, begin_ms=past.begin_ms, progress=bar.tell
        ).run()  # fmt: skip

    try:
        outcome = run(
            tuple(rules.pools.get(name, rule) for name, rule in recorded.items()),
            tuple(rules.owners.values()) or fleet.owners,
            tuple(rules.agents.values()) or fleet.agents,
        )
        as_before = report.summary(run(tuple(recorded.values()), fleet.owners, fleet.agents))["wait_s"]
    finally:
        bar.end()
    told = report.summary(outcome)
    now = {stay.job.id: stay.begun_ms - stay.queued_ms for stay in outcome.stays if stay.number == 1}
    rows: list[dict[str, Any]] = [
        {
            "lease": job.id, "owner": job.owner, "agent": job.agent, "priority": job.priority, "gpus": job.needs.gpus_min,
            "waited_s": then.get(job.id, 0) / 1000, "would_wait_s": now[job.id] / 1000 if job.id in now else None,
        }
        for job in trace.jobs
    ]  # fmt: skip
    if args.json:
        show.as_json(
            {
                **told,
                "waited_s": report.waits(list(then.values())),
                "wait_s_as_before": as_before,
                "leases": rows,
                "plot": report.plots(outcome),
            }
        )
        return 0
    simulate.print_summary(told)
    show.out()
    waited = report.waits(list(then.values()))
    show.table(
        [
            (name, waits["count"], *(simulate.span(waits[key]) for key in ("mean", "p50", "p95", "max")))
            for name, waits in (
                ("as it was", waited),
                ("the rules of then, simulated", as_before),
                ("under these rules", told["wait_s"]),
            )
        ],
        simulate.WAIT_HEADS,
        empty="",
    )
    show.out()
    moved = sorted(
        (row for row in rows if row["would_wait_s"] is None or abs(row["would_wait_s"] - row["waited_s"]) >= 1),
        key=lambda row: -abs((row["would_wait_s"] if row["would_wait_s"] is not None else 1e9) - row["waited_s"]),
    )
    show.table(
        [
            (r["lease"], r["owner"], r["gpus"], simulate.span(r["waited_s"]), "never" if r["would_wait_s"] is None else simulate.span(r["would_wait_s"]))
            for r in moved[:20]
        ],
        ("LEASE", "OWNER", "GPUS", "WAITED", "WOULD WAIT"),
        empty="Nobody would have waited longer or shorter.",
    )  # fmt: skip
    return 0


def _iso(at: int | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
