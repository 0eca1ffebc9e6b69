"""acquire_lease, heartbeat, release_lease, list_leases, hand_over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from cotenant.server.mcp.call import Call
from cotenant.server.mcp.tool import tool
from cotenant.server.model.answers import HeartbeatAnswer, LeaseAnswer, LeaseList
from cotenant.tools.words import (
    Cursor,
    HolderFilter,
    HostFilter,
    LeaseId,
    OwnerFilter,
    PoolFilter,
    PoolName,
    Purpose,
    RequestId,
)

LeaseFilter = Literal["active", "all", "queued", "leased", "running", "released", "expired", "revoked", "withdrawn"]


@tool(title="Lease GPUs for work you run yourself", scope="write", core=True)
async def acquire_lease(
    call: Call,
    gpus: Annotated[int, Field(ge=1, le=64, description="whole cards, all on one host")] = 1,
    pool: PoolName = None,
    ttl_s: Annotated[
        int, Field(ge=60, le=86_400, description="seconds until it expires unless you call heartbeat")
    ] = 600,
    hours: Annotated[
        float | None, Field(gt=0, le=744, description="hard end in hours; default: the pool's default_hours")
    ] = None,
    purpose: Purpose = "",
    gpu_memory_mib: Annotated[int, Field(ge=0, le=10_000_000, description="MiB a card must have at least")] = 0,
    gpu_model: Annotated[str, Field(max_length=200, description="part of the card's model name")] = "",
    host: Annotated[str | None, Field(max_length=64, description="only on this host")] = None,
    when_full: Annotated[
        Literal["refuse", "queue"], Field(description="refuse: an error says who holds what; queue: wait in line")
    ] = "refuse",
    request_id: RequestId = None,
) -> LeaseAnswer:
    """Get cards for yourself, for work that you start in your own shell. For a training run prefer submit_job.

    On success state is leased: set every variable of env for each process that uses the cards, call heartbeat well
    before expires_at (a third of ttl_s is a good rhythm), and release_lease as soon as you are done. Nothing moves
    hard_end_at. With when_full="queue" state may be queued: wait with wait_job(lease_id), and once it is leased call
    heartbeat before pickup_by or you lose your turn. Refused with busy: holder and end are named; queue, or use
    another pool. Refused with quota_exceeded: ask for what fits, or release something; asking again changes nothing.
    """
    return await call.control.leases.acquire(
        call.caller,
        gpus=gpus,
        pool=pool,
        ttl_s=ttl_s,
        hours=hours,
        purpose=purpose,
        gpu_memory_mib=gpu_memory_mib,
        gpu_model=gpu_model,
        host=host,
        request_id=request_id,
        when_full=when_full,
    )


@tool(title="Keep a lease alive", scope="write", core=True, idempotent=True)
async def heartbeat(call: Call, lease_id: LeaseId, request_id: RequestId = None) -> HeartbeatAnswer:
    """Renew a direct lease for another ttl, or pick up a lease that was just granted from the queue.

    Call it regularly while you use the cards; job leases need none. Read the answer: draining true means finish and
    release soon, notice says why. Refused with lease_ended: stop using its cards now, then acquire a new one. Refused
    with still_queued: wait_job first. Repeating it is always safe.
    """
    return await call.control.leases.heartbeat(call.caller, lease_id)


@tool(title="Give a lease back", scope="write", core=True, idempotent=True, brief=True)
async def release_lease(call: Call, lease_id: LeaseId, request_id: RequestId = None) -> LeaseAnswer:
    """Give cards back, or take a waiting claim out of the queue. Do it the moment you no longer use them.

    End your processes on the cards first. state becomes released (withdrawn for a claim); cleaning says that the
    cards are being checked before others get them. Releasing twice is harmless. Refused with job_lease: it belongs to a
    job and ends with it; cancel_job ends that.
    """
    return await call.control.leases.release(call.caller, lease_id, request_id=request_id)


@tool(title="List leases: who holds what", scope="read", brief=True)
async def list_leases(
    call: Call,
    state: Annotated[LeaseFilter | None, Field(description="default: active")] = None,
    holder: HolderFilter = None,
    owner: OwnerFilter = None,
    pool: PoolFilter = None,
    host: HostFilter = None,
    limit: Annotated[int, Field(ge=1, le=200, description="leases at most")] = 50,
    cursor: Cursor = None,
) -> LeaseList:
    """See who holds cards, until when, and who waits for some.

    Use it to find your own leases after a pause (holder = your name), or to see whom you wait for. Before you finish
    your task it should show none of yours: release_lease gives back what is left. Newest first; env is not in lists.
    """
    return await call.control.views.list_leases(
        call.caller, state=state, holder=holder, owner=owner, pool=pool, host=host, limit=limit, cursor=cursor
    )


@dataclass(frozen=True)
class HandOverAnswer:
    """`status`: offered (until then it may be accepted) | handed_over."""

    object_id: str
    status: str
    holder: str
    until: str | None


@tool(title="Hand a lease or job over", scope="write")
async def hand_over(
    call: Call,
    object_id: Annotated[
        str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$", description="lse_… or job_…")
    ],
    to: Annotated[str, Field(min_length=1, max_length=128, description="name of the caller who shall have it")],
    request_id: RequestId = None,
) -> HandOverAnswer:
    """Pass one of your leases or jobs to another caller, or accept one that was offered to you.

    To give: name the receiver in to; the answer says that the offer stands. To accept: call it with the same object_id
    and your own name in to. Between agents of one owner it is done at once. Refused with quota_exceeded: it counts against the receiver's caps; with
    job_lease: hand over the job instead; with no_such_caller: list_agents has the names.
    """
    return HandOverAnswer(**await call.control.leases.hand_over(call.caller, object_id, to, request_id=request_id))
