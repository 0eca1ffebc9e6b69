"""Jobs and their attempts as a caller may see them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeAlias

from cotenant.server.clock import iso, iso_or_none
from cotenant.server.deciding.order import Order
from cotenant.server.deciding.world import Ask, Blocker, SlotKey
from cotenant.server.model import answers as a
from cotenant.server.model.caller import Caller
from cotenant.server.model.spec import JobSpec
from cotenant.server.model.states import JOB_FINAL, TASK_STATUS, JobState
from cotenant.server.model.text import clean, mask, signal_name
from cotenant.server.store import arrays, dependencies, preemptions
from cotenant.server.store import leases as lease_rows
from cotenant.server.store import ranks as rank_rows
from cotenant.server.store.views.arrays import array_answer, find_unstarted, index_of, no_such_array, no_such_job
from cotenant.server.store.views.base import (
    PRIORITY_NAMES,
    UNDECIDED,
    View,
    blocker_answer,
    checked_limit,
    command_line,
    cursor_id,
    one_of,
    slot_answer,
    time_ms,
)

_Slots: TypeAlias = dict[str, list[sqlite3.Row]]  # by lease
_Ranks: TypeAlias = dict[str, list[sqlite3.Row]]  # by attempt

_FINAL = "('succeeded', 'failed', 'cancelled')"
_JOB_GROUPS = {
    "active": f"j.state NOT IN {_FINAL}",
    "waiting": f"j.state NOT IN {_FINAL} AND j.state IN ('queued', 'held', 'preempted')",
    "running": f"j.state NOT IN {_FINAL} AND j.state IN ('running', 'suspended')",
    # the plus keeps SQLite from an index that it would have to sort: by the ids the page is full soon
    "final": f"+j.state IN {_FINAL}",
    "all": "1",
}


class JobViews(View):
    """Reads of jobs."""

    async def get_job(self, caller: Caller, job_id: str) -> a.JobAnswer:
        """
        Raises:
            NotFound: no such job.
        """

        def read(
            c: sqlite3.Connection,
        ) -> tuple[Any, sqlite3.Row | None, list[sqlite3.Row], _Slots, _Ranks, list[sqlite3.Row]]:
            row = c.execute("SELECT * FROM job WHERE id = ?", (job_id,)).fetchone()
            if row is None:
                row = find_unstarted(c, job_id)
                if row is None:
                    raise no_such_job(c, job_id)
                return row, None, [], {}, {}, []
            array = arrays.find(c, job_id) if arrays.is_array(row) else None
            attempts = c.execute(
                "SELECT * FROM attempt WHERE job_id = ? ORDER BY epoch DESC LIMIT 20", (job_id,)
            ).fetchall()
            slots = {t["lease_id"]: lease_rows.slots(c, t["lease_id"]) for t in attempts}
            ranks = {t["id"]: rank_rows.of(c, t["id"]) for t in attempts if t["nodes"] > 1}
            return row, array, attempts, slots, ranks, preemptions.of_job(c, job_id)

        row, array, attempts, slots, ranks, stops = self._c.db.peek(read)
        return self._job(caller, row, array, attempts, slots, ranks, stops)

    def find_state(self, job_id: str) -> str | None:
        """A job's state, or None where there is no such job."""

        def read(c: sqlite3.Connection) -> str | None:
            row = c.execute("SELECT state FROM job WHERE id = ?", (job_id,)).fetchone() or find_unstarted(c, job_id)
            return None if row is None else str(row["state"])

        state: str | None = self._c.db.peek(read)
        return state

    def _job(
        self,
        caller: Caller,
        row: Any,
        array: sqlite3.Row | None,
        attempts: list[sqlite3.Row],
        slots: _Slots,
        ranks: _Ranks,
        stops: list[sqlite3.Row],
    ) -> a.JobAnswer:
        now = self._c.now()
        spec = json.loads(row["spec"])
        inside = self._eyes.sees_inside(caller, owner=row["owner"], name=row["caller"], pool=row["pool"])
        newest = attempts[0] if attempts else None
        held = slots.get(newest["lease_id"], []) if newest is not None else []
        active = newest is not None and newest["state"] != "ended"
        waiting = row["state"] in ("queued", "held", "preempted")
        if array is not None and not (array["pending"] or array["held"]):
            waiting = False  # all of it has started
        gpus = spec.get("gpus", 1)
        end = row["ended_at_ms"] or now
        stood = _stood_ms(newest, end) if newest is not None else 0
        return a.JobAnswer(
            job_id=row["id"],
            state=row["state"],
            name=mask(row["name"]),
            purpose=mask(spec.get("purpose", "")),
            holder=row["caller"],
            owner=row["owner"],
            pool=row["pool"],
            priority=PRIORITY_NAMES.get(row["priority"], str(row["priority"])),
            gpus=len({s["uuid"] for s in held} - {"cpu"}) if active else gpus if isinstance(gpus, int) else gpus["min"],
            task=self._task(row),
            submitted_at=iso(row["submitted_at_ms"]),
            age_s=max(0, (now - row["submitted_at_ms"]) // 1000),
            started_at=iso_or_none(row["started_at_ms"]),
            ended_at=iso_or_none(row["ended_at_ms"]),
            running_s=None if row["started_at_ms"] is None else max(0, (end - row["started_at_ms"]) // 1000),
            hours=row["hours_ms"] / 3_600_000,
            hours_from=row["hours_from"],
            time_left_s=max(0, (newest["started_at_ms"] + row["hours_ms"] + stood - now) // 1000)
            if newest is not None and active and newest["started_at_ms"] is not None
            else None,
            host=newest["host"] if newest is not None and active else None,
            slots=[slot_answer(s) for s in held] if active else [],
            exit_code=row["exit_code"],
            # a verdict may quote paths and commands: it is for those who may look inside
            failure_class=row["failure_class"] if inside else None,
            message=mask(clean(row["message"], 500)) if row["message"] and inside else None,
            attempts=[
                self._attempt(t, slots.get(t["lease_id"], []), ranks.get(t["id"], []), inside=inside)
                for t in reversed(attempts)
            ],
            attempts_left=row["attempts_left"],
            blockers=[blocker_answer(b) for b in self._blockers(row)] if waiting else [],
            stop_reason=row["stop_reason"],
            held_reason=_held_reason(row, newest),
            project=mask(spec.get("project", "")),
            experiment=mask(spec.get("experiment", "")),
            kind=spec.get("kind", "custom"),
            labels={clean(k, 100): mask(clean(v, 200)) for k, v in spec.get("labels", {}).items()},
            command=mask(clean(command_line(spec), 2000)) if inside else None,
            workdir=spec.get("workdir") if inside else None,
            env_names=sorted(spec.get("env", {})) + [s["env"] for s in spec.get("secrets", ())] if inside else None,
            config=spec.get("config", {}) if inside else None,
            simulated=any(self._simulated(s["uuid"]) for s in held),
            near_cap=self._near_cap(row["pool"]) if waiting else False,
            nodes=spec.get("nodes", 1),
            queue_position=self._position(row) if waiting else None,
            suspended_s=stood // 1000,
            array=None if array is None else array_answer(array),
            array_id=row["array_id"] if row["array_index"] is not None else None,
            array_index=row["array_index"],
            retry_of=row["retry_of"] if row["array_index"] is None else None,
            after=[] if row["array_index"] is not None else self._after(row["id"]),
            not_before=iso_or_none(row["opens_at_ms"] or None),
            not_after=iso_or_none(row["closes_at_ms"]),
            checkpoint=_checkpoint(attempts, now) if inside else None,
            idle_notice=self._idle_notice(newest["lease_id"]) if newest is not None and active else None,
            preemptions=[asdict(preemption_answer(stop, row["id"], self._slot, inside=inside)) for stop in stops],
        )

    def _after(self, job_id: str) -> list[a.AfterAnswer]:
        waits = self._c.db.peek(lambda c: dependencies.of_job(c, job_id))
        return [a.AfterAnswer(on.what, on.needs, on.met) for on in waits]

    def _slot(self, key: list[Any]) -> a.SlotAnswer:
        host, uuid, share = key
        try:
            slot = self._c.keeper.slot((host, uuid, share))
        except KeyError:
            return a.SlotAnswer(host, None, uuid, share)
        return a.SlotAnswer(host, slot.index, uuid, share if slot.shares > 1 else None)

    def _blockers(self, row: Any) -> tuple[Blocker, ...]:
        found: tuple[Blocker, ...] = self._c.keeper.waiting.blockers(row["id"])
        if not found and row["array_index"] is not None and row["held_reason"] is None:
            found = self._c.keeper.waiting.blockers(row["array_id"])  # one that has not started waits as the array does
        if found:
            return found
        if row["state"] == "held":
            return (Blocker("held", row["held_reason"] or "on hold", helps="release_job lets it queue again"),)
        return (UNDECIDED,)

    def _position(self, row: Any) -> int | None:
        ask: Ask | None = self._c.keeper.waiting.get(row["id"])
        if ask is None:
            return None
        order = Order(self._c.keeper.world(waiting=False), self._c.now())
        return 1 + int(self._c.keeper.waiting.ahead(ask, order.key))

    def _task(self, row: Any) -> a.TaskAnswer:
        final = row["state"] in JOB_FINAL
        age = self._c.now() - row["submitted_at_ms"]
        # short at first, then slower: a job that has run for an hour need not be asked every second
        poll = 0 if final else min(30_000, max(1000, age // 20))
        return a.TaskAnswer(row["id"], TASK_STATUS[JobState(row["state"])], poll, None)

    def _attempt(
        self, row: sqlite3.Row, slots: list[sqlite3.Row], ranks: list[sqlite3.Row], *, inside: bool
    ) -> a.AttemptAnswer:
        record = json.loads(row["exit"]) if row["exit"] and inside else None
        return a.AttemptAnswer(
            attempt_id=row["id"],
            epoch=row["epoch"],
            fence=row["fence"],
            lease_id=row["lease_id"],
            state=row["state"],
            exit_code=row["exit_code"],
            host=row["host"],
            slots=[slot_answer(s) for s in slots],
            started_at=iso_or_none(row["started_at_ms"]),
            ended_at=iso_or_none(row["ended_at_ms"]),
            exit=None
            if record is None
            else a.ExitAnswer(
                code=record.get("code"),
                signal=record.get("signal"),
                exec_error=record.get("exec_error"),
                sender=record.get("sender"),
                reason=record.get("reason"),
                cpu_s=round(record.get("cpu_user_s", 0) + record.get("cpu_sys_s", 0), 3),
                peak_memory_mib=record.get("peak_memory_mib", 0),
                peak_card_memory_mib=record.get("peak_card_memory_mib", {}),
                duration_s=record.get("duration_s", 0.0),
                signal_name=None if record.get("signal") is None else signal_name(record["signal"]),
            ),
            failure_class=row["failure_class"] if inside else None,
            message=mask(clean(row["message"], 500)) if row["message"] and inside else None,
            ranks=[
                a.RankAnswer(
                    rank=r["rank"],
                    host=r["host"],
                    state=r["state"],
                    exit_code=r["exit_code"],
                    failure_class=r["failure_class"] if inside else None,
                    message=mask(clean(r["message"], 300)) if r["message"] and inside else None,
                )
                for r in ranks
            ],
            resumed_from=row["resumed_from"] if inside else None,
        )

    async def list_jobs(
        self, caller: Caller, *, state: str | None = None, pool: str | None = None, owner: str | None = None, holder: str | None = None,
        label: str | None = None, host: str | None = None, since: str | None = None, array: str | None = None, limit: int = 20,
        cursor: str | None = None,
    ) -> a.JobList:  # fmt: skip
        """Jobs, newest first. `state`: active, waiting, running, final, all (default), or one state; `label` is KEY=VALUE.

        An array is one row; with `array` come its elements that have started, by index.
        """
        where: list[str] = ["j.array_index IS NULL"]
        values: list[Any] = []
        if array is not None:
            where, values = ["j.array_id = ? AND j.array_index IS NOT NULL"], [array]
        if state not in (None, "all"):
            if state in _JOB_GROUPS:
                where.append(_JOB_GROUPS[state])
            else:
                one_of(state, "state", (*_JOB_GROUPS, *(s.value for s in JobState)))
                where.append(f"j.state {'IN' if state in JOB_FINAL else 'NOT IN'} {_FINAL} AND j.state = ?")
                values.append(state)
        for column, value in (("j.pool", pool), ("j.owner", owner), ("j.caller", holder)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if host is not None:
            where.append(
                "(t.host = ? OR t.nodes > 1 AND EXISTS (SELECT 1 FROM rank r WHERE r.attempt_id = t.id AND r.host = ?))"
            )
            values += [host, host]
        if label is not None:
            key, equals, wanted = label.partition("=")
            # not by a path: no quoting of a key would hold for every key
            where.append(
                f"EXISTS (SELECT 1 FROM json_each(j.spec, '$.labels') l WHERE l.key = ?{' AND l.value = ?' if equals else ''})"
            )
            values.append(key)
            if equals:
                values.append(wanted)
        if since is not None:
            where.append("j.submitted_at_ms >= ?")
            values.append(time_ms(since))
        limit = checked_limit(limit, 200)
        count_where, count_values = list(where), list(values)
        if cursor is not None and array is None:
            where.append("j.id < ?")
            values.append(cursor_id(cursor, "job"))
        elif cursor is not None:
            where.append("j.array_index > ?")
            values.append(index_of(cursor, array))
        table = f"job j{_index(state, holder=holder, owner=owner, since=since, array=array)}"
        order = "j.id DESC" if array is None else "j.array_index"
        join = " LEFT JOIN attempt t ON t.job_id = j.id AND t.epoch = j.epoch"

        def read(c: sqlite3.Connection) -> tuple[list[sqlite3.Row], int, dict[str, sqlite3.Row]]:
            if array is not None and arrays.find(c, array) is None:
                raise no_such_array(array)
            found = c.execute(
                f"SELECT j.*, t.host AS host FROM {table}{join} WHERE {' AND '.join(where)} ORDER BY {order} LIMIT ?",
                (*values, limit + 1),
            ).fetchall()
            counted = f"SELECT count(*) FROM {table}{join if host is not None else ''} WHERE {' AND '.join(count_where).replace('+j.state', 'j.state')}"
            total = c.execute(counted, count_values).fetchone()[0]
            whole = {row["id"]: arrays.find(c, row["id"]) for row in found if arrays.is_array(row)}
            return found, int(total), {key: row for key, row in whole.items() if row is not None}

        found, total, whole = await self._c.db.read(read)
        now = self._c.now()
        page = []
        for row in found[:limit]:
            gpus = json.loads(row["spec"]).get("gpus", 1)
            many = whole.get(row["id"])
            waits = row["state"] in ("queued", "held", "preempted") and (
                many is None or many["pending"] or many["held"]
            )
            blockers = self._blockers(row) if waits else ()
            # how a job of another owner failed is for those who may look inside, as in `_job`
            told = row["state"] in JOB_FINAL and self._eyes.sees_inside(
                caller, owner=row["owner"], name=row["caller"], pool=row["pool"]
            )
            page.append(
                a.JobRow(
                    job_id=row["id"],
                    state=row["state"],
                    name=mask(row["name"]),
                    holder=row["caller"],
                    owner=row["owner"],
                    pool=row["pool"],
                    priority=PRIORITY_NAMES.get(row["priority"], str(row["priority"])),
                    gpus=gpus if isinstance(gpus, int) else gpus["min"],
                    host=row["host"],
                    submitted_at=iso(row["submitted_at_ms"]),
                    age_s=max(0, (now - row["submitted_at_ms"]) // 1000),
                    running_s=None
                    if row["started_at_ms"] is None
                    else max(0, ((row["ended_at_ms"] or now) - row["started_at_ms"]) // 1000),
                    exit_code=row["exit_code"],
                    blocker=blockers[0].code if blockers else None,
                    failure_class=row["failure_class"] if told else None,
                    message=mask(clean(row["message"], 200)) if told and row["message"] else None,
                    array=None if many is None else array_answer(many),
                    array_index=row["array_index"],
                )
            )
        return a.JobList(page, page[-1].job_id if len(found) > limit else None, total)

    def dry_run(
        self,
        caller: Caller,
        ask: Ask,
        spec: JobSpec,
        keys: tuple[SlotKey, ...] | None,
        why: tuple[Blocker, ...],
        now: int,
    ) -> a.JobAnswer:
        """What a submit would answer, with nothing written."""
        slots = [self._c.keeper.slot(key) for key in keys or ()]
        return a.JobAnswer(
            job_id="", state="queued", name=mask(spec.name), purpose=mask(spec.purpose), holder=caller.name, owner=caller.owner, pool=ask.pool,
            priority=spec.priority, gpus=len({s.uuid for s in slots if s.kind == "gpu"}) if keys else spec.gpus_min,
            task=a.TaskAnswer("", "working", 0, None), submitted_at=iso(now), age_s=0, started_at=None, ended_at=None, running_s=None,
            hours=ask.hours_ms / 3_600_000, hours_from="hours" if spec.hours is not None else "pool default", time_left_s=None,
            host=slots[0].host if slots else None,
            slots=[a.SlotAnswer(s.host, s.index, s.uuid, s.share if s.shares > 1 else None) for s in slots], exit_code=None,
            failure_class=None, message="Nothing was submitted: this was a dry run.", attempts=[], attempts_left=spec.max_attempts,
            blockers=[blocker_answer(b) for b in why], stop_reason=None, held_reason=None, project=spec.project, experiment=spec.experiment,
            kind=spec.kind, labels=dict(spec.labels), command=mask(spec.command_line), workdir=spec.workdir, env_names=sorted(spec.env),
            config=dict(spec.config), simulated=any(self._simulated(s.uuid) for s in slots),
            spec=spec.model_dump(mode="json", exclude={"env", "secrets"}, exclude_none=True), dry_run=True, would_start=keys is not None,
            nodes=spec.nodes,
        )  # fmt: skip


def _checkpoint(attempts: list[sqlite3.Row], now: int) -> dict[str, Any] | None:
    """The newest complete checkpoint of all attempts, newest attempt first."""
    skipped: list[str] = []
    for attempt in attempts:
        kept = json.loads(attempt["checkpoint"]) if attempt["checkpoint"] else {}
        skipped += kept.get("skipped", [])
        if "path" in kept:
            age = max(0, (now - kept["at_ms"]) // 1000)
            return asdict(a.CheckpointAnswer(kept["path"], kept["size_bytes"], age, [clean(s, 200) for s in skipped]))
    return asdict(a.CheckpointAnswer(None, None, None, [clean(s, 200) for s in skipped])) if skipped else None


def preemption_answer(
    row: sqlite3.Row, job_id: str, slot: Callable[[list[Any]], a.SlotAnswer], *, inside: bool
) -> a.PreemptionAnswer:
    """A preemption as one of its two jobs shows it."""
    told = row["told_at_ms"]
    victim = row["job_id"] == job_id
    return a.PreemptionAnswer(
        preemption_id=row["id"],
        reason=row["reason"],
        state=row["state"],
        role="victim" if victim else "asker",
        victim=row["job_id"],
        asker=row["asker_id"],
        why=clean(row["why"], 300),
        slots=[slot(key) for key in json.loads(row["slots"])],
        noticed_at=iso(row["noticed_at_ms"]),
        stop_by=iso(told + row["grace_s"] * 1000) if row["state"] == "noticed" and told is not None else None,
        saved=bool(row["saved"]),
        checkpoint=row["checkpoint"] if inside and victim else None,
        grace_s=row["grace_s"],
        grace_used_s=None if row["grace_used_ms"] is None else row["grace_used_ms"] // 1000,
        lost_s=None if row["lost_ms"] is None else row["lost_ms"] // 1000,
        outcome=row["victim_outcome"] if victim else row["outcome"],
    )


def _stood_ms(attempt: sqlite3.Row, now: int) -> int:
    """For how long an attempt has been suspended, all in all; its time limit stood still meanwhile."""
    since = attempt["suspended_at_ms"]
    return int(attempt["suspended_ms"]) + (max(0, now - since) if since is not None else 0)


def _held_reason(row: sqlite3.Row, newest: sqlite3.Row | None) -> str | None:
    """Why a job is held or suspended; of an order that no host has confirmed yet, that too."""
    asked = newest["suspend_asked"] if newest is not None and newest["state"] != "ended" else ""
    if row["state"] == "held" or (row["state"] == "suspended" and not asked):
        return str(row["held_reason"])
    if row["state"] not in ("running", "suspended") or not asked:
        return None
    if asked == "suspend":
        return f"{row['held_reason']}; its host has not confirmed it yet"
    return "it is to go on; its host has not confirmed it yet"


def _index(state: str | None, *, holder: str | None, owner: str | None, since: str | None, array: str | None) -> str:
    """The index that a list of jobs goes by: SQLite knows nothing of how few live, or are somebody's.

    Without any of these it goes by the ids, newest first, until the page is full.
    """
    if array is not None:
        return " INDEXED BY one_job_per_element"
    if state is not None and state not in ("all", "final", *JOB_FINAL):
        return " INDEXED BY job_living"
    if holder is not None:
        return " INDEXED BY job_by_caller"
    if owner is not None:
        return " INDEXED BY job_by_owner"
    if since is not None:
        return " INDEXED BY job_by_time"
    if state == "final":
        return ""  # the page by the ids, the number of all by the final states
    return f" INDEXED BY {'job_final' if state in JOB_FINAL else 'job_listed'}"
