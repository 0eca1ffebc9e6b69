"""Types of arguments that several tools share, each with its unit and limits as agents read them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

_ID = r"^[A-Za-z0-9_.-]+$"

JobId = Annotated[str, Field(min_length=1, max_length=64, pattern=_ID, description="job id, job_…")]
LeaseId = Annotated[str, Field(min_length=1, max_length=64, pattern=_ID, description="lease id, lse_…")]
RequestId = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=128,
        description="your id for this call: repeating it is then safe",
    ),
]
Purpose = Annotated[str, Field(max_length=2000, description="why; others see it")]
Reason = Annotated[str, Field(max_length=500, description="why; recorded")]
PoolName = Annotated[str | None, Field(max_length=64, description="pool; default: the server's default pool")]
PoolFilter = Annotated[str | None, Field(max_length=64, description="only this pool")]
HostFilter = Annotated[str | None, Field(max_length=64, description="only this host")]
OwnerFilter = Annotated[str | None, Field(max_length=128, description="only of this owner")]
HolderFilter = Annotated[str | None, Field(max_length=128, description="only of this caller, by name")]
Cursor = Annotated[str | None, Field(max_length=400, description="cursor of the answer before, to go on there")]
Since = Annotated[str | None, Field(max_length=400, description="ISO 8601 time: only from then on")]
IndicesOf = Annotated[
    str | None, Field(min_length=1, max_length=4000, description="of an array: only these elements, as 3-9,12")
]
