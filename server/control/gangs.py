"""Starting a job over several hosts: every rank is made ready on its host, and when all are, they are let go.

The word to begin is a row before any host hears of it. Until it is there nothing runs, and the whole may be given up
without asking anybody; from then on each rank is let go, by this server or the next one.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from dataclasses import replace
from typing import Final

from cotenant.hostd.protocol import AttemptReport, SlotRef, StartSpec
from cotenant.server.backends.base import Host, HostRefused
from cotenant.server.control import outcomes, placing, ranks
from cotenant.server.control.context import Context
from cotenant.server.control.secrets import SecretUnreadable
from cotenant.server.errors import OutcomeUnknown, Unreachable
from cotenant.server.store import jobs, meta
from cotenant.server.store import ranks as rows
from cotenant.server.store.db import Tx

log = logging.getLogger(__name__)

#: How long a rank that is ready waits for the others. Within it a host that restarts its hostd is back.
GATE_S: Final = 120.0
#: How often another port is tried that another gang was faster to take.
PORT_TRIES: Final = 4


async def advance(context: Context, attempt_id: str) -> None:
    """Bring a gang one step on from wherever it stands. Safe to repeat, also while another call does the same."""
    found = context.db.peek(lambda c: placing.read_attempt(c, attempt_id))
    if found is None or found[0]["state"] == "ended" or found[1]["state"] not in ("deploying", "running", "lost"):
        return
    if found[0]["go_at_ms"] is None:
        await _make_ready(context, attempt_id)
    attempt, all_ranks = context.db.peek(lambda c: _look(c, attempt_id))
    if attempt["go_at_ms"] is not None and attempt["state"] not in ("ended", "stopping"):
        ready = [rank for rank in all_ranks if rank["state"] == "ready"]
        await asyncio.gather(*(_let_go(context, rank) for rank in ready))


def _look(connection: sqlite3.Connection, attempt_id: str) -> tuple[sqlite3.Row, list[sqlite3.Row]]:
    attempt = connection.execute("SELECT * FROM attempt WHERE id = ?", (attempt_id,)).fetchone()
    return attempt, rows.of(connection, attempt_id)


async def _make_ready(context: Context, attempt_id: str) -> None:
    if not await _have_port(context, attempt_id):
        return
    found = context.db.peek(lambda c: placing.read_attempt(c, attempt_id))
    if found is None or found[0]["state"] == "ended":
        return
    attempt, job, slots = found
    all_ranks = context.db.peek(lambda c: rows.of(c, attempt_id))
    try:
        specs = [_spec(context, attempt, job, slots, rank, len(all_ranks)) for rank in all_ranks]
    except SecretUnreadable as error:
        await _give_up(context, attempt_id, "start", str(error), counts=True)
        return
    waiting = [(rank, spec) for rank, spec in zip(all_ranks, specs, strict=True) if rank["state"] in ("intended", "starting")]  # fmt: skip
    await asyncio.gather(*(_prepare(context, attempt_id, rank, spec) for rank, spec in waiting))


async def _have_port(context: Context, attempt_id: str) -> bool:
    """Choose where the ranks meet, once: a port that nobody has on the first host, and no other gang."""
    settings = context.settings
    for _ in range(PORT_TRIES):
        attempt, taken = context.db.peek(lambda c: (_look(c, attempt_id)[0], rows.ports(c)))
        if attempt["port"] is not None:
            return True
        link = context.hosts.get(attempt["host"])
        if link is None:
            return False  # its next hello asks again
        try:
            port = await link.free_port(settings.gang_port_from, settings.gang_port_to, taken)
        except (HostRefused, Unreachable, OutcomeUnknown) as error:
            log.info("host %s did not name a port for %s: %s", attempt["host"], attempt_id, error)
            return False
        if port is None:
            said = f"no port from {settings.gang_port_from} to {settings.gang_port_to} is free on {attempt['host']}"
            await _give_up(context, attempt_id, "host", said, counts=False)
            return False
        await context.db.write(lambda tx, port=port: rows.take_port(tx, attempt_id, port))  # type: ignore[misc]
    return False


async def _prepare(context: Context, attempt_id: str, rank: sqlite3.Row, spec: StartSpec) -> None:
    link = context.hosts.get(rank["host"])
    if link is None:
        return  # its next hello asks again
    try:
        report = await link.prepare(spec)
    except HostRefused as refused:
        await _refused(context, attempt_id, rank, spec, link, refused)
    except (Unreachable, OutcomeUnknown) as error:
        log.info("host %s did not say whether %s is ready: %s", rank["host"], rank["id"], error)
    else:
        await outcomes.attempt_report(context, rank["host"], report)


async def _refused(
    context: Context, attempt_id: str, rank: sqlite3.Row, spec: StartSpec, link: Host, refused: HostRefused
) -> None:
    if refused.code in outcomes.OF_THE_LINK:
        return
    if refused.code == "spec_conflict":
        # it is there, made ready from an earlier wording of the same intent: what it does counts
        await outcomes.attempt_report(context, rank["host"], await link.probe(rank["id"]))
        return
    context.doubt_cards(refused, [slot.uuid for slot in spec.slots])
    if refused.code == "stale_fence":
        seen = max(refused.data.get("fence", 0), refused.data.get("floor", 0))
        await context.db.write(lambda tx: meta.lift(tx, "fence", seen))
    # a start that was stopped or given up at the gate is no fault of the job's
    fault = refused.code not in outcomes.NOT_THE_JOBS_FAULT and refused.code != "tombstoned"
    said = f"rank {rank['rank']} on {rank['host']}: {refused.code}: {refused.message}"
    await _give_up(context, attempt_id, "start" if fault else "host", said, counts=fault)


async def _give_up(context: Context, attempt_id: str, failure: str, message: str, *, counts: bool) -> None:
    now = context.now()

    def write(tx: Tx) -> str | None:
        attempt = jobs.find_attempt(tx, attempt_id)
        if attempt is None or attempt["state"] == "ended" or attempt["go_at_ms"] is not None:
            return None
        ranks.never(tx, context, attempt, failure, message, now, counts=counts)
        return str(attempt["lease_id"])

    await context.db.write(write)
    context.wake()


async def _let_go(context: Context, rank: sqlite3.Row) -> None:
    link = context.hosts.get(rank["host"])
    if link is None:
        return
    try:
        report = await link.go(rank["id"])
    except HostRefused as refused:
        log.warning("host %s does not let %s go: %s", rank["host"], rank["id"], refused)
        if refused.code == "unknown_attempt":
            report = AttemptReport(rank["id"], "lost", message="the host knows nothing of it any more")
            await outcomes.attempt_report(context, rank["host"], report)
    except (Unreachable, OutcomeUnknown) as error:
        log.info("host %s did not say whether it let %s go: %s", rank["host"], rank["id"], error)
    else:
        await outcomes.attempt_report(context, rank["host"], report)


def _spec(
    context: Context, attempt: sqlite3.Row, job: sqlite3.Row, slots: list[sqlite3.Row], rank: sqlite3.Row, nodes: int
) -> StartSpec:
    """What the host of one rank is told.

    Raises:
        SecretUnreadable: a secret's file cannot be read.
    """
    mine = [slot for slot in slots if slot["host"] == rank["host"]]
    whole = placing.start_spec(context, attempt, job, mine, rank["host"])
    first = context.settings.hosts.get(attempt["host"])
    return replace(
        whole,
        attempt_id=rank["id"],
        slots=tuple(SlotRef(s["uuid"], s["share"], s["shares"]) for s in mine),
        env={
            **whole.env,
            **environment(
                rank=rank["rank"],
                nodes=nodes,
                processes=max(1, len({s["uuid"] for s in mine} - {"cpu"})),
                address=first.address if first else "127.0.0.1",
                port=attempt["port"],
            ),
        },
        gate_s=GATE_S,
    )


def environment(*, rank: int, nodes: int, processes: int, address: str, port: int) -> dict[str, str]:
    """How the ranks find each other, in the words of torch.distributed: `processes` on each of `nodes` hosts.

    With these torchrun needs no arguments (it reads PET_…), and a program that is started once for each host with one card
    needs no torchrun. RANK is the first of the host's processes.
    """
    values = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "NNODES": str(nodes),
        "NODE_RANK": str(rank),
        "NPROC_PER_NODE": str(processes),
        "WORLD_SIZE": str(nodes * processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "RANK": str(rank * processes),
    }
    if processes == 1:
        values["LOCAL_RANK"] = "0"
    for name in ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "NPROC_PER_NODE"):
        values[f"PET_{name}"] = values[name]
    return values
