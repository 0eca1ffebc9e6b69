"""Which of the free cards of a host an ask gets: those that NVLink joins best, and of equal ones those others miss least.

Cards without known links are alike: then the lowest numbers are taken.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

from cotenant.server.deciding.hosts import Host

#: Up to so many groups each is looked at; above, groups grow card by card from each card.
GROUPS_MAX = 128

_Matrix = dict[int, dict[int, int]]


def choose(host: Host, mask: int, count: int) -> int:
    """The `count` slots of a mask that has at least so many, as a mask.

    The group with the most links inside it; of equal ones that which cuts the fewest links to free cards outside; then
    the lowest numbers.
    """
    if not host.view.links or mask.bit_count() <= count:
        return lowest(mask, count)
    links = _links(host, mask)
    if not links:
        return lowest(mask, count)
    bits = _bits(mask)
    if comb(len(bits), count) <= GROUPS_MAX:
        groups = list(combinations(bits, count))
    else:
        groups = [_grown(links, bits, seed, count) for seed in bits]
    best = min(groups, key=lambda group: (*_worth(links, group), group))
    return sum(best)


def _worth(links: _Matrix, group: tuple[int, ...]) -> tuple[int, int]:
    """Less is better: (links inside, negative; links from inside to free cards outside)."""
    inside = outside = 0
    for one in group:
        for two, count in links.get(one, {}).items():
            if two in group:
                inside += count
            else:
                outside += count
    return (-inside, outside)


def _grown(links: _Matrix, bits: list[int], seed: int, count: int) -> tuple[int, ...]:
    group = [seed]
    while len(group) < count:
        left = [bit for bit in bits if bit not in group]
        group.append(min(left, key=lambda bit: (-sum(n for two, n in links.get(bit, {}).items() if two in group), bit)))
    return tuple(sorted(group))


def _links(host: Host, mask: int) -> _Matrix:
    """How many links join each two slots of a mask."""
    number = {slot.uuid: bit for bit, slot in host.keys(mask) if slot.shares == 1}
    found: _Matrix = {}
    for a, b, count in host.view.links:
        one, two = number.get(a), number.get(b)
        if one is not None and two is not None:
            found.setdefault(one, {})[two] = count
            found.setdefault(two, {})[one] = count
    return found


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        bit = mask & -mask
        found.append(bit)
        mask ^= bit
    return found


def lowest(mask: int, count: int) -> int:
    """The `count` lowest bits of a mask that has at least so many."""
    taken = 0
    for _ in range(count):
        bit = mask & -mask
        taken |= bit
        mask ^= bit
    return taken
