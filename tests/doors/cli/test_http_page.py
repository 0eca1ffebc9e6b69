"""docs/http.md: every command on it is run as it stands there, and answers as the page says."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[3] / "docs" / "http.md"
BLOCKS = re.findall(r"^```(sh|json)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
MARK = "=== next ==="


def part_of(shown: Any, got: Any, path: str = "") -> None:
    """What the page shows is in the answer: keys and plain values; a list's first element; "" and [] stand for any."""
    if isinstance(shown, dict):
        assert isinstance(got, dict), path
        for key, value in shown.items():
            assert key in got, f"{path}.{key}"
            part_of(value, got[key], f"{path}.{key}")
    elif isinstance(shown, list):
        assert isinstance(got, list) and (not shown or got), path
        if shown:
            part_of(shown[0], got[0], f"{path}[0]")
    else:
        assert got == shown or (shown == "" and isinstance(got, str)), path


def test_what_stands_there_works(live: Any, tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "cotenant"
    folder.mkdir(parents=True)
    live("token", "create", "my-script", "--owner", "alice", "--out", str(folder / "my-script.token"))
    commands = [text for kind, text in BLOCKS if kind == "sh"]
    script = f"\necho; echo '{MARK}'\n".join(commands).replace("http://127.0.0.1:8425", live.url)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True, text=True, timeout=60, check=True, env={**live.env, "HOME": str(tmp_path)},
    )  # fmt: skip
    answers = [part.strip() for part in done.stdout.split(MARK)]
    assert len(answers) == len(commands)
    index, checked = -1, 0
    for kind, text in BLOCKS:
        if kind == "sh":
            index += 1
        else:
            part_of(json.loads(text), json.loads(answers[index]))
            checked += 1
    assert checked == sum("curl -sS" in text or text.startswith("mcp ") for text in commands) - 1  # one defines `mcp`
