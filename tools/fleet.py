"""list_gpus, list_hosts, list_queues, list_agents: what is there, and who uses it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cotenant.server.mcp.call import Call
from cotenant.server.mcp.tool import tool
from cotenant.server.model.answers import AgentList, GpuList, HostList, QueueList
from cotenant.tools.words import HostFilter, PoolFilter

CardState = Literal["free", "held", "cleaning", "occupied", "sick", "lost", "unverified", "unknown"]


@tool(title="List GPUs: which are free, who has which", scope="read", core=True)
async def list_gpus(
    call: Call,
    host: HostFilter = None,
    pool: PoolFilter = None,
    state: Annotated[CardState | None, Field(description="only cards in this state")] = None,
) -> GpuList:
    """See every card: free or not, who holds it and until when, memory, load, temperature.

    Use it to find out who uses a card, why one is not to be had, or what models there are. state is free, held (a
    lease has it), cleaning (just given back), occupied (somebody works on it without a lease), sick, lost, unverified
    or unknown; reason says more. Numbers are from observed_at; null means not known, never 0. simulated cards are not
    real. To use one call acquire_lease or submit_job.
    """
    return await call.control.views.list_gpus(call.caller, host=host, pool=pool, state=state)


@tool(title="List hosts: the machines", scope="read")
async def list_hosts(call: Call) -> HostList:
    """See the machines: whether they answer, drivers, CUDA version, processors, memory, disk, free cards.

    link is up, suspect (late), lost (unknown, not failed) or connecting; reason says why. Use it when a job waits with
    host_down, host_memory or the like, when a call is refused with host_unreachable, or to choose prefer for
    submit_job. A host that is lost comes back by itself or by a person: do not start its jobs again elsewhere.
    """
    return await call.control.views.list_hosts(call.caller)


@tool(title="List queues: who waits, in which order", scope="read")
async def list_queues(
    call: Call,
    pool: PoolFilter = None,
    limit: Annotated[int, Field(ge=1, le=200, description="entries per pool")] = 20,
) -> QueueList:
    """See who waits in each pool's waiting line, in which order, for how many cards and why.

    entries are in the order in which they will be served; blocker is the main reason each one waits; paused means that
    a person stopped the queue, draining that what runs there finishes and nothing new starts. Use it to choose a pool with
    a short line; get_job has the full reasons of one job. Being far behind is no reason to submit again.
    """
    return await call.control.views.list_queues(call.caller, pool=pool, limit=limit)


@tool(title="List agents and people", scope="read")
async def list_agents(call: Call) -> AgentList:
    """See who shares the machines with you, agents and people: on line or not, and how much each holds and waits for.

    online means seen within two minutes. Use it to learn whose work is beside yours or which name
    to give hand_over. client, host and cwd say where each works, in its own words; null where it did not say or you may
    not see it. Which cards exactly somebody holds is in list_leases(holder).
    """
    return await call.control.views.list_agents(call.caller)
