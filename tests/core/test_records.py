"""Worlds and decisions as text: what is written is read back equal, whole and as changes, whatever stands in the fields."""

import dataclasses
import json
import random
from typing import Any, get_args, get_type_hints

import pytest

from cotenant.server.deciding import world as nouns
from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.records import PARTS, Reading, Writing, build, canonical, recanonical
from cotenant.server.deciding.world import Decided, Policy, World
from cotenant.server.simulating import synthetic
from cotenant.server.simulating.run import BEGIN_MS, Simulation
from cotenant.server.simulating.trace import divided


def filled(kind: Any) -> Any:
    """An object with something else than the default in every field, whatever fields there will be."""
    hints = get_type_hints(kind, vars(nouns))
    return kind(**{field.name: _value(hints[field.name], field.name) for field in dataclasses.fields(kind)})


def _value(hint: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return filled(hint)
    if hint is str:
        return f"é {name}"
    if hint is bool:
        return True
    if hint is int:
        return 7
    arguments = get_args(hint)
    if type(None) in arguments:
        return _value(next(one for one in arguments if one is not type(None)), name)
    if getattr(hint, "__origin__", None) is tuple:
        inner = [one for one in arguments if one is not Ellipsis]
        return (_value(inner[0], name),) if Ellipsis in arguments else tuple(_value(one, name) for one in inner)
    return arguments[-1]  # of a Literal


@pytest.mark.parametrize("name", PARTS)
def test_every_field_of_everything_in_a_world_comes_back(name: str) -> None:
    kind, _ = PARTS[name]
    one = filled(kind)
    text = Writing("v").record(World(**{name: (one,)}), 1, Policy(), Decided())
    tick = Reading().follow(text)
    assert tick is not None
    assert getattr(tick.world, name) == (one,)


def test_every_part_of_a_world_is_recorded() -> None:
    assert set(PARTS) == {field.name for field in dataclasses.fields(World)}


def test_a_field_of_another_version_is_left_out_or_has_its_default() -> None:
    record = {**filled(nouns.HostView).__dict__, "of_the_future": [1]}
    del record["cuda"]
    assert build(nouns.HostView, record) == dataclasses.replace(filled(nouns.HostView), cuda=0)


class Watched(Simulation):
    """A simulation that keeps every world it decided over."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.seen: list[World] = []

    def _decide(self, now: int) -> None:
        self.seen.append(self._world())
        super()._decide(now)


@pytest.mark.parametrize("seed", range(3))
def test_changes_lead_to_the_same_worlds_and_the_same_decisions(seed: int) -> None:
    trace = divided(synthetic.read("synthetic:jobs=60,cards=6,shares=0.3,load=2", seed))
    rules = nouns.PoolRules("main", cap=5, reserve=1, order="fairshare")
    play = Watched(trace, (rules,))
    play.run()
    assert len(play.seen) > 60
    dice, writing, reading, policy = random.Random(seed), Writing("v"), Reading(), Policy()
    for number, world in enumerate(play.seen):
        if dice.random() < 0.05:
            writing.begin()
        now = BEGIN_MS + number * 60_000
        decided = decide(world, now, policy)
        line = writing.record(world, now, policy, decided)
        tick = reading.follow(line)
        assert tick is not None
        assert (tick.at_ms, tick.policy, tick.version) == (now, policy, "v")
        for name, (_, key) in PARTS.items():
            assert sorted(getattr(tick.world, name), key=key) == sorted(getattr(world, name), key=key)
        assert recanonical(tick.decided) == canonical(decided) == canonical(decide(tick.world, now, tick.policy))


def test_what_did_not_change_is_not_written_again() -> None:
    world = World(slots=tuple(dataclasses.replace(filled(nouns.Slot), index=n, uuid=f"u{n}") for n in range(50)))
    writing = Writing("v")
    whole = writing.record(world, 1, Policy(), Decided())
    again = dataclasses.replace(world, slots=(*world.slots[:1], *world.slots[1:]))
    assert json.loads(writing.record(again, 2, Policy(), Decided()))["changes"] == {}
    changed = dataclasses.replace(world, slots=(*world.slots[:-1], dataclasses.replace(world.slots[-1], state="sick")))
    change = writing.record(changed, 3, Policy(), Decided())
    assert len(json.loads(change)["changes"]["slots"]["put"]) == 1 and len(change) < len(whole) / 10


@pytest.mark.parametrize("line", ["", "{}", "[]", '{"world": 1}', '{"at_ms": 1, "changes": {}}x'])
def test_what_is_no_record_is_refused(line: str) -> None:
    reading = Reading()
    reading.follow(Writing("v").record(World(), 1, Policy(), Decided()))
    with pytest.raises(ValueError):
        reading.follow(line)
