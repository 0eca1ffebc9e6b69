"""estimate_wait, suggest_resources."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cotenant.server.mcp.call import Call
from cotenant.server.mcp.tool import tool
from cotenant.server.model.answers import EstimateAnswer, SuggestAnswer
from cotenant.tools.words import PoolFilter


@tool(title="Estimate how long a job would wait", scope="read")
async def estimate_wait(
    call: Call,
    job_id: Annotated[str | None, Field(max_length=64, description="a waiting job; else one like this")] = None,
    gpus: Annotated[int, Field(ge=0, le=4096)] = 1,
    pool: PoolFilter = None,
    priority: Literal["critical", "high", "normal", "batch"] = "normal",
    hours: Annotated[float | None, Field(gt=0, le=24 * 31, description="time limit")] = None,
) -> EstimateAnswer:
    """When will it start? A forecast for a waiting job, or for one that you think of submitting.

    Nulls: nobody can know; basis says why. record tells how past forecasts came true. explain_job says why.
    """
    return await call.control.foresight.estimate(
        call.caller, job_id=job_id, gpus=gpus, pool=pool, priority=priority, hours=hours
    )


@tool(title="Suggest what to ask for", scope="read")
async def suggest_resources(
    call: Call,
    name: Annotated[str | None, Field(max_length=200, description="of like jobs")] = None,
    command: Annotated[str | None, Field(max_length=4000, description="how theirs begins")] = None,
    pool: PoolFilter = None,
) -> SuggestAnswer:
    """How many GPUs, how much memory and how many hours to ask for? From your owner's ended runs of that kind.

    basis says what each number comes from, or that there is nothing to base it on.
    """
    return await call.control.foresight.suggest(call.caller, name=name, command=command, pool=pool)
