"""Tasks in memory for the fixture server: the TaskSet that the real server has over its database."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cotenant.server.mcp.tasks import TaskState
from cotenant.server.model.caller import Caller

TTL_MS = 300_000
POLL_MS = 100


class ProtocolError(Exception):
    """The work failed with a JSON-RPC error."""


class Work:
    """One task: its work may ask for input, and ends with a result, an error or a cancellation."""

    def __init__(self, owner: str) -> None:
        self.id = f"tsk_{secrets.token_urlsafe(24)}"
        self.owner = owner
        self.created_ms = self.changed_ms = time.time_ns() // 1_000_000
        self.ended: dict[str, Any] | None = None
        self._asked: dict[str, tuple[dict[str, Any], asyncio.Future[Any]]] = {}
        self._runner: asyncio.Task[None] | None = None

    def start(self, work: Callable[[Work], Awaitable[dict[str, Any]]]) -> None:
        async def run() -> None:
            try:
                self._end(status="completed", result={"resultType": "complete", **await work(self)})
            except ProtocolError as error:
                self._end(status="failed", message=str(error), error={"code": -32603, "message": str(error)})
            except asyncio.CancelledError:
                self._end(status="cancelled")

        self._runner = asyncio.create_task(run())

    def _end(self, **how: Any) -> None:
        self.changed_ms = time.time_ns() // 1_000_000
        if self.ended is None:
            self.ended = how

    async def ask(self, requests: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """The answers to several questions, once all are there."""
        loop = asyncio.get_running_loop()
        self._asked = {key: (request, loop.create_future()) for key, request in requests.items()}
        return {key: await future for key, (_, future) in self._asked.items()}

    def answer(self, responses: Mapping[str, Any]) -> None:
        for key, value in responses.items():
            if key in self._asked and not self._asked[key][1].done():
                self._asked[key][1].set_result(value)
                self.changed_ms = time.time_ns() // 1_000_000

    def cancel(self) -> None:
        if self.ended is None:
            self._end(status="cancelled")
            assert self._runner is not None
            self._runner.cancel()

    def state(self) -> TaskState:
        pending = {key: request for key, (request, future) in self._asked.items() if not future.done()}
        how = self.ended or (
            {"status": "input_required", "input_requests": pending} if pending else {"status": "working"}
        )
        return TaskState(
            task_id=self.id,
            created_at_ms=self.created_ms,
            updated_at_ms=self.changed_ms,
            ttl_ms=TTL_MS,
            poll_interval_ms=POLL_MS,
            **how,
        )


class MemoryTasks:
    """The TaskSet of the fixture server; see `cotenant.server.mcp.tasks`."""

    def __init__(self) -> None:
        self._works: dict[str, Work] = {}

    def start(self, caller: Caller, work: Callable[[Work], Awaitable[dict[str, Any]]]) -> TaskState:
        made = Work(caller.name)
        self._works[made.id] = made
        made.start(work)
        return made.state()

    def _find(self, caller: Caller, task_id: str) -> Work | None:
        found = self._works.get(task_id)
        return found if found is not None and found.owner == caller.name else None

    async def get(self, caller: Caller, task_id: str) -> TaskState | None:
        found = self._find(caller, task_id)
        return None if found is None else found.state()

    async def update(self, caller: Caller, task_id: str, responses: Mapping[str, Any]) -> bool:
        if (found := self._find(caller, task_id)) is not None:
            found.answer(responses)
        return found is not None

    async def cancel(self, caller: Caller, task_id: str) -> bool:
        if (found := self._find(caller, task_id)) is not None:
            found.cancel()
        return found is not None
