"""`cotenant status`: one look at everything: pools, cards, what runs, what waits."""

from __future__ import annotations

from cotenant.ui.cli import ask, show

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse

    from cotenant.ui.cli.entry import Parser


def configure(parser: Parser, _: str) -> None:
    parser.command(act, example="cotenant status")


def act(args: argparse.Namespace) -> int:
    from cotenant.ui.cli import fleet, job, quota

    client = ask.client(args)
    quotas = client.call_tool("quota_status")
    gpus = client.call_tool("list_gpus")
    jobs = client.call_tool("list_jobs", {"state": "active", "limit": 50})
    queues = client.call_tool("list_queues", {"limit": 10})
    if args.json:
        show.as_json({"url": client.place.url, "quota": quotas, "gpus": gpus, "jobs": jobs, "queues": queues})
        return 0
    me = quotas["me"]
    show.out(f"{client.place.url}  you are {show.cell(me['name'])} ({me['kind']}, owner {show.cell(me['owner'])})")
    show.out()
    show.table(map(quota.row, quotas["pools"]), quota.HEADS, empty="There is no pool.")
    show.out()
    fleet.gpu_table(gpus["gpus"])
    show.out()
    job.table(jobs["jobs"], empty="No job runs.")
    if (more := jobs["total"] - len(jobs["jobs"])) > 0:
        show.say(f"{more} more: cotenant job list --state active")
    waiting = [entry for queue in queues["queues"] for entry in queue["entries"]]
    if waiting:
        show.out()
        fleet.queue_table(waiting)
    return 0
