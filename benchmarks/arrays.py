"""How long the server takes to accept an array, over HTTP, with every COMMIT synced; and how long a start of one takes.

No card and no place is there, so that nothing starts meanwhile.

    .venv/bin/python benchmarks/arrays.py [--rounds 5] [--n 10000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from harness import Result, rotate, save, table
from jobs import TRUE, Cotenant


def accept(there: Cotenant, n: int, what: Callable[[int], object]) -> Callable[[], Result]:
    client = there.client()

    def run() -> Result:
        spec = {"command": [TRUE, "{index}"], "gpus": 0, "array": what(n), "start_window": {"not_before": 3600}}
        began = time.monotonic()
        job = client.call_tool("submit_job", {**spec, "request_id": f"{time.monotonic_ns()}"})["job_id"]
        accepted = time.monotonic() - began
        began = time.monotonic()
        assert client.call_tool("get_job", {"job_id": f"{job}.{n - 1}"})["state"] == "queued"
        looked = time.monotonic() - began
        began = time.monotonic()
        asked = client.call_tool("cancel_job", {"job_id": job})
        client.call_tool("cancel_job", {"job_id": job, "confirm_token": asked["confirm_token"]})
        return {"accepted s": accepted, "look at the last element s": looked, "cancelled s": time.monotonic() - began}

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--save", help="write the raw numbers to this file")
    options = parser.parse_args()
    side = int(options.n**0.5)
    with Cotenant() as there:
        results = rotate(
            {
                "one job": lambda: accept(there, 1, lambda n: n)(),
                f"array of {options.n}": accept(there, options.n, lambda n: n),
                f"{options.n} sets of 3 parameters": accept(
                    there,
                    options.n,
                    lambda n: {"params": [{"lr": k / n, "seed": k, "name": f"run-{k}"} for k in range(n)]},
                ),
                f"a grid of {side} x {side}": accept(
                    there, side * side, lambda n: {"grid": {"a": list(range(side)), "b": list(range(side))}}
                ),
            },
            options.rounds,
        )
    print(table("an array is accepted", results, "one job"))
    save(options.save, "arrays", results)


if __name__ == "__main__":
    main()
