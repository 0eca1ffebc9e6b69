"""`cotenant run`: the lease lives exactly as long as the command, whatever ends either of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Live = Any  # conftest.Server
Until = Callable[..., Any]  # conftest.until
Ending = list["subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def _free_cards(request: pytest.FixtureRequest) -> None:
    if "live" in request.fixturenames:
        request.getfixturevalue("live").idle()


def _leases(live: Live) -> list[dict[str, Any]]:
    return list(live.json("lease", "list")["leases"])


def _started(live: Live, ending: Ending, script: str, *options: str) -> subprocess.Popen[str]:
    """A shell script under `cotenant run` that has printed `up`; the lease is held."""
    process = live.start("run", *options, "--", "sh", "-c", script)
    ending.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n", process.stderr.read() if process.stderr else ""
    return process  # type: ignore[no-any-return]


def test_the_exit_code_the_environment_and_the_streams_pass_through(live: Live) -> None:
    script = 'echo "$COTENANT_LEASE|$CUDA_VISIBLE_DEVICES|$CUDA_DEVICE_ORDER"; cat; echo bad >&2; exit 9'
    done = live("run", "--gpus", "2", "--purpose", "a test", "--", "sh", "-c", script, stdin="from stdin\n", code=9)
    first, second = done.out.splitlines()
    lease, cards, order = first.split("|")
    assert lease.startswith("lse_")
    assert cards == "", "simulated cards have no number that CUDA may have"
    assert order == "PCI_BUS_ID"
    assert second == "from stdin"
    assert "bad\n" in done.err
    ended = live.json("lease", "show", lease)
    assert (ended["state"], ended["purpose"]) == ("released", "a test")


def test_json_says_the_lease_and_the_code_after_the_command(live: Live) -> None:
    done = live("run", "--json", "--", "true")
    assert done.json["exit_code"] == 0
    assert live.json("lease", "show", done.json["lease_id"])["state"] == "released"


@pytest.mark.parametrize(("command", "code"), [("/nowhere/cmd", 127), ("/etc/passwd", 126)])
def test_what_cannot_be_started_ends_as_in_a_shell_and_holds_nothing(live: Live, command: str, code: int) -> None:
    done = live("run", "--", command, code=code)
    assert command in done.err
    assert _leases(live) == []


def test_a_command_that_a_signal_ended_is_128_plus_it(live: Live) -> None:
    live("run", "--", "sh", "-c", "kill -SEGV $$", code=128 + signal.SIGSEGV)
    assert _leases(live) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_ending_signal_reaches_the_command_and_the_lease_is_given_back(
    live: Live, ending: Ending, number: int
) -> None:
    name = signal.Signals(number).name.removeprefix("SIG")
    process = _started(live, ending, f"trap 'echo saved; exit 5' {name}; echo up; while :; do sleep 0.05; done")
    assert len(_leases(live)) == 1
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, "saved\n")
    assert _leases(live) == []


def test_usr1_is_handed_on_and_ends_nothing(live: Live, ending: Ending) -> None:
    process = _started(live, ending, "trap 'echo saved; exit 0' USR1; echo up; while :; do sleep 0.05; done")
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "saved\n")


def test_a_command_that_ignores_term_is_killed_after_the_grace(live: Live, ending: Ending) -> None:
    process = _started(live, ending, "trap '' TERM; echo up; while :; do sleep 0.05; done", "--grace", "0.3")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert _leases(live) == []


def test_what_the_command_left_behind_ends_with_the_lease(live: Live, tmp_path: Path) -> None:
    """Also a daemon in a session of its own, whose parent is long gone."""
    pid_file = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid_file}; exec sleep 600' >/dev/null 2>&1 </dev/null & while [ ! -s {pid_file} ]; do sleep 0.02; done"
    done = live("run", "--", "sh", "-c", script)
    assert "stayed behind" in done.err
    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()
    assert _leases(live) == []


def test_a_lost_lease_ends_the_command_with_a_notice(live: Live, ending: Ending) -> None:
    process = _started(live, ending, "echo up; exec sleep 600", "--heartbeat", "0.2", "--grace", "1")
    lease = _leases(live)[0]["lease_id"]
    live("lease", "evict", lease, "--reason", "needed elsewhere", "--yes")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the lease is lost" in err


def test_a_lost_lease_ends_a_command_that_does_not_listen(live: Live, ending: Ending) -> None:
    process = _started(
        live, ending, "trap '' TERM; echo up; while :; do sleep 0.05; done", "--heartbeat", "0.2", "--grace", "0.3"
    )
    live("lease", "evict", _leases(live)[0]["lease_id"], "--reason", "x", "--yes")
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL


def test_a_killed_wrapper_takes_its_command_along(live: Live, ending: Ending, until: Until) -> None:
    process = live.start(
        "run",
        "--ttl",
        "60",
        "--",
        sys.executable,
        "-c",
        "import os,time; print(os.getpid(), flush=True); time.sleep(600)",
    )
    ending.append(process)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    until(lambda: not os.path.exists(f"/proc/{child}") or _zombie(child), "the command outlived its wrapper")


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_it_waits_in_line_says_for_whom_and_leaves_when_told_to(live: Live, ending: Ending, until: Until) -> None:
    held = live.json("lease", "acquire", "--gpus", "2")
    refused = live("run", "--no-queue", "--", "true", code=1)
    assert "busy" in refused.err
    waiting = live.start("run", "--", "echo", "at last")
    gives_up = live.start("run", "--", "echo", "never")
    ending += [waiting, gives_up]
    until(lambda: len(live.json("lease", "list", "--state", "queued")["leases"]) == 2, "no claims in line")
    gives_up.send_signal(signal.SIGTERM)
    out, _ = gives_up.communicate(timeout=60)
    assert (gives_up.returncode, out) == (128 + signal.SIGTERM, "")
    assert len(live.json("lease", "list", "--state", "queued")["leases"]) == 1
    live("lease", "release", held["lease_id"])
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (0, "at last\n")
    assert "queued" in err


def test_ctrl_c_on_a_terminal_reaches_the_command_once(live: Live, terminal: Callable[..., Any]) -> None:
    script = "import signal,sys,time\nseen=[]\nsignal.signal(signal.SIGINT, lambda *a: seen.append(1))\nprint('ready', flush=True)\nwhile not seen: time.sleep(0.02)\ntime.sleep(0.3)\nprint('interrupts:', len(seen), flush=True)\nsys.exit(4)"
    shown = terminal("run", "--", sys.executable, "-c", script)
    shown.expect("ready")
    shown.type("\x03")
    assert shown.end() == 4
    assert "interrupts: 1" in shown.seen
    assert _leases(live) == []


def test_the_command_has_the_terminal_for_itself(live: Live, terminal: Callable[..., Any]) -> None:
    shown = terminal(
        "run",
        "--",
        sys.executable,
        "-c",
        "import os; print('tty', os.isatty(0), os.isatty(1)); print('got', input('name? '))",
    )
    shown.expect("name? ")
    shown.type("ada\n")
    shown.expect("got ada")
    assert shown.end() == 0
    assert "tty True True" in shown.seen


def test_a_server_that_restarts_interrupts_nothing(own: Live, ending: Ending, until: Until) -> None:
    own.start_server()
    process = _started(own, ending, "echo up; read line; echo $line", "--heartbeat", "0.2", "--ttl", "60")
    lease = own.json("lease", "list")["leases"][0]["lease_id"]
    own.signal_server(signal.SIGKILL)
    assert process.stderr is not None
    for line in process.stderr:
        if "could not be renewed" in line:
            break
    port = own.url.rpartition(":")[2]
    own.start_server("--port", port)
    for line in process.stderr:
        if "renewed again" in line:
            break
    assert own.json("lease", "show", lease)["state"] == "running"
    out, _ = process.communicate("still here\n", timeout=60)
    assert (process.returncode, out) == (0, "still here\n")
    assert own.json("lease", "show", lease)["state"] == "released"
    own.stop_server()


def test_waiting_and_following_outlive_a_restart(own: Live, ending: Ending, until: Until, room: Path) -> None:
    own.start_server()
    go = room / "go"
    job = own(
        "submit",
        "--gpus",
        "1",
        "--",
        "sh",
        "-c",
        f"echo one; while [ ! -e {go} ]; do sleep 0.05; done; echo two; exit 6",
    ).out.strip()
    following = own.start("logs", "-f", job)
    waiting = own.start("job", "wait", job, "--json")
    ending += [following, waiting]
    assert following.stdout is not None
    assert following.stdout.readline() == "one\n"
    port = own.url.rpartition(":")[2]
    assert own.signal_server(signal.SIGTERM) == 0
    assert following.stderr is not None
    assert "Trying again" in following.stderr.readline()
    own.start_server("--port", port)
    go.touch()
    out, _ = following.communicate(timeout=60)
    assert (following.returncode, out) == (0, "two\n")
    out, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 6
    assert json.loads(out)["state"] == "failed"
    own.stop_server()
