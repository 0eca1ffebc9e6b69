"""Who watches which resource, and when they are told that it changed.

A notification says only "read it again", so each watcher keeps a set of addresses, never a list of events: nothing
grows while a reader is slow, nobody else waits for it, and the last state is never lost. The first change is told
at once, further ones of the same address at most once a second. Whether the caller may (still) see the resource is
asked at every delivery, and a revoked token ends its streams. One caller has a limited number of streams, so that a
client that forgets to close them takes none from the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

from cotenant.server.model.addresses import LIST, owner_of_list
from cotenant.server.model.caller import Caller

log = logging.getLogger(__name__)

#: At most one notification per address and second (design, section 10).
INTERVAL_S = 1.0
#: Up to so much longer, by chance, so that those who watch the same do not keep in step.
_SPREAD = 0.25
#: How often an idle watcher looks whether its token still holds: tokens also expire without anything happening.
TOKEN_CHECK_S = 30.0
_CUT_OFF_S = 0.2
#: Where more than so many watch one address, each further one is told so much later: they all read again at once, and
#: with two hundred of them everybody else would wait for half a second (measured).
_AT_ONCE = 16
_PACE_S = 0.002
#: So many tellings of one address an interval at most, since each is followed by a read: those who watch share them.
_PER_INTERVAL = 100
#: How often a watcher looks again whether its client has room for what it is to be told.
_NO_ROOM_S = 0.25
MAX_WATCHERS = 1024
MAX_ADDRESSES = 256

Send: TypeAlias = Callable[[str], Awaitable[None]]
CallerNow: TypeAlias = Callable[[], Caller | None]
Visible: TypeAlias = Callable[[Caller, str], Awaitable[bool]]


class TooManyWatchers(Exception):
    """No further stream can be had. `mine` is how many the caller has if its own limit is in the way, else None."""

    def __init__(self, mine: int | None = None) -> None:
        super().__init__()
        self.mine = mine


class Watcher:
    """One stream of notifications to one client. `add` and `remove` change what it watches."""

    def __init__(self, watching: Watching, caller: Caller, caller_now: CallerNow, visible: Visible) -> None:
        self.caller = caller  # as it was when the stream was opened
        self._watching = watching
        self._caller_now = caller_now
        self._visible = visible
        self._wake = asyncio.Event()
        self._dirty: dict[str, None] = {}  # in the order in which they changed
        self._not_before: dict[str, float] = {}
        self.addresses: set[str] = set()
        self.closed = False

    def add(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            if len(self.addresses) < MAX_ADDRESSES:
                self.addresses.add(address)
                self._watching.by_address.setdefault(address, _Audience()).join(self)

    def remove(self, address: str) -> None:
        self.addresses.discard(address)
        self._dirty.pop(address, None)
        self._not_before.pop(address, None)
        if (others := self._watching.by_address.get(address)) is not None:
            others.leave(self)
            if not others.all:
                del self._watching.by_address[address]

    def mark(self, address: str, not_before: float = 0.0) -> None:
        """Something changed, to be told at `not_before` (of time.monotonic) at the earliest; never blocks, never fails."""
        if address not in self._dirty:  # else it is going to be told anyway, and nobody has to be woken for it
            self._dirty[address] = None
            self._not_before[address] = max(not_before, self._not_before.get(address, 0.0))
            self._wake.set()

    def mark_all(self) -> None:
        """There was a gap in which the client was not told: everything may have changed."""
        for address in self.addresses:
            self.mark(address)

    def close(self) -> None:
        """End the stream; what is being sent now is still sent."""
        self.closed = True
        self._wake.set()

    def allowed(self) -> bool:
        """Whether the token behind this watcher still holds."""
        return self._caller_now() is not None

    async def run(
        self, send: Send, *, send_timeout_s: float | None = None, room: Callable[[], bool] = lambda: True
    ) -> None:
        """Tell of changes until `close`, or until the token no longer holds.

        With `send_timeout_s` a send that takes longer is given up and tried again later; without, a slow reader
        holds up this watcher alone. While there is no `room` nothing is sent, and nothing is forgotten.
        """
        not_before = self._not_before
        try:
            while not self.closed and self.allowed():
                self._wake.clear()
                now = time.monotonic()
                ready = [address for address in self._dirty if not_before.get(address, 0.0) <= now]
                if not ready:
                    due = min((not_before[address] for address in self._dirty), default=now + TOKEN_CHECK_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(due - now):
                            await self._wake.wait()
                    continue
                if not room():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_NO_ROOM_S):
                            await self._wake.wait()
                    continue
                for address in ready:
                    caller = self._caller_now()
                    if self.closed or caller is None:
                        return
                    if not room():
                        break
                    # Taken out before the send: what changes meanwhile is told again afterwards.
                    if address not in self._dirty:
                        continue
                    del self._dirty[address]
                    self._watching.expects(self, address)
                    not_before[address] = time.monotonic() + self._watching.interval_s(address, random.random())
                    if not await self._visible(caller, address):
                        continue
                    try:
                        async with asyncio.timeout(send_timeout_s):
                            await send(address)
                    except TimeoutError:
                        if address in self.addresses:
                            self._dirty[address] = None
                        not_before[address] = time.monotonic() + (send_timeout_s or INTERVAL_S)
        finally:
            self.close()
            for address in list(self.addresses):
                self.remove(address)
            self._watching.forget(self)


class _Audience:
    """Who watches one address, and who of them is not yet going to be told: publishing costs those alone."""

    __slots__ = ("all", "quiet")

    def __init__(self) -> None:
        self.all: set[Watcher] = set()
        self.quiet: set[Watcher] = set()

    def join(self, watcher: Watcher) -> None:
        if watcher not in self.all:
            self.all.add(watcher)
            self.quiet.add(watcher)

    def leave(self, watcher: Watcher) -> None:
        self.all.discard(watcher)
        self.quiet.discard(watcher)

    def tell(self, address: str, whom: Callable[[Watcher], bool] | None = None) -> None:
        """Mark them, or those of them that `whom` says."""
        told = {watcher for watcher in self.quiet if whom is None or whom(watcher)}
        self.quiet -= told
        now = time.monotonic()
        for place, watcher in enumerate(told):
            late = min(max(0, place - _AT_ONCE) * _PACE_S, INTERVAL_S)
            watcher.mark(address, now + late if late else 0.0)


class Watching:
    """All watchers. `changed` is what the control plane calls after each commit."""

    def __init__(self, visible: Visible, most_per_caller: int = 64) -> None:
        self._visible = visible
        self._most_per_caller = most_per_caller
        self.by_address: dict[str, _Audience] = {}
        self._watchers: set[Watcher] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._streams: dict[object, tuple[str, CallerNow, Callable[[], None]]] = {}
        self._check: asyncio.TimerHandle | None = None
        self.closed = False

    def open(self, caller_now: CallerNow, addresses: Iterable[str] = ()) -> Watcher:
        """A new watcher; run it.

        Raises:
            TooManyWatchers: none can be added now.
        """
        caller = caller_now()
        if self.closed or caller is None or len(self._watchers) >= MAX_WATCHERS:
            raise TooManyWatchers
        self._check_own(sum(1 for watcher in self._watchers if watcher.caller.name == caller.name))
        watcher = Watcher(self, caller, caller_now, self._visible)
        watcher.add(addresses)
        self._watchers.add(watcher)
        return watcher

    def _check_own(self, mine: int) -> None:
        if mine >= self._most_per_caller:
            raise TooManyWatchers(mine)

    def interval_s(self, address: str, chance: float) -> float:
        """How long the same address is not told again: longer where very many watch it.

        `chance`, from 0 to 1, keeps those apart who would else come all at once, second after second.
        """
        many = len(audience.all) if (audience := self.by_address.get(address)) is not None else 0
        if many <= _AT_ONCE:
            return INTERVAL_S
        return INTERVAL_S * max(1.0, many / _PER_INTERVAL) * (1 + _SPREAD * chance)

    def expects(self, watcher: Watcher, address: str) -> None:
        """The watcher is telling of this address now: what changes from here on is news again."""
        if (audience := self.by_address.get(address)) is not None and watcher in audience.all:
            audience.quiet.add(watcher)

    def forget(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def start(self, watcher: Watcher, send: Send, *, send_timeout_s: float, room: Callable[[], bool]) -> None:
        """Run a watcher in a task of its own, for protocols where no request carries the stream."""

        async def pump() -> None:
            try:
                await watcher.run(send, send_timeout_s=send_timeout_s, room=room)
            except Exception:
                log.exception("a subscription ended because its client could not be told")

        task = asyncio.create_task(pump(), name="mcp-subscription")
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)

    @contextlib.contextmanager
    def stream(self, caller_now: CallerNow, end: Callable[[], None]) -> Iterator[None]:
        """While inside: `end` is called once when the token no longer holds or the server stops.

        Raises:
            TooManyWatchers: the caller has too many open.
        """
        caller = caller_now()
        if caller is None:
            raise TooManyWatchers
        self._check_own(sum(1 for name, _, _ in self._streams.values() if name == caller.name))
        key = object()
        self._streams[key] = (caller.name, caller_now, end)
        try:
            yield
        finally:
            self._streams.pop(key, None)

    def changed(self, addresses: frozenset[str]) -> None:
        """These resources changed. Quick, never raises; called on the event loop."""
        for address in addresses:
            if (owner := owner_of_list(address)) is not None:
                if (audience := self.by_address.get(LIST)) is not None:
                    audience.tell(LIST, partial(_lists_for, owner) if owner else None)
            elif (audience := self.by_address.get(address)) is not None and audience.quiet:
                audience.tell(address)
        if "cotenant://events" in addresses and self._check is None:
            # A revocation is an event: nobody who lost the right waits for the next idle check. The tokens in memory
            # are read again right after the commit, so this looks a moment later.
            self._check = asyncio.get_running_loop().call_later(_CUT_OFF_S, self._cut_off)

    def _cut_off(self) -> None:
        self._check = None
        for watcher in [item for item in self._watchers if not item.allowed()]:
            watcher.close()
        for key, (_, caller_now, end) in list(self._streams.items()):
            if caller_now() is None:
                self._streams.pop(key, None)
                end()

    def close(self) -> None:
        """The server stops: every stream ends in good order."""
        self.closed = True
        for watcher in list(self._watchers):
            watcher.close()
        for key, (_, _, end) in list(self._streams.items()):
            self._streams.pop(key, None)
            end()

    async def join(self) -> None:
        """Wait until the pumps are gone; those that hang on their client are cancelled."""
        if self._check is not None:
            self._check.cancel()
        for task in list(self._pumps):
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


def _lists_for(owner: str, watcher: Watcher) -> bool:
    return watcher.caller.owner == owner
