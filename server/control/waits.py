"""Waits that a client follows as protocol tasks: begun, looked at, ended. What is waited for is never touched here."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Final, Literal, cast

from cotenant.server.control.context import Context
from cotenant.server.model.caller import Caller
from cotenant.server.model.states import JOB_FINAL, LeaseState
from cotenant.server.store import waits
from cotenant.server.store.db import Tx

#: How long the id of a wait that has ended still answers: a client that was away finds the result.
KEPT_MS: Final = 3_600_000
LEASE: Final = "lse_"


@dataclass(frozen=True)
class Wait:
    """A wait and where it stands; `result` (JSON) is there once it is completed."""

    id: str
    subject: str
    state: Literal["working", "completed", "cancelled"]
    cursor: str
    created_at_ms: int
    changed_at_ms: int
    until_ms: int
    expires_at_ms: int
    result: str | None


class Waits:
    """Each wait belongs to the caller that began it; for everybody else its id is as unknown as an invented one."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def begin(self, caller: Caller, subject: str, cursor: str, max_wait_s: float) -> Wait | None:
        """A new wait, on disk; None when the caller has too many open ones."""
        context, now = self._context, self._context.now()
        secret = f"tsk_{context.ids.secret(20)}"
        until = now + round(max_wait_s * 1000)

        def write(tx: Tx) -> bool:
            return waits.begin(
                tx, secret, caller=caller.name, subject=subject, cursor=cursor, now_ms=now, until_ms=until,
                expires_at_ms=until + KEPT_MS,
            )  # fmt: skip

        return self.find(caller, secret) if await context.db.write(write) else None

    def find(self, caller: Caller, wait_id: str) -> Wait | None:
        """The caller's wait with this id, unless its time to be remembered is over."""
        row = self._context.db.peek(lambda c: waits.find(c, wait_id, caller.name))
        return None if row is None or row["expires_at_ms"] <= self._context.now() else _wait(wait_id, row)

    def over(self, wait: Wait) -> bool:
        """Whether what was waited for has happened, or the time for it has passed."""
        return wait.until_ms <= self._context.now() or self.standing(wait) is None

    def standing(self, wait: Wait) -> str | None:
        """The state in which the subject still has to be waited for; None when there is nothing left to wait for."""
        table = "lease" if wait.subject.startswith(LEASE) else "job"
        row = self._context.db.peek(
            lambda c: c.execute(f"SELECT state FROM {table} WHERE id = ?", (wait.subject,)).fetchone()
        )
        if row is None:
            return None
        over = row["state"] != LeaseState.QUEUED if table == "lease" else row["state"] in JOB_FINAL
        return None if over else str(row["state"])

    async def complete(self, caller: Caller, wait: Wait, result: str) -> Wait:
        """End it with what the waiting call would have answered; where it had ended before, that end stands."""
        return await self._end(caller, wait, "completed", result)

    async def cancel(self, caller: Caller, wait: Wait) -> Wait:
        """End the wait and nothing else; repeating it changes nothing."""
        return await self._end(caller, wait, "cancelled", None)

    async def _end(self, caller: Caller, wait: Wait, state: str, result: str | None) -> Wait:
        context, now = self._context, self._context.now()
        await context.db.write(lambda tx: waits.end(tx, wait.id, caller.name, state, result, now))
        return self.find(caller, wait.id) or wait


def _wait(wait_id: str, row: sqlite3.Row) -> Wait:
    return Wait(
        id=wait_id,
        subject=row["subject"],
        state=cast(Literal["working", "completed", "cancelled"], row["state"]),
        cursor=row["cursor"],
        created_at_ms=row["created_at_ms"],
        changed_at_ms=row["changed_at_ms"],
        until_ms=row["until_ms"],
        expires_at_ms=row["expires_at_ms"],
        result=row["result"],
    )
