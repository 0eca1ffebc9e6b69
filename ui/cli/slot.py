"""`cotenant slot`: for people, when a card stays occupied though they know that it is free."""

from __future__ import annotations

from cotenant.ui.cli import ask, show

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse

    from cotenant.ui.cli.entry import Parser


def configure(parser: Parser, _: str) -> None:
    clear = parser.sub(
        "clear",
        act_clear,
        "take a card for free though the host did not say so (people only)",
        example='cotenant slot clear GPU-5f3a… --reason "rebooted it"',
    )
    clear.add_argument("uuid", metavar="UUID", help="the card, as `cotenant gpus --json` names it")
    clear.add_argument("--share", type=int, help="the share, where the card is shared")
    clear.add_argument("--host", default="local", help="the card's host (local)")
    clear.add_argument("--reason", required=True, help="why; recorded")
    ask.yes_option(clear)


def act_clear(args: argparse.Namespace) -> int:
    client = ask.client(args)
    ask.sure(args, f"Take {args.uuid} for free? Whoever gets it next may meet what still runs there.")
    answer = client.operate("slot.clear", {"host": args.host, "uuid": args.uuid, "share": args.share}, args.reason)
    if args.json:
        show.as_json(answer)
    else:
        show.out(f"{args.uuid} cleared")
    return 0
