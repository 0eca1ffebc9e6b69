"""What the page shows and to whom, and its stream: told of every change, of nothing else, and ended when it should be."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import httpx2
import pytest
from desk import Desk, Text, until

from cotenant.ui.cli.client import Client
from cotenant.ui.cli.place import Place

#: Nothing of these may reach a page as anything but text.
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</q></td></table><h1>owned</h1>",
    "{{ 7*7 }} {% raw %}",
    "javascript:alert(1)",
    "x\x1b[31mred\x07\u202etxt.exe\u2066",
    "&lt;b&gt; &amp;",
)


class Events(threading.Thread):
    """Reads a stream of server-sent events until it ends."""

    def __init__(self, client: object) -> None:
        super().__init__(daemon=True)
        self._client = client
        self.names: list[str] = []
        self.data: list[str] = []
        self.at: list[float] = []
        self.status = 0
        self.ended = False
        self.start()
        until(lambda: self.status, "the stream answered")

    def run(self) -> None:
        with contextlib.suppress(httpx2.TransportError), self._client.stream("GET", "/live") as answer:  # type: ignore[attr-defined]
            self.status = answer.status_code
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    self.at.append(time.monotonic())
                    self.names.append(line.removeprefix("event: "))
                elif line.startswith("data: "):
                    self.data.append(line.removeprefix("data: "))
            self.ended = True


def _end_all_jobs(desk: Desk) -> None:
    for job in desk.cli("job", "list", "--state", "active")["jobs"]:
        if job["state"] != "stopping":
            desk.cli("job", "evict", job["job_id"], "--reason", "the test is over", "--yes")
    until(lambda: not desk.cli("job", "list", "--state", "active")["jobs"], "all jobs are over")


@pytest.fixture
def tidy(desk: Desk, people: dict[str, str]) -> Iterator[None]:
    """Every job of the test is over after it."""
    _end_all_jobs(desk)  # those of other files of this folder too
    yield
    _end_all_jobs(desk)


def test_the_page_says_everything_at_one_look(desk: Desk, people: dict[str, str], tidy: None) -> None:
    running = desk.submit(people["agent"], gpus="1", hours="2", name="train the moons")
    waiting = desk.submit(people["agent"], gpus="2", hours="1", name="needs both")
    failed = desk.submit(people["agent"], "exit 3", gpus="0", name="broken")
    until(lambda: desk.cli("job", "show", failed)["state"] == "failed", "it failed")
    until(lambda: desk.cli("job", "show", running)["state"] == "running", "it runs")
    page = desk.page(people["olga"])
    text = Text(page).text
    assert "1 of 2 cards free, 1 at work, 1 waiting" in text
    assert "simulated" in text
    for said in (running, waiting, "train the moons", "needs both", "alice-agent", "link up", "Failed: code"):
        assert said in text, said
    assert "busy 2 cards wanted in pool" in text, "the reason in words"
    assert "unknown" in text, "the use of a simulated card is not known"
    assert "0 %" not in text, "and what is unknown is never 0"
    elements = Text(page).elements
    assert [attrs["src"] for tag, attrs in elements if tag == "script"] and all(
        attrs["src"] for tag, attrs in elements if tag == "script"
    )
    assert ("html", {"lang": "en"}) in elements
    assert {"header", "main", "footer"} <= {tag for tag, _ in elements}
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in elements if tag == "th")
    assert sum(tag == "h1" for tag, _ in elements) == 1
    times = [attrs for tag, attrs in elements if tag == "time"]
    assert times and all(attrs["datetime"] for attrs in times)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_what_others_wrote_is_text(desk: Desk, people: dict[str, str], tidy: None, name: str) -> None:
    clean = Text(desk.page(people["olga"])).elements
    job = desk.submit(people["agent"], gpus="0", name=name, purpose=name)
    until(lambda: desk.cli("job", "show", job)["state"] == "running", "it runs")
    page = desk.page(people["olga"])
    for bad in ("\x1b", "\x07", "\u202e", "\u2066"):
        assert bad not in page
    kinds = {tag for tag, _ in Text(page).elements}
    assert kinds <= {tag for tag, _ in clean} | {
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "q",
        "code",
        "caption",
        "time",
    }
    for tag, attrs in Text(page).elements:
        assert not [attr for attr in attrs if attr.startswith("on")], (tag, attrs)
        assert not (attrs.get("href") or "").lower().startswith("javascript:")
    assert "49" not in Text(page).text or "{{" not in name or "{{ 7*7 }}" in Text(page).text
    if "<" in name:
        assert name in Text(page).text, "it is there, as it was written"


def test_what_is_hidden_from_others_is_hidden_here(own_desk: Callable[..., Desk]) -> None:
    desk = own_desk(gpus=1, config='[pools.default]\nvisibility = "owner"\n')
    alice, bob = desk.token("alice", "alice"), desk.token("bob", "bob")
    olga = desk.token("olga", "olga", "human", "read,operate")
    agent = desk.token("alice-agent", "alice", "agent")
    failed = desk.submit(agent, "echo canary-in-a-log; exit 7", gpus="0", name="public name")
    until(lambda: desk.cli("job", "show", failed)["state"] == "failed", "it failed")
    desk.submit(agent, "sleep 300 # canary-command", gpus="1", name="held secret work")
    desk.cli("job", "hold", desk.submit(agent, gpus="1", name="to be held"), "--reason", "canary-reason", token=agent)
    for token, inside in ((alice, True), (olga, True), (bob, False)):
        page = Text(desk.page(token)).text
        assert "public name" in page or "held secret work" in page, "names are for everybody"
        assert ("exit code 7" in page) is inside, "a verdict is not"
        assert ("Failed: code" in page) is inside
        assert ("Failed: not yours to see" in page) is not inside
        for canary in ("canary-in-a-log", "canary-command"):
            assert canary not in page


def test_agents_read_the_same_as_people(desk: Desk, people: dict[str, str], tidy: None) -> None:
    job = desk.submit(people["agent"], gpus="1", name="both see it")
    until(lambda: desk.cli("job", "show", job)["state"] == "running", "it runs")
    told = desk.cli("top", token=people["agent"])
    assert told["headline"] in Text(desk.page(people["bob"])).text
    assert [work["id"] for work in told["working"]] == [job]


# ---- the stream -----------------------------------------------------------------------------------


def test_the_stream_tells_of_a_change_and_holds_nothing_else(desk: Desk, people: dict[str, str], tidy: None) -> None:
    with desk.person(people["bob"]) as client, desk.person(people["bob"]) as reader:
        events = Events(client)
        until(lambda: events.names == ["changed"], "whoever opens it looks once")
        before = len(events.names)
        desk.submit(people["agent"], gpus="1", name="canary name")
        until(lambda: len(events.names) > before, "it was told")
        until(lambda: "canary name" in reader.get("/board").text, "and it is there")
        assert set(events.names) == {"changed"} and all(item.isdigit() for item in events.data)


def test_many_changes_are_one_mark_a_second(desk: Desk, people: dict[str, str]) -> None:
    with desk.person(people["alice"]) as reader:
        events = Events(reader)
        busy = Client(Place(desk.url, people["bob"], "the test"))
        changes, began = 0, time.monotonic()
        while time.monotonic() - began < 3 or len(events.at) < 3:
            busy.operate("login.link", {}, "to have something happen")
            changes += 1
            time.sleep(0.03)  # there may be a thousand unused links
            assert time.monotonic() - began < 30, "it was told more than once"
        busy.close()
        last = len(events.names)
        until(lambda: len(events.names) > last or time.monotonic() - events.at[-1] > 0.5, "the last one is told too")
        gaps = [later - earlier for earlier, later in pairwise(events.at[1:])]
        assert all(gap > 0.8 for gap in gaps), gaps
        assert len(events.names) < changes


def test_revoking_and_leaving_end_the_stream(desk: Desk, people: dict[str, str]) -> None:
    leaver = desk.token("leaver", "lea")
    with desk.person(leaver) as client, desk.person(people["bob"]) as bob:
        mine, his = Events(client), Events(bob)
        desk.cli("token", "revoke", "leaver", "--yes")
        until(lambda: mine.ended, "it ended", 5)
        assert mine.names[-1] == "end" and mine.data[-1] == "the session is over"
        assert not his.ended


def test_one_person_has_so_many_streams_and_gets_them_back(desk: Desk) -> None:
    token = desk.token("many-tabs", "tabea")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(desk.person(token)) for _ in range(9)]
        open_streams = [stack.enter_context(client.stream("GET", "/live")) for client in clients[:8]]
        assert [answer.status_code for answer in open_streams] == [200] * 8
        with clients[8].stream("GET", "/live") as ninth:
            assert ninth.status_code == 429 and ninth.headers["retry-after"]
        assert clients[8].get("/").status_code == 200, "the page goes on without"
        open_streams[0].close()

        def again() -> bool:
            with clients[8].stream("GET", "/live") as answer:
                return answer.status_code == 200

        until(again, "the place of a closed one is free")


def test_the_server_ends_in_time_with_streams_open_one_of_them_stalled(own_desk: Callable[..., Desk]) -> None:
    desk = own_desk(gpus=1)
    alice = desk.token("alice", "alice")
    with desk.person(alice) as client, desk.person(alice) as other:
        events = Events(client)
        cookie = "; ".join(f"{name}={value}" for name, value in other.cookies.items())
        host, port = desk.url.removeprefix("http://").split(":")
        stalled = socket.create_connection((host, int(port)))
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        stalled.sendall(f"GET /live HTTP/1.1\r\nHost: {host}:{port}\r\nCookie: {cookie}\r\n\r\n".encode())
        assert stalled.recv(16).startswith(b"HTTP/1.1 200")
        code, took = desk.stop()
        stalled.close()
        assert code == 0 and took < 5
        until(lambda: events.ended, "the stream ended")
        assert events.names[-1] == "end" and events.data[-1] == "the server stops"
    assert "Traceback" not in desk.errors.read_text()
