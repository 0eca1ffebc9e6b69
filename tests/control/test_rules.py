"""What people set at run time: it holds at once, over restarts, and in the very transaction of a grant."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.server.errors import BadRequest, Busy, CotenantError, Forbidden, NotFound, QuotaExceeded
from cotenant.server.model.caller import Caller

PERSON = Caller("ada", "human", "ada", frozenset({"read", "write", "operate", "admin"}), "", door="operate")
ALICE = Caller("alice-bot", "agent", "alice", frozenset({"read", "write"}), "")
BOB = Caller("bob-bot", "agent", "bob", frozenset({"read", "write"}), "")


async def do(bench: Bench, verb: str, **args: Any) -> dict[str, Any]:
    return await bench.control.operate(PERSON, verb, args, "a test")


async def acquire(bench: Bench, caller: Caller, gpus: int = 1, **more: Any) -> Any:
    return await bench.control.leases.acquire(caller, gpus=gpus, **more)


async def test_a_cap_holds_at_once_and_over_a_restart(tmp_path: Path) -> None:
    async with Bench(tmp_path, Machine(cards=4)) as bench:
        changed = await do(bench, "quota.set", scope="pool", name="default", key="cap", value=1)
        assert (changed["old"], changed["new"], changed["set_by"]) == (None, 1, "ada")
        await acquire(bench, ALICE)
        with pytest.raises((QuotaExceeded, Busy), match="quota_pool"):
            await acquire(bench, ALICE)
        await bench.restart()
        with pytest.raises((QuotaExceeded, Busy), match="quota_pool"):
            await acquire(bench, ALICE)
        await do(bench, "quota.reset", scope="pool", name="default", key="cap")
        await acquire(bench, ALICE)
        types = [e.type for e in (await bench.control.views.list_events(PERSON, types=["rules.changed"])).events]
        assert types == ["rules.changed"] * 2


async def test_a_lowered_cap_marks_the_newest_and_lowest_and_they_can_be_evicted_in_one_step(tmp_path: Path) -> None:
    async with Bench(tmp_path, Machine(cards=4)) as bench:
        leases = []
        for _ in range(3):
            leases.append(await acquire(bench, ALICE))
            bench.clock.advance(1)
        lowered = await do(bench, "quota.set", scope="pool", name="default", key="cap", value=1)
        assert lowered["still_to_end_cards"] == 2
        assert {one["lease_id"] for one in lowered["excess"]} == {leases[1].lease_id, leases[2].lease_id}
        draining = [(await bench.control.leases.heartbeat(ALICE, one.lease_id)).draining for one in leases]
        assert draining == [False, True, True]
        evicted = await do(bench, "quota.evict-excess", pool="default")
        assert sorted(evicted["evicted"]) == sorted(one.lease_id for one in leases[1:])
        await bench.settle()
        assert (await do(bench, "quota.set", scope="pool", name="default", key="cap", value=1))["excess"] == []
        assert (await bench.control.views.get_lease(ALICE, leases[0].lease_id)).state in ("leased", "running")


async def test_a_cap_that_falls_between_decision_and_grant_is_obeyed(tmp_path: Path) -> None:
    """Each group of writes holds a change and grants that were decided before it."""
    async with Bench(tmp_path, Machine(cards=4)) as bench:
        for cap in (2, 3, 1, 4, 2):
            asks = [acquire(bench, caller) for caller in (ALICE, BOB) for _ in range(4)]
            change = do(bench, "quota.set", scope="pool", name="default", key="cap", value=cap)
            await asyncio.gather(*asks[:3], change, *asks[3:], return_exceptions=True)
        now, granted = None, 0
        held: set[str] = set()
        for event in sorted((await bench.control.views.list_events(PERSON, limit=500)).events, key=lambda e: e.id):
            if event.type == "rules.changed":
                now = int(event.new or 0)
            elif event.type == "lease.granted":
                held.add(event.lease_id or "")
                granted += 1
                assert now is None or len(held) <= now, "no grant above the cap as it stood then"
            elif event.type in ("lease.released", "lease.expired", "lease.revoked"):
                held.discard(event.lease_id or "")
        assert granted


async def test_caps_of_owners_and_agents_and_on_jobs_at_once(tmp_path: Path) -> None:
    async with Bench(tmp_path, Machine(cards=4)) as bench:
        await do(bench, "quota.set", scope="agent", name="alice-bot", key="cap", value=1)
        await acquire(bench, ALICE)
        with pytest.raises(CotenantError, match="over all pools the agent"):
            await acquire(bench, ALICE)
        await do(bench, "quota.set", scope="owner", name="bob", key="jobs", value=1)
        await acquire(bench, BOB)
        with pytest.raises(CotenantError, match="at once"):
            await acquire(bench, BOB)
        await do(bench, "quota.set", scope="pool", name="default", key="jobs", value=2)
        await do(bench, "quota.set", scope="owner", name="bob", key="jobs", value=None)
        with pytest.raises(CotenantError, match="everybody together"):
            await acquire(bench, BOB)
        told = {
            (r["scope"], r["name"], r["key"]): (r["value"], r["set_by"])
            for r in (await do(bench, "quota.list"))["rules"]
        }
        assert told["agent", "alice-bot", "cap"] == (1, "ada") and told["pool", "default", "jobs"] == (2, "ada")


async def test_a_paused_queue_starts_nothing_until_a_person_resumes_it(tmp_path: Path) -> None:
    async with Bench(tmp_path, Machine(cards=1)) as bench:
        await do(bench, "quota.set", scope="pool", name="default", key="paused", value=True)
        waiting = await acquire(bench, ALICE, when_full="queue")
        assert waiting.state == "queued"
        await do(bench, "quota.set", scope="pool", name="default", key="paused", value=False)
        await bench.settle()
        assert (await bench.control.views.get_lease(ALICE, waiting.lease_id)).state == "leased"


async def test_a_reservation_keeps_cards_for_its_owner_and_can_be_taken_back(tmp_path: Path) -> None:
    async with Bench(tmp_path, Machine(cards=2)) as bench:
        now = bench.clock.now_ms()
        hour = 3_600_000
        made = await do(
            bench, "reserve.add", pool="default", owner="alice", cards=2, begin_ms=now + hour, end_ms=now + 3 * hour
        )
        with pytest.raises(Busy, match="reserved for the owner"):
            await acquire(bench, BOB, hours=2)
        short = await acquire(bench, BOB, hours=0.5)
        assert short.state == "leased"
        mine = await acquire(bench, ALICE, hours=5)
        assert mine.state == "leased"
        with pytest.raises(BadRequest, match="cannot be reserved"):
            await do(
                bench,
                "reserve.add",
                pool="default",
                owner="bob",
                cards=1,
                begin_ms=now + 2 * hour,
                end_ms=now + 4 * hour,
            )
        later = await do(
            bench, "reserve.add", pool="default", owner="bob", cards=1, begin_ms=now + 3 * hour, end_ms=now + 4 * hour
        )
        listed = (await do(bench, "quota.list"))["reservations"]
        assert [r["reservation_id"] for r in listed] == [made["reservation_id"], later["reservation_id"]]
        await do(bench, "reserve.remove", reservation_id=made["reservation_id"])
        with pytest.raises(NotFound):
            await do(bench, "reserve.remove", reservation_id=made["reservation_id"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"scope": "galaxy", "name": "x", "key": "cap", "value": 1}, "scope must be one of"),
        ({"scope": "pool", "name": "nope", "key": "cap", "value": 1}, "no pool"),
        ({"scope": "pool", "name": "default", "key": "cup", "value": 1}, "has no rule"),
        ({"scope": "pool", "name": "default", "key": "cap", "value": -1}, "whole number"),
        ({"scope": "pool", "name": "default", "key": "cap", "value": "many"}, "whole number"),
        ({"scope": "pool", "name": "default", "key": "paused", "value": None}, "true or false"),
        ({"scope": "pool", "name": "default", "key": "order", "value": "lifo"}, "not one of"),
        ({"scope": "pool", "name": "default", "key": "windows", "value": ["always"]}, "is no window"),
        ({"scope": "pool", "name": "default", "key": "timezone", "value": "Mars/Olympus"}, "no time zone"),
        ({"scope": "pool", "name": "default", "key": "reserve", "value": 3}, "above cap"),
        ({"scope": "owner", "name": "a b", "key": "cap", "value": 3}, "name"),
        ({"scope": "owner", "name": "bob", "key": "cap"}, "value is missing"),
    ],
)
async def test_what_cannot_be_meant_is_refused_and_changes_nothing(
    tmp_path: Path, args: dict[str, Any], said: str
) -> None:
    async with Bench(tmp_path, Machine(cards=2)) as bench:
        await do(bench, "quota.set", scope="pool", name="default", key="cap", value=2)
        before = await do(bench, "quota.list")
        with pytest.raises(CotenantError, match=said):
            await do(bench, "quota.set", **args)
        assert await do(bench, "quota.list") == before


async def test_only_people_with_the_scope_change_rules(tmp_path: Path) -> None:
    async with Bench(tmp_path, Machine(cards=2)) as bench:
        args = {"scope": "pool", "name": "default", "key": "cap", "value": 9}
        for caller in (ALICE, Caller("eve", "human", "eve", frozenset({"read", "write"}), "", door="operate")):
            with pytest.raises(CotenantError):
                await bench.control.operate(caller, "quota.set", args, "because")


@pytest.mark.parametrize(("scope", "name"), [("owner", "alice"), ("agent", "alice-bot")])
async def test_a_priority_is_granted_above_the_token_until_it_is_reset(bench: Bench, scope: str, name: str) -> None:
    alice, bob = await bench.caller("alice-bot", "alice"), await bench.caller("bob-bot", "bob")
    with pytest.raises(Forbidden):
        await bench.submit(alice, priority="critical")
    await do(bench, "quota.set", scope=scope, name=name, key="max_priority", value="critical")
    job = await bench.submit(alice, priority="critical")
    assert bench.job(job)["priority"] == 30
    assert (await bench.control.views.quota_status(alice)).me.max_priority == "critical"
    with pytest.raises(Forbidden) as caught:
        await bench.submit(bob, priority="critical")
    assert caught.value.data == {"max_priority": 20}
    await do(bench, "quota.set", scope=scope, name=name, key="max_priority", value="batch")
    await bench.submit(alice, "again", priority="high")  # a grant adds to the token, it takes nothing away
    await do(bench, "quota.reset", scope=scope, name=name, key="max_priority")
    with pytest.raises(Forbidden):
        await bench.submit(alice, "more", priority="critical")
    with pytest.raises(BadRequest):
        await do(bench, "quota.set", scope=scope, name=name, key="max_priority", value="utmost")
