"""What stands behind protocol tasks here: waits for a job or a queued lease, and nothing else.

submit_job never becomes a task: clients that know tasks keep the call open until its end (measured: the MCP Inspector,
the Python SDK), and an agent would be held for as long as its training lasts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cotenant.server.errors import CotenantError
from cotenant.server.mcp import results
from cotenant.server.mcp.tasks import TaskState
from cotenant.server.model.caller import Caller
from cotenant.tools.waiting import standing, waited

if TYPE_CHECKING:
    from cotenant.server.control import Control
    from cotenant.server.control.waits import Wait

#: A wait that is looked at costs half a millisecond, so the end is told within a second of it.
POLL_MS = 1000


class WaitTasks:
    """The TaskSet of the server; see `cotenant.server.mcp.tasks`."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def get(self, caller: Caller, task_id: str) -> TaskState | None:
        """Where the wait stands. The first look after its end makes its result, which stays."""
        waits = self._control.waits
        wait = waits.find(caller, task_id)
        if wait is None:
            return None
        if wait.state == "working" and waits.over(wait):
            result = await self._result(caller, wait)
            wait = await waits.complete(caller, wait, results.as_json(result))
        return as_task(self._control, wait)

    async def update(self, caller: Caller, task_id: str, responses: Mapping[str, Any]) -> bool:
        """A wait asks for nothing, so there is nothing to answer."""
        return self._control.waits.find(caller, task_id) is not None

    async def cancel(self, caller: Caller, task_id: str) -> bool:
        """End the wait; the job or the claim goes on."""
        wait = self._control.waits.find(caller, task_id)
        if wait is None:
            return False
        await self._control.waits.cancel(caller, wait)
        return True

    async def _result(self, caller: Caller, wait: Wait) -> dict[str, Any]:
        """What wait_job would have answered now."""
        try:
            answer = await standing(self._control, caller, wait.subject)
        except CotenantError as exc:
            return {"resultType": "complete", **results.refusal(exc)}
        ended_ms = min(self._control.context.now(), wait.until_ms)
        told = waited(answer, (ended_ms - wait.created_at_ms) / 1000, wait.cursor)
        return {"resultType": "complete", **results.success(told)}


def as_task(control: Control, wait: Wait) -> TaskState:
    """A wait in the words of the extension."""
    message = None
    if wait.state == "working":
        message = f"{wait.subject} is {control.waits.standing(wait) or 'over'}"
    elif wait.state == "cancelled":
        message = f"The wait was ended; {wait.subject} was not touched."
    return TaskState(
        task_id=wait.id,
        status=wait.state,
        created_at_ms=wait.created_at_ms,
        updated_at_ms=wait.changed_at_ms,
        ttl_ms=wait.expires_at_ms - wait.created_at_ms,
        poll_interval_ms=POLL_MS,
        message=message,
        result=None if wait.result is None else json.loads(wait.result),
    )
