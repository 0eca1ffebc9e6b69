"""`cotenant quota`: how many cards the caller may take now, and why not more."""

from __future__ import annotations

from cotenant.ui.cli import ask, show

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

HEADS = ("POOL", "CAP", "USED", "RESERVED", "AVAILABLE", "FREE CARDS", "YOU CAN START", "WAITING", "ORDER", "")


def configure(parser: Parser, _: str) -> None:
    parser.command(act, example="cotenant quota --json")


def act(args: argparse.Namespace) -> int:
    answer = ask.client(args).call_tool("quota_status")
    if args.json:
        show.as_json(answer)
        return 0
    show.table(map(row, answer["pools"]), HEADS, empty="There is no pool.")
    show.out()
    me = answer["me"]
    show.pairs(
        [
            ("you", f"{me['name']} ({me['kind']}, owner {me['owner']}, {'+'.join(me['scopes'])})"),
            ("cards held", f"{me['used_by_me']} by you, {me['used_by_owner']} by your owner"),
            ("owner's cap", me.get("owner_cap")),
            ("jobs", f"{me['running_jobs']} running, {me['waiting_jobs']} waiting"),
            ("leases", " ".join(me["leases"])),
            ("advice", show.ours(answer.get("advice") or "")),
        ]
    )
    return 0


def row(pool: dict[str, Any]) -> tuple[Any, ...]:
    """One line of the table of pools."""
    marks = [
        mark
        for mark, on in (
            ("paused", pool["paused"]),
            ("draining", pool.get("draining")),
            ("near cap", pool["near_cap"]),
            ("simulated", pool["simulated"]),
        )
        if on
    ]
    return (
        pool["pool"], pool["cap"], pool["used"], pool["reserved"], pool["available"], pool["free_cards"], pool["you_can_start"],
        pool["waiting"], pool["order"], ", ".join(marks) or " ",
    )  # fmt: skip
