"""A card that the driver divides (MIG): its instances are slots of their own, with their own memory, named by UUID."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakenvml import FakeNvml
from rig import Refusal, Rig, until


def test_a_job_gets_the_instance_that_is_enough_for_it(
    make_rig: Callable[..., Rig], nvml: FakeNvml, nvml_libdir: Any
) -> None:
    nvml.mig(3, ["1g.10gb", "3g.40gb"])
    rig = make_rig(env=nvml.env(nvml_libdir))
    server = rig.server(gpus=0)
    client = server.client("a", autopilot=True)
    gpus = client.call("list_gpus")["gpus"]
    parts = {gpu["uuid"]: gpu for gpu in gpus if gpu["uuid"].startswith("MIG-")}
    assert len(gpus) == 5 and len(parts) == 2, "the divided card itself is none"
    small, large = sorted(parts, key=lambda uuid: parts[uuid]["memory_mib"])
    assert [parts[uuid]["memory_mib"] for uuid in (small, large)] == [10 * 1024, 40 * 1024]
    for gpu in gpus:  # whole cards out of the way
        if gpu["uuid"] not in parts:
            client.call("acquire_lease", gpus=1, host=gpu["host"], gpu_memory_mib=50_000)
    with pytest.raises(Refusal):
        client.call("acquire_lease", gpus=1, gpu_memory_mib=50_000)
    says = "echo $CUDA_VISIBLE_DEVICES $COTENANT_GPU_UUIDS; sleep 0.5"
    job = client.call("submit_job", command=says, gpus=1, gpu_memory_mib=20_000)["job_id"]
    running = client.until_job(job, "running", "succeeded")
    assert [slot["uuid"] for slot in running["attempts"][0]["slots"]] == [large]
    client.until_job(job, "succeeded")
    assert client.call("tail_logs", job_id=job)["lines"] == [f"{large} {large}"]
    until(lambda: client.call("list_gpus")["free"] == 2, "both parts are free")
    server.healthy()
