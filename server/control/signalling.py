"""Sending a signal to a job: recorded as an intent, sent, then what came of it. A signal cannot be taken back or repeated."""

from __future__ import annotations

import asyncio
import signal as signals
import sqlite3
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from cotenant.server.backends.base import Host, HostRefused
from cotenant.server.control.context import Context, check_request_id
from cotenant.server.control.leases import not_yours
from cotenant.server.errors import BadRequest, Conflict, CotenantError, OutcomeUnknown, Unreachable
from cotenant.server.model.answers import SignalAnswer
from cotenant.server.model.caller import LOOP, Caller, may_operate, owns
from cotenant.server.model.text import clean, quoted
from cotenant.server.store import events, jobs, ranks, requests
from cotenant.server.store.db import Tx

ALLOWED: Final = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGTERM", "SIGCONT", "SIGWINCH", "SIGQUIT")


@dataclass(frozen=True)
class _Intent:
    """A signal that is on record; `links` are empty where it was sent before, and `outcome` tells what came of it."""

    attempt_id: str
    host: str
    owner: str
    pool: str
    links: tuple[tuple[str, Host], ...] = ()  # (what the host calls it, the host), for each host of the attempt
    outcome: str | None = None


class Signalling:
    """The use case of `signal_job`. Of one job only one signal is under way at a time, so that a twin waits for the first."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def signal(self, caller: Caller, job_id: str, signal: str, *, request_id: str | None = None) -> SignalAnswer:
        """Send a signal to the processes of a running job, at most once for a `request_id`.

        The request and its event are durable before the host is asked. What the host certainly did not do leaves
        `job.signal_failed` and may be asked for again with the same `request_id`; what nobody knows is never sent again.

        Raises:
            BadRequest: no such signal, or one that ends jobs (use cancel_job).
            Conflict: no process runs.
            Unreachable: the host is away, nothing was sent.
            OutcomeUnknown: it was sent, now or by an earlier request with this id, and whether it arrived is not known.
        """
        name = signal.upper() if signal.upper().startswith("SIG") else f"SIG{signal.upper()}"
        if name not in ALLOWED:
            raise BadRequest(
                f"{clean(signal, 40)!r} is not a signal that can be sent", code="bad_signal",
                hint=f"Possible: {', '.join(ALLOWED)}. cancel_job ends a job for certain.",
            )  # fmt: skip
        check_request_id(request_id)
        async with self._locks.setdefault(job_id, asyncio.Lock()):
            intent = await self._context.db.write(lambda tx: self._intend(tx, caller, job_id, name, request_id))
            if not intent.links:
                if intent.outcome != "delivered":
                    raise _unknown(job_id, name)
            else:
                await self._send(intent, caller, job_id, name, request_id)
        return SignalAnswer(job_id=job_id, attempt_id=intent.attempt_id, signal=name, delivered=True)

    def _intend(self, tx: Tx, caller: Caller, job_id: str, name: str, request_id: str | None) -> _Intent:
        """Put on record that the signal is about to be sent; a repeat finds the first."""
        row, now = _with_attempt(tx, job_id), self._context.now()
        if not owns(caller, owner=row["owner"], name=row["caller"]) and not may_operate(caller):
            raise not_yours(job_id)
        digest = requests.args_hash("signal_job", [job_id, name])
        known = requests.find(tx, caller.name, request_id, "signal_job", digest)
        if known is not None:
            outcome = requests.outcome(tx, caller.name, request_id)
            return _Intent(known, row["host"] or "", row["owner"], row["pool"], outcome=outcome)
        if row["attempt_id"] is None or row["state"] not in ("running", "suspended", "stopping"):
            raise Conflict(
                f"{job_id} is {row['state']}: no process to signal", code="not_running", hint="get_job shows its state."
            )
        if row["state"] == "suspended" and name == "SIGCONT":
            raise Conflict(
                f"{job_id} is suspended, and its time limit stands still until it is resumed", code="suspended",
                hint="release_job lets it go on.",
            )  # fmt: skip
        links = []
        for at, host in ranks.seats(tx.connection, row["attempt_id"]):
            link = self._context.hosts.get(host)
            if link is None:
                raise Unreachable(
                    f"host {quoted(host)} does not answer", hint="list_hosts shows why.", retry_after_s=10
                )
            links.append((at, link))
        requests.keep(tx, caller.name, request_id, "signal_job", digest, row["attempt_id"], now)
        requests.conclude(tx, caller.name, request_id, "sent")
        events.append(tx, "job.signalled", caller, now, owner=row["owner"], job_id=job_id, attempt_id=row["attempt_id"],
                      host=row["host"], pool=row["pool"], new=name, request_id=request_id)  # fmt: skip
        return _Intent(row["attempt_id"], row["host"], row["owner"], row["pool"], tuple(links))

    async def _send(self, intent: _Intent, caller: Caller, job_id: str, name: str, request_id: str | None) -> None:
        """Ask the hosts, and write down what came of it."""
        failed: CotenantError | None = None
        for number, (at, link) in enumerate(intent.links):
            try:
                await link.signal(at, getattr(signals, name))
            except HostRefused as refused:
                failed = Conflict(refused.message, code=refused.code, hint="get_job shows its state.")
            except Unreachable as away:
                failed = away
            except OutcomeUnknown:
                failed = _unknown(job_id, name)
            if failed is not None:
                # some ranks have it already: sent again it would be there twice
                failed = _unknown(job_id, name) if number else failed
                break
        if failed is None and request_id is None:
            return
        now = self._context.now()

        def write(tx: Tx) -> None:
            if failed is None or isinstance(failed, OutcomeUnknown):
                requests.conclude(tx, caller.name, request_id, "delivered" if failed is None else "unknown")
            else:
                requests.forget(tx, caller.name, request_id)  # nothing arrived: a repeat shall try anew
            if failed is not None:
                events.append(
                    tx, "job.signal_failed", LOOP, now, owner=intent.owner, severity="warning", job_id=job_id, attempt_id=intent.attempt_id,
                    host=intent.host, pool=intent.pool, old=name, new="unknown" if isinstance(failed, OutcomeUnknown) else "not sent",
                    reason=clean(f"{failed.code}: {failed.message}", 300),
                )  # fmt: skip

        await self._context.db.write(write)
        if failed is not None:
            raise failed


def _unknown(job_id: str, name: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"{name} was ordered for {job_id} and no answer is known: it may have arrived, and it is not sent again",
        hint="Look in tail_logs for its effect; send it with another request_id only if twice does no harm.",
    )


def _with_attempt(tx: Tx, job_id: str) -> sqlite3.Row:
    jobs.get(tx, job_id)
    row = tx.one(
        "SELECT j.owner, j.caller, j.state, j.pool, a.id AS attempt_id, a.host FROM job j"
        " LEFT JOIN attempt a ON a.job_id = j.id AND a.state <> 'ended' WHERE j.id = ?",
        (job_id,),
    )
    assert row is not None
    return row
