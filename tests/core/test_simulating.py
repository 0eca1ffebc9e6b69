"""Simulations: the readers, equal input and equal outcome, and schedules that hold up against a check of the file alone."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from cotenant.server.deciding.world import Needs, OwnerRules, Policy, PoolRules
from cotenant.server.simulating import alibaba, opening, report, synthetic
from cotenant.server.simulating.run import Simulation
from cotenant.server.simulating.trace import (
    HOUR_MS,
    SimHost,
    SimJob,
    Trace,
    TraceError,
    divided,
    read_lines,
    thinned,
)

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check-schedule"
MIXED = "synthetic:jobs=150,cards=12,people=0.2,shares=0.3,load=1.6"


def checker() -> Any:
    loader = importlib.machinery.SourceFileLoader("check_schedule", str(SCRIPT))
    spec = importlib.util.spec_from_loader("check_schedule", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def simulate(trace: Trace, rules: PoolRules | None = None, **rest: Any) -> Any:
    return Simulation(trace, (rules or PoolRules("main"),), **rest).run()


def lines(*rows: dict[str, Any]) -> list[str]:
    return [json.dumps(row) for row in rows]


def job(name: str, submit_s: int, runs_s: int, gpus: int = 1, **rest: Any) -> dict[str, Any]:
    return {"job": name, "submit_s": submit_s, "runs_s": runs_s, "hours": 1, "gpus": gpus, **rest}


def starts(outcome: Any) -> dict[str, float]:
    return {row["job"]: row["start_s"] for row in report.schedule(outcome)}


HOST = {"host": "gpu1", "cards": 2}


@pytest.mark.parametrize("order", ["fifo", "fairshare", "shortest"])
@pytest.mark.parametrize("backfill", [True, False])
def test_a_schedule_holds_up_on_its_own(order: Any, backfill: bool) -> None:
    rules = PoolRules("main", cap=10, order=order, owner_cap=9, preempt="within")
    trace = divided(synthetic.read(MIXED, 3))
    outcome = simulate(trace, rules, policy=Policy(backfill=backfill), owners=(OwnerRules("owner0", jobs=5),))
    rows = list(report.schedule(outcome))
    assert checker().faults(rows, cap=10) == []
    assert {stay.job.id for stay in outcome.stays} | set(outcome.waiting) == {one.id for one in trace.jobs}


def test_agents_leave_the_reserve_alone() -> None:
    trace = synthetic.read("synthetic:jobs=80,cards=8,load=2", 1)
    rows = list(report.schedule(simulate(trace, PoolRules("main", reserve=3))))
    assert checker().faults(rows, cap=8, reserve=3) == []
    assert checker().faults(rows, cap=8, reserve=4), "the check itself sees a card too many"


def test_equal_seeds_are_equal_and_others_are_not() -> None:
    def once(seed: int) -> list[dict[str, Any]]:
        return list(
            report.schedule(simulate(opening.open_trace(MIXED, seed=seed), PoolRules("main", order="fairshare")))
        )

    assert once(4) == once(4)
    assert once(4) != once(5)


def test_the_checker_sees_each_fault() -> None:
    sound = {"job": "a", "submit_s": 0, "start_s": 1, "end_s": 5, "slots": [{"gpu": "h/0", "share": 1}]}
    faults = checker().faults
    assert faults([sound]) == []
    assert faults([]) and faults([sound, sound])
    assert faults([{**sound, "start_s": -1}]) and faults([{**sound, "end_s": 0}])
    assert faults([sound, {**sound, "job": "b", "start_s": 4, "end_s": 9}])
    assert not faults([sound, {**sound, "job": "b", "start_s": 5, "end_s": 9}])
    assert faults([{**sound, "start_s": None, "end_s": None}])
    assert not faults([{**sound, "start_s": None, "end_s": None, "blockers": [{"code": "busy"}]}])


def test_a_short_job_passes_the_first_that_does_not_fit_and_does_not_delay_it() -> None:
    rows = lines(HOST, job("a", 0, 3000), job("big", 10, 60, 2), job("long", 20, 3500), job("short", 30, 60, hours=0.1))
    trace = read_lines(rows, "t", 24)
    found = starts(simulate(trace))
    assert found["short"] == 30, "it is over before the big one could start"
    assert found["big"] == 3000
    assert found["long"] == 3060
    outcome = simulate(trace)
    assert [stay.job.id for stay in outcome.stays if stay.backfilled] == ["short"]
    assert starts(simulate(trace, policy=Policy(backfill=False)))["short"] > 30


def test_a_job_ends_at_its_limit() -> None:
    outcome = simulate(read_lines(lines(HOST, job("a", 0, 9000)), "t", 24))
    assert [(s.why, s.ended_ms - s.begun_ms) for s in outcome.stays] == [("limit", HOUR_MS)]
    assert report.summary(outcome)["ended_at_limit"] == 1


def test_a_victim_of_a_preemption_goes_on_later_and_works_as_long_as_it_must() -> None:
    rows = lines(
        {**HOST, "cards": 1}, job("low", 0, 1000, priority=0, preemptible=True), job("high", 500, 100, priority=20)
    )
    outcome = simulate(read_lines(rows, "t", 24), PoolRules("main", preempt="within"))
    schedule = list(report.schedule(outcome))
    assert checker().faults(schedule, cap=1) == []
    assert [row["job"] for row in schedule] == ["low", "high", "low#2"]
    assert sum(s.ended_ms - s.begun_ms for s in outcome.stays if s.job.id == "low") == 1_000_000
    assert schedule[1]["start_s"] == 530, "after the notice and the save"


def test_what_never_starts_says_why() -> None:
    outcome = simulate(read_lines(lines(HOST, job("a", 0, 10), job("huge", 0, 10, 3)), "t", 24))
    never = [row for row in report.schedule(outcome) if row["start_s"] is None]
    assert [(row["job"], row["blockers"][0]["code"]) for row in never] == [("huge", "no_such_gpu")]


def test_a_paused_pool_ends_the_simulation_all_the_same() -> None:
    outcome = simulate(read_lines(lines(HOST, job("a", 0, 10)), "t", 24), PoolRules("main", paused=True))
    assert outcome.waiting["a"][0].code == "queue_paused"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a JSON object"),
        ("[1]", "a JSON object with"),
        ('{"job": "a"}', "submit_s is missing"),
        ('{"job": "a", "submit_s": 0, "runs_s": 1, "gpu": 1}', 'unknown key "gpu"'),
        ('{"job": "a", "submit_s": "0", "runs_s": 1}', "submit_s must be a number"),
        ('{"job": "a", "submit_s": -1, "runs_s": 1}', "it must be 0 or more"),
        ('{"host": "a", "shares": 9}', "divided into 2 to 8"),
    ],
)
def test_a_line_that_is_wrong_is_named(line: str, said: str) -> None:
    with pytest.raises(TraceError, match="t:2: ") as caught:
        read_lines([json.dumps(HOST), line], "t", 24)
    assert said in str(caught.value)


NODES = "sn,cpu_milli,memory_mib,gpu,model\nn1,96000,400000,2,T4\nn2,96000,400000,1,P100\nn3,96000,400000,0,\n"
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "p1,1500,100,1,1000,T4|V100,LS,Running,0,7200,600\n"
    "p2,1000,100,1,250,,BE,Running,5,65,5\n"
    "p3,1000,100,0,0,,LS,Failed,7,27,\n"
)


def test_the_tables_of_2023_are_read_with_what_they_say() -> None:
    trace = alibaba.read(NODES.splitlines(), PODS.splitlines(), "x")
    assert [(host.name, host.cards, host.model) for host in trace.hosts] == [("n1", 2, "T4"), ("n2", 1, "P100")]
    one, two, three = trace.jobs
    assert (one.submit_ms, one.runs_ms, one.hours_ms) == (0, 6_600_000, 4 * HOUR_MS)
    assert one.needs == Needs(1, 1, cpus=2, memory_mib=100, models=("T4", "V100"))
    assert (two.needs.gpu_memory_mib, two.priority, two.preemptible) == (alibaba.CARD_MIB // 4, 0, True)
    assert (three.needs.gpus_max, three.runs_ms) == (0, 20_000)
    assert any("gpu_milli" in note for note in trace.notes)
    assert {parts for host in divided(trace).hosts for parts in host.shares} == {1, 4}


def test_a_part_of_the_pods_is_dealt_out_to_people_and_nothing_else_changes() -> None:
    pods = [PODS.splitlines()[0], *(f"p{n},1000,100,1,1000,,LS,Running,{n},{n + 60},{n}" for n in range(400))]
    agents, both = (alibaba.read(NODES.splitlines(), pods, "x", people=part) for part in (0.0, 0.25))
    people = [job for job in both.jobs if job.human]
    assert 60 < len(people) < 140 and all(job.agent == job.owner for job in people)
    assert [(job.id, job.owner, job.submit_ms) for job in both.jobs] == [
        (job.id, job.owner, job.submit_ms) for job in agents.jobs
    ]
    assert not any(job.human for job in agents.jobs)
    told = report.summary(simulate(both, PoolRules("main", reserve=1)))["by_asker"]
    assert told["people"]["count"] == len(people) and told["people"]["mean"] < told["agents"]["mean"]


def test_a_table_without_times_is_refused() -> None:
    table = [line.rsplit(",", 5)[0] for line in PODS.splitlines()]
    with pytest.raises(TraceError, match="is missing"):
        alibaba.read(NODES.splitlines(), table, "x")


def test_a_folder_is_found_to_be_such_tables(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "pods_default.csv").write_text(PODS)
    (tmp_path / "a_pods.csv").write_text(PODS.replace("p1", "q1"))
    assert opening.open_trace(str(tmp_path)).jobs[0].id == "p1"
    assert opening.open_trace(str(tmp_path / "a_pods.csv")).jobs[0].id == "q1"
    with pytest.raises(TraceError, match="no file or folder"):
        opening.open_trace(str(tmp_path / "nothing"))


def test_a_fleet_is_thinned_to_the_card() -> None:
    hosts = tuple(SimHost(f"h{n}", 4) for n in range(5))
    trace = Trace("t", hosts, (SimJob("a", 0, 1, HOUR_MS, Needs()),))
    assert thinned(trace, cards=10, seed=2).cards == 10
    assert len(thinned(trace, hosts=3).hosts) == 3
    with pytest.raises(TraceError, match="1 to 20"):
        thinned(trace, cards=21)


def test_options_of_the_invented_trace_are_checked() -> None:
    for wrong in ("synthetic:cards=0", "synthetic:foo=1", "synthetic:jobs=x", "synthetic:jobs=-1"):
        with pytest.raises(TraceError):
            opening.open_trace(wrong)
