"""What each host lacks for an ask: the pass over one host at a time."""

from __future__ import annotations

from dataclasses import replace

from cotenant.server.deciding.blockers import blockers, would_start
from cotenant.server.deciding.detail import host_by_host
from cotenant.server.deciding.world import Ask, Holding, HostView, Needs, Policy, PoolRules, Slot, World

NOW = 1_000_000
HOUR = 3_600_000


def world(cards: dict[str, int], held: tuple[str, ...] = (), **host: object) -> World:
    slots = tuple(
        Slot(name, f"GPU-{name}-{n}", 0, 1, n, "p", "gpu", 1000) for name, count in cards.items() for n in range(count)
    )
    holdings = tuple(
        Holding(f"l-{name}", "job", "o", "agent", False, "p", ((name, f"GPU-{name}-0", 0),), 0, NOW + HOUR)
        for name in held
    )
    return World(
        hosts=tuple(HostView(name, **host) for name in cards),  # type: ignore[arg-type]
        slots=slots,
        pools=(PoolRules("p"),),
        holdings=holdings,
    )


def ask(**needs: object) -> Ask:
    return Ask("a", "job", "o", "agent", False, "p", Needs(**needs), 10, 0, HOUR)  # type: ignore[arg-type]


def codes(found: tuple[tuple[str, tuple], ...]) -> dict[str, list[str]]:
    return {host: [b.code for b in why] for host, why in found}


def test_each_host_says_what_it_lacks() -> None:
    w = world({"c": 2, "a": 1, "b": 1}, held=("b",))
    assert codes(host_by_host(w, ask(gpus_min=2, gpus_max=2), NOW, Policy())) == {
        "a": ["no_such_gpu"], "b": ["no_such_gpu"], "c": [],
    }  # fmt: skip
    assert codes(host_by_host(w, ask(), NOW, Policy())) == {"a": [], "b": ["busy"], "c": []}
    assert list(codes(host_by_host(w, ask(), NOW, Policy()))) == ["a", "b", "c"], "by name"


def test_rules_of_pools_and_the_ask_itself_are_left_out() -> None:
    w = replace(world({"a": 1}), pools=(PoolRules("p", cap=0, paused=True),))
    held = replace(ask(), held="why", not_before_ms=NOW + 1, own_cap=1)
    assert blockers(w, held, NOW, Policy())
    assert codes(host_by_host(w, held, NOW, Policy())) == {"a": []}


def test_a_host_that_is_down_or_draining_says_so() -> None:
    assert codes(host_by_host(world({"a": 1}, link="lost"), ask(), NOW, Policy())) == {"a": ["host_down"]}
    assert codes(host_by_host(world({"a": 1}, mode="draining"), ask(), NOW, Policy())) == {"a": ["host_draining"]}


def test_hosts_without_the_pool_and_those_not_asked_for_are_left_out() -> None:
    w = world({"a": 1, "b": 1, "none": 0})
    assert codes(host_by_host(w, ask(), NOW, Policy())) == {"a": [], "b": []}
    assert codes(host_by_host(w, ask(hosts=("b",)), NOW, Policy())) == {"b": []}


def test_of_several_hosts_each_is_looked_at_for_its_part() -> None:
    w = world({"a": 2, "b": 1}, held=("a",))
    assert codes(host_by_host(w, ask(gpus_min=2, gpus_max=2, nodes=2), NOW, Policy())) == {
        "a": ["busy"], "b": ["no_such_gpu"],
    }  # fmt: skip


def test_where_nothing_else_is_in_the_way_an_ask_starts_exactly_when_a_host_fits() -> None:
    for count in range(1, 4):
        for held in ((), ("a",), ("a", "b")):
            w = world({"a": 1, "b": 3}, held=held)
            wish = ask(gpus_min=count, gpus_max=count)
            fits = any(not why for _, why in host_by_host(w, wish, NOW, Policy()))
            assert fits == (would_start(w, wish, NOW, Policy()) is not None)
