"""A hostd in a temporary directory, and a client that speaks its protocol. For any test that needs a real one.

async with Hostd(tmp_path, simulate=2) as hostd:          # started, connected, greeted
    card = hostd.cards[0]["uuid"]
    await hostd.start("a1", ["true"], card=card, fence=1)
    report = await hostd.ended("a1")                      # waits for the report of its end; acknowledges all
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cotenant.hostd import protocol
from cotenant.hostd.protocol import Hello, Refused, SlotRef, StartSpec

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0


async def until(condition: Callable[[], Any], what: str = "", deadline_s: float = DEADLINE_S) -> Any:
    """Poll `condition` until it is true and return its value; fails with `what` after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {deadline_s} s: {what or condition}"
        await asyncio.sleep(0.01)


def carriers(**wanted: str) -> list[int]:
    """Pids of living processes whose environment has all of `wanted`."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                pairs = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and all(f"{key}={value}".encode() in pairs for key, value in wanted.items()):
                    found.append(int(name))
    return found


class Link:
    """One connection to hostd's socket. Collects reports; acknowledges them unless told not to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, acknowledge: bool) -> None:
        self.reports: list[dict[str, Any]] = []
        self.telemetry: list[dict[str, Any]] = []
        self._reader, self._writer, self._acknowledge = reader, writer, acknowledge
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._listener = asyncio.create_task(self._listen())

    @property
    def closed(self) -> bool:
        return self._listener.done()

    async def _listen(self) -> None:
        try:
            while (message := await protocol.read_frame(self._reader)) is not None:
                if "re" in message:
                    self._waiting.pop(message["re"]).set_result(message)
                elif "report" in message:
                    self.reports.append(message)
                    if self._acknowledge:
                        self.ack(message["seq"])
                else:
                    self.telemetry.append(message)
        except (OSError, protocol.ProtocolError):
            pass
        finally:
            for future in self._waiting.values():
                future.set_exception(ConnectionError("hostd has closed the connection"))
            self._writer.close()

    def ack(self, seq: int) -> None:
        self._writer.write(protocol.encode({"op": "ack", "args": {"seq": seq}}))

    def send_raw(self, data: bytes) -> None:
        self._writer.write(data)

    async def ask(self, op: str, args: Any = None, deadline_s: float = DEADLINE_S) -> Any:
        """The result of a request.

        Raises:
            Refused: hostd will not. ConnectionError: it went away before it answered.
        """
        if self.closed:
            raise ConnectionError("hostd has closed the connection")
        self._number += 1
        future = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        self._writer.write(protocol.request(self._number, op, {} if args is None else args))
        message = await asyncio.wait_for(future, deadline_s)
        if message["ok"]:
            return message["result"]
        raise Refused(message["code"], message["message"], message["detail"])

    async def close(self) -> None:
        self._writer.close()
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)


class Hostd:
    """One hostd process (again and again) on one state directory below `base`."""

    def __init__(
        self,
        base: Path,
        simulate: int = 0,
        env: dict[str, str] | None = None,
        name: str = "hostd",
        lock_dir: Path | None = None,
        python: str = sys.executable,
        residents: Iterable[str] = (),
        root: Path | None = None,
    ) -> None:
        self.state = base / name / "state"
        # A unix socket's path holds 107 bytes; pytest's directories can be longer.
        self._run = Path(tempfile.mkdtemp(prefix="ct-"))
        self.socket = self._run / "hostd.sock"
        self.locks = lock_dir or base / "locks"
        self.log = base / name / "hostd.log"
        self.state.parent.mkdir(parents=True, exist_ok=True)
        self._env = env or {}
        self._python = python
        self._root = root or ROOT / ".pkg"
        self._simulate, self._residents = simulate, ",".join(residents)
        self.process: asyncio.subprocess.Process | None = None
        self.link: Link | None = None
        self.cluster, self.incarnation = "test-cluster", 1
        self.welcome: dict[str, Any] = {}
        self.fence = 0

    async def __aenter__(self) -> Hostd:
        await self.up()
        await self.greet()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.end()

    # ---- the process

    async def spawn(self) -> asyncio.subprocess.Process:
        """Start the process without waiting for it."""
        argv = [self._python, "-m", "cotenant.hostd", "--state", str(self.state), "--socket", str(self.socket)]
        argv += ["--lock-dir", str(self.locks), "--residents", self._residents]
        if self._simulate:
            argv += ["--simulate-gpus", str(self._simulate)]
        with open(self.log, "ab") as log:
            return await asyncio.create_subprocess_exec(
                *argv,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(self._root), **self._env},
                start_new_session=True,
            )

    async def up(self) -> None:
        """Start hostd and wait until it listens."""
        self.process = await self.spawn()
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)
        assert line.decode().strip() == f"ready {self.socket}", f"{line!r}\n{self.log.read_text()}"

    async def kill(self) -> None:
        """kill -9; what it started lives on."""
        await self._leave(signal.SIGKILL)

    async def down(self) -> int:
        """SIGTERM; returns the exit status."""
        return await self._leave(signal.SIGTERM)

    async def _leave(self, number: int) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        status = await asyncio.wait_for(self.process.wait(), DEADLINE_S)
        # asyncio.subprocess leaves the pipe's transport open until it is collected.
        self.process._transport.close()  # type: ignore[attr-defined]
        if self.link is not None:
            await self.link.close()
            self.link = None
        return status

    async def again(self, **hello: Any) -> None:
        """Start it again on the same state, and greet it."""
        await self.up()
        await self.greet(**hello)

    def warm_pid(self) -> int | None:
        """The warm parent: the child of hostd."""
        assert self.process is not None
        pid = self.process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    async def end(self) -> None:
        """End hostd and everything that carries its state directory; nothing may be left."""
        if self.process is not None and self.process.returncode is None:
            await self.down()
        deadline = time.monotonic() + DEADLINE_S
        while left := carriers(COTENANT_STATE_DIR=os.path.realpath(self.state)):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"processes {left} do not end"
            await asyncio.sleep(0.01)
        shutil.rmtree(self._run, ignore_errors=True)

    # ---- the protocol

    async def connect(self, acknowledge: bool = True) -> Link:
        """A connection that has not said hello."""
        return Link(*await asyncio.open_unix_connection(str(self.socket)), acknowledge)

    async def greet(self, acknowledge: bool = True, **hello: Any) -> dict[str, Any]:
        """Connect and say hello; becomes the connection that `ask` uses."""
        link = await self.connect(acknowledge)
        words = {"cluster_id": self.cluster, "incarnation": self.incarnation, **hello}
        try:
            self.welcome = await link.ask("hello", Hello(**words))
        except BaseException:
            await link.close()
            raise
        self.link = link
        return self.welcome

    @property
    def cards(self) -> list[dict[str, Any]]:
        return self.welcome["cards"]

    @property
    def reports(self) -> list[dict[str, Any]]:
        assert self.link is not None
        return self.link.reports

    async def ask(self, op: str, **args: Any) -> Any:
        assert self.link is not None
        return await self.link.ask(op, args)

    def spec(self, attempt_id: str, argv: Iterable[str], card: str | None = None, **more: Any) -> StartSpec:
        """A spec with a fresh fence (unless given) on `card`, or on a cpu place."""
        if "fence" not in more:
            self.fence += 1
            more["fence"] = self.fence
        more.setdefault("slots", (SlotRef(card),) if card else (SlotRef("cpu", len(attempt_id) % 2, 2),))
        more.setdefault("lease_id", f"lease-{attempt_id}")
        return StartSpec(attempt_id, f"job-{attempt_id}", epoch=1, argv=tuple(argv), **more)

    async def start(self, attempt_id: str, argv: Iterable[str], card: str | None = None, **more: Any) -> dict[str, Any]:
        """Start an attempt; the answer's AttemptReport."""
        more.setdefault("slots", (SlotRef(card),) if card else ())
        return await self.send(self.spec(attempt_id, argv, card, **more))

    async def send(self, spec: StartSpec) -> dict[str, Any]:
        assert self.link is not None
        return await self.link.ask("start", spec)

    async def stop(self, attempt_id: str, reason: str = "cancel", grace_s: float = 5.0) -> dict[str, Any]:
        return await self.ask("stop", attempt_id=attempt_id, reason=reason, grace_s=grace_s)

    async def probe(self, attempt_id: str) -> dict[str, Any]:
        return await self.ask("probe", attempt_id=attempt_id)

    async def ended(self, attempt_id: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """The report of the attempt's end."""

        def found() -> dict[str, Any] | None:
            for message in self.reports:
                body = message["body"]
                ends = ("exited", "lost", "never")
                if message["report"] == "attempt" and body["attempt_id"] == attempt_id and body["state"] in ends:
                    return body
            return None

        return await until(found, f"the end of {attempt_id}", deadline_s)

    async def log_text(self, attempt_id: str, stream: str = "out") -> str:
        """The whole log as far as it has whole lines."""
        page = await self.ask("read_log", attempt_id=attempt_id, stream=stream, offset=0, tail_lines=None)
        return page["text"]

    async def printed(self, attempt_id: str, word: str, stream: str = "out") -> str:
        """Wait until the log has `word`."""
        end = time.monotonic() + DEADLINE_S
        while word not in (text := await self.log_text(attempt_id, stream)):
            assert time.monotonic() < end, f"{word!r} did not appear in {text!r}"
            await asyncio.sleep(0.01)
        return text

    async def card(self, uuid: str) -> dict[str, Any]:
        """A fresh look at one card; one that hostd does not know is in state "missing"."""
        cards = (await self.ask("cards"))["cards"]
        return next((card for card in cards if card["uuid"] == uuid), {"state": "missing"})

    async def card_in(self, uuid: str, state: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait until the card is in `state` (the wire leaves "ok" out)."""
        end = time.monotonic() + deadline_s
        while (card := await self.card(uuid)).get("state", "ok") != state:
            assert time.monotonic() < end, f"{uuid} is {json.dumps(card)}, not {state}"
            await asyncio.sleep(0.05)
        return card
