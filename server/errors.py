"""Every error that a caller can meet. Doors map them once; anything else is a bug and goes to the log.

CotenantError
├── Refused            understood, and no: nothing changed
│   ├── BadRequest         the arguments cannot mean anything; correct them
│   ├── Forbidden          not with this token, or not your object
│   ├── QuotaExceeded      more than may be had, now or ever
│   ├── Busy               nothing free now; queue or come back
│   ├── Conflict           the object is in another state than the act needs
│   ├── StaleFence         a newer attempt or lease owns the object
│   └── ConfirmationRequired   ask once more with the token given
├── NotFound           no such object, or not one that this caller may see
├── Unreachable        the host does not answer; nothing was sent
├── OutcomeUnknown     sent and not answered: it may have happened
└── Unavailable        the server itself cannot now (storage full, shutting down)
"""

from __future__ import annotations

from typing import Any


class CotenantError(Exception):
    """`code` is stable, `message` has the values at fault, `hint` says what the caller can do now.

    `data` carries the same as plain JSON values for programs. `retry_after_s` is None where waiting does not help.
    """

    code = "error"

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        code: str | None = None,
        retry_after_s: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code
        self.retry_after_s = retry_after_s
        self.data = data or {}

    def text(self) -> str:
        """`code: what happened, with numbers. What to do next.`"""
        wait = f" Retry after {self.retry_after_s} s." if self.retry_after_s is not None else ""
        # A list of complaints ends with its own line break, everything else as a sentence.
        end = "" if self.message.endswith((".", "!", "?", "\n")) else "."
        hint = f"{'' if self.message.endswith(chr(10)) else ' '}{self.hint}" if self.hint else ""
        return f"{self.code}: {self.message}{end}{hint}{wait}"

    def record(self) -> dict[str, Any]:
        """The same as JSON values."""
        out: dict[str, Any] = {"code": self.code, "message": self.message, "hint": self.hint}
        if self.retry_after_s is not None:
            out["retry_after_s"] = self.retry_after_s
        return {**out, **self.data}


class Refused(CotenantError):
    code = "refused"


class BadRequest(Refused):
    code = "invalid_arguments"


class Forbidden(Refused):
    code = "forbidden"


class QuotaExceeded(Refused):
    code = "quota_exceeded"


class Busy(Refused):
    code = "busy"


class Conflict(Refused):
    code = "conflict"


class StaleFence(Refused):
    code = "stale_fence"


class ConfirmationRequired(Refused):
    code = "confirmation_required"


class NotFound(CotenantError):
    code = "not_found"


class Unreachable(CotenantError):
    code = "host_unreachable"


class OutcomeUnknown(CotenantError):
    code = "outcome_unknown"


class Unavailable(CotenantError):
    code = "unavailable"


class IllegalMove(AssertionError):
    """A state was asked to move where it cannot: a mistake of ours, never of a caller."""
