"""Who is asking, and what they may do and see. One set of functions decides for every door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCOPES = ("read", "write", "operate", "admin", "report")
Visibility = Literal["owner", "open"]


@dataclass(frozen=True)
class Caller:
    """A caller as its token names it. `own_only` binds the token to its own name instead of its owner's."""

    name: str
    kind: Literal["human", "agent"]
    owner: str
    scopes: frozenset[str]
    token_id: str
    toolset: str = "full"
    pools: tuple[str, ...] = ()  # empty = all
    max_priority: int = 30
    autopilot: bool = False
    own_only: bool = False
    door: str = "mcp"  # mcp | operate | cli | panel | loop

    @property
    def human(self) -> bool:
        return self.kind == "human"


#: The server itself, as the audit names it.
LOOP = Caller("cotenant", "human", "cotenant", frozenset(), "", door="loop")


def owns(caller: Caller, *, owner: str, name: str) -> bool:
    """Whether an object of caller `name`, owned by `owner`, is this caller's own."""
    return caller.owner == owner and (not caller.own_only or caller.name == name)


def may_operate(caller: Caller) -> bool:
    """Whether the caller may do what only people do. An agent's token never may, whatever its scopes."""
    return caller.human and "operate" in caller.scopes


def may_see_inside(caller: Caller, *, owner: str, name: str, visibility: Visibility) -> bool:
    """Whether the caller may see commands, environment names, paths, logs, metrics and verdicts of an object.

    Who holds what until when, names, purposes, states and blockers are for everybody and are not asked here.
    """
    return visibility == "open" or owns(caller, owner=owner, name=name) or may_operate(caller)
