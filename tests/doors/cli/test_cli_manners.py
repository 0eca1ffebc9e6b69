"""What holds for every command: wrong usage, numbers, files, disks and terminals end in one sentence and change nothing."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cotenant.ui.cli import logs, main, show, status
from cotenant.ui.cli.client import Client

Live = Any  # conftest.Server
HOSTILE = "\x1b]0;owned\x07 \x9b31m \u202egnp.exe\r"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "words",
    [
        ["status", "--nonsense"],
        ["lease"],
        ["job", "show"],
        ["submit", "--kind", "unheard", "--", "true"],
        ["serve", "--port", "http"],
        ["status", "--", "x"],
        ["run", "--gpus", "1"],
        ["nothing-like-this"],
    ],
)
def test_wrong_usage_is_json_too_where_json_is_asked_for(live: Live, words: list[str]) -> None:
    dashes = words.index("--") if "--" in words else len(words)
    done = live(*words[:dashes], "--json", *words[dashes:], code=2)
    assert done.json["error"]["code"] == "usage"
    assert done.err.startswith("cotenant: ")


@pytest.mark.parametrize(
    "words",
    [
        ["job", "wait", "job_x", "--timeout", "nan"],
        ["job", "wait", "job_x", "--timeout=-1"],
        ["submit", "--hours", "inf", "--", "true"],
        ["lease", "acquire", "--hours", "nan"],
        ["run", "--grace", "nan", "--", "true"],
        ["run", "--heartbeat", "0", "--", "true"],
        ["logs", "-n", "0", "job_x"],
        ["logs", "-f", "--lines=-3", "job_x"],
    ],
)
def test_a_number_that_means_nothing_is_wrong_usage(live: Live, words: list[str]) -> None:
    assert live(*words, code=2).err.startswith("cotenant: ")


def test_a_file_that_cannot_be_made_costs_no_token(live: Live, tmp_path: Path) -> None:
    """The token would live on, and nobody would have it."""
    assert "cannot be made" in live("token", "create", "lost-1", "--out", str(tmp_path / "no" / "x"), code=2).err
    live("token", "create", "lost 2", "--out", str(tmp_path / "y"), code=1)
    assert not (tmp_path / "y").exists(), "a refusal leaves no empty file"
    assert not {t["name"] for t in live.json("token", "list")["tokens"]} & {"lost-1", "lost 2"}


def test_a_folder_that_is_not_there_is_said_with_the_command_that_makes_it(live: Live, tmp_path: Path) -> None:
    path = tmp_path / "no" / "token"
    said = live("token", "create", "nowhere", "--out", str(path), code=2).err
    subprocess.run(["sh", "-c", said.strip().partition(" First: ")[2]], check=True)
    live("token", "create", "nowhere", "--out", str(path))
    assert path.read_text().startswith("ctn_")


def test_a_full_disk_is_one_sentence(live: Live) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            live.argv("gpus"), stdout=full, stderr=subprocess.PIPE, env=live.env, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert "cannot be written" in done.stderr and "Traceback" not in done.stderr


def test_a_directory_that_is_gone_is_one_sentence(live: Live, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd "{gone}" && rmdir "{gone}" && exec "$@"'
    words = ["sh", "-c", script, "sh", *live.argv("submit", "--gpus", "0", "--dry-run", "--", "true")]
    done = subprocess.run(words, env=live.env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "--own-dir" in done.stderr


def test_a_lease_is_not_waited_for_as_a_job(live: Live) -> None:
    live.idle()
    lease = live.json("lease", "acquire")["lease_id"]
    assert f"cotenant lease wait {lease}" in live("job", "wait", lease, code=2).err
    live("lease", "release", lease)


def test_a_log_line_is_harmless_on_the_terminal_that_it_goes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cotenant logs JOB > file` leaves stderr on the terminal: each stream is asked for itself."""
    for out, err in ((io.StringIO(), Tty()), (Tty(), io.StringIO())):
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        for stream in ("out", "err"):
            logs.write({"stream": stream, "lines": [HOSTILE]})
        for stream_of in (out, err):
            written = stream_of.getvalue()
            assert ("\x1b" in written) != stream_of.isatty()


def test_nothing_for_people_and_no_json_steers_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", out := Tty())
    monkeypatch.setattr(sys, "stderr", err := Tty())
    show.say(f"one {HOSTILE}\ntwo {HOSTILE}")
    show.table([(HOSTILE, 1)], ("A", "B"), empty="")
    show.pairs([("a", HOSTILE)])
    value = {HOSTILE: [HOSTILE, "naïve 中文 \U0001f600 \U000e0001"]}
    show.as_json(value)
    show.line_json(value)
    for stream in (out, err):
        left = {
            c
            for c in stream.getvalue().replace("\033[1m", "").replace("\033[2m", "").replace("\033[0m", "")
            if not c.isprintable()
        }
        assert left <= {"\n"}, left
    assert "naïve 中文 \U0001f600" in out.getvalue(), "letters stay letters"
    assert json.loads(out.getvalue().splitlines()[-1]) == value


def test_columns_are_counted_as_a_terminal_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    show.table([("训练模型", "x"), ("ab", "y"), ("e\u0301e\u0301", "z")], ("NAME", "B"), empty="")
    starts = {
        show.breadth(line[: line.rindex(letter)])
        for line, letter in zip(out.getvalue().splitlines(), "Bxyz", strict=True)
    }
    assert starts == {len("训练模型") * 2 + 2}
    assert show.breadth(show.cut("训练模型", 5)) <= 5 and show.cut("训练模型", 5).endswith("…")


def test_a_server_on_every_address_is_this_machine(live: Live, tmp_path: Path) -> None:
    """`serve --host 0.0.0.0` writes that address down; a job submitted here must start here all the same."""
    data = tmp_path / "data"
    data.mkdir()
    port = live.url.rpartition(":")[2]
    (data / "local.token").write_text((live.data / "local.token").read_text())
    (data / "local.token").chmod(0o600)
    (data / "server.json").write_text(json.dumps({"url": f"http://0.0.0.0:{port}", "pid": 1}))
    words = [*live.argv()[:4], "--data", str(data), "submit", "--gpus", "0", "--dry-run", "--json", "--", "true"]
    done = subprocess.run(words, cwd=tmp_path, env=live.env, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["workdir"] == str(tmp_path)


def test_a_long_status_says_that_there_is_more(live: Live, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    live("submit", "--gpus", "0", "--wait", "--", "true")
    some = live.json("job", "list", "--limit", "1") | {"total": 40}
    real = Client.call_tool

    def few(self: Client, name: str, args: Any = None, **more: Any) -> Any:
        return some if name == "list_jobs" else real(self, name, args, **more)

    monkeypatch.setattr(Client, "call_tool", few)
    clients: list[Client] = []
    made = status.ask.client
    monkeypatch.setattr(status.ask, "client", lambda args: clients.append(made(args)) or clients[-1])
    try:
        assert main(["--data", str(live.data), "status"]) == 0
    finally:
        for one in clients:
            one.close()
    assert "39 more: cotenant job list --state active" in capsys.readouterr().err
