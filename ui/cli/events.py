"""`cotenant events`: what happened, from the audit. -f goes on with what happens."""

from __future__ import annotations

import time

from cotenant.ui.cli import ask, show
from cotenant.ui.cli.client import patiently

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

    Answer = dict[str, Any]

#: Seconds between two looks where nothing happens.
QUICK_S, POLITE_S = 0.5, 3.0


def configure(parser: Parser, _: str) -> None:
    events = parser.command(act, example="cotenant events -f --severity warning")
    events.add_argument("-f", "--follow", action="store_true", help="go on with what happens, until interrupted")
    events.add_argument("--since", metavar="CURSOR|TIME", help="from this cursor or ISO time on")
    events.add_argument(
        "--type",
        action="append",
        dest="types",
        metavar="TYPE",
        help="only this type, such as lease.granted; may be repeated",
    )
    events.add_argument("--severity", help="info, warning or critical")
    events.add_argument("--job", help="only about this job")
    events.add_argument("--run", help="only about this run")
    events.add_argument("--host", help="only about this host")
    events.add_argument("--limit", type=int, help="at most so many (100)")


def act(args: argparse.Namespace) -> int:
    client = ask.client(args)
    wanted: Answer = {
        "since": args.since, "types": args.types, "severity": args.severity, "job_id": args.job, "run_id": args.run,
        "host": args.host, "limit": args.limit,
    }  # fmt: skip
    answer = client.call_tool("list_events", wanted)
    if not args.follow:
        if args.json:
            show.as_json(answer)
        else:
            rows = ((_at(e), e["severity"], e["type"], e["caller"], about(e), change(e)) for e in answer["events"])
            show.table(rows, ("AT", "SEVERITY", "TYPE", "BY", "ABOUT", "WHAT"), empty="Nothing happened.")
        return 0
    pause = QUICK_S
    while True:
        for event in answer["events"]:
            if args.json:
                show.line_json(event)
            else:
                shown = (_at(event), event["severity"], event["type"], event["caller"], about(event), change(event))
                show.out("  ".join(show.cell(part) for part in shown))
        pause = QUICK_S if answer["events"] else min(pause * 1.5, POLITE_S)
        time.sleep(pause)
        wanted["since"] = answer["cursor"]
        answer = patiently(lambda: client.call_tool("list_events", wanted), say=show.say)


def _at(event: Answer) -> str:
    """To the second: --since takes it as it stands, and more room is left for what happened."""
    return f"{event['at'][:19]}Z"


def about(event: Answer) -> str:
    """The object that an event is about: the narrowest one named."""
    return next(
        (str(event[key]) for key in ("attempt_id", "job_id", "lease_id", "run_id", "host", "pool") if event.get(key)),
        "-",
    )


def change(event: Answer) -> str:
    """Old and new value, and the reason where it says more."""
    parts = []
    if event.get("old") is not None or event.get("new") is not None:
        parts.append(f"{show.cell(event.get('old'))} → {show.cell(event.get('new'))}")
    if event.get("reason") and event["reason"] != event.get("new"):
        parts.append(str(event["reason"]))
    return "; ".join(parts) or "-"
