"""Older records, copies, lost memories, second servers: refused or reconciled, and no fence is ever given twice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from rig import Client, Refusal, Rig, Server, copy_database, put_back, rising, until


def fences(server: Server) -> list[int]:
    return [event["args"]["fence"] for event in server.events("job.placed", "lease.granted")]


def reason_of(server: Server) -> str:
    """As this machine's user sees it, who operates the server; others are told a general sentence."""
    operator = Client(server, (server.data / "local.token").read_text().strip())
    try:
        return str(operator.surely("list_hosts")["hosts"][0]["reason"])
    finally:
        operator.close()


def running(server: Server, rig: Rig, client: Client, **more: object) -> str:
    """A job that runs until `rig.folder/gate` is there; returns its id once it runs."""
    work = f"while [ ! -e {rig.folder / 'gate'} ]; do sleep 0.05; done"
    job_id = str(
        client.call(
            "submit_job", command=rig.command(work, 4), request_id=f"r{len(rig.lines())}", **{"gpus": 1, **more}
        )["job_id"]
    )
    client.until_job(job_id, "running")
    until(lambda: rig.said("BEGIN", job_id), "it says that it began")
    return job_id


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True], ids=["within one start", "after a restart"])
def test_older_records_are_refused_until_a_person_takes_the_host_over(rig: Rig, restarted: bool) -> None:
    server = rig.server()
    client = server.client("agent", autopilot=True)
    kept = client.call("acquire_lease", gpus=1, request_id="kept")
    # waits for four cards; after the copy it gets them, runs to its end, and the host is let forget it
    late = client.call("submit_job", command=rig.command("sleep 0.1", 8), gpus=4, request_id="late")["job_id"]
    copy_database(server, copy := rig.folder / "copy.db")
    if restarted:
        server.kill()
        server.start()
    # what the copy does not know: the lease ended, jobs came and went, two have all cards now
    client.surely("release_lease", lease_id=kept["lease_id"])
    assert client.until_job(late, "failed")["exit_code"] == 8
    state = server.data / "hostd" / "state"
    until(
        lambda: (
            (state / "forgotten").stat().st_size
            or any(b'"forgotten"' in path.read_bytes() for path in state.glob("attempts/*.record"))
        ),
        "the host forgets it",
    )
    first = running(server, rig, client, gpus=3)
    second = running(server, rig, client, gpus=1)
    short = client.call("submit_job", command=rig.command(), gpus=0, wait_s=20, request_id="short")
    assert short["state"] == "succeeded"
    before = fences(server)
    server.kill()
    put_back(server, copy)
    server.start()
    refused = server.wait_event("host.refused")
    assert refused["new"] == "old_incarnation" and refused["severity"] == "critical"
    until(lambda: "old_incarnation" in reason_of(server), "list_hosts shows why")
    assert "old_incarnation" in server.cli("doctor", check=False).stdout
    told = client.surely("list_hosts")["hosts"][0]["reason"]
    assert told and "old_incarnation" not in told, "whoever does not operate the server is told a sentence of ours"
    # nothing is granted
    with pytest.raises(Refusal) as no:
        client.call("acquire_lease", gpus=1, request_id="new")
    assert no.value.code in ("host_down", "busy"), no.value
    waiting = client.call("submit_job", command=rig.command(), gpus=1, request_id="waits")
    assert waiting["state"] == "queued"
    assert not server.events("job.placed")
    assert client.call("get_job", job_id=late)["state"] == "queued"
    assert client.call("get_job", job_id=waiting["job_id"])["blockers"][0]["code"] == "host_down"
    # a person decides
    server.cli("host", "take-over", "local", "--reason", "the backup is the present now", "--yes")
    found = {first, second, late}
    until(lambda: {event["job_id"] for event in server.events("job.found")} == found, "what ran and what runs is found")
    job = client.until_job(late, "failed")
    assert job["exit_code"] == 8 and len(rig.said("BEGIN", late)) == 1, "it does not run a second time"
    for job_id in (first, second):
        assert client.until_job(job_id, "running")["name"] == "found on local"
        assert len(rig.said("BEGIN", job_id)) == 1
    assert client.call("get_job", job_id=waiting["job_id"])["state"] == "queued", (
        "its cards are in use, as is known now"
    )
    assert client.call("list_gpus")["free"] == 0
    (rig.folder / "gate").touch()
    for job_id in (first, second):
        assert client.until_job(job_id, "failed")["exit_code"] == 4
    client.until_job(waiting["job_id"], "succeeded")
    after = fences(server)
    assert rising(after) and min(set(after) - set(before)) > max(before), (before, after)
    server.healthy()


@pytest.mark.slow
def test_a_copied_data_directory_is_refused_beside_and_after_the_original_and_a_moved_one_goes_on(rig: Rig) -> None:
    server = rig.server()
    client = server.client("agent")
    job_id = running(server, rig, client)
    server.kill()
    copied = rig.server("copy", start=False)
    shutil.rmtree(copied.data)
    subprocess.run(["cp", "-a", str(server.data), str(copied.data)], check=True)
    for _ in ("after the original", "beside the original"):
        copied.spawn()
        assert copied.process is not None and copied.process.wait(30) != 0
        copied.process.stdout.close()  # type: ignore[union-attr]
        copied.process = None
        assert str(server.data) in copied.said() and "copy" in copied.said(), copied.said()
        if server.process is None:
            server.start()
    assert client.until_job(job_id, "running")["attempts"][0]["epoch"] == 1
    (rig.folder / "gate").touch()
    assert client.until_job(job_id, "failed")["exit_code"] == 4
    server.healthy()
    server.stop()
    shutil.rmtree(copied.data)
    server.data.rename(copied.data)
    copied.start()
    again = Client(copied, client.token)
    assert again.call("submit_job", command=rig.command(), gpus=1, request_id="two", wait_s=20)["state"] == "succeeded"
    copied.healthy()


def test_hosts_that_lost_their_memory_start_nothing_while_the_old_runs(rig: Rig) -> None:
    server = rig.server()
    client = server.client("agent", autopilot=True)
    job_id = running(server, rig, client)
    server.kill()
    server.kill_hostd()
    shutil.rmtree(server.data / "hostd" / "state")
    server.start()
    lost = client.until_job(job_id, "lost")
    assert "memory" in lost["message"]
    assert server.wait_event("host.amnesia")["severity"] == "critical"
    waiting = client.call("submit_job", command=rig.command(), gpus=1, request_id="waits", wait_s=1)
    assert waiting["state"] in ("queued", "deploying") and not rig.said("BEGIN", waiting["job_id"])
    assert rig.carriers(COTENANT_JOB=job_id), "what Cotenant no longer knows is not signalled"
    (rig.folder / "gate").touch()
    until(lambda: not rig.carriers(COTENANT_JOB=job_id), "it ends by itself")
    assert client.until_job(job_id, "failed", "lost", "queued")["attempts"][0]["exit_code"] is None
    assert client.until_job(waiting["job_id"], "succeeded")["exit_code"] == 0
    assert rising(fences(server))
    server.healthy()


def test_a_whole_data_directory_put_back_is_a_lost_memory_too(rig: Rig) -> None:
    """Records and host are of one age then, so neither can tell the other; only the machine knows what came after."""
    server = rig.server()
    client = server.client("agent", autopilot=True)
    backup = rig.folder / "backup"
    subprocess.run(["cp", "-a", str(server.data), str(backup)], check=True)
    job_id = running(server, rig, client)
    server.kill()
    server.kill_hostd()
    shutil.rmtree(server.data)
    backup.rename(server.data)
    server.start()
    assert server.wait_event("host.amnesia")["severity"] == "critical"
    waiting = client.surely("submit_job", command=rig.command(), gpus=1, request_id="waits", wait_s=1)
    assert waiting["state"] in ("queued", "deploying") and not rig.said("BEGIN", waiting["job_id"])
    assert rig.carriers(COTENANT_JOB=job_id), "what Cotenant no longer knows is not signalled"
    (rig.folder / "gate").touch()
    until(lambda: not rig.carriers(COTENANT_JOB=job_id), "it ends by itself")
    assert client.until_job(waiting["job_id"], "succeeded")["exit_code"] == 0
    server.healthy()


def test_a_lost_memory_with_nothing_running_is_no_obstacle(rig: Rig) -> None:
    server = rig.server()
    client = server.client("agent")
    before = client.call("acquire_lease", gpus=1, request_id="one")
    client.call("release_lease", lease_id=before["lease_id"])
    server.kill()
    server.kill_hostd()
    shutil.rmtree(server.data / "hostd" / "state")
    server.start()
    server.wait_event("host.amnesia")
    after = client.surely("submit_job", command=rig.command(), gpus=1, request_id="two", wait_s=20)
    assert after["state"] == "succeeded" and after["attempts"][0]["fence"] > before["fence"]
    server.healthy()
    # and the records too: nothing was ever granted by the new ones, and their counter begins with the floor that the host needs
    server.kill()
    server.kill_hostd()
    shutil.rmtree(server.data)
    server.data.mkdir(mode=0o700)
    server.start()
    lease = server.client("agent").call("acquire_lease", gpus=4, request_id="one")
    assert lease["state"] == "leased" and lease["fence"] == 2
    server.healthy()


def test_a_new_host_is_not_held_up_by_another_hosts_direct_lease(rig: Rig) -> None:
    """Such a process carries COTENANT_LEASE and names no state directory; it says nothing about a directory that never was."""
    stranger = subprocess.Popen(["sleep", "60"], env={"COTENANT_LEASE": "lse_of_another"})
    try:
        client = rig.server().client("agent")
        assert (
            client.call("submit_job", command=rig.command(), gpus=1, request_id="one", wait_s=20)["state"]
            == "succeeded"
        )
    finally:
        stranger.kill()
        stranger.wait()


def test_a_second_server_on_the_same_data_is_refused(rig: Rig) -> None:
    server = rig.server()
    second = rig.server(start=False)
    assert second.data == server.data
    second.log = server.data.with_name("second.log")
    second.spawn()
    assert second.process is not None and second.process.wait(30) == 1
    second.process.stdout.close()  # type: ignore[union-attr]
    second.process = None
    said = second.said()
    assert str(server.data) in said and "another" in said and "Traceback" not in said, said
    agent = server.client("agent")
    assert agent.call("acquire_lease", gpus=1, request_id="one")["state"] == "leased"
    # nothing refuses this server, so there is nothing to take over; and that is for people anyway
    with pytest.raises(Refusal) as no:
        server.chief().operate("host.take-over", host="local")
    assert no.value.code == "not_refused"
    with pytest.raises(Refusal) as no:
        agent.operate("host.take-over", host="local")
    assert no.value.code == "people_only"


def test_two_servers_on_one_machine_share_its_cards_by_locks(make_rig, nvml, nvml_libdir, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Each works; a card that one has leased is refused by the other's host, by name, and can be had once it is free."""
    rig: Rig = make_rig(env=nvml.env(nvml_libdir))
    one, two = rig.server("one", gpus=0), rig.server("two", gpus=0)
    first, second = one.client("agent"), two.client("agent")
    lease = first.call("acquire_lease", gpus=4, request_id="all")
    assert len(lease["slots"]) == 4
    with pytest.raises(Refusal) as no:
        second.call("acquire_lease", gpus=1, request_id="one")
    assert no.value.code == "locked" and "another" in str(no.value), no.value
    assert second.call("submit_job", command=rig.command(), gpus=0, request_id="cpu", wait_s=20)["state"] == "succeeded"
    job = second.call("submit_job", command=rig.command(), gpus=1, request_id="gpu")
    first.call("release_lease", lease_id=lease["lease_id"])
    assert second.until_job(job["job_id"], "succeeded")["exit_code"] == 0
    one.healthy()
    two.healthy()
