"""`cotenant lease`: cards for work that one runs oneself. `cotenant run` does all of it around one command."""

from __future__ import annotations

from cotenant.ui.cli import ask, show, waiting
from cotenant.ui.cli.fleet import clock
from cotenant.ui.cli.problems import Problem, Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

    Answer = dict[str, Any]


def configure(parser: Parser, _: str) -> None:
    acquire = parser.sub(
        "acquire",
        act_acquire,
        "lease cards for work of your own",
        example='eval "$(cotenant lease acquire --gpus 1 --ttl 3600 --export)"',
    )
    needs(acquire)
    acquire.add_argument(
        "--ttl", type=int, metavar="S", help="seconds until it expires unless renewed by heartbeat (600)"
    )
    acquire.add_argument("--queue", action="store_true", help="wait in line where no card is free, until there is one")
    acquire.add_argument(
        "--no-wait", action="store_true", help="with --queue: take a place in the line and return at once"
    )
    acquire.add_argument("--export", action="store_true", help="print the environment as lines for a shell")
    for name, act, what in (
        ("wait", act_wait, "wait in line until the cards are yours, and pick them up"),
        ("heartbeat", act_heartbeat, "renew a lease, or pick up a granted one"),
        ("release", act_release, "give a lease back, or leave the line"),
        ("show", act_show, "one lease"),
    ):
        parser.sub(name, act, what, example=f"cotenant lease {name} LEASE").add_argument("lease", metavar="LEASE")
    listing = parser.sub("list", act_list, "leases; yours and others'", example="cotenant lease list --state all")
    listing.add_argument("--state", help="active (default), all, or one state")
    listing.add_argument("--holder", help="only this caller's")
    listing.add_argument("--owner", help="only this owner's")
    listing.add_argument("--pool", help="only this pool's")
    listing.add_argument("--host", help="only on this host")
    listing.add_argument("--limit", type=int, help="at most so many (50)")
    listing.add_argument("--cursor", help="go on where an earlier list ended")
    hand_over = parser.sub(
        "hand-over",
        act_hand_over,
        "offer a lease to another caller, or accept one offered to you",
        example="cotenant lease hand-over LEASE bob-claude",
    )
    hand_over.add_argument("lease", metavar="LEASE")
    hand_over.add_argument("to", metavar="TO", help="who shall have it; your own name to accept an offer")
    evict = parser.sub(
        "evict",
        act_evict,
        "take a lease away from its holder (people only)",
        example='cotenant lease evict LEASE --reason "…"',
    )
    evict.add_argument("lease", metavar="LEASE")
    evict.add_argument("--reason", required=True, help="why; the holder and the audit see it")
    ask.yes_option(evict)


def needs(parser: argparse.ArgumentParser) -> None:
    """The options that say what a lease must have."""
    parser.add_argument("-g", "--gpus", type=int, default=1, metavar="N", help="cards (1)")
    parser.add_argument("--pool", help="pool (the server's default)")
    parser.add_argument(
        "--hours", type=ask.number, metavar="H", help="hard end after so many hours (the pool's default)"
    )
    parser.add_argument("--purpose", default="", help="why; everybody sees it")
    parser.add_argument("--gpu-memory-mib", type=int, metavar="M", help="cards with at least this memory")
    parser.add_argument("--gpu-model", metavar="TEXT", help="cards whose model's name holds this")
    parser.add_argument("--host", help="cards of this host")


def asked(args: argparse.Namespace, *, ttl_s: int | None, queue: bool) -> Answer:
    """The arguments of acquire_lease that the options stand for."""
    return {
        "gpus": args.gpus,
        "pool": args.pool,
        "ttl_s": ttl_s,
        "hours": args.hours,
        "purpose": args.purpose or None,
        "gpu_memory_mib": args.gpu_memory_mib,
        "gpu_model": args.gpu_model,
        "host": args.host,
        "when_full": "queue" if queue else None,
    }


def act_acquire(args: argparse.Namespace) -> int:
    if args.no_wait and not args.queue:
        raise Usage("--no-wait only means something with --queue.")
    client = ask.client(args)
    lease = client.call_tool("acquire_lease", asked(args, ttl_s=args.ttl, queue=args.queue))
    if lease["state"] == "queued" and not args.no_wait:
        lease = waiting.for_lease(client, lease["lease_id"])
    if args.json:
        show.as_json(lease)
    elif args.export and lease["state"] != "queued":
        for name, value in (lease.get("env") or {}).items():
            show.out(f"export {name}={shell_word(value)}")
    else:
        tell(lease)
        if lease["state"] == "queued":
            show.say(f"get them when it is your turn: cotenant lease wait {lease['lease_id']}")
        else:
            show.say(f"renew before it expires: cotenant lease heartbeat {lease['lease_id']}")
            show.say(f"give back when done: cotenant lease release {lease['lease_id']}")
    return 0


def act_wait(args: argparse.Namespace) -> int:
    client = ask.client(args)
    lease = find(client, args.lease)
    if lease["state"] == "queued" or (lease["state"] == "leased" and lease.get("pickup_by")):
        lease = waiting.for_lease(client, args.lease, keep=True)
    elif lease["state"] in waiting.LEASE_ENDED:
        raise Problem(f"{args.lease} has ended: {lease['state']}.")
    if args.json:
        show.as_json(lease)
    else:
        tell(lease)
    return 0


def act_hand_over(args: argparse.Namespace) -> int:
    from cotenant.ui.cli.job import hand_over

    return hand_over(args, args.lease)


def shell_word(text: str) -> str:
    """`text` as one word of a POSIX shell."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


def act_heartbeat(args: argparse.Namespace) -> int:
    answer = ask.client(args).call_tool("heartbeat", {"lease_id": args.lease})
    if args.json:
        show.as_json(answer)
        return 0
    left = "" if answer.get("expires_in_s") is None else f", expires in {show.span(answer['expires_in_s'])}"
    show.out(f"{answer['lease_id']} {answer['state']}{left}{', draining: finish soon' if answer['draining'] else ''}")
    if answer.get("notice"):
        show.say(show.ours(answer["notice"]))
    return 0


def act_release(args: argparse.Namespace) -> int:
    answer = ask.client(args).call_tool("release_lease", {"lease_id": args.lease})
    if args.json:
        show.as_json(answer)
    else:
        show.out(
            f"{answer['lease_id']} {answer['state']}{'; its cards are being cleaned' if answer['cleaning'] else ''}"
        )
    return 0


def act_show(args: argparse.Namespace) -> int:
    answer = find(ask.client(args), args.lease)
    if args.json:
        show.as_json(answer)
    else:
        tell(answer)
    return 0


def find(client: Any, lease_id: str) -> Answer:
    """One lease in any state, by a wait of no time. Raises ToolRefused where there is none."""
    answer: Answer = client.call_tool("wait_job", {"job_id": lease_id, "max_wait_s": 0})
    if "lease_id" not in answer:
        raise Usage(f"{lease_id} is not a lease. For a job: cotenant job show {lease_id}")
    return answer


def act_list(args: argparse.Namespace) -> int:
    wanted = {name: getattr(args, name) for name in ("state", "holder", "owner", "pool", "host", "limit", "cursor")}
    answer = ask.client(args).call_tool("list_leases", wanted)
    if args.json:
        show.as_json(answer)
        return 0
    rows = (
        (
            x["lease_id"], x["state"] + (", draining" if x["draining"] else ""), x["kind"], x["holder"], x["pool"], x["gpus"],
            show.slots(x), show.span(x.get("expires_in_s")), show.span(x.get("hard_end_in_s")), x.get("purpose") or x.get("job_id"),
        )
        for x in answer["leases"]
    )  # fmt: skip
    heads = ("LEASE", "STATE", "KIND", "HOLDER", "POOL", "GPUS", "CARDS", "EXPIRES IN", "ENDS IN", "PURPOSE")
    show.table(rows, heads, empty="No lease.")
    if answer.get("cursor"):
        show.say(f"there are more: --cursor {answer['cursor']}")
    return 0


def act_evict(args: argparse.Namespace) -> int:
    client = ask.client(args)
    ask.sure(args, f"Take lease {args.lease} away from its holder?")
    answer = client.operate("lease.evict", {"lease_id": args.lease}, args.reason)
    if args.json:
        show.as_json(answer)
    else:
        show.out(f"{args.lease} {answer.get('state', 'evicted')}")
    return 0


def tell(lease: Answer) -> None:
    """One lease for a person."""
    show.pairs(
        [
            ("lease", lease["lease_id"]),
            (
                "state",
                lease["state"]
                + (", draining" if lease["draining"] else "")
                + (", cleaning" if lease["cleaning"] else ""),
            ),
            ("holder", f"{lease['holder']} (owner {lease['owner']})"),
            ("cards", show.slots(lease) if lease.get("slots") else f"{lease['gpus']} wanted in {lease['pool']}"),
            ("fence", lease.get("fence")),
            ("purpose", lease.get("purpose")),
            ("job", lease.get("job_id")),
            ("pick up by", clock(lease.get("pickup_by"))),
            ("expires in", span_at(lease.get("expires_in_s"), lease.get("expires_at"))),
            ("ends in", span_at(lease.get("hard_end_in_s"), lease.get("hard_end_at"))),
            ("ended", clock(lease.get("ended_at"))),
            ("because", show.ours(lease.get("end_reason") or "")),
        ]
    )
    show.blockers(lease)
    for name, value in (lease.get("env") or {}).items():
        show.out(f"  {name}={show.harmless(value)}")
    if lease.get("near_cap"):
        show.say("you are close to the cap of this pool")


def span_at(seconds: int | None, at: str | None) -> str | None:
    """`9m (2026-09-01 12:00Z)`, or None where it is not known."""
    return None if seconds is None else f"{show.span(seconds)} ({clock(at)})"
