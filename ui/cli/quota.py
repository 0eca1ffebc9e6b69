"""`cotenant quota`: how many cards the caller may take now, and why not more; and, for people, the rules behind it."""

from __future__ import annotations

import json

from cotenant.ui.cli import ask, show
from cotenant.ui.cli.problems import Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

HEADS = ("POOL", "CAP", "USED", "RESERVED", "AVAILABLE", "FREE CARDS", "YOU CAN START", "WAITING", "ORDER", "")
_SCOPES = ("pool", "owner", "agent")


def configure(parser: Parser, _: str) -> None:
    parser.sub("status", act, "your quota now; the same without a word", example="cotenant quota --json")
    set_ = parser.sub(
        "set",
        act_set,
        "set a rule of a pool, an owner or an agent (people only); acts at once",
        example='cotenant quota set pool default cap 6 --reason "two cards for the demo"',
    )
    _rule(set_)
    set_.add_argument("value", metavar="VALUE", help="a number, true, false, a word, or none to take a cap away")
    set_.add_argument("more", metavar="VALUE", nargs="*", help="further values of a list, such as windows")
    set_.add_argument("--reason", required=True, help="why; recorded")
    reset = parser.sub(
        "reset",
        act_reset,
        "let the configuration hold again for a rule (people only)",
        example='cotenant quota reset pool default cap --reason "the demo is over"',
    )
    _rule(reset)
    reset.add_argument("--reason", required=True, help="why; recorded")
    parser.sub("list", act_list, "every rule in force, who set it and why (people only)", example="cotenant quota list")
    evict = parser.sub(
        "evict-excess",
        act_evict,
        "end what is above a lowered cap now, not at its own end (people only)",
        example='cotenant quota evict-excess default --reason "the cards are needed" --yes',
    )
    evict.add_argument("pool", metavar="POOL")
    evict.add_argument("--reason", required=True, help="why; recorded")
    ask.yes_option(evict)
    parser.alone(act)


def _rule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scope", choices=_SCOPES, help="whose rule")
    parser.add_argument("name", metavar="NAME", help="of the pool, owner or agent")
    parser.add_argument("key", metavar="RULE", help="cap, reserve, jobs, gpu_hours, order, windows, … (docs/quotas.md)")


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


def act_set(args: argparse.Namespace) -> int:
    value = read_value(args.value)
    if args.more or args.key in ("windows", "preempt_from"):
        value = [] if value is None else [str(args.value), *args.more]
    wanted = {"scope": args.scope, "name": args.name, "key": args.key, "value": value}
    return _changed(args, ask.client(args).operate("quota.set", wanted, args.reason))


def act_reset(args: argparse.Namespace) -> int:
    wanted = {"scope": args.scope, "name": args.name, "key": args.key}
    return _changed(args, ask.client(args).operate("quota.reset", wanted, args.reason))


def _changed(args: argparse.Namespace, answer: dict[str, Any]) -> int:
    if args.json:
        show.as_json(answer)
        return 0
    old, new = told(answer["old"]), told(answer["new"])
    show.out(f"{answer['scope']} {answer['name']}: {answer['key']} {old} -> {new}, in force now")
    if cards := answer["still_to_end_cards"]:
        show.out(f"{cards} card{'s' if cards != 1 else ''} above the rules, to be given back as their work ends:")
        show.table(map(_excess, answer["excess"]), ("LEASE", "JOB", "HOLDER", "OWNER", "CARDS"), empty="")
        pool = answer["name"] if answer["scope"] == "pool" else "POOL"
        show.out(f"cotenant quota evict-excess {pool} ends them now.")
    return 0


def _excess(one: dict[str, Any]) -> tuple[Any, ...]:
    return (one["lease_id"], one["job_id"] or " ", one["holder"], one["owner"], one["cards"])


def act_list(args: argparse.Namespace) -> int:
    answer = ask.client(args).operate("quota.list", {}, "")
    if args.json:
        show.as_json(answer)
        return 0
    rules = [
        (one["scope"], one["name"], one["key"], told(one["value"]), one["set_by"], one["set_at"] or " ", one["reason"] or " ")
        for one in answer["rules"]
    ]  # fmt: skip
    show.table(rules, ("SCOPE", "NAME", "RULE", "VALUE", "SET BY", "SET AT", "WHY"), empty="No rule is set.")
    if answer["reservations"]:
        show.out()
        reservations(answer["reservations"])
    if answer["without_pool"]:
        show.out(f"Set, but the pool is configured no more: {', '.join(answer['without_pool'])}")
    return 0


def reservations(found: list[dict[str, Any]]) -> None:
    """A table of advance reservations."""
    rows = [
        (
            one["reservation_id"],
            one["pool"],
            one["owner"],
            one["cards"],
            one["begins_at"],
            one["ends_at"],
            one["set_by"],
        )
        for one in found
    ]
    show.table(rows, ("RESERVATION", "POOL", "FOR", "CARDS", "FROM", "TO", "SET BY"), empty="Nothing is reserved.")


def act_evict(args: argparse.Namespace) -> int:
    client = ask.client(args)
    ask.sure(args, f"End everything in pool {args.pool} that is above its rules?")
    answer = client.operate("quota.evict-excess", {"pool": args.pool}, args.reason)
    if args.json:
        show.as_json(answer)
        return 0
    show.out(f"evicted: {' '.join(answer['evicted']) or 'nothing was above the rules'}")
    for one in answer["refused"]:
        show.out(f"{one['id']}: {show.ours(one['why'])}")
    return 0


def told(value: Any) -> str:
    """A rule's value for people."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return "; ".join(str(item) for item in value) or "none"
    return json.dumps(value) if isinstance(value, bool) else str(value)


def read_value(text: str) -> Any:
    """A rule's value from a word: a whole number, true, false, none, or the word itself.

    Raises:
        Usage: an empty word.
    """
    if not text:
        raise Usage("VALUE is empty. Give none to take a cap away.")
    if text.lower() in ("none", "null", "unset"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdecimal() else text
