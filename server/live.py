"""What is known this moment and worth no disk: links, cards as last observed, who was seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from cotenant.hostd.protocol import CardState, HostFacts, Progress
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


@dataclass(frozen=True)
class LiveProgress:
    """Signs of work of one attempt, as times of this server's clock. None: none was seen."""

    told: Progress
    host: str
    at_ms: int  # when it was told
    log_ms: int | None = None
    checkpoint_ms: int | None = None
    writing_ms: int | None = None

    @property
    def progress_ms(self) -> int | None:
        """The last sign of work."""
        return max((at for at in (self.log_ms, self.checkpoint_ms, self.writing_ms) if at is not None), default=None)

    @classmethod
    def read(cls, told: Progress, host: str, now_ms: int, before: LiveProgress | None) -> LiveProgress:
        """What a host tells now; what it has forgotten since it told before stays known."""

        def at(ago_ms: int | None, known: int | None) -> int | None:
            return known if ago_ms is None else now_ms - ago_ms

        seen = told.checkpoint
        return cls(
            told, host, now_ms,
            log_ms=at(told.log_ago_ms, before.log_ms if before else None),
            checkpoint_ms=at(None if seen is None else seen.age_ms, before.checkpoint_ms if before else None),
            writing_ms=at(told.writing_ago_ms, before.writing_ms if before else None),
        )  # fmt: skip


@dataclass
class Live:
    """Owned by the composition root; written by `control.hosts` and `control.auth` only."""

    hosts: dict[str, LiveHost] = field(default_factory=dict)
    cards: dict[str, LiveCard] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)  # by caller
    progress: dict[str, LiveProgress] = field(default_factory=dict)  # by attempt

    def why_no_card(self) -> str:
        """Why hosts have no cards, a sentence a host in its driver's words, and who tells more; empty where all is well."""
        told = [
            f"{quoted(name)}: {clean(host.facts.nvml_message, 200)}"
            for name, host in sorted(self.hosts.items())
            if host.facts is not None and host.facts.nvml_message
        ]
        return f"Drivers: {'; '.join(told)}. A person finds more there with `cotenant doctor`." if told else ""
