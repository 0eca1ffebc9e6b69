"""Where an ask goes among places that would all do: preferred hosts, cards joined by NVLink, parts of divided cards."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import Any

import pytest

from cotenant.server.deciding.blockers import could_ever
from cotenant.server.deciding.closeness import choose
from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.hosts import Host
from cotenant.server.deciding.world import Ask, Blocker, HostView, Needs, Policy, PoolRules, Slot, Start, Wait, World

NOW = 1_800_000_000_000
POLICY = Policy()


def cards(host: str, count: int, **more: Any) -> tuple[Slot, ...]:
    return tuple(
        Slot(host, f"{host}-{n}", 0, 1, n, "main", "gpu", **{"memory_mib": 80_000, **more}) for n in range(count)
    )


def parts(host: str, count: int) -> tuple[Slot, ...]:
    """One divided card."""
    return tuple(
        Slot(host, f"MIG-{host}-{n}", 0, 1, 9, "main", "gpu", memory_mib=10_000, mig=True) for n in range(count)
    )


def placed(slots: tuple[Slot, ...], hosts: tuple[HostView, ...] = (), held: tuple[int, ...] = (), **wish: Any) -> Any:
    """The slots (``h1-0``) that one ask gets, or the codes of its blockers; `held` cards of h1 are in use by the driver's word."""
    slots = tuple(
        Slot(**{**slot.__dict__, "state": "occupied"}) if slot.host == "h1" and slot.index in held else slot
        for slot in slots
    )
    named = {host.name for host in hosts}
    views = hosts + tuple(HostView(name) for name in sorted({slot.host for slot in slots} - named))
    asked = Ask("a", "job", "alice", "a1", False, "main", Needs(**wish), 10, NOW - 1, 3_600_000)
    for decision in decide(World(views, slots, (PoolRules("main"),), asks=(asked,)), NOW, POLICY).decisions:
        if isinstance(decision, Start):
            return [uuid for _, uuid, _ in decision.slots]
        if isinstance(decision, Wait):
            return [blocker.code for blocker in decision.blockers]
    raise AssertionError("nothing was decided")


# ---- preference

ROOMS = (HostView("h1", labels=(("room", "1"),)), HostView("h2", labels=(("disk", "nvme"), ("room", "2"))))


@pytest.mark.parametrize(
    ("wish", "where"),
    [
        ({}, "h1"),
        ({"prefer_hosts": ("h2",)}, "h2"),
        ({"prefer_labels": (("room", "2"),)}, "h2"),
        ({"prefer_labels": (("room", "1"), ("room", "2"))}, "h1"),
        ({"prefer_labels": (("disk", "nvme"), ("room", "1"))}, "h2"),
        ({"prefer_labels": (("room", "3"),)}, "h1"),
        ({"prefer_hosts": ("h1",), "prefer_labels": (("room", "2"),)}, "h1"),
        ({"prefer_hosts": ("h9",), "prefer_labels": (("room", "2"),)}, "h2"),
        ({"prefer_labels": (("room", "2"),), "gpus_max": 2}, "h2"),
    ],
)
def test_preferred_hosts_come_before_preferred_labels_and_both_in_their_order(wish: dict[str, Any], where: str) -> None:
    found = placed(cards("h1", 2) + cards("h2", 2), ROOMS, **wish)
    assert {uuid[:2] for uuid in found} == {where}


def test_a_preference_is_no_need() -> None:
    assert placed(cards("h1", 2), ROOMS[:1], prefer_labels=(("room", "2"),)) == ["h1-0"]


# ---- NVLink


def linked(*pairs: tuple[int, int, int]) -> tuple[HostView, ...]:
    return (HostView("h1", links=tuple((f"h1-{a}", f"h1-{b}", n) for a, b, n in pairs)),)


PAIRS = linked((0, 2, 4), (1, 3, 4))
RING = linked((0, 1, 1), (1, 2, 1), (2, 3, 1), (0, 3, 1), (0, 2, 2))
ALL = linked(*((a, b, 18) for a, b in combinations(range(8), 2)))


@pytest.mark.parametrize(
    ("count", "hosts", "held", "gpus", "wanted"),
    [
        (4, PAIRS, (), 2, [0, 2]),
        (4, PAIRS, (0,), 2, [1, 3]),
        (4, PAIRS, (0, 1), 2, [2, 3]),  # no pair is left: the lowest
        (4, PAIRS, (), 1, [0]),
        (4, PAIRS, (2,), 1, [0]),  # its partner is in use: the pair 1, 3 stays whole
        (4, PAIRS, (0,), 1, [2]),
        (4, PAIRS, (), 3, [0, 1, 2]),
        (4, RING, (), 2, [0, 2]),
        (4, RING, (0,), 2, [1, 2]),
        (4, RING, (), 3, [0, 1, 2]),
        (8, ALL, (), 4, [0, 1, 2, 3]),
        (8, ALL, (1,), 2, [0, 2]),
        (4, (), (), 2, [0, 1]),
    ],
)
def test_cards_that_are_joined_go_together(count: int, hosts: Any, held: Any, gpus: int, wanted: list[int]) -> None:
    found = placed(cards("h1", count), hosts, held, gpus_min=gpus, gpus_max=gpus)
    assert found == [f"h1-{n}" for n in wanted]


def test_so_it_is_for_a_job_that_takes_any_number_and_on_each_host_of_a_gang() -> None:
    assert placed(cards("h1", 4), PAIRS, (1, 3), gpus_min=1, gpus_max=2) == ["h1-0", "h1-2"]
    both = (*PAIRS, HostView("h2", links=(("h2-1", "h2-2", 4),)))
    found = placed(cards("h1", 4) + cards("h2", 3), both, gpus_min=2, gpus_max=2, nodes=2)
    assert found == ["h1-0", "h1-2", "h2-1", "h2-2"]


@pytest.mark.parametrize("seed", range(20))
def test_no_group_has_more_links_than_the_chosen_one(seed: int) -> None:
    """Against every group, where few cards allow it; with many cards it is at least no worse than the lowest numbers."""
    chance = Random(seed)
    count = chance.choice([4, 6, 8, 16])
    pairs = [(a, b, chance.randint(1, 4)) for a, b in combinations(range(count), 2) if chance.random() < 0.4]
    host = Host(linked(*pairs)[0], list(cards("h1", count)), {})
    want = chance.randint(1, count - 1)

    def inside(numbers: tuple[int, ...]) -> int:
        return sum(n for a, b, n in pairs if a in numbers and b in numbers)

    mask = choose(host, (1 << count) - 1, want)
    chosen = tuple(n for n in range(count) if mask >> n & 1)
    assert len(chosen) == want
    if count <= 8:
        assert inside(chosen) == max(inside(group) for group in combinations(range(count), want))
    assert inside(chosen) >= inside(tuple(range(want)))
    again = Host(linked(*chance.sample(pairs, len(pairs)))[0], list(cards("h1", count)), {})
    assert choose(again, (1 << count) - 1, want) == mask, "whatever the order in which links are told"


# ---- divided cards


def test_a_job_gets_one_part_of_a_divided_card() -> None:
    assert placed(parts("h1", 2)) == ["MIG-h1-0"]
    assert placed(parts("h1", 2), gpus_min=1, gpus_max=4) == ["MIG-h1-0"], "never two: it could not use them"


def test_several_cards_are_never_parts() -> None:
    mixed = cards("h1", 2) + parts("h1", 3)
    assert placed(mixed, gpus_min=2, gpus_max=2) == ["h1-0", "h1-1"]
    assert placed(mixed, gpus_min=1, gpus_max=4) == ["h1-0", "h1-1"]
    assert placed(mixed, (), (1,), gpus_min=2, gpus_max=2) == ["occupied"]
    here = World((HostView("h1"),), parts("h1", 3), (PoolRules("main"),))
    never = could_ever(here, Ask("a", "job", "alice", "a1", False, "main", Needs(2, 2), 10, NOW, 3_600_000))
    assert isinstance(never, Blocker) and never.code == "no_such_gpu" and "more than 1 that fit" in never.message


def test_a_gang_takes_one_part_on_each_host() -> None:
    found = placed(parts("h1", 2) + parts("h2", 2), nodes=2)
    assert found == ["MIG-h1-0", "MIG-h2-0"]
