"""`cotenant top`: once where nobody sits, and on a terminal for as long as somebody looks."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cotenant.ui.cli import board, show

Live = Any  # conftest.Server
Until = Callable[..., Any]
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def job(live: Live, until: Until) -> Iterator[str]:
    """A running job with a name that steers terminals where it can."""
    job_id = str(live("submit", "--json", "--gpus", "1", "--name", "wide 训练", "--", "sleep", "300").json["job_id"])
    until(lambda: live.json("job", "show", job_id)["state"] == "running", "it runs")
    yield job_id
    live("job", "cancel", job_id, "--yes", code=None)
    live.idle()


def test_it_prints_once_where_output_is_no_terminal(live: Live, job: str) -> None:
    for words in (["top"], ["top", "--once"]):
        shown = live(*words).out
        assert shown.startswith(live.url) and "as of 20" in shown
        for said in (
            "1 of 2 cards free, 1 at work, nobody waits",
            "simulated",
            job,
            "wide 训练",
            "local:0",
            "?",
            "job.submitted",
        ):
            assert said in shown, said
        assert "\x1b" not in shown
    told = live.json("top")
    assert told["headline"] == "1 of 2 cards free, 1 at work, nobody waits"
    assert [work["id"] for work in told["working"]] == [job]


def test_it_follows_on_a_terminal_and_gives_it_back(terminal: Callable[..., Any], live: Live, job: str) -> None:
    screen = terminal("top")
    screen.expect("live")
    assert screen.seen.count(ENTER) == 1
    screen.expect("1 at work")
    later = live("submit", "--json", "--gpus", "2", "--name", "came later", "--", "true").json["job_id"]
    screen.expect("came later")  # nobody pressed a key
    screen.expect("busy: ")
    live("job", "cancel", later, "--yes")
    screen.type("q")
    assert screen.end() == 0
    assert screen.seen.rstrip().endswith(LEAVE) and "\x1b[?25h" in screen.seen


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_leaves_the_terminal_as_it_was(terminal: Callable[..., Any], job: str, number: int, code: int) -> None:
    screen = terminal("top")
    screen.expect("live")
    os.kill(screen.pid, number)
    assert screen.end() == code
    assert LEAVE in screen.seen and "Traceback" not in screen.seen


def test_it_fits_the_terminal_and_follows_its_size(terminal: Callable[..., Any], job: str) -> None:
    screen = terminal("top")
    screen.expect("live")
    for rows, columns in ((8, 40), (40, 200)):
        fcntl.ioctl(screen._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        screen.seen = ""
        screen.expect("\x1b[J")
        screen.seen = ""
        screen.expect("\x1b[J")
        frame = screen.seen.partition("\x1b[J")[0].rpartition("\x1b[H")[2]
        lines = [line.partition("\x1b[0m\x1b[K")[0] for line in frame.split("\r\n")]
        assert len(lines) <= rows
        assert all(board.columns_of(line) <= columns for line in lines), lines
    screen.type("q")
    assert screen.end() == 0


def test_a_server_that_goes_and_comes_back_is_said(own: Any, on_terminal: Callable[..., Any]) -> None:
    own.start_server("--port", "0")
    port = own.url.rpartition(":")[2]
    screen = on_terminal(own, "top")
    screen.expect("live")
    own.stop_server()
    screen.expect("stale: ")
    screen.seen = ""
    own.start_server("--port", port)
    screen.expect("live")
    screen.type("q")
    assert screen.end() == 0
    own.stop_server()


@pytest.mark.parametrize("width", [10, 20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal_or_steers_it(live: Live, job: str, width: int) -> None:
    seen = live.json("top")
    evil = "\x1b]0;owned\x07\x1b[2J\r\n\u202e宽宽宽" * 5
    for work in seen["working"]:
        work.update(name=evil, holder=evil, state=evil)
    for gpu in seen["gpus"]:
        gpu.update(holder=evil, job_name=evil, reason=evil, host=evil)
    for event in seen["events"]:
        event.update(reason=evil, caller=evil, old=evil)
    seen["waiting"] = [{"id": evil, "name": evil, "kind": "job", "holder": evil, "gpus": 1, "priority": evil, "waiting_s": 1,
                        "blocker": {"code": evil, "message": evil}}]  # fmt: skip
    for line in board.lines(seen, width):
        text = board.fit(line, width)
        assert board.columns_of(text) <= width
        assert text.isprintable(), text


def test_unknown_is_never_zero(live: Live) -> None:
    seen = live.json("top")
    for gpu in seen["gpus"]:
        gpu.update(memory_used_mib=None, util_pct=None, age_s=None, observed_at=None, state="unknown", holder=None)
    seen["gpus_stale"] = [gpu["uuid"] for gpu in seen["gpus"]]
    text = "\n".join(board.fit(line, None) for line in board.lines(seen, None))
    assert f"?/{seen['gpus'][0]['memory_mib']}" in text and "never stale" in text
    assert "0/8" not in text and show.span(None) == "-"


def test_a_token_that_is_revoked_ends_it_in_words(live: Live, on_terminal: Callable[..., Any]) -> None:
    token = live.token("watcher", "wanda")
    cli = type("Watcher", (), {"argv": live.argv, "env": {**live.env, "COTENANT_TOKEN": token}})()
    screen = on_terminal(cli, "top")
    screen.expect("live")
    live("token", "revoke", "watcher", "--yes")
    assert screen.end() == 1
    assert "expired or revoked" in screen.seen.partition(LEAVE)[2]
