"""A machine's cards divided among several host entries: each hostd shows its own."""

from __future__ import annotations

import pytest

from cotenant.hostd.cards import Driver, Sighting, SomeCards
from cotenant.hostd.protocol import shown_cards


class All:
    """Three cards, the last of them divided in two by the driver."""

    busy_interval_s = 1.0
    idle_interval_s = 5.0
    needs_new_process = False
    driver = Driver("ok")

    def __init__(self) -> None:
        self.closed = False

    def last(self) -> list[Sighting]:
        whole = [Sighting(n, f"GPU-{n}", "card", 1000) for n in range(2)]
        return whole + [Sighting(2, f"MIG-{n}", "part", 500, mig_parent="GPU-2") for n in range(2)]

    async def look(self, uuids=None) -> list[Sighting]:
        return [card for card in self.last() if uuids is None or card.uuid in uuids]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("only", "but", "left"),
    [
        (("0",), (), ["GPU-0"]),
        (("GPU-1",), (), ["GPU-1"]),
        (("2",), (), ["MIG-0", "MIG-1"]),
        (("GPU-2",), (), ["MIG-0", "MIG-1"]),
        (("MIG-1", "0"), (), ["GPU-0", "MIG-1"]),
        (None, ("0",), ["GPU-1", "MIG-0", "MIG-1"]),
        (None, ("MIG-0", "GPU-1"), ["GPU-0", "MIG-1"]),
        (None, ("GPU-2",), ["GPU-0", "GPU-1"]),
        (("7",), (), []),
    ],
)
async def test_only_the_own_cards_are_shown(only, but, left) -> None:
    inner = All()
    cards = SomeCards(inner, only, but)
    assert [card.uuid for card in cards.last()] == left == [card.uuid for card in await cards.look()]
    asked = await cards.look(["GPU-0", "MIG-0"])
    assert [card.uuid for card in asked] == [uuid for uuid in left if uuid in ("GPU-0", "MIG-0")]
    assert (cards.driver.status, cards.busy_interval_s, cards.idle_interval_s) == ("ok", 1.0, 5.0)
    cards.close()
    assert inner.closed


def test_two_hosts_that_share_a_machine_show_each_card_once() -> None:
    mine, rest = SomeCards(All(), ("1", "MIG-0"), ()), SomeCards(All(), None, ("1", "MIG-0"))
    found = [card.uuid for card in (*mine.last(), *rest.last())]
    assert sorted(found) == sorted(card.uuid for card in All().last())


def test_the_words_for_what_is_shown_differ_where_it_differs() -> None:
    ways = [(2, None, ()), (0, None, ()), (0, ("0",), ()), (0, (), ()), (0, None, ("0",)), (3, None, ())]
    assert len({shown_cards(*way) for way in ways}) == len(ways)
    assert shown_cards(0, ("1", "0"), ()) == shown_cards(0, ("0", "1"), ())
