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
        "take the cards of an ended lease for free though the host did not say so (people only)",
        example='cotenant slot clear LEASE --reason "looked with nvidia-smi: nothing runs"',
    )
    clear.add_argument(
        "lease", metavar="LEASE", help="the lease that held them, as `cotenant lease list --state all` names it"
    )
    clear.add_argument("--reason", required=True, help="why; recorded")
    ask.yes_option(clear)


def act_clear(args: argparse.Namespace) -> int:
    client = ask.client(args)
    ask.sure(args, f"Take the cards of {args.lease} for free? Whoever gets them next may meet what still runs there.")
    answer = client.operate("slot.clear", {"lease_id": args.lease}, args.reason)
    if args.json:
        show.as_json(answer)
    else:
        show.out(f"{args.lease}: {'its cards are free' if answer.get('freed') else 'nothing was left to clear'}")
    return 0
