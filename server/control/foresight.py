"""Looking ahead: when something that waits will start, and what to ask for, from what ran before."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Final

from cotenant.server.clock import iso
from cotenant.server.control.context import Context
from cotenant.server.deciding.blockers import could_ever, outlook, room_now
from cotenant.server.deciding.world import Ask, Needs, World
from cotenant.server.model.answers import EstimateAnswer, SuggestAnswer
from cotenant.server.model.caller import Caller
from cotenant.server.model.states import JOB_WAITING, PRIORITIES
from cotenant.server.model.text import quoted
from cotenant.server.simulating.ahead import ENOUGH, Forecast, Ran, RunTimes, forecast
from cotenant.server.store import forecasts
from cotenant.server.store.views import Views

#: A forecast that takes longer is given up: the server has other things to do.
WITHIN_S: Final = 3.0
#: What is suggested above what was seen, per cent: for memory and for time.
SPARE_PCT: Final = 25
_ROUND_MIB: Final = 256


class Foresight:
    """Answers from the present world and the past runs; changes nothing but the record of forecasts."""

    def __init__(self, context: Context, views: Views) -> None:
        self._context = context
        self._views = views

    async def estimate(
        self,
        caller: Caller,
        *,
        job_id: str | None = None,
        gpus: int = 1,
        pool: str | None = None,
        priority: str = "normal",
        hours: float | None = None,
    ) -> EstimateAnswer:
        """When a waiting job starts, or, without `job_id`, a job with these needs that would be submitted now.

        Raises:
            NotFound: no such job.
            BadRequest: no such pool, or more hours than there may be.
            Forbidden: a priority above what the caller's token may ask for.
        """
        context, now = self._context, self._context.now()
        if job_id is None:
            where = context.pool_of(caller, pool)
            context.check_priority(caller, PRIORITIES[priority])
            hours_ms, _ = context.hours_ms(where, hours)
            needs = Needs(gpus_min=gpus, gpus_max=gpus)
            ask: Ask | None = Ask(
                "estimate", "job", caller.owner, caller.name, caller.human, where, needs, PRIORITIES[priority], now, hours_ms
            )  # fmt: skip
        else:
            job = await self._views.get_job(caller, job_id)
            if job.state not in JOB_WAITING:
                said = f"{job.job_id} is {job.state}: it waits for nothing"
                return self._answer(job.job_id, None, [said])
            job_id = job.array_id or job.job_id
            ask = None
        context.keeper.refresh(now)
        world = context.keeper.world()
        if ask is None:
            assert job_id is not None
            ask = context.keeper.waiting.get(job_id)
            if ask is None:
                return self._answer(job_id, None, ["it has started this moment: get_job tells where it stands"])
        else:
            never = could_ever(world, ask)
            if never is not None:
                return self._answer(None, None, [f"it can never start: {never.message}"])
            world = replace(world, asks=(*world.asks, ask))
        rows = context.db.peek(forecasts.runs)
        names = context.db.peek(forecasts.names)
        times = RunTimes(Ran(*row) for row in rows)
        until = time.monotonic() + WITHIN_S
        found = await asyncio.to_thread(
            forecast, world, ask.id, now, context.policy, times, lambda one: names.get(one.partition(".")[0], ""),
            lambda: time.monotonic() < until,
        )  # fmt: skip
        if job_id is not None and found.earliest_ms is not None and found.likely_ms is not None:
            kept, earliest, likely = job_id, found.earliest_ms, found.likely_ms
            await context.db.write(lambda tx: forecasts.keep(tx, kept, now, earliest, likely, found.latest_ms))
        basis = self._basis(world, ask, times, found, now, late=time.monotonic() >= until)
        return self._answer(job_id, found, basis)

    def _basis(self, world: World, ask: Ask, times: RunTimes, found: Forecast, now: int, *, late: bool) -> list[str]:
        if found.likely_ms == now:
            return ["nothing is in its way now"]
        basis: list[str] = []
        if found.likely_ms is None:
            keys, why = outlook(world, ask, now, self._context.policy)
            reasons = "; ".join(blocker.message for blocker in why[:3])
            if late:
                basis.append(
                    "there is too much ahead of it to work out in the time there is: no number is better than a wrong one"
                )
            elif keys is None:
                basis.append(f"no known end lets it start within 30 days: {reasons}")
        basis.append(
            f"what runs and waits now, run forward: {len(world.holdings)} leases, {len(world.asks) - 1} other asks"
        )
        if times.count >= ENOUGH:
            basis.append(
                f"running times of the last {times.count} runs: those of the same owner and name ({ENOUGH} at least), else the"
                " owner's usual part of his time limits, else everybody's, else the limit"
            )
        else:
            basis.append("there are no past runs to go by: everything is taken to use its time limit")
        basis.append(
            "earliest: like the shortest fifth of them; likely: like the middle; latest: all use their time limits"
        )
        down = sum(host.link != "up" or host.mode != "ready" for host in world.hosts)
        if down:
            basis.append(f"{down} hosts that give nothing now are taken to stay so")
        basis.append("not foreseen: jobs that are still to come, failures, preemptions, leases that are released early")
        return basis

    def _answer(self, job_id: str | None, found: Forecast | None, basis: list[str]) -> EstimateAnswer:
        now = self._context.now()
        seen = self._context.db.peek(forecasts.record)
        likely = None if found is None else found.likely_ms
        return EstimateAnswer(
            job_id=job_id,
            wait_s=None if likely is None else max(0, likely - now) // 1000,
            earliest_at=_at(None if found is None else found.earliest_ms),
            likely_at=_at(likely),
            latest_at=_at(None if found is None else found.latest_ms),
            basis=basis,
            record=_record(seen),
        )

    async def suggest(
        self, caller: Caller, *, name: str | None = None, command: str | None = None, pool: str | None = None
    ) -> SuggestAnswer:
        """What to ask for: from ended runs of the caller's owner with this name or this beginning of the command, and from
        the cards that are free.

        Raises:
            BadRequest: no such pool.
        """
        context, now = self._context, self._context.now()
        context.keeper.refresh(now)
        world = context.keeper.world()
        where = context.pool_of(caller, pool)
        past = [
            row
            for row in context.db.peek(lambda c: forecasts.like(c, caller.owner, name, command))
            if command is None or _command(row["spec"]).startswith(command)
        ]
        free = {
            p.name: room_now(world, caller.owner, caller.name, caller.human, p.name)
            for p in world.pools
            if not caller.pools or p.name in caller.pools
        }
        basis = [f"free for you now in pool {quoted(one)}: {count}" for one, count in sorted(free.items())]
        if name is None and command is None:
            past = []
            basis.insert(0, "give name or command for what your owner's like runs took")
        elif not past:
            basis.insert(0, "nothing to base a suggestion on: no run of your owner with that name or command has ended")
        if not past:
            return SuggestAnswer(0, None, None, None, None, where, free.get(where, 0), basis)
        good = [row for row in past if row["exit_code"] == 0] or past
        gpus = max(row["units"] for row in good) // 840
        hours_ms = _with_spare(max(row["ran_ms"] for row in good))
        card = max((_peak(row["exit"], "peak_card_memory_mib") for row in past), default=0)
        memory = max((_peak(row["exit"], "peak_memory_mib") for row in past), default=0)
        short = sum("memory" in (row["failure_class"] or "") or "oom" in (row["failure_class"] or "") for row in past)
        limit = sum((row["failure_class"] or "") == "time_limit" for row in past)
        basis.insert(
            0,
            f"{len(past)} ended runs like it, {len([r for r in past if r['exit_code'] == 0])} of them with exit code 0",
        )
        basis.insert(
            1,
            f"hours: the longest, {good and max(r['ran_ms'] for r in good) / 3_600_000:.2f} h, and {SPARE_PCT} % more",
        )
        if card:
            basis.append(f"gpu_memory_mib: the most that was seen on one card, {card} MiB, and {SPARE_PCT} % more")
        if short:
            basis.append(f"{short} of them ran out of memory: what was seen is then less than what it needs")
        if limit:
            basis.append(f"{limit} of them were stopped at their time limit: they may need more hours than were seen")
        return SuggestAnswer(
            runs=len(past),
            gpus=gpus,
            gpu_memory_mib=_rounded(card) or None,
            memory_mib=_rounded(memory) or None,
            hours=round(max(0.01, hours_ms / 3_600_000), 2),
            pool=where,
            free_cards=free.get(where, 0),
            basis=basis,
        )


def _record(seen: forecasts.Record) -> str:
    if seen.median_error_ms is None:
        return "no forecast has been compared with a true start yet"
    return (
        f"of the last {seen.checked} forecasts {100 * seen.inside // seen.checked} % held the true start between earliest and"
        f" latest; the likely one was off by {seen.median_error_ms // 1000} s in the median"
    )


def _at(at_ms: int | None) -> str | None:
    return None if at_ms is None else iso(at_ms)


def _with_spare(value: int) -> int:
    return value * (100 + SPARE_PCT) // 100


def _rounded(mib: int) -> int:
    return -(-_with_spare(mib) // _ROUND_MIB) * _ROUND_MIB


def _command(spec: str) -> str:
    command = json.loads(spec).get("command", "")
    return command if isinstance(command, str) else " ".join(command)


def _peak(record: str | None, key: str) -> int:
    found = json.loads(record).get(key, 0) if record else 0
    return max(found.values(), default=0) if isinstance(found, dict) else int(found or 0)
