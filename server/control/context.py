"""What every use case needs: store, world, clock, ids, hosts. Built once by `server.services`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cotenant.server.backends.base import Host, HostRefused
from cotenant.server.clock import Clock
from cotenant.server.config import Settings
from cotenant.server.deciding.world import Blocker, Policy
from cotenant.server.errors import BadRequest, Forbidden, QuotaExceeded, Unavailable
from cotenant.server.ids import Ids
from cotenant.server.journal import Journal
from cotenant.server.keeper import Keeper
from cotenant.server.live import Live
from cotenant.server.model.caller import Caller
from cotenant.server.model.states import PRIORITIES
from cotenant.server.model.text import clean, find_secret, quoted
from cotenant.server.store.db import Database

log = logging.getLogger(__name__)


HOURS_MIN: Final = 0.0003
HOURS_MAX: Final = 31 * 24
REQUEST_ID_MAX: Final = 128
#: What a card is taken for when its host refuses it with this code.
_REFUSED_AS: Final = {
    "occupied": "occupied",
    "locked": "occupied",
    "sick": "sick",
    "unverified": "unverified",
    "no_such_card": "lost",
}


async def _logged(work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except Unavailable as error:
        log.info("given up: %s", error)
    except Exception:
        log.exception("background work failed")


#: The address of everything at one look.
OVERVIEW: Final = "cotenant://overview"


class Changes:
    """Tells who listens which resource addresses changed, after each commit and observation."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Call `listener(addresses)` on the loop; it must be quick and not raise. Returns how to stop it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def publish(self, addresses: frozenset[str]) -> None:
        # The whole has changed where any part of it has; what a job prints is no part of it.
        if OVERVIEW not in addresses and any(not address.endswith("/log") for address in addresses):
            addresses |= {OVERVIEW}
        for listener in tuple(self._listeners):
            listener(addresses)


class Turnstile:
    """Waiting for an object to change: `wait` returns when `turn` is called for its key."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def ticket(self, key: str) -> asyncio.Future[None]:
        """A future that is done at the next change of `key`. Take it before looking, so that no change is missed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        future.add_done_callback(lambda f: self._drop(key, f))
        return future

    def _drop(self, key: str, future: asyncio.Future[None]) -> None:
        if waiting := self._waiting.get(key):
            waiting.discard(future)
            if not waiting:
                del self._waiting[key]

    def turn(self, keys: frozenset[str]) -> None:
        if not self._waiting:
            return
        for key in keys & self._waiting.keys():
            for future in tuple(self._waiting.get(key, ())):
                if not future.done():
                    future.set_result(None)


@dataclass
class Context:
    """Shared by all use cases of one server; nothing else is."""

    db: Database
    keeper: Keeper
    live: Live
    settings: Settings
    clock: Clock
    ids: Ids
    cluster_id: str
    incarnation: int
    start_nonce: str
    policy: Policy
    changes: Changes = field(default_factory=Changes)
    turnstile: Turnstile = field(default_factory=Turnstile)
    hosts: dict[str, Host] = field(default_factory=dict)
    wake: Callable[[], None] = lambda: None
    journal: Journal | None = None
    background: set[asyncio.Task[None]] = field(default_factory=set)

    def now(self) -> int:
        return self.clock.now_ms()

    def doubt_cards(self, refused: HostRefused, uuids: list[str]) -> None:
        """A host found a card in another state than it was last seen in: do not offer it again until it is observed anew."""
        state = _REFUSED_AS.get(refused.code)
        about = refused.data.get("uuid")
        for uuid in uuids:
            known = self.live.cards.get(uuid)
            if state is not None and known is not None and about in (None, uuid):
                reason = clean(refused.message, 300)
                self.live.cards[uuid] = replace(known, state=replace(known.state, state=state, reason=reason))
                self.keeper.observe_cards()

    def committed(self, changed: set[str], dirty: set[tuple[str, str]]) -> None:
        """After a COMMIT: tell those who wait and those who listen."""
        addresses = frozenset(changed)
        self.turnstile.turn(addresses)
        self.changes.publish(addresses)

    def background_task(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Run `work` beside the caller; a failure goes to the log with its traceback."""
        task = asyncio.create_task(_logged(work))
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        # one that is cancelled before its first step has never come to await it
        task.add_done_callback(lambda _: work.close())
        return task

    def pool_of(self, caller: Caller, pool: str | None) -> str:
        """The pool a caller means, checked.

        Raises:
            BadRequest: no such pool.
            Forbidden: the caller's token does not reach it.
        """
        name = pool or (caller.pools[0] if caller.pools else self.settings.default_pool)
        if name not in self.settings.pools:
            known = ", ".join(quoted(p) for p in sorted(self.settings.pools))
            raise BadRequest(
                f"there is no pool {quoted(name)}",
                code="no_such_pool",
                hint=f"Pools: {known}. quota_status shows them.",
            )
        if caller.pools and name not in caller.pools:
            mine = ", ".join(quoted(p) for p in caller.pools)
            raise Forbidden(f"your token does not reach pool {quoted(name)}", hint=f"It reaches {mine}.")
        return name

    def hours_ms(self, pool: str, hours: float | None) -> tuple[int, str]:
        """(milliseconds, where they come from): as asked for, or the pool's default.

        Raises:
            BadRequest: no time that a lease can have.
        """
        if hours is not None:
            if not HOURS_MIN <= hours <= HOURS_MAX:
                raise BadRequest(
                    f"hours is {hours:g}; it must be {HOURS_MIN:g} (one second) to {HOURS_MAX}",
                    code="bad_hours",
                    hint="Leave it out for the pool's default.",
                )
            return int(hours * 3_600_000), "hours"
        return self.keeper.rules.pools[pool].default_hours * 3_600_000, "pool default"

    def max_priority(self, caller: Caller) -> int:
        """The highest priority that a caller may ask for: what its token says, or more where a person has granted it."""
        rules = self.keeper.rules
        granted = [rules.owners.get(caller.owner), rules.agents.get(caller.name)]
        return max(
            caller.max_priority,
            *(PRIORITIES[one.max_priority] for one in granted if one is not None and one.max_priority is not None),
            0,
        )

    def check_priority(self, caller: Caller, priority: int) -> None:
        """
        Raises:
            Forbidden: above what the caller's token and the grants to it and its owner allow.
        """
        self.keeper.refresh(self.now())
        if priority > self.max_priority(caller):
            raise Forbidden(
                "your token may not ask for this priority",
                code="priority_too_high",
                hint="Leave priority out, or ask a person for a grant.",
                data={"max_priority": self.max_priority(caller)},
            )


def said(text: str, field_name: str, limit: int) -> str:
    """Foreign text as it is kept: cleaned, cut, and free of what looks like a credential.

    Raises:
        BadRequest: it seems to hold a secret.
    """
    if (what := find_secret(text)) is not None:
        raise secret_refused(field_name, what)
    return clean(text, limit, newlines=False)


def check_request_id(request_id: str | None) -> None:
    """
    Raises:
        BadRequest: it cannot be kept as it is: empty, too long, with control characters, or like a secret.
    """
    if request_id is None:
        return
    if not request_id or clean(request_id, REQUEST_ID_MAX) != request_id:
        raise BadRequest(
            f"request_id must be 1 to {REQUEST_ID_MAX} printable characters", hint="A random word or a UUID is best."
        )
    if (what := find_secret(request_id)) is not None:
        raise secret_refused("request_id", what)


def secret_refused(field_name: str, what: str) -> BadRequest:
    return BadRequest(
        f"{field_name} seems to hold {what}; secrets are kept in no record",
        code="secret_in_arguments",
        hint="Put it in a file on the host and give secrets=[{env, file}], or rename what only looks like one.",
        data={"field": field_name},
    )


def refusal_of(
    blocker: Blocker, *, rooms: str = "", queue_hint: str = "", retry_after_s: int | None = None
) -> QuotaExceeded:
    """A blocker that refuses at once, as its error: a cap, or a need that no card can ever meet (a code of its own)."""
    data = {"blocker": blocker.code, **dict(blocker.numbers), **dict(blocker.names)}
    hint = " ".join(
        part
        for part in (blocker.helps[:1].upper() + blocker.helps[1:] + "." if blocker.helps else "", rooms, queue_hint)
        if part
    )
    if blocker.code == "no_such_gpu":
        return QuotaExceeded(blocker.message, code=blocker.code, hint=hint, data=data)
    return QuotaExceeded(f"{blocker.code}: {blocker.message}", hint=hint, data=data, retry_after_s=retry_after_s)
