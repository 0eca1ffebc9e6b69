"""kill -9 of hostd, of the warm parent, of both, of a shim, at any moment: every job runs exactly once, no exit is lost.

COTENANT_KILL_ROUNDS says how many kills are made (default 8).
"""

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
from pathlib import Path

import pytest
from hostdclient import Hostd, carriers, until

from cotenant.hostd import processes
from cotenant.hostd.protocol import Refused

ROUNDS = int(os.environ.get("COTENANT_KILL_ROUNDS", "8"))
SEED = int(os.environ.get("COTENANT_KILL_SEED", str(random.randrange(1 << 30))))


def script(ran, name, seconds, end):
    """Leaves its name when it begins; prints a line before and after; ends with a code or a signal."""
    last = f"exit {end}" if end >= 0 else f"kill -{-end} $$"
    return ["sh", "-c", f"echo {name} >> {ran}; echo a; sleep {seconds:.2f}; echo b; {last}"]


@pytest.mark.timeout(120 + 3 * ROUNDS)
async def test_kills_at_random_moments(tmp_path):
    """A client that repeats what was not answered, against a hostd that is killed again and again."""
    chance = random.Random(SEED)
    ran = tmp_path / "ran"
    ran.touch()
    hostd = Hostd(tmp_path, simulate=4)
    await hostd.up()
    await hostd.greet()
    ends, told, specs = {}, {}, {}
    stopping = asyncio.Event()

    async def client():
        """Starts jobs one after another, repeating each until it is answered."""
        number = 0
        while not stopping.is_set():
            name = f"j{number}"
            number += 1
            ends[name] = chance.choice([0, 3, 255, -9, -15, -11])
            specs[name] = hostd.spec(name, script(ran, name, chance.uniform(0, 0.6), ends[name]), slots=())
            while True:
                try:
                    await hostd.send(specs[name])
                    break
                except (OSError, AssertionError, TimeoutError):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(chance.uniform(0, 0.08))

    async def collector():
        """Every report ever received, over all connections; an end must never change."""
        while True:
            if hostd.link is not None:
                for message in list(hostd.reports):
                    body = message["body"]
                    if message["report"] == "attempt" and body["state"] in ("exited", "lost", "never"):
                        known = told.setdefault(body["attempt_id"], body)
                        assert known.get("exit") == body.get("exit") and known["state"] == body["state"]
            await asyncio.sleep(0.005)

    tasks = [asyncio.create_task(client()), asyncio.create_task(collector())]
    try:
        for _ in range(ROUNDS):
            await asyncio.sleep(chance.uniform(0.02, 0.6))
            what = chance.choice(["hostd", "warm", "both"])
            warm = hostd.warm_pid()
            if what != "hostd" and warm is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(warm, signal.SIGKILL)
            if what != "warm":
                await hostd.kill()
                await asyncio.sleep(chance.uniform(0, 0.1))
                await hostd.again()
        stopping.set()
        await asyncio.wait_for(tasks[0], 60)
        await until(lambda: set(told) >= set(specs) or tasks[1].done(), f"all ends, seed {SEED}", 60)
        wrong = {}
        for name, end in ends.items():
            record = told[name].get("exit", {})
            seen = -record["signal"] if "signal" in record else record.get("code")
            if told[name]["state"] != "exited" or seen != end:
                wrong[name] = (end, told[name])
        assert not wrong, f"seed {SEED}"
        names = ran.read_text().split()
        assert sorted(names) == sorted(specs), f"not exactly once, seed {SEED}"
        for name, end in ends.items():
            assert await hostd.log_text(name) == "a\nb\n", (name, end, SEED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await hostd.end()
    assert not [r for r in results if isinstance(r, Exception) and not isinstance(r, asyncio.CancelledError)]


async def test_the_warm_parent_is_replaced(hostd):
    warm = await until(hostd.warm_pid)
    os.kill(warm, signal.SIGKILL)
    for name in ("a1", "a2", "a3"):
        await hostd.start(name, ["sh", "-c", "exit 2"])
        assert (await hostd.ended(name))["exit"]["code"] == 2
    await until(lambda: hostd.warm_pid() not in (None, warm), "a new warm parent")


async def test_the_warm_parent_and_its_spare_end_with_hostd(hostd):
    warm = await until(hostd.warm_pid)
    children = Path(f"/proc/{warm}/task/{warm}/children")
    spare = int((await until(lambda: children.read_text().split()))[0])
    ticks = {pid: processes.start_ticks(pid) for pid in (warm, spare)}
    await hostd.kill()
    await until(lambda: not any(processes.alive(pid, when) for pid, when in ticks.items()), "the end of both")


async def shim_of(hostd, attempt_id):
    for path in hostd.state.glob("attempts/*.record"):
        text = path.read_text()
        if f'"{attempt_id}"' in text:
            line = next(line for line in text.splitlines() if line.startswith('{"pid"'))
            return [int(word) for word in line[len('{"pid": [') : -2].split(",")]
    raise AssertionError(attempt_id)


async def test_a_dead_shim_makes_the_attempt_lost_and_its_orphans_are_ended(hostd):
    begun = await hostd.start("a1", ["sh", "-c", "setsid sleep 100 & echo up; sleep 100"], stop_grace_s=0.5)
    await hostd.printed("a1", "up")
    shim = (await shim_of(hostd, "a1"))[2]
    os.kill(shim, signal.SIGKILL)
    end = await hostd.ended("a1")
    assert end["state"] == "lost" and "exit" not in end and end["clean"] and "shim" in end["message"]
    assert not processes.alive(begun["pid"], begun["start_ticks"])
    assert carriers(COTENANT_ATTEMPT="a1", COTENANT_STATE_DIR=str(hostd.state.resolve())) == []
    ran = (await hostd.probe("a1"))["state"]
    assert ran == "lost"


async def test_a_shim_that_died_while_hostd_was_away_is_found_lost(hostd):
    begun = await hostd.start("a1", ["sleep", "100"], stop_grace_s=0.5)
    shim = (await shim_of(hostd, "a1"))[2]
    await hostd.kill()
    os.kill(shim, signal.SIGKILL)
    await hostd.again()
    assert (await hostd.ended("a1"))["state"] == "lost"
    assert not processes.alive(begun["pid"], begun["start_ticks"])


async def test_a_job_that_ended_while_hostd_was_away_keeps_its_code(hostd):
    begun = await hostd.start("a1", ["sh", "-c", "sleep 0.3; exit 77"])
    await hostd.kill()
    await until(lambda: not processes.alive(begun["pid"], begun["start_ticks"]))
    await hostd.again()
    assert (await hostd.ended("a1"))["exit"]["code"] == 77


async def test_an_adopted_attempt_can_be_signalled_and_stopped(hostd):
    await hostd.start("a1", ["sh", "-c", "trap 'echo got' USR1; echo up; while :; do sleep 0.05; done"])
    await hostd.printed("a1", "up")
    await hostd.kill()
    await hostd.again()
    await hostd.ask("signal", attempt_id="a1", signal=int(signal.SIGUSR1))
    await hostd.printed("a1", "got")
    await hostd.kill()
    await hostd.again()
    assert (await hostd.stop("a1"))["state"] == "stopping"
    await hostd.kill()
    await hostd.again()
    assert (await hostd.ended("a1"))["exit"]["reason"] == "cancel"


async def test_an_accepted_start_is_made_by_the_next_hostd_when_the_first_died(hostd):
    """The record as hostd leaves it when it dies between accepting and handing over."""
    await hostd.start("a0", ["true"])
    await hostd.ended("a0")
    await hostd.kill()
    source = next(path for path in hostd.state.glob("attempts/*.record") if '"a0"' in path.read_text())
    first = source.read_text().splitlines()[0].replace('"a0"', '"a9"').replace('"true"', '"echo", "late"')
    for ending, text in (("record", first + "\n"), ("out", ""), ("err", "")):
        (hostd.state / "attempts" / f"00000777.{ending}").write_text(text)
    (hostd.state / "attempts" / "00000778.record").write_text(first[: len(first) // 2])
    await hostd.again()
    end = await hostd.ended("a9")
    assert end["state"] == "exited" and await hostd.log_text("a9") == "late\n"
    assert not (hostd.state / "attempts" / "00000778.record").exists(), "a torn acceptance was never answered"


async def test_an_accepted_start_whose_secrets_died_with_hostd_waits_for_its_repeat(hostd):
    await hostd.start("a0", ["true"])
    await hostd.ended("a0")
    await hostd.kill()
    source = next(path for path in hostd.state.glob("attempts/*.record") if '"a0"' in path.read_text())
    first = source.read_text().splitlines()[0].replace('"a0"', '"a9"').replace('"true"', '"printenv", "TOKEN"')
    first = first.replace('"wants_secrets": false', '"wants_secrets": true')
    for ending, text in (("record", first + "\n"), ("out", ""), ("err", "")):
        (hostd.state / "attempts" / f"00000777.{ending}").write_text(text)
    await hostd.again()
    assert (await hostd.probe("a9"))["state"] == "starting"
    spec = hostd.spec(
        "a9", ["printenv", "TOKEN"], slots=(), fence=1, lease_id="lease-a0", secret_env={"TOKEN": "again"}
    )
    await hostd.send(dataclasses.replace(spec, job_id="job-a0"))
    assert (await hostd.ended("a9"))["exit"].get("code", 0) == 0
    assert await hostd.log_text("a9") == "again\n"


async def test_another_boot_means_that_every_attempt_is_dead(hostd):
    begun = await hostd.start("a1", ["sleep", "100"])
    await hostd.start("a2", ["sh", "-c", "exit 4"])
    await hostd.ended("a2")
    await hostd.kill()
    for path in hostd.state.glob("attempts/*.record"):
        path.write_text(path.read_text().replace(begun["boot_id"], "0" * 36))
    await hostd.again(acknowledge=False)
    assert (await hostd.ended("a1"))["state"] == "lost"
    states = {one["attempt_id"]: one["state"] for one in hostd.welcome["attempts"]}
    assert states == {"a1": "lost", "a2": "exited"}
    assert processes.alive(begun["pid"], begun["start_ticks"]), "a pid of another boot is a stranger"
    os.kill(begun["pid"], signal.SIGKILL)


async def test_a_wiped_state_is_amnesia_until_a_floor_is_set_and_the_old_is_gone(hostd):
    begun = await hostd.start("a1", ["sleep", "100"], hostd.cards[0]["uuid"], fence=30)
    first = hostd.welcome["state_id"]
    await hostd.kill()
    hostd.state.rename(hostd.state.with_name("elsewhere"))
    await hostd.again()
    assert hostd.welcome["state_id"] != first and hostd.welcome["needs_floor"]
    assert (await hostd.probe("a1"))["state"] == "unknown"
    card = hostd.cards[0]["uuid"]
    with pytest.raises(Refused) as refused:
        await hostd.start("a2", ["true"], card, fence=31)
    assert refused.value.code == "needs_floor"
    assert (await hostd.ask("set_floor", fence=31))["needs_floor"], "its process still lives"
    await hostd.kill()
    await hostd.again()
    assert hostd.welcome["needs_floor"], "amnesia is remembered"
    with pytest.raises(Refused) as refused:
        await hostd.start("a2", ["true"], hostd.cards[0]["uuid"], fence=31)
    assert refused.value.code == "needs_floor" and begun["pid"] in refused.value.detail["pids"]
    os.kill(begun["pid"], signal.SIGKILL)
    await until(lambda: not processes.alive(begun["pid"], begun["start_ticks"]))
    await hostd.start("a2", ["true"], hostd.cards[0]["uuid"], fence=31)
    await hostd.greet()
    assert not hostd.welcome["needs_floor"]


async def test_a_wiped_state_with_nothing_running_is_noticed_too(hostd):
    await hostd.kill()
    hostd.state.rename(hostd.state.with_name("elsewhere"))
    await hostd.again()
    assert hostd.welcome["needs_floor"]
    assert not (await hostd.ask("set_floor", fence=5))["needs_floor"]


async def test_a_new_host_beside_another_hostds_jobs_needs_no_floor(hostd, tmp_path):
    await hostd.start("a1", ["sleep", "100"])
    async with Hostd(tmp_path, simulate=1, name="second") as second:
        assert not second.welcome["needs_floor"]


async def test_neither_does_one_beside_the_left_over_job_of_a_hostd_whose_directory_is_gone(hostd, tmp_path):
    begun = await hostd.start("a1", ["sleep", "100"])
    await hostd.kill()
    hostd.state.rename(hostd.state.with_name("elsewhere"))
    async with Hostd(tmp_path, simulate=1, name="second") as second:
        assert not second.welcome["needs_floor"]
        await second.start("b1", ["true"], second.cards[0]["uuid"])
        assert (await second.ended("b1"))["exit"]["code"] == 0
    os.kill(begun["pid"], signal.SIGKILL)


async def test_a_shim_keeps_one_attempt_after_another_and_carries_nothing_over(hostd, tmp_path):
    await hostd.start(
        "a1", ["sh", "-c", "pwd"], env={"MINE": "1"}, secret_env={"S": "2"}, workdir=str(tmp_path), pty=True
    )
    await hostd.ended("a1")
    first = (await shim_of(hostd, "a1"))[2]
    await until(lambda: Path(f"/proc/{first}/wchan").exists() and len(os.listdir(f"/proc/{first}/fd")) <= 6, "idle")
    begun = await hostd.start("a2", ["sh", "-c", "pwd; env; sleep 100"])
    await hostd.printed("a2", "COTENANT_ATTEMPT=a2")
    text = await hostd.log_text("a2")
    assert "MINE=" not in text and "\nS=" not in text and not text.startswith(str(tmp_path))
    second = (await shim_of(hostd, "a2"))[2]
    assert second == first, "the shim of a1 was idle"
    assert sorted(os.listdir(f"/proc/{begun['pid']}/fd")) == ["0", "1", "2"]
    await hostd.stop("a2")
    assert (await hostd.ended("a2"))["exit"]["reason"] == "cancel"
    assert "reason" not in (await hostd.probe("a1"))["exit"]
    await until(lambda: not Path(f"/proc/{first}").exists(), "the idle shim's end when nothing comes")


async def test_an_idle_shim_that_died_costs_no_start(hostd):
    for number in range(5):
        await hostd.start(f"a{number}", ["sh", "-c", f"exit {number + 1}"])
        assert (await hostd.ended(f"a{number}"))["exit"]["code"] == number + 1
        with contextlib.suppress(ProcessLookupError):
            os.kill((await shim_of(hostd, f"a{number}"))[2], signal.SIGKILL)
