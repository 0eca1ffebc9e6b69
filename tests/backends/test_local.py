"""The hostd of this machine, found by a server that was started anew: it is the one that is asked for, or it is said why not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cotenant.hostd.protocol import Hello, SlotRef, StartSpec, Welcome
from cotenant.server.backends.base import Host
from cotenant.server.backends.link import HostLink
from cotenant.server.backends.local import LocalHostd
from cotenant.server.config import HostSettings


class Events:
    """Keeps the last welcome."""

    def __init__(self) -> None:
        self.welcomed: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.told: list[str] = []
        self.ended = asyncio.Event()  # a job has

    async def welcome(self, host: Host, welcome: Welcome) -> None:
        self.welcomed.set_result(welcome)

    def report(self, host: str, name: str, seq: int, body: dict[str, Any]) -> asyncio.Future[Any]:
        if name == "attempt" and body["state"] == "exited":
            self.ended.set()
        taken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        taken.set_result(None)
        return taken

    def telemetry(self, host: str, name: str, body: dict[str, Any]) -> None:
        pass

    async def lost(self, host: str, reason: str) -> None:
        self.told.append(reason)

    async def refused(self, host: str, code: str, message: str, detail: dict[str, Any]) -> None:
        self.told.append(code)


class Served:
    """A server's side of one local hostd, from its start to its end; hostd stays."""

    def __init__(self, folder: Path, simulate: int, incarnation: int) -> None:
        self.local = LocalHostd(
            folder / "hostd", HostSettings(name="local", pool="default", simulate_gpus=simulate), None
        )
        self.events = Events()
        self.link = HostLink(
            "local",
            self.local.connect,
            lambda: Hello("cluster", incarnation),
            self.events,
            (0.01,),
            unsuited=self.local.unsuited,
        )

    async def __aenter__(self) -> Served:
        self.task = asyncio.create_task(self.link.run())
        self.welcome = await asyncio.wait_for(self.events.welcomed, 30)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.local.forget_children()

    def spec(self) -> StartSpec:
        slot = SlotRef(self.welcome.cards[0].uuid)
        return StartSpec("a1", "j1", "l1", 1, 1, ("sleep", "100"), slots=(slot,))


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    yield tmp_path
    # whatever number it has: this one asks for the same and ends it
    last = LocalHostd(tmp_path / "hostd", HostSettings(name="local", pool="default"), None)
    await asyncio.to_thread(last.end)


async def test_a_hostd_with_nothing_to_keep_is_started_anew_with_the_number_asked_for(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Served(folder, 2, 1) as first:
        assert len(first.welcome.cards) == 2
    with caplog.at_level(logging.WARNING):
        async with Served(folder, 3, 2) as second:
            assert len(second.welcome.cards) == 3 and second.events.told == []
            assert second.welcome.hostd_pid != first.welcome.hostd_pid
            assert second.welcome.state_id == first.welcome.state_id
            assert [card.uuid for card in second.welcome.cards[:2]] == [card.uuid for card in first.welcome.cards]
    assert "showed 2 simulated cards: it is started anew with 3 simulated cards" in caplog.text
    async with Served(folder, 3, 3) as third:
        assert third.welcome.hostd_pid == second.welcome.hostd_pid, "the same number is no reason"


async def test_one_that_keeps_a_job_stays_and_a_warning_says_what_to_do(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Served(folder, 2, 1) as first:
        assert (await first.link.start(first.spec())).state == "running"
    with caplog.at_level(logging.WARNING):
        async with Served(folder, 0, 2) as second:
            assert second.welcome.hostd_pid == first.welcome.hostd_pid and len(second.welcome.cards) == 2
            assert "shows 2 simulated cards, not the real cards as asked for now" in caplog.text
            assert "keeps 1 running jobs or leases" in caplog.text and "start it again" in caplog.text
            await second.link.stop("a1", "cancel", 1.0)
            await asyncio.wait_for(second.events.ended.wait(), 20)
