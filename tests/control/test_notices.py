"""Whatever a resource shows, whoever watches it is told when it changes: by every act, for every resource at once."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from bench import Bench
from fakehost import Machine

from cotenant.resources.catalog import KINDS, Catalog
from cotenant.server.errors import CotenantError, NotFound
from cotenant.server.mcp.results import plain
from cotenant.server.model.addresses import LIST, list_of
from cotenant.server.model.caller import Caller

#: What moves with the clock alone, is sampled (told by each report of the host), or is news of the whole pool, which
#: quota/me tells.
MOVES = {
    "age_s", "expires_in_s", "hard_end_in_s", "time_left_s", "running_s", "waiting_s", "observed_at", "until", "expires_at",
    "retry_after_s", "queue_position", "near_cap", "poll_interval_ms", "at", "for_s", "left_s", "since",
}  # fmt: skip


class Looker:
    """Reads every resource there is or was, before and after an act, and keeps what was told meanwhile."""

    def __init__(self, bench: Bench, caller: Caller) -> None:
        self._bench, self._caller = bench, caller
        self._catalog = Catalog()
        self._known: dict[str, None] = {}
        self._told: set[str] = set()
        bench.control.changes.subscribe(self._told.update)

    async def _all(self) -> dict[str, str]:
        """Address -> what it shows now. Logs stay out: they are told by the host's reports."""
        control, catalog = self._bench.control, self._catalog
        listed = sorted(item["uri"] for item in await catalog.whole(control, self._caller))
        for uri in listed:
            self._known[uri] = None
        for table, kind in (("job", "jobs"), ("lease", "leases")):
            for row in self._bench.rows(f"SELECT id FROM {table}"):
                self._known[f"cotenant://{kind}/{row['id']}"] = None
        out = {LIST: json.dumps(listed)}
        for uri in self._known:
            if not uri.endswith("/log"):
                try:
                    out[uri] = json.dumps(_still(plain(await catalog.read(control, self._caller, uri))), sort_keys=True)
                except NotFound as gone:
                    out[uri] = gone.code
        return out

    async def during(self, name: str, act: Awaitable[Any]) -> Any:
        """Do it; whatever looks different afterwards must have been told."""
        before = await self._all()
        self._told.clear()
        done = await act
        await self._bench.settle()
        told = {LIST if address in (LIST, list_of(self._caller.owner)) else address for address in self._told}
        after = await self._all()
        silent = {uri for uri, shows in after.items() if before.get(uri) not in (None, shows)} - told
        assert not silent, f"{name}: nobody is told of {sorted(silent)}: {[(before[u], after[u]) for u in silent][:1]}"
        return done


def _still(value: Any) -> Any:
    """Without what moves by itself."""
    if isinstance(value, dict):
        return {key: _still(item) for key, item in value.items() if key not in MOVES}
    return [_still(item) for item in value] if isinstance(value, list) else value


MakeBench = Callable[..., Awaitable[Bench]]


async def test_every_change_of_every_resource_is_told(make_bench: MakeBench) -> None:
    bench = await make_bench(Machine(), toml='[pools.default]\nvisibility = "open"\n')
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    eye, control, machine = await bench.caller("eye", "alice"), bench.control, bench.machine
    look = Looker(bench, eye)
    during = look.during

    job = await during("submit", bench.submit(a, gpus=1, name="first"))
    lease = (await during("acquire", control.leases.acquire(a, gpus=1))).lease_id
    claim = await during("queue a claim", bench.queue(b, gpus=2))
    waits = await during("queue a job", bench.submit(a, gpus=2, name="second"))
    other = await during("queue another's job", bench.submit(b, gpus=1, name="third"))
    await during("hold", control.jobs.hold(a, waits, "not yet"))
    await during("unhold", control.jobs.unhold(a, waits, "go"))
    await during("heartbeat", control.leases.heartbeat(a, lease))
    await during("hand the lease over within an owner", control.leases.hand_over(a, lease, "eye"))
    await during("offer a job", control.leases.hand_over(a, waits, "b"))
    await during("accept a job", control.leases.hand_over(b, waits, "b"))
    await during("hand a running job over", control.leases.hand_over(a, job, "eye"))
    await during("withdraw the claim", control.leases.release(b, claim))
    await during("release", control.leases.release(eye, lease))
    await during("the job ends", _finish(bench, job, 0))
    await during("time passes", bench.advance(70))
    await during("cancel what waits", control.jobs.cancel(b, other, confirm_token=await _yes(bench, b, other)))
    await during("the host is cut off", bench.disconnect(machine))
    await during("silence", bench.advance(120))
    await during("the host is back", bench.connect(machine))
    await during("everything ends", bench.advance(60))


async def test_a_card_that_fails_is_told_everywhere(make_bench: MakeBench) -> None:
    bench = await make_bench(Machine(cards=2))
    look = Looker(bench, await bench.caller("a", "alice"))

    async def sick() -> None:
        bench.machine.card_states[bench.machine.uuids[1]] = ("sick", "Xid 79")
        bench.telemetry()

    await look.during("a card is sick", sick())


async def _finish(bench: Bench, job_id: str, code: int) -> None:
    bench.machine.finish(bench.attempt(job_id)["id"], code)


async def _yes(bench: Bench, caller: Caller, job_id: str) -> str:
    token, _ = await bench.control.confirmations.mint(caller, "cancel_job", job_id)
    return token


def test_no_kind_of_resource_is_left_out() -> None:
    assert {kind.name for kind in KINDS} == {
        "overview", "gpus", "quota", "events", "host", "gpu", "queue", "job", "log", "lease",
        "templates", "template",  # files: whoever changes one tells nobody
    }, "a new one belongs into the test above"  # fmt: skip
    assert issubclass(NotFound, CotenantError)
