"""A Host in this process, where a request has to be held at one point of its way."""

import os
import signal

import pytest
from hostdclient import until

from cotenant.hostd.attempts import Attempts
from cotenant.hostd.host import Host
from cotenant.hostd.locks import CardLocks, open_lock_directory
from cotenant.hostd.protocol import StartSpec
from cotenant.hostd.simulated import SimulatedCards
from cotenant.hostd.state import State


@pytest.fixture
async def host(tmp_path):
    locks = open_lock_directory(str(tmp_path / "locks"))
    state = State(str(tmp_path / "state"), locks)
    state.open()
    attempts = Attempts(state.directory, state.boot_id)
    cards = SimulatedCards(1, state.state_id, lambda: ())
    host = Host(state, cards, attempts, CardLocks(locks, "test"), (), lambda name, key, body: None)
    host.adopt()
    yield host
    await host.close()
    state.close()


async def test_a_stop_that_meets_the_end_and_its_forgetting_does_not_say_that_it_never_ran(host, monkeypatch):
    await host.start(StartSpec("a1", "j1", "l1", 1, 1, ("sleep", "100")))
    attempt, bury = host.attempts.find("a1"), host.state.bury

    async def slowly(attempt_id):
        await bury(attempt_id)
        os.kill(attempt.pid, signal.SIGKILL)
        await until(lambda: attempt.clean)
        await host.forget([attempt_id])

    monkeypatch.setattr(host.state, "bury", slowly)
    assert (await host.stop("a1", "cancel", 5.0)).state == "exited"
    assert (await host.probe("a1")).exit.signal == signal.SIGKILL
