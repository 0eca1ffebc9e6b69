"""Notices to running jobs: preemption, eviction with a grace, and a save that was asked for.

Notice by signal and file, a checkpoint newer than the notice within the grace (longer while a save goes on), the stop ladder,
then the asker. Each step is in the row before it is taken and is repeated by the tick, so that a server that dies anywhere
goes on where it was. What the end of a victim means is written by `victims`.
"""

from __future__ import annotations

import asyncio
import logging
import signal as signals
import sqlite3
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Final
from weakref import WeakValueDictionary

from cotenant.hostd.protocol import Progress
from cotenant.server.backends.base import HostRefused
from cotenant.server.control.context import Context, check_request_id, said
from cotenant.server.control.jobs import Jobs
from cotenant.server.control.leases import not_yours
from cotenant.server.control.stopping import order_stop
from cotenant.server.control.victims import checkpoint_json, checkpoint_ref
from cotenant.server.deciding.world import PoolRules, Preempt, Preemption
from cotenant.server.errors import Conflict, OutcomeUnknown, Unreachable
from cotenant.server.live import LiveProgress
from cotenant.server.model.answers import SaveAnswer
from cotenant.server.model.caller import LOOP, Caller, may_operate, owns
from cotenant.server.model.spec import parse_kept
from cotenant.server.model.states import JOB_ACTIVE
from cotenant.server.model.text import quoted
from cotenant.server.store import events, jobs, preemptions, ranks, requests
from cotenant.server.store.db import Tx, dumps

log = logging.getLogger(__name__)

#: A directory that changed within this time is being saved to: hosts look twice a second at who was told to save.
SAVING_MS: Final = 5000
#: How many times the grace a save that goes on may take.
GRACES: Final = 3
#: How long slots of ended victims are kept for an asker that does not start on them.
KEPT_MS: Final = 15 * 60_000
#: When it is judged whether an asker used what it got, and how soon after its start its last sign of work then was for it
#: to count as idle all the time. The second is a guess: what shows while a program only loads.
JUDGED_MS: Final = 10 * 60_000
IDLE_FROM_MS: Final = 60_000
#: How long a save that a caller asked for is waited for.
SAVE_GRACE_S: Final = 120


class Preempting:
    """Carries notices out. Of one preemption only one step is under way at a time."""

    def __init__(self, context: Context, jobs_: Jobs) -> None:
        self._context = context
        self._jobs = jobs_
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # ---- begin

    def begin(self, decision: Preempt, now: int) -> Coroutine[Any, Any, None]:
        """Count the preemption as under way at once; what is returned writes it down and gives the notices."""
        context = self._context
        ask = context.keeper.waiting.get(decision.ask_id)
        pool = ask.pool if ask is not None else ""
        preemption_id = context.ids.new("preemption", now)
        context.keeper.assume_preemption(
            Preemption(preemption_id, pool, decision.ask_id, decision.victims, decision.slots, now)
        )
        return self._begin(preemption_id, decision, pool, now)

    async def _begin(self, preemption_id: str, decision: Preempt, pool: str, now: int) -> None:
        context = self._context

        def write(tx: Tx) -> bool:
            asker = _asker(tx, decision.ask_id)
            if asker is None:
                return False
            attempts = []
            for lease_id in decision.victims:
                attempt = tx.one(
                    "SELECT a.*, j.owner, j.state AS job_state, j.priority FROM attempt a JOIN job j ON j.id = a.job_id"
                    " WHERE a.lease_id = ? AND a.state = 'running' AND j.state = 'running'",
                    (lease_id,),
                )
                if attempt is None or attempt["priority"] >= asker["priority"]:
                    return False
                if any(row["reason"] != "save" for row in preemptions.of_attempt(tx.connection, attempt["id"])):
                    return False
                attempts.append(attempt)
            rules = context.keeper.rules.pools[pool]
            why = f"{decision.ask_id} of priority {asker['priority']} waits for {len(decision.slots)} of its slots"
            preemptions.insert(
                tx,
                {
                    "id": preemption_id, "reason": "preempt", "state": "noticed", "pool": pool, "asker_id": decision.ask_id,
                    "asker_owner": asker["owner"], "ordered_by": LOOP.name, "why": why,
                    "slots": dumps([list(key) for key in decision.slots]), "grace_s": rules.grace_s, "noticed_at_ms": now,
                },
                [dict(attempt) for attempt in attempts],
            )  # fmt: skip
            for attempt in attempts:
                _noticed(
                    tx, LOOP, attempt, "preempt", now, why, {"preemption": preemption_id, "asker": decision.ask_id}
                )
            return True

        try:
            done = await context.db.write(write)
        except sqlite3.IntegrityError as error:
            log.info("the preemption for %s was decided on an older world: %s", decision.ask_id, error)
            done = False
        except BaseException:
            context.keeper.doubt_preemptions()
            raise
        if not done:
            # looked at again with the next tick: at once it would be decided and dropped again for as long as it stands so
            context.keeper.doubt_preemptions()
            return
        await self.tend(preemption_id)

    async def evict(self, caller: Caller, job_id: str, reason: str) -> bool:
        """Take a running job off its cards after a notice and a grace; False where it cannot save, or does not run."""
        context, now = self._context, self._context.now()
        preemption_id = context.ids.new("preemption", now)

        def write(tx: Tx) -> str | None:
            row = jobs.get(tx, job_id)
            attempt = jobs.live_attempt(tx, job_id)
            spec = parse_kept(row["spec"])
            if row["state"] != "running" or attempt is None or checkpoint_ref(spec) is None:
                return None
            for known in preemptions.of_attempt(tx.connection, attempt["id"]):
                if known["reason"] == "evict":
                    return str(known["preemption_id"])
            grace_s = (context.keeper.rules.pools.get(row["pool"]) or PoolRules(row["pool"])).grace_s
            preemptions.insert(
                tx,
                {
                    "id": preemption_id, "reason": "evict", "state": "noticed", "pool": row["pool"], "ordered_by": caller.name,
                    "why": reason, "grace_s": grace_s, "noticed_at_ms": now,
                },
                [dict(attempt)],
            )  # fmt: skip
            _noticed(
                tx,
                caller,
                {**dict(attempt), "owner": row["owner"]},
                "evict",
                now,
                reason,
                {"preemption": preemption_id},
            )
            return preemption_id

        found = await context.db.write(write)
        if found is None:
            return False
        await self.tend(found)
        return True

    async def save_now(
        self, caller: Caller, job_id: str, *, request_id: str | None = None, reason: str = ""
    ) -> SaveAnswer:
        """Ask a running job to save now, by the road of a preemption's notice, without stopping it.

        Raises:
            Conflict: no process runs, or the job does not say where its checkpoints are.
            Forbidden: not the caller's.
        """
        check_request_id(request_id)
        context, now = self._context, self._context.now()
        reason = said(reason, "reason", 500)
        preemption_id = context.ids.new("preemption", now)

        def write(tx: Tx) -> str:
            row = jobs.get(tx, job_id)
            if not owns(caller, owner=row["owner"], name=row["caller"]) and not may_operate(caller):
                raise not_yours(job_id)
            digest = requests.args_hash("checkpoint_job", [job_id, reason])
            known = requests.find(tx, caller.name, request_id, "checkpoint_job", digest)
            if known is not None:
                return known
            attempt = jobs.live_attempt(tx, job_id)
            if row["state"] != "running" or attempt is None:
                raise Conflict(
                    f"{job_id} is {row['state']}: no process to tell",
                    code="not_running",
                    hint="get_job shows its state.",
                )
            if checkpoint_ref(parse_kept(row["spec"])) is None:
                raise Conflict(
                    f"{job_id} does not say where it saves",
                    code="no_checkpoints",
                    hint="Submit with checkpoint={dir, signal}; signal_job reaches a job that saves at a signal anyway.",
                )
            for running in preemptions.of_attempt(tx.connection, attempt["id"]):
                if running["preemption_state"] == "noticed":
                    return str(running["preemption_id"])  # it was just told to save
            preemptions.insert(
                tx,
                {
                    "id": preemption_id, "reason": "save", "state": "noticed", "pool": row["pool"], "ordered_by": caller.name,
                    "why": reason or "asked to save", "grace_s": SAVE_GRACE_S, "noticed_at_ms": now,
                },
                [dict(attempt)],
            )  # fmt: skip
            requests.keep(tx, caller.name, request_id, "checkpoint_job", digest, preemption_id, now)
            _noticed(
                tx, caller, {**dict(attempt), "owner": row["owner"]}, "save", now, reason, {"notice": preemption_id}
            )
            return preemption_id

        kept = await context.db.write(write)
        await self.tend(kept)
        return self._save_answer(job_id, kept)

    def _save_answer(self, job_id: str, preemption_id: str) -> SaveAnswer:
        def read(c: sqlite3.Connection) -> tuple[sqlite3.Row | None, list[sqlite3.Row]]:
            return preemptions.find(c, preemption_id), preemptions.victims(c, preemption_id)

        row, victims = self._context.db.peek(read)
        victim = next((v for v in victims if v["job_id"] == job_id), None)
        if row is None or victim is None:
            raise Conflict(f"{job_id} was told, and nothing of it is known any more", code="not_running")
        status = "saved" if victim["saved"] else "noticed" if row["state"] in ("noticed", "stopping") else "not_saved"
        return SaveAnswer(
            job_id=job_id, attempt_id=victim["attempt_id"], notice_id=preemption_id, status=status,
            told=victim["told_at_ms"] is not None, checkpoint=victim["checkpoint"],
        )  # fmt: skip

    async def carry_out_stop(self, job_id: str) -> None:
        """Pass an ordered stop to its host."""
        await self._jobs.carry_out_stop(job_id)

    # ---- on and on

    def progress(self, host: str, told: list[Progress]) -> None:
        """A host tells signs of work: they are kept, and whoever waited for a save goes on."""
        context, now = self._context, self._context.now()
        for one in filter(None, map(_of_attempt, told)):
            before = context.live.progress.get(one.attempt_id)
            seen = LiveProgress.read(one, host, now, before)
            context.live.progress[one.attempt_id] = seen
            context.keeper.see_progress(one.lease_id, seen)
            if one.checkpoint is not None and _news(before, one):
                context.background_task(self._keep_checkpoint(one, now))
            if one.notice is not None and one.saved:
                context.background_task(self.tend(one.notice))
        if context.keeper.undecided:
            context.wake()

    async def _keep_checkpoint(self, one: Progress, now: int) -> None:
        """The newest complete checkpoint goes into the records: an attempt whose host is lost has it too."""

        def write(tx: Tx) -> None:
            attempt = jobs.find_attempt(tx, one.attempt_id)
            if attempt is not None and attempt["state"] != "ended":
                tx.execute(
                    "UPDATE attempt SET checkpoint = ? WHERE id = ?", (checkpoint_json(one, now), one.attempt_id)
                )
                tx.changed.add(f"cotenant://jobs/{attempt['job_id']}")

        await self._context.db.write(write)

    async def tick(self) -> None:
        """Once a second: take the next step of everything that is under way."""
        for row in self._context.db.peek(preemptions.living):
            await self.tend(row["id"])
        before = self._context.now() - JUDGED_MS
        for row in self._context.db.peek(lambda c: preemptions.unjudged(c, before)):
            await self._judge(row)

    async def _judge(self, row: sqlite3.Row) -> None:
        """Ten minutes after an asker got its slots: was it worth it? Three that were not within a day cost the right."""
        context, now = self._context, self._context.now()
        lease = context.keeper.living.get(row["asker_lease_id"] or "")
        seen = None if lease is None else lease.progress_ms
        wasted = seen is not None and seen <= row["asker_started_at_ms"] + IDLE_FROM_MS

        def write(tx: Tx) -> None:
            preemptions.update(tx, row["id"], judged=1, **({"wasted_at_ms": now} if wasted else {}))
            if wasted:
                count = preemptions.wasted(tx.connection, row["asker_owner"], now)
                events.append(tx, "preemption.wasted", LOOP, now, owner=row["asker_owner"], severity="warning", pool=row["pool"],
                              lease_id=row["asker_lease_id"], reason="no sign of work in ten minutes",
                              args={"preemption": row["id"], "in_24_h": count})  # fmt: skip

        await context.db.write(write)

    async def tend(self, preemption_id: str) -> None:
        """Take the next step of one preemption, if it is due."""
        lock = self._locks.setdefault(preemption_id, asyncio.Lock())
        async with lock:
            row = self._context.db.peek(lambda c: preemptions.find(c, preemption_id))
            if row is None:
                return
            if row["state"] == "noticed":
                await self._tend_notice(row)
            elif row["state"] == "stopping":
                await self._tend_stop(row)

    async def _tend_notice(self, row: sqlite3.Row) -> None:
        context = self._context
        victims = context.db.peek(lambda c: preemptions.victims(c, row["id"]))
        for victim in victims:
            if victim["told_at_ms"] is None and victim["ended_at_ms"] is None:
                await self._tell(row, victim)
        victims = context.db.peek(lambda c: preemptions.victims(c, row["id"]))
        for victim in victims:
            live = context.live.progress.get(victim["attempt_id"])
            if not victim["saved"] and live is not None and live.told.notice == row["id"] and live.told.saved:
                await self._note_save(row, victim, live)
        victims = context.db.peek(lambda c: preemptions.victims(c, row["id"]))
        now = context.now()
        if row["reason"] == "preempt" and any(_unreachable(row, victim, now) for victim in victims):
            await self.withdraw(row["id"], "the host of a victim does not answer", locked=True)
        elif all(self._is_ready(row, victim, now) for victim in victims):
            await self._stop(row["id"])

    async def _tell(self, row: sqlite3.Row, victim: sqlite3.Row) -> None:
        """Give one victim its notice. A host that is away hears of it at a later tick."""
        context = self._context
        seats = context.db.peek(lambda c: ranks.seats(c, victim["attempt_id"]))
        if any(host not in context.hosts for _, host in seats):
            return
        spec = parse_kept(victim["job_spec"])
        number = signal_number(spec.checkpoint.signal if spec.checkpoint is not None else None)
        what = "save" if row["reason"] == "save" else "stop"
        by_s = None if row["reason"] == "save" else float(row["grace_s"])
        told: Progress | None = None
        for at, host in seats:
            try:
                said = await context.hosts[host].notice(at, row["id"], what, row["why"], by_s, number)
            except HostRefused as refused:
                # there is no process to tell any more, or a hostd that cannot: the stop comes all the same
                log.info("no notice to %s: %s %s", at, refused.code, refused.message)
            except (KeyError, Unreachable, OutcomeUnknown) as error:
                log.info("host %s did not take the notice to %s yet: %s", host, at, error)
                return
            else:
                told = told or _of_attempt(said)
        now = context.now()
        if told is not None:
            before = context.live.progress.get(victim["attempt_id"])
            context.live.progress[victim["attempt_id"]] = LiveProgress.read(told, victim["host"], now, before)
        await context.db.write(
            lambda tx: preemptions.update_victim(tx, row["id"], victim["attempt_id"], told_at_ms=now)
        )

    async def _note_save(self, row: sqlite3.Row, victim: sqlite3.Row, live: LiveProgress) -> None:
        now = self._context.now()
        path = live.told.checkpoint.path if live.told.checkpoint is not None else None

        def write(tx: Tx) -> None:
            preemptions.update_victim(tx, row["id"], victim["attempt_id"], saved=1, checkpoint=path)
            events.append(tx, "job.saved", LOOP, now, owner=victim["owner"], job_id=victim["job_id"],
                          attempt_id=victim["attempt_id"], lease_id=victim["lease_id"], host=victim["host"], pool=row["pool"],
                          args={"preemption": row["id"]})  # fmt: skip

        await self._context.db.write(write)

    def _is_ready(self, row: sqlite3.Row, victim: sqlite3.Row, now: int) -> bool:
        """Whether nothing more is to be waited for from a victim: it saved, it ended, or its grace is over."""
        if victim["ended_at_ms"] is not None or victim["saved"]:
            return True
        told = victim["told_at_ms"]
        if told is None:
            # an eviction does not wait for a host that is away: the stop is passed on when it is back
            return bool(row["reason"] != "preempt" and now - row["noticed_at_ms"] >= row["grace_s"] * 1000)
        if checkpoint_ref(parse_kept(victim["job_spec"])) is None:
            return True  # nobody could see it save
        grace_ms = row["grace_s"] * 1000
        live = self._context.live.progress.get(victim["attempt_id"])
        saving = live is not None and live.writing_ms is not None and now - live.writing_ms <= SAVING_MS
        return bool(now - told >= (GRACES * grace_ms if saving else grace_ms))

    async def _stop(self, preemption_id: str) -> None:
        """The grace is over, or everybody has saved: the stop ladder for those that still run."""
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> list[str] | None:
            row = preemptions.find(tx.connection, preemption_id)
            if row is None or row["state"] != "noticed":
                return []
            victims = preemptions.victims(tx.connection, preemption_id)
            if row["reason"] == "save":
                saved = all(victim["saved"] for victim in victims)
                preemptions.update(
                    tx,
                    preemption_id,
                    state="done",
                    ended_at_ms=now,
                    outcome="saved" if saved else "it did not save in time",
                )
                return []
            if row["reason"] == "preempt" and _asker(tx, row["asker_id"]) is None:
                return None
            stopped = []
            for victim in victims:
                job = jobs.get(tx, victim["job_id"])
                told = victim["told_at_ms"]
                if victim["ended_at_ms"] is None and victim["epoch"] == job["epoch"] and job["state"] in JOB_ACTIVE:
                    if job["state"] != "stopping":
                        order_stop(tx, LOOP, job, row["reason"], now, why=_why(row))
                    stopped.append(str(job["id"]))
                    preemptions.update_victim(
                        tx,
                        preemption_id,
                        victim["attempt_id"],
                        stopped_at_ms=now,
                        grace_used_ms=now - told if told else 0,
                    )
            preemptions.update(tx, preemption_id, state="stopping", stopping_at_ms=now)
            return stopped

        stopped = await context.db.write(write)
        if stopped is None:
            await self.withdraw(preemption_id, "its asker is gone", locked=True)
            return
        for job_id in stopped:
            await self._jobs.carry_out_stop(job_id)
        context.wake()

    async def _tend_stop(self, row: sqlite3.Row) -> None:
        """End a preemption whose asker will not come any more."""
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> bool:
            fresh = preemptions.find(tx.connection, row["id"])
            if fresh is None or fresh["state"] != "stopping":
                return False
            victims = preemptions.victims(tx.connection, row["id"])
            if any(victim["ended_at_ms"] is None for victim in victims):
                return False
            if row["reason"] != "preempt":
                outcome = "the attempt ended"
            elif _asker(tx, row["asker_id"]) is None:
                outcome = "the asker was gone when the slots came free"
            elif now - max(victim["ended_at_ms"] for victim in victims) > KEPT_MS:
                outcome = "the asker did not start on the slots"
            else:
                return False
            preemptions.update(tx, row["id"], state="done", ended_at_ms=now, outcome=outcome)
            return True

        needed = context.db.peek(
            lambda c: all(victim["ended_at_ms"] is not None for victim in preemptions.victims(c, row["id"]))
        )
        if needed and await context.db.write(write):
            context.wake()

    async def withdraw(self, preemption_id: str, why: str, *, locked: bool = False) -> None:
        """Take a preemption back before the stop: its slots are nobody's any more, and the victims go on."""
        if not locked:
            async with self._locks.setdefault(preemption_id, asyncio.Lock()):
                await self.withdraw(preemption_id, why, locked=True)
            return
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> list[sqlite3.Row]:
            row = preemptions.find(tx.connection, preemption_id)
            if row is None or row["state"] != "noticed":
                return []
            victims = preemptions.victims(tx.connection, preemption_id)
            preemptions.update(tx, preemption_id, state="withdrawn", ended_at_ms=now, outcome=why)
            for victim in victims:
                preemptions.update_victim(
                    tx, preemption_id, victim["attempt_id"], outcome=victim["outcome"] or "it goes on"
                )
                events.append(tx, "job.notice_withdrawn", LOOP, now, owner=victim["owner"], job_id=victim["job_id"],
                              attempt_id=victim["attempt_id"], lease_id=victim["lease_id"], host=victim["host"], pool=row["pool"],
                              reason=why, args={"preemption": preemption_id})  # fmt: skip
            return victims

        for victim in await context.db.write(write):
            if victim["told_at_ms"] is None or victim["ended_at_ms"] is not None:
                continue
            for at, host in context.db.peek(lambda c, v=victim: ranks.seats(c, v["attempt_id"])):  # type: ignore[misc]
                link = context.hosts.get(host)
                if link is None:
                    continue
                try:
                    await link.notice(at, f"{preemption_id}-no", "none", why, None, None)
                except (HostRefused, Unreachable, OutcomeUnknown) as error:
                    log.info("%s was not told that the notice is withdrawn: %s", at, error)
        context.keeper.doubt_preemptions()
        context.wake()


def _asker(tx: Tx, asker_id: str) -> sqlite3.Row | None:
    """The row of a job or claim that still waits, or None."""
    if asker_id.startswith("lse"):
        return tx.one("SELECT id, owner, priority FROM lease WHERE id = ? AND state = 'queued'", (asker_id,))
    return tx.one("SELECT id, owner, priority FROM job WHERE id = ? AND state IN ('queued', 'preempted')", (asker_id,))


def _noticed(tx: Tx, by: Caller, attempt: Any, what: str, now: int, why: str, args: dict[str, Any]) -> None:
    events.append(tx, "job.noticed", by, now, owner=attempt["owner"], severity="info" if what == "save" else "warning",
                  job_id=attempt["job_id"], attempt_id=attempt["id"], lease_id=attempt["lease_id"], host=attempt["host"], new=what,
                  reason=why or None, args=args)  # fmt: skip


def _unreachable(row: sqlite3.Row, victim: sqlite3.Row, now: int) -> bool:
    if victim["ended_at_ms"] is not None:
        return False
    return victim["job_state"] == "lost" or (
        victim["told_at_ms"] is None and now - row["noticed_at_ms"] > row["grace_s"] * 1000
    )


def _of_attempt(told: Progress) -> Progress | None:
    """Signs of work by the attempt's own id. Of several hosts the first counts, whose rank writes the checkpoints."""
    attempt_id = ranks.attempt_of(told.attempt_id)
    if attempt_id is None:
        return told
    return replace(told, attempt_id=attempt_id) if told.attempt_id == f"{attempt_id}.0" else None


def _why(row: sqlite3.Row) -> str:
    if row["reason"] == "evict":
        said_why = f": {quoted(row['why'], 300)}" if row["why"] else ""
        return f"evicted by {row['ordered_by']}{said_why}"
    return str(row["why"])


def _news(before: LiveProgress | None, now: Progress) -> bool:
    """Whether the newest checkpoint is another one than was told before."""
    if before is None or before.told.checkpoint is None or now.checkpoint is None:
        return now.checkpoint is not None
    known = before.told.checkpoint
    return (known.name, known.size_bytes) != (now.checkpoint.name, now.checkpoint.size_bytes) or (
        now.checkpoint.age_ms < known.age_ms
    )


def signal_number(name: str | None) -> int | None:
    """The number of a signal that a job asked to be told by; None without one, or with one that is none."""
    if name is None:
        return None
    found = getattr(signals, f"SIG{name.upper().removeprefix('SIG')}", None)
    return int(found) if isinstance(found, signals.Signals) else None
