"""Tokens: made, listed, revoked. The secret is shown once and kept nowhere."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from typing import Any, Final

from cotenant.server.clock import iso_or_none
from cotenant.server.control.auth import Auth
from cotenant.server.control.context import Context
from cotenant.server.errors import BadRequest, Conflict, NotFound
from cotenant.server.ids import Ids
from cotenant.server.model.caller import SCOPES, Caller
from cotenant.server.model.states import PRIORITIES
from cotenant.server.model.text import quoted
from cotenant.server.store import callers, events
from cotenant.server.store.db import Tx

TOKEN_PREFIX: Final = "ctn_"
#: Names stand in sentences, addresses and tables: letters, digits and a few marks.
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
EXPIRES_MAX_S: Final = 100 * 365 * 86_400
RESERVED: Final = frozenset({"cotenant"})


class Tokens:
    """Use cases over tokens, on a running server."""

    def __init__(self, context: Context, auth: Auth) -> None:
        self._context = context
        self._auth = auth

    async def create(
        self, by: Caller, name: str, kind: str, owner: str, scopes: Iterable[str], *, reason: str = "", **options: Any
    ) -> dict[str, Any]:
        """A new token; `token` in the answer is its secret, shown this once. Options: see `checked`."""
        context, now = self._context, self._context.now()
        values = checked(name, kind, owner, scopes, known_pools=set(context.settings.pools), now=now, **options)
        answer = await context.db.write(lambda tx: write_token(tx, by, values, context.ids, now, reason))
        await self._auth.load()
        return answer

    async def list(self) -> list[dict[str, Any]]:
        rows = await self._context.db.read(callers.list_tokens)
        return [token_view(row, self._context.now()) for row in rows]

    async def revoke(self, by: Caller, id_or_name: str, reason: str = "", *, every: bool = False) -> dict[str, Any]:
        """Revoke a token by its id or its caller's name; see `revoke`. Its streams end at the next delivery."""
        now = self._context.now()
        rows = await self._context.db.write(lambda tx: revoke(tx, by, id_or_name, now, reason, every=every))
        await self._auth.load()
        return {"revoked": rows}


def checked(
    name: str,
    kind: str,
    owner: str,
    scopes: Iterable[str],
    *,
    known_pools: set[str],
    now: int,
    expires_s: int | None = None,
    toolset: str = "full",
    pools: Iterable[str] = (),
    max_priority: str = "high",
    autopilot: bool = False,
    own_only: bool = False,
) -> dict[str, Any]:
    """The values of a new token, checked.

    Raises:
        BadRequest: a name, kind, scope, pool, toolset or priority that cannot be.
    """
    for what, value in (("name", name), ("owner", owner)):
        if not NAME.fullmatch(value) or value in RESERVED:
            raise BadRequest(
                f"{what} must be 1 to 64 letters, digits or . _ @ + -, beginning with a letter or digit",
                code="bad_name",
            )
    if kind not in ("human", "agent"):
        raise BadRequest('kind must be "human" or "agent"', code="bad_kind")
    wanted = tuple(dict.fromkeys(s.strip() for s in scopes if s.strip()))
    if unknown := [s for s in wanted if s not in SCOPES]:
        raise BadRequest(f"unknown scopes: {', '.join(unknown)}", code="bad_scope", hint=f"Known: {', '.join(SCOPES)}.")
    if not wanted:
        raise BadRequest("a token needs at least one scope", code="bad_scope", hint=f"Known: {', '.join(SCOPES)}.")
    if kind == "agent" and {"operate", "admin"} & set(wanted):
        raise BadRequest(
            "agents cannot have operate or admin: those are for people", code="bad_scope", hint="Make it --kind human."
        )
    chosen = tuple(dict.fromkeys(p.strip() for p in pools if p.strip()))
    if unknown := [p for p in chosen if p not in known_pools]:
        raise BadRequest(
            f"unknown pools: {', '.join(unknown)}",
            code="no_such_pool",
            hint=f"Known: {', '.join(sorted(known_pools))}.",
        )
    if toolset not in ("full", "core"):
        raise BadRequest('toolset must be "full" or "core"', code="bad_toolset")
    if max_priority not in PRIORITIES:
        raise BadRequest(f"max_priority must be one of {', '.join(PRIORITIES)}", code="bad_priority")
    if expires_s is not None and not 0 < expires_s <= EXPIRES_MAX_S:
        raise BadRequest(
            f"expires_s must be 1 to {EXPIRES_MAX_S} (a hundred years)",
            code="bad_expiry",
            hint="Leave it out for a token that does not expire.",
        )
    return {
        "caller": name, "kind": kind, "owner": owner, "scopes": wanted, "toolset": toolset, "pools": chosen,
        "max_priority": PRIORITIES[max_priority], "autopilot": autopilot, "own_only": own_only,
        "expires_at_ms": None if expires_s is None else now + expires_s * 1000,
    }  # fmt: skip


def write_token(tx: Tx, by: Caller, values: dict[str, Any], ids: Ids, now: int, reason: str = "") -> dict[str, Any]:
    """Make caller and token in one transaction; the answer holds the secret.

    `others` are the ids of the caller's tokens that go on working beside it: one is there while a token is exchanged.
    """
    others = [row["id"] for row in callers.living_tokens(tx, values["caller"], now)]
    callers.put_caller(tx, values["caller"], values["kind"], values["owner"], now)
    token_id, secret = ids.new("token", now), TOKEN_PREFIX + ids.secret()
    callers.put_token(tx, token_id, secret, {**values, "created_at_ms": now, "created_by": by.name})
    events.append(
        tx, "token.created", by, now, owner=values["owner"], token_id=token_id, new=values["caller"], reason=reason or None,
        args={
            "kind": values["kind"], "scopes": list(values["scopes"]), "pools": list(values["pools"]), "toolset": values["toolset"],
            "max_priority": values["max_priority"], "autopilot": values["autopilot"], "own_only": values["own_only"],
            "expires_at": iso_or_none(values["expires_at_ms"]),
        },
    )  # fmt: skip
    return {
        "token": secret, "id": token_id, "name": values["caller"], "kind": values["kind"], "owner": values["owner"],
        "scopes": list(values["scopes"]), "expires_at": iso_or_none(values["expires_at_ms"]),
        "others": others,
    }  # fmt: skip


def revoke(tx: Tx, by: Caller, id_or_name: str, now: int, reason: str = "", *, every: bool = False) -> list[str]:
    """Revoke one token by its id, or that of a caller by name; with `every` all of the caller's. Answers their ids.

    Raises:
        NotFound: nothing living by that id or name.
        Conflict: the caller has several, and which one is meant was not said.
    """
    several = [row["id"] for row in callers.living_tokens(tx, id_or_name, now)]
    if len(several) > 1 and not every:
        raise Conflict(
            f"{quoted(id_or_name)} has {len(several)} living tokens: {', '.join(several)}",
            code="several_tokens",
            hint="Name one by its id, or say all of them (--all).",
            data={"tokens": several},
        )
    rows = callers.revoke(tx, id_or_name, now)
    if not rows:
        raise NotFound(
            f"no living token has the id or caller {id_or_name[:64]!r}",
            code="no_such_token",
            hint="cotenant token list shows them.",
        )
    for row in rows:
        events.append(tx, "token.revoked", by, now, token_id=row["id"], old=row["caller"], reason=reason or None)
    return [str(row["id"]) for row in rows]


def token_view(row: sqlite3.Row, now: int) -> dict[str, Any]:
    """A token in a list; never its secret."""
    state = (
        "revoked"
        if row["revoked_at_ms"] is not None
        else "expired"
        if row["expires_at_ms"] and row["expires_at_ms"] <= now
        else "active"
    )
    return {
        "id": row["id"], "name": row["caller"], "kind": row["kind"], "owner": row["owner"], "scopes": row["scopes"].split(","),
        "state": state, "toolset": row["toolset"], "pools": [p for p in row["pools"].split(",") if p],
        "created_at": iso_or_none(row["created_at_ms"]), "created_by": row["created_by"], "expires_at": iso_or_none(row["expires_at_ms"]),
        "last_seen_at": iso_or_none(row["last_seen_at_ms"]),
    }  # fmt: skip
