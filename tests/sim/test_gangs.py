"""Jobs over several hosts under random faults: three hosts in memory, a server that dies, words and links that get lost.

COTENANT_EXAMPLES raises the number of runs; each is repeated by its seed.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.server.errors import CotenantError

EXAMPLES = int(os.environ.get("COTENANT_EXAMPLES", "10"))
STEPS = 40
WORDS = ["prepare", "go", "free_port", "stop", "probe", "start", "check", "notice"]


class Play:
    """One run: what happens is drawn from `chance`, what must hold is checked after every step."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = Random(seed)
        self.machines = [Machine("local", cards=2), Machine("h2", cards=2), Machine("h3", cards=2)]
        toml = '[pools.default]\npreempt = "within"\ngrace_s = 20\n'
        self.bench = Bench(folder / "data", *self.machines, toml=toml, seed=seed)
        self.jobs: list[str] = []
        self.final: dict[str, str] = {}
        self.done: list[str] = []  # what was done, for a failure to show

    async def step(self) -> None:
        acts = [self.submit] * 3 + [self.process_ends] * 6 + [self.cable] * 3 + [self.word] * 4 + [self.time] * 4
        acts += [self.it_saves] * 2
        acts += [self.server_starts_anew] * 2 + [self.cancel] * 2 + [self.reboot, self.gate_closes, self.hold_reports]
        act = self.chance.choice(acts)
        self.done.append(act.__name__)
        await act()
        await self.bench.settle()
        self.check()

    # ---- what happens

    async def submit(self) -> None:
        if len(self.jobs) - len(self.final) >= 6:
            return
        a = await self.bench.caller("a", "alice", autopilot=True)
        nodes = self.chance.choice([1, 2, 2, 3])
        gpus: Any = self.chance.choice([0, 1, 2, {"min": 1, "max": 2}])
        retry = self.chance.choice([1, 3])
        spec = {"gpus": gpus, "nodes": nodes, "max_attempts": retry, "cpus": self.chance.choice([0, 6])}
        spec["priority"] = self.chance.choice(["batch", "batch", "normal", "high"])
        if self.chance.random() < 0.7:
            spec |= {"resumable": True, "checkpoint": {"dir": "/ck", "signal": "SIGUSR1"}}
        self.done[-1] += f" {spec}"
        try:
            self.jobs.append(await self.bench.submit(a, name=f"job {len(self.jobs)}", **spec))
        except CotenantError as error:
            self.done[-1] += f" refused: {error}"

    async def process_ends(self) -> None:
        there = [(m, p.attempt_id) for m in self.machines for p in m.processes.values()]
        if not there:
            return
        machine, attempt_id = self.chance.choice(sorted(there, key=lambda one: one[1]))
        code = self.chance.choice([0, 0, 0, 3])
        self.done[-1] += f" {attempt_id} {code}"
        if self.chance.random() < 0.1:
            machine.shim_dies(attempt_id)
        else:
            machine.finish(attempt_id, code, clean=self.chance.random() < 0.8)

    async def it_saves(self) -> None:
        for machine in self.machines:
            for attempt_id in sorted(machine.processes):
                if machine.name not in self.bench.cut and self.chance.random() < 0.5:
                    await self.bench.tell(attempt_id, machine, path="/ck/one", saved=True)

    async def gate_closes(self) -> None:
        for machine in self.machines:
            for report in list(machine.attempts.values()):
                if report.state == "ready" and self.chance.random() < 0.5:
                    machine.gate_closes(report.attempt_id)

    async def cable(self) -> None:
        machine = self.chance.choice(self.machines)
        self.done[-1] += f" {machine.name}"
        if machine.name in self.bench.cut:
            await self.bench.connect(machine)
        else:
            await self.bench.disconnect(machine)

    async def word(self) -> None:
        host = self.bench.hosts.get(self.chance.choice(self.machines).name)
        if host is not None:
            op = self.chance.choice(WORDS)
            self.done[-1] += f" {host.name} {op}"
            (host.lose if self.chance.random() < 0.5 else host.drop).add(op)

    async def hold_reports(self) -> None:
        self.bench.reports_held = not self.bench.reports_held

    async def time(self) -> None:
        await self.bench.advance(self.chance.choice([1, 4, 15, 30, 60]))

    async def cancel(self) -> None:
        if self.jobs:
            a = await self.bench.caller("a", "alice", autopilot=True)
            job = self.chance.choice(self.jobs)
            self.done[-1] += f" {job}"
            with contextlib.suppress(CotenantError):
                await self.bench.control.jobs.cancel(a, job)

    async def reboot(self) -> None:
        machine = self.chance.choice(self.machines)
        self.done[-1] += f" {machine.name}"
        if machine.name not in self.bench.cut:
            await self.bench.disconnect(machine)
        machine.reboot()
        if self.chance.random() < 0.7:
            await self.bench.connect(machine)

    async def server_starts_anew(self) -> None:
        await self.bench.restart(down_s=self.chance.choice([0, 5, 100]), kill=self.chance.random() < 0.7)

    # ---- what always holds

    def check(self) -> None:
        self.bench.check()
        attempts: defaultdict[str, set[str]] = defaultdict(set)
        begun: defaultdict[str, set[str]] = defaultdict(set)
        for machine in self.machines:
            for process in machine.processes.values():
                attempts[process.job_id].add(process.attempt_id.partition(".")[0])
                begun[process.attempt_id.partition(".")[0]].add(process.attempt_id)
        for job, of_it in attempts.items():
            assert len(of_it) == 1, f"{job} has processes of {sorted(of_it)}"
        for attempt_id in begun:
            row = self.bench.rows("SELECT nodes, go_at_ms FROM attempt WHERE id = ?", attempt_id)[0]
            assert row["nodes"] == 1 or row["go_at_ms"] is not None, f"{attempt_id} began before the word"
        started = [(rank, machine.name) for machine in self.machines for _, rank, _ in machine.history]
        assert len({rank for rank, _ in started}) == len(started), "no rank was started twice"
        for row in self.bench.rows("SELECT id, state FROM job WHERE ended_at_ms IS NOT NULL"):
            assert self.final.setdefault(row["id"], row["state"]) == row["state"], "final is final"

    async def come_to_rest(self) -> None:
        """All faults end: every job is final or waits for a reason, and nothing is left of those that are final."""
        bench = self.bench
        bench.reports_held = False
        for _ in range(3):
            for host in bench.hosts.values():
                host.lose.clear()
                host.drop.clear()
            for machine in bench.machines:
                if machine.name in bench.cut:
                    await bench.connect(machine)
            await bench.settle()
            await bench.advance(40)
        for _ in range(60):
            for machine in self.machines:
                for attempt_id in list(machine.processes):
                    machine.finish(attempt_id, 0)
                for attempt_id, report in list(machine.attempts.items()):
                    if report.state in ("exited", "lost") and not report.clean:
                        machine.got_clean(attempt_id)
            await bench.settle()
            await bench.advance(31)
            if all(bench.job(job)["ended_at_ms"] or bench.job(job)["state"] == "held" for job in self.jobs):
                break
        self.check()
        left = {job: bench.job(job)["state"] for job in self.jobs if not bench.job(job)["ended_at_ms"]}
        ranks = [tuple(row) for row in bench.rows("SELECT id, host, state FROM rank WHERE state <> 'ended'")]
        there = {m.name: {a: r.state for a, r in m.attempts.items()} for m in self.machines}
        assert set(left.values()) <= {"held"}, (left, ranks, there)
        await bench.advance(5)
        assert not any(machine.processes for machine in self.machines)
        assert set(bench.uses()) <= {"free"}


@pytest.mark.parametrize("seed", range(EXAMPLES))
async def test_gangs_through_every_fault(tmp_path: Path, seed: int) -> None:
    play = Play(tmp_path, seed)
    await play.bench.open()
    try:
        for _ in range(STEPS):
            await play.step()
        await play.come_to_rest()
    except BaseException:
        print("\n".join(play.done))
        raise
    finally:
        await play.bench.close()
