"""`cotenant estimate` and `cotenant suggest`: when something would start, and what to ask for."""

from __future__ import annotations

from cotenant.ui.cli import ask, show
from cotenant.ui.cli.fleet import clock
from cotenant.ui.cli.problems import Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse

    from cotenant.ui.cli.entry import Parser


def configure(parser: Parser, command: str) -> None:
    if command == "estimate":
        it = parser.command(act_estimate, example="cotenant estimate JOB\n  cotenant estimate --gpus 4 --hours 2")
        it.add_argument("job", nargs="?", help="a job that waits; else one with these options, submitted now")
        it.add_argument("--gpus", type=int, help="cards (1)")
        it.add_argument("--hours", type=ask.number, help="its time limit (the pool's default)")
        it.add_argument("--pool", help="in this pool (the default pool)")
        it.add_argument(
            "--priority", choices=("critical", "high", "normal", "batch"), help="who comes first in line (normal)"
        )
    else:
        it = parser.command(
            act_suggest, example="cotenant suggest --name resnet\n  cotenant suggest --command 'python train.py'"
        )
        it.add_argument("--name", help="of like jobs")
        it.add_argument("--command", dest="like", metavar="TEXT", help="how the command of like jobs begins")
        it.add_argument("--pool", help="where it shall run (the default pool)")


def act_estimate(args: argparse.Namespace) -> int:
    given = {"gpus": args.gpus, "hours": args.hours, "pool": args.pool, "priority": args.priority}
    if args.job is not None and any(value is not None for value in given.values()):
        raise Usage("Give either a job or what a job would ask for, not both.")
    answer = ask.client(args).call_tool("estimate_wait", {"job_id": args.job, **given})
    if args.json:
        show.as_json(answer)
        return 0
    if answer.get("likely_at") is None:
        show.out("Nobody can know when it starts.")
    else:
        show.out(f"likely at {clock(answer['likely_at'])}, in {_span(answer['wait_s'])}")
        if answer.get("earliest_at") and answer["earliest_at"] != answer["likely_at"]:
            show.out(f"earliest at {clock(answer['earliest_at'])}")
    if answer.get("latest_at"):
        show.out(f"at the latest at {clock(answer['latest_at'])}")
    for line in (*answer["basis"], answer["record"]):
        show.out(f"- {show.ours(line)}")
    return 0


def act_suggest(args: argparse.Namespace) -> int:
    answer = ask.client(args).call_tool(
        "suggest_resources", {"name": args.name, "command": args.like, "pool": args.pool}
    )
    if args.json:
        show.as_json(answer)
        return 0
    options = [
        ("--gpus", answer.get("gpus")),
        ("--gpu-memory-mib", answer.get("gpu_memory_mib")),
        ("--memory-mib", answer.get("memory_mib")),
    ]
    options.append(("--hours", answer.get("hours")))
    said = " ".join(f"{name} {value:g}" for name, value in options if value is not None)
    show.out(f"suggested: {said}" if said else "Nothing can be suggested.")
    for line in answer["basis"]:
        show.out(f"- {show.ours(line)}")
    return 0


def _span(seconds: int) -> str:
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
