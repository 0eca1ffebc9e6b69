"""What only people do: the verbs behind POST /operate/VERB. Each needs a reason and leaves an event."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

from pydantic import ValidationError

from cotenant.server.clock import iso
from cotenant.server.control.context import Context, said
from cotenant.server.control.holds import free_slots
from cotenant.server.control.hosts import Hosts
from cotenant.server.control.jobs import Jobs
from cotenant.server.control.leases import Leases
from cotenant.server.control.logins import Logins
from cotenant.server.control.outcomes import settle
from cotenant.server.control.preempting import Preempting
from cotenant.server.control.rulebook import RuleBook
from cotenant.server.control.stopping import order_stop
from cotenant.server.control.tokens import Tokens
from cotenant.server.errors import BadRequest, Conflict, Forbidden, NotFound
from cotenant.server.model.caller import Caller, may_operate
from cotenant.server.model.changes import JobChange
from cotenant.server.model.states import AttemptState, LeaseState
from cotenant.server.model.text import clean
from cotenant.server.store import events, jobs, leases
from cotenant.server.store.db import Tx
from cotenant.server.store.views import Views

Verb = Callable[[Caller, dict[str, Any], str], Awaitable[dict[str, Any]]]


class Operate:
    """The door for people's acts; tokens of agents are refused whatever their scopes."""

    def __init__(
        self, context: Context, views: Views, leases_: Leases, jobs_: Jobs, hosts: Hosts, tokens: Tokens, logins: Logins,
        preempting: Preempting,
        rulebook: RuleBook,
    ) -> None:  # fmt: skip
        self._context = context
        self._views = views
        self._leases = leases_
        self._jobs = jobs_
        self._hosts = hosts
        self._tokens = tokens
        self._logins = logins
        self._preempting = preempting
        self._rulebook = rulebook
        self.verbs: dict[str, tuple[str, Verb]] = {
            "token.create": ("admin", self._token_create),
            "token.list": ("admin", self._token_list),
            "token.revoke": ("admin", self._token_revoke),
            "lease.evict": ("operate", self._lease_evict),
            "job.cancel": ("operate", self._job_cancel),
            "job.evict": ("operate", self._job_evict),
            "job.agree-preemption": ("operate", self._job_agree),
            "job.hold": ("operate", self._job_hold),
            "job.unhold": ("operate", self._job_unhold),
            "job.suspend": ("operate", self._job_suspend),
            "job.modify": ("operate", self._job_modify),
            "job.resume": ("operate", self._job_unhold),
            "job.abandon": ("operate", self._job_abandon),
            "slot.clear": ("operate", self._slot_clear),
            "host.take-over": ("admin", self._host_take_over),
            "login.link": ("read", self._login_link),
            "quota.set": ("operate", self._quota_set),
            "quota.reset": ("operate", self._quota_reset),
            "quota.list": ("read", self._quota_list),
            "quota.evict-excess": ("operate", self._quota_evict_excess),
            "reserve.add": ("operate", self._reserve_add),
            "reserve.remove": ("operate", self._reserve_remove),
        }

    async def __call__(self, caller: Caller, verb: str, args: dict[str, Any], reason: str) -> dict[str, Any]:
        """Do `verb`.

        Raises:
            NotFound: no such verb.
            Forbidden: not a person's token, or without the scope.
            BadRequest: no reason, or an argument is missing or of the wrong type.
        """
        if verb not in self.verbs:
            raise NotFound(
                f"there is no operation {clean(verb, 40)!r}",
                code="no_such_verb",
                hint=f"Known: {', '.join(sorted(self.verbs))}.",
            )
        scope, act = self.verbs[verb]
        if not caller.human:
            raise Forbidden(
                "only people may do this",
                code="people_only",
                hint="Ask your human to do it in the panel or with the command line.",
            )
        if scope not in caller.scopes and not (scope == "operate" and may_operate(caller)):
            raise Forbidden(
                f"your token lacks the scope {scope!r}", code="missing_scope", hint="Use a token that has it."
            )
        if not verb.endswith(".list") and not reason.strip():
            raise BadRequest(
                "an operation needs a reason",
                code="reason_required",
                hint='Give "reason" in a few words; it stands in the audit.',
            )
        return await act(caller, args, said(reason, "reason", 500))

    async def _token_create(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        known = {
            "name",
            "kind",
            "owner",
            "scopes",
            "expires_s",
            "toolset",
            "pools",
            "max_priority",
            "autopilot",
            "own_only",
        }
        _only(args, known)
        values = {key: value for key, value in args.items() if value is not None}
        readers: dict[str, Callable[[dict[str, Any], str], Any]] = {
            "expires_s": _whole, "toolset": _text, "pools": _words, "max_priority": _text, "autopilot": _flag, "own_only": _flag,
        }  # fmt: skip
        return await self._tokens.create(
            caller, _text(values, "name"), _text(values, "kind"), _text(values, "owner"), _words(values, "scopes"),
            reason=reason, **{key: read(values, key) for key, read in readers.items() if key in values},
        )  # fmt: skip

    async def _token_list(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, set())
        return {"tokens": await self._tokens.list()}

    async def _token_revoke(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"token", "all"})
        every = _flag(args, "all") if args.get("all") is not None else False
        return await self._tokens.revoke(caller, _text(args, "token"), reason, every=every)

    async def _quota_set(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"scope", "name", "key", "value"})
        if "value" not in args:
            raise BadRequest("value is missing", hint="Give null to take a cap away.")
        scope, name, key = (_text(args, word) for word in ("scope", "name", "key"))
        return await self._rulebook.set(caller, scope, name, key, args["value"], reason)

    async def _quota_reset(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"scope", "name", "key"})
        scope, name, key = (_text(args, word) for word in ("scope", "name", "key"))
        return await self._rulebook.reset(caller, scope, name, key, reason)

    async def _quota_list(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, set())
        return self._rulebook.show()

    async def _quota_evict_excess(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        """End in one step what is above a lowered cap and would else run to its end."""
        _only(args, {"pool"})
        pool = _text(args, "pool") if args.get("pool") is not None else None
        evicted: list[str] = []
        refused: list[dict[str, str]] = []
        for one in self._rulebook.excess(pool):
            try:
                await self._lease_evict(caller, {"lease_id": one.lease_id}, reason)
                evicted.append(one.job_id or one.lease_id)
            except Conflict as error:  # it ended meanwhile
                refused.append({"id": one.job_id or one.lease_id, "why": str(error)})
        return {"evicted": evicted, "refused": refused}

    async def _reserve_add(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"pool", "owner", "cards", "begin_ms", "end_ms"})
        return await self._rulebook.reserve(
            caller, _text(args, "pool"), _text(args, "owner"), _whole(args, "cards"), _whole(args, "begin_ms"),
            _whole(args, "end_ms"), reason,
        )  # fmt: skip

    async def _reserve_remove(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"reservation_id"})
        return await self._rulebook.unreserve(caller, _text(args, "reservation_id"), reason)

    async def _login_link(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, set())
        code, expires = await self._logins.link(caller, reason)
        left = (expires - self._context.now()) // 1000
        return {"path": f"/login/{code}", "expires_at": iso(expires), "expires_in_s": left}

    async def _lease_evict(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"lease_id"})
        lease_id = _text(args, "lease_id")
        lease = await self._views.get_lease(caller, lease_id)
        if lease.job_id is not None:
            return await self._job_evict(caller, {"job_id": lease.job_id}, reason)
        if lease.state == "queued":
            raise Conflict("this claim holds nothing yet", code="still_queued")
        if not await self._leases.end(caller, lease_id, LeaseState.REVOKED, f"evicted: {reason}"):
            raise Conflict(f"lease {lease_id} has ended already", code="already_final")
        self._context.wake()
        return asdict(replace(await self._views.get_lease(caller, lease_id), env=None))

    async def _job_cancel(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"job_id"})
        return asdict(
            await self._jobs.cancel(
                replace(caller, door="operate"), _text(args, "job_id"), confirmed=True, reason=reason
            )
        )

    async def _job_evict(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        """Take a job off its cards: after a notice and a grace where it can save, at once with `now`."""
        _only(args, {"job_id", "now"})
        job_id, now = _text(args, "job_id"), self._context.now()
        at_once = _flag(args, "now") if args.get("now") is not None else False
        if not at_once and await self._preempting.evict(caller, job_id, reason):
            return asdict(await self._views.get_job(caller, job_id))

        def write(tx: Tx) -> None:
            row = jobs.get(tx, job_id)
            if row["ended_at_ms"] is not None:
                raise Conflict(f"{job_id} has ended already", code="already_final")
            order_stop(tx, caller, row, "evict", now, confirmed="person", why=reason)

        await self._context.db.write(write)
        await self._jobs.carry_out_stops(job_id)
        self._context.wake()
        return asdict(await self._views.get_job(caller, job_id))

    async def _job_agree(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        """A person agrees that a job may be preempted although it cannot go on from a checkpoint."""
        _only(args, {"job_id"})
        job_id, now = _text(args, "job_id"), self._context.now()

        def write(tx: Tx) -> None:
            row = jobs.get(tx, job_id)
            if row["ended_at_ms"] is not None:
                raise Conflict(f"{job_id} has ended already", code="already_final")
            jobs.update(tx, job_id, preempt_agreed=caller.name)
            if (attempt := jobs.live_attempt(tx, job_id)) is not None:
                tx.dirty.add(("lease", attempt["lease_id"]))
            events.append(tx, "job.preempt_agreed", caller, now, owner=row["owner"], severity="warning", job_id=job_id,
                          reason=reason)  # fmt: skip

        await self._context.db.write(write)
        self._context.wake()
        return asdict(await self._views.get_job(caller, job_id))

    async def _job_hold(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"job_id"})
        return asdict(await self._jobs.hold(caller, _text(args, "job_id"), reason))

    async def _job_unhold(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"job_id"})
        return asdict(await self._jobs.unhold(caller, _text(args, "job_id"), reason))

    async def _job_suspend(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"job_id"})
        return asdict(await self._jobs.hold(caller, _text(args, "job_id"), reason, suspend=True))

    async def _job_modify(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"job_id", "change"})
        try:
            change = JobChange.model_validate(args.get("change"), strict=False)
        except ValidationError as error:
            said_it = "; ".join(
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)
            )
            raise BadRequest(f"change: {clean(said_it, 400)}") from None
        return asdict(await self._jobs.modify(caller, _text(args, "job_id"), change, reason=reason))

    async def _job_abandon(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        """Give a lost job up: a person says that its processes are gone, or does not care."""
        _only(args, {"job_id"})
        job_id, now = _text(args, "job_id"), self._context.now()

        def write(tx: Tx) -> None:
            row = jobs.get(tx, job_id)
            attempt = jobs.live_attempt(tx, job_id)
            if attempt is None or (row["state"] != "lost" and attempt["state"] != "lost"):
                raise Conflict(f"{job_id} is {row['state']}, not lost", code="not_lost", hint="Cancel it instead.")
            jobs.move_attempt(
                tx,
                attempt["id"],
                AttemptState.ENDED,
                ended_at_ms=now,
                failure_class="lost",
                message="given up by a person",
            )
            lease = leases.get(tx, attempt["lease_id"])
            if lease["state"] in ("leased", "running"):
                # not clean: the host frees the slots when it is back and has looked
                leases.move(
                    tx, lease["id"], LeaseState.REVOKED, ended_at_ms=now, end_reason="abandoned", pickup_by_ms=None
                )
                leases.end_slots(tx, lease["id"], "cleaning", now)
            events.append(tx, "job.abandoned", caller, now, owner=row["owner"], severity="warning", job_id=job_id,
                          attempt_id=attempt["id"], host=attempt["host"], old=row["state"], reason=reason)  # fmt: skip
            settle(tx, self._context, jobs.get(tx, job_id), attempt, "lost", "given up by a person", None, now)

        await self._context.db.write(write)
        self._context.wake()
        return asdict(await self._views.get_job(caller, job_id))

    async def _slot_clear(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        """Declare the slots of an ended lease free although the host could not confirm it."""
        _only(args, {"lease_id"})
        lease_id, now = _text(args, "lease_id"), self._context.now()

        def write(tx: Tx) -> bool:
            if leases.get(tx, lease_id)["state"] in ("queued", "leased", "running"):
                raise Conflict(f"lease {lease_id} has not ended", code="not_final", hint="Evict it first.")
            return free_slots(tx, lease_id, now, caller, reason=reason)

        freed = await self._context.db.write(write)
        self._context.wake()
        return {"lease_id": lease_id, "freed": freed}

    async def _host_take_over(self, caller: Caller, args: dict[str, Any], reason: str) -> dict[str, Any]:
        _only(args, {"host"})
        return await self._hosts.order_take_over(caller, _text(args, "host"), reason)


def _only(args: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(args) - known):
        raise BadRequest(
            f"unknown arguments: {', '.join(clean(u, 40) for u in unknown)}",
            hint=f"Known: {', '.join(sorted(known)) or 'none'}.",
        )


def _text(args: dict[str, Any], name: str) -> str:
    value = args.get(name)
    if not isinstance(value, str) or not value or len(value) > 500:
        raise BadRequest(f"{name} must be a non-empty text")
    return value


def _whole(args: dict[str, Any], name: str) -> int:
    value = args.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name} must be a whole number")
    return value


def _flag(args: dict[str, Any], name: str) -> bool:
    value = args.get(name)
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false")
    return value


def _words(args: dict[str, Any], name: str) -> list[str]:
    value = args.get(name)
    if isinstance(value, str):
        return value.split(",")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadRequest(f"{name} must be a list of words, or words with commas between")
    return value
