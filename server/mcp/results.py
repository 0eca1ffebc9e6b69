"""Answers and refusals in the words of the wire.

Clients show a model only one of the two: `structuredContent` where there is some, the text otherwise. So an answer
is whole in both, and a refusal is whole in its text, has no structured content (some clients then throw everything
away), and carries the same for programs under `_meta`.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from cotenant.server.errors import CotenantError

ERROR_META = "cotenant.dev/error"


@lru_cache(maxsize=256)
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def plain(answer: Any) -> dict[str, Any]:
    """A view (or a dictionary) as JSON values."""
    if isinstance(answer, dict):
        return answer
    kind: type = type(answer)
    assert dataclasses.is_dataclass(kind), f"a tool returned {kind.__name__}"
    made: dict[str, Any] = _adapter(kind).dump_python(answer, mode="json")
    return made


def as_json(value: dict[str, Any]) -> str:
    """Compact JSON text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def success(answer: Any) -> dict[str, Any]:
    """The result of a tool call that was done."""
    content = plain(answer)
    return {"content": [{"type": "text", "text": as_json(content)}], "structuredContent": content, "isError": False}


def refusal(error: CotenantError) -> dict[str, Any]:
    """The result of a tool call that was refused or failed, in a way the caller can act on."""
    return {
        "content": [{"type": "text", "text": error.text()}],
        "isError": True,
        "_meta": {ERROR_META: error.record()},
    }


def unexpected(name: str, reference: str) -> dict[str, Any]:
    """The result where we are at fault: nothing of the exception is told, `reference` finds it in the server's log."""
    return refusal(
        CotenantError(
            f"{name} failed inside the server; whether it took effect is not known.",
            hint=f"Look at the state with a list or get tool before you repeat it. Reference for the operator: {reference}.",
            code="internal_error",
            data={"reference": reference},
        )
    )
