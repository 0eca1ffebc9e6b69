"""A whole server on a bench: real store, use cases and loop over a data directory; hosts in memory, time by hand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from fakehost import FakeClock, FakeHost, Machine

from cotenant.server import config, doctor
from cotenant.server.backends.base import HostRefused
from cotenant.server.config import HostSettings
from cotenant.server.control import Control
from cotenant.server.errors import CotenantError, Unreachable
from cotenant.server.ids import Ids
from cotenant.server.loop import Loop
from cotenant.server.model.caller import Caller
from cotenant.server.model.spec import JobSpec
from cotenant.server.services import DATABASE, core

#: Below the lateness at which the server counts a pause.
STEP_S = 20.0


class _Mistakes(logging.Handler):
    """Keeps what the server logged with a traceback: its own mistakes, which no answer shows."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(self.format(record))


class Bench:
    """`async with Bench(folder) as bench`; `restart` closes the server and opens another over the same directory."""

    def __init__(
        self,
        folder: Path,
        *machines: Machine,
        toml: str = "",
        seed: int = 1,
        clock: FakeClock | None = None,
        hosts: dict[str, HostSettings] | None = None,
    ) -> None:
        self.folder = folder
        self.clock = clock or FakeClock()
        self.machines = machines or (Machine(),)
        self.hosts: dict[str, FakeHost] = {}
        self.cut: set[str] = set()  # hosts that cannot be reached
        self.reports_held = False
        self.ids = Ids(Random(seed).getrandbits)
        settings = config.parse(toml, data_dir=folder)
        local = settings.hosts["local"]
        extra = {m.name: replace(local, name=m.name) for m in self.machines}
        self.settings = replace(settings, hosts={**extra, "local": HostSettings(**local.__dict__), **(hosts or {})})
        self.mistakes = _Mistakes()
        self.control: Control
        self.loop: Loop
        self._stack: contextlib.AsyncExitStack | None = None
        self._acked: set[tuple[str, int]] = set()
        self.callers: dict[str, Caller] = {}
        self.tokens: dict[str, str] = {}

    async def __aenter__(self) -> Bench:
        await self.open()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.close()

    # ---- life of the server

    async def open(self, *, connect: bool = True) -> None:
        self._stack = contextlib.AsyncExitStack()
        logging.getLogger("cotenant").addHandler(self.mistakes)
        self.control = await self._stack.enter_async_context(core(self.settings, self.clock, self.ids))
        context = self.control.context
        self.loop = Loop(
            context,
            self.control.leases,
            self.control.holds,
            self.control.hosts,
            self.control.auth,
            self.control.preempting,
            self.control.idling,
        )
        context.wake = self.loop.wake
        await self.loop.renew_all("the server was down")
        for name, token in self.tokens.items():
            caller = self.control.auth.caller_of(token, door="mcp")
            if caller is not None:
                self.callers[name] = caller
        if connect:
            for machine in self.machines:
                if machine.name not in self.cut:
                    await self.connect(machine)
        self.loop.wake()
        await self.settle()

    async def close(self, *, kill: bool = False) -> None:
        """End in good order, or as if killed: what was not committed is not written."""
        if self._stack is None:
            return
        stack, self._stack = self._stack, None
        logging.getLogger("cotenant").removeHandler(self.mistakes)
        for task in tuple(self.control.context.background):
            task.cancel()
        await asyncio.gather(*self.control.context.background, return_exceptions=True)
        self.hosts.clear()
        if kill:
            with contextlib.suppress(_Killed):
                await stack.__aexit__(_Killed, _Killed(), None)
        else:
            await stack.aclose()

    async def restart(self, *, down_s: float = 0.0, kill: bool = False, connect: bool = True) -> None:
        await self.close(kill=kill)
        self.clock.advance(down_s)
        await self.open(connect=connect)

    # ---- hosts

    @property
    def machine(self) -> Machine:
        return self.machines[0]

    async def connect(self, machine: Machine | None = None) -> bool:
        """A link comes up: hello, welcome, then what the host has kept. False when the host refuses this server."""
        machine = machine or self.machine
        self.cut.discard(machine.name)
        host = self.hosts[machine.name] = FakeHost(machine)
        hosts = self.control.hosts
        try:
            welcome = host.hello(hosts.hello(machine.name))
        except HostRefused as refused:
            await hosts.refused(machine.name, refused.code, refused.message, refused.data)
            await hosts.lost(machine.name, refused.message)
            return False
        try:
            await hosts.welcome(host, welcome)
        except CotenantError as error:
            await hosts.lost(machine.name, str(error))
            return False
        await self.deliver(machine)
        return True

    async def disconnect(self, machine: Machine | None = None) -> None:
        """The link breaks; the machine goes on."""
        machine = machine or self.machine
        self.cut.add(machine.name)
        if machine.name in self.hosts:
            self.hosts.pop(machine.name).away = True
        await self.control.hosts.lost(machine.name, "the cable was pulled")

    async def deliver(self, machine: Machine, order: Iterable[int] | None = None) -> None:
        """Bring the reports that the machine has kept; `order` picks and repeats them by position."""
        if machine.name in self.cut or machine.name not in self.hosts:
            return
        waiting = list(machine.outbox)
        for report in waiting if order is None else [waiting[n] for n in order]:
            await self._bring(machine, report)

    async def _bring(self, machine: Machine, report: tuple[int, str, dict[str, Any]]) -> None:
        seq, name, body = report
        await self.control.hosts.report(machine.name, name, seq, body)
        if report in machine.outbox:
            machine.outbox.remove(report)  # acknowledged

    def telemetry(self, machine: Machine | None = None) -> None:
        """The machine tells its cards, as it does every few seconds."""
        machine = machine or self.machine
        cards = [machine.card(n) for n in range(machine.cards)]
        from cotenant.hostd.protocol import to_wire

        body = {"cards": [to_wire(card) for card in cards], "facts": to_wire(machine.facts())}
        self.control.hosts.telemetry(machine.name, "cards", body)

    async def tell(self, attempt_id: str, machine: Machine | None = None, **seen: Any) -> None:
        """The machine tells what it sees of an attempt's work; see `Machine.works`."""
        from cotenant.hostd.protocol import to_wire

        machine = machine or self.machine
        body = {"attempts": [to_wire(machine.works(attempt_id, **seen))]}
        self.control.hosts.telemetry(machine.name, "progress", body)
        await self.settle()

    # ---- time

    async def settle(self) -> None:
        """Until nothing is left to do at this moment."""
        context = self.control.context
        for _ in range(500):
            await asyncio.sleep(0)
            if self.loop._wake.is_set():
                await self.loop.turn()
            elif context.background:
                await asyncio.wait(set(context.background))
            elif not self.reports_held and any(
                m.outbox for m in self.machines if m.name in self.hosts and m.name not in self.cut
            ):
                for machine in self.machines:
                    await self.deliver(machine)
            else:
                return
        raise AssertionError("the server does not come to rest")

    async def advance(self, seconds: float) -> None:
        """Time passes while the server runs."""
        left = seconds
        while left > 0:
            step = min(left, STEP_S)
            left -= step
            self.clock.advance(step)
            await self.loop.turn()
            await self.settle()

    async def sleep_through(self, seconds: float) -> None:
        """Time passes while the whole machine of the server is suspended."""
        self.clock.advance(seconds)
        await self.loop.turn()
        await self.settle()

    # ---- callers

    async def caller(
        self, name: str, owner: str | None = None, kind: str = "agent", scopes: str = "read,write", **options: Any
    ) -> Caller:
        """A caller with a token, as `cotenant token create` makes it."""
        if name not in self.callers:
            by = Caller("root", "human", "root", frozenset({"admin"}), "")
            made = await self.control.tokens.create(by, name, kind, owner or name, scopes.split(","), **options)
            self.tokens[name] = made["token"]
            found = self.control.auth.caller_of(made["token"], door="mcp")
            assert found is not None
            self.callers[name] = found
        return self.callers[name]

    async def person(self, name: str = "paula", owner: str | None = None) -> Caller:
        return replace(await self.caller(name, owner, "human", "read,write,operate,admin"), door="operate")

    # ---- looking

    async def queue(self, caller: Caller, **wish: Any) -> str:
        """A claim that waits, asked for a moment after everything before; returns its id."""
        self.clock.advance(0.001)
        lease = await self.control.leases.acquire(caller, when_full="queue", **wish)
        await self.settle()
        return lease.lease_id

    async def submit(self, caller: Caller, command: str = "train", **spec: Any) -> str:
        """A job, as far as it comes at once; returns its id."""
        self.clock.advance(0.001)
        options = {k: spec.pop(k) for k in ("request_id", "when_full") if k in spec}
        answer = await self.control.jobs.submit(caller, JobSpec(command=command, **spec), **options)
        await self.settle()
        return answer.job_id

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return self.control.context.db.peek(lambda c: c.execute(sql, values).fetchall())

    def one(self, sql: str, *values: Any) -> Any:
        (row,) = self.rows(sql, *values)
        return row[0] if len(row) == 1 else row

    def job(self, job_id: str) -> sqlite3.Row:
        return self.rows("SELECT * FROM job WHERE id = ?", job_id)[0]

    def lease(self, lease_id: str) -> sqlite3.Row:
        return self.rows("SELECT * FROM lease WHERE id = ?", lease_id)[0]

    def attempt(self, job_id: str) -> sqlite3.Row:
        """The newest one."""
        return self.rows("SELECT * FROM attempt WHERE job_id = ? ORDER BY epoch DESC LIMIT 1", job_id)[0]

    def uses(self) -> list[str]:
        """What is on the cards, in order."""
        found = {
            r["uuid"]: r["use"]
            for r in self.rows("SELECT uuid, use FROM lease_slot WHERE use <> 'freed' AND uuid <> 'cpu'")
        }
        return [found.get(uuid, "free") for machine in self.machines for uuid in machine.uuids]

    def events(self, *types: str) -> list[sqlite3.Row]:
        rows = self.rows("SELECT * FROM event ORDER BY id")
        return [row for row in rows if not types or row["type"] in types]

    def dump(self) -> str:
        """Every value of every row of every table."""
        with contextlib.closing(sqlite3.connect(self.folder / DATABASE)) as connection:
            return "\n".join(connection.iterdump())

    def check(self) -> None:
        """Doctor finds nothing, and no machine was made to break a rule."""
        bad = [f"{f.check}: {f.message}" for f in doctor.examine(self.folder) if not f.ok]
        bad += [rule for machine in self.machines for rule in machine.broken]
        bad += self.mistakes.found
        assert not bad, "\n".join(bad)


class _Killed(BaseException):
    pass


__all__ = ["STEP_S", "Bench", "Unreachable"]
