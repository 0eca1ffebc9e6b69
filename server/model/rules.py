"""The rules that hold: what the configuration says, and above it what people have set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, get_args

from cotenant.server.deciding.windows import window_of
from cotenant.server.deciding.world import AgentRules, OwnerRules, PoolRules, Reservation

Scope: TypeAlias = Literal["pool", "owner", "agent"]
SCOPES: Final[tuple[str, ...]] = get_args(Scope)


@dataclass(frozen=True)
class Rules:
    """Everything that people decide about sharing, by name."""

    pools: Mapping[str, PoolRules]
    owners: Mapping[str, OwnerRules] = field(default_factory=dict)
    agents: Mapping[str, AgentRules] = field(default_factory=dict)
    reservations: tuple[Reservation, ...] = ()  # those that are not over, by begin and id


@dataclass(frozen=True)
class Setting:
    """One rule as a person has set it; `value` as JSON has it, None = no limit."""

    scope: str
    name: str
    key: str
    value: Any
    set_by: str
    set_at_ms: int
    reason: str


def above(base: Rules, settings: Iterable[Setting], reservations: Iterable[Reservation] = ()) -> Rules:
    """The rules with what people have set above them. A setting of a pool that is configured no more waits for it."""
    pools, owners, agents = dict(base.pools), dict(base.owners), dict(base.agents)
    for one in settings:
        change = {one.key: typed(one.key, one.value)}
        if one.scope == "pool":
            if one.name in pools:
                pool = pools[one.name]
                who = (*(pair for pair in pool.set_by_key if pair[0] != one.key), (one.key, one.set_by))
                pools[one.name] = replace(pool, **change, set_by_key=who)
        elif one.scope == "owner":
            owners[one.name] = replace(owners.get(one.name) or OwnerRules(one.name), **change, set_by=one.set_by)
        else:
            agents[one.name] = replace(agents.get(one.name) or AgentRules(one.name), **change, set_by=one.set_by)
    coming = tuple(sorted(reservations, key=lambda r: (r.begin_ms, r.id)))
    return Rules(pools, owners, agents, coming)


def typed(key: str, value: Any) -> Any:
    """A value of JSON as the field `key` has it.

    Raises:
        ValueError: a window that cannot be read; the message says why.
    """
    if key == "windows":
        return tuple(window_of(text) for text in value or ())
    return tuple(value) if isinstance(value, list) else value
