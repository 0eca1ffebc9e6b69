"""A real process is suspended: its counter stands still, over the deaths of hostd and of the server, and then goes on."""

from __future__ import annotations

import signal
from pathlib import Path

from rig import Client, Rig, kill, until

COUNT = "n=0; while :; do n=$((n+1)); echo $n > {file}.new; mv {file}.new {file}; sleep 0.02; done"


STOPPED = "T"
#: A shell that just made a child by vfork waits for that child, which is stopped.
BY_VFORK = "D"


class Counter:
    def __init__(self, file: Path) -> None:
        self.file = file

    def now(self) -> int:
        return int(self.file.read_text() or 0) if self.file.exists() else 0

    def rises(self) -> None:
        before = self.now()
        until(lambda: self.now() > before, "the counter rises")


def states(rig: Rig, job_id: str) -> set[str]:
    """The kernel's word on the job's processes: the shell, and its sleep if it has one now."""
    found = set()
    for pid in rig.carriers(COTENANT_JOB=job_id):
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():
            found.add(stat.read_text().rpartition(")")[2].split()[0])
    return found


def stands(rig: Rig, job_id: str) -> None:
    until(lambda: STOPPED in states(rig, job_id) and states(rig, job_id) <= {STOPPED, BY_VFORK}, "all are stopped")


def test_a_counter_stands_still_and_goes_on(rig: Rig) -> None:
    server = rig.server(gpus=1)
    agent = server.client("agent", autopilot=True)
    counter = Counter(rig.folder / "count")
    job_id = str(agent.call("submit_job", command=COUNT.format(file=counter.file), hours=1)["job_id"])
    counter.rises()

    job = agent.call("hold_job", job_id=job_id, suspend=True, reason="data moves", request_id="s")
    assert job["state"] == "suspended"
    stands(rig, job_id)
    at = counter.now()
    assert agent.call("list_gpus")["gpus"][0]["state"] == "held"

    server.kill()
    hostd = server.hostd_pid()
    if hostd is not None:
        kill(hostd)
    assert states(rig, job_id) <= {STOPPED, BY_VFORK}
    server.start()
    until(lambda: agent.job(job_id)["state"] == "suspended", "it is suspended still")
    assert agent.surely("hold_job", job_id=job_id, suspend=True, reason="data moves", request_id="s")["state"]
    stands(rig, job_id)
    assert counter.now() == at, "not one step was made"

    done = server.cli("job", "resume", job_id)
    assert "running" in done.stdout, done.stdout
    counter.rises()
    job = agent.until_job(job_id, "running")
    assert job["suspended_s"] >= 0 and job["time_left_s"] <= 3600 and job["held_reason"] is None
    types = [event["type"] for event in server.events(job_id=job_id)]
    assert types.count("job.suspended") == types.count("job.resumed") == 1, types

    agent.call("hold_job", job_id=job_id, suspend=True)
    stands(rig, job_id)
    agent.call("cancel_job", job_id=job_id)
    ended = agent.until_job(job_id, "cancelled")
    assert ended["attempts"][0]["exit"]["signal"] == signal.SIGTERM, "TERM ended it: it was continued first"
    until(lambda: agent.call("list_gpus")["free"] == 1, "its card is free")
    server.healthy()


def test_people_suspend_what_is_anothers(rig: Rig) -> None:
    server = rig.server(gpus=1)
    agent: Client = server.client("agent")
    counter = Counter(rig.folder / "count")
    job_id = str(agent.call("submit_job", command=COUNT.format(file=counter.file))["job_id"])
    counter.rises()
    done = server.cli("job", "suspend", job_id, "--operate", "--reason", "the room is too hot")
    assert "suspended" in done.stdout, (done.stdout, done.stderr)
    stands(rig, job_id)
    shown = server.cli("job", "show", job_id).stdout
    assert "the room is too hot" in shown
    server.cli("job", "resume", job_id, "--operate", "--reason", "it is cooler")
    counter.rises()
    server.chief().operate("job.evict", job_id=job_id)
    agent.until_job(job_id, "cancelled")
