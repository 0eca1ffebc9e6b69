"""Preemption and eviction with real processes: who saves, who does not, and a server that dies in the middle."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import ROOT, Rig, Server, until

GRACE_S = 3
CONFIG = f'[pools.default]\npreempt = "within"\ngrace_s = {GRACE_S}\n'
TRAINING = str(ROOT / "examples/resumable/train.py")


class Stage:
    """One card; a victim that holds it."""

    def __init__(self, rig: Rig, server: Server, folder: Path) -> None:
        self.rig, self.server, self.folder = rig, server, folder
        self.low, self.high = server.client("low"), server.client("high", owner="hanna")

    def train(self, *options: str, **spec: Any) -> str:
        """A resumable training of low priority that runs: it saves when it is told to."""
        command = [sys.executable, TRAINING, "--out", str(self.folder), *options]
        saves = {"dir": str(self.folder), "signal": "SIGUSR1", "resume_arg": "--resume={path}"}
        return self.start(command, checkpoint=saves, **spec)

    def start(self, command: Any, **spec: Any) -> str:
        values = {"gpus": 1, "priority": "batch", "resumable": True, "stop_grace_s": 1, **spec}
        job: str = self.low.call("submit_job", command=command, **values)["job_id"]
        self.low.until_job(job, "running")
        return job

    def ask(self, work: str = "sleep 0.2") -> str:
        """A job of high priority for the same card."""
        asker: str = self.high.call("submit_job", command=self.rig.command(work), gpus=1, priority="high")["job_id"]
        return asker

    def printed(self, job: str, word: str, **which: int) -> str:
        """The log of its newest attempt, or of `attempt`, once `word` is in it."""

        def text() -> str:
            lines = self.low.surely("tail_logs", job_id=job, lines=200, **which)["lines"]
            whole = "\n".join(lines)
            return whole if word in whole else ""

        found: str = until(text, f"{word!r} in the log of {job}")
        return found

    def stop_of(self, job: str) -> dict[str, Any]:
        """The newest preemption of a job."""
        found: dict[str, Any] = self.low.job(job)["preemptions"][0]
        return found


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    rig = Rig(tmp_path)
    try:
        yield Stage(rig, rig.server(gpus=1, config=CONFIG), tmp_path / "checkpoints")
    finally:
        rig.end()


def test_two_priorities_preempted_while_saving_and_back_from_that_checkpoint(stage: Stage) -> None:
    victim = stage.train("--save-seconds", str(GRACE_S + 1), "--steps", "200")
    stage.printed(victim, "step 20")
    asker = stage.ask()
    stage.high.until_job(asker, "succeeded", deadline_s=60)
    stop = stage.stop_of(victim)
    assert (stop["saved"], stop["asker"], stop["outcome"]) == (True, asker, "stopped")
    assert stop["grace_used_s"] >= GRACE_S, "the save took longer than the grace and was waited for"
    assert stop["lost_s"] <= 10 and stop["checkpoint"].endswith(".npz")
    assert stage.high.job(asker)["preemptions"][0]["victim"] == victim
    job = stage.low.until_job(victim, "succeeded", deadline_s=60)
    assert [attempt["resumed_from"] for attempt in job["attempts"]] == [None, stop["checkpoint"]]
    assert job["attempts_left"] == 1, "a planned stop is no attempt that failed"
    text = stage.printed(victim, "done")
    assert "resumed at step" in text
    alone = stage.train("--out", str(stage.folder / "other"), "--steps", "200")
    stage.low.until_job(alone, "succeeded", deadline_s=60)
    assert stage.printed(alone, "done").splitlines()[-1] == text.splitlines()[-1], "as if it was never interrupted"
    stage.server.healthy()


def test_a_victim_that_ignores_the_notice_is_stopped_after_its_grace_and_killed(stage: Stage) -> None:
    saves = {"dir": str(stage.folder), "signal": "SIGUSR1"}
    victim = stage.start("trap '' USR1 TERM; echo deaf; while :; do sleep 0.2; done", checkpoint=saves)
    stage.printed(victim, "deaf")
    asker = stage.ask("sleep 2")
    stage.high.until_job(asker, "running", "succeeded")
    stop = stage.stop_of(victim)
    assert (
        not stop["saved"] and stop["checkpoint"] is None and stop["grace_used_s"] in (GRACE_S, GRACE_S + 1, GRACE_S + 2)
    )
    first = stage.low.job(victim)["attempts"][0]
    assert first["exit"]["signal_name"] == "SIGKILL" and first["exit"]["reason"] == "preempt"
    job = stage.low.until_job(victim, "running")
    assert "starts from zero" in job["attempts"][1]["message"]
    stage.server.healthy()


def test_a_checkpoint_that_never_comes_is_waited_for_three_graces_at_most(stage: Stage) -> None:
    saves = {"dir": str(stage.folder), "signal": "SIGUSR1"}
    script = f"mkdir -p {stage.folder}; trap 'go=1' USR1; echo ready; while :; do [ -n \"$go\" ] && echo x >> {stage.folder}/big.bin.part; sleep 0.2; done"
    victim = stage.start(script, checkpoint=saves)
    stage.printed(victim, "ready")
    asker = stage.ask("sleep 1")
    stage.high.until_job(asker, "running", "succeeded", deadline_s=60)
    stop = stage.stop_of(victim)
    assert not stop["saved"] and stop["grace_used_s"] >= 3 * GRACE_S - 1
    stage.server.healthy()


def test_an_evicted_training_saves_first(stage: Stage) -> None:
    victim = stage.train("--steps", "4000")
    stage.printed(victim, "step 20")
    stage.server.chief().operate("job.evict", "the card is needed elsewhere", job_id=victim)
    job = stage.low.until_job(victim, "cancelled")
    (stop,) = job["preemptions"]
    assert (stop["reason"], stop["saved"], stop["outcome"]) == ("evict", True, "stopped")
    assert job["checkpoint"]["path"] == stop["checkpoint"]
    assert "notice: stop: the card is needed elsewhere" in stage.printed(victim, "notice")
    stage.server.healthy()


def test_a_save_that_was_asked_for_leaves_the_training_running(stage: Stage) -> None:
    job = stage.train("--steps", "4000")
    stage.printed(job, "step 20")
    assert stage.low.call("checkpoint_job", job_id=job)["told"]
    seen = until(lambda: stage.low.job(job)["checkpoint"], "a checkpoint")
    assert seen["path"].endswith(".npz") and stage.low.job(job)["state"] == "running"
    stage.server.healthy()


def test_an_asker_that_is_withdrawn_spares_the_victim(stage: Stage) -> None:
    saves = {"dir": str(stage.folder), "signal": "SIGUSR1"}
    script = 'trap "" USR1; echo ready; while :; do grep -h . "$COTENANT_NOTICE_FILE" 2>/dev/null; sleep 0.2; done'
    victim = stage.start(script, checkpoint=saves)
    stage.printed(victim, "ready")
    asker = stage.ask()
    stage.printed(victim, '"what": "stop"')
    answer = stage.high.call("cancel_job", job_id=asker)
    if answer["status"] == "confirmation_required":
        stage.high.call("cancel_job", job_id=asker, confirm_token=answer["confirm_token"])
    stage.printed(victim, '"what": "none"')
    assert stage.stop_of(victim)["state"] == "withdrawn" and stage.low.job(victim)["state"] == "running"
    stage.server.healthy()


@pytest.mark.parametrize("after", ["job.noticed", "job.saved", "job.stopping"])
def test_a_server_that_is_killed_in_the_middle_goes_on(stage: Stage, after: str) -> None:
    victim = stage.train("--save-seconds", "1", "--steps", "300")
    stage.printed(victim, "step 20")
    asker = stage.ask()
    stage.server.wait_event(after, job_id=victim)
    stage.server.kill()
    stage.server.start()
    stage.high.until_job(asker, "succeeded", deadline_s=60)
    stop = stage.stop_of(victim)
    assert stop["saved"] and stop["state"] == "done"
    assert stage.printed(victim, "notice", attempt=1).count("notice: stop") == 1
    job = stage.low.until_job(victim, "succeeded", deadline_s=60)
    assert len(job["attempts"]) == 2 and job["attempts"][1]["resumed_from"] == stop["checkpoint"]
    assert len(stage.server.events("job.noticed", job_id=victim)) == 1
    stage.server.healthy()
