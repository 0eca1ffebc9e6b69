"""The stage of the demo: a server in a data directory of its own, tokens for two agents, and the end of it all."""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import TextIO

from cotenant.ui.cli import place, show
from cotenant.ui.cli.client import Client
from cotenant.ui.cli.kin import Kin
from cotenant.ui.cli.problems import EXIT_REFUSED, Problem

#: Seconds for a server to become ready (imports, migrations, hostd), and to end after SIGTERM.
READY_S, END_S = 60, 10
_READY = re.compile(r"^ready (http://\S+)$")


def perform(*, train: str, seconds: int, simulate: int | None, data: str | None, keep: bool, as_json: bool) -> int:
    """Set up, play, clean up. 0 when everything held, 1 when something did not, 130 when interrupted."""
    folder = data or tempfile.mkdtemp(prefix="cotenant-demo-")
    told = Narrator(sys.stderr if as_json else sys.stdout)
    told.line("demo", f"two agents share {'a simulated card' if simulate else 'a card'}; data in {folder}")
    interrupted = signal.signal(signal.SIGTERM, _interrupt)
    kin = Kin()
    server: Server | None = None
    kept = keep or data is not None
    try:
        server = Server(folder, simulate)
        told.line(
            "server",
            f"ready at {server.url} after {told.elapsed():.1f} s"
            + (f" with {simulate} simulated {'card' if simulate == 1 else 'cards'}" if simulate else ""),
        )
        chief = server.chief()
        tokens = {
            name: str(
                chief.operate(
                    "token.create", {"name": name, "kind": "agent", "owner": owner, "scopes": ["read", "write"]}, "demo"
                )["token"]
            )
            for name, owner in (("alice-codex", "alice"), ("bob-claude", "bob"))
        }
        told.line("server", "made tokens for the agents alice-codex (owner alice) and bob-claude (owner bob)")
        from cotenant.ui.cli import demo_play

        checks = demo_play.play(
            server.url, tokens, train=train, seconds=seconds, out=os.path.join(folder, "moons"), told=told
        )
    except KeyboardInterrupt:
        told.line("demo", "interrupted; cleaning up")
        return 130
    except Problem as problem:
        kept = True
        told.line("demo", f"FAILED: {problem.text}")
        return EXIT_REFUSED
    finally:
        signal.signal(signal.SIGTERM, interrupted)
        if server is not None and (wrong := server.end()):
            told.line("server", wrong)
        kin.end(5)  # hostd and its attempts outlive a server by design; a demo leaves nothing behind
        if kept:
            told.line(
                "demo", f"kept {folder}" + (f"; the server's output is in {server.log}" if server is not None else "")
            )
        else:
            shutil.rmtree(folder, ignore_errors=True)
    failed = [text for text, held in checks if not held]
    told.summary(checks)
    if as_json:
        show.as_json(
            {
                "ok": not failed,
                "checks": [{"check": text, "ok": held} for text, held in checks],
                "seconds": round(told.elapsed(), 1),
            }
        )
    return EXIT_REFUSED if failed else 0


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt


class Narrator:
    """Lines of what happens, each with the seconds since the beginning and who does it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = time.monotonic()
        self._colours = stream.isatty() and "NO_COLOR" not in os.environ

    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def line(self, who: str, text: str) -> None:
        colour = {"alice": "\033[36m", "bob": "\033[35m"}.get(who, show.DIM) if self._colours else ""
        self._write(f"{self.elapsed():6.1f}s  {colour}{who:<6}{show.PLAIN if colour else ''}  {show.harmless(text)}")

    def summary(self, checks: list[tuple[str, bool]]) -> None:
        self._write("")
        for text, held in checks:
            mark = "ok " if held else "BAD"
            if self._colours:
                mark = f"{show.GREEN if held else show.RED}{mark}{show.PLAIN}"
            self._write(f"  {mark}  {text}")
        bad = sum(not held for _, held in checks)
        self._write(
            f"\n{f'{bad} of {len(checks)} checks did not hold' if bad else f'All {len(checks)} checks held'} ({self.elapsed():.0f} s)."
        )

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class Server:
    """A `cotenant serve` of our own, as a child. Its output goes to a file, but for the line that says it is ready.

    Raises:
        Problem: it ended, or was not ready in time; the last lines of its output say why.
    """

    def __init__(self, folder: str, simulate: int | None) -> None:
        self.folder = folder
        self.log = os.path.join(folder, "serve.log")
        command = [
            sys.executable,
            "-P",
            "-m",
            "cotenant.ui.cli",
            "serve",
            "--data",
            folder,
            "--host",
            "127.0.0.1",
            "--port",
            "0",
        ]
        if simulate:
            command += ["--simulate-gpus", str(simulate)]
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with open(self.log, "wb") as log:
            # A group of its own: Ctrl-C is for the demo, which then ends the server in order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        try:
            self.url = self._ready()
        except BaseException:
            self.end()
            raise

    def chief(self) -> Client:
        """A client with the token of the person who runs the server, whatever the environment says."""
        return Client(place.Place(self.url, place.read_token(os.path.join(self.folder, "local.token")), "local.token"))

    def _ready(self) -> str:
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + READY_S
        seen = b""
        with selectors.DefaultSelector() as waiting:
            waiting.register(stdout, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                if not waiting.select(left):
                    continue
                part = os.read(stdout.fileno(), 4096)
                if not part:
                    raise Problem(f"The server ended before it was ready.\n{self._said()}")
                seen += part
                for line in seen.decode(errors="replace").splitlines():
                    if found := _READY.match(line):
                        return found.group(1)
        raise Problem(f"The server was not ready within {READY_S} s.\n{self._said()}")

    def _said(self) -> str:
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return "\n".join(log.read().splitlines()[-15:])

    def end(self) -> str | None:
        """SIGTERM, and SIGKILL where that does not help; what went wrong, or None."""
        process = self._process
        if process.stdout is not None:
            process.stdout.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return f"did not end within {END_S} s of SIGTERM; killed"
        return None if process.returncode == 0 else f"ended with exit code {process.returncode}"
