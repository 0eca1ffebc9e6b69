"""kill -9 of the server, of hostd, of the warm parent, of all, at random moments, while agents and jobs go on.

No job runs twice, no exit code is lost, no slot is in two leases, nothing acknowledged is missing, doctor finds nothing.
COTENANT_KILL_ROUNDS says how many kills are made (default 5), COTENANT_KILL_SEED repeats a run's choices.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakenvml import FakeNvml
from rig import FINAL, ROOT, Away, Client, Refusal, Rig, Server, rising, until

ROUNDS = int(os.environ.get("COTENANT_KILL_ROUNDS", "5"))
SEED = int(os.environ.get("COTENANT_KILL_SEED", str(random.randrange(1 << 30))))
CARDS = 4
CUDA = f"{sys.executable} {ROOT / 'tests' / 'lab' / 'fakecuda.py'}"


@dataclass
class Told:
    """What the server has acknowledged, by the clients' own notes."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)  # id -> what was asked
    cancelled: dict[str, str] = field(default_factory=dict)  # id -> the answer's status
    granted: dict[str, dict[str, Any]] = field(default_factory=dict)  # direct leases, id -> answer
    released: set[str] = field(default_factory=set)
    held: list[tuple[str, str, int, int]] = field(
        default_factory=list
    )  # card, lease, from and to in ns: certainly held
    wrong: list[str] = field(default_factory=list)


class Drivers:
    """Agents in threads of their own. Each repeats what was not answered under the same request_id."""

    def __init__(self, rig: Rig, server: Server, told: Told, cuda: str | None) -> None:
        self._rig, self._server, self._told, self._cuda = rig, server, told, cuda
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def add(self, name: str, work: Callable[[Client, random.Random, str, int], None], owner: str) -> None:
        client = self._server.client(name, owner, autopilot=True)
        chance = random.Random(f"{SEED} {name}")

        def drive() -> None:
            number = 0
            try:
                while not self._stop.is_set():
                    number += 1
                    work(client, chance, name, number)
            except Exception as error:  # noqa: BLE001 (told at the end, whatever it was)
                self._told.wrong.append(f"{name}: {type(error).__name__}: {error}")

        self._threads.append(threading.Thread(target=drive, name=name))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150)
            assert not thread.is_alive(), f"{thread.name} hangs"

    # ---- what they do

    def jobs(self, client: Client, chance: random.Random, name: str, number: int) -> None:
        """One job: mostly short; some are cancelled, signalled, run into their limit, or try again."""
        kind = chance.choices(
            ["plain", "cancel", "signal", "limit", "retry"], [60, 12, 8, 8, 2 if ROUNDS >= 50 else 0]
        )[0]
        code = chance.choice([0, 0, 3, 7, 255])
        spec: dict[str, Any] = {"gpus": chance.choice([0, 1, 1, 2]), "stop_grace_s": 1}
        work = f"sleep {chance.uniform(0, 0.5):.2f}"
        if self._cuda and spec["gpus"] and kind == "plain":
            work = f"{self._cuda} --mem 1G --count {spec['gpus']} --for {chance.uniform(0, 0.5):.2f} > /dev/null || say NO_CUDA"
        if kind == "cancel":
            work = f"sleep {chance.choice([0.2, 600])}"
        elif kind == "signal":
            code, work = 5, "trap 'say END 5; exit 5' USR1; while :; do sleep 0.05; done"
        elif kind == "limit":
            spec["hours"], work = 0.0004, "sleep 600"  # 1.44 s
        elif kind == "retry":
            code, spec["max_attempts"], spec["retry_on"] = 9, 2, ["code"]
        answer = client.surely(
            "submit_job", command=self._rig.command(work, code), request_id=f"{name}-{number}", **spec
        )
        job_id = answer["job_id"]
        self._told.jobs[job_id] = {"kind": kind, "code": code, **spec}
        if kind == "cancel":
            time.sleep(chance.uniform(0, 0.4))
            self._told.cancelled[job_id] = client.surely("cancel_job", job_id=job_id)["status"]
        elif kind == "signal":
            self._signal(client, job_id)
        elif chance.random() < 0.5:
            until(lambda: client.job(job_id)["state"] in FINAL or self._stop.is_set(), f"{job_id} ends", 120)

    def _signal(self, client: Client, job_id: str) -> None:
        """Ask until it has ended: a signal may come before the command has its trap, or reach nobody."""

        def over() -> bool:
            try:
                client.call("signal_job", job_id=job_id, signal="USR1")
            except Refusal as refusal:
                assert refusal.code in ("not_running", "unknown_attempt", "host_unreachable", "outcome_unknown"), (
                    refusal
                )
            except Away:
                pass
            time.sleep(0.05)
            return bool(client.job(job_id)["state"] in FINAL)

        try:
            until(over, f"{job_id} ends by its signal", 120)
        except AssertionError as error:
            seen = client.surely("list_events", job_id=job_id, limit=50)["events"]
            raise AssertionError(f"{error}: {client.job(job_id)} {seen}") from None

    def leases(self, client: Client, chance: random.Random, name: str, number: int) -> None:
        """One direct lease: asked for, kept a while, given back."""
        try:
            answer = client.surely(
                "acquire_lease", gpus=chance.choice([1, 1, 2]), when_full=chance.choice(["refuse", "queue"]),
                request_id=f"{name}-{number}",
            )  # fmt: skip
        except Refusal as refusal:
            assert refusal.code in ("busy", "quota_exceeded", "host_down", "occupied"), refusal
            time.sleep(0.05)
            return
        lease_id = answer["lease_id"]
        since = time.time_ns()
        if answer["state"] == "queued":
            deadline = time.monotonic() + chance.choice([0.5, 30])
            while answer["state"] == "queued" and time.monotonic() < deadline and not self._stop.is_set():
                answer = client.surely("wait_job", job_id=lease_id, max_wait_s=0.3)
            since = time.time_ns()
            if answer["state"] == "queued":
                answer = client.surely("release_lease", lease_id=lease_id, request_id=f"{name}-{number}-back")
                self._told.released.add(lease_id)
                return
        if answer["state"] not in ("leased", "running"):
            return  # a repeat of an ask that was granted, refused by the host and revoked
        self._told.granted[lease_id] = answer
        for _ in range(chance.randrange(3)):
            time.sleep(chance.uniform(0, 0.2))
            try:
                beat = client.surely("heartbeat", lease_id=lease_id)
            except Refusal as refusal:
                self._told.wrong.append(f"{lease_id} was lost: {refusal}")
                return
            if beat["fence"] != answer["fence"]:
                self._told.wrong.append(f"{lease_id} changed its fence from {answer['fence']} to {beat['fence']}")
        until_ns = time.time_ns()
        client.surely("release_lease", lease_id=lease_id, request_id=f"{name}-{number}-back")
        self._told.released.add(lease_id)
        self._told.held += [(slot["uuid"], lease_id, since, until_ns) for slot in answer["slots"]]


def rounds(server: Server, chance: random.Random, told: Told) -> dict[str, int]:
    """Kill and restart; returns how often what was killed. Ends early when an agent met something wrong."""
    counts = dict.fromkeys(("server", "hostd", "warm", "server and hostd", "all", "server while it starts"), 0)
    for _ in range(ROUNDS):
        if told.wrong:
            break
        time.sleep(chance.uniform(0.02, 1.0))
        what = chance.choice(list(counts))
        counts[what] += 1
        warm, hostd = server.warm_pid(), server.hostd_pid()
        if what in ("warm", "all") and warm is not None:
            server.kill_warm()
        if what in ("server", "server and hostd", "all", "server while it starts"):
            first = chance.random() < 0.5
            if what in ("server and hostd", "all") and first and hostd is not None:
                server.kill_hostd()
            server.kill()
            if what in ("server and hostd", "all") and not first:
                server.kill_hostd()
            if what == "server while it starts":
                server.spawn()
                time.sleep(chance.uniform(0.3, 1.6))
                server.kill()
            server.start()
        elif what == "hostd":
            server.kill_hostd()
    return counts


@pytest.mark.slow
@pytest.mark.timeout(240 + 8 * ROUNDS)
@pytest.mark.parametrize("cards", ["simulated", "driver"])
def test_kills_at_random_moments(
    make_rig: Callable[..., Rig], cards: str, nvml: FakeNvml, request: pytest.FixtureRequest
) -> None:
    """On simulated cards, and on those of a (fake) driver, where hostd must know its own among the processes it sees."""
    print(f"COTENANT_KILL_SEED={SEED}")
    env = nvml.env(request.getfixturevalue("nvml_libdir")) if cards == "driver" else None
    rig = make_rig(env=env)
    server = rig.server(gpus=0 if env else CARDS, config="[hosts.local]\ncpu_jobs = 3\n")
    told = Told()
    drivers = Drivers(rig, server, told, CUDA if env else None)
    for number in range(3):
        drivers.add(f"jobs{number}", drivers.jobs, "ann")
    for number in range(2):
        drivers.add(f"leases{number}", drivers.leases, "ben")
    looker = server.client("looker", "eve")
    drivers.start()
    began = time.monotonic()
    try:
        counts = rounds(server, random.Random(SEED), told)
    finally:
        drivers.join()
    assert not told.wrong, told.wrong[:10]
    left = set(told.jobs)

    def all_ended() -> bool:
        left.difference_update([job_id for job_id in left if looker.job(job_id)["state"] in FINAL])
        return not left

    try:
        until(all_ended, deadline_s=120)
        until(lambda: looker.surely("list_gpus")["free"] == CARDS, "every card is free again")
    except AssertionError:
        raise AssertionError(f"seed {SEED}: {[looker.job(job_id) for job_id in sorted(left)][:3]}") from None
    took = time.monotonic() - began
    check_jobs(rig, server, told)
    check_cards(rig, told)
    check_records(server, told)
    assert not rig.carriers(COTENANT_STATE_DIR=str(server.data / "hostd" / "state")), "a job's process was left over"
    print(f"{ROUNDS} kills in {took:.0f} s {counts}; {len(told.jobs)} jobs, {len(told.granted)} direct leases, "
          f"{len(told.cancelled)} cancels; seed {SEED}")  # fmt: skip


def check_jobs(rig: Rig, server: Server, told: Told) -> None:
    """Each ran as often as it should, and ended as it says itself."""
    begun: dict[str, list[str]] = {}
    codes: dict[str, int] = {}
    for what, job_id, attempt_id, _, _, *rest in rig.lines():
        assert what != "OVERLAP", f"two attempts of {job_id} lived at once (seed {SEED})"
        assert what != "NO_CUDA", f"{attempt_id} could not use its card (seed {SEED})"
        if what == "BEGIN":
            begun.setdefault(job_id, []).append(attempt_id)
        else:
            codes[attempt_id] = int(rest[0])
    assert set(begun) <= set(told.jobs), "a job ran that nobody asked for"
    with server.rows() as c:
        jobs = {row["id"]: dict(row) for row in c.execute("SELECT * FROM job")}
        attempts: dict[str, list[dict[str, Any]]] = {}
        for row in c.execute("SELECT * FROM attempt ORDER BY epoch"):
            attempts.setdefault(row["job_id"], []).append(dict(row))
    assert set(told.jobs) == set(jobs), "a job is missing, or was made twice"
    for job_id, asked in told.jobs.items():
        job, tries = jobs[job_id], attempts.get(job_id, [])
        seen = begun.get(job_id, [])
        about = f"{job_id} {asked} {job['state']} {job['message']!r} {seen} (seed {SEED})"
        assert len(seen) == len(set(seen)), f"an attempt began twice: {about}"
        assert set(seen) <= {attempt["id"] for attempt in tries}, about
        # an attempt that could not start is none of the job's tries; of those that ran there is one, but for a retry
        assert len(seen) <= (2 if asked["kind"] == "retry" else 1), about
        for attempt in tries:
            if attempt["id"] in codes:
                assert attempt["exit_code"] == codes[attempt["id"]], f"another exit code: {attempt} {about}"
        if asked["kind"] == "signal" and job["failure_class"] == "signal":
            # the signal came before the command had its trap, and did what signals do
            assert tries[-1]["id"] not in codes and "signal 10 from cotenant" in job["message"], about
        elif asked["kind"] in ("plain", "signal", "retry"):
            assert job["state"] == ("failed" if asked["code"] else "succeeded"), about
            assert job["exit_code"] == asked["code"], about
        elif asked["kind"] == "limit":
            assert (job["state"], job["failure_class"]) == ("failed", "time_limit"), about
        else:
            wanted = {"cancelled": ("cancelled",), "stopping": ("cancelled", "succeeded")}
            assert job["state"] in wanted.get(told.cancelled[job_id], FINAL), about


def check_cards(rig: Rig, told: Told) -> None:
    """No card was used by two at once, by the clock of those who used it."""
    spans = list(told.held)
    open_: dict[str, tuple[list[str], int]] = {}
    for what, _, attempt_id, at, cards, *_ in rig.lines():
        if cards == "-":
            continue
        if what == "BEGIN":
            open_[attempt_id] = (cards.split(","), int(at))
        elif attempt_id in open_:
            uuids, since = open_.pop(attempt_id)
            spans += [(uuid, attempt_id, since, int(at)) for uuid in uuids]
    # one that was killed cannot say until when: at its begin it certainly had its cards
    spans += [(uuid, attempt_id, since, since) for attempt_id, (uuids, since) in open_.items() for uuid in uuids]
    by_card: dict[str, list[tuple[int, int, str]]] = {}
    for uuid, who, since, to in spans:
        by_card.setdefault(uuid, []).append((since, to, who))
    assert len(by_card) == CARDS
    for uuid, used in by_card.items():
        used.sort()
        for (_, end, one), (start, _, other) in zip(used, used[1:], strict=False):
            assert end <= start, f"{uuid} was used by {one} and {other} at once (seed {SEED})"


def check_records(server: Server, told: Told) -> None:
    """The records hold all that was acknowledged, once, and break no invariant."""
    server.healthy()
    with server.rows() as c:
        leases = {row["id"]: dict(row) for row in c.execute("SELECT * FROM lease WHERE kind = 'direct'")}
    for lease_id, answer in told.granted.items():
        assert leases[lease_id]["fence"] == answer["fence"], (lease_id, SEED)
    for lease_id in told.released:
        assert leases[lease_id]["state"] in ("released", "withdrawn"), (leases[lease_id], SEED)
    granted = server.events("job.placed", "lease.granted")
    assert rising(event["args"]["fence"] for event in granted), f"fences fell (seed {SEED})"
    events = {event["lease_id"] for event in granted}
    assert set(told.granted) <= events
    ends = {event["job_id"] for event in server.events("job.succeeded", "job.failed", "job.cancelled")}
    assert ends == set(told.jobs), "every job has one end in the log"
    assert {e["job_id"] for e in server.events("job.submitted")} == set(told.jobs)
    assert rising(int(event["new"]) for event in server.events("server.started"))
