"""Arrays, conditions and templates from a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

Live = Any  # conftest.Server
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _free_cards(live: Live) -> None:
    live.idle()


def test_an_array_from_submit_to_its_elements_logs(live: Live, tmp_path: Path) -> None:
    sets = tmp_path / "sets.json"
    sets.write_text(json.dumps([{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}]))
    array = live(
        "submit", "-g", "0", "--own-dir", "--array-params", str(sets), "--max-parallel", "1", "--", "sh", "-c", "echo {index} {lr}; exit {index}",
    ).out.strip()  # fmt: skip
    after = live("submit", "-g", "0", "--own-dir", "--after", f"{array}:any", "--", "true").out.strip()
    live("job", "wait", after)
    shown = live("job", "show", array).out
    assert "0-2 of 3; 1 succeeded, 2 failed, at most 1 at once" in shown
    assert f"{array}:any (met)" in live("job", "show", after).out
    listed = live("job", "list").out
    assert "failed: 1 succeeded, 2 failed" in listed and f"{array}.1" not in listed
    assert f"{array}.1" in live("job", "list", "--array", array).out
    assert live("logs", f"{array}.2").out == "2 0.3\n"
    refused = live("logs", array, code=1)
    assert f"{array}.2" in refused.err
    again = live("job", "retry", array, "--failed").out.strip()
    live("job", "wait", again, code=1)
    assert "1-2 of 3; 2 failed" in live("job", "show", again).out


def test_elements_are_held_released_and_cancelled(live: Live) -> None:
    array = live("submit", "-g", "0", "--own-dir", "--array", "9", "--not-before", "3600", "--", "true").out.strip()
    live("job", "hold", array, "--indices", "0-2")
    assert "6 pending, 3 held" in live("job", "show", array).out
    live("job", "release", f"{array}.1")
    live("job", "cancel", array, "--indices", "5-8", "--yes")
    assert "3 pending, 2 held, 4 cancelled" in live("job", "show", array).out
    live("job", "cancel", array, "--yes")
    assert "9 cancelled" in live("job", "show", array).out


def test_templates_are_listed_and_filled_in(live: Live) -> None:
    folder = live.data / "templates"
    folder.mkdir(exist_ok=True)
    (folder / "finetune.toml").write_text((ROOT / "examples" / "templates" / "finetune.toml").read_text())
    (folder / "bad.toml").write_text("[job\n")
    listed = live("templates")
    assert "finetune" in listed.out and "bad.toml is broken" in listed.err
    assert "small | base | large" in live("templates", "finetune").out
    made = live("submit", "--template", "finetune", "-P", "data=/d", "-P", "lr=1", "-g", "0", "--dry-run").out
    assert "--data /d --lr 1.0 --epochs 3" in made
    refused = live("submit", "--template", "finetune", "-P", "lr=3", "--dry-run", code=1)
    assert "data is missing" in refused.err and "lr must be at most 1" in refused.err
    live("submit", "-P", "lr=3", "--", "true", code=2)
