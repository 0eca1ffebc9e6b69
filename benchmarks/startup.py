"""CPU of whole commands against `python3 -c pass`: `cotenant --help` and `cotenant status` beside a running server.

.venv/bin/python benchmarks/startup.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

from harness import Result, rotate, save, table
from jobs import Cotenant


def cpu_of(command: list[str], environment: dict[str, str]) -> Result:
    """User and system CPU of one run, in milliseconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"CPU ms": (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", help="write the raw numbers to this file")
    options = parser.parse_args()
    cotenant = str(Path(sys.executable).with_name("cotenant"))
    with Cotenant() as there:
        environment = {**os.environ, "COTENANT_URL": there.url, "COTENANT_TOKEN": there.token}
        results = rotate(
            {
                "python3 -c pass": lambda: cpu_of([sys.executable, "-c", "pass"], environment),
                "cotenant --help": lambda: cpu_of([cotenant, "--help"], environment),
                "cotenant status": lambda: cpu_of([cotenant, "status"], environment),
            },
            options.rounds,
            warm=3,
        )
    print(table("CPU of a command", results, "python3 -c pass"))
    save(options.save, "startup", results)


if __name__ == "__main__":
    main()
