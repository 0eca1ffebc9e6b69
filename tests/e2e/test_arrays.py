"""An array of 200 real commands, seven at a time, over a server that is killed in the middle."""

from __future__ import annotations

from collections import Counter

from rig import Rig, until

N, LIMIT = 200, 7


def most_at_once(rig: Rig) -> int:
    """How many commands ran at the same time, by their own word."""
    moments = sorted(
        (int(line[3]), 1 if line[0] == "BEGIN" else -1) for line in rig.lines() if line[0] in ("BEGIN", "END")
    )
    most = now = 0
    for _, step in moments:
        now += step
        most = max(most, now)
    return most


def test_two_hundred_elements_run_once_each_and_never_more_than_seven(rig: Rig) -> None:
    server = rig.server(gpus=0, config="[hosts.local]\ncpu_jobs = 10\n")
    client = server.client("agent", autopilot=True)
    job = client.call(
        "submit_job", command=rig.command('say INDEX "$COTENANT_ARRAY_INDEX-{index}"; sleep 0.05', 0), gpus=0,
        array={"n": N, "max_parallel": LIMIT}, request_id="one",
    )["job_id"]  # fmt: skip
    last = client.call("submit_job", command=rig.command(), gpus=0, after=[f"{job}.0-{N - 1}"], request_id="two")[
        "job_id"
    ]
    until(lambda: client.job(job)["array"]["succeeded"] >= N // 4, "a quarter is over", 120)
    server.kill()
    server.start()
    shown = client.until_job(job, "succeeded", deadline_s=240)
    assert shown["array"] == {
        "size": N, "indices": f"0-{N - 1}", "pending": 0, "held": 0, "running": 0, "succeeded": N, "failed": 0, "cancelled": 0,
        "max_parallel": LIMIT,
    }  # fmt: skip
    elements = [f"{job}.{n}" for n in range(N)]
    assert Counter(line[1] for line in rig.lines() if line[0] == "BEGIN" and line[1] != last) == Counter(elements), (
        "once each"
    )
    assert {line[1]: line[5] for line in rig.lines() if line[0] == "INDEX"} == {
        f"{job}.{n}": f"{n}-{n}" for n in range(N)
    }
    client.until_job(last, "succeeded")
    assert 1 < most_at_once(rig) <= LIMIT
    rows = client.call("list_jobs", array=job, limit=200)
    assert [row["job_id"] for row in rows["jobs"]] == elements and rows["total"] == N
    server.healthy()
