"""Many subscribers, some of whom do not read: whoever reads ends on the last state, and nobody stands in another's way.

Runs benchmarks/subscribers.py as a program, with a few subscribers; COTENANT_SUBSCRIBERS=full takes 200 of them, 20 stalled,
and 2,000 changes a second for 20 s. What heartbeats took is the benchmark's to tell, not this test's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "subscribers.py"
FULL = os.environ.get("COTENANT_SUBSCRIBERS") == "full"
SUBSCRIBERS, STALLED, RATE, SECONDS = (200, 20, 2000, 20) if FULL else (16, 4, 500, 3)


@pytest.mark.slow
@pytest.mark.timeout(300 if FULL else 120)
def test_whoever_reads_ends_on_the_last_state() -> None:
    command = [
        sys.executable, str(PROGRAM), "--json", "--subscribers", str(SUBSCRIBERS), "--stalled", str(STALLED),
        "--rate", str(RATE), "--seconds", str(SECONDS),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280 if FULL else 110)
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout)
    live = SUBSCRIBERS - STALLED
    assert found["updates"] >= RATE * SECONDS
    assert (found["live"], found["live_on_last_state"]) == (live, live), found
    assert found["told_each_a_second_at_most"] <= 1.2, "coalesced"
    assert found["streams_stuck_at_first"] >= STALLED, "those who do not read were really full"
    assert found["resumed"] > 0 and found["resumed_heard_the_last_word"], found
    assert found["exit_code"] == 0 and found["end_s"] < 5, "stalled streams do not hold the end up"
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
