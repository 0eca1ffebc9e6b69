"""Real-looking NVIDIA cards under the real server: faults and strangers take only the card they are on out.

The driver is the lab's fake library under the real pynvml; jobs hold memory on it as a CUDA program would.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import fakenvml
import pytest
from rig import ROOT, Client, Refusal, Rig, Server, until

CUDA = f"{sys.executable} {ROOT / 'tests' / 'lab' / 'fakecuda.py'}"
LOOK_S = 40.0  # idle cards are looked at every few seconds


class Machine:
    """One server over four fake cards that keep their faults to themselves."""

    def __init__(self, rig: Rig, server: Server, nvml: fakenvml.FakeNvml) -> None:
        self.rig, self.server, self.nvml = rig, server, nvml
        self.client: Client = server.client("agent", autopilot=True)

    def card(self, index: int) -> dict[str, Any]:
        """What list_gpus says of one card, by the uuid that this index had at the begin."""
        cards = {card["uuid"]: card for card in self.client.surely("list_gpus")["gpus"]}
        found: dict[str, Any] = cards[self.nvml.uuid(index)]
        return found

    def until_card(self, index: int, *states: str) -> dict[str, Any]:
        until(lambda: self.card(index)["state"] in states, f"card {index} is {states}: {self.card(index)}", LOOK_S)
        return self.card(index)

    def job(self, command: str, **spec: Any) -> str:
        answer = self.client.call("submit_job", command=command, request_id=os.urandom(8).hex(), **{"gpus": 1, **spec})
        return str(answer["job_id"])

    def holds(self, index: int, seconds: int = 600, memory: str = "2G") -> str:
        """A job that holds memory on exactly this card (it is the only free one); returns its id once it does."""
        job_id = self.job(f"{CUDA} --mem {memory} --for {seconds}")
        job = self.client.until_job(job_id, "running")
        assert job["slots"][0]["uuid"] == self.nvml.uuid(index), job["slots"]
        until(lambda: self.card(index)["memory_used_mib"] >= 2048, "its memory is seen", LOOK_S)
        return job_id


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, nvml_libdir: Any) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("cards")
    nvml = fakenvml.FakeNvml(folder / "nvml.state").create(gpus=4, host=uuid.uuid4().hex)
    rig = Rig(folder, env=nvml.env(nvml_libdir))
    try:
        yield Machine(rig, rig.server(gpus=0, config="[hosts.local]\ncpu_jobs = 4\n"), nvml)
    finally:
        rig.end()


@pytest.fixture
def machine(shared: Machine) -> Iterator[Machine]:
    """The machine, well and idle before each test."""
    yield shared
    # jobs first: a card that is lost under a process keeps its claim
    for job in shared.client.surely("list_jobs", state="active")["jobs"]:
        shared.client.surely("cancel_job", job_id=job["job_id"])
    shared.nvml.clear_faults()
    until(lambda: not shared.client.surely("list_jobs", state="active")["jobs"], "no job is left")
    shared.server.healthy()


def all_free(machine: Machine) -> None:
    until(
        lambda: machine.client.call("list_gpus")["free"] == 4, f"all free: {machine.client.call('list_gpus')}", LOOK_S
    )


def test_a_job_holds_memory_and_leaves_a_clean_card(machine: Machine) -> None:
    assert [card["simulated"] for card in machine.client.call("list_gpus")["gpus"]] == [False] * 4
    job_id = machine.holds(0, seconds=600, memory="3G")
    card = machine.card(0)
    assert (card["state"], card["memory_used_mib"] >= 3072) == ("held", True)
    machine.client.call("cancel_job", job_id=job_id)
    machine.client.until_job(job_id, "cancelled")
    all_free(machine)
    with machine.server.rows() as c:
        exit_ = c.execute(
            "SELECT json_extract(exit, '$.peak_card_memory_mib') FROM attempt WHERE job_id = ?", (job_id,)
        )
        assert machine.nvml.uuid(0) in exit_.fetchone()[0]
        peak = c.execute(
            "SELECT max(value) FROM attempt, json_each(exit, '$.peak_card_memory_mib') WHERE job_id = ?", (job_id,)
        )
        assert peak.fetchone()[0] == 3072
    assert "fakecuda: " + machine.nvml.uuid(0) in machine.client.call("tail_logs", job_id=job_id)["lines"][0]


def test_memory_that_stays_behind_keeps_the_slot_from_the_next(machine: Machine) -> None:
    """The job ends and something of it stays on the card: its slot is not free until that is gone."""
    foreign = subprocess.Popen(["sleep", "600"])
    try:
        job_id = machine.job(f"{CUDA} --mem 1G --for 1")
        machine.client.until_job(job_id, "running")
        card = machine.nvml.uuid(0)
        machine.nvml.use(0, foreign.pid, mem="5G")
        machine.client.until_job(job_id, "succeeded")
        assert machine.until_card(0, "cleaning", "occupied")["uuid"] == card
        other = machine.job(f"{CUDA} --mem 1G")
        assert machine.client.until_job(other, "succeeded")["attempts"][0]["slots"][0]["uuid"] != card
    finally:
        foreign.kill()
        foreign.wait()
    all_free(machine)


def test_a_lost_card_takes_only_itself_out(machine: Machine) -> None:
    job_id = machine.holds(0)
    machine.nvml.lose(0)
    machine.nvml.lose(1)
    assert machine.until_card(1, "lost")["reason"]
    with pytest.raises(Refusal) as no:
        machine.client.call("acquire_lease", gpus=3, request_id="three")
    assert no.value.code in ("busy", "host_sick"), no.value
    lease = machine.client.call("acquire_lease", gpus=2, request_id="two")
    assert {slot["uuid"] for slot in lease["slots"]} == {machine.nvml.uuid(2), machine.nvml.uuid(3)}
    machine.client.call("release_lease", lease_id=lease["lease_id"])
    # the program sees it as CUDA would, and its end is told
    assert machine.client.until_job(job_id, "failed")["exit_code"] == 1
    changed = machine.server.wait_event("gpu.changed", gpu_uuid=machine.nvml.uuid(1), new="lost")
    assert changed["severity"] == "critical"
    machine.nvml.restore(0)
    machine.nvml.restore(1)
    all_free(machine)


def test_a_foreign_process_on_a_free_card_is_named_and_the_card_refused(machine: Machine) -> None:
    foreign = subprocess.Popen(["sleep", "600"])
    try:
        machine.nvml.use(2, foreign.pid, mem="3G")
        card = machine.until_card(2, "occupied")
        assert f"pid {foreign.pid}" in card["reason"] and "sleep" in card["reason"]
        lease = machine.client.call("acquire_lease", gpus=3, request_id="around")
        assert machine.nvml.uuid(2) not in {slot["uuid"] for slot in lease["slots"]}
        with pytest.raises(Refusal) as no:
            machine.client.call("acquire_lease", gpus=1, request_id="it")
        machine.client.call("release_lease", lease_id=lease["lease_id"])
        assert no.value.code in ("busy", "occupied"), no.value
        waiting = machine.job(f"{CUDA} --mem 1G", gpus=4)
        blocker = machine.client.call("get_job", job_id=waiting)["blockers"][0]
        assert blocker["code"] in ("occupied", "busy"), blocker
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()
    assert machine.client.until_job(waiting, "succeeded", deadline_s=LOOK_S)["exit_code"] == 0


def test_a_process_that_comes_between_the_look_and_the_grant_is_found_by_the_host(machine: Machine) -> None:
    """The server's picture is some seconds old; hostd looks again in the moment of the start and of the hold."""
    all_free(machine)
    foreign = subprocess.Popen(["sleep", "600"])
    try:
        for index in range(4):
            machine.nvml.use(index, foreign.pid, mem="3G")
        with pytest.raises(Refusal) as no:
            machine.client.call("acquire_lease", gpus=1, request_id="quick")
        assert no.value.code in ("occupied", "busy"), no.value
        if no.value.code == "occupied":
            assert str(foreign.pid) in str(no.value)
        assert not machine.client.call("list_leases", state="active")["leases"]
    finally:
        foreign.kill()
        foreign.wait()
    all_free(machine)


@pytest.mark.slow
def test_a_hanging_driver_is_told_and_work_without_a_card_goes_on(machine: Machine) -> None:
    machine.nvml.delay(None, "*", 9_000)
    until(lambda: host(machine)["nvml"] == "hanging", f"the hang is seen: {host(machine)}", LOOK_S)
    cpu = machine.job(machine.rig.command(code=6), gpus=0)
    assert machine.client.until_job(cpu, "failed")["exit_code"] == 6
    with pytest.raises(Refusal):
        machine.client.call("acquire_lease", gpus=1, request_id="hang")
    machine.nvml.clear_faults()
    until(lambda: host(machine)["nvml"] == "ok", f"it answers again: {host(machine)}", 60)
    all_free(machine)


def test_a_driver_that_goes_and_comes_back(machine: Machine) -> None:
    all_free(machine)
    machine.nvml.unload_driver()
    try:
        until(lambda: host(machine)["nvml"] not in ("ok", None), f"it is gone: {host(machine)}", LOOK_S)
        assert machine.client.call("list_gpus")["free"] == 0
        with pytest.raises(Refusal):
            machine.client.call("acquire_lease", gpus=1, request_id="gone")
        cpu = machine.job(machine.rig.command(code=6), gpus=0)
        assert machine.client.until_job(cpu, "failed")["exit_code"] == 6
    finally:
        machine.nvml.load_driver()
    until(lambda: host(machine)["nvml"] == "ok", f"it is back: {host(machine)}", 60)
    all_free(machine)
    lease = machine.client.call("acquire_lease", gpus=4, request_id="back")
    machine.client.call("release_lease", lease_id=lease["lease_id"])


def test_an_xid_makes_a_card_sick_and_no_other(machine: Machine) -> None:
    """Last: a critical Xid stays until somebody looks after the card."""
    all_free(machine)
    machine.nvml.xid(3, 48)
    card = machine.until_card(3, "sick")
    assert "48" in card["reason"]
    lease = machine.client.call("acquire_lease", gpus=3, request_id="well")
    assert machine.nvml.uuid(3) not in {slot["uuid"] for slot in lease["slots"]}
    with pytest.raises(Refusal):
        machine.client.call("acquire_lease", gpus=1, request_id="sick")
    machine.client.call("release_lease", lease_id=lease["lease_id"])


def host(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = machine.client.surely("list_hosts")["hosts"][0]
    return found
