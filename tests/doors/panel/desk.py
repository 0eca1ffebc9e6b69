"""`cotenant serve` in a process of its own, and people who look at its page."""

from __future__ import annotations

import contextlib
import html.parser
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2

PATIENCE_S = 60.0


def until(what: Callable[[], Any], why: str, within_s: float = PATIENCE_S) -> Any:
    """The first true value of `what()`."""
    deadline = time.monotonic() + within_s
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {why}"
        time.sleep(0.02)
    return value


class Desk:
    """A server with simulated cards. `stop` and `start` may be called again and again."""

    def __init__(self, data: Path, *, gpus: int = 2, config: str = "") -> None:
        self.data = data
        data.mkdir(parents=True, exist_ok=True)
        if config:
            (data / "cotenant.toml").write_text(config)
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("COTENANT_", "XDG_"))}
        self._gpus = gpus
        self._port = "0"
        self.errors = data.parent / f"{data.name}.err"
        self.said = ""
        self.start()

    def start(self) -> None:
        with open(self.errors, "ab") as log:
            self.process = subprocess.Popen(
                [*self.cotenant, "serve", *self.where, "--port", self._port, "--simulate-gpus", str(self._gpus)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=self.env,
            )  # fmt: skip
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if found := re.match(r"ready (http://\S+)$", line):
                self.url = found.group(1)
                self._port = self.url.rpartition(":")[2]  # where browsers still look after a restart
                return
        raise AssertionError(self.errors.read_text())

    @property
    def cotenant(self) -> list[str]:
        return [sys.executable, "-P", "-m", "cotenant.ui.cli"]

    @property
    def where(self) -> list[str]:
        return ["--data", str(self.data)]

    def stop(self) -> tuple[int, float]:
        """(exit code, seconds it took)."""
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.said += self.process.stdout.read()
        self.process.stdout.close()
        return code, time.monotonic() - began

    def end(self) -> None:
        """The server, and what it left running on purpose: a job that stays behind would make other servers doubt their host."""
        if self.process.poll() is None:
            self.stop()
        mark = os.fsencode(self.data)
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if int(name) != os.getpid() and any(
                    mark in Path(f"/proc/{name}/{what}").read_bytes() for what in ("cmdline", "environ")
                ):
                    os.kill(int(name), signal.SIGKILL)

    # ---- people and agents ----------------------------------------------------------------------

    def cli(self, *words: str, token: str | None = None) -> Any:
        """One command with --json; it must succeed."""
        env = {**self.env, **({"COTENANT_TOKEN": token} if token else {})}
        before, dashes, behind = words, (), ()
        if "--" in words:
            at = words.index("--")
            before, dashes, behind = words[:at], ("--",), words[at + 1 :]
        done = subprocess.run(
            [*self.cotenant, *before, *self.where, "--json", *dashes, *behind],
            env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout)

    def token(self, name: str, owner: str, kind: str = "human", scopes: str = "read,write", *more: str) -> str:
        words = ("token", "create", name, "--owner", owner, "--kind", kind, "--scopes", scopes, *more)
        return str(self.cli(*words)["token"])

    def link(self, token: str | None = None) -> str:
        return str(self.cli("login-link", token=token)["link"])

    def submit(self, token: str, command: str = "sleep 600", **options: str) -> str:
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return str(self.cli("submit", *words, "--", "sh", "-c", command, token=token)["job_id"])

    def browser(self) -> httpx2.Client:
        """A browser of an own profile: it keeps cookies and follows nothing by itself."""
        return httpx2.Client(base_url=self.url, timeout=PATIENCE_S, follow_redirects=False)

    @contextlib.contextmanager
    def person(self, token: str) -> Iterator[httpx2.Client]:
        """A browser in which somebody is logged in with a token."""
        with self.browser() as client:
            answer = log_in(client, token=token)
            assert answer.status_code == 303, answer.text
            yield client

    def page(self, token: str) -> str:
        with self.person(token) as client:
            answer = client.get("/")
            assert answer.status_code == 200, answer.text
            return answer.text


def field(page: str, name: str) -> str:
    """The value of a hidden field."""
    found = re.search(rf'name="{name}" value="([^"]+)"', page)
    assert found, f"no field {name} in {page}"
    return found[1]


def log_in(client: httpx2.Client, **fields: str) -> httpx2.Response:
    """Send the login form as its own page would: with the mark and the form's token of this browser."""
    form = field(client.get("/login").text, "form")
    return client.post("/login", data={"form": form, **fields})


class Text(html.parser.HTMLParser):
    """What a page holds: its text, and every element with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.said).split())
