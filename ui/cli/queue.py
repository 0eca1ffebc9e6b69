"""`cotenant queue`: every pool's waiting line, and, for people, holding it up."""

from __future__ import annotations

from cotenant.ui.cli import ask, fleet, show

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse

    from cotenant.ui.cli.entry import Parser

#: verb -> (rule, value, what it does, what is said after)
_VERBS = {
    "pause": ("paused", True, "start nothing more in a pool; what runs goes on", "starts nothing more"),
    "resume": ("paused", False, "end a pause", "starts what fits again"),
    "drain": ("draining", True, "let what runs finish and start nothing more, not even another attempt", "drains"),
    "undrain": ("draining", False, "end a drain", "starts what fits again"),
}


def configure(parser: Parser, _: str) -> None:
    listed = parser.sub("list", fleet.act_queues, "every pool's waiting line", example="cotenant queue list")
    listed.add_argument("--pool", help="only this pool's")
    listed.add_argument("--limit", type=int, help="at most so many entries of each (20)")
    for verb, (_key, _value, what, _said) in _VERBS.items():
        one = parser.sub(
            verb, act, f"{what} (people only)", example=f'cotenant queue {verb} default --reason "maintenance at noon"'
        )
        one.add_argument("pool", metavar="POOL")
        one.add_argument("--reason", required=True, help="why; recorded")
        one.set_defaults(queue_verb=verb)


def act(args: argparse.Namespace) -> int:
    key, value, _, said = _VERBS[args.queue_verb]
    wanted = {"scope": "pool", "name": args.pool, "key": key, "value": value}
    answer = ask.client(args).operate("quota.set", wanted, args.reason)
    if args.json:
        show.as_json(answer)
    else:
        show.out(f"pool {args.pool} {said}")
    return 0
