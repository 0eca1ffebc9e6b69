"""The link to a hostd over a real socket: it outlives whatever goes wrong on the other side, or on ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from cotenant.hostd import protocol
from cotenant.hostd.protocol import Hello, HostFacts, Welcome
from cotenant.server.backends.base import Host, HostRefused
from cotenant.server.backends.link import HostLink
from cotenant.server.errors import OutcomeUnknown, Unreachable

WELCOME = Welcome(protocol.PROTOCOL, "state", "boot", 1, 0, False, HostFacts("h", 1, 1, 1, 1, 0.0))


class Peer:
    """The other end: answers hello, and whatever `answers` has; keeps the acknowledgements."""

    def __init__(self) -> None:
        self.connections: list[asyncio.StreamWriter] = []
        self.hellos = self.beats = 0
        self.acked: list[int] = []
        self.silent: set[str] = set()
        self.before_welcome: list[bytes] = []
        self._heard = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until it holds, looked at after each message."""
        async with asyncio.timeout(10):
            while not condition():
                self._heard.clear()
                await self._heard.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        try:
            while (message := await protocol.read_frame(reader)) is not None:
                op = message["op"]
                self.beats += op == "beat"
                if op == "ack":
                    self.acked.append(message["args"]["seq"])
                elif op == "hello":
                    self.hellos += 1
                    for frame in self.before_welcome:
                        writer.write(frame)
                    writer.write(protocol.reply(message["id"], WELCOME))
                elif op == "probe":
                    writer.write(
                        protocol.refusal(message["id"], protocol.Refused("bad_request", "no such id", {"a": 1}))
                    )
                elif op not in self.silent:
                    writer.write(protocol.reply(message["id"], {"needs_floor": False}))
                self._heard.set()
        finally:
            writer.close()


class Events:
    """What the link tells. `failures` are raised by the welcomes, one each."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.welcomed = asyncio.Event()
        self.told: list[Any] = []

    async def welcome(self, host: Host, welcome: Welcome) -> None:
        self.told.append("welcome")
        if self.failures:
            raise self.failures.pop(0)
        self.welcomed.set()

    def report(self, host: str, name: str, seq: int, body: dict[str, Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.told.append((name, seq))
        if body.get("fails"):
            future.set_exception(ValueError("not taken"))
        else:
            future.set_result(None)
        return future

    def telemetry(self, host: str, name: str, body: dict[str, Any]) -> None:
        self.told.append(("telemetry", name))

    async def lost(self, host: str, reason: str) -> None:
        self.told.append("lost")

    async def refused(self, host: str, code: str, message: str, detail: dict[str, Any]) -> None:
        self.told.append(("refused", code))


class Linked:
    def __init__(self, folder: Path, events: Events, **pace: float) -> None:
        self.path, self.events, self.peer = str(folder / "s"), events, Peer()
        self.link = HostLink(
            "h", lambda: asyncio.open_unix_connection(self.path), lambda: Hello("c", 1), events, (0.001,), **pace
        )

    async def __aenter__(self) -> Linked:
        self.server = await asyncio.start_unix_server(self.peer.serve, self.path)
        self.task = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.server.close()
        for writer in self.peer.connections:
            writer.close()


@pytest.mark.parametrize(
    "failure",
    [
        OutcomeUnknown("no answer"),
        Unreachable("gone"),
        HostRefused("no", code="storage"),
        ValueError("our mistake"),
        KeyError("x"),
    ],
    ids=lambda f: type(f).__name__,
)
async def test_a_hello_that_cannot_be_settled_is_said_again(tmp_path: Path, failure: Exception) -> None:
    events = Events(failure, failure)
    async with Linked(tmp_path, events) as linked:
        await asyncio.wait_for(events.welcomed.wait(), 10)
        assert linked.peer.hellos == 3 and not linked.task.done()
        assert events.told.count("lost") == 2
        assert await linked.link.set_floor(1) is False


async def test_reports_that_come_before_the_welcome_is_settled_are_taken_after_it_in_order(tmp_path: Path) -> None:
    events = Events()
    async with Linked(tmp_path, events) as linked:
        linked.peer.before_welcome = [protocol.report(seq, "attempt", {"fails": seq == 2}) for seq in (1, 2, 3)]
        await asyncio.wait_for(events.welcomed.wait(), 10)
        await linked.peer.until(lambda: len(linked.peer.acked) == 2)
        assert events.told == ["welcome", ("attempt", 1), ("attempt", 2), ("attempt", 3)]
        assert linked.peer.acked == [1, 3], "what was not taken is not acknowledged"


async def test_what_could_not_be_taken_is_told_again_without_anybodys_doing(tmp_path: Path) -> None:
    events = Events()
    async with Linked(tmp_path, events, tell_again_s=0.01) as linked:
        linked.peer.before_welcome = [protocol.report(1, "attempt", {"fails": True})]
        await asyncio.wait_for(events.welcomed.wait(), 10)
        linked.peer.before_welcome = []
        await linked.peer.until(lambda: linked.peer.hellos == 2)
        assert ("attempt", 1) in events.told


async def test_a_host_that_hangs_is_not_up_however_open_its_connection_is(tmp_path: Path) -> None:
    events = Events()
    async with Linked(tmp_path, events, beat_s=0.3) as linked:
        await asyncio.wait_for(events.welcomed.wait(), 10)
        await linked.peer.until(lambda: linked.peer.beats == 3)
        assert "lost" not in events.told
        linked.peer.silent.add("beat")
        await linked.peer.until(lambda: linked.peer.hellos == 2)
        assert "lost" in events.told


async def test_refusals_keep_their_code_and_detail(tmp_path: Path) -> None:
    events = Events()
    async with Linked(tmp_path, events) as linked:
        await asyncio.wait_for(events.welcomed.wait(), 10)
        with pytest.raises(HostRefused) as refused:
            await linked.link.probe("x")
        assert (refused.value.code, refused.value.message, refused.value.data) == (
            "bad_request",
            "no such id",
            {"a": 1},
        )


async def test_a_link_that_breaks_before_the_answer_leaves_the_outcome_unknown(tmp_path: Path) -> None:
    events = Events()
    async with Linked(tmp_path, events) as linked:
        await asyncio.wait_for(events.welcomed.wait(), 10)
        linked.peer.silent.add("set_floor")
        asking = asyncio.create_task(linked.link.set_floor(1))
        await asyncio.sleep(0)
        linked.peer.connections[-1].transport.abort()
        with pytest.raises(OutcomeUnknown):
            await asking
        await linked.peer.until(lambda: linked.peer.hellos == 2)


async def test_without_a_connection_nothing_is_sent(tmp_path: Path) -> None:
    link = HostLink(
        "h", lambda: asyncio.open_unix_connection(str(tmp_path / "none")), lambda: Hello("c", 1), Events(), (0.001,)
    )
    with pytest.raises(Unreachable):
        await link.set_floor(1)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_connection_whose_end_nobody_has_read_yet_takes_nothing(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop], how: str
) -> None:
    """On the server's own loop such a write is a RuntimeError, not the OSError of asyncio's."""

    async def scene() -> None:
        events = Events()
        async with Linked(tmp_path, events) as linked:
            await asyncio.wait_for(events.welcomed.wait(), 10)
            assert linked.link._writer is not None
            getattr(linked.link._writer.transport, how)()
            with pytest.raises(Unreachable):
                await linked.link.set_floor(1)
            linked.link._acknowledge(7, done(None))
            await linked.peer.until(lambda: linked.peer.hellos == 2)

    def done(result: object) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.set_result(result)
        return future

    with contextlib.closing(loop()) as running:
        running.run_until_complete(asyncio.wait_for(scene(), 30))


class Pauses(tuple[float, ...]):
    """Back-off times that keep which of them were asked for."""

    def __new__(cls) -> Pauses:
        made = super().__new__(cls, (0.001, 0.002, 0.003, 0.004))
        made.asked = []
        return made

    asked: list[float]

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(super().__getitem__(index))
        return self.asked[-1]


async def test_who_leaves_before_a_welcome_is_tried_less_and_less_often(tmp_path: Path) -> None:
    """A hostd that takes connections and does no more is no better than none."""
    pauses, enough = Pauses(), asyncio.Event()

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await protocol.read_frame(reader)
        writer.close()
        if len(pauses.asked) >= 6:
            enough.set()

    path = str(tmp_path / "s")
    server = await asyncio.start_unix_server(leave, path)
    link = HostLink("h", lambda: asyncio.open_unix_connection(path), lambda: Hello("c", 1), Events(), pauses)
    task = asyncio.create_task(link.run())
    await asyncio.wait_for(enough.wait(), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    server.close()
    assert pauses.asked[:6] == [0.001, 0.002, 0.003, 0.004, 0.004, 0.004]
