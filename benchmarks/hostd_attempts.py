"""What one trivial attempt costs on its host: hostd, warm parent and shims alone, driven over hostd's own socket.

    .venv/bin/python benchmarks/hostd_attempts.py [--n 1000] [--rounds 5] [--code NAME=CHECKOUT ...]

Per variant (a checkout of this repository; give --code twice to compare two in one run) a fresh hostd with two cpu places runs N
times `true`, two at a time, as the server does it: start, report, acknowledge, forget. CPU is user + system of each living process
and thread, from /proc; the commands' own (what shims have reaped) stands apart. The second part sends one start at a
time to the idle host: from just before the message is sent to the command's first instruction (stamp.c, so it needs gcc).
Beside them a bare posix_spawn as the floor.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import Result, percentile, rotate, save, spawn_two_at_a_time, table

HERE = Path(__file__).resolve().parent
TRUE = shutil.which("true") or "/bin/true"
_TICKS = os.sysconf("SC_CLK_TCK")
#: Attempts that the server lets hostd forget in one request.
FORGET_AT_ONCE = 16


class Driven:
    """A hostd of one checkout, and the one connection that drives it. Blocking and plain, so that it costs little itself."""

    def __init__(self, code: Path) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="hostd-bench-"))
        path = str(self.dir / "socket" / "s")
        os.mkdir(os.path.dirname(path), 0o700)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cotenant.hostd", "--state", str(self.dir / "state"), "--socket", path,
             "--lock-dir", str(self.dir / "locks")],
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(code / ".pkg")}, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(b"ready"), "hostd did not start"
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self._numbers = itertools.count(1)
        self._read = bytearray()
        self._fences = itertools.count(1)
        self.ask("hello", {"cluster_id": "bench", "incarnation": 1})
        self.wait(lambda message: "re" in message)

    def ask(self, op: str, args: dict[str, Any]) -> None:
        self._send({"id": next(self._numbers), "op": op, "args": args})

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def start(self, number: int, place: int, argv: list[str]) -> None:
        """One attempt on a cpu place, with a spec of the server's usual size."""
        self.ask(
            "start",
            {
                "attempt_id": f"a-{number}", "job_id": f"j-{number}", "lease_id": f"l-{number}", "epoch": 1,
                "fence": next(self._fences), "argv": argv, "slots": [{"uuid": "cpu", "share": place, "shares": 2}],
                "env": {"COTENANT_PURPOSE": "benchmark"}, "time_limit_s": 86400.0,
            },
        )  # fmt: skip

    def messages(self) -> Iterator[dict[str, Any]]:
        """What hostd says, as it comes; fails when it says nothing for 20 s."""
        while True:
            while len(self._read) >= 4:
                (length,) = struct.unpack_from(">I", self._read)
                if len(self._read) < 4 + length:
                    break
                message = json.loads(bytes(self._read[4 : 4 + length]))
                del self._read[: 4 + length]
                if "report" in message:
                    self._send({"op": "ack", "args": {"seq": message["seq"]}})
                elif message.get("ok") is False:
                    raise SystemExit(f"hostd refuses: {message}")
                yield message
            if not select.select([self.socket], [], [], 20)[0]:
                raise SystemExit("hostd says nothing")
            self._read += self.socket.recv(1 << 16)

    def wait(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        for message in self.messages():
            if wanted(message):
                return

    def cpu_ms(self) -> dict[str, float]:
        """CPU so far of hostd, of the warm parent with all shims that live, and of the commands they have reaped."""
        spent = {"hostd": _thread_ms(self.process.pid), "shims": 0.0, "commands": 0.0}
        line = _children(self.process.pid)
        while line:
            pid = line.pop()
            line += _children(pid)
            with contextlib.suppress(OSError):
                spent["shims"] += _thread_ms(pid)
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                spent["commands"] += (int(fields[13]) + int(fields[14])) * 1000 / _TICKS
        return spent

    def shims(self) -> int:
        """How many shims there ever were; CPU of those that have ended is not counted."""
        texts = [path.read_text() for path in (self.dir / "state" / "attempts").glob("*.record")]
        with contextlib.suppress(FileNotFoundError):
            texts += [
                json.loads(line)["record"] for line in (self.dir / "state" / "forgotten").read_text().splitlines()
            ]
        said = [json.loads(line) for text in texts for line in text.splitlines() if line]
        return len({line["pid"][2] for line in said if "pid" in line})

    def __enter__(self) -> Driven:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)
        shutil.rmtree(self.dir, ignore_errors=True)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _thread_ms(pid: int) -> float:
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e6


def total(code: Path, n: int) -> Result:
    with Driven(code) as there:
        _run(there, range(20))  # two shims have been made, everything has been imported
        before, began = there.cpu_ms(), time.monotonic()
        _run(there, range(20, 20 + n))
        took = time.monotonic() - began
        spent = {name: (value - before[name]) / n for name, value in there.cpu_ms().items()}
        return {
            "wall ms": took / n * 1000,
            "cpu ms": spent["hostd"] + spent["shims"],
            "hostd cpu ms": spent["hostd"],
            "shims cpu ms": spent["shims"],
            "commands cpu ms": spent["commands"],
            "shims": there.shims(),
        }


def _run(there: Driven, numbers: range) -> None:
    """All of `numbers`, two at a time."""
    waiting, living, done = iter(numbers), {}, []
    for place in (0, 1):
        number = next(waiting)
        living[f"a-{number}"] = place
        there.start(number, place, [TRUE])
    for message in there.messages():
        body = message.get("body", {})
        if message.get("report") != "attempt" or body["state"] != "exited" or body["attempt_id"] not in living:
            continue
        assert body["exit"]["code"] == 0 and body["clean"], body
        place = living.pop(body["attempt_id"])
        done.append(body["attempt_id"])
        if (number := next(waiting, None)) is not None:
            living[f"a-{number}"] = place
            there.start(number, place, [TRUE])
        if len(done) >= FORGET_AT_ONCE:
            there.ask("forget", {"attempt_ids": done})
            done = []
        if not living:
            return


def latency(code: Path, n: int, stamp: str) -> Result:
    with Driven(code) as there:
        _run(there, range(20))
        dispatch, told = [], []
        for number in range(20, 20 + n):
            path = there.dir / f"stamp-{number}"
            time.sleep(0.05)  # the host is idle again for certain
            began = time.monotonic_ns()
            there.start(number, 0, [stamp, str(path)])
            there.wait(lambda m: m.get("report") == "attempt" and m["body"]["state"] == "exited")
            told.append((time.monotonic_ns() - began) / 1e6)
            dispatch.append((int(path.read_text()) - began) / 1e6)
        return {
            "start to first instruction p50 ms": percentile(dispatch, 50),
            "start to first instruction p99 ms": percentile(dispatch, 99),
            "start to end told p50 ms": percentile(told, 50),
        }


def floor_total(n: int) -> Result:
    before, began = os.times(), time.monotonic()
    spawn_two_at_a_time(TRUE, n)
    after = os.times()
    return {
        "wall ms": (time.monotonic() - began) / n * 1000,
        "cpu ms": (after.user + after.system - before.user - before.system) / n * 1000,
        "commands cpu ms": (
            after.children_user + after.children_system - before.children_user - before.children_system
        ) / n * 1000,
    }  # fmt: skip


def floor_latency(n: int, stamp: str) -> Result:
    dispatch = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(n):
            time.sleep(0.05)
            began = time.monotonic_ns()
            os.waitpid(os.posix_spawn(stamp, [stamp, f"{folder}/{number}"], os.environ), 0)
            dispatch.append((int(Path(f"{folder}/{number}").read_text()) - began) / 1e6)
    return {
        "start to first instruction p50 ms": percentile(dispatch, 50),
        "start to first instruction p99 ms": percentile(dispatch, 99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--latency", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=("total", "latency", "all"), default="all")
    parser.add_argument("--code", action="append", metavar="NAME=CHECKOUT", help="repeat to compare; default: this one")
    parser.add_argument("--save", help="write the raw numbers to this file")
    options = parser.parse_args()
    codes = dict(word.split("=", 1) for word in options.code or [f"this={HERE.parent}"])
    reference = next(iter(codes))
    if options.part in ("total", "all"):
        variants: dict[str, Callable[[], Result]] = {"posix_spawn, the floor": lambda: floor_total(options.n)}
        for name, code in codes.items():
            variants[name] = lambda code=code: total(Path(code), options.n)  # type: ignore[misc]
        results = rotate(variants, options.rounds)
        print(table(f"{options.n} attempts, two at a time; per attempt", results, reference))
        save(options.save and options.save + ".total.json", "total", results)
    if options.part in ("latency", "all"):
        with tempfile.TemporaryDirectory() as folder:
            stamp = folder + "/stamp"
            subprocess.run(["gcc", "-O2", "-o", stamp, str(HERE / "stamp.c")], check=True)
            variants = {"posix_spawn, the floor": lambda: floor_latency(options.latency, stamp)}
            for name, code in codes.items():
                variants[name] = lambda code=code: latency(Path(code), options.latency, stamp)  # type: ignore[misc]
            results = rotate(variants, options.rounds)
        print(table("one start at a time on an idle host", results, reference))
        save(options.save and options.save + ".latency.json", "latency", results)


if __name__ == "__main__":
    main()
