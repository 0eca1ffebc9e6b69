"""Preemption under random faults: victims that save, ignore or end, askers that vanish, words that get lost, a server that dies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from test_leases_and_jobs import EXAMPLES, NAMES, LeasesAndJobs

from cotenant.server.model.spec import JobSpec

_Jobs = LeasesAndJobs.jobs


class Preempting(LeasesAndJobs):
    """The same agents and faults, in a pool where a higher priority may stop what can go on later."""

    toml = '[pools.default]\ncap = 4\npreempt = "within"\ngrace_s = 30\nidle_s = 120\nidle_grace_s = 60\nidle_jobs = true\n'

    def _submit(self, name: str, **spec: Any) -> Any:
        self.bench.clock.advance(0.001)
        labels = {"n": str(len(self.bench.rows("SELECT 1 FROM job")))}
        got = self.run(
            self.bench.control.jobs.submit(self.caller(name), JobSpec(command="train", labels=labels, **spec))
        )
        return None if got is None else (name, got.job_id)

    @rule(target=_Jobs, name=st.sampled_from(NAMES), gpus=st.integers(1, 3))
    def submit_resumable(self, name: str, gpus: int) -> Any:
        saves = {"dir": "/ck", "signal": "SIGUSR1", "resume_arg": "--resume={path}"}
        return self._submit(name, gpus=gpus, priority="batch", resumable=True, checkpoint=saves)

    @rule(target=_Jobs, name=st.sampled_from(NAMES), gpus=st.integers(1, 4))
    def submit_urgent(self, name: str, gpus: int) -> Any:
        return self._submit(name, gpus=gpus, priority="high")

    @rule(data=st.data(), saved=st.booleans(), number=st.integers(0, 99))
    def somebody_saves(self, data: st.DataObject, saved: bool, number: int) -> None:
        known = sorted(self.machine.processes.keys() & self.machine.attempts.keys())
        if not known or "local" not in self.bench.hosts:
            return
        attempt = data.draw(st.sampled_from(known))
        seen = {"path": f"/ck/{number}.npz", "saved": saved} if saved else {"writing_ago_ms": 100}
        self.run(self.bench.tell(attempt, **seen))

    @rule(data=st.data())
    def a_notice_does_not_arrive(self, data: st.DataObject) -> None:
        self.a_word_does_not_arrive("notice", data.draw(st.booleans()))

    @rule(job=_Jobs, now=st.booleans())
    def evict(self, job: tuple[str, str], now: bool) -> None:
        person = self.run(self.bench.person())
        assert person is not None
        self.run(self.bench.control.operate(person, "job.evict", {"job_id": job[1], "now": now}, "needed"))

    @rule(job=_Jobs)
    def save_now(self, job: tuple[str, str]) -> None:
        self.run(self.bench.control.preempting.save_now(self.caller(job[0]), job[1]))

    @invariant()
    def preemptions_are_as_recorded(self) -> None:
        if not hasattr(self, "bench"):
            return
        rows = self.bench.rows
        stopped = rows("SELECT id FROM job WHERE state = 'stopping' AND stop_reason = 'preempt'")
        for job in stopped:
            assert rows(
                "SELECT 1 FROM victim v JOIN preemption p ON p.id = v.preemption_id WHERE v.job_id = ? AND p.reason = 'preempt'"
                " AND p.state <> 'withdrawn' AND v.stopped_at_ms IS NOT NULL",
                job["id"],
            ), "nobody is stopped for another without a row that says so"
        for row in rows("SELECT * FROM preemption WHERE state = 'withdrawn'"):
            assert not rows(
                "SELECT 1 FROM victim WHERE preemption_id = ? AND stopped_at_ms IS NOT NULL AND ended_at_ms IS NULL",
                row["id"],
            ), "what was withdrawn stops nobody"

        async def compare() -> None:
            keeper = self.bench.control.context.keeper
            keeper.refresh(self.bench.clock.now_ms())
            known = dict(keeper.preemptions)
            keeper.distrust()
            keeper.refresh(self.bench.clock.now_ms())
            assert known == keeper.preemptions

        self.runner.run(compare())

    def teardown(self) -> None:
        """Whatever happened, a preemption comes to its end once the host is there and time passes."""
        if hasattr(self, "bench"):
            if "local" not in self.bench.hosts:
                self.run(self.bench.connect())
            self.machine.obeys_stops = True
            for attempt in list(self.machine.processes):
                if (
                    self.machine.attempts.get(attempt) is not None
                    and self.machine.attempts[attempt].state == "stopping"
                ):
                    self.machine.finish(attempt, None, signal=15, sender="shim", reason="preempt")
            if not self.machine.amnesia:
                for _ in range(4):
                    self.run(self.bench.advance(60))
                for row in self.bench.rows("SELECT id FROM job WHERE ended_at_ms IS NULL"):
                    person = self.run(self.bench.person())
                    assert person is not None
                    self.run(self.bench.control.operate(person, "job.cancel", {"job_id": row["id"]}, "the end"))
                self.everything_comes_clean()
                self.run(self.bench.advance(1000))
                left = self.bench.rows("SELECT id, state, reason FROM preemption WHERE ended_at_ms IS NULL")
                assert not left, [tuple(row) for row in left]
        super().teardown()


Preempting.TestCase.settings = LeasesAndJobs.TestCase.settings
TestPreempting = pytest.mark.timeout(120 + 10 * EXAMPLES)(Preempting.TestCase)
del LeasesAndJobs
