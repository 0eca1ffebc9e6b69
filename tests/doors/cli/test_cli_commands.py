"""Every command against a real server: what it prints, what it does, and its exit code."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cotenant.ui.cli import entry

Live = Any  # conftest.Server
Until = Callable[..., Any]  # conftest.until
PYTHON = sys.executable


@pytest.fixture(autouse=True)
def _free_cards(request: pytest.FixtureRequest) -> None:
    if "live" in request.fixturenames:
        request.getfixturevalue("live").idle()


# ---- looking


def test_status_says_who_asks_and_what_there_is(live: Live) -> None:
    shown = live("status").out
    assert live.url in shown
    assert "default" in shown
    assert "local:0" in shown
    assert "simulated" in shown
    assert "\x1b" not in shown, "colours have no place in a pipe"


def test_status_as_json_holds_the_exact_answers(live: Live) -> None:
    status = live.json("status")
    assert status["url"] == live.url
    assert status["quota"] == live.json("quota")
    assert {gpu["uuid"] for gpu in status["gpus"]["gpus"]} == {gpu["uuid"] for gpu in live.json("gpus")["gpus"]}


@pytest.mark.parametrize(
    ("words", "key", "shown"),
    [
        (["quota"], "pools", "YOU CAN START"),
        (["gpus"], "gpus", "local:1"),
        (["gpus", "--state", "free"], "gpus", "2 of 2 free"),
        (["hosts"], "hosts", "local"),
        (["host", "list"], "hosts", "local"),
        (["queues"], "queues", "default"),
        (["agents"], "agents", "human"),
        (["events"], "events", "server.started"),
        (["lease", "list"], "leases", "No lease."),
        (["job", "list", "--state", "active"], "jobs", "No job."),
        (["token", "list"], "tokens", "SCOPES"),
    ],
)
def test_lists_are_tables_for_people_and_json_for_programs(live: Live, words: list[str], key: str, shown: str) -> None:
    assert shown in live(*words).out
    assert isinstance(live.json(*words)[key], list)


@pytest.mark.parametrize("json_first", [True, False])
def test_common_options_may_stand_before_or_after_the_command(live: Live, json_first: bool) -> None:
    words = ["--json", "lease", "list"] if json_first else ["lease", "list", "--json"]
    assert live(*words).json == {"leases": [], "cursor": None}


# ---- jobs


def test_submit_prints_the_id_and_wait_passes_the_exit_code_on(live: Live) -> None:
    job = live("submit", "--gpus", "1", "--name", "seven", "--", "sh", "-c", "exit 7").out.strip()
    assert job.startswith("job_")
    waited = live("job", "wait", job, code=7)
    assert "failed" in waited.err
    assert "exit code 7" in waited.err
    assert live.json("job", "show", job)["exit_code"] == 7
    assert "seven" in live("job", "show", job).out
    assert job in live("job", "list", "--state", "failed").out


def test_wait_of_a_killed_job_is_128_plus_its_signal(live: Live) -> None:
    done = live("submit", "--gpus", "0", "--wait", "--", "sh", "-c", "kill -9 $$", code=128 + 9)
    assert "SIGKILL" in done.err
    job = next(word for word in done.err.split() if word.startswith("job_"))
    assert "signal 9" not in done.err
    shown = live("job", "show", job).out
    assert "SIGKILL" in shown.partition("ATTEMPT")[2], "the table of attempts has the name too"
    assert live.json("job", "show", job)["attempts"][0]["exit"]["signal_name"] == "SIGKILL"


@pytest.mark.parametrize("word", ["10", "usr1", "SIGUSR1"])
def test_a_signal_is_given_by_name_or_number(live: Live, until: Until, word: str) -> None:
    script = "trap 'exit 5' USR1; echo up; while :; do sleep 0.05; done"
    job = live("submit", "--gpus", "0", "--name", word, "--", "sh", "-c", script).out.strip()
    until(lambda: "up" in live("logs", job).out, "the job did not start")
    assert "SIGUSR1 delivered" in live("job", "signal", job, word).out
    live("job", "wait", job, code=5)
    assert "no signal 99" in live("job", "signal", job, "99", code=2).err
    assert "not_running" in live("job", "signal", job, word, code=1).err


def test_follow_shows_both_streams_where_they_belong_and_ends_with_the_job(live: Live) -> None:
    script = "for i in 1 2 3; do echo out $i; echo err $i >&2; sleep 0.1; done; exit 3"
    done = live("submit", "--gpus", "1", "--follow", "--", "sh", "-c", script, code=3)
    assert done.out.splitlines() == ["out 1", "out 2", "out 3"]
    assert [line for line in done.err.splitlines() if line.startswith("err")] == ["err 1", "err 2", "err 3"]


def test_an_interrupted_follow_leaves_the_job_running_and_says_so(
    live: Live, ending: list[subprocess.Popen[str]]
) -> None:
    following = live.start("submit", "--gpus", "0", "--follow", "--", "sh", "-c", "echo up; exec sleep 60")
    ending.append(following)
    assert following.stdout is not None
    assert following.stdout.readline() == "up\n"
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=60)
    assert following.returncode == 130
    job = next(
        word
        for line in err.splitlines()
        if "goes on without you" in line
        for word in line.split()
        if word.startswith("job_")
    )
    assert live.json("job", "show", job)["state"] == "running"
    live("job", "cancel", job, "--yes")


def test_a_job_starts_here_with_the_variables_asked_for(live: Live, tmp_path: Path) -> None:
    words = live.argv(
        "submit",
        "--gpus",
        "1",
        "--follow",
        "--env",
        "A=1 2",
        "--env",
        "FROM_HERE",
        "--shell",
        'echo "$PWD|$A|$FROM_HERE|$CUDA_VISIBLE_DEVICES"',
    )
    done = subprocess.run(
        words, cwd=tmp_path, env={**live.env, "FROM_HERE": "x"}, capture_output=True, text=True, timeout=60, check=True
    )
    where, a, here, cards = done.stdout.strip().split("|")
    assert (where, a, here) == (str(tmp_path), "1 2", "x")
    assert cards == "", "simulated cards have no number that CUDA may have"


def test_a_specification_file_and_options_over_it(live: Live, tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"command": ["true"], "gpus": 2, "name": "from file", "labels": {"a": "b"}}))
    dry = live.json(
        "submit", "--spec", str(spec), "--name", "from option", "--gpus", "0", "--config", "lr=0.1", "--dry-run"
    )
    assert dry["dry_run"] is True
    assert (dry["spec"]["name"], dry["spec"]["gpus"], dry["spec"]["config"]) == ("from option", 0, {"lr": 0.1})
    assert "nothing was submitted" in live("submit", "--dry-run", "--", "true").out
    assert live.json("job", "list", "--label", "a=b")["jobs"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["submit"], "What shall it run?"),
        (["submit", "--shell", "true", "--", "true"], "either"),
        (["submit", "--gpus", "many", "--", "true"], "MIN-MAX"),
        (["submit", "--env", "NO_SUCH_VARIABLE", "--", "true"], "no such variable"),
        (["submit", "--label", "x", "--", "true"], "NAME=VALUE"),
        (["submit", "--resume-arg", "x", "--", "true"], "--checkpoint-dir"),
        (["submit", "--spec", "/nowhere.json"], "cannot be read"),
        (["submit", "--nonsense"], "unrecognized"),
        (["submit", "--gpus", "1", "python", "train.py"], "stands behind --: cotenant submit [options] -- CMD"),
        (["submit", "--", "echo a; echo b"], "--shell 'LINE'"),
        (["run", "--", "nvidia-smi -L"], "-- sh -c 'LINE'"),
        (["nonsense"], "There is no command 'nonsense'. See"),
        (["run", "--gpus", "1"], "What shall it run?"),
        (["status", "--", "x"], "nothing may follow"),
        (["lease"], "ACTION"),
        (["statsu"], "did you mean status"),
        ([], "commands:"),
        (["serve", "--url", "http://x"], "neither"),
        (["demo", "--simulate-gpus", "0"], "from 1"),
        (["logs", "j", "--cursor", "x"], "--stream"),
        (["token", "create", "x", "--expires", "soon"], "30d"),
        (["--url", "ftp://x", "status"], "not the address"),
        (["--url", "http://a:b@c", "status"], "password"),
    ],
)
def test_wrong_usage_is_2_and_says_what_is_meant(live: Live, words: list[str], said: str) -> None:
    done = live(*words, code=2)
    assert said in done.err
    assert "Traceback" not in done.err


def test_the_servers_refusal_is_1_with_its_sentence(live: Live) -> None:
    refused = live("submit", "--gpus", "64", "--", "true", code=1)
    assert refused.err.startswith("cotenant: ")
    assert "64" in refused.err
    as_json = live("submit", "--gpus", "64", "--json", "--", "true", code=1)
    assert as_json.json["error"]["code"] in refused.err
    assert live("job", "show", "job_nothere", "--json", code=1).json["error"]["code"] == "no_such_job"


def test_a_job_can_be_held_let_go_signalled_cancelled_and_run_again(live: Live, until: Until) -> None:
    blocker = live.json("lease", "acquire", "--gpus", "2")
    job = live(
        "submit",
        "--gpus",
        "1",
        "--",
        "sh",
        "-c",
        "trap 'echo got it; exit 5' USR1; echo up; while :; do sleep 0.05; done",
    ).out.strip()
    assert live.json("job", "hold", job, "--reason", "not yet")["state"] == "held"
    assert "held by" in live("job", "show", job).out
    assert live.json("events", "--job", job, "--type", "job.held")["events"][0]["reason"] == "not yet"
    assert live.json("job", "release", job)["state"] == "queued"
    assert "still" in live("job", "wait", job, "--timeout", "0", code=1).err
    live("lease", "release", blocker["lease_id"])

    until(lambda: "up" in live("logs", job).out, "the job did not start")
    assert "delivered" in live("job", "signal", job, "USR1").out
    live("job", "wait", job, code=5)
    assert live("logs", job).out.splitlines() == ["up", "got it"]
    again = live("job", "retry", job).out.strip()
    assert again.startswith("job_")
    assert again != job
    until(lambda: live.json("job", "show", again)["state"] == "running", "it did not run again")
    assert "--yes" in live("job", "cancel", again, code=2).err
    assert live.json("job", "show", again)["state"] == "running", "without --yes nothing happens"
    live("job", "cancel", again, "--yes")
    live("job", "wait", again, code=None)
    assert live.json("job", "show", again)["state"] == "cancelled"


def test_a_job_can_be_explained_changed_suspended_and_resumed(live: Live, until: Until) -> None:
    blocker = live.json("lease", "acquire", "--gpus", "2")
    job = live("submit", "--gpus", "1", "--", "sleep", "100").out.strip()
    assert (
        live.json("job", "modify", job, "--priority", "batch", "--hours", "2", "--label", "a=b")["priority"] == "batch"
    )
    assert "priority" in live("job", "modify", job, code=2).err
    said = live("job", "explain", job, "--detail").out
    assert f"{job} is queued" in said and "busy" in said and "next: " in said and "local: " in said
    assert live.json("job", "explain", job)["blockers"][0]["code"] == "busy"
    live("lease", "release", blocker["lease_id"])
    until(lambda: live.json("job", "show", job)["state"] == "running", "the job did not start")
    for flags in ((), ("--operate", "--reason", "a demo")):
        assert live.json("job", "suspend", job, *flags)["state"] == "suspended"
        assert "suspended by" in live("job", "show", job).out
        assert live.json("job", "resume", job, *flags)["state"] == "running"
    assert (
        live.json("job", "modify", job, "--priority", "normal", "--operate", "--reason", "a demo")["priority"]
        == "normal"
    )
    live("job", "cancel", job, "--yes")
    live("job", "wait", job, code=None)


def test_a_terminal_is_asked_before_what_cannot_be_undone(live: Live, terminal: Callable[..., Any]) -> None:
    job = live("submit", "--gpus", "0", "--", "sleep", "60").out.strip()
    no = terminal("job", "cancel", job)
    no.expect("[y/N]")
    no.type("n\n")
    assert no.end() == 1
    assert live.json("job", "show", job)["state"] not in ("cancelled", "stopping")
    yes = terminal("job", "cancel", job)
    yes.expect("[y/N]")
    yes.type("y\n")
    assert yes.end() == 0
    assert live("job", "wait", job, code=None).code != 0
    assert live.json("job", "show", job)["state"] == "cancelled"


def test_logs_by_stream_by_count_and_from_a_cursor(live: Live) -> None:
    job = live("submit", "--gpus", "0", "--", "sh", "-c", "seq 1 300; echo bad >&2").out.strip()
    live("job", "wait", job)
    assert live("logs", job, "--stream", "out", "-n", "2").out.splitlines() == ["299", "300"]
    assert len(live("logs", job, "--stream", "out").out.splitlines()) == 100
    whole = live("logs", job, "--all")
    assert whole.out.splitlines() == [str(i) for i in range(1, 301)]
    assert whole.err.splitlines() == ["bad"]
    assert live("logs", "-f", job).out == whole.out
    first = live.json("logs", job, "--stream", "out", "--lines", "2")
    assert live.json("logs", job, "--stream", "out", "--cursor", first["cursor"])["lines"] == []
    assert set(live.json("logs", job)) == {"out", "err"}


def test_a_list_and_the_end_of_a_log_say_how_a_job_ended(live: Live) -> None:
    job = live("submit", "--gpus", "0", "--", "sh", "-c", "echo fine; echo bad >&2; exit 9").out.strip()
    followed = live("logs", "-f", job)
    assert followed.out == "fine\n"
    assert followed.err.splitlines()[0] == "bad"
    assert f"{job} failed, exit code 9" in followed.err
    assert "attempt 1 ended, exit code 9" in live("logs", "-f", "--attempt", "1", job).err
    listed = next(line for line in live("job", "list", "--state", "failed").out.splitlines() if job in line)
    assert "code: ended with exit code 9" in listed
    assert "stderr holds" in live("logs", job, "--stream", "out").err
    good = live("submit", "--gpus", "0", "--", "true").out.strip()
    assert f"{good} succeeded" in live("logs", "-f", good).err
    gone = live("submit", "--gpus", "0", "--", "sleep", "60").out.strip()
    live("job", "cancel", gone, "--yes")
    live("job", "wait", gone, code=None)
    listed = next(line for line in live("job", "list", "--state", "cancelled").out.splitlines() if gone in line)
    assert "cancelled" in listed.rpartition("ago")[2], "WHY is filled for every job that did not succeed"


def test_hostile_log_lines_do_not_steer_the_terminal(live: Live, terminal: Callable[..., Any]) -> None:
    job = live("submit", "--gpus", "0", "--wait", "--json", "--", "printf", r"\033]0;owned\007\033[31mred\n").json[
        "job_id"
    ]
    shown = terminal("logs", job)
    shown.expect("red")
    assert shown.end() == 0
    assert "\x1b" not in shown.seen
    assert "\x07" not in shown.seen


def test_a_narrow_terminal_cuts_names_and_never_ids(live: Live, terminal: Callable[..., Any]) -> None:
    job = live("submit", "--gpus", "0", "--wait", "--json", "--name", "long " * 30, "--", "true").json["job_id"]
    shown = terminal("job", "list", "--limit", "1")
    assert shown.end() == 0
    assert job in shown.seen
    assert "…" in shown.seen
    assert ("long " * 30).strip() in live("job", "list", "--limit", "1").out, "nothing is cut in a pipe"


# ---- leases


def test_a_lease_from_beginning_to_end(live: Live) -> None:
    lease = live.json("lease", "acquire", "--gpus", "1", "--ttl", "600", "--purpose", "trying")
    lease_id = lease["lease_id"]
    assert lease["env"]["COTENANT_LEASE"] == lease_id
    assert "trying" in live("lease", "list").out
    assert lease_id in live("lease", "show", lease_id).out
    assert lease_id in live("gpus").out
    assert "expires in" in live("lease", "heartbeat", lease_id).out
    assert live.json("lease", "release", lease_id)["state"] == "released"
    assert live.json("lease", "show", lease_id)["state"] == "released"
    assert lease_id in live("lease", "list", "--state", "all").out


def test_export_can_be_evaluated_by_a_shell(live: Live) -> None:
    exported = live("lease", "acquire", "--export").out
    shown = subprocess.run(
        ["sh", "-c", exported + 'echo "$COTENANT_LEASE $CUDA_DEVICE_ORDER"'], capture_output=True, text=True, check=True
    )
    lease_id, order = shown.stdout.split()
    assert order == "PCI_BUS_ID"
    live("lease", "release", lease_id)


def test_queue_waits_for_a_card_and_picks_it_up(live: Live, ending: list[subprocess.Popen[str]], until: Until) -> None:

    first = live.json("lease", "acquire", "--gpus", "2")
    assert "busy" in live("lease", "acquire", "--gpus", "1", code=1).err
    waiting = live.start("lease", "acquire", "--gpus", "1", "--queue", "--json")
    ending.append(waiting)
    until(
        lambda: any(x["state"] == "queued" for x in live.json("lease", "list", "--state", "queued")["leases"]),
        "no claim in line",
    )
    live("lease", "release", first["lease_id"])
    out, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    lease = json.loads(out)
    assert lease["state"] in ("leased", "running")
    assert lease["env"]["COTENANT_LEASE"] == lease["lease_id"]
    assert live.json("lease", "show", lease["lease_id"])["pickup_by"] is None, "it was picked up"


def test_a_place_in_line_says_at_once_what_it_waits_for(live: Live) -> None:
    """The answer used to come before the pass that decides, without a blocker."""
    live.json("lease", "acquire", "--gpus", "2")
    for _ in range(5):
        claim = live.json("lease", "acquire", "--queue", "--no-wait")
        assert (claim["state"], claim["blockers"][0]["code"]) == ("queued", "busy")
        assert live.json("lease", "show", claim["lease_id"])["blockers"]
        live("lease", "release", claim["lease_id"])


def test_an_interrupted_wait_in_line_leaves_the_line(
    live: Live, ending: list[subprocess.Popen[str]], until: Until
) -> None:

    live.json("lease", "acquire", "--gpus", "2")
    waiting = live.start("lease", "acquire", "--queue")
    ending.append(waiting)
    until(lambda: live.json("lease", "list", "--state", "queued")["leases"], "no claim in line")
    waiting.send_signal(signal.SIGINT)
    waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert live.json("lease", "list", "--state", "queued")["leases"] == []


# ---- people's acts, tokens


def test_people_may_evict_and_agents_may_not(live: Live) -> None:
    agent = live.token("evictee", "eve")
    lease = live.json("lease", "acquire", COTENANT_TOKEN=agent)["lease_id"]
    refused = live("lease", "evict", lease, "--reason", "mine", "--yes", code=1, COTENANT_TOKEN=agent)
    assert "people_only" in refused.err
    live("lease", "evict", lease, "--reason", "maintenance", "--yes")
    ended = live.json("lease", "show", lease)
    assert ended["state"] == "revoked"
    assert "maintenance" in ended["end_reason"]
    job = live("submit", "--gpus", "1", "--", "sleep", "60", COTENANT_TOKEN=agent).out.strip()
    assert "needs --reason" in live("job", "cancel", job, "--operate", "--yes", code=2).err
    live("job", "cancel", job, "--operate", "--reason", "enough", "--yes")
    assert live("job", "wait", job, code=None).code != 0
    assert live("job", "abandon", job, "--reason", "x", "--yes", code=1).err
    assert live("slot", "clear", lease, "--reason", "looked", "--yes").out
    assert "not_refused" in live("host", "take-over", "local", "--reason", "x", "--yes", code=1).err


def test_a_token_is_shown_once_works_and_ends(live: Live, tmp_path: Path) -> None:
    file = tmp_path / "token"
    made = live.json(
        "token", "create", "carol-bot", "--owner", "carol", "--scopes", "read", "--expires", "2h", "--out", str(file)
    )
    assert "token" not in made
    assert file.stat().st_mode & 0o777 == 0o600
    me = live.json("quota", "--token-file", str(file))["me"]
    assert (me["name"], me["owner"], me["scopes"]) == ("carol-bot", "carol", ["read"])
    assert "scope" in live("lease", "acquire", "--token-file", str(file), code=1).err
    secret = file.read_text().strip()
    assert secret not in live("token", "list").out
    assert "is there already" in live("token", "create", "x", "--out", str(file), code=2).err
    live("token", "revoke", "carol-bot", "--yes")
    refused = live("quota", "--token-file", str(file), code=1)
    assert str(file) in refused.err
    assert secret not in refused.err
    file.chmod(0o644)
    assert "chmod 600" in live("quota", "--token-file", str(file), code=1).err


def test_a_list_of_tokens_says_when_in_minutes(live: Live) -> None:
    live("token", "create", "for-a-day", "--expires", "24h")
    [row] = [line for line in live("token", "list").out.splitlines() if line.startswith("for-a-day ")]
    assert re.search(r"  \d{4}-\d\d-\d\d \d\d:\d\dZ  ", row), row


def test_a_link_is_said_to_be_good_for_as_long_as_it_is(live: Live) -> None:
    assert "within 10 minutes" in live("login-link").err


def test_the_local_token_goes_to_no_other_address(live: Live) -> None:
    refused = live("status", "--url", "http://127.0.0.1:9", code=1)
    assert "No token for" in refused.err


def test_an_agent_needs_only_the_two_variables(live: Live) -> None:
    env = {**live.env, "COTENANT_URL": live.url + "/mcp", "COTENANT_TOKEN": live.token("dave-bot", "dave")}
    done = subprocess.run(
        [PYTHON, "-P", "-m", "cotenant.ui.cli", "quota", "--json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["me"]["name"] == "dave-bot"


# ---- events, doctor, help


def test_a_job_without_a_card_shows_none_and_its_command_as_typed(live: Live) -> None:
    job = live("submit", "--gpus", "0", "--follow", "--json", "--", "sh", "-c", "exit 0; x").json["job_id"]
    shown = live("job", "show", job).out
    assert re.search(r"^command +sh -c 'exit 0; x'$", shown, re.MULTILINE), shown
    assert re.search(r"^cards +none wanted$", shown, re.MULTILINE) and "?" not in shown, shown
    asked = live("submit", "--gpus", "0", "--hours", "2", "--", "true").out.strip()
    assert "2 h (asked for)" in live("job", "show", asked).out


def test_dates_stand_to_the_left_and_end_with_the_second(live: Live) -> None:
    head, *rows = live("events", "--limit", "5").out.splitlines()
    assert head.startswith("AT ") and rows
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  ", row) for row in rows), rows
    assert live("events", "--since", rows[0].split()[0], "--limit", "1").out.count("\n") == 2


def test_what_happened_is_not_said_twice(live: Live) -> None:
    lease = live.json("lease", "acquire", "--gpus", "1")["lease_id"]
    live("lease", "release", lease)
    assert "leased → released\n" in live("events", "--type", "lease.released", "--limit", "500").out


def test_events_can_be_followed(live: Live, ending: list[subprocess.Popen[str]]) -> None:
    following = live.start("events", "-f", "--type", "token.created", "--json")
    ending.append(following)
    live.token("followed", "frank")
    assert following.stdout is not None
    for line in following.stdout:
        event = json.loads(line)
        if event["new"] == "followed":
            break
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=60)
    assert following.returncode == 130


def test_a_reader_that_goes_away_is_no_error(live: Live) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" | true; echo done', "sh", *live.argv("events")],
        env=live.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_doctor_finds_nothing_on_a_healthy_server(live: Live) -> None:
    found = live.json("doctor")
    assert found["ok"] is True
    checks = {check["check"] for check in found["checks"]}
    assert {"python", "sqlite", "data", "server", "driver"} <= checks
    assert any("one lease per slot" in check for check in checks)
    assert "nothing wrong" in live("doctor").out


def test_doctor_sees_a_directory_that_is_open_to_others(live: Live) -> None:
    mode = live.data.stat().st_mode
    live.data.chmod(0o755)
    try:
        found = live("doctor", code=1)
    finally:
        live.data.chmod(mode)
    assert "chmod 700" in found.out


def _actions(command: str) -> list[list[str]]:
    done = subprocess.run(
        [PYTHON, "-P", "-m", "cotenant.ui.cli", command, "--help"], capture_output=True, text=True, check=True
    )
    lines = done.stdout.partition("actions:")[2].splitlines()
    return [
        [command],
        *([command, line.split()[0]] for line in lines if line.startswith("    ") and line[4:5].isalpha()),
    ]


@pytest.mark.parametrize("command", entry.COMMANDS)
def test_every_command_and_action_has_help_with_an_example(command: str) -> None:
    for words in _actions(command):
        done = subprocess.run(
            [PYTHON, "-P", "-m", "cotenant.ui.cli", *words, "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "example" in done.stdout or "actions:" in done.stdout
        assert "--json" in done.stdout


@pytest.mark.parametrize("command", entry.COMMANDS)
def test_every_option_says_what_it_does(command: str) -> None:
    module = importlib.import_module(f"cotenant.ui.cli.{entry.COMMANDS[command][0]}")
    parser = entry.Parser(command, entry.COMMANDS[command][1])
    module.configure(parser, command)
    subs = [a for a in parser.root._actions if isinstance(a, argparse._SubParsersAction)]
    every = [parser.root, *(one for sub in subs for one in sub.choices.values())]
    silent = [f"{p.prog} {a.option_strings}" for p in every for a in p._actions if a.option_strings and not a.help]
    assert silent == []


def test_the_version_is_that_of_the_installed_package() -> None:
    for word in ("--version", "-V"):
        done = subprocess.run([PYTHON, "-P", "-m", "cotenant.ui.cli", word], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["cotenant", metadata.version("cotenant")]
    done = subprocess.run(
        [PYTHON, "-P", "-m", "cotenant.ui.cli", "--version", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"version": metadata.version("cotenant")}


def test_help_names_every_command() -> None:
    done = subprocess.run([PYTHON, "-P", "-m", "cotenant.ui.cli", "--help"], capture_output=True, text=True, check=True)
    assert all(f"  {command} " in done.stdout for command in entry.COMMANDS)
    assert os.linesep * 3 not in done.stdout
