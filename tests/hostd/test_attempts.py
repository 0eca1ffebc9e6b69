"""One attempt's life on a host, with real processes: how it starts, what it is given, how it ends."""

import asyncio
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
from hostdclient import carriers, until

from cotenant.hostd import processes
from cotenant.hostd.protocol import Refused, SlotRef

PY = sys.executable


def sh(text):
    return ["sh", "-c", text]


async def test_an_attempt_runs_and_its_end_is_told_with_code_times_and_clean(hostd):
    card = hostd.cards[0]["uuid"]
    begun = await hostd.start("a1", sh("echo hello; echo trouble >&2; exit 7"), card)
    assert begun["state"] in ("running", "exited") and begun["pid"] > 0
    end = await hostd.ended("a1")
    assert (end["state"], end["exit"]["code"], end["clean"]) == ("exited", 7, True)
    assert end["exit"]["duration_s"] > 0 and end["exit"]["peak_memory_mib"] >= 1
    assert end["pid"] == begun["pid"] and end["start_ticks"] == begun["start_ticks"]
    assert await hostd.log_text("a1") == "hello\n"
    assert await hostd.log_text("a1", "err") == "trouble\n"


async def test_cpu_seconds_of_the_whole_tree_are_counted(hostd):
    burn = "t=$(python3 -c 'import time; e=time.process_time()+0.3\nwhile time.process_time()<e: pass')"
    await hostd.start("a1", sh(burn.replace("python3", PY)))
    end = (await hostd.ended("a1"))["exit"]
    assert end["cpu_user_s"] + end.get("cpu_sys_s", 0) >= 0.25


async def test_the_environment_names_the_lease_and_shows_no_real_card_for_a_simulated_one(hostd):
    card = hostd.cards[1]["uuid"]
    await hostd.start(
        "a1", ["env"], card, env={"MINE": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, secret_env={"TOKEN": "s3cr3t"}
    )
    await hostd.ended("a1")
    env = dict(line.split("=", 1) for line in (await hostd.log_text("a1")).splitlines())
    assert env["CUDA_VISIBLE_DEVICES"] == "", "on a machine with real cards a number would be one of those"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["COTENANT_GPU_UUIDS"] == card and env["COTENANT_LEASE"] == "lease-a1"
    assert env["COTENANT_FENCE"] == "1" and env["COTENANT_JOB"] == "job-a1" and env["COTENANT_EPOCH"] == "1"
    assert env["COTENANT_ATTEMPT"] == "a1" and env["MINE"] == "1" and env["TOKEN"] == "s3cr3t"
    assert env["PYTHONUNBUFFERED"] == "1"
    assert any('"a1"' in record.read_text() for record in hostd.state.glob("attempts/*.record"))
    for path in hostd.state.rglob("*"):
        if path.is_file() and path.suffix != ".out":
            assert b"s3cr3t" not in path.read_bytes(), path


async def test_without_a_gpu_no_card_is_visible_and_unbuffered_can_be_refused(hostd):
    await hostd.start("a1", ["env"], env={"PYTHONUNBUFFERED": ""})
    await hostd.ended("a1")
    lines = (await hostd.log_text("a1")).splitlines()
    assert "CUDA_VISIBLE_DEVICES=" in lines and "PYTHONUNBUFFERED=" in lines


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["no-such-command-here"], "ENOENT"),
        (["/etc/passwd"], "EACCES"),
        (["/nowhere/at/all"], "ENOENT"),
    ],
)
async def test_a_command_that_cannot_be_executed_is_told_apart(hostd, argv, word):
    answer = await hostd.start("a1", argv)
    assert answer["state"] == "exited" and word in answer["exit"]["exec_error"]
    assert "code" not in answer["exit"] and "signal" not in answer["exit"]
    assert (await hostd.ended("a1"))["exit"]["exec_error"] == answer["exit"]["exec_error"]


async def test_a_script_without_a_first_line_says_what_is_missing(hostd, tmp_path):
    script = tmp_path / "plain"
    script.write_text("echo hi\n")
    script.chmod(0o755)
    answer = await hostd.start("a1", [str(script)])
    assert "#!/bin/sh" in answer["exit"]["exec_error"]


async def test_the_working_directory(hostd, tmp_path):
    await hostd.start("a1", ["pwd"], workdir=str(tmp_path))
    await hostd.ended("a1")
    assert await hostd.log_text("a1") == f"{tmp_path}\n"
    with pytest.raises(Refused) as refused:
        await hostd.start("a2", ["pwd"], workdir=str(tmp_path / "missing"))
    assert refused.value.code == "bad_workdir"
    assert (await hostd.probe("a2"))["state"] == "unknown"


async def test_a_command_inherits_no_descriptor_and_no_ignored_signal(hostd):
    """A lock or socket that the command had would outlive its shim; an ignored signal would make it deaf."""
    begun = await hostd.start("a1", ["sleep", "100"])
    await until(lambda: Path(f"/proc/{begun['pid']}/comm").read_text() == "sleep\n")
    assert sorted(os.listdir(f"/proc/{begun['pid']}/fd")) == ["0", "1", "2"]
    status = Path(f"/proc/{begun['pid']}/status").read_text().splitlines()
    for name in ("SigIgn", "SigBlk"):
        assert int(next(line for line in status if line.startswith(name)).split()[1], 16) & 0x7FFFFFFF == 0, name
    await until(lambda: Path(f"/proc/{begun['pid']}/oom_score_adj").read_text() == "500\n", "set once it was told")


async def test_a_job_with_a_terminal(hostd):
    await hostd.start("a1", [PY, "-c", "import sys; print(sys.stdout.isatty(), sys.stdin.isatty())\nexit(4)"], pty=True)
    assert (await hostd.ended("a1"))["exit"]["code"] == 4
    assert await hostd.log_text("a1") == "True True\n"


async def test_a_terminal_keeps_all_of_a_long_output(hostd):
    await hostd.start("a1", sh("seq 1 20000"), pty=True)
    await hostd.ended("a1")
    text = ""
    end = 0
    while True:
        page = await hostd.ask("read_log", attempt_id="a1", stream="out", offset=end, tail_lines=None)
        text, end = text + page["text"], page["end"]
        if page["final"]:
            break
    assert text.split() == [str(number) for number in range(1, 20001)]


async def test_signals_say_who_sent_them(hostd):
    await hostd.start("own", ["sleep", "100"])
    await hostd.ask("signal", attempt_id="own", signal=int(signal.SIGUSR1))
    end = await hostd.ended("own")
    assert (end["exit"]["signal"], end["exit"]["sender"]) == (signal.SIGUSR1, "cotenant")
    foreign = await hostd.start("foreign", ["sleep", "100"])
    os.kill(foreign["pid"], signal.SIGKILL)
    end = await hostd.ended("foreign")
    assert (end["exit"]["signal"], end["exit"]["sender"]) == (signal.SIGKILL, "outside")
    with pytest.raises(Refused) as refused:
        await hostd.ask("signal", attempt_id="own", signal=10)
    assert refused.value.code == "not_running"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
async def test_a_crash_is_not_told_as_a_strangers_doing(hostd, number):
    await hostd.start("a1", ["sh", "-c", f"ulimit -c 0; kill -{int(number)} $$"])
    end = await hostd.ended("a1")
    assert (end["exit"]["signal"], end["exit"]["sender"]) == (number, "fault")


async def test_a_signal_reaches_the_whole_group(hostd):
    child = "(trap 'echo child; exit 0' USR1; echo up; while :; do sleep 0.05; done) &"
    await hostd.start("a1", sh(f"trap 'echo got; wait; exit 0' USR1; {child} wait"))
    await hostd.printed("a1", "up")
    await hostd.ask("signal", attempt_id="a1", signal=int(signal.SIGUSR1))
    await hostd.ended("a1")
    assert {"got", "child"} <= set((await hostd.log_text("a1")).split())


async def test_stop_is_polite_first(hostd):
    await hostd.start("a1", sh("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"))
    await hostd.printed("a1", "up")
    answer = await hostd.stop("a1", reason="preempt")
    assert answer["state"] == "stopping"
    end = await hostd.ended("a1")
    assert (end["exit"]["code"], end["exit"]["sender"], end["exit"]["reason"]) == (0, "shim", "preempt")
    assert "saved" in await hostd.log_text("a1")


async def test_stop_kills_what_ignores_term_after_the_grace(hostd):
    await hostd.start("a1", sh("trap '' TERM; echo up; while :; do sleep 0.05; done"))
    await hostd.printed("a1", "up")
    before = time.monotonic()
    await hostd.stop("a1", grace_s=0.5)
    assert time.monotonic() - before < 0.4, "stop must not wait"
    end = await hostd.ended("a1")
    assert (end["exit"]["signal"], end["exit"]["sender"], end["exit"]["reason"]) == (signal.SIGKILL, "shim", "cancel")


async def test_a_stopped_process_can_be_stopped(hostd):
    begun = await hostd.start("a1", sh("trap 'echo saved; exit 3' TERM; echo up; while :; do sleep 0.05; done"))
    await hostd.printed("a1", "up")
    os.killpg(begun["pid"], signal.SIGSTOP)
    await until(lambda: processes.stat(begun["pid"]).state == "T")
    await hostd.stop("a1")
    assert (await hostd.ended("a1"))["exit"]["code"] == 3


async def test_a_second_stop_shortens_the_grace(hostd):
    await hostd.start("a1", sh("trap '' TERM; echo up; while :; do sleep 0.05; done"))
    await hostd.printed("a1", "up")
    await hostd.stop("a1", grace_s=100)
    await hostd.stop("a1", grace_s=0.2)
    assert (await hostd.ended("a1", 20))["exit"]["signal"] == signal.SIGKILL


async def test_the_time_limit_is_kept_by_the_shim_even_without_hostd(hostd):
    begun = await hostd.start("a1", ["sleep", "100"], time_limit_s=1.0, stop_grace_s=1.0)
    await hostd.kill()
    await until(lambda: not processes.alive(begun["pid"], begun["start_ticks"]), "the time limit without hostd")
    await hostd.again()
    end = await hostd.ended("a1")
    assert (end["exit"]["signal"], end["exit"]["sender"], end["exit"]["reason"]) == (15, "shim", "time_limit")
    assert 0.9 < end["exit"]["duration_s"] < 10


ESCAPE = """
import os, signal, sys, time
read, write = os.pipe()
for number in range(3):
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("escaped", os.getpid(), flush=True)
        os.write(write, b"x")
        time.sleep(100)
        os._exit(0)
    os.waitpid(child, 0)
    os.read(read, 1)
"""


async def test_what_escaped_by_setsid_dies_with_the_command_and_the_code_is_kept(hostd):
    await hostd.start("a1", [PY, "-c", ESCAPE + "sys.exit(9)"], stop_grace_s=0.3)
    end = await hostd.ended("a1")
    assert end["exit"]["code"] == 9 and end["exit"]["escapees_killed"] == 3 and end["clean"]
    assert "sender" not in end["exit"], "the command ended by itself"
    assert carriers(COTENANT_ATTEMPT="a1", COTENANT_STATE_DIR=str(hostd.state.resolve())) == []


async def test_a_stop_reaches_what_escaped(hostd):
    await hostd.start("a1", [PY, "-c", ESCAPE + "time.sleep(100)"])
    end = time.monotonic() + 30
    while (await hostd.log_text("a1")).count("escaped") < 3:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    await hostd.stop("a1", grace_s=0.3)
    end = await hostd.ended("a1")
    assert end["exit"]["escapees_killed"] == 3
    assert carriers(COTENANT_ATTEMPT="a1", COTENANT_STATE_DIR=str(hostd.state.resolve())) == []


async def test_secrets_that_no_shim_could_take_are_refused_as_the_jobs_own_fault(hostd):
    await hostd.start("a1", ["sh", "-c", "printf %s $A | wc -c"], secret_env={"A": "x" * 120_000})
    await hostd.ended("a1")
    assert (await hostd.log_text("a1")).strip() == "120000"
    with pytest.raises(Refused) as refused:
        await hostd.start("a2", ["true"], fence=9, secret_env={"A": "x" * 90_000, "B": "y" * 90_000})
    assert refused.value.code == "bad_request" and "secrets" in refused.value.message


async def test_a_start_is_made_once_however_often_it_comes(hostd, tmp_path):
    ran = tmp_path / "ran"
    spec = hostd.spec("a1", sh(f"echo x >> {ran}; sleep 0.2"))
    answers = await asyncio.gather(*(hostd.send(spec) for _ in range(8)))
    assert len({answer["pid"] for answer in answers}) == 1
    await hostd.ended("a1")
    assert (await hostd.send(spec))["state"] == "exited"
    await hostd.ask("forget", attempt_ids=["a1"])
    assert (await hostd.send(spec))["state"] == "exited"
    assert ran.read_text() == "x\n"
    with pytest.raises(Refused) as refused:
        await hostd.send(hostd.spec("a1", sh("true"), fence=spec.fence))
    assert refused.value.code == "spec_conflict"


async def test_a_stop_before_the_start_is_a_tombstone_also_after_a_restart(hostd):
    assert (await hostd.stop("a1"))["state"] == "never"
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            await hostd.start("a1", ["true"])
        assert refused.value.code == "tombstoned"
        assert (await hostd.probe("a1"))["state"] == "never"
        await hostd.kill()
        await hostd.again()


async def test_start_and_stop_at_once_end_it_whichever_comes_first(hostd):
    for number in range(20):
        name = f"a{number}"
        spec = hostd.spec(name, ["sleep", "100"])
        started, stopped = await asyncio.gather(hostd.send(spec), hostd.stop(name), return_exceptions=True)
        assert not isinstance(stopped, Exception)
        if isinstance(started, Refused):
            assert started.code == "tombstoned"
        else:
            assert (await hostd.ended(name))["exit"]["reason"] == "cancel"
        assert (await hostd.probe(name))["state"] in ("exited", "never")
    assert carriers(COTENANT_STATE_DIR=str(hostd.state.resolve())) == []


async def test_fences_are_compared_with_the_slot_and_survive_kill_9(hostd):
    card, other = (card["uuid"] for card in hostd.cards)
    await hostd.start("new", ["true"], card, fence=10)
    await hostd.ended("new")
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            await hostd.start("old", ["true"], card, fence=9)
        assert refused.value.code == "stale_fence"
        assert hostd.welcome["max_fence"] in (0, 10)
        await hostd.kill()
        await hostd.again()
        assert hostd.welcome["max_fence"] == 10
    await hostd.start("elsewhere", ["true"], other, fence=9)
    with pytest.raises(Refused) as refused:  # a share of the card overlaps the whole of it
        await hostd.start("share", ["true"], slots=(SlotRef(card, 1, 2),), fence=9)
    assert refused.value.code == "stale_fence"
    await hostd.ask("set_floor", fence=50)
    await hostd.kill()
    await hostd.again()
    with pytest.raises(Refused) as refused:
        await hostd.start("below", ["true"], other, fence=49)
    assert refused.value.code == "stale_fence"
    await hostd.start("above", ["true"], other, fence=50)


async def test_a_slot_with_a_living_attempt_of_another_lease_is_occupied(hostd):
    card = hostd.cards[0]["uuid"]
    await hostd.start("a1", ["sleep", "100"], card)
    with pytest.raises(Refused) as refused:
        await hostd.start("a2", ["true"], card)
    assert refused.value.code == "occupied" and refused.value.detail["attempt_id"] == "a1"
    await hostd.stop("a1")
    await hostd.ended("a1")
    assert (await hostd.start("a3", ["true"], card))["pid"]
    with pytest.raises(Refused) as refused:
        await hostd.start("a4", ["true"], "GPU-none")
    assert refused.value.code == "no_such_card"


async def test_shares_of_a_card_live_side_by_side(hostd):
    card = hostd.cards[0]["uuid"]
    await hostd.start("a1", ["sleep", "100"], slots=(SlotRef(card, 0, 2),), env={"COTENANT_SIM_MEMORY_MIB": "1000"})
    await hostd.start("a2", ["sleep", "100"], slots=(SlotRef(card, 1, 2),), env={"COTENANT_SIM_MEMORY_MIB": "500"})
    seen = await hostd.card(card)
    assert seen["memory_used_mib"] == 1500 and {one["attempt_id"] for one in seen["processes"]} == {"a1", "a2"}
    assert seen["simulated"] and seen.get("state", "ok") == "ok"
    with pytest.raises(Refused):
        await hostd.start("a3", ["true"], slots=(SlotRef(card, 0, 2),))


async def test_a_direct_lease_holds_its_card_over_a_restart(hostd):
    card = hostd.cards[0]["uuid"]
    slots = [{"uuid": card}]
    for _ in range(2):
        assert (await hostd.ask("hold", lease_id="L1", fence=5, slots=slots))["clean"]
    await hostd.kill()
    await hostd.again()
    assert hostd.welcome["holds"] == ["L1"]
    with pytest.raises(Refused) as refused:
        await hostd.start("a1", ["true"], card, fence=6)
    assert refused.value.code == "occupied"
    with pytest.raises(Refused) as refused:
        await hostd.ask("hold", lease_id="L2", fence=4, slots=slots)
    assert refused.value.code == "stale_fence"
    assert (await hostd.ask("unhold", lease_id="L1"))["clean"]
    assert (await hostd.ask("unhold", lease_id="L1", slots=slots))["clean"], "a repeat names what is to be looked at"
    assert (await hostd.start("a1", ["true"], card, fence=6))["pid"]


async def test_a_hold_that_cannot_be_repeated_still_stands(hostd):
    card = hostd.cards[0]["uuid"]
    await hostd.ask("hold", lease_id="L1", fence=5, slots=[{"uuid": card}])
    unwritable = hostd.state / "state.json.new"
    unwritable.mkdir()
    with pytest.raises(Refused) as refused:
        await hostd.ask("hold", lease_id="L1", fence=6, slots=[{"uuid": card}])
    assert refused.value.code == "storage"
    unwritable.rmdir()
    with pytest.raises(Refused) as refused:
        await hostd.start("a1", ["true"], card=card, fence=7)
    assert refused.value.code == "occupied"
    assert (await hostd.ask("unhold", lease_id="L1"))["clean"]


async def test_a_lease_that_was_never_held_is_not_called_clean_unseen(hostd):
    card = hostd.cards[0]["uuid"]
    with pytest.raises(Refused) as refused:
        await hostd.ask("unhold", lease_id="L9")
    assert "slots" in refused.value.message
    assert (await hostd.ask("unhold", lease_id="L9", slots=[{"uuid": card}]))["clean"]
    assert not (await hostd.ask("unhold", lease_id="L9", slots=[{"uuid": "GPU-gone"}]))["clean"]


DAEMON = """
import os, sys, time
if os.fork():
    time.sleep(100)
os.setsid()
if os.fork():
    os._exit(0)
os.setsid()
for fd in range(3):
    os.close(fd)
os.chdir("/")
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(100)
"""


@pytest.mark.parametrize("clear", [False, True])
async def test_a_grandchild_that_made_itself_a_daemon_does_not_survive_a_stop(hostd, tmp_path, clear):
    """Two forks, two sessions, no descriptor and (cleared) no environment of ours: only its ancestry is left, and it dies by that."""
    path = tmp_path / "daemon"
    program = (
        DAEMON
        if not clear
        else f"import os, sys\nos.execve(sys.executable, [sys.executable, '-c', {DAEMON!r}, sys.argv[1]], {{}})"
    )
    await hostd.start("a1", [PY, "-c", program, str(path)])
    pid = int(await until(lambda: path.exists() and path.read_text(), "the daemon"))
    seen = processes.stat(pid)
    assert seen is not None and processes.alive(pid, seen.ticks)
    await hostd.stop("a1", grace_s=0.3)
    end = await hostd.ended("a1")
    assert not processes.alive(pid, seen.ticks)
    assert end["exit"]["escapees_killed"] == 1 and end["clean"]


async def test_a_start_without_a_free_descriptor_is_refused_and_leaves_the_slot_free(hostd):
    """Wherever on its way it meets the limit: at the record, or at the socket to the shim."""
    pid, refusals = hostd.process.pid, set()
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    for left in range(4):
        place = (SlotRef("cpu", left, 4),)
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        free = [number for number in range(limits[0]) if number not in used]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[left], limits[1]))
        try:
            await hostd.start(f"tight{left}", ["sleep", "60"], slots=place)
        except Refused as refused:
            assert refused.code == "storage" and "open files" in refused.message
            refusals.add(refused.message.partition(":")[0])
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            assert (await hostd.probe(f"tight{left}"))["state"] == "unknown", "it certainly never began"
            # sleeping, so that no shim becomes idle and spares the next round its socket
            assert (await hostd.start(f"then{left}", ["sleep", "60"], slots=place))["state"] == "running"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert len(refusals) == 2, refusals


async def test_many_attempts_at_once(hostd):
    specs = [hostd.spec(f"a{n}", sh(f"exit {n}"), slots=()) for n in range(60)]
    await asyncio.gather(*(hostd.send(spec) for spec in specs))
    for number in range(60):
        end = await hostd.ended(f"a{number}")
        assert end["exit"].get("code", 0) == number


async def test_a_request_that_makes_no_sense_is_refused_and_changes_nothing(hostd):
    bad = [
        ("start", {}),
        ("start", {"attempt_id": 5}),
        ("nonsense", {}),
        ("stop", {"attempt_id": "../../etc", "reason": "x", "grace_s": 1}),
        ("stop", {"attempt_id": "a", "reason": "x", "grace_s": -1}),
        ("stop", {"attempt_id": "a", "reason": "x", "grace_s": "1"}),
        ("hold", {"lease_id": "L", "fence": 1, "slots": 5}),
        ("hold", {"lease_id": "L", "fence": True, "slots": []}),
        ("read_log", {"attempt_id": "a", "stream": "../spec", "offset": 0}),
        ("forget", {"attempt_ids": [1]}),
        ("beat", {"n": "x"}),
    ]
    for op, args in bad:
        with pytest.raises(Refused) as refused:
            await hostd.ask(op, **args)
        assert refused.value.code == "bad_request", (op, args, refused.value.message)
    for argv in ([], ["a\0b"], [""]):
        with pytest.raises(Refused) as refused:
            answer = await hostd.start("b1", argv)
            assert "exec_error" in answer["exit"]  # an empty name is a command that is not there
            raise Refused("bad_request", "")
        assert refused.value.code == "bad_request"
    assert (await hostd.ask("beat", n=3)) == {"n": 3}
    state = json.loads((hostd.state / "state.json").read_text())
    assert state["holds"] == {}
