"""`cotenant logs`: what a job printed. -f goes on until the job is over, through retries and a server's restart."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from cotenant.ui.cli import ask, show, waiting
from cotenant.ui.cli.client import Client, patiently
from cotenant.ui.cli.problems import Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

    Answer = dict[str, Any]
#: Seconds between two looks at a log that does not move: from quick to polite.
QUICK_S, POLITE_S = 0.2, 2.0
#: The most lines that one answer may hold.
PAGE = 2000


def configure(parser: Parser, _: str) -> None:
    logs = parser.command(act, example="cotenant logs -f JOB\n  cotenant logs --stream err -n 20 JOB")
    logs.add_argument("job", metavar="JOB")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    logs.add_argument(
        "--stream",
        choices=("out", "err", "both"),
        default="both",
        help="which; errors go to standard error here too (both)",
    )
    logs.add_argument("--attempt", type=int, metavar="EPOCH", help="this attempt (the newest)")
    logs.add_argument("--rank", type=int, metavar="N", help="of a job over several hosts: this one's (0)")
    logs.add_argument("-n", "--lines", type=int, metavar="N", help="the last N lines of each stream (100; with -f all)")
    logs.add_argument("--all", action="store_true", help="from the beginning, as far as it is kept")
    logs.add_argument("--cursor", help="go on where an earlier --json answer of one stream ended")


def act(args: argparse.Namespace) -> int:
    streams = ("out", "err") if args.stream == "both" else (args.stream,)
    if args.cursor and len(streams) > 1:
        raise Usage("--cursor belongs to one stream: give --stream out or --stream err with it.")
    if args.all and args.lines is not None:
        raise Usage("Give either --all or --lines.")
    if args.lines is not None and args.lines < 1:
        raise Usage("--lines takes a number from 1.")
    client = ask.client(args)
    if args.follow:
        lines = None if args.all else args.lines
        pages = follow(
            client, args.job, streams=streams, attempt=args.attempt, rank=args.rank, lines=lines, cursor=args.cursor
        )
        for answer in pages:
            if args.json:
                if answer["lines"] or answer["final"]:
                    show.line_json(answer)
            else:
                write(answer)
        show.say(_ending(client, args.job, args.attempt))
        return 0
    answers = {stream: _page(client, args, stream) for stream in streams}
    if args.json:
        show.as_json(answers if len(streams) > 1 else answers[streams[0]])
        return 0
    for answer in answers.values():
        while True:
            write(answer)
            if not (args.all and answer["more"]):
                break
            answer = client.call_tool("tail_logs", {"job_id": args.job, "cursor": answer["cursor"], "lines": PAGE})
    if len(streams) == 1 and (note := answers[streams[0]].get("note")):
        show.say(show.ours(note))
    return 0


def _ending(client: Client, job_id: str, attempt: int | None) -> str:
    """How what was followed ended, in one line."""
    from cotenant.ui.cli.job import attempt_ending, ending

    job = client.call_tool("get_job", {"job_id": job_id})
    one = next((a for a in job["attempts"] if a["epoch"] == attempt), None)
    return ending(job) if one is None else attempt_ending(one)


def _page(client: Client, args: argparse.Namespace, stream: str) -> Answer:
    wanted = {
        "job_id": args.job, "stream": stream, "attempt": args.attempt, "rank": args.rank, "lines": args.lines, "cursor": args.cursor,
    }  # fmt: skip
    if args.all:
        wanted |= {"since": "start", "lines": PAGE}
    return client.call_tool("tail_logs", wanted)


def write(answer: Answer) -> None:
    """Lines of one stream, to the stream of the same name."""
    put, stream = (show.err, sys.stderr) if answer["stream"] == "err" else (show.out, sys.stdout)
    for line in answer["lines"]:
        put(show.log_line(line, stream))


class _Reader:
    """One stream of one attempt, read to its end piece by piece."""

    def __init__(
        self, client: Client, job_id: str, stream: str, attempt: int | None, rank: int | None, lines: int | None,
        cursor: str | None,
    ) -> None:  # fmt: skip
        self._client = client
        self._wanted: Answer = {
            "job_id": job_id, "stream": stream, "attempt": attempt, "rank": rank, "lines": lines or PAGE,
        }  # fmt: skip
        if cursor:
            self._wanted["cursor"] = cursor
        elif lines is None:
            self._wanted["since"] = "start"
        self.attempt_id: str | None = None
        self.final = False
        self.moved = False

    def pages(self) -> Iterator[Answer]:
        """All that is there now."""
        self.moved = False
        while not self.final:
            answer = patiently(lambda: self._client.call_tool("tail_logs", self._wanted), say=show.say)
            self.attempt_id = answer["attempt_id"]
            self.final = bool(answer["final"] and not answer["more"])
            self.moved = self.moved or bool(answer["lines"])
            if answer["cursor"]:
                self._wanted = {**self._wanted, "cursor": answer["cursor"], "lines": PAGE, "since": None}
            yield answer
            if not answer["more"]:
                return


def follow(
    client: Client, job_id: str, *, streams: tuple[str, ...] = ("out", "err"), attempt: int | None = None,
    rank: int | None = None, lines: int | None = None, cursor: str | None = None,
) -> Iterator[Answer]:  # fmt: skip
    """Answers of tail_logs one after the other until the job is over, or the one `attempt` that was asked for.

    The newest attempt is followed to its end, then the next one from its beginning. `lines` None: from the beginning.
    """
    epoch, pause, told = attempt, QUICK_S, ""
    readers = [_Reader(client, job_id, stream, epoch, rank, lines, cursor) for stream in streams]
    while True:
        for reader in readers:
            yield from reader.pages()
        if any(reader.moved for reader in readers):
            pause = QUICK_S
        ended = all(reader.final for reader in readers)
        if ended or readers[0].attempt_id is None:
            if ended and attempt is not None:
                return
            job = patiently(lambda: client.call_tool("get_job", {"job_id": job_id}), say=show.say)
            epochs = {a["attempt_id"]: a["epoch"] for a in job["attempts"]}
            seen = epochs.get(readers[0].attempt_id)
            if seen is not None and max(epochs.values()) > seen:
                epoch = seen + 1
                show.say(f"attempt {seen} is over; attempt {epoch} follows")
                readers = [_Reader(client, job_id, stream, epoch, rank, None, None) for stream in streams]
                pause = QUICK_S
                continue
            if job["state"] in waiting.JOB_FINAL and (ended or not epochs):
                return
            if (why := waiting.reason(job)) != told and job["state"] != "running":
                show.say(show.ours(why))
                told = why
        time.sleep(pause)
        pause = min(pause * 1.5, POLITE_S)
