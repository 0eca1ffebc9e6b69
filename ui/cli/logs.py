"""`cotenant logs`: what a job printed. -f goes on until the job is over, through retries and a server's restart."""

from __future__ import annotations

import time
from collections.abc import Iterator

from cotenant.ui.cli import ask, show, waiting
from cotenant.ui.cli.client import Client, patiently

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

    Answer = dict[str, Any]

#: Seconds between two looks at a log that does not move: from quick to polite.
QUICK_S, POLITE_S = 0.2, 2.0


def configure(parser: Parser, _: str) -> None:
    logs = parser.command(act, example="cotenant logs -f JOB")
    logs.add_argument("job", metavar="JOB")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    logs.add_argument(
        "--stream", choices=("out", "err", "both"), default="both", help="standard output, errors, or both (both)"
    )
    logs.add_argument("--attempt", type=int, metavar="EPOCH", help="this attempt (the newest)")
    logs.add_argument(
        "-n", "--lines", type=int, default=None, help="at most so many lines, counted from the end (100; with -f all)"
    )
    logs.add_argument("--since", metavar="TIME", help="only lines from this ISO time on")
    logs.add_argument("--cursor", help="go on where an earlier answer ended")


def act(args: argparse.Namespace) -> int:
    client = ask.client(args)
    if args.follow:
        for answer in follow(
            client,
            args.job,
            stream=args.stream,
            attempt=args.attempt,
            lines=args.lines,
            since=args.since,
            cursor=args.cursor,
        ):
            _print(answer, args.json)
        return 0
    wanted = {
        "job_id": args.job,
        "stream": args.stream,
        "attempt": args.attempt,
        "since": args.since,
        "lines": args.lines,
        "cursor": args.cursor,
    }
    answer = client.call_tool("tail_logs", wanted)
    if args.json:
        show.as_json(answer)
    else:
        _print(answer, False)
    return 0


def _print(answer: Answer, as_json: bool) -> None:
    if as_json:
        if answer["lines"] or answer["final"]:
            show.line_json(answer)
        return
    for line in answer["lines"]:
        show.out(show.log_line(line))


def follow(
    client: Client, job_id: str, *, stream: str = "both", attempt: int | None = None, lines: int | None = None,
    since: str | None = None, cursor: str | None = None,
) -> Iterator[Answer]:  # fmt: skip
    """Answers of tail_logs one after the other until the job is over, or the one `attempt` that was asked for.

    The newest attempt's log is followed to its end, then that of the next attempt from its beginning.
    """
    epoch, pause, told = attempt, QUICK_S, ""
    while True:
        wanted = {
            "job_id": job_id,
            "stream": stream,
            "attempt": epoch,
            "since": since,
            "lines": lines or 1000,
            "cursor": cursor,
        }
        answer = patiently(lambda wanted=wanted: client.call_tool("tail_logs", wanted), say=show.say)  # type: ignore[misc]
        yield answer
        cursor = answer["cursor"] or cursor
        lines = None
        if answer["more"]:
            continue
        if answer["lines"]:
            pause = QUICK_S
        if answer["final"] or not answer["attempt_id"]:
            job = patiently(lambda: client.call_tool("get_job", {"job_id": job_id}), say=show.say)
            newest = max((a["epoch"] for a in job["attempts"]), default=None)
            seen = next((a["epoch"] for a in job["attempts"] if a["attempt_id"] == answer["attempt_id"]), None)
            if attempt is not None and answer["final"]:
                return
            if newest is not None and seen is not None and newest > seen:
                epoch, cursor, since, pause = seen + 1, None, None, QUICK_S
                show.say(f"attempt {seen} is over; attempt {epoch} follows")
                continue
            if job["state"] in waiting.JOB_FINAL and (answer["final"] or newest is None):
                return
            if (why := waiting.reason(job)) != told and job["state"] != "running":
                show.say(show.harmless(why))
                told = why
        time.sleep(pause)
        pause = min(pause * 1.5, POLITE_S)
