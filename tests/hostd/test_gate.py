"""Starting in two steps: made ready on its cards, then let go; never without the word, whoever dies in between."""

import asyncio
import dataclasses
import os
import signal
import socket

import pytest
from hostdclient import carriers, until

from cotenant.hostd.protocol import Refused


def gated(hostd, name, argv, gate_s=60.0, **more):
    return dataclasses.replace(hostd.spec(name, argv, **more), gate_s=gate_s)


async def prepare(hostd, name, argv, gate_s=60.0, **more):
    """Prepared, as hostd answers."""
    return await hostd.link.ask("prepare", gated(hostd, name, argv, gate_s, **more))


def ran(tmp_path, name="a1"):
    """A command that leaves a file behind, and whether it has."""
    path = tmp_path / f"ran-{name}"
    return ["sh", "-c", f"echo once >> {path}; exit 5"], path


async def state(hostd, name):
    return (await hostd.probe(name))["state"]


async def test_it_begins_at_the_word_and_not_before(hostd, tmp_path):
    argv, path = ran(tmp_path)
    first = await prepare(hostd, "a1", argv, card=hostd.cards[0]["uuid"])
    assert first["state"] == "ready" and "pid" not in first
    assert not path.exists()
    again = await prepare(hostd, "a1", argv, card=hostd.cards[0]["uuid"], fence=first["fence"])
    assert again["state"] == "ready", "a repeat says where it stands"
    with pytest.raises(Refused) as refused:
        await prepare(hostd, "a2", argv, card=hostd.cards[0]["uuid"])
    assert refused.value.code == "occupied", "its card is taken"
    with pytest.raises(Refused) as refused:
        await hostd.ask("signal", attempt_id="a1", signal=10)
    assert refused.value.code == "not_running"
    let_go = await hostd.ask("go", attempt_id="a1")
    assert let_go["state"] in ("running", "exited") and let_go["pid"]
    end = await hostd.ended("a1")
    assert end["exit"]["code"] == 5 and path.read_text() == "once\n"
    assert (await hostd.ask("go", attempt_id="a1"))["state"] == "exited", "a repeat is harmless"


async def test_others_start_while_one_waits(hostd, tmp_path):
    for number in range(3):
        await prepare(hostd, f"w{number}", ["true"], slots=())
    await hostd.start("a1", ["sh", "-c", "exit 4"], card=hostd.cards[1]["uuid"])
    assert (await hostd.ended("a1"))["exit"]["code"] == 4
    for number in range(3):
        await hostd.ask("go", attempt_id=f"w{number}")
        assert (await hostd.ended(f"w{number}"))["exit"]["code"] == 0


async def test_without_the_word_it_never_begins(hostd, tmp_path):
    argv, path = ran(tmp_path)
    await prepare(hostd, "a1", argv, 0.3, card=hostd.cards[0]["uuid"])
    end = await hostd.ended("a1")
    assert (end["state"], end["clean"]) == ("never", True) and "in time" in end["message"]
    assert (await hostd.ask("go", attempt_id="a1"))["state"] == "never"
    with pytest.raises(Refused) as refused:
        await prepare(hostd, "a1", argv, 0.3, card=hostd.cards[0]["uuid"], fence=end["fence"])
    assert refused.value.code == "tombstoned"
    await hostd.start("a2", ["true"], card=hostd.cards[0]["uuid"])
    assert (await hostd.ended("a2"))["exit"]["code"] == 0, "its card is free"
    assert not path.exists()


async def test_a_stop_comes_before_the_word(hostd, tmp_path):
    argv, path = ran(tmp_path)
    await prepare(hostd, "a1", argv, card=hostd.cards[0]["uuid"])
    await hostd.stop("a1", grace_s=5)
    end = await hostd.ended("a1")
    assert end["state"] == "never" and not path.exists()
    assert (await hostd.ask("go", attempt_id="a1"))["state"] == "never"


async def test_a_new_hostd_lets_go_what_an_old_one_made_ready(hostd, tmp_path):
    argv, path = ran(tmp_path)
    await prepare(hostd, "a1", argv, card=hostd.cards[0]["uuid"])
    await hostd.kill()
    await hostd.again()
    assert [a["state"] for a in hostd.welcome["attempts"]] == ["ready"]
    assert not path.exists()
    let_go = await hostd.ask("go", attempt_id="a1")
    assert let_go["state"] in ("running", "exited") and let_go["pid"]
    assert (await hostd.ended("a1"))["exit"]["code"] == 5 and path.read_text() == "once\n"


async def test_the_word_counts_whose_hostd_died_with_it(hostd, tmp_path):
    """The order is on disk when hostd dies: the next one finds the command running."""
    sleeper = ["sh", "-c", f"echo once >> {tmp_path}/ran-a1; exec sleep 60"]
    await prepare(hostd, "a1", sleeper, card=hostd.cards[0]["uuid"])
    shim = (await until(lambda: carriers_of_shim(hostd), "the shim"))[0]
    os.kill(shim, signal.SIGSTOP)
    asking = asyncio.ensure_future(hostd.ask("go", attempt_id="a1"))
    await until(lambda: any('"go"' in p.read_text() for p in (hostd.state / "attempts").glob("*.record")), "the order")
    await hostd.kill()
    with pytest.raises(ConnectionError):
        await asking
    await hostd.up()
    await hostd.greet()
    assert await state(hostd, "a1") == "ready"
    os.kill(shim, signal.SIGCONT)
    os.kill(shim, signal.SIGUSR1)

    await until((tmp_path / "ran-a1").exists, "it runs")
    await until(lambda: any(r["body"].get("state") == "running" for r in hostd.reports), "it is told")
    assert (tmp_path / "ran-a1").read_text() == "once\n"
    await hostd.stop("a1", grace_s=1)
    await hostd.ended("a1")


def carriers_of_shim(hostd):
    """Shims of this hostd that wait at the gate."""
    found = []
    for path in (hostd.state / "attempts").glob("*.record"):
        for line in path.read_text().splitlines():
            if line.startswith('{"gate"'):
                found.append(int(line.split("[")[1].split(",")[0]))
    return found


async def test_a_keeper_that_is_killed_at_the_gate_takes_the_start_with_it(hostd, tmp_path):
    argv, path = ran(tmp_path)
    await prepare(hostd, "a1", argv, card=hostd.cards[0]["uuid"])
    os.kill(carriers_of_shim(hostd)[0], signal.SIGKILL)
    end = await hostd.ended("a1")
    assert (end["state"], end["clean"]) == ("never", True)
    assert (await hostd.ask("go", attempt_id="a1"))["state"] == "never"
    assert not path.exists()


async def test_the_same_while_hostd_is_dead(hostd, tmp_path):
    argv, path = ran(tmp_path)
    await prepare(hostd, "a1", argv, card=hostd.cards[0]["uuid"])
    await prepare(hostd, "a2", argv, 0.2, card=hostd.cards[1]["uuid"])
    first, second = carriers_of_shim(hostd)
    await hostd.kill()
    os.kill(first, signal.SIGKILL)
    await until(lambda: not os.path.exists(f"/proc/{second}"), "the second gives up")
    await hostd.again()
    assert {a["attempt_id"]: a["state"] for a in hostd.welcome["attempts"]} == {"a1": "never", "a2": "never"}
    assert not path.exists() and not carriers(COTENANT_JOB="j-a1")


async def test_what_cannot_be_executed_is_told_at_the_word(hostd):
    await prepare(hostd, "a1", ["/does/not/exist"], card=hostd.cards[0]["uuid"])
    await hostd.ask("go", attempt_id="a1")
    assert "ENOENT" in (await hostd.ended("a1"))["exit"]["exec_error"]


@pytest.mark.parametrize("gate_s", [None, 0, -1, 4000.0])
async def test_how_long_it_waits_is_bounded(hostd, gate_s):
    with pytest.raises(Refused) as refused:
        await prepare(hostd, "a1", ["true"], gate_s, slots=())
    assert refused.value.code == "bad_request"


async def test_a_free_port_is_the_lowest_that_nobody_has(hostd):
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        low = one.getsockname()[1]
        answer = await hostd.ask("free_port", low=low, high=low + 50 if low < 65000 else 65535, but=[])
        assert answer["port"] is None or answer["port"] > low
        assert (await hostd.ask("free_port", low=low, high=low, but=[]))["port"] is None
        two.bind(("127.0.0.1", 0))
        high = two.getsockname()[1]
    assert (await hostd.ask("free_port", low=high, high=high, but=[]))["port"] == high
    assert (await hostd.ask("free_port", low=high, high=high, but=[high]))["port"] is None
    for bad in ({"low": 0, "high": 5}, {"low": 9, "high": 5}, {"low": 1, "high": 65535}):
        with pytest.raises(Refused):
            await hostd.ask("free_port", **bad, but=[])
