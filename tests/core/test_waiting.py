"""Groups of equal asks: a pass over their heads must decide what a pass over all of them decides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.order import Order, in_order
from cotenant.server.deciding.world import Ask, HostView, Needs, Policy, PoolRules, Slot, Spent, Start, World
from cotenant.server.waiting import Waiting

NEEDS = (Needs(), Needs(gpus_min=2, gpus_max=2), Needs(gpus_min=0, gpus_max=0), Needs(gpus_min=1, gpus_max=3))


def make(number: int, owner: str, needs: Needs, priority: int, at: int) -> Ask:
    return Ask(f"job_{number:04d}", "job", owner, f"{owner}-agent", False, "default", needs, priority, at, 3_600_000)


asks = st.lists(
    st.tuples(
        st.sampled_from(["alice", "bob"]), st.sampled_from(NEEDS), st.sampled_from([0, 10, 20]), st.integers(0, 5)
    ),
    max_size=30,
)


def world(cards: int, places: int, waiting: tuple[Ask, ...], owner_cap: int | None) -> World:
    slots = [Slot("local", f"SIM-{n}", 0, 1, n, "default", "gpu", 1000) for n in range(cards)]
    slots += [Slot("local", "cpu", n, places, None, "default", "cpu", 0) for n in range(places)]
    return World(
        hosts=(HostView("local"),), slots=tuple(slots), pools=(PoolRules("default", owner_cap=owner_cap),), asks=waiting
    )


@given(asks, st.integers(0, 4), st.integers(0, 2), st.sampled_from([None, 1, 2]))
def test_heads_decide_like_everyone(rows, cards, places, owner_cap):
    everyone = tuple(make(n, *row) for n, row in enumerate(rows))
    waiting = Waiting()
    for ask in everyone:
        waiting.put(ask)
    whole = decide(world(cards, places, everyone, owner_cap), 100, Policy())
    part = decide(world(cards, places, waiting.heads(cards + places + 1), owner_cap), 100, Policy())
    assert [d for d in part.decisions if isinstance(d, Start)] == [d for d in whole.decisions if isinstance(d, Start)]
    waiting.answer(part.blockers)
    started = {d.ask_id for d in whole.decisions if isinstance(d, Start)}
    for ask in everyone:
        if ask.id not in started:
            assert waiting.blockers(ask.id) == whole.blockers[ask.id]


@given(asks)
def test_ahead_counts_the_queue_in_its_order(rows):
    everyone = [make(n, *row) for n, row in enumerate(rows)]
    waiting = Waiting()
    for ask in everyone:
        waiting.put(ask)
    for order in ("fifo", "fairshare", "shortest"):
        for now in (100, 24 * 3_600_000 + 3):  # at the second some have waited so long that they go first
            pool = PoolRules("default", order=order)
            spent = tuple(Spent(owner, "a", "default", 0, used) for used, owner in enumerate(("carol", "bob", "alice")))
            line = World(asks=tuple(everyone), pools=(pool,), spent=spent)
            in_line = in_order(line, now)
            key = Order(line, now).key
            assert [waiting.ahead(ask, key) for ask in in_line] == list(range(len(in_line)))


def test_a_pass_is_needed_only_for_what_it_could_answer_differently():
    waiting = Waiting()
    first, second, third = (make(n, "alice", Needs(), 10, n) for n in range(3))
    waiting.put(first)
    assert waiting.undecided
    heads = waiting.heads(1)
    waiting.answer(decide(world(0, 0, heads, None), 100, Policy()).blockers)
    waiting.undecided = False
    waiting.put(second)
    assert not waiting.undecided, "it stands behind an equal one that waits"
    assert waiting.blockers(second.id) == waiting.blockers(first.id) != ()
    waiting.put(make(9, "bob", Needs(), 10, 9))
    assert waiting.undecided, "another owner may have room"
    waiting.answer(decide(world(0, 0, waiting.heads(1), None), 100, Policy()).blockers)
    waiting.undecided = False
    waiting.drop(first.id)
    assert waiting.undecided, "the next of its kind is first now"
    waiting.drop(first.id)
    waiting.put(third)
    assert third.id in waiting and first.id not in waiting and len(waiting) == 3
