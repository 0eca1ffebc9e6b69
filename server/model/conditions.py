"""When a job may start: after others, and within a time."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

_WHAT = re.compile(r"(job_[0-9a-z]{1,40})(?:\.(\d{1,6})(?:-(\d{1,6}))?)?", re.ASCII)


class AfterSpec(BaseModel):
    """Another job that must end first: `job` is an id, an element (``job_x.3``) or elements of an array (``job_x.0-9``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str = Field(max_length=64)
    when: Literal["ok", "any", "failed"] = Field(default="ok", description="ok: it succeeded; any: it ended; failed")

    @field_validator("job")
    @classmethod
    def _job(cls, value: str) -> str:
        found = _WHAT.fullmatch(value)
        if found is None:
            raise ValueError("must be a job's id, an element such as job_x.3, or elements such as job_x.0-9")
        if found[3] is not None and int(found[2]) > int(found[3]):
            raise ValueError(f"the range {found[2]}-{found[3]} runs backwards")
        return value

    @property
    def parts(self) -> tuple[str, int, int]:
        """(job, first, last element); -1 and -1 for the job as a whole."""
        found = _WHAT.fullmatch(self.job)
        assert found is not None
        if found[2] is None:
            return found[1], -1, -1
        return found[1], int(found[2]), int(found[3] or found[2])


def read_after(value: Any) -> Any:
    """A list of conditions as it may be written: one alone, or a bare id, is meant well.

    Raises:
        ValueError: one of them is none, with its place and what is wrong.
    """
    if isinstance(value, (str, dict)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    out = []
    for number, item in enumerate(value):
        try:
            out.append(AfterSpec.model_validate({"job": item} if isinstance(item, str) else item))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = ".".join(str(part) for part in (number, *first["loc"]))
            raise ValueError(f"item {place}: {first['msg'].removeprefix('Value error, ')}") from None
    return tuple(out)


class WindowSpec(BaseModel):
    """When the job may start. Either end is an ISO 8601 time, or seconds from the submit on."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    not_before: float | str | None = Field(default=None)
    not_after: float | str | None = Field(default=None)

    @model_validator(mode="after")
    def _possible(self) -> WindowSpec:
        for name in ("not_before", "not_after"):
            value = getattr(self, name)
            if value is not None:
                _moment(value, 0)
        if self.not_before is self.not_after is None:
            raise ValueError("give not_before, not_after or both")
        return self

    def from_ms(self, now_ms: int) -> int:
        """The first moment at which it may start; 0 = at once."""
        return 0 if self.not_before is None else _moment(self.not_before, now_ms)

    def until_ms(self, now_ms: int) -> int | None:
        """The moment from which it may not start any more; None = never."""
        return None if self.not_after is None else _moment(self.not_after, now_ms)


def _moment(value: float | str, now_ms: int) -> int:
    """
    Raises:
        ValueError: no time.
    """
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value.strip())
            at_ms = int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)
        except (ValueError, OverflowError):
            raise ValueError("must be ISO 8601, such as 2026-11-30T22:00:00Z, or seconds from now") from None
        if at_ms >= 0:
            return at_ms
    elif 0 <= value <= 366 * 86_400:
        return now_ms + int(value * 1000)
    raise ValueError("must lie within a year from now")
