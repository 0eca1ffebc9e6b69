"""The append-only event log: one row for every write that a caller or the loop decided, in its transaction."""

from __future__ import annotations

from typing import Any

from cotenant.server.model.caller import Caller
from cotenant.server.model.events import EVENT_TYPES
from cotenant.server.store.db import Tx, dumps

_APPEND = """
INSERT INTO event (at_ms, type, severity, caller, owner, door, job_id, attempt_id, run_id, lease_id, host, gpu_uuid, pool,
                   token_id, old, new, reason, request_id, args)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""


def append(
    tx: Tx,
    kind: str,
    caller: Caller,
    now_ms: int,
    *,
    owner: str | None = None,
    severity: str = "info",
    job_id: str | None = None,
    attempt_id: str | None = None,
    run_id: str | None = None,
    lease_id: str | None = None,
    host: str | None = None,
    gpu_uuid: str | None = None,
    pool: str | None = None,
    token_id: str | None = None,
    old: str | None = None,
    new: str | None = None,
    reason: str | None = None,
    request_id: str | None = None,
    args: dict[str, Any] | None = None,
) -> None:
    """Write one event down. `owner` is whose object it is about, by default the caller's owner.

    `args` must hold no secret: commands and environment values never come here.
    """
    assert kind in EVENT_TYPES, kind
    tx.execute(
        _APPEND,
        (
            now_ms, kind, severity, caller.name, owner or caller.owner, caller.door, job_id, attempt_id, run_id, lease_id,
            host, gpu_uuid, pool, token_id, old, new, reason, request_id, dumps(args) if args else "{}",
        ),
    )  # fmt: skip
    tx.changed.add("cotenant://events")
