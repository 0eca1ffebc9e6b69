"""A suspended attempt: its whole tree stands still, so does its time limit, and it goes on whoever is dead."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest
from hostdclient import until

from cotenant.hostd import processes
from cotenant.hostd.pause import Pause
from cotenant.hostd.protocol import Refused

PY = sys.executable

#: Two counters: one in the command's group, one that made itself a session of its own.
COUNT = """
import os, sys, time
name = "group"
if os.fork() == 0:
    os.setsid()
    name = "away"
path = os.path.join(sys.argv[1], name)
n = 0
while True:
    n += 1
    with open(path + ".new", "w") as file:
        file.write(f"{os.getpid()} {n}")
    os.rename(path + ".new", path)
    time.sleep(0.005)
"""


async def stopped(*pids):
    """Wait until the kernel shows these as stopped: one that runs sees its STOP only when it is interrupted.

    One that just made a child by vfork waits (D) for that child, which is stopped.
    """
    await until(lambda: all(processes.stat(pid).state in "TD" for pid in pids), f"{pids} are stopped")


class Counters:
    """What the two counters of one attempt say."""

    def __init__(self, folder):
        self.folder = folder

    def read(self):
        found = []
        for name in ("group", "away"):
            with contextlib.suppress(OSError):
                pid, count = (self.folder / name).read_text().split()
                found.append((int(pid), int(count)))
        return found

    async def both_rise(self):
        await until(lambda: len(self.read()) == 2, "both counters began")
        before = dict(self.read())
        await until(lambda: all(count > before.get(pid, 0) for pid, count in self.read()), "both go on")

    async def stand_still(self):
        """Both are stopped in the kernel's own words."""
        await stopped(*(pid for pid, _ in self.read()))


@pytest.fixture
async def counters(hostd, tmp_path):
    folder = tmp_path / "counters"
    folder.mkdir()

    async def start(**more):
        await hostd.start("a1", [PY, "-c", COUNT, str(folder)], **more)
        found = Counters(folder)
        await found.both_rise()
        return found

    return start


def suspend(hostd, max_s=1000.0):
    return hostd.ask("suspend", attempt_id="a1", max_s=max_s)


def resume(hostd):
    return hostd.ask("resume", attempt_id="a1")


async def told(hostd, *, suspended, at_least_ms=0):
    """A report that a1 runs and is suspended or not, and was for so long before."""

    def look():
        for message in hostd.reports:
            body = message["body"]
            standing = body.get("suspended", False), body.get("suspended_ms", 0) >= at_least_ms
            if message["report"] == "attempt" and body["state"] == "running" and standing == (suspended, True):
                return body
        return None

    return await until(look, f"a report that says suspended={suspended}, {at_least_ms} ms before")


async def test_the_whole_tree_stands_still_and_goes_on(hostd, counters):
    both = await counters()
    answer = await suspend(hostd)
    assert answer["state"] == "running" and answer["suspended"] is True
    await both.stand_still()
    assert (await suspend(hostd))["suspended"] is True, "a repeat changes nothing"
    await told(hostd, suspended=True)
    answer = await resume(hostd)
    assert "suspended" not in answer and answer["suspended_ms"] > 0
    await both.both_rise()
    assert (await resume(hostd))["suspended_ms"] == answer["suspended_ms"], "a repeat changes nothing"
    await told(hostd, suspended=False, at_least_ms=answer["suspended_ms"])
    await hostd.stop("a1")
    end = await hostd.ended("a1")
    assert abs(end["exit"]["suspended_s"] * 1000 - answer["suspended_ms"]) < 2
    assert "escapees_killed" in end["exit"], "the one that left was ended too"


async def test_the_time_limit_stands_still(hostd, counters):
    both = await counters(time_limit_s=1.5, stop_grace_s=0.2)
    await suspend(hostd)
    await asyncio.sleep(2.0)  # longer than the limit: that nothing happens meanwhile is what is shown
    await both.stand_still()
    await resume(hostd)
    end = await hostd.ended("a1")
    assert end["exit"]["reason"] == "time_limit"
    assert end["exit"]["suspended_s"] >= 2.0 and end["exit"]["duration_s"] >= 3.5


async def test_it_goes_on_by_itself_when_its_time_is_up_and_may_not_stand_still_again(hostd, counters):
    both = await counters()
    assert (await suspend(hostd, 0.4))["suspended"] is True
    await told(hostd, suspended=False, at_least_ms=400)
    await both.both_rise()
    assert not (await suspend(hostd, 0.4)).get("suspended"), "all suspensions together have that long"
    await both.both_rise()


async def test_it_stays_suspended_over_hostds_death_and_goes_on_without_it(hostd, counters):
    both = await counters()
    await suspend(hostd)
    await hostd.kill()
    await both.stand_still()
    await hostd.again()
    mine = next(a for a in hostd.welcome["attempts"] if a["attempt_id"] == "a1")
    assert mine["state"] == "running" and mine["suspended"] is True
    await both.stand_still()
    assert not (await resume(hostd)).get("suspended")
    await both.both_rise()
    await suspend(hostd, 1.5)
    await hostd.kill()
    await both.both_rise()
    await hostd.again()
    mine = next(a for a in hostd.welcome["attempts"] if a["attempt_id"] == "a1")
    assert not mine.get("suspended") and mine["suspended_ms"] >= 1500


async def test_a_new_hostd_tells_when_a_shim_lets_it_go_on(hostd, counters):
    await counters()
    await suspend(hostd, 2.0)
    await hostd.kill()
    await hostd.again()
    await told(hostd, suspended=False, at_least_ms=2000)


async def test_a_stop_ends_a_suspension_and_its_handler_runs(hostd):
    text = "trap 'echo saved; exit 3' TERM; echo up; while :; do sleep 0.05; done"
    begun = await hostd.start("a1", ["sh", "-c", text])
    await hostd.printed("a1", "up")
    await suspend(hostd)
    await stopped(begun["pid"])
    assert not (await hostd.stop("a1")).get("suspended")
    end = await hostd.ended("a1")
    assert end["exit"]["code"] == 3 and "saved" in await hostd.log_text("a1")
    with pytest.raises(Refused) as refused:
        await suspend(hostd)
    assert refused.value.code == "not_running"
    assert (await resume(hostd))["state"] == "exited", "what is over needs no resume"


async def test_continuing_it_behind_the_shims_back_is_refused_or_undone(hostd, counters):
    both = await counters()
    await suspend(hostd)
    with pytest.raises(Refused) as refused:
        await hostd.ask("signal", attempt_id="a1", signal=int(signal.SIGCONT))
    assert refused.value.code == "not_running" and "resumed" in refused.value.message
    for pid, _ in both.read():
        os.kill(pid, signal.SIGCONT)
    await hostd.ask("resume", attempt_id="a1")
    await suspend(hostd)
    await both.stand_still()


async def test_a_kill_from_outside_ends_what_is_suspended(hostd):
    begun = await hostd.start("a1", ["sleep", "100"])
    await suspend(hostd)
    os.kill(begun["pid"], signal.SIGKILL)
    end = await hostd.ended("a1")
    assert (end["exit"]["signal"], end["exit"]["sender"]) == (signal.SIGKILL, "outside")
    assert end["exit"]["suspended_s"] > 0


async def test_a_job_with_a_terminal_can_be_suspended(hostd):
    begun = await hostd.start("a1", ["sh", "-c", "echo up; sleep 0.3; echo on; exit 5"], pty=True)
    await suspend(hostd)
    await stopped(begun["pid"])
    await resume(hostd)
    assert (await hostd.ended("a1"))["exit"]["code"] == 5
    assert await hostd.log_text("a1") == "up\non\n"


@pytest.mark.parametrize("op", ["suspend", "resume"])
async def test_an_attempt_that_never_was_is_refused(hostd, op):
    with pytest.raises(Refused) as refused:
        await hostd.ask(op, attempt_id="nobody", max_s=1.0)
    assert refused.value.code == "unknown_attempt"


def test_a_pause_counts_all_suspensions_together():
    pause = Pause()
    assert pause.put_off(50.0) == 50.0 and pause.put_off(None) is None
    assert pause.begin(10.0, 30.0) and not pause.begin(11.0, 30.0)
    assert pause.put_off(50.0) is None and pause.until == 40.0
    assert pause.end(20.0) and not pause.end(21.0)
    assert pause.total_s == 10.0 and pause.put_off(50.0) == 60.0
    assert pause.begin(30.0, 30.0) and pause.until == 50.0
    pause.end(50.0)
    assert not pause.begin(60.0, 30.0), "all of it is used up"
