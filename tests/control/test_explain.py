"""explain_job: the very values of the last pass, what each host lacks, and calls that make sense now."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest
from bench import Bench
from fakehost import Machine

from cotenant import tools
from cotenant.server.deciding.world import BLOCKERS
from cotenant.server.errors import NotFound
from cotenant.server.model import advice
from cotenant.server.model.states import JobState


async def explained(bench: Bench, job: str, *, detail: bool = False, caller: str = "a") -> Any:
    return await bench.control.views.explain_job(await bench.caller(caller, "alice"), job, detail=detail)


async def test_it_shows_what_decide_said_and_nothing_of_its_own(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    holders = [await bench.submit(a, f"c{n}", hours=n + 1) for n in range(2)]
    first, second = await bench.submit(a, "first", gpus=2), await bench.submit(a, "second")
    for job in (first, second):
        answer = await explained(bench, job)
        decided = bench.control.context.keeper.waiting.blockers(job)
        assert [(b.code, b.message, b.set_by, b.helps) for b in answer.blockers] == [
            (b.code, b.message, b.set_by, b.helps) for b in decided
        ]
        assert decided[0].message in answer.summary and answer.state == "queued"
    answer = await explained(bench, first)
    assert answer.queue_position == 1 and answer.starts_by == answer.blockers[0].until is not None
    assert answer.next_actions[0] == f'wait_job(job_id="{first}"): it starts by itself.'
    answer = await explained(bench, second)
    assert answer.queue_position == 2 and answer.blockers[0].code in ("behind", "busy")
    assert not answer.hosts
    bench.machine.finish(bench.attempt(holders[0])["id"])
    await bench.settle()


async def test_what_no_time_ends_has_no_start(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    for n in range(2):
        await bench.submit(a, f"c{n}")
    job = await bench.submit(a, "waits")
    await bench.control.jobs.hold(a, job, "the data is not there")
    await bench.settle()
    answer = await explained(bench, job)
    assert answer.state == "held" and answer.starts_by is None
    assert answer.next_actions[0].startswith(f'release_job(job_id="{job}")')


async def test_detail_says_of_each_host_what_fails_there(make_bench) -> None:
    bench: Bench = await make_bench(Machine("h1", cards=1), Machine("h2", cards=2), Machine("local", cards=0))
    a = await bench.caller("a", "alice")
    await bench.submit(a, "c1", prefer=["h2"])
    bench.machines[0].card_states["SIM-h1-0"] = ("sick", "ECC")
    bench.telemetry(bench.machines[0])
    await bench.settle()
    job = await bench.submit(a, "two", gpus=2)
    answer = await explained(bench, job, detail=True)
    by_host = {host.host: host for host in answer.hosts}
    assert set(by_host) == {"h1", "h2", "local"} and answer.hosts_left_out == 0
    assert [b.code for b in by_host["h1"].blockers] == ["no_such_gpu"] and not by_host["h1"].fits
    assert [b.code for b in by_host["h2"].blockers] == ["busy"]
    assert by_host["h2"].blockers[0].numbers == {"wanted": 2, "free": 1, "in_use": 1}
    one = await bench.submit(a, "behind", gpus=1)
    hosts = {host.host: host for host in (await explained(bench, one, detail=True)).hosts}
    assert hosts["h2"].fits, "the host would do: the ask before it is in the way"
    assert [b.code for b in hosts["h1"].blockers] == ["host_sick"]


@pytest.mark.parametrize(
    ("end", "words", "step"),
    [
        ({"code": 0}, "succeeded", None),
        ({"code": 3}, "exit code 3", "tail_logs"),
        ({"signal": 9, "sender": "kernel_oom"}, "out of memory", "memory_mib"),
        ({"signal": 15, "sender": "shim", "reason": "time_limit"}, "time limit", "more hours"),
    ],
)
async def test_of_an_ended_job_it_says_how_it_ended(bench: Bench, end: dict, words: str, step: str | None) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a)
    bench.machine.finish(bench.attempt(job)["id"], **({"code": None} | end))
    await bench.settle()
    answer = await explained(bench, job, detail=True)
    assert words in answer.summary and not answer.blockers and not answer.hosts
    assert any(step in said for said in answer.next_actions) if step else answer.next_actions == []
    assert len(answer.attempts) == 1 and 'attempt 1 on "local": ended' in answer.attempts[0]


async def test_of_a_job_that_lives_it_says_where_it_stands(bench: Bench) -> None:
    a = await bench.caller("a", "alice", autopilot=True)
    job = await bench.submit(a, hours=2)
    answer = await explained(bench, job)
    assert 'is running on "local", 2.0 h of its 2 h left' in answer.summary and "tail_logs" in answer.next_actions[0]
    await bench.control.jobs.hold(a, job, "lunch", suspend=True)
    answer = await explained(bench, job)
    assert "suspended by a" in answer.summary and "release_job" in answer.next_actions[0]
    await bench.disconnect()
    await bench.advance(60)
    answer = await explained(bench, job)
    assert answer.state == "lost" and any("Do not submit it elsewhere" in step for step in answer.next_actions)
    with pytest.raises(NotFound):
        await explained(bench, "job_nothere")


async def test_who_may_not_look_inside_sees_why_it_waits_and_not_how_it_failed(make_bench) -> None:
    bench: Bench = await make_bench(toml='[pools.default]\nvisibility = "owner"\n')
    a = await bench.caller("a", "alice")
    await bench.caller("b", "bob")
    job = await bench.submit(a, "fails")
    bench.machine.finish(bench.attempt(job)["id"], 3)
    await bench.settle()
    b = bench.callers["b"]
    answer = await bench.control.views.explain_job(b, job)
    assert "exit code 3:" not in answer.summary and answer.next_actions == []
    for n in range(2):
        await bench.submit(a, f"c{n}")
    waits = await bench.submit(a, "waits")
    assert (await bench.control.views.explain_job(b, waits)).blockers


async def test_an_element_of_an_array_that_has_not_started_is_explained_by_its_array(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    array = await bench.submit(a, "each", array=5, gpus=1)
    answer = await explained(bench, f"{array}.4", detail=True)
    assert answer.blockers[0].code in ("busy", "behind") and answer.hosts[0].host == "local"


# ---- advice


def _calls(text: str) -> list[tuple[str, list[str]]]:
    """(tool, names of arguments) of every call that a sentence names."""
    found = re.findall(r"\b([a-z]+(?:_[a-z]+)+)(?:\(([^)]*)\))?", text)
    return [(name, re.findall(r"([a-z_]+)=", args)) for name, args in found]


def test_each_blocker_and_state_has_advice_and_it_names_only_what_there_is() -> None:
    known = {tool.name: tool.input_schema["properties"] for tool in tools.ALL}
    fields = {"memory_mib", "gpu_memory_mib"}
    said: list[str] = []
    for code in BLOCKERS:
        steps = advice.about_waiting((code,), {"job": "job_2"}, job="job_1", pool="p")
        assert steps, code
        said += steps
    for state in JobState:
        said += advice.about_living(state, job="job_1")
    for failure in ("code", "oom", "time_limit", "gpu", "host", "lost", "start", "signal", "preempted"):
        steps = advice.about_end("failed", failure, job="job_1")
        assert steps, failure
        said += steps
    said += advice.about_end("cancelled", None, job="job_1")
    for sentence in said:
        assert "{" not in sentence, sentence
        for name, arguments in _calls(sentence):
            if name in fields:
                continue
            assert name in known, sentence
            assert set(arguments) <= set(known[name]), sentence


def test_what_others_wrote_stands_in_no_advice_but_quoted() -> None:
    (step, *_) = advice.about_waiting(("dependency",), {"job": 'x"); rm -rf'}, job="job_1", pool="p")
    assert '"x\\"); rm -rf"' in step


async def test_the_answer_is_plain_data(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    for n in range(3):
        job = await bench.submit(a, f"c{n}")
    assert asdict(await explained(bench, job, detail=True))["hosts"][0]["host"] == "local"


# ---- queues


async def test_a_queue_shows_its_cards_its_head_and_why_each_waits(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    for n in range(2):
        await bench.submit(a, f"c{n}", hours=1)
    head = await bench.submit(a, "head", gpus=2, hours=1, name="the head")
    low = await bench.submit(a, "low", gpus=2, hours=1, priority="batch")
    (queue,) = (await bench.control.views.list_queues(a)).queues
    assert (queue.cap, queue.used, queue.reserved, queue.running, queue.waiting) == (2, 2, 0, 2, 2)
    assert [entry.id for entry in queue.entries] == [head, low]
    first, second = queue.entries
    assert first.why and first.blocker == "busy" and first.starts_by is not None and second.starts_by is None
    answer = await explained(bench, head)
    assert answer.starts_by == first.starts_by and answer.queue_position == 1
    for job in bench.rows("SELECT id FROM job WHERE state = 'running'"):
        bench.machine.finish(bench.attempt(job[0])["id"])
    await bench.settle()
    assert bench.job(head)["state"] == "running"
    (queue,) = (await bench.control.views.list_queues(a)).queues
    assert [entry.id for entry in queue.entries] == [low]


async def test_places_follow_the_order_of_the_pool(make_bench) -> None:
    bench: Bench = await make_bench(toml='[pools.default]\norder = "shortest"\n')
    a = await bench.caller("a", "alice")
    for n in range(2):
        await bench.submit(a, f"c{n}", hours=1)
    long, short = await bench.submit(a, "long", hours=9), await bench.submit(a, "short", hours=1)
    (queue,) = (await bench.control.views.list_queues(a)).queues
    assert [entry.id for entry in queue.entries] == [short, long]
    assert [(await explained(bench, job)).queue_position for job in (short, long)] == [1, 2]
