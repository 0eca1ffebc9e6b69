"""kill -9 of the server at each step of a job's life: the job runs once, and its end is known."""

from __future__ import annotations

import signal
import time

import pytest
from rig import Away, Client, Rig, Server, kill, until


@pytest.fixture(scope="module")
def rig(module_rig: Rig) -> Rig:
    return module_rig


@pytest.fixture(scope="module")
def server(rig: Rig) -> Server:
    """One server for all steps: each begins where the one before left it, running and with all cards free."""
    return rig.server()


def submitted(server: Server, rig: Rig, work: str, code: int = 0, **more: object) -> tuple[Client, str]:
    client = server.client(f"agent{len(rig.clients)}", autopilot=True)
    answer = client.call("submit_job", command=rig.command(work, code), request_id="one", **{"gpus": 1, **more})
    return client, str(answer["job_id"])


def ended_once(server: Server, rig: Rig, client: Client, job_id: str, code: int, state: str = "failed") -> None:
    job = client.until_job(job_id, state)
    assert job["exit_code"] == code
    assert len(job["attempts"]) == 1, job["attempts"]
    assert len(rig.said("BEGIN", job_id)) == 1
    assert [line[5] for line in rig.said("END", job_id)] == [str(code)]
    assert not rig.said("OVERLAP", job_id)
    until(lambda: client.call("list_gpus")["free"] == 4, "all cards free again")
    server.healthy()


def test_right_after_the_answer_to_submit(rig: Rig, server: Server) -> None:
    client, job_id = submitted(server, rig, "sleep 0.3", 3)
    server.kill()
    server.start()
    ended_once(server, rig, client, job_id, 3)


@pytest.mark.parametrize("with_hostd", [False, True], ids=["the request waits at hostd", "the request is lost"])
def test_between_the_intent_and_the_start(rig: Rig, server: Server, with_hostd: bool) -> None:
    hostd = server.hostd_pid()
    assert hostd is not None
    kill(hostd, signal.SIGSTOP)  # it holds the door open between the intent and its start
    client, job_id = submitted(server, rig, "sleep 0.3", 3)
    server.wait_event("job.placed", job_id=job_id)
    server.kill()
    if with_hostd:
        kill(hostd)
    else:
        kill(hostd, signal.SIGCONT)
    server.start()
    ended_once(server, rig, client, job_id, 3)


def test_as_soon_as_the_intent_is_on_disk(rig: Rig, server: Server) -> None:
    client, job_id = submitted(server, rig, "sleep 0.3", 3)
    server.wait_event("job.placed", job_id=job_id)
    server.kill()
    server.start()
    ended_once(server, rig, client, job_id, 3)


def test_while_it_runs(rig: Rig, server: Server) -> None:
    gate = rig.folder / "gate"
    client, job_id = submitted(server, rig, f"while [ ! -e {gate} ]; do sleep 0.05; done", 7)
    server.wait_event("job.running", job_id=job_id)
    server.kill()
    server.start()
    assert client.job(job_id)["state"] == "running"
    gate.touch()
    ended_once(server, rig, client, job_id, 7)


def test_it_ends_while_nobody_is_there(rig: Rig, server: Server) -> None:
    client, job_id = submitted(server, rig, "sleep 0.5", 5)
    server.wait_event("job.running", job_id=job_id)
    server.kill()
    server.kill_hostd()
    until(lambda: rig.said("END", job_id), "the job ends by itself")
    server.start()
    ended_once(server, rig, client, job_id, 5)


def test_while_it_is_being_stopped(rig: Rig, server: Server) -> None:
    client, job_id = submitted(server, rig, "trap : TERM; while :; do sleep 0.1; done", 9, stop_grace_s=2)
    until(lambda: rig.said("BEGIN", job_id), "the job begins")
    assert client.call("cancel_job", job_id=job_id)["status"] == "stopping"
    server.kill()
    server.start()
    job = client.until_job(job_id, "cancelled")
    assert len(job["attempts"]) == 1
    assert len(rig.said("BEGIN", job_id)) == 1 and not rig.said("END", job_id)
    assert not rig.carriers(COTENANT_JOB=job_id)
    server.healthy()


def test_a_stop_that_the_host_never_heard_of(rig: Rig, server: Server) -> None:
    client, job_id = submitted(server, rig, "sleep 600")
    until(lambda: rig.said("BEGIN", job_id), "the job begins")
    hostd = server.hostd_pid()
    assert hostd is not None
    kill(hostd, signal.SIGSTOP)
    impatient = Client(server, client.token, 1.0)
    with pytest.raises(Away, match="timed out"):
        impatient.call("cancel_job", job_id=job_id)
    server.wait_event("job.stopping", job_id=job_id)
    server.kill()
    kill(hostd)
    server.start()
    assert client.until_job(job_id, "cancelled")["exit_code"] is None
    until(lambda: not rig.carriers(COTENANT_JOB=job_id), "its processes are gone")
    server.healthy()


def test_a_direct_lease_outlives_the_server_and_its_release_counts(rig: Rig, server: Server) -> None:
    client = server.client("holder")
    kept = client.call("acquire_lease", gpus=1, request_id="kept")
    given = client.call("acquire_lease", gpus=1, request_id="given")
    client.call("release_lease", lease_id=given["lease_id"])
    server.kill()
    server.start()
    again = client.surely("acquire_lease", gpus=1, request_id="kept")
    assert (again["lease_id"], again["fence"], again["deduplicated"]) == (kept["lease_id"], kept["fence"], True)
    assert client.call("heartbeat", lease_id=kept["lease_id"])["state"] == "running"
    assert client.call("release_lease", lease_id=given["lease_id"])["state"] == "released"
    held = [card for card in client.call("list_gpus")["gpus"] if card["state"] == "held"]
    assert [card["lease_id"] for card in held] == [kept["lease_id"]]
    assert client.call("release_lease", lease_id=kept["lease_id"])["state"] == "released"
    server.healthy()


def test_an_orderly_end_leaves_the_job_running_even_when_its_host_hangs(rig: Rig, server: Server) -> None:
    gate = rig.folder / "gate2"
    client, job_id = submitted(server, rig, f"while [ ! -e {gate} ]; do sleep 0.05; done", 7)
    client.until_job(job_id, "running")
    server.stop()
    assert rig.carriers(COTENANT_JOB=job_id)
    server.start()
    assert client.job(job_id)["state"] == "running"
    hostd = server.hostd_pid()
    assert hostd is not None
    kill(hostd, signal.SIGSTOP)
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 5, "promised: 5 s after SIGTERM"
    server.start()  # it answers although its host does not
    assert client.surely("list_hosts")["hosts"][0]["link"] != "up"
    kill(hostd, signal.SIGCONT)
    until(lambda: client.surely("list_hosts")["hosts"][0]["link"] == "up", "the host is back")
    gate.touch()
    ended_once(server, rig, client, job_id, 7)
