"""`cotenant host`: what people do with a machine. `cotenant hosts` only looks."""

from __future__ import annotations

from cotenant.ui.cli import ask, fleet, show

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse

    from cotenant.ui.cli.entry import Parser


def configure(parser: Parser, _: str) -> None:
    parser.sub("list", fleet.act_hosts, "every machine: link, cards, driver, load", example="cotenant host list")
    take = parser.sub(
        "take-over",
        act_take_over,
        "make a host obey this server though it obeyed another (people only)",
        example='cotenant host take-over local --reason "the old server is gone for good"',
    )
    take.add_argument("host", metavar="HOST")
    take.add_argument("--reason", required=True, help="why; recorded")
    ask.yes_option(take)


def act_take_over(args: argparse.Namespace) -> int:
    client = ask.client(args)
    ask.sure(args, f"Take host {args.host} over? The server that it obeyed must not run any more.")
    answer = client.operate("host.take-over", {"host": args.host}, args.reason)
    if args.json:
        show.as_json(answer)
    else:
        show.out(f"{args.host}: will be taken over at its next hello")
    return 0
