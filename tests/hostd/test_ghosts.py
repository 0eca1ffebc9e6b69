"""A process that ended between the driver's answer and the look at it is no stranger; one that cannot be seen is one."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from cotenant.hostd.attempts import Attempts
from cotenant.hostd.cards import Driver, OnCard, Sighting
from cotenant.hostd.host import Host
from cotenant.hostd.locks import CardLocks
from cotenant.hostd.protocol import Hello, Refused, SlotRef
from cotenant.hostd.state import State

CARD = "GPU-00000000-0000-0000-0000-00000000000a"


class Driven:
    """One card on which each look sees the next of `looks`, and the last for ever."""

    busy_interval_s = 1.0
    idle_interval_s = 5.0
    needs_new_process = False
    driver = Driver("ok")
    links: tuple[object, ...] = ()

    def __init__(self, *looks: list[int]) -> None:
        self._looks = list(looks)
        self._last: list[Sighting] = []

    def last(self) -> list[Sighting]:
        return self._last

    async def look(self, uuids: object = None) -> list[Sighting]:
        pids = self._looks[0] if len(self._looks) == 1 else self._looks.pop(0)
        on_card = tuple(OnCard(pid, 1024) for pid in pids)
        self._last = [Sighting(0, CARD, "H100", 81920, 1024 * len(pids), processes=on_card, seen_at=time.monotonic())]
        return self._last

    def close(self) -> None:
        pass


def dead_pid() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def zombie() -> subprocess.Popen[bytes]:
    """A process that has ended and is not reaped yet."""
    dying = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dying.pid, os.WEXITED | os.WNOWAIT)
    return dying


def host_of(folder: Path, cards: Driven) -> Host:
    lock_directory = str(folder / "locks")
    os.mkdir(lock_directory)
    state = State(str(folder / "state"), lock_directory)
    state.open()
    attempts = Attempts(state.directory, state.boot_id)
    return Host(state, cards, attempts, CardLocks(lock_directory, "test"), (), lambda name, key, body: None)


async def test_a_process_that_ended_during_the_look_is_no_stranger(tmp_path: Path) -> None:
    host = host_of(tmp_path, Driven([dead_pid()], []))
    try:
        assert [card.state for card in await host.sample()] == ["ok"]
    finally:
        await host.close()
        host.state.close()


async def test_neither_is_one_that_waits_to_be_reaped(tmp_path: Path) -> None:
    """Seen as it dies, it may be gone by the time it is judged."""
    dying = zombie()
    cards = Driven([dying.pid], [])
    host = host_of(tmp_path, cards)
    try:
        (card,) = await host.sample()
        assert (card.state, card.processes) == ("ok", ())
    finally:
        dying.wait()
        await host.close()
        host.state.close()


async def test_it_does_not_stand_in_the_way_of_a_lease(tmp_path: Path) -> None:
    host = host_of(tmp_path, Driven([dead_pid()], []))
    try:
        assert (await host.hold("lse_one", 1, [SlotRef(CARD)])).clean
    finally:
        await host.close()
        host.state.close()


async def test_a_hello_does_not_tell_of_who_has_gone_since(tmp_path: Path) -> None:
    cards = Driven([dead_pid()], [])
    host = host_of(tmp_path, cards)
    try:
        await cards.look()
        welcome = await host.hello(Hello("cluster", 1))
        assert [card.state for card in welcome.cards] == ["ok"]
    finally:
        await host.close()
        host.state.close()


async def test_a_process_that_is_listed_again_and_cannot_be_seen_is_a_stranger(tmp_path: Path) -> None:
    host = host_of(tmp_path, Driven([dead_pid()]))
    try:
        (card,) = await host.sample()
        assert card.state == "occupied" and "unknown program" in str(card.reason)
        with pytest.raises(Refused) as refused:
            await host.hold("lse_one", 1, [SlotRef(CARD)])
        assert refused.value.code == "occupied"
    finally:
        await host.close()
        host.state.close()
