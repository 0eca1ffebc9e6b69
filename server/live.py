"""What is known this moment and worth no disk: links, cards as last observed, who was seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from cotenant.hostd.protocol import CardState, HostFacts
from cotenant.server.model.states import LinkState
from cotenant.server.model.text import clean, quoted


@dataclass
class LiveCard:
    """A card as its host last described it; `at_ms` is when it was observed, by this server's clock."""

    state: CardState
    host: str
    at_ms: int


@dataclass
class LiveHost:
    """A host's link. `reason` says in words why it is not up."""

    link: LinkState = LinkState.CONNECTING
    reason: str = ""
    facts: HostFacts | None = None
    at_ms: int = 0
    links: tuple[tuple[str, str, int], ...] = ()  # (uuid, uuid, NVLinks between the two)
    needs_floor: bool = False  # it lost its memory, and what it ran before may still be there: nothing starts on it


@dataclass(frozen=True)
class Seen:
    """When a caller was last here, and what its program says of itself: other people's words."""

    at_ms: int
    client: str | None = None  # program and version
    host: str | None = None  # the machine where the agent sits
    cwd: str | None = None  # the directory where it works


@dataclass
class Live:
    """Owned by the composition root; written by `control.hosts` and `control.auth` only."""

    hosts: dict[str, LiveHost] = field(default_factory=dict)
    cards: dict[str, LiveCard] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)  # by caller

    def why_no_card(self) -> str:
        """Why hosts have no cards, a sentence a host in its driver's words, and who tells more; empty where all is well."""
        told = [
            f"{quoted(name)}: {clean(host.facts.nvml_message, 200)}"
            for name, host in sorted(self.hosts.items())
            if host.facts is not None and host.facts.nvml_message
        ]
        return f"Drivers: {'; '.join(told)}. A person finds more there with `cotenant doctor`." if told else ""
