"""The play of the demo: two MCP clients, one card, one training, and a check for everything that was promised.

What the agents do here is what a coding agent does over its own client: only the SDK's public client and our tools.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost

from cotenant.ui.cli.demo_stage import Narrator
from cotenant.ui.cli.problems import Problem, ToolRefused

Answer = dict[str, Any]
#: Seconds beyond the training's own that the whole play may take, on a slow machine too.
SLACK_S = 150
FINAL = ("succeeded", "failed", "cancelled")


def play(
    url: str, tokens: dict[str, str], *, train: str, seconds: int, out: str, told: Narrator
) -> list[tuple[str, bool]]:
    """Play it to the end; (what was promised, whether it held), in order.

    Raises:
        Problem: an agent met something that ended the play.
    """
    play = _Play(url, tokens, train=train, seconds=seconds, out=out, told=told)
    try:
        asyncio.run(play.run())
    except TimeoutError:
        raise Problem(f"The play was not over {SLACK_S} s after it should have been.") from None
    except BaseExceptionGroup as group:  # the SDK's task groups wrap what went wrong inside them
        raise _first(group) from group
    return play.checks


def _first(group: BaseException) -> BaseException:
    """What really went wrong: a Problem if there is one, KeyboardInterrupt before all, else the error as a Problem."""
    leaves: list[BaseException] = []

    def gather(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                gather(inner)
        else:
            leaves.append(error)

    gather(group)
    for kind in (KeyboardInterrupt, Problem):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return Problem(f"{type(leaves[0]).__name__}: {leaves[0]}")


class Agent:
    """One agent: a name for the narration and an MCP client with its token."""

    def __init__(self, caller: str, client: Client, told: Narrator) -> None:
        self.caller = caller
        self.short = caller.partition("-")[0]
        self.client = client
        self._told = told

    def says(self, text: str) -> None:
        self._told.line(self.short, text)

    async def call(self, tool: str, *, waiting: Callable[[str], None] | None = None, **args: Any) -> Answer:
        """A tool's structured answer. Raises ToolRefused with the server's sentence, Problem for anything else."""

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            if waiting is not None and message:
                waiting(message)

        try:
            result = await self.client.call_tool(
                tool, args, progress_callback=on_progress if waiting is not None else None
            )
        except MCPError as exc:
            raise Problem(f"{self.caller}: {tool} failed: {exc}") from exc
        if result.is_error:
            text = " ".join(getattr(part, "text", "") for part in result.content)
            record = (result.meta or {}).get("cotenant.dev/error") or {}
            raise ToolRefused(str(record.get("code") or text.partition(":")[0]), text, record)
        if result.structured_content is None:
            raise Problem(f"{self.caller}: {tool} answered without structured content")
        return dict(result.structured_content)


@contextlib.asynccontextmanager
async def _agent(caller: str, token: str, url: str, told: Narrator) -> AsyncIterator[Agent]:
    timeout = httpx2.Timeout(30.0, read=300.0)  # a stream may stay silent for long
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=timeout) as http:
        async with Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client:
            yield Agent(caller, client, told)


class _Play:
    def __init__(self, url: str, tokens: dict[str, str], *, train: str, seconds: int, out: str, told: Narrator) -> None:
        self._url = url
        self._tokens = tokens
        self._train = train
        self._seconds = seconds
        self._out = Path(out)
        self._told = told
        self.checks: list[tuple[str, bool]] = []

    def check(self, text: str, held: bool) -> None:
        self.checks.append((text, held))
        if not held:
            self._told.line("check", f"DID NOT HOLD: {text}")

    async def run(self) -> None:
        async with asyncio.timeout(self._seconds + SLACK_S), contextlib.AsyncExitStack() as stack:
            agents = [
                await stack.enter_async_context(_agent(caller, token, self._url, self._told))
                for caller, token in self._tokens.items()
            ]
            for agent in agents:
                agent.says(f"connected, protocol {agent.client.protocol_version}")
            cards = await self.look_around(agents)
            holder, other, first = await self.race(agents, cards)
            await self.give_back(holder, first)
            await self.train_and_queue(holder, other, cards, first["fence"])
            await self.afterwards(agents)

    async def look_around(self, agents: list[Agent]) -> int:
        """Each asks for its quota and the cards; the number of cards that are free."""
        await _until(lambda: _some_free(agents[0]), 30, "no card is free, and none became free")
        free: list[int] = []
        for agent in agents:
            quota = await agent.call("quota_status")
            gpus = await agent.call("list_gpus")
            pool = quota["pools"][0]
            kinds = {
                g["model"] + (" (simulated)" if g["simulated"] and "imulated" not in g["model"] else "")
                for g in gpus["gpus"]
            }
            agent.says(
                f"quota_status: {pool['used']} of {pool['cap']} used in pool {pool['pool']}, I can start {pool['you_can_start']}; "
                f"list_gpus: {gpus['free']} of {gpus['total']} free, {', '.join(sorted(kinds))}"
            )
            free.append(min(gpus["free"], pool["you_can_start"]))
        self.check("both agents see free cards and may take them", min(free) >= 1)
        if min(free) < 1:
            raise Problem("No card can be leased here: the demo ends.")
        return free[0]

    async def race(self, agents: list[Agent], cards: int) -> tuple[Agent, Agent, Answer]:
        """Both ask for the same cards in the same moment. Returns who got them, who did not, and the lease."""
        what = "the card" if cards == 1 else f"all {cards} cards"
        for agent in agents:
            agent.says(f"acquire_lease: I want {what} now")
        asks = [
            agent.call(
                "acquire_lease", gpus=cards, ttl_s=120, purpose="the demo's race", request_id=f"race-{agent.caller}"
            )
            for agent in agents
        ]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ToolRefused):
                raise answer
        granted = [i for i, answer in enumerate(answers) if isinstance(answer, dict)]
        self.check("exactly one of the two got the lease", len(granted) == 1)
        if len(granted) != 1:
            raise Problem(f"{len(granted)} of two got the lease: {[str(answer) for answer in answers]}")
        holder, other = agents[granted[0]], agents[1 - granted[0]]
        lease, refusal = answers[granted[0]], answers[1 - granted[0]]
        assert isinstance(lease, dict) and isinstance(refusal, ToolRefused)
        holder.says(
            f"got {lease['lease_id']}, fence {lease['fence']}, CUDA_VISIBLE_DEVICES={(lease['env'] or {}).get('CUDA_VISIBLE_DEVICES')}"
        )
        other.says(f"refused: {refusal.exact}")
        self.check(
            "the lease names its cards, its end and its environment",
            bool(lease["slots"] and lease["hard_end_at"] and lease["env"]),
        )
        self.check("the other is told who holds it", holder.caller in refusal.text)
        self.check("the other is told until when", re.search(r"\d\d:\d\d", refusal.text) is not None)
        seen = await other.call("list_gpus")
        self.check(
            "list_gpus shows the other who holds the card", any(g["holder"] == holder.caller for g in seen["gpus"])
        )
        return holder, other, lease

    async def give_back(self, holder: Agent, lease: Answer) -> None:
        beat = await holder.call("heartbeat", lease_id=lease["lease_id"])
        holder.says(f"heartbeat: {beat['state']}, expires in {beat['expires_in_s']} s")
        done = await holder.call("release_lease", lease_id=lease["lease_id"], request_id=f"back-{holder.caller}")
        holder.says(f"release_lease: {done['state']}")
        self.check(
            "the lease was renewed and given back", beat["expires_in_s"] is not None and done["state"] == "released"
        )
        await _until(lambda: _some_free(holder), 90, "the card did not become free after its release")

    async def train_and_queue(self, trainer: Agent, other: Agent, cards: int, fence: int) -> None:
        """One trains on the card, the other waits in line for it meanwhile, gets it, and gives it back."""
        spec: Answer = {
            "command": [sys.executable, self._train, "--seconds", str(self._seconds), "--out", str(self._out)],
            "name": "two moons", "purpose": "the demo's training", "kind": "train", "project": "demo", "gpus": 1, "hours": 0.5,
            "request_id": f"train-{trainer.caller}",
        }  # fmt: skip
        job = await trainer.call("submit_job", **spec)
        job_id = job["job_id"]
        trainer.says(f"submit_job: {job_id} is {job['state']}, task {job['task']['status']}")
        again = await trainer.call("submit_job", **spec)
        self.check("the same request sent twice is one job", again["job_id"] == job_id)
        await _until(lambda: _started(trainer, job_id), 60, "the training did not start")
        claimed = asyncio.create_task(self.wait_in_line(other, cards, job_id))
        try:
            lines, updates = await self.follow(trainer, job_id)
            ended = await self.wait_for(trainer, job_id)
            lease = await claimed
        finally:
            claimed.cancel()
            await asyncio.gather(claimed, return_exceptions=True)
        self.judge(trainer, ended, lines, updates)
        attempt_fence = ended["attempts"][0]["fence"] if ended["attempts"] else 0
        self.check("fences only rise: race, training, then the other's lease", fence < attempt_fence < lease["fence"])

    async def follow(self, agent: Agent, job_id: str) -> tuple[list[str], int]:
        """Tail the log whenever the subscription says that it grew; (all lines, updates that came)."""
        uris = [f"cotenant://jobs/{job_id}", f"cotenant://jobs/{job_id}/log"]
        lines: list[str] = []
        updates, cursor = 0, None
        try:
            async with agent.client.listen(resource_subscriptions=uris) as subscription:
                agent.says(f"subscribed to {' and '.join(uris)}")
                final = False
                while not final:
                    while True:  # all that is there; what comes later makes an update
                        log = await agent.call(
                            "tail_logs", job_id=job_id, lines=200, **({"cursor": cursor} if cursor else {})
                        )
                        cursor = log["cursor"] or cursor
                        lines += log["lines"]
                        final = log["final"]
                        if log["lines"]:
                            agent.says(
                                f"log: {log['lines'][-1]}"
                                + (f"  (+{len(log['lines']) - 1} lines)" if len(log["lines"]) > 1 else "")
                            )
                        if not log["more"]:
                            break
                    if not final:
                        await anext(subscription)
                        updates += 1
        except SubscriptionLost as exc:
            raise Problem(f"{agent.caller}: the subscription broke off: {exc}") from exc
        except StopAsyncIteration:
            raise Problem(f"{agent.caller}: the server ended the subscription") from None
        return lines, updates

    async def wait_for(self, agent: Agent, object_id: str) -> Answer:
        """wait_job until it is over, or the lease is granted."""
        told = ""

        def waiting(text: str) -> None:
            nonlocal told
            if text != told:
                agent.says(f"waiting: {text}")
            told = text

        while True:
            answer = await agent.call("wait_job", job_id=object_id, max_wait_s=45, waiting=waiting)
            if answer["done"]:
                return answer

    async def wait_in_line(self, agent: Agent, cards: int, job_id: str) -> Answer:
        """Queue for the cards that the training holds, and use the lease once it is there."""
        claim = await agent.call(
            "acquire_lease",
            gpus=cards,
            ttl_s=120,
            purpose="a quick look after the training",
            when_full="queue",
            request_id=f"queue-{agent.caller}",
        )
        blocker = (claim["blockers"] or [{}])[0]
        agent.says(
            f'acquire_lease(when_full="queue"): {claim["lease_id"]} is {claim["state"]}: {blocker.get("code")}: {blocker.get("message")}'
        )
        self.check(
            "the other waits in line, and is told for what", claim["state"] == "queued" and bool(blocker.get("code"))
        )
        queues = await agent.call("list_queues")
        waiting = [entry["id"] for queue in queues["queues"] for entry in queue["entries"]]
        self.check("list_queues shows the claim", claim["lease_id"] in waiting)
        lease = await self.wait_for(agent, claim["lease_id"])
        agent.says(f"wait_job: {lease['lease_id']} is {lease['state']}; picking it up")
        self.check("the claim was granted", lease["state"] == "leased")
        if lease["state"] != "leased":
            raise Problem(f"{agent.caller}: the claim ended as {lease['state']}: {lease['end_reason']}")
        job = await agent.call("get_job", job_id=job_id)
        self.check("the claim was granted only after the training had ended", job["state"] in FINAL)
        beat = await agent.call("heartbeat", lease_id=lease["lease_id"])
        gpus = await agent.call("list_gpus")
        held = sum(g["holder"] == agent.caller for g in gpus["gpus"])
        agent.says(f"heartbeat: {beat['state']}, expires in {beat['expires_in_s']} s, I hold {held}")
        self.check("it was picked up with a heartbeat", beat["state"] in ("leased", "running") and held == cards)
        done = await agent.call("release_lease", lease_id=lease["lease_id"], request_id=f"done-{agent.caller}")
        agent.says(f"release_lease: {done['state']}")
        self.check("and given back", done["state"] == "released")
        return lease

    def judge(self, agent: Agent, job: Answer, lines: list[str], updates: int) -> None:
        """The training's result, as the job, the log and its own files tell it."""
        agent.says(f"wait_job: {job['job_id']} {job['state']}, exit code {job['exit_code']}, ran {job['running_s']} s")
        self.check("the training succeeded with exit code 0", job["state"] == "succeeded" and job["exit_code"] == 0)
        self.check("the subscription told of its log while it ran", updates >= 2 and len(lines) >= 2)
        result: Answer = {}
        with contextlib.suppress(OSError, ValueError):
            result = json.loads((self._out / "result.json").read_text(encoding="utf-8"))
        if result:
            agent.says("result.json: " + json.dumps(result, ensure_ascii=False)[:160])
        self.check("the result can be read", bool(result))
        events = [path for path in self._out.rglob("*tfevents*") if path.stat().st_size > 0]
        self.check("it wrote TensorBoard event files", bool(events))
        slots = job["attempts"][0]["slots"] if job["attempts"] else []
        self.check("its attempt ran on a leased card", bool(slots) and bool(slots[0]["uuid"]))

    async def afterwards(self, agents: list[Agent]) -> None:
        """All is as it was, and the audit tells the story."""
        await _until(lambda: _all_idle(agents[0]), 90, "the cards did not become free after the end")
        quota = await agents[0].call("quota_status")
        self.check("at the end nothing is held", all(pool["used"] == 0 for pool in quota["pools"]))
        answer = await agents[0].call("list_events", limit=500, since="2000-01-01T00:00:00Z")
        seen = [event["type"] for event in answer["events"]]
        agents[0].says(f"list_events: {len(seen)} events, {len(set(seen))} types")
        self.check(
            "every lease and job is in the audit",
            sum(t.startswith("lease.") for t in seen) >= 4 and any(t.startswith("job.") for t in seen),
        )


async def _until(what: Callable[[], Awaitable[bool]], within_s: float, otherwise: str) -> None:
    """Ask again and again, politely, until it holds. Raises Problem after `within_s`."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not await what():
        if asyncio.get_running_loop().time() > deadline:
            raise Problem(f"{otherwise} within {within_s:.0f} s.")
        await asyncio.sleep(0.2)


async def _some_free(agent: Agent) -> bool:
    return bool((await agent.call("list_gpus"))["free"] >= 1)


async def _all_idle(agent: Agent) -> bool:
    gpus = (await agent.call("list_gpus"))["gpus"]
    return all(gpu["state"] not in ("held", "cleaning") for gpu in gpus)


async def _started(agent: Agent, job_id: str) -> bool:
    job = await agent.call("get_job", job_id=job_id)
    if job["state"] in ("failed", "cancelled"):
        raise Problem(f"The training ended before it began: {job['state']}: {job['message']}")
    return job["state"] in ("running", "succeeded")
