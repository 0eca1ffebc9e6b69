"""Job overhead: N trivial jobs two at a time, and the time from a submit to the command's first instruction.

Cotenant runs in its default configuration: server and hostd as processes, MCP over HTTP with a token, every COMMIT
synced, a shim per attempt. Beside it task-spooler (Debian), HyperQueue (PyPI; give its interpreter with --hq), and a bare
posix_spawn as the floor. Needs gcc for the 20 lines of stamp.c.

    .venv/bin/python benchmarks/jobs.py [--rounds 5] [--n 1000] [--latency 100] [--hq PYTHON] [--part total|latency|all]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from harness import Result, percentile, rotate, save, spawn_two_at_a_time, table

from cotenant.ui.cli.client import Client
from cotenant.ui.cli.place import Place

HERE = Path(__file__).resolve().parent
TRUE = shutil.which("true") or "/bin/true"
#: Connections over which jobs are submitted; an agent's client sends several calls at once.
CONNECTIONS = 4


class Cotenant:
    """A server with two places for jobs without a card, and one agent's token."""

    def __init__(self) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="cotenant-bench-"))
        cotenant = str(Path(sys.executable).with_name("cotenant"))
        self.server = subprocess.Popen(
            [cotenant, "serve", "--data", str(self.dir / "data"), "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        self.url = next(line.split()[1] for line in self.server.stdout if line.startswith("ready "))
        made = subprocess.run(
            [cotenant, "token", "create", "bench", "--data", str(self.dir / "data"), "--kind", "agent", "--owner", "bench",
             "--scopes", "read,write", "--json"], check=True, capture_output=True, text=True,
        )  # fmt: skip
        self.token = json.loads(made.stdout)["token"]
        client = self.client()
        deadline = time.monotonic() + 20
        while not any(h["link"] == "up" for h in client.call_tool("list_hosts")["hosts"]):
            if time.monotonic() > deadline:
                raise SystemExit("the local host did not come up within 20 s")
            time.sleep(0.05)

    def client(self) -> Client:
        return Client(Place(self.url, self.token, "the benchmark"))

    def __enter__(self) -> Cotenant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.send_signal(signal.SIGTERM)
        self.server.wait(20)
        shutil.rmtree(self.dir, ignore_errors=True)


@contextlib.contextmanager
def task_spooler() -> Iterator[Callable[..., str]]:
    folder = tempfile.mkdtemp(prefix="tsp-bench-")
    environment = {**os.environ, "TS_SOCKET": folder + "/s", "TMPDIR": folder, "TS_MAXFINISHED": "5000"}

    def tsp(*words: str) -> str:
        return subprocess.run(["tsp", *words], env=environment, check=True, capture_output=True, text=True).stdout

    tsp("-S", "2")
    try:
        yield tsp
    finally:
        tsp("-K")
        shutil.rmtree(folder, ignore_errors=True)


# ---- totals -----------------------------------------------------------------------------------


def total_spawn(n: int) -> Result:
    began = time.monotonic()
    spawn_two_at_a_time(TRUE, n)
    return {"total s": time.monotonic() - began}


def total_tsp(n: int) -> Result:
    with task_spooler() as tsp:
        began = time.monotonic()
        last = ""
        for _ in range(n):
            last = tsp("-n", TRUE).strip()
        tsp("-w", last)
        while " running " in (listing := tsp()) or " queued " in listing:
            time.sleep(0.002)
        return {"total s": time.monotonic() - began}


def total_cotenant(n: int) -> Result:
    with Cotenant() as there:
        clients = [there.client() for _ in range(CONNECTIONS)]
        for client in clients:
            client.call_tool("quota_status")  # connected and warm
        began = time.monotonic()

        last: list[str] = []

        def submit(client: Client, share: range) -> None:
            job = ""
            for number in share:
                job = client.call_tool("submit_job", {"command": [TRUE], "gpus": 0, "labels": {"n": str(number)}})[
                    "job_id"
                ]
            last.append(job)

        threads = [
            threading.Thread(target=submit, args=(client, range(k, n, CONNECTIONS))) for k, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        submitted = time.monotonic() - began
        for job in last:  # the ends of the queue; then hardly anything is left to ask for
            while clients[0].call_tool("wait_job", {"job_id": job}, wait_s=45)["state"] not in ("succeeded", "failed"):
                pass
        while clients[0].call_tool("list_jobs", {"state": "active", "limit": 1})["total"]:
            time.sleep(0.005)
        took = time.monotonic() - began
        done = clients[0].call_tool("list_jobs", {"state": "succeeded", "limit": 1})["total"]
        assert done == n, f"{done} of {n} succeeded"
        return {"total s": took, "submitted s": submitted}


def total_array(n: int) -> Result:
    """The same number of commands as one array: one call, and the server makes the jobs as places come free."""
    with Cotenant() as there:
        client = there.client()
        client.call_tool("quota_status")
        began = time.monotonic()
        job = client.call_tool("submit_job", {"command": [TRUE], "gpus": 0, "array": n})["job_id"]
        submitted = time.monotonic() - began
        while (end := client.call_tool("wait_job", {"job_id": job}, wait_s=45))["state"] not in ("succeeded", "failed"):
            pass
        took = time.monotonic() - began
        assert end["array"]["succeeded"] == n, end["array"]
        return {"total s": took, "submitted s": submitted}


def hyperqueue(python: str, *words: str) -> Result:
    said = subprocess.run(
        [python, str(HERE / "jobs_hq.py"), *words], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    answer: Result = json.loads(next(line[5:] for line in said.splitlines() if line.startswith("JSON ")))
    return answer


# ---- latency ----------------------------------------------------------------------------------


def stamped(path: Path, timeout_s: float = 20) -> int:
    """The nanoseconds that the job wrote as its first act."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            text = path.read_text()
            if text.endswith("\n"):
                return int(text)
        time.sleep(0.0002)
    raise SystemExit("a job did not run within 20 s")


def latencies(n: int, submit: Callable[[Path], object], pause_s: float = 0.02) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="stamp-"))
    dispatch, answered = [], []
    for number in range(n):
        path = folder / str(number)
        began = time.monotonic_ns()
        submit(path)
        answered.append((time.monotonic_ns() - began) / 1e6)
        dispatch.append((stamped(path) - began) / 1e6)
        time.sleep(pause_s)  # the slot is free again for certain
    shutil.rmtree(folder)
    return {
        "dispatch p50 ms": percentile(dispatch, 50), "dispatch p99 ms": percentile(dispatch, 99),
        "submit p50 ms": percentile(answered, 50),
    }  # fmt: skip


def latency_tsp(n: int, stamp: str) -> Result:
    with task_spooler() as tsp:
        return latencies(n, lambda path: tsp("-n", stamp, str(path)))


def latency_popen(n: int, stamp: str) -> Result:
    return latencies(n, lambda path: subprocess.Popen([stamp, str(path)], start_new_session=True).wait())


def latency_cotenant(n: int, stamp: str) -> Result:
    with Cotenant() as there:
        client = there.client()
        client.call_tool("submit_job", {"command": [TRUE], "gpus": 0, "wait_s": 20})
        return latencies(n, lambda path: client.call_tool("submit_job", {"command": [stamp, str(path)], "gpus": 0}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--latency", type=int, default=100)
    parser.add_argument("--hq", help="a Python that has the package hyperqueue")
    parser.add_argument("--part", choices=("total", "latency", "all"), default="all")
    parser.add_argument("--save", help="write the raw numbers to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stamp = folder + "/stamp"
        subprocess.run(["gcc", "-O2", "-o", stamp, str(HERE / "stamp.c")], check=True)
        totals: dict[str, Callable[[], Result]] = {"posix_spawn, 2 at a time": lambda: total_spawn(options.n)}
        waits: dict[str, Callable[[], Result]] = {"subprocess.Popen": lambda: latency_popen(options.latency, stamp)}
        if shutil.which("tsp"):
            totals["task-spooler -S 2"] = lambda: total_tsp(options.n)
            waits["task-spooler"] = lambda: latency_tsp(options.latency, stamp)
        if options.hq:
            totals["HyperQueue"] = lambda: hyperqueue(options.hq, "total", str(options.n), stamp)
            waits["HyperQueue"] = lambda: hyperqueue(options.hq, "latency", str(options.latency), stamp)
            totals["HyperQueue, one array"] = lambda: hyperqueue(options.hq, "array", str(options.n), stamp)
        totals["cotenant"] = lambda: total_cotenant(options.n)
        totals["cotenant, one array"] = lambda: total_array(options.n)
        waits["cotenant"] = lambda: latency_cotenant(options.latency, stamp)
        reference = "task-spooler" if shutil.which("tsp") else "subprocess.Popen"
        if options.part in ("latency", "all"):
            results = rotate(waits, options.rounds)
            print(table("submit to first instruction, free slot", results, reference))
            save(options.save and options.save + ".latency.json", "latency", results)
        if options.part in ("total", "all"):
            results = rotate(totals, options.rounds)
            print(table(f"{options.n} trivial jobs, two at a time", results, "task-spooler -S 2"))
            save(options.save and options.save + ".total.json", "total", results)


if __name__ == "__main__":
    main()
