"""A job over two hosts, each a hostd of its own on this machine: the ranks meet, fail together, and outlive what may die."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rig import Client, Rig, Server, kill, until

TWO = """
[hosts.second]
simulate_gpus = 2
[hosts.local]
cpu_jobs = 4
"""

#: What torch.distributed's env:// rendezvous and an all-reduce do, with the standard library: rank 0 listens, the others
#: come, the sum goes back. Each process says what it was given; WORK is what each does after they have met.
PROGRAM = """\
import json, os, socket, struct, sys, time

env = os.environ
rank, size, each = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
nodes = int(env["NNODES"])
where = (env["MASTER_ADDR"], int(env["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(where) as door:
        others = [door.accept()[0] for _ in range(nodes - 1)]
    total = rank + sum(struct.unpack("i", one.recv(4))[0] for one in others)
    for one in others:
        one.sendall(struct.pack("i", total))
else:
    deadline = time.monotonic() + 20
    while True:
        try:
            link = socket.create_connection(where)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    link.sendall(struct.pack("i", rank))
    total = struct.unpack("i", link.recv(4))[0]
print(json.dumps({"rank": rank, "total": total, "size": size, "each": each, "cards": env["COTENANT_GPUS"]}), flush=True)
"""


@pytest.fixture(scope="module")
def rig(module_rig: Rig) -> Rig:
    return module_rig


@pytest.fixture(scope="module")
def server(rig: Rig) -> Server:
    """One server for all: each test leaves it running and with all cards free."""
    return rig.server(gpus=2, config=TWO)


class Gang:
    """A job over both hosts whose ranks run PROGRAM and then `work`, and say BEGIN and END."""

    def __init__(self, rig: Rig, server: Server, work: str = "", **spec: Any) -> None:
        self.rig, self.server = rig, server
        self.client: Client = server.client(f"agent{len(rig.clients)}", autopilot=True)
        program = rig.folder / f"program{len(rig.clients)}.py"
        program.write_text(PROGRAM + work)
        says = f'echo "$0 $COTENANT_JOB $NODE_RANK $COTENANT_ATTEMPT" >> {rig.folder}/gangs'
        command = (
            f"trap : USR1; sh -c '{says}' BEGIN; {sys.executable} {program}; code=$?; sh -c '{says}' END; exit $code"
        )
        self.job = str(
            self.client.call("submit_job", command=command, request_id="one", **{"nodes": 2, "gpus": 2, **spec})[
                "job_id"
            ]
        )

    def lines(self, what: str) -> list[list[str]]:
        path = Path(self.rig.folder / "gangs")
        found = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in found if line[0] == what and line[1] == self.job]

    def until(self, *states: str) -> dict[str, Any]:
        return self.client.until_job(self.job, *states)

    def printed(self, rank: int, stream: str = "out") -> list[str]:
        lines: list[str] = self.client.call("tail_logs", job_id=self.job, rank=rank, stream=stream)["lines"]
        return lines

    def ranks(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.job(self.job)["attempts"][-1]["ranks"]
        return found

    def over(self) -> None:
        """Each rank began once, nothing is left, and the records are sound."""
        assert sorted(line[2] for line in self.lines("BEGIN")) == ["0", "1"]
        until(lambda: self.client.call("list_gpus")["free"] == 4, "all cards free again")
        assert not self.rig.carriers(COTENANT_JOB=self.job)
        self.server.healthy()


def test_the_ranks_of_a_real_program_meet_and_succeed_as_one(rig: Rig, server: Server) -> None:
    gang = Gang(rig, server)
    job = gang.until("succeeded")
    assert (job["exit_code"], len(job["attempts"])) == (0, 1)
    said = [gang.printed(rank) for rank in (0, 1)]
    assert said[0] == ['{"rank": 0, "total": 2, "size": 4, "each": 2, "cards": "2"}']
    assert said[1] == ['{"rank": 2, "total": 2, "size": 4, "each": 2, "cards": "2"}']
    assert [(r["host"], r["state"], r["exit_code"]) for r in gang.ranks()] == [
        ("local", "ended", 0),
        ("second", "ended", 0),
    ]
    printed = server.cli("logs", gang.job, "--rank", "1", "--stream", "out").stdout
    assert '"rank": 2' in printed
    table = server.cli("job", "show", gang.job).stdout.partition("\nRANK ")[2].splitlines()[1:]
    assert [line.split()[:4] for line in table[:2]] == [["0", "local", "ended", "0"], ["1", "second", "ended", "0"]]
    gang.over()


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_fails_and_the_other_is_stopped(rig: Rig, server: Server, failing: int) -> None:
    work = f"if int(env['NODE_RANK']) == {failing}: sys.exit(7)\ntime.sleep(60)\n"
    gang = Gang(rig, server, work, stop_grace_s=2)
    job = gang.until("failed")
    host = ("local", "second")[failing]
    assert (job["exit_code"], job["failure_class"]) == (7, "code")
    assert job["message"] == f"rank {failing} on {host}: ended with exit code 7"
    other = gang.ranks()[1 - failing]
    assert (other["exit_code"], other["message"]) == (None, "stopped: rank_failed")
    gang.over()


def test_a_program_that_is_not_there_fails_the_whole_with_its_reason(rig: Rig, server: Server) -> None:
    client = server.client(f"agent{len(rig.clients)}")
    job = client.call("submit_job", command=["/does/not/exist"], nodes=2, gpus=1)["job_id"]
    ended = client.until_job(job, "failed")
    assert ended["failure_class"] == "start" and "ENOENT" in ended["message"]
    until(lambda: client.call("list_gpus")["free"] == 4, "all cards free again")


def test_a_cancel_and_a_signal_reach_both(rig: Rig, server: Server) -> None:
    work = (
        "import signal\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('told', flush=True))\n"
        "print('waits', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    gang = Gang(rig, server, work)
    gang.until("running")
    for rank in (0, 1):
        until(lambda rank=rank: "waits" in gang.printed(rank), f"rank {rank} waits")
    gang.client.call("signal_job", job_id=gang.job, signal="USR1")
    for rank in (0, 1):
        until(lambda rank=rank: "told" in gang.printed(rank), f"rank {rank} was told")
    gang.client.call("cancel_job", job_id=gang.job)
    gang.until("cancelled")
    gang.over()


@pytest.mark.parametrize("host", ["local", "second"])
def test_a_hostd_that_is_killed_takes_nothing_with_it(rig: Rig, server: Server, host: str) -> None:
    gang = Gang(rig, server, "time.sleep(1.5)\n")
    gang.until("running")
    before = server.hostd_pid(host)
    server.kill_hostd(host)
    until(lambda: server.hostd_pid(host) not in (None, before), "another hostd")
    job = gang.until("succeeded")
    assert len(job["attempts"]) == 1
    gang.over()


def test_a_server_that_is_killed_while_a_gang_runs_finds_it_again(rig: Rig, server: Server) -> None:
    gang = Gang(rig, server, "time.sleep(1.5)\n")
    gang.until("running")
    server.kill()
    server.start()
    job = gang.until("succeeded")
    assert len(job["attempts"]) == 1
    gang.over()


@pytest.mark.parametrize("slow", ["local", "second"])
def test_a_server_that_is_killed_between_the_two_steps(rig: Rig, server: Server, slow: str) -> None:
    """One host holds its part up, so that the other stands ready and nothing runs; the next server goes on from there."""
    hostd = server.hostd_pid(slow)
    assert hostd is not None
    kill(hostd, signal.SIGSTOP)
    gang = Gang(rig, server)
    server.wait_event("job.placed", job_id=gang.job)
    if slow == "second":
        until(lambda: gang.ranks()[0]["state"] == "ready", "the first rank is ready")
    assert gang.lines("BEGIN") == []
    server.kill()
    kill(hostd, signal.SIGCONT)
    server.start()
    job = gang.until("succeeded")
    assert len(job["attempts"]) == 1
    gang.over()


def test_a_server_that_is_killed_again_and_again(rig: Rig, server: Server) -> None:
    gang = Gang(rig, server, "time.sleep(1)\n")
    for _ in range(3):
        server.kill()
        server.start()
    job = gang.until("succeeded")
    assert len(job["attempts"]) == 1
    gang.over()


def test_two_gangs_share_the_hosts_and_do_not_meet_each_other(rig: Rig, server: Server) -> None:
    gangs = [Gang(rig, server, "time.sleep(0.3)\n", gpus=1) for _ in range(2)]
    for gang in gangs:
        gang.until("succeeded")
        assert '"total": 1' in gang.printed(0)[0] and '"total": 1' in gang.printed(1)[0]
    for gang in gangs:
        gang.over()
    with server.rows() as c:
        ports = [
            row[0] for row in c.execute("SELECT port FROM attempt WHERE nodes > 1 ORDER BY created_at_ms DESC LIMIT 2")
        ]
    assert None not in ports
