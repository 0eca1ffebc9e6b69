"""The contract between the server and whatever runs attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from cotenant.hostd.protocol import (
    AttemptReport,
    CardState,
    CleanCheck,
    HostFacts,
    LogPage,
    Progress,
    SlotRef,
    StartSpec,
    Welcome,
)
from cotenant.server.errors import Refused


class HostRefused(Refused):
    """The host understood and will not: `code` is one of hostd.protocol.REFUSALS."""


class Host(Protocol):
    """One host. Every call may raise:

    Unreachable: there is no connection; nothing was sent, anything may be tried elsewhere.
    OutcomeUnknown: sent and not answered; it may have happened, so ask `probe` before moving on.
    HostRefused: the host said no, with a code.
    """

    name: str

    async def start(self, spec: StartSpec) -> AttemptReport:
        """Start one attempt. Repeating is safe: the host keys on `attempt_id`."""
        ...

    async def prepare(self, spec: StartSpec) -> AttemptReport:
        """Make one start ready; its command waits for `go`, `spec.gate_s` at most. Repeating is safe."""
        ...

    async def go(self, attempt_id: str) -> AttemptReport:
        """Let what was made ready begin. Repeating is safe."""
        ...

    async def free_port(self, low: int, high: int, but: Sequence[int]) -> int | None:
        """The lowest TCP port from `low` to `high`, none of `but`, that nobody there listens on."""
        ...

    async def stop(self, attempt_id: str, reason: str, grace_s: float) -> AttemptReport:
        """Order a stop. A tombstone makes sure that a later start of the same attempt is refused."""
        ...

    async def signal(self, attempt_id: str, signal: int) -> AttemptReport: ...

    async def suspend(self, attempt_id: str, max_s: float) -> AttemptReport:
        """Stop its whole tree where it stands, at most `max_s` in all. Repeating is safe; the report says whether it stands."""
        ...

    async def resume(self, attempt_id: str) -> AttemptReport: ...

    async def notice(
        self, attempt_id: str, notice_id: str, what: str, why: str, by_s: float | None, signal: int | None
    ) -> Progress:
        """Tell a running attempt something, once per `notice_id`: `what` is save, stop or none (never mind)."""
        ...

    async def probe(self, attempt_id: str) -> AttemptReport: ...

    async def hold(self, lease_id: str, fence: int, slots: Sequence[SlotRef]) -> CleanCheck:
        """A direct lease begins: check the cards once more and keep them."""
        ...

    async def unhold(self, lease_id: str, slots: Sequence[SlotRef]) -> CleanCheck:
        """A direct lease ended: are its slots free? `slots` are what is looked at when the host never held it."""
        ...

    async def check(self, slots: Sequence[SlotRef]) -> CleanCheck: ...

    async def look(self) -> tuple[tuple[CardState, ...], HostFacts]: ...

    async def read_log(
        self, attempt_id: str, stream: str, *, offset: int | None, tail_lines: int | None, max_bytes: int
    ) -> LogPage: ...

    async def forget(self, attempt_ids: Sequence[str]) -> None: ...

    async def set_floor(self, fence: int) -> bool:
        """Refuse lower starts from now on; True while processes of before a lost memory are still there."""
        ...


class HostEvents(Protocol):
    """What a host tells the server. Implemented by `control.hosts`."""

    async def welcome(self, host: Host, welcome: Welcome) -> None:
        """A link is up: take in what the host has, and settle what the records and the host say differently."""
        ...

    def report(self, host: str, name: str, seq: int, body: dict[str, Any]) -> asyncio.Future[Any]:
        """Take one report, once; the future is done when it is durable. Reports of a host keep their order."""
        ...

    def telemetry(self, host: str, name: str, body: dict[str, Any]) -> None: ...

    async def lost(self, host: str, reason: str) -> None:
        """The link is gone."""
        ...

    async def refused(self, host: str, code: str, message: str, detail: dict[str, Any]) -> None:
        """The host does not accept this server."""
        ...
