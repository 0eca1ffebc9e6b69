"""What may be changed of a job that was taken in already. What is left out, or null, stays as it is."""

from __future__ import annotations

import json
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cotenant.server.errors import BadRequest
from cotenant.server.model.indices import ARRAY_MAX
from cotenant.server.model.spec import GpuCount, GpuRange, JobSpec

#: What says something about the next attempt, or nothing about attempts at all; the rest is fixed once one has begun.
ANY_TIME: Final = frozenset({"name", "purpose", "labels", "priority", "max_attempts"})


class JobChange(BaseModel):
    """New values for fields of a JobSpec, with its units and limits."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_max_length=64_000)

    name: str | None = Field(default=None, max_length=200, description="new name")
    purpose: str | None = Field(default=None, max_length=2000, description="new purpose")
    labels: dict[str, str] | None = Field(default=None, description="all labels from now on")
    priority: Literal["critical", "high", "normal", "batch"] | None = Field(
        default=None, description="within your grant"
    )
    max_attempts: int | None = Field(default=None, ge=1, le=20, description="tries in all")
    max_parallel: int | None = Field(default=None, ge=1, le=ARRAY_MAX, description="an array's elements at once")
    hours: float | None = Field(default=None, gt=0, le=24 * 31, description="time limit")
    pool: str | None = Field(default=None, max_length=64, description="another queue; it goes to its end")
    gpus: GpuCount | GpuRange | None = None
    gpu_memory_mib: int | None = Field(default=None, ge=0, le=2**31, description="MiB a card")
    gpu_model: str | None = Field(default=None, max_length=200, description='"" = any')
    cpus: int | None = Field(default=None, ge=0, le=4096, description="processors")
    memory_mib: int | None = Field(default=None, ge=0, le=2**31, description="host memory")
    disk_mib: int | None = Field(default=None, ge=0, le=2**31, description="disk")
    prefer: tuple[str, ...] | None = Field(default=None, description="hosts or labels in order")

    def given(self) -> dict[str, Any]:
        """The new values by field, as JSON has them."""
        return self.model_dump(mode="json", exclude_none=True)

    def applied_to(self, spec: JobSpec) -> JobSpec:
        """The spec with the new values.

        Raises:
            BadRequest: they do not go together with the rest of it.
        """
        given = self.given()
        if (limit := given.pop("max_parallel", None)) is not None:
            if spec.many is None:
                raise BadRequest("the job is no array: it has no max_parallel", hint="Leave max_parallel out.")
            given["array"] = {"n": spec.many.size, "max_parallel": limit}
        try:
            return JobSpec.model_validate_json(
                json.dumps({**spec.model_dump(mode="json", exclude_defaults=True), **given})
            )
        except ValidationError as error:
            said = "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in error.errors(include_url=False))
            raise BadRequest(
                f"the job cannot be changed so: {said}", hint="get_job shows what it asks for now."
            ) from None
