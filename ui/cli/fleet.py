"""`cotenant gpus`, `hosts`, `queues` and `agents`: what there is and who uses it."""

from __future__ import annotations

from cotenant.ui.cli import ask, show

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

    Answer = dict[str, Any]


def configure(parser: Parser, command: str) -> None:
    if command == "gpus":
        gpus = parser.command(act_gpus, example="cotenant gpus --state free")
        gpus.add_argument("--host", help="only this host's")
        gpus.add_argument("--pool", help="only this pool's")
        gpus.add_argument(
            "--state", help="only cards that are free, held, cleaning, occupied, sick, lost, unverified or unknown"
        )
    elif command == "hosts":
        parser.command(act_hosts, example="cotenant hosts")
    elif command == "queues":
        queues = parser.command(act_queues, example="cotenant queues --pool default")
        queues.add_argument("--pool", help="only this pool's")
        queues.add_argument("--limit", type=int, help="at most so many entries of each (20)")
    else:
        parser.command(act_agents, example="cotenant agents")


def act_gpus(args: argparse.Namespace) -> int:
    client = ask.client(args)
    answer = client.call_tool("list_gpus", {"host": args.host, "pool": args.pool, "state": args.state})
    if args.json:
        show.as_json(answer)
        return 0
    gpu_table(answer["gpus"])
    show.out(f"\n{answer['free']} of {answer['total']} free")
    if not answer["total"] and not (args.pool or args.state):
        for host in client.call_tool("list_hosts")["hosts"]:
            if host.get("nvml_message"):
                show.say(
                    f"{show.cell(host['host'])}: {show.cell(host['nvml_message'])}. `cotenant doctor` there tells more."
                )
    return 0


def gpu_table(gpus: list[Answer]) -> None:
    """Cards as a table; what keeps a card from use stands beside its state."""
    heads = ("CARD", "MODEL", "STATE", "HOLDER", "JOB", "UNTIL", "MEMORY MIB", "USE %", "SEEN")
    show.table(map(_gpu, gpus), heads, empty="No card.")


def _gpu(gpu: Answer) -> tuple[Any, ...]:
    used = "?" if gpu.get("memory_used_mib") is None else gpu["memory_used_mib"]
    age = gpu.get("age_s")
    return (
        f"{gpu['host']}:{gpu['index']}",
        gpu["model"] + (" (simulated)" if gpu.get("simulated") and "imulated" not in gpu["model"] else ""),
        gpu["state"] + (f": {gpu['reason']}" if gpu.get("reason") else ""),
        gpu.get("holder"),
        gpu.get("job_name") or gpu.get("job_id") or gpu.get("lease_id"),
        clock(gpu.get("until")),
        f"{used}/{gpu['memory_mib']}",
        gpu.get("util_pct"),
        "never" if age is None else f"{show.span(age)} ago",
    )


def clock(iso: str | None) -> str | None:
    """An ISO time cut to minutes, still in UTC and said so."""
    return None if not iso else iso[:16].replace("T", " ") + "Z"


def act_hosts(args: argparse.Namespace) -> int:
    answer = ask.client(args).call_tool("list_hosts")
    if args.json:
        show.as_json(answer)
        return 0
    heads = (
        "HOST",
        "LINK",
        "CARDS FREE",
        "CPU PLACES FREE",
        "CPUS",
        "LOAD",
        "MEMORY FREE MIB",
        "DISK FREE MIB",
        "DRIVER",
        "NOTE",
    )
    show.table(map(_host, answer["hosts"]), heads, empty="No host.")
    return 0


def _host(host: Answer) -> tuple[Any, ...]:
    notes = [host.get("mode") if host.get("mode") != "ready" else None, host.get("reason"), host.get("nvml_message")]
    if host.get("simulated") and "simulated" not in (host.get("nvml_message") or ""):
        notes.append("simulated")
    return (
        host["host"], host["link"], f"{host['free_gpus']}/{host['gpus']}", f"{host['cpu_places_free']}/{host['cpu_places']}",
        host.get("cpus"), host.get("load_1m"), host.get("memory_available_mib"), host.get("disk_free_mib"), host.get("driver"),
        "; ".join(note for note in notes if note),
    )  # fmt: skip


def act_queues(args: argparse.Namespace) -> int:
    answer = ask.client(args).call_tool("list_queues", {"pool": args.pool, "limit": args.limit})
    if args.json:
        show.as_json(answer)
        return 0
    for number, queue in enumerate(answer["queues"]):
        if number:
            show.out()
        paused = "".join(f", {mark}" for mark in ("paused", "draining") if queue.get(mark))
        cards = f", {queue['used']} of {queue['cap']} cards used" if queue.get("cap") else ""
        head = f"{queue['pool']}: {queue['running']} running, {queue['waiting']} waiting{cards}, order {queue['order']}{paused}"
        show.out(show.paint(show.harmless(head), show.BOLD))
        for r in queue.get("reservations", ()):
            booked = (
                f"  {r['cards']} cards booked for {r['owner']} from {clock(r['begins_at'])} to {clock(r['ends_at'])}"
            )
            show.out(show.harmless(booked))
        queue_table(queue["entries"])
    if not answer["queues"]:
        show.out("There is no pool.")
    return 0


def queue_table(entries: list[Answer]) -> None:
    """What waits in one pool, first in line first."""
    rows = (
        (e["id"], e["kind"], e["name"], e["holder"], e["gpus"], e["priority"], show.span(e["waiting_s"]), e["blocker"])
        for e in entries
    )
    show.table(rows, ("ID", "KIND", "NAME", "HOLDER", "GPUS", "PRIORITY", "WAITING", "WHY"), empty="Nobody waits.")


def act_agents(args: argparse.Namespace) -> int:
    answer = ask.client(args).call_tool("list_agents")
    if args.json:
        show.as_json(answer)
        return 0
    rows = (
        (
            a["name"], a["kind"], a["owner"], "on line" if a["online"] else "-",
            "never" if a.get("age_s") is None else f"{show.span(a['age_s'])} ago",
            a.get("client"), ":".join(filter(None, (a.get("host"), a.get("cwd")))),
            a["gpus"], a["leases"], a["running_jobs"], a["waiting_jobs"],
        )
        for a in answer["agents"]
    )  # fmt: skip
    heads = ("NAME", "KIND", "OWNER", "", "SEEN", "CLIENT", "WHERE", "GPUS", "LEASES", "RUNNING", "WAITING")
    show.table(rows, heads, empty="Nobody has a token yet.")
    return 0
