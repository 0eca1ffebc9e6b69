"""What an idle server and its hostd cost: CPU of all their processes over a while, and their memory.

    .venv/bin/python benchmarks/idle.py [SECONDS] [--cards N] [--json]

Starts `cotenant serve` over a temporary data directory with simulated cards, waits until start-up has settled, and
measures server, hostd, the warm parent and the spare shim together. CPU is in percent of one core; PSS counts pages that
processes share once, RSS counts them in each. The goal (first light): below 1 % and below 150 MiB PSS together.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SETTLE_S = 5.0
MARK = "COTENANT_BENCH_IDLE"


def ours(mark: str) -> list[int]:
    """Processes that carry our mark: the server's, wherever their parents went."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and f"{MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue
    return sorted(found)


def name_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    comm = Path(f"/proc/{pid}/comm").read_text().strip()
    if comm == "cotenant-shim":
        return "spare shim"
    joined = " ".join(words)
    return "warm parent" if "hostd.warm" in joined else "hostd" if "cotenant.hostd" in joined else "server"


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def memory_mib(pid: int) -> tuple[float, float]:
    """(PSS, RSS)"""
    found = {"Pss": 0.0, "Rss": 0.0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key in found:
            found[key] = int(rest.split()[0]) / 1024
    return found["Pss"], found["Rss"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=20.0)
    parser.add_argument("--cards", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    mark = os.urandom(8).hex()
    with tempfile.TemporaryDirectory(prefix="cotenant-idle-") as data:
        command = [
            str(Path(sys.executable).with_name("cotenant")), "serve", "--data", data, "--port", "0", "--simulate-gpus", str(args.cards),
        ]  # fmt: skip
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, MARK: mark})
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line.startswith("ready "):
                print(f"the server never said ready, but {line!r}", file=sys.stderr)
                return 1
            time.sleep(SETTLE_S)
            pids = ours(mark)
            before, began = {pid: cpu_s(pid) for pid in pids}, time.monotonic()
            time.sleep(args.seconds)
            took = time.monotonic() - began
            rows = []
            for pid in pids:
                pss, rss = memory_mib(pid)
                rows.append(
                    {
                        "process": name_of(pid),
                        "cpu_pct": 100 * (cpu_s(pid) - before[pid]) / took,
                        "pss_mib": pss,
                        "rss_mib": rss,
                    }
                )
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(10)
            if server.stdout is not None:
                server.stdout.close()
            for pid in ours(mark):
                os.kill(pid, signal.SIGTERM)
    total = {key: sum(float(row[key]) for row in rows) for key in ("cpu_pct", "pss_mib", "rss_mib")}
    if args.json:
        print(json.dumps({"seconds": round(took, 1), "processes": rows, "total": total}))
        return 0
    print(f"{'':12} {'CPU %':>7} {'PSS MiB':>9} {'RSS MiB':>9}   over {took:.0f} s, {args.cards} simulated cards")
    for row in [*rows, {"process": "together", **total}]:
        print(f"{row['process']:12} {row['cpu_pct']:7.2f} {row['pss_mib']:9.1f} {row['rss_mib']:9.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
