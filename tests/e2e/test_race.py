"""Fifty agents race for eight cards over real HTTP: never two holders, fences only rise, every cap holds at every grant.

COTENANT_RACE_S is how long they race, in seconds (default 5).
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from rig import FINAL, Client, Refusal, Rig, Server, rising, until

RACE_S = float(os.environ.get("COTENANT_RACE_S", "5"))
AGENTS = 50
CARDS = 8
CAP, RESERVE, OWNER_CAP, AGENT_CAP = 7, 2, 3, 2
CONFIG = f"""\
[pools.default]
cap = {CAP}
reserve = {RESERVE}
owner_cap = {OWNER_CAP}
agent_cap = {AGENT_CAP}
"""
REFUSALS = ("busy", "quota_exceeded")


class Race:
    """What the racers know of each other: who was told that a card is theirs and has not begun to give it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds: dict[str, str] = {}
        self._fences: dict[str, int] = {}
        self.wrong: list[str] = []
        self.grants = self.refusals = self.jobs = self.calls = 0
        self.slowest_s = 0.0
        self.over = threading.Event()

    def told(self, lease: dict[str, Any]) -> None:
        with self._lock:
            self.grants += 1
            for slot in lease["slots"]:
                card = slot["uuid"]
                if (other := self._holds.get(card)) is not None:
                    self.wrong.append(f"{card} is given to {lease['lease_id']} while {other} has it")
                if lease["fence"] <= self._fences.get(card, 0):
                    self.wrong.append(f"{card}: fence {lease['fence']} after {self._fences[card]}")
                self._holds[card] = lease["lease_id"]
                self._fences[card] = lease["fence"]

    def gives_back(self, lease: dict[str, Any]) -> None:
        with self._lock:
            for slot in lease["slots"]:
                if self._holds.get(slot["uuid"]) == lease["lease_id"]:
                    del self._holds[slot["uuid"]]


def racer(race: Race, client: Client, name: str) -> None:
    """Asks, holds for a moment, gives back; sometimes waits in line, sometimes submits a job instead."""
    chance = random.Random(name)
    number = 0

    def call(tool: str, **arguments: Any) -> dict[str, Any]:
        began = time.monotonic()
        try:
            return client.call(tool, **arguments)
        finally:
            took = time.monotonic() - began
            race.calls += 1
            if "max_wait_s" not in arguments:
                race.slowest_s = max(race.slowest_s, took)

    while not race.over.is_set():
        number += 1
        try:
            what = chance.choices(["acquire", "queue", "submit"], [90, 6, 4])[0]
            if what == "submit":
                job = call("submit_job", command=["true"], gpus=chance.choice([0, 1, 1, 2]), request_id=f"j{number}")
                race.jobs += 1
                while not race.over.is_set() and job["state"] not in FINAL:
                    job = call("wait_job", job_id=job["job_id"], max_wait_s=1)
                continue
            lease = call(
                "acquire_lease", gpus=chance.choice([1, 1, 1, 2]), request_id=f"l{number}",
                when_full="queue" if what == "queue" else "refuse",
            )  # fmt: skip
            while lease["state"] == "queued" and not race.over.is_set():
                lease = call("wait_job", job_id=lease["lease_id"], max_wait_s=1)
            if lease["state"] != "queued":
                race.told(lease)
                for _ in range(chance.randrange(3)):
                    time.sleep(chance.uniform(0, 0.02))
                    beat = call("heartbeat", lease_id=lease["lease_id"])
                    if beat["fence"] != lease["fence"]:
                        race.wrong.append(f"{lease['lease_id']} changed its fence")
                race.gives_back(lease)
            call("release_lease", lease_id=lease["lease_id"], request_id=f"l{number}-back")
        except Refusal as refusal:
            race.refusals += 1
            if refusal.code not in REFUSALS:
                race.wrong.append(f"{name}: {refusal.code}: {refusal}")
            time.sleep(chance.uniform(0, 0.05))
        except Exception as error:  # noqa: BLE001 (told at the end, whatever it was)
            race.wrong.append(f"{name}: {type(error).__name__}: {error}")
            return


@pytest.mark.timeout(120 + 4 * int(RACE_S))
def test_fifty_agents_race_for_eight_cards(rig: Rig) -> None:
    server = rig.server(gpus=CARDS, config=CONFIG)
    race = Race()
    chief = server.chief()
    threads, humans = [], set()
    for number in range(AGENTS):
        human = number % 10 == 9
        name, owner = f"racer{number}", f"owner{number % 7}"
        if human:
            humans.add(name)
        made = chief.operate(
            "token.create", name=name, kind="human" if human else "agent", owner=owner, scopes=["read", "write"]
        )
        threads.append(threading.Thread(target=racer, args=(race, Client(server, made["token"]), name), name=name))
    looker = server.client("looker")
    waits = []
    began, spent = time.monotonic(), cpu_s(server)
    for thread in threads:
        thread.start()
    while time.monotonic() < began + RACE_S:
        asked = time.monotonic()
        looker.call("quota_status")
        waits.append(time.monotonic() - asked)
        time.sleep(0.05)
    race.over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"{thread.name} hangs"
    took, spent = time.monotonic() - began, cpu_s(server) - spent
    assert not race.wrong, (len(race.wrong), race.wrong[:10])
    assert race.grants > RACE_S, (race.grants, race.refusals, race.jobs)
    until(lambda: not looker.call("list_jobs", state="active")["jobs"], "all jobs end")
    until(lambda: looker.call("list_gpus")["free"] == CARDS, "every card is free again")
    granted = replay(server, humans)
    server.healthy()
    assert max(waits) < 5, f"the server did not answer for {max(waits):.1f} s"
    print(f"{AGENTS} agents, {CARDS} cards, {took:.1f} s: {race.grants / took:.0f} direct grants/s, {granted / took:.0f} grants/s"
          f" in all, {race.calls / took:.0f} calls/s, {race.jobs} jobs, {race.refusals} refusals; an onlooker's quota_status"
          f" p50 {statistics.median(waits) * 1000:.0f} ms, worst {max(waits) * 1000:.0f} ms; slowest call {race.slowest_s:.2f} s;"
          f" server CPU {1000 * spent / race.calls:.1f} ms a call, {100 * spent / took:.0f} % of a core")  # fmt: skip


def cpu_s(server: Server) -> float:
    """Of the server's process so far."""
    assert server.process is not None
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def replay(server: Server, humans: set[str]) -> int:
    """Go through the log alone: at each grant, who holds what, and does every cap hold? Returns how many grants."""
    callers: dict[str, str] = {}  # who asked, by job or lease
    holding: dict[str, dict[str, Any]] = {}
    slots: dict[tuple[str, ...], str] = {}
    fences, granted = [], 0
    for event in server.events():
        kind, lease_id = event["type"], event["lease_id"]
        if kind in ("job.submitted", "lease.queued"):
            callers[event["job_id"] or lease_id] = event["caller"]
        elif kind in ("job.placed", "lease.granted"):
            granted += 1
            caller = callers.get(event["job_id"] or lease_id, event["caller"])
            args = event["args"]
            fences.append(args["fence"])
            cards = [tuple(map(str, slot)) for slot in args["slots"]]
            for card in cards:
                assert card not in slots, f"{card} is in {slots[card]} and granted to {lease_id}"
                slots[card] = lease_id
            units = sum(1 for card in cards if card[2] != "cpu")
            assert units * 840 == args["units"], event
            new = {"owner": event["owner"], "caller": caller, "human": caller in humans, "units": units, "cards": cards}
            holding[lease_id] = new
            if units:
                check_caps(holding, new)
        elif kind in ("lease.released", "lease.expired", "lease.revoked", "lease.requeued"):
            for card in holding.pop(lease_id)["cards"]:
                del slots[card]
    assert rising(fences)
    assert not holding, holding
    return granted


def check_caps(holding: dict[str, dict[str, Any]], new: dict[str, Any]) -> None:
    """The use with `new` is within every cap that a grant to it must keep."""
    used: defaultdict[str, int] = defaultdict(int)
    for one in holding.values():
        used["all"] += one["units"]
        used["agents"] += 0 if one["human"] else one["units"]
        used["owner"] += one["units"] if one["owner"] == new["owner"] else 0
        used["caller"] += one["units"] if one["caller"] == new["caller"] else 0
    assert used["all"] <= CAP, (used, new)
    assert new["human"] or used["agents"] <= CAP - RESERVE, (used, new)
    assert used["owner"] <= OWNER_CAP, (used, new)
    assert used["caller"] <= AGENT_CAP, (used, new)
