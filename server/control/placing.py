"""Carrying decisions out: the intent goes to disk first, then the host is asked."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from cotenant.hostd.protocol import SlotRef, StartSpec
from cotenant.server.backends.base import Host, HostRefused
from cotenant.server.control import grants, outcomes, victims
from cotenant.server.control.context import Context
from cotenant.server.control.secrets import SecretUnreadable, read_secret
from cotenant.server.deciding.world import Slot
from cotenant.server.errors import OutcomeUnknown, Unreachable
from cotenant.server.model.arrays import environment
from cotenant.server.model.caller import LOOP
from cotenant.server.model.spec import parse_kept
from cotenant.server.model.states import JobState, LeaseState
from cotenant.server.model.text import clean
from cotenant.server.store import arrays, events, jobs, leases, meta, ranks
from cotenant.server.store.db import Tx
from cotenant.server.store.worlds import needs_from_json, needs_of

log = logging.getLogger(__name__)

#: How long the record that a command runs may wait for its end. Nobody starts or stops anything on it.
RUNNING_AFTER_S: Final = 0.005

#: An attempt, its job, its lease's slots.
Intended: TypeAlias = tuple[sqlite3.Row, sqlite3.Row, list[sqlite3.Row]]
#: A lease that was decided on: its id and its slots.
Grant: TypeAlias = tuple[str, list[Slot]]


def start_job(context: Context, job_id: str, lease_id: str, slots: list[Slot], now: int) -> Coroutine[None, None, None]:
    """Record lease, attempt and intent in one transaction, which is put in line here; then ask the host, which is returned.

    A decision that the rows no longer allow is dropped; the loop decides anew.
    """
    attempt_id = context.ids.new("attempt", now)

    def write(tx: Tx) -> Intended | None:
        row = tx.one("SELECT * FROM job WHERE id = ?", (job_id,))
        if row is None or row["state"] not in ("queued", "preempted") or row["waits_for"]:
            return None
        if (array := _full_array(tx, row)) is not None:
            raise grants.GrantLost(f"as many elements of {array} run as it allows")
        numbers = _recheck(tx, context, row, slots)
        fence, epoch = meta.next_of(tx, "fence"), row["epoch"] + 1
        if row["state"] == "preempted":
            jobs.move(tx, job_id, JobState.QUEUED, now)
        jobs.move(
            tx, job_id, JobState.DEPLOYING, now, row=row if row["state"] == "queued" else None, epoch=epoch, fence=fence,
            held_reason=None,
        )  # fmt: skip
        _intend(tx, row, attempt_id, lease_id, slots, epoch, fence, now, numbers)
        return read_attempt(tx.connection, attempt_id)

    return _started(context, context.db.submit(write), job_id, lease_id)


def start_elements(context: Context, array_id: str, granted: list[Grant], now: int) -> Coroutine[None, None, None]:
    """Start the next elements of an array that wait, one on each of the leases and slots of `granted`, in one transaction.

    Each becomes a job of its own in the moment it gets its lease: until then it is only a number. Indices are given out
    in ascending order; which one gets which slots is decided here, so that none can ever be given out twice.
    """
    attempt_ids = [context.ids.new("attempt", now) for _ in granted]

    def write(tx: Tx) -> list[Intended]:
        row = tx.one("SELECT * FROM job WHERE id = ?", (array_id,))
        if row is None or row["state"] != "queued" or row["waits_for"]:
            return []
        array = arrays.get(tx, array_id)
        started: list[Intended] = []
        # an array of which less is left than was decided on starts what it has
        for index, (lease_id, slots), attempt_id in zip(
            arrays.take(tx, array, len(granted)), granted, attempt_ids, strict=False
        ):
            numbers = _recheck(tx, context, row, slots)
            fence = meta.next_of(tx, "fence")
            element = arrays.element_row(tx.connection, row, array, index)
            element |= {"state": "deploying", "epoch": 1, "fence": fence, "changed_at_ms": now}
            jobs.insert(tx, element)
            _intend(tx, element, attempt_id, lease_id, slots, 1, fence, now, numbers)
            intended = read_attempt(tx.connection, attempt_id)
            assert intended is not None
            started.append(intended)
        return started

    return _elements_started(context, context.db.submit(write), array_id, [lease_id for lease_id, _ in granted])


async def give_up(context: Context, job_id: str, why: str) -> None:
    """End a job that may not start any more: its start window closed. What has started of an array goes on."""
    now = context.now()

    def write(tx: Tx) -> None:
        row = jobs.get(tx, job_id)
        if row["state"] in ("queued", "held") and row["closes_at_ms"] is not None and row["closes_at_ms"] <= now:
            jobs.end_waiting(tx, row, LOOP, now, why)

    try:
        await context.db.write(write)
    finally:
        context.keeper.doubt(job_id)  # it was taken out of those that wait before its end was written
        context.wake()


def _full_array(tx: Tx, row: sqlite3.Row) -> str | None:
    """The array of an element in the queue, if as many of it run as it allows."""
    if row["array_index"] is None:
        return None
    array = arrays.get(tx, row["array_id"])
    limit = array["max_parallel"]
    return array["job_id"] if limit is not None and array["running"] >= limit else None


def _recheck(tx: Tx, context: Context, row: sqlite3.Row, slots: list[Slot]) -> dict[str, int]:
    """Caps and hosts once more, from the rows themselves; returns the numbers for the event.

    Raises:
        GrantLost: they do not allow it any more.
    """
    numbers = grants.recheck(
        tx,
        context.settings,
        pool=row["pool"],
        owner=row["owner"],
        caller=row["caller"],
        human=bool(row["human"]),
        units=sum(s.units for s in slots),
    )
    return numbers | grants.recheck_hosts(tx, context.keeper.hosts, slots, needs_of(parse_kept(row["spec"])))


def _intend(
    tx: Tx, job: sqlite3.Row | Mapping[str, Any], attempt_id: str, lease_id: str, slots: list[Slot], epoch: int, fence: int, now: int,
    numbers: dict[str, int],
) -> None:  # fmt: skip
    """Write down that a job will be started: its lease, its attempt, the event."""
    held = grants.held_slots(slots)
    hosts = list(dict.fromkeys(slot.host for slot in slots))
    host = hosts[0]
    leases.insert(
        tx,
        {
            "id": lease_id, "kind": "job", "state": "leased", "caller": job["caller"], "owner": job["owner"], "human": job["human"],
            "pool": job["pool"], "priority": job["priority"], "needs": "{}", "gpus": grants.cards(slots),
            "units": sum(s.units for s in slots), "fence": fence, "job_id": job["id"], "host": host, "hours_ms": job["hours_ms"],
            "hours_from": job["hours_from"], "queued_at_ms": job["queued_at_ms"], "granted_at_ms": now,
            "hard_end_at_ms": now + job["hours_ms"], **grants.booked(needs_of(parse_kept(job["spec"]))),
        },
        held,
    )  # fmt: skip
    resume = victims.resume_point(tx, job["id"], parse_kept(job["spec"]), epoch)
    jobs.insert_attempt(
        tx,
        {
            "id": attempt_id, "job_id": job["id"], "epoch": epoch, "lease_id": lease_id, "fence": fence, "host": host,
            "state": "intended", "created_at_ms": now, "nodes": len(hosts), "resumed_from": resume.path, "message": resume.words or None,
        },
    )  # fmt: skip
    for asker in dict.fromkeys((job["id"], job["array_id"])):
        victims.asker_started(tx, asker, lease_id, now)
    if len(hosts) > 1:
        ranks.insert(tx, attempt_id, hosts)
    old = "queued" if job["state"] == "deploying" else job["state"]  # an element is written down as it starts
    events.append(
        tx, "job.placed", LOOP, now, owner=job["owner"], job_id=job["id"], attempt_id=attempt_id, lease_id=lease_id, host=host,
        pool=job["pool"], old=old, new="deploying",
        args={"slots": grants.slots_for_event(held), "fence": fence, "epoch": epoch, "human": job["human"], **numbers},
    )  # fmt: skip


async def _elements_started(
    context: Context, recorded: asyncio.Future[list[Intended]], array_id: str, lease_ids: list[str]
) -> None:
    started: list[Intended] = []
    try:
        started = await recorded
    except (sqlite3.IntegrityError, grants.GrantLost) as error:
        log.info("the start of elements of %s was decided on an older world: %s", array_id, error)
    except BaseException:
        context.keeper.doubt(array_id, *lease_ids)  # what was assumed must not outlive its failure
        raise
    if len(started) < len(lease_ids):
        context.keeper.doubt(array_id, *lease_ids)
        context.wake()
    for attempt in started[1:]:
        context.background_task(_ask_to_start(context, attempt))
    if started:
        await _ask_to_start(context, started[0])


async def _started(context: Context, recorded: asyncio.Future[Intended | None], job_id: str, lease_id: str) -> None:
    try:
        attempt = await recorded
    except (sqlite3.IntegrityError, grants.GrantLost) as error:
        log.info("the start of %s was decided on an older world: %s", job_id, error)
        attempt = None
    except BaseException:
        context.keeper.doubt(job_id, lease_id)  # what was assumed must not outlive its failure
        raise
    if attempt is None:
        context.keeper.doubt(job_id, lease_id)
        context.wake()
        return
    await _ask_to_start(context, attempt)


async def start_attempt(context: Context, attempt_id: str) -> None:
    """Ask the host to start an intended attempt. Safe to repeat: hostd keys on the attempt's id."""
    found = context.db.peek(lambda c: read_attempt(c, attempt_id))
    if found is None or found[0]["state"] not in ("intended", "starting") or found[1]["state"] != "deploying":
        return
    await _ask_to_start(context, found)


async def _ask_to_start(context: Context, intended: Intended) -> None:
    attempt, job, slots = intended
    attempt_id = attempt["id"]
    if attempt["nodes"] > 1:
        from cotenant.server.control import gangs  # which starts each rank with what stands here

        await gangs.advance(context, attempt_id)
        return
    link = context.hosts.get(attempt["host"])
    if link is None:
        return  # the next hello of that host asks again
    try:
        spec = start_spec(context, attempt, job, slots)
    except SecretUnreadable as error:
        await _not_startable(context, link, attempt_id, error)
        return
    try:
        report = await link.start(spec)
    except HostRefused as refused:
        context.doubt_cards(refused, [slot.uuid for slot in spec.slots])
        if refused.code == "no_checkpoint":
            await _from_zero(context, attempt_id)
        elif refused.code == "spec_conflict":
            # it is there, started from an earlier wording of the same intent: what it does counts
            await outcomes.attempt_report(context, attempt["host"], await link.probe(attempt_id))
        else:
            await outcomes.start_refused(context, attempt_id, refused)
    except Unreachable:
        log.info("host %s is away: %s starts when it is back", attempt["host"], attempt_id)
    except OutcomeUnknown:
        log.info("host %s did not answer: %s is looked for when it is back", attempt["host"], attempt_id)
    else:
        if report.state == "running":
            # a command that is over at once needs no record of its own that it runs: its end brings it along
            await asyncio.sleep(RUNNING_AFTER_S)
            if not context.db.peek(lambda c: _awaits_word(c, attempt_id)):
                return
        await outcomes.attempt_report(context, attempt["host"], report)


async def _from_zero(context: Context, attempt_id: str) -> None:
    """The checkpoint is not on the host: the attempt begins anew, and says so."""

    def write(tx: Tx) -> bool:
        attempt = jobs.find_attempt(tx, attempt_id)
        if attempt is None or attempt["state"] != "intended" or attempt["resumed_from"] is None:
            return False
        words = f"starts from zero: {attempt['resumed_from']} is not on host {attempt['host']}"
        tx.execute("UPDATE attempt SET resumed_from = NULL, message = ? WHERE id = ?", (words, attempt_id))
        job = jobs.get(tx, attempt["job_id"])
        events.append(tx, "job.not_resumed", LOOP, context.now(), owner=job["owner"], severity="warning", job_id=job["id"],
                      attempt_id=attempt_id, host=attempt["host"], pool=job["pool"], reason=words)  # fmt: skip
        return True

    if await context.db.write(write):
        await start_attempt(context, attempt_id)


def _awaits_word(connection: sqlite3.Connection, attempt_id: str) -> bool:
    """Whether the records still lack that the attempt runs."""
    row = connection.execute("SELECT state FROM attempt WHERE id = ?", (attempt_id,)).fetchone()
    return row is not None and row["state"] in ("intended", "starting")


async def _not_startable(context: Context, link: Host, attempt_id: str, error: SecretUnreadable) -> None:
    """A start cannot be asked for (again): it never was, unless an earlier request had reached the host.

    The tombstone makes certain that none which is still on its way will be obeyed.
    """
    try:
        report = await link.probe(attempt_id)
        if report.state == "unknown":
            report = await link.stop(attempt_id, "evict", 0)
    except (HostRefused, Unreachable, OutcomeUnknown) as away:
        log.info("host %s was not asked whether %s runs: %s", link.name, attempt_id, away)
        return
    if report.state == "never":
        await outcomes.attempt_never(context, attempt_id, "start", str(error))
    else:
        await outcomes.attempt_report(context, link.name, report)


def read_attempt(connection: sqlite3.Connection, attempt_id: str) -> Intended | None:
    """(attempt, its job, its lease's slots), or None."""
    attempt = connection.execute("SELECT * FROM attempt WHERE id = ?", (attempt_id,)).fetchone()
    if attempt is None:
        return None
    job = connection.execute("SELECT * FROM job WHERE id = ?", (attempt["job_id"],)).fetchone()
    return attempt, job, leases.slots(connection, attempt["lease_id"])


def start_spec(
    context: Context, attempt: sqlite3.Row, job: sqlite3.Row, slots: list[sqlite3.Row], on: str | None = None
) -> StartSpec:
    """What the host is told; `on` names it where it is not the attempt's first.

    Raises:
        SecretUnreadable: a secret's file cannot be read.
    """
    spec = parse_kept(job["spec"])
    host = context.settings.hosts.get(on or attempt["host"])
    variables = dict(spec.env)
    for name, value in (("COTENANT_PROJECT", spec.project), ("COTENANT_EXPERIMENT", spec.experiment)):
        if value:
            variables[name] = value
    if job["array_index"] is not None:
        variables |= context.db.peek(lambda c: _of_array(c, job))
    return StartSpec(
        attempt_id=attempt["id"],
        job_id=job["id"],
        lease_id=attempt["lease_id"],
        epoch=attempt["epoch"],
        fence=attempt["fence"],
        argv=victims.resumed_argv(spec, attempt["resumed_from"]),
        slots=tuple(SlotRef(s["uuid"], s["share"], s["shares"]) for s in slots),
        env=variables,
        secret_env={ref.env: read_secret(ref.env, Path(ref.file), context.settings.data_dir) for ref in spec.secrets},
        workdir=spec.workdir,
        pty=spec.pty,
        time_limit_s=job["hours_ms"] / 1000,
        stop_grace_s=float(spec.stop_grace_s),
        visible_by=host.cuda_visible_by if host else "index",
        checkpoint=victims.checkpoint_ref(spec),
        resume_path=attempt["resumed_from"],
    )


def _of_array(connection: sqlite3.Connection, job: sqlite3.Row) -> dict[str, str]:
    array = arrays.find(connection, job["array_id"])
    assert array is not None, "an element's array is there"
    params = arrays.params_of(connection, array, job["array_index"])
    return environment(job["array_id"], job["array_index"], array["size"], params)


async def stop_attempt(context: Context, attempt_id: str, host: str, reason: str, grace_s: float) -> None:
    """Pass a stop to the host, or the hosts; one that is away hears of it at its next hello."""
    from cotenant.server.control import ranks as of_ranks

    if not await of_ranks.stop(context, attempt_id, reason, grace_s):
        await of_ranks.stop_one(context, attempt_id, host, reason, grace_s)


async def grant_claim(context: Context, lease_id: str, slots: list[Slot], now: int) -> bool:
    """A claim that waited gets its slots; True once it is recorded."""
    held = grants.held_slots(slots)

    def write(tx: Tx) -> bool:
        row = leases.get(tx, lease_id)
        if row["state"] != LeaseState.QUEUED:
            return False
        units = sum(s.units for s in slots)
        numbers = grants.recheck(
            tx, context.settings, pool=row["pool"], owner=row["owner"], caller=row["caller"], human=bool(row["human"]), units=units,
            own_lease=lease_id,
        )  # fmt: skip
        needs = needs_from_json(row["needs"])
        numbers |= grants.recheck_hosts(tx, context.keeper.hosts, slots, needs, own_lease=lease_id)
        fence = meta.next_of(tx, "fence")
        pickup = now + context.settings.pickup_s * 1000
        values = {
            "granted_at_ms": now, "hard_end_at_ms": now + row["hours_ms"], "pickup_by_ms": pickup, "expires_at_ms": None,
            "fence": fence, "units": units, "gpus": grants.cards(slots), "host": slots[0].host,
            **grants.booked(needs),
        }  # fmt: skip
        leases.grant(tx, lease_id, held, values, now)
        victims.asker_started(tx, lease_id, lease_id, now)
        events.append(
            tx, "lease.granted", LOOP, now, owner=row["owner"], lease_id=lease_id, host=slots[0].host, pool=row["pool"], old="queued",
            new="leased", args={"slots": grants.slots_for_event(held), "fence": fence, "human": row["human"], **numbers},
        )  # fmt: skip
        return True

    try:
        done = await context.db.write(write)
    except (sqlite3.IntegrityError, grants.GrantLost) as error:
        log.info("the grant of %s was decided on an older world: %s", lease_id, error)
        done = False
    except BaseException:
        context.keeper.doubt(lease_id)
        raise
    if not done:
        context.keeper.doubt(lease_id)
        context.wake()
    return done


async def requeue_claim(context: Context, lease_id: str, *, refused: HostRefused | None = None) -> bool:
    """A granted claim goes back to its place: not picked up in time (the second time it is over), or refused by its host.

    Its slots are free once the host has said so: nobody knows what the holder did on them without a heartbeat.
    """
    now = context.now()

    def write(tx: Tx) -> bool:
        row = leases.get(tx, lease_id)
        if row["state"] != LeaseState.LEASED or row["pickup_by_ms"] is None:
            return False
        if refused is None and row["pickup_by_ms"] > now:
            return False
        missed = row["missed_pickups"] + (refused is None)
        over = missed > 1
        if over:
            leases.move(
                tx, lease_id, LeaseState.EXPIRED, ended_at_ms=now, end_reason="not picked up twice", pickup_by_ms=None
            )
        else:
            leases.move(
                tx, lease_id, LeaseState.QUEUED, pickup_by_ms=None, missed_pickups=missed, granted_at_ms=None,
                hard_end_at_ms=None, units=0, host=None,
            )  # fmt: skip
        leases.end_slots(tx, lease_id, "cleaning" if refused is None else "freed", now)
        reason = "not picked up in time" if refused is None else clean(f"{refused.code}: {refused.message}", 300)
        events.append(tx, "lease.expired" if over else "lease.requeued", LOOP, now, owner=row["owner"], severity="warning",
                      lease_id=lease_id, host=row["host"], pool=row["pool"], old="leased", new="expired" if over else "queued",
                      reason=reason)  # fmt: skip
        return True

    return await context.db.write(write)
