"""How a host entry of the configuration is reached: what each kind of host has to offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cotenant.hostd.protocol import Hello
from cotenant.server.backends.base import HostEvents
from cotenant.server.backends.link import HostLink


class Road(Protocol):
    """The road to one host."""

    near: bool  # its first word is worth waiting for at the server's start

    def link(self, hello: Callable[[], Hello], events: HostEvents) -> HostLink:
        """The link over it, not running yet."""
        ...

    async def leave(self, busy: bool) -> None:
        """The server ends. `busy` says whether the host has something to keep; what runs there runs on."""
        ...
