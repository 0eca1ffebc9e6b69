"""`cotenant reserve`: cards booked in advance for an owner, from a time to a time."""

from __future__ import annotations

import time

from cotenant.ui.cli import ask, show
from cotenant.ui.cli.problems import Usage
from cotenant.ui.cli.quota import reservations

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse

    from cotenant.ui.cli.entry import Parser

_WHEN = "now, in 2h, or a time such as 2027-01-31T18:00 (local) or 2027-01-31T18:00Z"


def configure(parser: Parser, _: str) -> None:
    add = parser.sub(
        "add",
        act_add,
        "book cards of a pool for an owner (people only)",
        example='cotenant reserve add default --owner alice --cards 4 --from "in 2h" --to "in 8h" --reason "the paper"',
    )
    add.add_argument("pool", metavar="POOL")
    add.add_argument("--owner", required=True, help="whose work may use them")
    add.add_argument("--cards", required=True, type=int, metavar="N", help="how many")
    add.add_argument("--from", dest="begin", default="now", metavar="WHEN", help=f"{_WHEN} (now)")
    add.add_argument("--to", dest="end", required=True, metavar="WHEN", help="likewise")
    add.add_argument("--reason", required=True, help="why; recorded")
    parser.sub("list", act_list, "what is booked", example="cotenant reserve list")
    remove = parser.sub(
        "remove",
        act_remove,
        "take a booking back (people only)",
        example='cotenant reserve remove rsv_01jf3k2m9q7h2c4d --reason "not needed"',
    )
    remove.add_argument("reservation", metavar="RESERVATION")
    remove.add_argument("--reason", required=True, help="why; recorded")
    ask.yes_option(remove)


def act_add(args: argparse.Namespace) -> int:
    now_ms = int(time.time() * 1000)
    wanted = {
        "pool": args.pool, "owner": args.owner, "cards": args.cards, "begin_ms": when_ms(args.begin, now_ms, "--from"),
        "end_ms": when_ms(args.end, now_ms, "--to"),
    }  # fmt: skip
    answer = ask.client(args).operate("reserve.add", wanted, args.reason)
    if args.json:
        show.as_json(answer)
    else:
        reservations([answer])
    return 0


def act_list(args: argparse.Namespace) -> int:
    found = ask.client(args).operate("quota.list", {}, "")["reservations"]
    if args.json:
        show.as_json({"reservations": found})
    else:
        reservations(found)
    return 0


def act_remove(args: argparse.Namespace) -> int:
    client = ask.client(args)
    ask.sure(args, f"Take reservation {args.reservation} back?")
    answer = client.operate("reserve.remove", {"reservation_id": args.reservation}, args.reason)
    if args.json:
        show.as_json(answer)
    else:
        show.out(f"{args.reservation}: taken back")
    return 0


def when_ms(text: str, now_ms: int, option: str) -> int:
    """A time in ms since the epoch from words: see _WHEN. A time without a zone is this machine's.

    Raises:
        Usage: it cannot be read.
    """
    word = text.strip().lower()
    if word == "now":
        return now_ms
    if word.startswith("in "):
        number, unit = word[3:].strip()[:-1], word[-1]
        if unit in ask.UNITS_S and number.strip().replace(".", "", 1).isdecimal():
            return now_ms + int(float(number) * ask.UNITS_S[unit] * 1000)
    else:
        from datetime import datetime

        try:
            return int(datetime.fromisoformat(text.strip()).timestamp() * 1000)
        except (ValueError, OverflowError, OSError):
            pass
    raise Usage(f"{option} {text!r} is no time: give {_WHEN}.")
