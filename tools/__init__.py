"""The tools that agents call: one thin function each, grouped by noun. Rules live in `cotenant.server.control`.

`ALL` is in the order in which clients are told of them: the first things an agent needs come first.
"""

from __future__ import annotations

from cotenant.server.mcp.tool import Tool
from cotenant.tools import events, fleet, foresight, jobs, leases, logs, quota

ALL: tuple[Tool, ...] = (
    quota.quota_status,
    fleet.list_gpus,
    leases.acquire_lease,
    leases.heartbeat,
    leases.release_lease,
    leases.list_leases,
    leases.hand_over,
    jobs.submit_job,
    jobs.get_job,
    jobs.explain_job,
    foresight.estimate_wait,
    foresight.suggest_resources,
    jobs.list_jobs,
    jobs.wait_job,
    logs.tail_logs,
    jobs.cancel_job,
    jobs.retry_job,
    jobs.modify_job,
    jobs.signal_job,
    jobs.checkpoint_job,
    jobs.hold_job,
    jobs.release_job,
    fleet.list_queues,
    fleet.list_hosts,
    fleet.list_agents,
    events.list_events,
)
