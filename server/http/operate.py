"""POST /operate/VERB: what only people may do. The command line and the panel's forms use it.

The body is `{"args": {…}, "reason": "…"}`, the answer the act's own JSON object. An agent's token is refused whatever
its scopes. That an act needs a reason is checked where the act is done.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cotenant.server.errors import BadRequest, CotenantError, Forbidden
from cotenant.server.http.problems import problem
from cotenant.server.mcp import sdk
from cotenant.server.model.caller import Caller

if TYPE_CHECKING:
    from cotenant.server.control import Control

log = logging.getLogger(__name__)
_MAX_REASON = 500


class Operate:
    """The handler behind the door; the gate in front of it has found the caller."""

    def __init__(self, control: Control, check: Callable[[Request], Awaitable[Response | None]]) -> None:
        self._control = control
        self._check = check

    async def __call__(self, request: Request) -> Response:
        if (refused := await self._check(request)) is not None:
            return refused
        caller: Caller = request.scope[sdk.CALLER]
        verb = request.path_params["verb"]
        try:
            if not caller.human:
                raise Forbidden(
                    f"{verb if verb.replace('.', '').isalnum() else 'this'} is for people; this is an agent's token.",
                    hint="Ask the person you work for to do it.",
                    code="people_only",
                )
            args, reason = _read(await request.body())
            return JSONResponse(await self._control.operate(caller, verb, args, reason))
        except CotenantError as exc:
            return problem(exc)
        except Exception:
            reference = secrets.token_hex(4)
            log.exception("operate %s failed (reference %s)", verb[:40], reference)
            return problem(
                CotenantError(
                    "the server failed; whether the act took effect is not known.",
                    hint=f"Look before you repeat it. Reference in the server's log: {reference}.",
                    code="internal_error",
                    data={"reference": reference},
                )
            )


def _read(body: bytes) -> tuple[dict[str, Any], str]:
    """(args, reason) of a request's body. Raises BadRequest."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON.", hint='Send {"args": {…}, "reason": "why"}.') from None
    if not isinstance(given, dict) or not isinstance(given.get("args", {}), dict) or given.keys() - {"args", "reason"}:
        raise BadRequest('the body is not {"args": {…}, "reason": "why"}.', hint="Send exactly these two.")
    reason = given.get("reason", "")
    if not isinstance(reason, str) or len(reason) > _MAX_REASON:
        raise BadRequest(
            f"reason is not a text of at most {_MAX_REASON} characters.", hint="Say why in a few words; it is recorded."
        )
    return given.get("args", {}), reason.strip()
