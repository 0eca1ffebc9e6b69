"""quota_status."""

from __future__ import annotations

from cotenant.server.mcp.call import Call
from cotenant.server.mcp.tool import tool
from cotenant.server.model.answers import QuotaStatus


@tool(title="Your quota: what you may use now", scope="read", core=True)
async def quota_status(call: Call) -> QuotaStatus:
    """Ask this first, before any GPU work: how many cards you may take now, and your limits.

    Returns per pool its cap, used, reserved (kept for people), available to you, you_can_start (cards you could get
    this moment) and how many asks wait; under me your name, scopes, use, caps and living leases; under advice what to
    do next. Nothing is reserved by asking. If you_can_start is 0: submit_job queues by itself, and acquire_lease with
    when_full="queue" waits in line; do not poll for a free card.
    """
    return await call.control.views.quota_status(call.caller)
