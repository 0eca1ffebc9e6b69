"""People at the page: one-time links, logging in, sessions, logging out.

A session hangs on the row of the token that opened it: revoked or expired, the token ends it at once. What a browser
keeps is the session's id with a signature over it; logging out ends the session here, not only in the browser.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final

from cotenant.server.control.auth import Auth
from cotenant.server.control.context import Context
from cotenant.server.errors import Forbidden, Unavailable
from cotenant.server.model.caller import Caller
from cotenant.server.store import events, sessions
from cotenant.server.store.db import Tx
from cotenant.server.store.requests import secret_hash

#: A link is pasted from a terminal into a browser beside it; this is long enough to find the browser.
LINK_S: Final = 600
#: A working day. A token that ends earlier ends it earlier.
SESSION_S: Final = 12 * 3600
#: Of one token at once; the oldest makes room. More are nobody's browsers.
MAX_SESSIONS: Final = 50
MAX_LINKS: Final = 1000
_DOOR: Final = "panel"


@dataclass(frozen=True)
class Session:
    """Somebody logged in. `caller` is as its token stands now."""

    id: str
    caller: Caller
    expires_at_ms: int


class Logins:
    """Use cases over sessions. `load` fills it at start with what outlived a restart."""

    def __init__(self, context: Context, auth: Auth) -> None:
        self._context = context
        self._auth = auth
        self._key = b""
        # Links do not outlive the server: whoever wanted one asks again. Hash of the code -> (token id, expires_at_ms).
        self._links: dict[str, tuple[str, int]] = {}
        self._living: dict[str, tuple[str, int]] = {}  # session id -> (token id, expires_at_ms)

    def load(self, key: bytes) -> None:
        """`key` signs; it must be the same over restarts, and known to nobody else."""
        assert len(key) >= 32
        now = self._context.now()
        self._key = key
        rows = self._context.db.peek(lambda c: sessions.living(c, now))
        self._living = {row["id"]: (row["token_id"], row["expires_at_ms"]) for row in rows}

    async def link(self, caller: Caller, reason: str) -> tuple[str, int]:
        """A code that logs `caller` in once, and until when (ms) it does. Kept nowhere but in memory, as a hash.

        Raises:
            Forbidden: the caller is an agent, or may not read.
            Unavailable: there are MAX_LINKS unused ones.
        """
        _check(caller)
        now = self._context.now()
        self._links = {digest: (token, end) for digest, (token, end) in self._links.items() if end > now}
        if len(self._links) >= MAX_LINKS:
            raise Unavailable(f"there are {MAX_LINKS} unused links", hint=f"They end within {LINK_S // 60} minutes.")
        code, expires = self._context.ids.secret(), now + LINK_S * 1000
        await self._context.db.write(
            lambda tx: events.append(
                tx, "session.link_made", caller, now, token_id=caller.token_id, reason=reason or None
            )
        )
        self._links[secret_hash(code)] = (caller.token_id, expires)
        return code, expires

    def usable(self, code: str) -> bool:
        """Whether the code would log somebody in now. Looking does not use it."""
        return self._linked(secret_hash(code)) is not None

    async def by_link(self, code: str) -> Session:
        """Log in with a one-time code; it is used up, whatever comes of it.

        Raises:
            Forbidden: it was used, is too old, or its token is gone.
        """
        digest = secret_hash(code)
        caller = self._linked(digest)
        self._links.pop(digest, None)  # before anything is awaited: of two that come at once one is in
        if caller is None:
            raise Forbidden(
                "this link was used already, or is older than ten minutes",
                hint="`cotenant login-link` prints a new one.",
                code="link_unusable",
            )
        return await self._open(caller, "link")

    async def by_token(self, token: str) -> Session:
        """Log in with a token.

        Raises:
            Forbidden: it is unknown, revoked or expired, an agent's, or may not read.
        """
        caller = self._auth.caller_of(token, door=_DOOR)
        if caller is None:
            raise Forbidden(
                "this token is unknown, expired or revoked",
                hint="`cotenant token create NAME --kind human` makes one, or `cotenant login-link` prints a link.",
                code="unauthorized",
            )
        return await self._open(caller, "token")

    def session_of(self, cookie: str) -> Session | None:
        """The living session behind a cookie's value, or None. Quick: asked at every request and every delivery."""
        session_id, _, signature = cookie.partition(".")
        found = self._living.get(session_id)
        if found is None or not hmac.compare_digest(signature.encode(), self._sign("session", session_id).encode()):
            return None
        token_id, expires = found
        caller = self._auth.caller_by_id(token_id, door=_DOOR)
        if expires <= self._context.now() or caller is None:
            return None
        return Session(session_id, caller, expires)

    def cookie_of(self, session: Session) -> str:
        """What the browser keeps."""
        return f"{session.id}.{self._sign('session', session.id)}"

    def form_token(self, of: str) -> str:
        """What a form must bring that was made for `of`: a session's id, or a visitor's mark before there is one."""
        return self._sign("form", of)

    def form_is_ours(self, of: str, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.form_token(of).encode())

    async def leave(self, session: Session) -> None:
        """Log out: the cookie opens nothing any more, wherever it was copied to."""
        now = self._context.now()
        self._living.pop(session.id, None)
        caller = session.caller

        def write(tx: Tx) -> None:
            if sessions.end(tx, session.id, now):
                events.append(tx, "session.closed", caller, now, token_id=caller.token_id, args={"session": session.id})

        await self._context.db.write(write)

    async def _open(self, caller: Caller, how: str) -> Session:
        _check(caller)
        context, now = self._context, self._context.now()
        session_id, expires = context.ids.new("session", now), now + SESSION_S * 1000
        if (end := self._auth.expires_at_ms(caller.token_id)) is not None:
            expires = min(expires, end)

        def write(tx: Tx) -> list[str]:
            sessions.insert(tx, session_id, caller.token_id, now, expires)
            over = sessions.end_all_but(tx, caller.token_id, MAX_SESSIONS, now)
            events.append(
                tx, "session.opened", caller, now, token_id=caller.token_id,
                args={"session": session_id, "with": how, **({"made_room": over} if over else {})},
            )  # fmt: skip
            return over

        over = await context.db.write(write)
        self._living = {id_: found for id_, found in self._living.items() if found[1] > now and id_ not in over}
        self._living[session_id] = (caller.token_id, expires)
        return Session(session_id, caller, expires)

    def _linked(self, digest: str) -> Caller | None:
        token_id, expires = self._links.get(digest, ("", 0))
        return self._auth.caller_by_id(token_id, door=_DOOR) if expires > self._context.now() else None

    def _sign(self, use: str, what: str) -> str:
        assert self._key, "load comes first"
        return hmac.new(self._key, f"{use}\0{what}".encode(), hashlib.sha256).hexdigest()


def _check(caller: Caller) -> None:
    if not caller.human:
        raise Forbidden(
            "the page is for people; this is an agent's token",
            hint="Use a person's: `cotenant token create NAME --kind human`, or `cotenant login-link`.",
            code="people_only",
        )
    if "read" not in caller.scopes:
        raise Forbidden("this token lacks the scope 'read'", hint="Use one that has it.", code="missing_scope")
