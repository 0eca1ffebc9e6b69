"""`cotenant simulate` as it is typed: the table, the record, the schedule, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COTENANT = Path(sys.executable).with_name("cotenant")
CHECK = Path(__file__).resolve().parents[3] / "scripts" / "check-schedule"


def cotenant(*words: str) -> Any:
    return subprocess.run([COTENANT, *words], capture_output=True, text=True, check=False, timeout=60)


def test_it_answers_with_a_table_a_record_and_a_schedule_that_is_sound(tmp_path: Path) -> None:
    policy, out = tmp_path / "p.toml", tmp_path / "out.jsonl"
    policy.write_text('[pools.main]\ncap = 6\nreserve = 1\norder = "fairshare"\n')
    words = ("simulate", "synthetic:jobs=60,cards=8,load=2", "--policy", str(policy), "--seed", "7")
    done = cotenant(*words, "--schedule", str(out))
    assert done.returncode == 0, done.stderr
    assert "MEAN WAIT" in done.stdout and "owner owner0" in done.stdout
    checked = subprocess.run(
        [sys.executable, CHECK, out, "--cap", "6", "--reserve", "1"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout
    told = json.loads(cotenant(*words, "--json").stdout)
    assert told["jobs"] == 60 and set(told["plot"]) == {"load", "waits"}
    assert len({len(column) for column in told["plot"]["load"].values()}) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("synthetic:cards=0",), "too small"),
        (("nowhere.jsonl",), "no file or folder"),
        (("synthetic", "--policy", "nowhere.toml"), "cannot be read"),
        (("synthetic", "--people", "1.5"), "must be 0 to 1"),
        (("synthetic", "--url", "http://localhost"), "asks no server"),
    ],
)
def test_what_cannot_be_meant_is_a_mistake_of_usage(words: tuple[str, ...], said: str) -> None:
    done = cotenant("simulate", *words)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
