"""Several host entries on one machine: each with its own hostd, its own state and its own cards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from fakenvml import FakeNvml
from rig import Refusal, Rig, until

TWO = """
[hosts.second]
simulate_gpus = 2
labels = { rack = "b" }
max_jobs = 8
"""


def test_two_hosts_run_jobs_and_each_outlives_the_others_hostd(rig: Rig) -> None:
    server = rig.server(gpus=1, config=TWO)
    client = server.client("a")
    hosts = {host["host"]: host for host in client.call("list_hosts")["hosts"]}
    assert {name: host["link"] for name, host in hosts.items()} == {"local": "up", "second": "up"}
    gpus = client.call("list_gpus")["gpus"]
    assert sorted((gpu["host"], gpu["index"]) for gpu in gpus) == [("local", 0), ("second", 0), ("second", 1)]
    assert len({gpu["uuid"] for gpu in gpus}) == 3
    first = client.call("submit_job", command=rig.command("sleep 0.6"), gpus=2, host_labels={"rack": "b"}, name="two")
    other = client.call("submit_job", command=rig.command("sleep 0.6"), gpus=1, name="one")
    assert client.until_job(first["job_id"], "running")["host"] == "second"
    assert client.until_job(other["job_id"], "running")["host"] == "local"
    pids = {host: server.hostd_pid(host) for host in hosts}
    assert None not in pids.values() and len(set(pids.values())) == 2
    server.kill_hostd("second")
    for job in (first, other):
        done = client.until_job(job["job_id"], "succeeded")
        assert len(rig.said("BEGIN", job["job_id"])) == 1 and len(done["attempts"]) == 1
    assert server.hostd_pid("local") == pids["local"]
    until(lambda: client.call("list_gpus")["free"] == 3, "all cards free again")
    server.healthy()


def test_a_server_that_is_killed_finds_both_again(rig: Rig) -> None:
    server = rig.server(gpus=1, config=TWO)
    client = server.client("a")
    jobs = [
        client.call("submit_job", command=rig.command("sleep 1"), gpus=n, name=f"with {n}")["job_id"] for n in (1, 2)
    ]
    for job in jobs:
        client.until_job(job, "running")
    pids = {host: server.hostd_pid(host) for host in ("local", "second")}
    server.kill()
    server.start()
    for job in jobs:
        client.until_job(job, "succeeded")
        assert len(rig.said("BEGIN", job)) == 1 and not rig.said("OVERLAP", job)
    assert {host: server.hostd_pid(host) for host in ("local", "second")} == pids
    server.stop()
    for pid in pids.values():
        until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), "an idle hostd ends with the server")


@pytest.mark.parametrize(
    ("config", "mine"),
    [
        ("[hosts.trusted]\ncards = ['1', '{2}']\n", {"local": [0, 3], "trusted": [1, 2]}),
        ("[hosts.trusted]\n[hosts.local]\ncards = ['0']\n", {"local": [0], "trusted": [1, 2, 3]}),
        ("[hosts.trusted]\ncards = []\n", {"local": [0, 1, 2, 3]}),
    ],
)
def test_the_cards_of_a_machine_are_divided(
    make_rig: Callable[..., Rig], nvml: FakeNvml, nvml_libdir: Any, config: str, mine: dict[str, list[int]]
) -> None:
    rig = make_rig(env=nvml.env(nvml_libdir))
    uuids = nvml.uuids()
    server = rig.server(gpus=0, config=config.replace("{2}", uuids[2]))
    client = server.client("a")
    gpus = client.call("list_gpus")["gpus"]
    shown = {host: sorted(g["index"] for g in gpus if g["host"] == host) for host in mine}
    assert shown == mine and len(gpus) == 4
    for host, cards in mine.items():
        lease = client.call("acquire_lease", gpus=len(cards), host=host)
        assert sorted(slot["uuid"] for slot in lease["slots"]) == sorted(uuids[n] for n in cards)
        with pytest.raises(Refusal):
            client.call("acquire_lease", gpus=1, host=host)
    server.healthy()


def test_a_card_moves_to_another_host_with_the_configuration(
    make_rig: Callable[..., Rig], nvml: FakeNvml, nvml_libdir: Any
) -> None:
    rig = make_rig(env=nvml.env(nvml_libdir))
    server = rig.server(gpus=0, config="[hosts.second]\ncards = ['1']\n")
    client = server.client("a")

    def hosts() -> list[str]:
        gpus = client.surely("list_gpus")["gpus"]
        return [g["host"] for g in sorted(gpus, key=lambda g: g["index"])]

    assert hosts() == ["local", "second", "local", "local"]
    for config, wanted in (
        ("[hosts.second]\ncards = ['0', '2']\n", ["second", "local", "second", "local"]),
        ("", ["local"] * 4),
    ):
        server.stop()
        (server.data / "cotenant.toml").write_text(config)
        server.start()
        until(lambda wanted=wanted: hosts() == wanted, f"cards at {wanted}")
        lease = client.call("acquire_lease", gpus=2)
        client.call("release_lease", lease_id=lease["lease_id"])
    server.kill(signal.SIGTERM)
    server.healthy()
