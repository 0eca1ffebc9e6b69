"""What is kept for the first of a pool that does not fit, who may pass it, and that nobody starves."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.world import (
    UNITS_PER_CARD,
    Ask,
    Blocker,
    GiveUp,
    Holding,
    HostView,
    Needs,
    Policy,
    PoolRules,
    Reservation,
    Slot,
    Spent,
    Start,
    Window,
    World,
)

MINUTE = 60_000
HOUR = 60 * MINUTE
NOW = 1_800_000_000_000  # a Friday, 08:00 UTC
POLICY = Policy(cleaning_s=0)
STOP_MS = 10_000  # the stop ladder: known ends are so much later than hard ends

look = settings(
    max_examples=int(os.environ.get("COTENANT_EXAMPLES", "60")),
    deadline=None,
    derandomize="COTENANT_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def fleet(*cards: int) -> tuple[tuple[HostView, ...], tuple[Slot, ...]]:
    hosts = tuple(HostView(f"h{n}", cpus=8) for n in range(len(cards)))
    slots = tuple(
        Slot(f"h{n}", f"h{n}-c{i}", 0, 1, i, "main", "gpu", 80_000)
        for n, count in enumerate(cards)
        for i in range(count)
    )
    return hosts, slots


def ask(name: str, gpus: int = 1, hours: float = 1, **more: Any) -> Ask:
    wish = Needs(gpus_min=gpus, gpus_max=more.pop("upto", gpus), **more.pop("needs", {}))
    more = {"owner": "alice", "priority": 10, "queued_at_ms": NOW, **more}
    owner = more.pop("owner")
    return Ask(
        name, "job", owner, f"{owner}-bot", more.pop("human", False), "main", wish,
        more.pop("priority"), more.pop("queued_at_ms"), int(hours * HOUR), **more,
    )  # fmt: skip


def hold(name: str, *slots: tuple[str, int], hours: float = 1, **more: Any) -> Holding:
    keys = tuple((host, f"{host}-c{index}", 0) for host, index in slots)
    more = {"owner": "bob", "human": False, **more}
    owner = more.pop("owner")
    return Holding(
        name,
        "job",
        owner,
        f"{owner}-bot",
        more.pop("human"),
        "main",
        keys,
        NOW - HOUR,
        NOW + int(hours * HOUR) - STOP_MS,
        **more,
    )


def world(cards: tuple[int, ...], *asks: Ask, holdings: tuple[Holding, ...] = (), **more: Any) -> World:
    hosts, slots = fleet(*cards)
    rules = more.pop("rules", {})
    return World(hosts, slots, (PoolRules("main", **rules),), holdings=holdings, asks=asks, **more)


def outcome(here: World, now_ms: int = NOW) -> dict[str, list[str]]:
    """Ask id -> its slots as ``h0:1``, or the codes of its blockers."""
    decided = decide(here, now_ms, POLICY)
    found = {name: [b.code for b in why] for name, why in decided.blockers.items()}
    index = {slot.key: f"{slot.host}:{slot.index}" for slot in here.slots}
    for decision in decided.decisions:
        if isinstance(decision, Start):
            found[decision.ask_id] = [index[key] for key in decision.slots]
    return found


def blocker(here: World, name: str) -> Blocker:
    return decide(here, NOW, POLICY).blockers[name][0]


# ---- backfill ---------------------------------------------------------------------------------


def test_a_small_ask_passes_a_big_one_if_it_is_over_in_time() -> None:
    here = world(
        (4,), ask("big", 4), ask("short", hours=0.9), ask("long", hours=3), holdings=(hold("l", ("h0", 0), hours=1),)
    )
    assert outcome(here) == {"big": ["busy"], "short": ["h0:1"], "long": ["reserved_for"]}
    (booked,) = decide(here, NOW, POLICY).bookings
    assert (booked.ask_id, booked.at_ms, len(booked.slots)) == ("big", NOW + HOUR, 4)
    kept_off = blocker(here, "long")
    assert kept_off.until_ms == NOW + HOUR and dict(kept_off.names)["ahead"] == "big"


def test_a_long_ask_passes_on_cards_that_the_first_does_not_need() -> None:
    here = world((2, 4), ask("big", 4), ask("long", hours=90), holdings=(hold("l", ("h1", 0)),))
    assert outcome(here) == {"big": ["busy"], "long": ["h0:0"]}


def test_whoever_is_over_in_time_goes_into_the_gap_and_leaves_the_rest_to_others() -> None:
    here = world((1, 4), ask("big", 4), ask("short", hours=0.5), ask("long", hours=9), holdings=(hold("l", ("h1", 0)),))
    assert outcome(here) == {"big": ["busy"], "short": ["h1:1"], "long": ["h0:0"]}


def test_only_the_first_has_a_booking() -> None:
    here = world(
        (4,),
        ask("a", 4),
        ask("b", 3),
        ask("c", hours=0.5),
        holdings=(hold("l", ("h0", 0)), hold("m", ("h0", 1), hours=2)),
    )
    assert [b.ask_id for b in decide(here, NOW, POLICY).bookings] == ["a"]
    assert outcome(here)["c"] == ["h0:2"]


def test_what_has_no_known_end_keeps_no_card_idle() -> None:
    here = world((2,), ask("big", 2), ask("long", hours=500), holdings=(hold("l", ("h0", 0), lost=True),))
    assert outcome(here) == {"big": ["busy"], "long": ["h0:1"]}
    assert decide(here, NOW, POLICY).bookings == ()


def test_room_under_the_cap_is_kept_too() -> None:
    here = world(
        (8,), ask("big", 3), ask("short", hours=0.5), ask("long", hours=5),
        holdings=(hold("l", ("h0", 0), ("h0", 1)),), rules={"cap": 4},
    )  # fmt: skip
    assert outcome(here)["big"] == ["quota_pool"]
    assert outcome(here)["short"] == ["h0:2"] or outcome(here)["short"] == ["h0:3"]
    # at the end of l there is room for 4: 3 for the first, 1 beside it
    assert outcome(here)["long"][0].startswith("h0:")
    two = replace(here, asks=(*here.asks, ask("more", hours=5, queued_at_ms=NOW + 1)))
    assert outcome(two)["more"] in (["quota_pool"], ["reserved_for"], ["quota_pool", "reserved_for"])


def test_a_person_passes_an_agent_that_waits_at_the_reserve() -> None:
    here = world((2,), ask("a"), ask("p", human=True, owner="eve", hours=9), rules={"reserve": 2})
    assert outcome(here) == {"a": ["reserve"], "p": ["h0:0"]}


def test_processors_are_kept_beside_the_cards() -> None:
    big = ask("big", 1, needs={"cpus": 8})
    here = world(
        (4,),
        big,
        ask("long", hours=9, needs={"cpus": 1}),
        ask("none", hours=9),
        holdings=(hold("l", ("h0", 0), cpus=4),),
    )
    assert outcome(here)["big"] == ["host_cpu"]
    assert outcome(here)["long"] == ["reserved_for"]
    assert outcome(here)["none"][0].startswith("h0:")


def test_a_gang_is_booked_on_all_its_hosts() -> None:
    gang = ask("gang", 2, needs={"nodes": 2})
    here = world((2, 2, 1), gang, ask("long", hours=9), ask("longer", hours=9), holdings=(hold("l", ("h1", 0)),))
    (booked,) = decide(here, NOW, POLICY).bookings
    assert sorted({key[0] for key in booked.slots}) == ["h0", "h1"]
    assert outcome(here) == {"gang": ["busy"], "long": ["h2:0"], "longer": ["reserved_for"]}


@st.composite
def busy_worlds(draw: st.DrawFn) -> World:
    cards = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    hosts, slots = fleet(*cards)
    holdings = []
    for number, slot in enumerate(slots):
        if draw(st.booleans()):
            assert slot.index is not None
            end = draw(st.sampled_from((0.5, 1, 2, 5)))
            holdings.append(hold(f"l{number}", (slot.host, slot.index), hours=end, cpus=draw(st.integers(0, 2)),
                                 lost=draw(st.integers(0, 9)) == 0))  # fmt: skip
    waiting = tuple(
        ask(
            f"a{n}", draw(st.integers(0, 4)), draw(st.sampled_from((0.25, 0.75, 1.5, 3, 9))), priority=draw(st.sampled_from((0, 10, 20))),
            queued_at_ms=NOW - draw(st.integers(0, 40)) * HOUR, owner=draw(st.sampled_from(("alice", "bob", "eve"))),
            needs={"cpus": draw(st.sampled_from((0, 0, 2, 4))), "nodes": draw(st.sampled_from((1, 1, 1, 2)))},
        )
        for n in range(draw(st.integers(1, 8)))
    )  # fmt: skip
    total = sum(cards)
    rules = {
        "cap": draw(st.sampled_from((None, None, max(1, total - 1), total))), "reserve": draw(st.sampled_from((0, 0, 1))),
        "order": draw(st.sampled_from(("fifo", "fairshare", "shortest"))),
    }  # fmt: skip
    return World(hosts, slots, (PoolRules("main", **rules),), holdings=tuple(holdings), asks=waiting)


def run_out(here: World, first: str, at_ms: int) -> World:
    """The world at `at_ms` if everything runs as long as it may, and nobody but `first` waits any more."""
    kept = tuple(lease for lease in here.holdings if lease.lost or lease.hard_end_ms + STOP_MS > at_ms)
    return replace(here, holdings=kept, asks=tuple(a for a in here.asks if a.id == first))


@look
@given(busy_worlds())
def test_who_passes_never_delays_what_is_booked(here: World) -> None:
    decided = decide(here, NOW, POLICY)
    asks = {a.id: a for a in here.asks}
    after = list(here.holdings)
    for start in decided.decisions:
        if isinstance(start, Start):
            a = asks[start.ask_id]
            after.append(
                Holding(
                    f"s-{a.id}",
                    "job",
                    a.owner,
                    a.agent,
                    a.human,
                    "main",
                    start.slots,
                    NOW,
                    NOW + a.hours_ms,
                    cpus=a.needs.cpus,
                )
            )
    for booked in decided.bookings:
        then = run_out(replace(here, holdings=tuple(after)), booked.ask_id, booked.at_ms)
        got = [d for d in decide(then, booked.at_ms, POLICY).decisions if isinstance(d, Start)]
        assert [d.ask_id for d in got] == [booked.ask_id], (
            "at the promised time it starts, however long the others take"
        )


@settings(look, max_examples=max(10, look.max_examples // 4))
@given(busy_worlds())
def test_nothing_starves(here: World) -> None:
    """Under any order, with a stream of newcomers before it, an ask within its caps starts within a known time."""
    victim = ask("victim", 1, 9, owner="zoe", priority=0, queued_at_ms=NOW)
    here = replace(here, holdings=tuple(replace(lease, lost=False) for lease in here.holdings), asks=(victim,))
    if (cap := here.pools[0].cap) is not None and cap - here.pools[0].reserve < 1:
        return
    if here.pools[0].cap is None and len(here.slots) - here.pools[0].reserve < 1:
        return
    longest = 9 * HOUR + STOP_MS
    bound = NOW + here.pools[0].starve_h * HOUR + 5 * HOUR + longest
    now, number = NOW, 0
    while now <= bound + HOUR:
        crowd = tuple(
            ask(f"n{number + i}", 1 + i % 2, (0.25, 9)[i % 2], owner="mallory", priority=20, queued_at_ms=now)
            for i in range(12)
        )
        number += 12
        here = replace(
            here,
            holdings=tuple(lease for lease in here.holdings if lease.hard_end_ms + STOP_MS > now),
            asks=tuple(a for a in here.asks if a.id == "victim") + crowd,
        )
        decided = decide(here, now, POLICY)
        asks = {a.id: a for a in here.asks}
        for start in decided.decisions:
            if isinstance(start, Start):
                if start.ask_id == "victim":
                    return
                a = asks[start.ask_id]
                here = replace(here, holdings=(*here.holdings, Holding(
                    f"s-{a.id}", "job", a.owner, a.agent, False, "main", start.slots, now, now + a.hours_ms, cpus=a.needs.cpus)))  # fmt: skip
        ends = [lease.hard_end_ms + STOP_MS for lease in here.holdings if lease.hard_end_ms + STOP_MS > now]
        now = min([*ends, now + HOUR])
    raise AssertionError(f"it still waits {(now - NOW) / HOUR} h later")


# ---- order ------------------------------------------------------------------------------------


def test_fairshare_lets_go_first_who_used_least() -> None:
    spent = (Spent("alice", "a", "main", 0, 900), Spent("alice", "b", "main", 0, 200), Spent("bob", "b", "main", 0, 1000),
             Spent("alice", "a", "side", 0, 0))  # fmt: skip
    here = world(
        (1,),
        ask("a", owner="alice"),
        ask("b", owner="bob", queued_at_ms=NOW + 9),
        rules={"order": "fairshare"},
        spent=spent,
    )
    assert outcome(here)["b"] == ["h0:0"]
    assert outcome(replace(here, pools=(PoolRules("main"),)))["a"] == ["h0:0"]


def test_shortest_lets_go_first_what_takes_least() -> None:
    here = world((1,), ask("long", hours=5), ask("short", hours=1, queued_at_ms=NOW + 9), rules={"order": "shortest"})
    assert outcome(here)["short"] == ["h0:0"]


@pytest.mark.parametrize("order", ["fifo", "fairshare", "shortest"])
def test_who_waited_too_long_goes_before_all_but_critical_work(order: str) -> None:
    old = ask("old", hours=9, priority=0, queued_at_ms=NOW - 24 * HOUR)
    new = ask("new", hours=1, priority=20)
    critical = ask("critical", priority=30)
    rules = {"order": order}
    assert outcome(world((1,), new, old, rules=rules))["old"] == ["h0:0"]
    assert outcome(world((1,), new, replace(old, queued_at_ms=old.queued_at_ms + 1), rules=rules))["new"] == ["h0:0"]
    assert outcome(world((1,), new, old, critical, rules=rules))["critical"] == ["h0:0"]
    capped = world((1,), new, old, rules={**rules, "owner_cap": 0})
    assert outcome(replace(capped, asks=(replace(old, owner="zoe"), new))) == {
        "old": ["quota_owner"],
        "new": ["quota_owner"],
    }


# ---- arrays -----------------------------------------------------------------------------------


def test_each_element_of_an_array_gets_its_own_start() -> None:
    here = world((2, 3), ask("x", count=10_000, array="x"))
    starts = [d for d in decide(here, NOW, POLICY).decisions if isinstance(d, Start)]
    assert [d.ask_id for d in starts] == ["x"] * 5 and len({d.slots for d in starts}) == 5
    assert [b.code for b in decide(here, NOW, POLICY).blockers["x"]] == ["busy"]
    assert "x" not in decide(replace(here, asks=(ask("x", count=5, array="x"),)), NOW, POLICY).blockers


def test_an_array_runs_no_more_at_once_than_it_allows_and_keeps_nothing_then() -> None:
    here = world(
        (4,), ask("x", count=9, array="x", array_room=2), ask("x.7", array="x", array_room=2, queued_at_ms=NOW + 1),
        ask("y", owner="bob", queued_at_ms=NOW + 2), ask("z", 2, 90, owner="bob", queued_at_ms=NOW + 3),
    )  # fmt: skip
    starts = [d.ask_id for d in decide(here, NOW, POLICY).decisions if isinstance(d, Start)]
    assert starts == ["x", "x", "y"]
    assert blocker(here, "x").code == "array_limit" and blocker(here, "x.7").code == "array_limit"


# ---- advance reservations, windows --------------------------------------------------------------


def test_nothing_of_others_runs_into_an_advance_reservation() -> None:
    book = Reservation("r1", "main", "eve", 2, NOW + 2 * HOUR, NOW + 4 * HOUR, "ada")
    here = world(
        (3,),
        ask("short", hours=1),
        ask("long", hours=3),
        ask("long2", hours=3, queued_at_ms=NOW + 1),
        reservations=(book,),
    )
    found = outcome(here)
    assert found["long"] == ["h0:0"] and found["short"] == ["h0:1"] and found["long2"] == ["reserved_for"]
    why = blocker(here, "long2")
    assert dict(why.names)["reservation"] == "r1" and why.set_by == "ada" and why.until_ms == book.end_ms
    hers = replace(here, asks=(ask("hers", 3, 3, owner="eve"),))
    assert outcome(hers)["hers"] == ["h0:0", "h0:1", "h0:2"]


def test_a_reservation_holds_while_it_lasts_and_frees_itself_unused() -> None:
    book = Reservation("r1", "main", "eve", 2, NOW, NOW + 4 * HOUR, "ada")
    here = world((2,), ask("a", hours=0.1), reservations=(book,))
    assert outcome(here)["a"] == ["reserved_for"]
    assert outcome(here, NOW + 16 * MINUTE)["a"] == ["h0:0"]
    used = replace(here, holdings=(hold("l", ("h0", 0), owner="eve"),))
    assert outcome(used, NOW + 16 * MINUTE)["a"] == ["reserved_for"]
    assert decide(here, NOW, POLICY).wake_at_ms == NOW + 15 * MINUTE


def test_a_pool_starts_nothing_outside_its_windows() -> None:
    nights = {"windows": (Window((0, 1, 2, 3, 4), 20 * 60, 6 * 60),), "timezone": "Europe/Berlin"}
    here = world((1,), ask("a"), rules=nights)
    why = blocker(here, "a")
    assert why.code == "start_window" and why.until_ms == NOW + 11 * HOUR  # 20:00 in Berlin is 19:00 UTC in winter
    assert decide(here, NOW, POLICY).wake_at_ms == why.until_ms
    assert outcome(here, NOW + 11 * HOUR)["a"] == ["h0:0"]
    assert outcome(here, NOW + 21 * HOUR - 1)["a"] == ["h0:0"]
    assert outcome(here, NOW + 21 * HOUR)["a"] == ["start_window"]


def test_an_ask_whose_window_has_closed_is_given_up() -> None:
    late = ask("late", not_after_ms=NOW)
    decided = decide(world((1,), late, ask("next", not_after_ms=NOW + 5)), NOW, POLICY)
    assert [(type(d).__name__, d.ask_id) for d in decided.decisions] == [("GiveUp", "late"), ("Start", "next")]  # type: ignore[union-attr]
    assert isinstance(decided.decisions[0], GiveUp) and "window" in decided.decisions[0].why
    assert UNITS_PER_CARD % 8 == 0
