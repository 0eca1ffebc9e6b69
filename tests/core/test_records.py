"""Worlds and decisions as text: what is written is read back equal, whole and as changes, whatever stands in the fields."""

import dataclasses
import json
from typing import Any, get_args, get_type_hints

import pytest
from happenings import Lab

from cotenant.server.deciding import world as nouns
from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.engine import Changes, Engine
from cotenant.server.deciding.records import PARTS, Reading, Writing, build, canonical, recanonical
from cotenant.server.deciding.world import Decided, Policy, World


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
    text = Writing("v").record(Changes(World(**{name: (one,)})), 1, Policy(), Decided())
    tick = Reading().follow(text)
    assert tick is not None
    assert getattr(tick.world, name) == (one,)


def test_every_part_of_a_world_is_recorded() -> None:
    assert set(PARTS) == {field.name for field in dataclasses.fields(World)}


def test_a_field_of_another_version_is_left_out_or_has_its_default() -> None:
    record = {**filled(nouns.HostView).__dict__, "of_the_future": [1]}
    del record["cuda"]
    assert build(nouns.HostView, record) == dataclasses.replace(filled(nouns.HostView), cuda=0)


@pytest.mark.parametrize("seed", range(3))
def test_changes_lead_to_the_same_worlds_and_the_same_decisions(seed: int) -> None:
    """What an engine says has changed, written and read back, is the world that it decided on."""
    lab = Lab(seed)
    engine = Engine(lab.world(), lab.now, Policy(), record=True)
    writing, reading, policy = Writing("v"), Reading(), Policy()
    kept: Changes | None = None
    starts = 0
    for _ in range(120):
        lab.happen()
        lab.tell(engine)
        world = lab.world()
        decided = engine.turn(lab.now)
        changes = engine.take_changes()
        if lab.dice.random() < 0.05:
            writing.begin()
        if kept is None and lab.dice.random() < 0.2:
            kept = changes  # a pass that is never written: the next carries its changes
        else:
            if kept is not None:
                kept.go_on(changes)
                changes, kept = kept, None
            tick = reading.follow(writing.record(changes, lab.now, policy, decided))
            assert tick is not None
            assert (tick.at_ms, tick.policy, tick.version) == (lab.now, policy, "v")
            for name, (_, key) in PARTS.items():
                assert sorted(getattr(tick.world, name), key=key) == sorted(getattr(world, name), key=key), name
            again = decide(tick.world, lab.now, policy)
            assert recanonical(tick.decided) == canonical(decided) == canonical(again)
        starts += lab.carry_out(decided)
    assert starts > 5


def test_what_did_not_change_is_not_written_again() -> None:
    slots = tuple(dataclasses.replace(filled(nouns.Slot), index=n, uuid=f"u{n}") for n in range(50))
    world = World(hosts=(nouns.HostView(slots[0].host),), slots=slots)
    writing, engine = Writing("v"), Engine(world, 1, Policy(), record=True)
    whole = writing.record(engine.take_changes(), 1, Policy(), Decided())
    engine.sync(dataclasses.replace(world, slots=(*world.slots[:1], *world.slots[1:])), 2)
    assert json.loads(writing.record(engine.take_changes(), 2, Policy(), Decided()))["changes"] == {}
    engine.sync(
        dataclasses.replace(world, slots=(*world.slots[:-1], dataclasses.replace(world.slots[-1], state="sick"))), 3
    )  # fmt: skip
    change = writing.record(engine.take_changes(), 3, Policy(), Decided())
    assert len(json.loads(change)["changes"]["slots"]["put"]) == 1 and len(change) < len(whole) / 10


@pytest.mark.parametrize("line", ["", "{}", "[]", '{"world": 1}', '{"at_ms": 1, "changes": {}}x'])
def test_what_is_no_record_is_refused(line: str) -> None:
    reading = Reading()
    reading.follow(Writing("v").record(Changes(World()), 1, Policy(), Decided()))
    with pytest.raises(ValueError):
        reading.follow(line)
