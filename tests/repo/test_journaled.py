"""The check at the end of a run of tests: a run in which a server decided something that is decided differently now fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1] / "lab"
#: One test whose server decides to start a job; what it recorded is changed by PLACE.
TEST = """
import dataclasses
from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.engine import Changes
from cotenant.server.deciding.world import Ask, HostView, Needs, Policy, PoolRules, Slot, World
from cotenant.server.journal import Journal

def test_that_passes_by_itself(tmp_path):
    world = World(
        hosts=(HostView("h"),),
        slots=(Slot("h", "u", 0, 1, 0, "main", "gpu", 1000),),
        pools=(PoolRules("main"),),
        asks=(Ask("j1", "job", "ann", "a", False, "main", Needs(1, 1), 10, 1, 3_600_000),),
    )
    decided = decide(world, 2, Policy())
    assert len(decided.decisions) == 1
    if DIFFERENT:
        decided = dataclasses.replace(decided, decisions=(dataclasses.replace(decided.decisions[0], ask_id="j2"),))
    journal = Journal(tmp_path)
    journal.note(Changes(world), 2, Policy(), decided)
    journal.close()
"""


@pytest.mark.usefixtures("spoils_journals")
@pytest.mark.parametrize("different", [False, True])
def test_a_decision_that_is_made_differently_now_fails_the_run(tmp_path: Path, different: bool) -> None:
    (tmp_path / "test_it.py").write_text(TEST.replace("DIFFERENT", str(different)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-p",
        "journaled",
        "--basetemp",
        str(tmp_path / "base"),
        "test_it.py",
    ]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(LAB)}, capture_output=True, text=True, check=False, timeout=60
    )  # fmt: skip
    assert "1 passed" in done.stdout and "decided again: 1 passes of 1 servers, 1 decisions" in done.stdout, done.stdout
    assert done.returncode == int(different), done.stdout
    if different:
        assert "-Start" in done.stdout and '"ask_id":"j2"' in done.stdout and "+Start" in done.stdout
