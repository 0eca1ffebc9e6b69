"""Tokens to callers, in memory: asked at every call, so never from disk."""

from __future__ import annotations

from dataclasses import replace

from cotenant.server.control.context import Context
from cotenant.server.live import Seen
from cotenant.server.model.caller import Caller, Visibility, may_operate, may_see_inside
from cotenant.server.store import callers
from cotenant.server.store.requests import secret_hash

_SEEN_EVERY_MS = 60_000


class Auth:
    """Who a token names. `load` fills it at start; `control.tokens` keeps it in step."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tokens: dict[str, tuple[Caller, int | None]] = {}  # hash -> (caller, expires_at_ms)
        self._by_door: dict[tuple[str, str], Caller] = {}
        self._by_id: dict[str, str] = {}  # token id -> hash
        self._owners = 0
        self._flushed: dict[str, int] = {}

    async def load(self) -> None:
        """Read all living tokens anew.

        Never gives the loop away: of two reads that overlap the older could end last, and bring a revoked token back.
        """
        rows, self._owners = self._context.db.peek(lambda c: (callers.list_tokens(c), callers.owners(c)))
        self._tokens = {
            row["hash"]: (callers.as_caller(row, ""), row["expires_at_ms"])
            for row in rows
            if row["revoked_at_ms"] is None
        }
        self._by_id = {caller.token_id: digest for digest, (caller, _) in self._tokens.items()}
        self._by_door.clear()

    def caller_of(self, token: str, *, door: str) -> Caller | None:
        """The caller that `token` names, or None when it is unknown, revoked or expired."""
        return self._living(secret_hash(token), door)

    def caller_by_id(self, token_id: str, *, door: str) -> Caller | None:
        """The same for the row of a token, where the secret itself is not at hand."""
        return self._living(self._by_id.get(token_id, ""), door)

    def expires_at_ms(self, token_id: str) -> int | None:
        """When a living token ends by itself; None: never."""
        found = self._tokens.get(self._by_id.get(token_id, ""))
        return None if found is None else found[1]

    def _living(self, digest: str, door: str) -> Caller | None:
        found = self._tokens.get(digest)
        if found is None or (found[1] is not None and found[1] <= self._context.now()):
            return None
        caller = self._by_door.get((digest, door))
        if caller is None:
            caller = self._by_door[(digest, door)] = replace(found[0], door=door)
        return caller

    def living(self, caller: Caller) -> bool:
        """Whether the caller's token still counts; streams ask this at every delivery."""
        now = self._context.now()
        return any(c.token_id == caller.token_id and (end is None or end > now) for c, end in self._tokens.values())

    def seen(self, caller: Caller, client: str | None, host: str | None = None, cwd: str | None = None) -> None:
        """Remember that the caller was here, with which program, and where it says that it sits.

        The place is kept in memory only, and forgotten when another program comes under the same name.
        """
        known = self._context.live.seen.get(caller.name)
        if known is not None:
            if host is None and (client is None or client == known.client):
                host, cwd = known.host, known.cwd
            client = client or known.client
        self._context.live.seen[caller.name] = Seen(self._context.now(), client, host, cwd)

    async def flush_seen(self) -> None:
        """Write down who was here since the last time, at most once a minute each."""
        due = {
            name: seen
            for name, seen in self._context.live.seen.items()
            if seen.at_ms - self._flushed.get(name, 0) >= _SEEN_EVERY_MS
        }
        if not due:
            return
        rows = [(seen.at_ms, seen.client, name) for name, seen in due.items()]
        await self._context.db.write(
            lambda tx: tx.connection.executemany(
                "UPDATE caller SET last_seen_at_ms = ?, client = coalesce(?, client) WHERE name = ?", rows
            )
        )
        self._flushed.update({name: seen.at_ms for name, seen in due.items()})

    def visibility(self, pool: str) -> Visibility:
        """Who may look inside the work of a pool; by default everybody, while there is one owner."""
        return self._context.settings.pool_visibility.get(pool) or ("open" if self._owners <= 1 else "owner")

    def sees_inside(self, caller: Caller, *, owner: str, name: str, pool: str) -> bool:
        """The one decision on commands, paths, logs, metrics and verdicts of an object; every door asks here."""
        return may_see_inside(caller, owner=owner, name=name, visibility=self.visibility(pool)) or may_operate(caller)
