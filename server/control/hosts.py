"""What hosts tell: hello, reports, telemetry, silence. Settles what the records and a host say differently."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Coroutine, Iterable
from dataclasses import asdict
from typing import Any, Final

from cotenant.hostd import protocol
from cotenant.hostd.protocol import (
    AttemptReport,
    CardLinks,
    CardProcess,
    CardState,
    CleanCheck,
    Hello,
    Progress,
    Welcome,
)
from cotenant.server.backends.base import Host, HostRefused
from cotenant.server.backends.link import HostLink, read_cards
from cotenant.server.control import gangs, outcomes, placing
from cotenant.server.control import ranks as of_ranks
from cotenant.server.control.context import Context
from cotenant.server.control.holds import Holds, free_slots
from cotenant.server.control.jobs import Jobs
from cotenant.server.control.preempting import Preempting
from cotenant.server.control.sightings import Sightings
from cotenant.server.errors import Conflict, NotFound, OutcomeUnknown, Unreachable
from cotenant.server.live import LiveHost
from cotenant.server.model.caller import LOOP, Caller
from cotenant.server.model.states import JOB_FINAL, AttemptState, JobState, LinkState
from cotenant.server.model.text import clean
from cotenant.server.store import events, jobs, leases, meta, ranks
from cotenant.server.store import hosts as rows
from cotenant.server.store.db import Tx
from cotenant.server.version import version

log = logging.getLogger(__name__)

#: A link that is gone is `suspect` for this long and `lost` after; a restarted hostd is back within a second.
LOST_AFTER_S: Final = 20.0
#: Slots of an ended lease that are not clean by now are called occupied, by name (design section 4).
OCCUPIED_AFTER_MS: Final = 60_000
#: A start that was neither answered nor reported within this is asked for again; hosts key on the attempt's id.
START_AGAIN_MS: Final = 25_000
#: How often a host that lost its memory is asked whether what it ran before has ended.
FLOOR_EVERY_S: Final = 3.0


class Hosts:
    """Implements `backends.base.HostEvents`, and the part of the tick that looks after hosts."""

    def __init__(self, context: Context, holds: Holds, jobs_: Jobs, preempting: Preempting) -> None:
        self._context = context
        self._holds = holds
        self._sightings = Sightings(context)
        self._jobs = jobs_
        self._preempting = preempting
        self._down_since: dict[str, float] = {}
        self.take_over: set[str] = set()
        self.refusals: dict[str, tuple[str, str]] = {}
        self.seen_incarnation: dict[str, int] = {}
        self._checking: set[str] = set()
        self._floor_asked_s: dict[str, float] = {}
        self._forgettable: dict[str, set[str]] = {}  # host -> ended attempts that it may forget
        self.links: dict[str, HostLink] = {}

    def hello(self, name: str) -> Hello:
        """What this server says to a host first."""
        context = self._context
        return Hello(
            cluster_id=context.cluster_id,
            incarnation=context.incarnation,
            nonce=context.start_nonce,
            protocol_min=max(1, protocol.PROTOCOL - 1),
            take_over=name in self.take_over,
            fence=self._fence(),
            server_version=version(),
        )

    # ---- a link comes up

    async def welcome(self, host: Host, welcome: Welcome) -> None:
        context, now, name = self._context, self._context.now(), host.name
        reports = {report.attempt_id: report for report in welcome.attempts}
        amnesia, claims = await context.db.write(lambda tx: self._greet(tx, name, welcome, now))
        self._sightings.wrote(name, welcome.cards, claims, all_of_them=_lists_all(welcome))
        unsure = welcome.needs_floor and await host.set_floor(self._fence())
        self._sightings.see(name, welcome.cards, welcome.facts, now)
        live = context.live.hosts.setdefault(name, LiveHost())
        live.needs_floor = unsure
        live.links = _links(welcome.links)
        context.hosts[name] = host
        self.take_over.discard(name)
        self.refusals.pop(name, None)
        self._down_since.pop(name, None)
        known = context.db.peek(lambda c: _attempts_on(c, name))
        # ends first: a newer attempt that is found then meets slots that are free
        for report in sorted(welcome.attempts, key=lambda r: (r.state in outcomes.LIVING, r.fence)):
            await self._take(name, report)
        for attempt in known:
            await self._settle_attempt(host, attempt, reports.get(attempt["id"]), welcome, amnesia, unsure)
        await self._settle_leases(host, welcome)
        was = live.link
        if was is not LinkState.SUSPECT:
            await context.db.write(
                lambda tx: events.append(tx, "host.up", LOOP, now, host=name, old=was.value, new="up")
            )
        live.link, live.reason = (
            LinkState.UP,
            "it lost its memory, and processes of before may still be there" if unsure else "",
        )
        context.keeper.observe_cards()
        self._sightings.publish(name)
        context.wake()

    def _fence(self) -> int:
        """The highest fence ever given."""
        return int(
            self._context.db.peek(lambda c: c.execute("SELECT value FROM counter WHERE name = 'fence'").fetchone()[0])
        )

    def _greet(self, tx: Tx, name: str, welcome: Welcome, now: int) -> tuple[bool, dict[str, str]]:
        """Write down who the host is: (whether it lost its memory within the same boot, cards that are another's)."""
        old = rows.get(tx.connection, name)
        settings = self._context.settings.hosts.get(name)
        facts = asdict(welcome.facts)
        values: dict[str, Any] = {
            "state_id": welcome.state_id,
            "boot_id": welcome.boot_id,
            "max_fence": welcome.max_fence,
            "facts": rows.facts_text(facts),
            "last_seen_at_ms": now,
            "cpu_places": settings.cpu_jobs if settings else 2,
        }
        same_state = old is not None and old["state_id"] == welcome.state_id
        if not same_state:
            values["control_seq"] = 0
        if rows.put(tx, name, now, **values):
            events.append(tx, "host.added", LOOP, now, host=name, new=welcome.facts.hostname)
        amnesia = (
            old is not None and old["state_id"] is not None and not same_state and old["boot_id"] == welcome.boot_id
        )
        if amnesia:
            events.append(tx, "host.amnesia", LOOP, now, severity="critical", host=name, old=old["state_id"] if old else None,
                          new=welcome.state_id, reason="the host's state directory is another one within the same boot")  # fmt: skip
        # No fence may repeat, whatever past this database has: start above everything the host has seen. A host that lost
        # its memory gets the counter as its floor; 0 would be none to it, and a floor above the counter a future to the next start.
        meta.lift(tx, "fence", max(welcome.max_fence, 1 if welcome.needs_floor else 0))
        return amnesia, self._sightings.greet(tx, name, welcome.cards, now, all_of_them=_lists_all(welcome))

    async def _settle_attempt(
        self,
        host: Host,
        attempt: sqlite3.Row,
        report: AttemptReport | None,
        welcome: Welcome,
        amnesia: bool,
        unsure: bool,
    ) -> None:
        """An attempt that the records call alive: what does the host say of it?"""
        attempt_id = attempt["id"]
        if report is not None:
            if attempt["job_state"] == "stopping" and report.state in ("starting", "ready", "running"):
                await self._jobs.carry_out_stop(attempt["job_id"])
            elif report.state == "ready":
                self._context.background_task(gangs.advance(self._context, attempt["attempt_id"]))
            return
        if attempt["boot_id"] is not None and attempt["boot_id"] != welcome.boot_id:
            await self._take(
                host.name, AttemptReport(attempt_id, "lost", clean=True, message="the host was restarted while it ran")
            )
        elif unsure:
            # "not here" means nothing now: it may run on, until the host's sweep has found nothing any more
            await self._lose(host.name, "the host lost its memory of what it runs", only=attempt_id)
        elif amnesia:
            await self._gone(host.name, attempt_id)
        elif attempt["state"] in ("intended", "starting") and attempt["job_state"] == "deploying":
            whole = ranks.attempt_of(attempt_id) or attempt_id
            self._context.background_task(placing.start_attempt(self._context, whole))
        elif attempt["job_state"] == "stopping":
            await self._jobs.carry_out_stop(attempt["job_id"])
        else:
            answer = await host.probe(attempt_id)
            if answer.state == "unknown":
                await self._gone(host.name, attempt_id)
            else:
                await self._take(host.name, answer)

    async def _gone(self, host: str, attempt_id: str) -> None:
        """The host knows nothing of it, and is sure that nothing of it runs."""
        await self._take(host, AttemptReport(attempt_id, "lost", message="the host knows nothing of it any more"))

    async def _ask_floor(self, name: str) -> None:
        """A host that lost its memory is asked again whether what it ran before has ended."""
        context = self._context
        host, live = context.hosts.get(name), context.live.hosts.get(name)
        if host is None or live is None:
            return
        try:
            if await host.set_floor(self._fence()):
                return
            for attempt in context.db.peek(lambda c: _attempts_on(c, name)):
                answer = await host.probe(attempt["id"])
                if answer.state == "unknown":
                    await self._gone(name, attempt["id"])
                else:
                    await self._take(name, answer)
        except (OutcomeUnknown, Unreachable):
            return  # still in need of a floor: the tick asks for it again, and then for all attempts
        live.needs_floor, live.reason = False, ""
        self._holds.ask_now(name)
        context.keeper.observe_cards()
        self._sightings.publish(name)
        context.wake()

    async def _settle_leases(self, host: Host, welcome: Welcome) -> None:
        context = self._context

        def read(c: sqlite3.Connection) -> list[sqlite3.Row]:
            return c.execute(
                "SELECT DISTINCT l.id, l.kind, l.state, l.fence FROM lease l JOIN lease_slot s ON s.lease_id = l.id"
                " WHERE s.host = ? AND s.use <> 'freed' ORDER BY l.fence",
                (host.name,),
            ).fetchall()

        held = context.db.peek(read)
        living = {row["id"] for row in held if row["state"] in ("leased", "running")}
        self._holds.greeted(host.name, welcome.holds)
        for lease_id in welcome.holds:
            if lease_id not in living:
                await host.unhold(lease_id, ())
        for row in held:
            if row["id"] in living and row["kind"] == "direct" and row["id"] not in welcome.holds:
                await self._holds.keep_anew(row["id"])
            elif row["id"] not in living:
                context.background_task(self._holds.free(row["id"]))

    # ---- what a host reports

    def report(self, host: str, name: str, seq: int, body: dict[str, Any]) -> asyncio.Future[Any]:
        context, now = self._context, self._context.now()
        if name == "attempt":
            report = protocol.from_wire(AttemptReport, body)
            if report.state == "running" and context.db.peek(lambda c: _known_running(c, report)):
                # the answer to the start said the same; nothing to write, and a repeat would do no harm
                done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                done.set_result(None)
                return done
            done = context.db.submit(lambda tx: outcomes.take(tx, context, host, report, now, seq))
            done.add_done_callback(lambda future: self._taken(host, report, future))
            return done
        if name == "clean":
            check = protocol.from_wire(CleanCheck, body.get("check") or {"clean": False})
            lease_id = str(body.get("lease_id", ""))

            def clean_up(tx: Tx) -> None:
                if (
                    rows.take_seq(tx, host, seq)
                    and check.clean
                    and tx.one("SELECT 1 FROM lease WHERE id = ?", (lease_id,))
                ):
                    free_slots(tx, lease_id, now, host=host)

            done = context.db.submit(clean_up)
            done.add_done_callback(lambda future: context.wake())
            return done
        if name == "links":
            pairs = [protocol.from_wire(CardLinks, pair) for pair in body.get("links") or ()]
            context.live.hosts.setdefault(host, LiveHost()).links = _links(pairs)
            context.keeper.observe_cards()
            context.wake()
        if name == "card":
            self._sightings.see_card(host, protocol.from_wire(CardState, body), now)
        return context.db.submit(lambda tx: rows.take_seq(tx, host, seq))

    def _taken(self, host: str, report: AttemptReport, future: asyncio.Future[Any]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        if future.result() == "go":
            self._context.background_task(gangs.advance(self._context, report.attempt_id.partition(".")[0]))
        elif future.result() == "stop":
            self._context.background_task(of_ranks.stop_others(self._context, report.attempt_id))
        if report.state not in outcomes.LIVING:
            self._context.live.progress.pop(report.attempt_id.removesuffix(".0"), None)
        if future.result() == "stray":
            self._context.background_task(placing.stop_attempt(self._context, report.attempt_id, host, "evict", 10))
        elif report.clean and report.state not in outcomes.LIVING:
            self._forgettable.setdefault(host, set()).add(report.attempt_id)
        elif report.state in ("exited", "lost", "never") and not report.clean and report.lease_id:
            self._context.background_task(self._holds.free(report.lease_id))

    async def _take(self, host: str, report: AttemptReport) -> None:
        context, now = self._context, self._context.now()
        done = context.db.submit(lambda tx: outcomes.take(tx, context, host, report, now, fresh=True))
        done.add_done_callback(lambda future: self._taken(host, report, future))
        await done

    def telemetry(self, host: str, name: str, body: dict[str, Any]) -> None:
        if name == "cards":
            cards, facts = read_cards(body)
            self._sightings.see(host, cards, facts, self._context.now())
        elif name == "progress":
            told = [protocol.from_wire(Progress, one) for one in body.get("attempts") or ()]
            self._preempting.progress(host, told)
        elif name == "logs":
            jobs = [job for job in body.get("jobs") or () if isinstance(job, str)]
            self._context.changes.publish(frozenset(f"cotenant://jobs/{job}/log" for job in jobs))

    # ---- silence

    async def lost(self, host: str, reason: str) -> None:
        context = self._context
        context.hosts.pop(host, None)
        live = context.live.hosts.setdefault(host, LiveHost())
        live.reason = self.refusals[host][1] if host in self.refusals else reason
        if live.link is LinkState.UP:
            log.warning("host %s: %s", host, reason)
            live.link = LinkState.SUSPECT
            self._down_since[host] = context.clock.monotonic_s()
            context.keeper.observe_cards()
            self._sightings.publish(host)
        self._down_since.setdefault(host, context.clock.monotonic_s())

    async def refused(self, host: str, code: str, message: str, detail: dict[str, Any]) -> None:
        context, now = self._context, self._context.now()
        if self.refusals.get(host, ("",))[0] == code:
            return
        self.refusals[host] = (code, f"{code}: {message}")
        if isinstance(detail.get("incarnation"), int):
            self.seen_incarnation[host] = detail["incarnation"]
        log.error("host %s refuses this server: %s: %s", host, code, message)

        def write(tx: Tx) -> None:
            rows.put(tx, host, now)
            events.append(
                tx,
                "host.refused",
                LOOP,
                now,
                severity="critical",
                host=host,
                new=code,
                reason=clean(message, 300),
                args=detail,
            )

        try:
            await context.db.write(write)
        except BaseException:
            del self.refusals[host]  # not on record: the next refusal is written down
            raise

    async def order_take_over(self, caller: Caller, host: str, reason: str) -> dict[str, Any]:
        """Move a host that refuses this server to this server's present; a person has decided that this is the right one.

        The incarnation rises above what the host has seen; its fences are lifted into the records at the hello.
        """
        context, now = self._context, self._context.now()
        link = self.links.get(host)
        if link is None:
            raise NotFound(f'there is no host "{clean(host, 64)}"', code="no_such_host", hint="list_hosts shows them.")
        if host not in self.refusals:
            raise Conflict(
                f'host "{host}" does not refuse this server', code="not_refused", hint="Nothing has to be taken over."
            )
        seen = self.seen_incarnation.get(host, 0)

        def write(tx: Tx) -> int:
            meta.lift(tx, "incarnation", seen)
            incarnation = meta.next_of(tx, "incarnation")
            events.append(tx, "host.taken_over", caller, now, severity="critical", host=host, old=str(context.incarnation),
                          new=str(incarnation), reason=reason)  # fmt: skip
            return incarnation

        context.incarnation = await context.db.write(write)
        self.take_over.add(host)
        link.retry_now()
        return {"host": host, "incarnation": context.incarnation, "status": "taking over"}

    async def _give_up(self, host: str, live: LiveHost) -> None:
        """A host stayed away: what runs there is lost. `lost` in memory comes last, so that a failed write is repeated."""
        await self._lose(host, live.reason or "no answer")
        if host not in self._context.hosts and live.link is not LinkState.UP:
            live.link = LinkState.LOST
            self._context.keeper.observe_cards()
            self._sightings.publish(host)

    async def _lose(self, host: str, reason: str, only: str | None = None) -> None:
        """What runs on a host that does not answer is lost: not known, not failed."""
        context, now = self._context, self._context.now()
        # what a link or hostd last said is for who operates: it stands in host.lost alone
        said = "its host does not answer" if only is None else reason

        def write(tx: Tx) -> None:
            if only is None and host in context.hosts:
                return  # it came back while this waited for its turn
            for rank in ranks.living(tx.connection, host):
                if only in (None, rank["id"]) and rank["job_state"] not in JOB_FINAL:
                    of_ranks.lose(tx, context, rank, said, now)
            for attempt in jobs.attempts_on(tx.connection, host):
                if (only is not None and attempt["id"] != only) or attempt["job_state"] in JOB_FINAL:
                    continue
                # a start that no host has answered is asked for again; only a lost memory makes it unknown
                unknown = ("running", "starting") if only is None else ("running", "starting", "intended")
                if attempt["state"] in unknown and attempt["job_state"] in (
                    "running",
                    "deploying",
                    "suspended",
                ):
                    jobs.move_attempt(tx, attempt["id"], AttemptState.LOST)
                    jobs.move(tx, attempt["job_id"], JobState.LOST, now, by_epoch=attempt["epoch"], message=said)
                    job = jobs.get(tx, attempt["job_id"])
                    events.append(tx, "job.lost", LOOP, now, owner=job["owner"], severity="warning", job_id=job["id"],
                                  attempt_id=attempt["id"], host=host, old=attempt["job_state"], new="lost", reason=said)  # fmt: skip
            if only is None:
                events.append(
                    tx,
                    "host.lost",
                    LOOP,
                    now,
                    severity="warning",
                    host=host,
                    old="suspect",
                    new="lost",
                    reason=clean(reason, 300),
                )

        await context.db.write(write)

    # ---- the tick

    async def tick(self) -> None:
        """Once a second: give hosts up that stayed away, pass stops on again, name what does not get clean."""
        context, now = self._context, self._context.now()
        for host, since in list(self._down_since.items()):
            live = context.live.hosts.get(host)
            away = live is not None and live.link in (LinkState.SUSPECT, LinkState.CONNECTING)
            if live is not None and away and context.clock.monotonic_s() - since >= LOST_AFTER_S:
                self._once(f"lose {host}", self._give_up(host, live))
        stopping, silent, unclean = await context.db.read(lambda c: _due(c, now))
        for row in stopping:
            self._once(f"stop {row['id']}", self._jobs.carry_out_stop(row["id"]))
        for job_id in await context.db.read(self._jobs.suspending.due):
            self._once(f"suspend {job_id}", self._jobs.suspending.carry_out(job_id))
        for row in silent:
            self._once(f"start {row['id']}", placing.start_attempt(context, row["id"]))
        self._once("preempting", self._preempting.tick())
        for row in unclean:
            if now - row["since_ms"] > 2000:
                self._once(
                    f"clean {row['lease_id']}", self._clean_or_name(row["lease_id"], row["use"], row["since_ms"], now)
                )
        for host, live in context.live.hosts.items():
            if live.needs_floor and host in context.hosts:
                since = context.clock.monotonic_s() - self._floor_asked_s.get(host, 0.0)
                if since >= FLOOR_EVERY_S:
                    self._floor_asked_s[host] = context.clock.monotonic_s()
                    self._once(f"floor {host}", self._ask_floor(host))
        for lease_id in self._holds.due():
            self._once(f"hold {lease_id}", self._holds.keep_anew(lease_id))
        for host, attempts in self._forgettable.items():
            link = context.hosts.get(host)
            if attempts and link is not None:
                some, self._forgettable[host] = sorted(attempts), set()
                self._once(f"forget {host}", self._forget(link, some))

    async def _forget(self, link: Host, attempts: list[str]) -> None:
        """Let the host drop the records of ended attempts; it would tell them again at every hello."""
        for start in range(0, len(attempts), 500):
            try:
                await link.forget(attempts[start : start + 500])
            except (Unreachable, OutcomeUnknown, HostRefused) as error:
                log.info("host %s did not forget ended attempts yet: %s", link.name, error)
                self._forgettable.setdefault(link.name, set()).update(attempts[start:])
                return

    def _once(self, key: str, work: Coroutine[Any, Any, object]) -> None:
        """Start `work` unless the same is under way."""
        if key in self._checking:
            work.close()
            return
        self._checking.add(key)
        self._context.background_task(work).add_done_callback(lambda _: self._checking.discard(key))

    async def _clean_or_name(self, lease_id: str, use: str, since_ms: int, now: int) -> None:
        said = await self._holds.free(lease_id)
        if use != "cleaning" or now - since_ms <= OCCUPIED_AFTER_MS:
            return
        for host, check in said.items():
            if not check.clean:
                await self._name(lease_id, host, check, now)

    async def _name(self, lease_id: str, host: str, check: CleanCheck, now: int) -> None:
        who = ", ".join(_process(p) for p in check.unclean) or "memory that nobody explains"

        def name_it(tx: Tx) -> None:
            lease = leases.get(tx, lease_id)
            slots = leases.call_occupied(tx, lease_id, host, now, clean(who, 300))
            if slots:
                events.append(tx, "slot.occupied", LOOP, now, owner=lease["owner"], severity="critical", lease_id=lease_id,
                              host=host, pool=lease["pool"], reason=clean(who, 300))  # fmt: skip

        await self._context.db.write(name_it)


def _attempts_on(connection: sqlite3.Connection, host: str) -> list[sqlite3.Row]:
    """What a host has, or may have: attempts, and ranks of attempts on several hosts."""
    return [*jobs.attempts_on(connection, host), *ranks.living(connection, host)]


def _links(pairs: Iterable[CardLinks]) -> tuple[tuple[str, str, int], ...]:
    return tuple(sorted((*sorted((pair.a, pair.b)), pair.links) for pair in pairs))  # type: ignore[misc]


def _lists_all(welcome: Welcome) -> bool:
    """Whether cards that are not listed are not there: a driver that does not answer lists nothing, which says nothing."""
    return welcome.facts.nvml in ("ok", "simulated", "no_library", "no_driver")


def _process(p: CardProcess) -> str:
    state = f", state {p.state}" if p.state else ""
    return f"pid {p.pid} ({p.user or 'unknown user'}, {'?' if p.memory_mib is None else p.memory_mib} MiB{state})"


def _due(connection: sqlite3.Connection, now: int) -> tuple[list[sqlite3.Row], list[sqlite3.Row], list[sqlite3.Row]]:
    """(stops to pass on again, starts that nobody answered, leases with slots that are not free again)."""
    # Asked every second: each repeats the condition of a partial index, without which SQLite would walk all that ever was.
    return (
        connection.execute(
            "SELECT id FROM job WHERE state NOT IN ('succeeded', 'failed', 'cancelled') AND state = 'stopping'"
            " AND changed_at_ms < ?",
            (now - 3000,),
        ).fetchall(),
        connection.execute(
            "SELECT a.id FROM attempt a CROSS JOIN job j ON j.id = a.job_id WHERE a.state <> 'ended'"
            " AND a.state IN ('intended', 'starting') AND j.state = 'deploying' AND j.changed_at_ms < ?",
            (now - START_AGAIN_MS,),
        ).fetchall(),
        connection.execute(
            "SELECT lease_id, use, min(since_ms) AS since_ms FROM lease_slot"
            " WHERE use <> 'freed' AND use IN ('cleaning', 'occupied') GROUP BY lease_id"
        ).fetchall(),
    )


def _known_running(connection: sqlite3.Connection, report: AttemptReport) -> bool:
    row = connection.execute(
        "SELECT suspended_ms FROM attempt a JOIN job j ON j.id = a.job_id"
        " WHERE a.id = ? AND a.state = 'running' AND j.state = 'running'",
        (report.attempt_id,),
    ).fetchone()
    return row is not None and not report.suspended and row["suspended_ms"] == report.suspended_ms
