"""A request of the client from its arrival to its answer: how often it was sent, and what was told and asked meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from cotenant.ui.cli.bridge import frames
from cotenant.ui.cli.bridge.frames import Frame, Message


class Request:
    """A request of the client that has no answer yet."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.task: asyncio.Task[None] | None = None
        self.repeatable = False
        self.sent = False  # at least once, as a whole
        self.torn = False  # at least one try broke off after it was sent
        self.cancelled = False
        self.listening: Message | None = None  # what the server said it will tell, of a subscription
        self.gap = False
        self.questions: dict[str, Any] = {}
        self._told = 0.0
        self._offset = 0.0

    def again(self) -> None:
        """It will be sent once more: progress goes on from where it was, as it may never fall."""
        self.torn = True
        self.gap = self.listening is not None
        self._offset = self._told

    def progress(self, data: bytes, message: Message) -> bytes:
        """A progress notification as the client may see it."""
        params = message.get("params")
        value = params.get("progress") if isinstance(params, dict) else None
        if not isinstance(value, int | float) or not isinstance(params, dict):
            return data
        self._told = value + self._offset
        if not self._offset:
            return data
        told = {**params, "progress": self._told}
        if isinstance(total := params.get("total"), int | float):
            told["total"] = total + self._offset
        return frames.dumps({**message, "params": told})
