"""The tasks extension (io.modelcontextprotocol/tasks, SEP-2663): a call's result that a client polls for.

Only for clients of 2026-07-28 that declare the extension in the request itself; everybody else gets plain results.
This module knows the extension's words and checks, what stands behind a task is handed in as a `TaskSet`. The methods
of the first draft, tasks/result and tasks/list, do not exist: a list of ids would be a leak, the ids are secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mcp_types as wire
from pydantic import Field

from cotenant.server.clock import iso
from cotenant.server.mcp import sdk
from cotenant.server.model import text
from cotenant.server.model.caller import Caller

TASKS = "io.modelcontextprotocol/tasks"
Status = Literal["working", "input_required", "completed", "failed", "cancelled"]


class TaskParams(wire.RequestParams):
    """tasks/get and tasks/cancel; on the wire the id is `taskId`."""

    task_id: str = Field(max_length=200)


class TaskUpdateParams(TaskParams):
    """tasks/update: answers by the key of what was asked."""

    input_responses: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class TaskState:
    """A task as the wire tells it; of `result`, `error` and `input_requests` the one that its status calls for."""

    task_id: str
    status: Status
    created_at_ms: int
    updated_at_ms: int
    ttl_ms: int | None
    poll_interval_ms: int
    message: str | None = None
    result: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    input_requests: Mapping[str, Any] | None = None

    def created(self) -> dict[str, Any]:
        """The result of the call that made it: no outcome yet, whatever became of it since."""
        out: dict[str, Any] = {
            "taskId": self.task_id,
            "status": self.status,
            "createdAt": iso(self.created_at_ms),
            "lastUpdatedAt": iso(self.updated_at_ms),
            "ttlMs": self.ttl_ms,
            "pollIntervalMs": self.poll_interval_ms,
        }
        return out if self.message is None else {**out, "statusMessage": self.message}

    def detailed(self) -> dict[str, Any]:
        """With its outcome, or with what it asks for."""
        parts = {"result": self.result, "error": self.error, "inputRequests": self.input_requests}
        return {**self.created(), **{key: value for key, value in parts.items() if value is not None}}


class BecameTask(Exception):
    """A call goes on as a task, which is on disk: the client polls for its result."""

    def __init__(self, task: TaskState) -> None:
        super().__init__(task.task_id)
        self.task = task


class TaskSet(Protocol):
    """What stands behind tasks. For a task of another caller, as for none, each returns None or False."""

    async def get(self, caller: Caller, task_id: str) -> TaskState | None: ...
    async def update(self, caller: Caller, task_id: str, responses: Mapping[str, Any]) -> bool: ...
    async def cancel(self, caller: Caller, task_id: str) -> bool: ...


class TaskMethods:
    """tasks/get, tasks/update and tasks/cancel over a TaskSet."""

    def __init__(self, tasks: TaskSet) -> None:
        self._tasks = tasks
        #: As `sdk.Handlers` takes them.
        self.methods: tuple[tuple[str, type[wire.RequestParams], sdk.Handler], ...] = (
            ("tasks/get", TaskParams, self.get),
            ("tasks/update", TaskUpdateParams, self.update),
            ("tasks/cancel", TaskParams, self.cancel),
        )

    async def get(self, ctx: sdk.Context, params: TaskParams) -> dict[str, Any]:
        """Where the task stands, and its result once there is one."""
        check(ctx, params.task_id)
        task = await self._tasks.get(sdk.caller_of(ctx), params.task_id)
        if task is None:
            raise _unknown(params.task_id)
        return task.detailed()

    async def update(self, ctx: sdk.Context, params: TaskUpdateParams) -> dict[str, Any]:
        """Answers to what the task asked for; those to other questions are ignored, as the extension wants."""
        check(ctx, params.task_id)
        if not await self._tasks.update(sdk.caller_of(ctx), params.task_id, params.input_responses):
            raise _unknown(params.task_id)
        return {}

    async def cancel(self, ctx: sdk.Context, params: TaskParams) -> dict[str, Any]:
        """End the task; one that has ended stays as it is."""
        check(ctx, params.task_id)
        if not await self._tasks.cancel(sdk.caller_of(ctx), params.task_id):
            raise _unknown(params.task_id)
        return {}


def _unknown(task_id: str) -> Exception:
    return sdk.error(
        wire.INVALID_PARAMS,
        f"not_found: there is no task {text.quoted(task_id, 64)} of yours; its time may be over. "
        "What it waited for goes on: look at the job or lease itself.",
    )


def missing() -> Exception:
    """What a request gets that needs tasks and does not declare them."""
    needed = wire.ClientCapabilities(extensions={TASKS: {}})
    return sdk.error(
        wire.MISSING_REQUIRED_CLIENT_CAPABILITY,
        f"This needs a client that declares the extension {TASKS} in the request.",
        {"requiredCapabilities": needed.model_dump(by_alias=True, mode="json", exclude_none=True)},
    )


def check(ctx: sdk.Context, task_id: str) -> None:
    """What every tasks/ request must be: of 2026-07-28, with the extension declared and the id in its header."""
    if not sdk.modern(ctx):
        raise sdk.error(wire.METHOD_NOT_FOUND, f"{ctx.method} is of protocol 2026-07-28.")
    if not sdk.declares(ctx, TASKS):
        raise missing()
    if sdk.name_header(ctx) != task_id:
        raise sdk.error(wire.HEADER_MISMATCH, "The header Mcp-Name must be there and equal params.taskId.")
