"""Subscriptions in both styles: what changes is told, private things only to those who may see them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import mcp_types as wire
import pytest
from mcp.shared.exceptions import MCPError

from cotenant.server.mcp import sessions, watching
from cotenant.server.mcp.watching import TooManyWatchers, Watching
from cotenant.server.model.addresses import LIST, list_of
from cotenant.server.model.caller import Caller

ALICE = Caller("alice-agent", "agent", "alice", frozenset({"read"}), "tok_1")


async def until(there: Callable[[], object], within_s: float = 5.0) -> None:
    """Come back once `there` says so."""
    end = time.monotonic() + within_s
    while not there():
        assert time.monotonic() < end, f"not within {within_s} s"
        await asyncio.sleep(0.01)


async def test_a_listener_follows_a_job_to_its_end(server: Any, tokens: dict[str, str]) -> None:
    async with server.client(tokens["alice"]) as alice:
        job = await alice.call("submit_job", command="echo one; sleep 0.5; echo two", gpus=0, name="followed")
        uri = f"cotenant://jobs/{job['job_id']}"
        states = []
        async with asyncio.timeout(20):
            async with alice.client.listen(resource_subscriptions=[uri, "cotenant://gpus"]) as stream:
                job = json.loads((await alice.client.read_resource(uri)).contents[0].text)
                while job["state"] not in ("succeeded", "failed"):
                    event = await anext(stream)
                    if event.uri == uri:
                        job = json.loads((await alice.client.read_resource(uri)).contents[0].text)
                        states.append(job["state"])
        assert job["state"] == "succeeded"


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
async def test_a_session_of_an_older_client_follows_too(server: Any, tokens: dict[str, str]) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()

    async def on_message(message: Any) -> None:
        if isinstance(message, wire.ResourceUpdatedNotification):
            await told.put(str(message.params.uri))

    async with server.client(tokens["alice"], "legacy", message_handler=on_message) as alice:
        await alice.client.session.subscribe_resource("cotenant://quota/me")
        await alice.client.session.subscribe_resource("cotenant://gpus")
        async with asyncio.timeout(20):
            lease = await alice.call("acquire_lease", gpus=1)
            seen = {await told.get()}
            while not {"cotenant://quota/me", "cotenant://gpus"} <= seen:
                seen.add(await told.get())
            await alice.client.session.unsubscribe_resource("cotenant://gpus")
            await alice.call("release_lease", lease_id=lease["lease_id"])
            assert await told.get() == "cotenant://quota/me"


async def test_another_owners_log_is_not_told_of(server: Any, tokens: dict[str, str], tmp_path: Path) -> None:
    """Both watch the same log and the same job; bob hears of the job only."""
    go = tmp_path / "go"
    async with (
        server.client(tokens["alice"]) as alice,
        server.client(tokens["bob"]) as bob,
        server.client(tokens["alice"]) as other,
    ):
        job = await other.call(
            "submit_job",
            command=f"until [ -e {go} ]; do sleep 0.05; done; echo private; sleep 0.2",
            gpus=0,
            name="private log",
        )
        uri = f"cotenant://jobs/{job['job_id']}"
        log = f"{uri}/log"
        heard: dict[str, list[str]] = {"alice": [], "bob": []}
        listening = {"alice": asyncio.Event(), "bob": asyncio.Event()}

        async def follow(name: str, agent: Any) -> None:
            async with agent.client.listen(resource_subscriptions=[uri, log]) as stream:
                listening[name].set()
                async for event in stream:
                    heard[name].append(event.uri)

        async with anyio.create_task_group() as group:
            group.start_soon(follow, "alice", alice)
            group.start_soon(follow, "bob", bob)
            for event in listening.values():
                await event.wait()
            go.touch()
            await other.until(job["job_id"], "succeeded")
            await until(lambda: log in heard["alice"] and uri in heard["bob"], 15)
            group.cancel_scope.cancel()
        assert log in heard["alice"], heard
        assert uri in heard["bob"] and log not in heard["bob"], heard


async def test_a_revoked_token_loses_its_streams(server: Any) -> None:
    token = server.token("stream-holder", "sue")
    async with server.client(token) as agent:
        async with asyncio.timeout(15):
            async with agent.client.listen(resource_subscriptions=["cotenant://events"]) as stream:
                server.operate("token.revoke", {"token": "stream-holder"})
                async for _ in stream:
                    pass  # what was on its way; then the stream ends by itself


async def test_addresses_that_are_not_ours_are_not_watched(server: Any, tokens: dict[str, str]) -> None:
    async with server.client(tokens["alice"]) as alice:
        async with asyncio.timeout(15):
            uris = ["cotenant://gpus", "file:///etc/passwd", "cotenant://jobs/../../x"]
            async with alice.client.listen(resource_subscriptions=uris) as stream:
                assert list(stream.honored.resource_subscriptions or ()) == ["cotenant://gpus"]


async def test_a_client_with_too_many_streams_is_told_so(make_server: Callable[..., Any]) -> None:
    """In both styles, with a number and what to do; another caller has its own."""
    server = make_server(config="[server]\nstreams_per_caller = 1\n")
    token = server.token("greedy", "alice")
    async with server.client(token) as agent, server.client(server.token("modest", "bob")) as other:
        async with agent.client.listen(resource_subscriptions=["cotenant://gpus"]):
            with pytest.raises(MCPError, match=r"too_many_streams: you have 1 streams open"):
                async with agent.client.listen(resource_subscriptions=["cotenant://events"]):
                    pass
            async with other.client.listen(resource_subscriptions=["cotenant://gpus"]):
                pass

        async def again() -> Any:
            with contextlib.suppress(MCPError):
                async with agent.client.listen(resource_subscriptions=["cotenant://events"]):
                    return True

        assert await agent.eventually(again), "the stream that was closed counts no more"
    old = Old(server, token)
    with old.stream() as first, Old(server, token).stream() as second:
        assert (first.status, second.status) == (200, 429)
        assert "too_many_streams: you have 1 streams open" in second.read().decode()
    old.request("resources/subscribe", uri="cotenant://gpus")
    refused = Old(server, token).request("resources/subscribe", uri="cotenant://gpus")
    assert refused["error"]["message"].startswith("too_many_streams: "), refused


def test_what_changed_while_no_stream_was_open_is_told_by_the_next(make_server: Callable[..., Any]) -> None:
    """An older client subscribes and opens its stream later, or loses it for a while: the last state is not lost."""
    server = make_server()
    token = server.token("late", "alice")
    old = Old(server, token)
    old.request("resources/subscribe", uri="cotenant://quota/me")
    for _ in range(2):
        lease = old.request("tools/call", name="acquire_lease", arguments={"gpus": 1})["result"]["structuredContent"]
        old.request("tools/call", name="release_lease", arguments={"lease_id": lease["lease_id"]})
        with old.stream() as stream:
            assert next(events(stream))["params"]["uri"] == "cotenant://quota/me"


@pytest.mark.parametrize("name", ["old", *sessions.STARTS_ANEW])
def test_a_stream_that_is_opened_tells_first_to_read_again(make_server: Callable[..., Any], name: str) -> None:
    """What was on its way when the last stream broke is told by nobody else; whatever mark the session's id carries."""
    server = make_server()
    old = Old(server, server.token("back", "alice"), name)
    old.request("resources/subscribe", uri="cotenant://queues/default")
    with old.stream() as stream:
        assert next(events(stream))["params"]["uri"] == "cotenant://queues/default"


def test_a_session_of_before_a_restart_is_told_that_it_cannot_subscribe(make_server: Callable[..., Any]) -> None:
    server = make_server()
    old = Old(server, server.token("stale", "alice"))
    old.session = "from-before"
    refused = old.request("resources/subscribe", uri="cotenant://gpus")
    assert refused["error"]["message"].startswith("no_session: "), refused


class Old:
    """A client of an older protocol, by hand: one session, and a stream when it likes."""

    def __init__(self, server: Any, token: str, name: str = "old") -> None:
        self.server, self.token, self.session = server, token, ""
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": name, "version": "1"}}
        self.request("initialize", **hello)
        self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json, text/event-stream"}
        return headers | ({"Mcp-Session-Id": self.session} if self.session else {})

    def _post(self, body: dict[str, Any]) -> str:
        _, answer, headers = self.server.post("/mcp", body, self.token, self._headers())
        self.session = headers.get("mcp-session-id", self.session)
        return answer if isinstance(answer, str) else json.dumps(answer)

    def request(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer's frame."""
        answer = self._post({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        data = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
        frame: dict[str, Any] = json.loads(data[-1] if data else answer)
        return frame

    @contextlib.contextmanager
    def stream(self) -> Iterator[Any]:
        """The standing stream, while inside."""
        host, port = self.server.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=15)
        try:
            connection.request("GET", "/mcp", headers=self._headers() | {"Authorization": f"Bearer {self.token}"})
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()


def events(stream: Any) -> Iterator[dict[str, Any]]:
    """The frames of a stream as they come."""
    for line in stream:
        if line.startswith(b"data: ") and line.strip() != b"data:":
            yield json.loads(line.removeprefix(b"data: "))


# ---- the watchers by themselves ---------------------------------------------------------------


async def everybody(caller: Caller, address: str) -> bool:
    return True


async def told(heard: list[Any], count: int) -> None:
    await until(lambda: len(heard) >= count)


async def test_the_first_change_is_told_at_once_and_the_last_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "INTERVAL_S", 0.3)
    hub = Watching(everybody)
    watcher = hub.open(lambda: ALICE, ["cotenant://gpus", "cotenant://events"])
    heard: list[tuple[float, str]] = []
    state = 0
    seen = []

    async def send(address: str) -> None:
        heard.append((time.monotonic(), address))
        seen.append(state)

    task = asyncio.create_task(watcher.run(send))
    began = time.monotonic()
    for _ in range(500):
        state += 1
        hub.changed(frozenset({"cotenant://gpus"}))
        await asyncio.sleep(0.001)
    lasted = time.monotonic() - began
    await until(lambda: seen[-1] == state)
    assert heard[0][0] - began < 0.2, "the leading edge"
    assert len(heard) <= lasted / 0.3 + 3, "coalesced"
    gaps = [b[0] - a[0] for a, b in pairwise(heard)]
    assert min(gaps) > 0.28
    hub.changed(frozenset({"cotenant://events"}))  # another address has its own rhythm
    await told(heard, len(heard) + 1)
    watcher.close()
    await asyncio.wait_for(task, 5)
    assert not hub.by_address


async def test_a_stalled_reader_holds_nobody_up_and_gets_the_last_state() -> None:
    hub = Watching(everybody)
    gate = asyncio.Event()
    slow, quick = hub.open(lambda: ALICE, ["cotenant://gpus"]), hub.open(lambda: ALICE, ["cotenant://gpus"])
    heard: list[str] = []
    late: list[str] = []

    async def stalled(address: str) -> None:
        await gate.wait()
        late.append(address)

    async def send(address: str) -> None:
        heard.append(address)

    tasks = [asyncio.create_task(slow.run(stalled)), asyncio.create_task(quick.run(send))]
    await asyncio.sleep(0)
    began = time.monotonic()
    for _ in range(20_000):
        hub.changed(frozenset({"cotenant://gpus"}))
    assert time.monotonic() - began < 2.0, "publishing never waits"
    await told(heard, 1)
    hub.changed(frozenset({"cotenant://gpus"}))
    await told(heard, 2)
    assert late == [] and len(slow._dirty) <= 1, "nothing piles up"
    gate.set()
    await told(late, 2)  # the one that hung, and the state after it
    hub.close()
    await asyncio.wait_for(asyncio.gather(*tasks), 5)


async def test_a_send_that_times_out_is_tried_again() -> None:
    hub = Watching(everybody)
    watcher = hub.open(lambda: ALICE, ["cotenant://gpus"])
    tries: list[float] = []

    async def send(address: str) -> None:
        tries.append(time.monotonic())
        if len(tries) == 1:
            await asyncio.Event().wait()

    hub.start(watcher, send, send_timeout_s=0.1, room=lambda: True)
    hub.changed(frozenset({"cotenant://gpus"}))
    await told(tries, 2)
    assert tries[1] - tries[0] >= 0.1
    hub.close()
    await hub.join()


async def test_whether_it_may_be_seen_is_asked_at_every_delivery() -> None:
    open_now = True
    alive: list[Caller | None] = [ALICE]

    async def visible(caller: Caller, address: str) -> bool:
        return open_now

    hub = Watching(visible)
    watcher = hub.open(lambda: alive[0], ["cotenant://gpus", "cotenant://events"])
    heard: list[str] = []

    async def send(address: str) -> None:
        heard.append(address)

    task = asyncio.create_task(watcher.run(send))
    hub.changed(frozenset({"cotenant://gpus"}))
    await told(heard, 1)
    open_now = False
    hub.changed(frozenset({"cotenant://events"}))
    await until(lambda: not watcher._dirty)
    assert heard == ["cotenant://gpus"]
    alive[0] = None
    hub.changed(frozenset({"cotenant://events"}))
    await asyncio.wait_for(task, 5)
    assert heard == ["cotenant://gpus"]


async def test_the_list_changes_for_whose_list_it_is() -> None:
    hub = Watching(everybody)
    alice, bob = hub.open(lambda: ALICE, [LIST]), hub.open(lambda: replace(ALICE, owner="bob"), [LIST])
    hub.changed(frozenset({"cotenant://jobs/job_1", "cotenant://gpus"}))
    assert not alice._dirty and not bob._dirty
    hub.changed(frozenset({list_of("alice")}))
    assert list(alice._dirty) == [LIST] and not bob._dirty
    hub.changed(frozenset({LIST}))
    assert list(bob._dirty) == [LIST]
    hub.close()
    for watcher in (alice, bob):
        await watcher.run(_never)


async def test_nothing_is_sent_without_room_and_nothing_is_lost() -> None:
    """What comes while an older client has no stream open is told once it has one."""
    hub = Watching(everybody)
    watcher = hub.open(lambda: ALICE, ["cotenant://gpus", "cotenant://events"])
    heard: list[str] = []
    open_now = False

    async def send(address: str) -> None:
        assert open_now
        heard.append(address)

    hub.start(watcher, send, send_timeout_s=5.0, room=lambda: open_now)
    for _ in range(1000):
        hub.changed(frozenset({"cotenant://gpus"}))
    await asyncio.sleep(0)
    hub.changed(frozenset({"cotenant://events"}))
    await asyncio.sleep(0)
    assert heard == [] and set(watcher._dirty) == watcher.addresses
    open_now = True
    await told(heard, 2)
    assert set(heard) == watcher.addresses
    heard.clear()
    watcher.mark_all()
    await told(heard, 2)
    hub.close()
    await hub.join()


async def test_a_watcher_is_woken_once_for_many_changes() -> None:
    """Two thousand changes a second must not wake two hundred watchers two thousand times."""
    hub = Watching(everybody)
    watcher = hub.open(lambda: ALICE, ["cotenant://gpus"])
    hub.changed(frozenset({"cotenant://gpus"}))
    assert watcher._wake.is_set()
    watcher._wake.clear()
    hub.changed(frozenset({"cotenant://gpus"}))
    assert not watcher._wake.is_set() and list(watcher._dirty) == ["cotenant://gpus"]
    watcher.close()
    await watcher.run(_never)


async def test_many_who_watch_the_same_are_told_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are told at once; of many the later ones a little later each, so that their reads do not come all together."""
    hub = Watching(everybody, most_per_caller=1000)
    few = [hub.open(lambda: ALICE, ["cotenant://events"]) for _ in range(3)]
    many = [hub.open(lambda: ALICE, ["cotenant://gpus"]) for _ in range(200)]
    hub.changed(frozenset({"cotenant://gpus", "cotenant://events"}))
    assert all(watcher._not_before["cotenant://events"] == 0.0 for watcher in few)
    later = sorted(watcher._not_before["cotenant://gpus"] for watcher in many)
    assert later.count(0.0) == watching._AT_ONCE + 1
    steps = [b - a for a, b in pairwise(later[watching._AT_ONCE + 1 :])]
    assert all(abs(step - watching._PACE_S) < 1e-6 for step in steps)
    assert hub.interval_s("cotenant://events", 1.0) == watching.INTERVAL_S
    twice = watching.INTERVAL_S * 200 / watching._PER_INTERVAL
    assert twice == hub.interval_s("cotenant://gpus", 0.0) < hub.interval_s("cotenant://gpus", 1.0)
    hub.close()
    for watcher in (*few, *many):
        await watcher.run(_never)


async def test_one_caller_has_a_most_of_streams() -> None:
    hub = Watching(everybody, 2)
    bob = replace(ALICE, name="bob-agent", owner="bob")
    mine = [hub.open(lambda: ALICE) for _ in range(2)]
    with pytest.raises(TooManyWatchers) as full:
        hub.open(lambda: ALICE)
    assert full.value.mine == 2
    others = hub.open(lambda: bob)
    mine[0].close()
    await mine[0].run(_never)
    mine[0] = hub.open(lambda: ALICE)
    ends: list[int] = []
    with hub.stream(lambda: ALICE, lambda: ends.append(1)), hub.stream(lambda: ALICE, lambda: ends.append(2)):
        with pytest.raises(TooManyWatchers):
            with hub.stream(lambda: ALICE, lambda: ends.append(3)):
                pass
        with hub.stream(lambda: bob, lambda: ends.append(4)):
            pass
    hub.close()
    assert ends == [], "those that are over are not ended again"
    for watcher in (*mine, others):
        await watcher.run(_never)


async def _never(address: str) -> None:
    raise AssertionError("a closed watcher tells nothing")


async def test_there_is_a_most_of_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_WATCHERS", 2)
    hub = Watching(everybody)
    one = hub.open(lambda: ALICE)
    hub.open(lambda: ALICE)
    with pytest.raises(TooManyWatchers):
        hub.open(lambda: ALICE)
    one.close()
    await one.run(_never)
    hub.open(lambda: ALICE)
    hub.close()
    with pytest.raises(TooManyWatchers):
        hub.open(lambda: ALICE)
