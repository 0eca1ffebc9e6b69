"""`cotenant serve` as others rely on it, and what the other commands do while no server runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

Own = Any  # conftest.Server
Until = Callable[..., Any]  # conftest.until


def test_without_a_server_it_is_3_and_says_how_to_start_one(own: Own) -> None:
    for words in (["status"], ["submit", "--", "true"], ["run", "--", "true"], ["job", "wait", "j"]):
        done = own(*words, code=3)
        assert "cotenant serve" in done.err
        assert "Traceback" not in done.err
    assert own("status", "--json", code=3).json["error"]["code"] == "no_server"


def test_tokens_are_made_listed_and_revoked_without_a_server_and_are_good_with_it(own: Own) -> None:
    made = own.json("token", "create", "early", "--kind", "agent", "--owner", "erin", "--scopes", "read,write")
    assert made["token"].startswith("ctn_")
    assert (made["name"], made["kind"], made["owner"], made["scopes"]) == ("early", "agent", "erin", ["read", "write"])
    gone = own.json("token", "create", "gone", "--owner", "erin")
    own("token", "revoke", "gone", "--yes")
    assert {t["name"]: t["state"] for t in own.json("token", "list")["tokens"]} == {
        "early": "active",
        "gone": "revoked",
    }
    assert "admin" in own("token", "create", "x", "--scopes", "read,admin", code=1).err
    own.start_server()
    assert own.json("quota", COTENANT_TOKEN=made["token"])["me"]["name"] == "early"
    assert "COTENANT_TOKEN" in own("quota", code=1, COTENANT_TOKEN=gone["token"]).err
    own.stop_server()


def test_a_directory_that_is_made_by_the_way_is_said_and_looking_makes_none(own: Own, room: Path) -> None:
    """A mistyped --data looks like a first one: whoever makes a token there must be told, whoever looks must be refused."""
    for words in (["token", "list"], ["token", "revoke", "x", "--yes"]):
        refused = own(*words, code=1)
        assert str(own.data) in refused.err and "--data" in refused.err
    assert not own.data.exists(), "looking made nothing"
    made = own("token", "create", "first", "--owner", "erin")
    assert f"made a new data directory: {own.data}" in made.err
    assert made.out.startswith("ctn_") and len(made.out.split()) == 1, "the notice is not in the way of the token"
    assert "made a new" not in own("token", "create", "second", "--owner", "erin").err
    own.start_server()
    assert "made a new" not in own("token", "create", "third", "--owner", "erin").err
    assert {t["name"] for t in own.json("token", "list")["tokens"]} >= {"first", "second", "third"}
    own.stop_server()


@pytest.mark.parametrize("running", [False, True])
def test_a_second_token_of_a_name_is_said_and_one_word_ends_only_one(own: Own, running: bool) -> None:
    first = own.json("token", "create", "twice", "--owner", "erin")
    if running:
        own.start_server()
    made = own("token", "create", "twice", "--owner", "erin")
    assert first["id"] in made.err and "another living token" in made.err
    second = own.json("token", "list")["tokens"][-1]
    refused = own("token", "revoke", "twice", "--yes", code=1)
    assert first["id"] in refused.err and second["id"] in refused.err and "--all" in refused.err
    states = {t["id"]: t["state"] for t in own.json("token", "list")["tokens"]}
    assert (states[first["id"]], states[second["id"]]) == ("active", "active"), "a refusal ends neither"
    assert own.json("token", "revoke", first["id"], "--yes")["revoked"] == [first["id"]]
    assert own.json("token", "revoke", "twice", "--yes")["revoked"] == [second["id"]], (
        "one is left, so the name is clear"
    )
    three = [own.json("token", "create", "twice", "--owner", "erin")["id"] for _ in range(3)]
    assert own.json("token", "revoke", "twice", "--all", "--yes")["revoked"] == three
    if running:
        own.stop_server()


@pytest.mark.parametrize("owner", ["", "  "])
def test_an_owner_that_names_nobody_is_wrong_usage(own: Own, owner: str) -> None:
    assert "--owner" in own("token", "create", "x", "--owner", owner, code=2).err
    assert not own.data.exists()


def test_a_server_that_was_killed_is_told_from_one_that_runs(own: Own) -> None:
    own.start_server()
    own.signal_server(signal.SIGKILL)
    assert (own.data / "server.json").exists()
    assert "connection refused" in own("status", code=3).err.lower()
    assert own.json("token", "create", "after", "--owner", "x")["token"], "the database is free: made without a server"
    found = own("doctor", code=None)
    assert "No server answers" in found.out
    own.start_server()
    assert own.json("token", "list")
    own.stop_server()
    assert not (own.data / "server.json").exists()


def test_a_second_server_on_the_same_directory_is_refused_in_one_sentence(own: Own) -> None:
    own.start_server()
    second = own("serve", "--port", "0", code=1)
    assert "Traceback" not in second.err
    assert str(own.data) in second.err
    assert own.json("gpus")["total"] == 1, "the first goes on"
    own.stop_server()


def test_a_taken_port_and_a_bad_configuration_are_one_sentence(own: Own, room: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = own("serve", "--port", str(taken.getsockname()[1]), code=1)
    assert "in use" in refused.err
    assert "--port" in refused.err
    assert "Traceback" not in refused.err
    config = room / "bad.toml"
    config.write_text("[server]\nprot = 1\n")
    wrong = own("serve", "--config", str(config), code=2)
    assert "prot" in wrong.err
    assert "port" in wrong.err
    assert "Traceback" not in wrong.err
    assert "cannot be read" in own("serve", "--config", "/nowhere.toml", code=2).err


def test_a_pool_without_a_card_is_said_at_the_start(own: Own) -> None:
    own.data.mkdir()
    (own.data / "cotenant.toml").write_text('[pools.train]\n[hosts.local]\npool = "train"\n')
    own.start_server()
    own.stop_server()
    said = (own.data.parent / "serve.err").read_text()
    assert "pool 'default' has no card" in said, "whoever names no pool asks there"
    assert "pool 'train'" not in said


def test_without_a_driver_every_refusal_names_it_and_the_doctor(own: Own) -> None:
    """The machine of a newcomer who did not install the driver, or runs in a container without it."""
    own.gpus = 0
    own.start_server(LD_LIBRARY_PATH="/nowhere", NVML_LIBRARY_PATH="/nowhere")
    if own.json("gpus")["total"]:
        own.stop_server()
        return  # a machine with cards has a driver
    assert "driver" in (own.data.parent / "serve.err").read_text().lower()
    for words in (["submit", "--gpus", "1", "--", "true"], ["lease", "acquire"], ["run", "--", "true"]):
        refused = own(*words, code=1).err
        assert "no_such_gpu" in refused and "NVIDIA driver" in refused and "`cotenant doctor`" in refused
    assert "NVIDIA driver" in own("gpus").err and "cotenant doctor" in own("gpus").err
    assert "no card at all" in own("quota").out
    assert "--gpus 0" in own("quota").out and "gpus=0" not in own("quota").out
    assert "--gpus 0" in own("submit", "--", "true", code=1).err, "the way that is open is said"
    assert own("submit", "--gpus", "0", "--wait", "--", "true")
    own.stop_server()


def test_a_log_level_that_is_none_is_said(own: Own) -> None:
    refused = own("serve", "--port", "0", code=2, COTENANT_LOG="loud")
    assert "COTENANT_LOG" in refused.err and "Traceback" not in refused.err


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's directory can only be had by root")
def test_another_users_data_directory_is_said_to_be_one(own: Own) -> None:
    own.start_server()
    own.data.parent.chmod(0o755)
    words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *own.argv("status")]
    done = subprocess.run(words, env=own.env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert "is root's" in done.stderr and "COTENANT_TOKEN_FILE" in done.stderr
    assert "Start the server again" not in done.stderr, "that would not help"
    own.stop_server()


@pytest.mark.parametrize("port", ["99999", "-1", "http"])
def test_what_is_no_port_is_wrong_usage(own: Own, port: str) -> None:
    done = own("serve", f"--port={port}", code=2)
    assert "0 to 65535" in done.err and "Traceback" not in done.err


def test_sigterm_ends_it_with_0_and_leaves_a_running_job_running(own: Own, until: Until, room: Path) -> None:
    own.start_server()
    go = room / "go"
    job = own(
        "submit", "--gpus", "1", "--", "sh", "-c", f"echo $$; while [ ! -e {go} ]; do sleep 0.05; done; exit 3"
    ).out.strip()
    pid = until(lambda: own("logs", job).out.strip(), "it did not start")
    own.stop_server()
    assert os.path.exists(f"/proc/{pid}"), "the job lives on"
    own.start_server()
    assert own.json("job", "show", job)["state"] in ("running", "lost", "deploying")
    go.touch()
    own("job", "wait", job, code=3)
    assert own.json("doctor")["ok"] is True
    own.stop_server()


def test_nothing_in_the_data_directory_is_open_to_others(own: Own) -> None:
    before = os.umask(0)
    try:
        own("token", "create", "early", "--owner", "erin")
        own.start_server()
        own("submit", "--gpus", "1", "--wait", "--", "sh", "-c", "echo hello; echo bad >&2")
    finally:
        os.umask(before)
    there = [own.data, *own.data.rglob("*")]
    assert any(path.name == "control.db-wal" for path in there) and len(there) > 8
    assert [str(path) for path in there if path.lstat().st_mode & 0o077] == []
    (own.data / "control.db").chmod(0o644)
    assert f"chmod 600 {own.data / 'control.db'}" in own("doctor", code=1).out
    own.stop_server()


def test_doctor_before_the_first_start_finds_nothing_wrong(own: Own) -> None:
    found = own("doctor", code=None)
    assert "not there yet" in found.out
    assert "Traceback" not in found.err


@pytest.mark.slow
def test_the_demo_plays_to_its_end_and_leaves_nothing_behind(own: Own, room: Path) -> None:
    env = {**own.env, "TMPDIR": str(room)}
    words = [*own.argv()[:4], "demo", "--simulate-gpus", "1", "--fast", "--json"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    played = json.loads(done.stdout)
    assert played["ok"] is True
    assert len(played["checks"]) >= 20
    assert "simulated" in done.stderr
    assert "epoch" in done.stderr, "progress is shown while it runs"
    assert "with 1 simulated card\n" in done.stderr
    waits = [line.partition("waiting: ")[2] for line in done.stderr.splitlines() if "waiting: " in line]
    assert waits and all(one != next_one for one, next_one in pairwise(waits)), waits
    assert list(room.iterdir()) == [], "the data directory is gone"
    assert _mentioning(room) == []


@pytest.mark.slow
def test_the_demo_says_what_did_not_hold(own: Own, room: Path) -> None:
    broken = room / "train.py"
    broken.write_text("print('up', flush=True)\nraise SystemExit(3)\n")
    words = [*own.argv()[:4], "demo", "--simulate-gpus", "1", "--fast", "--train", str(broken)]
    done = subprocess.run(
        words, env={**own.env, "TMPDIR": str(room)}, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert _mentioning(room) == []


@pytest.mark.slow
def test_an_interrupted_demo_cleans_up(own: Own, room: Path) -> None:
    words = [*own.argv()[:4], "demo", "--simulate-gpus", "1"]
    playing = subprocess.Popen(
        words, env={**own.env, "TMPDIR": str(room)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert playing.stdout is not None
        for line in playing.stdout:
            if "epoch" in line:
                break
        playing.send_signal(signal.SIGINT)
        out, err = playing.communicate(timeout=60)
    finally:
        playing.kill()
    assert playing.returncode == 130, out + err
    assert "Traceback" not in err
    assert list(room.iterdir()) == []
    assert _mentioning(room) == []


def _mentioning(folder: Path) -> list[str]:
    """Command lines of living processes that name `folder`."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in line:
                found.append(line.decode(errors="replace"))
    return found
