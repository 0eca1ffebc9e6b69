"""What the command line costs: the common paths load nothing heavy and stay within five bare Pythons of CPU."""

from __future__ import annotations

import ast
import os
import resource
import statistics
import subprocess
import sys
from typing import Any

import pytest

#: What must not be imported on the common paths; the design's own list, and what the budget cannot bear.
HEAVY = (
    "mcp",
    "mcp_types",
    "pydantic",
    "asyncssh",
    "starlette",
    "asyncio",
    "ssl",
    "http.client",
    "email",
    "uvicorn",
    "typing",
    "shutil",
    "dataclasses",
    "subprocess",
)
CLI = [sys.executable, "-P", "-m", "cotenant.ui.cli"]


@pytest.mark.parametrize(
    "words",
    [["--help"], ["status"], ["status", "--json"], ["gpus"], ["job", "list"], ["submit", "--dry-run", "--", "true"]],
)
def test_the_common_paths_import_nothing_heavy(live: Any, words: list[str]) -> None:
    code = (
        "import sys; from cotenant.ui.cli import main; code = main(sys.argv[1:]);"
        f"print('LOADED', sorted(set(sys.modules) & set({HEAVY!r})), code, file=sys.stderr)"
    )
    # -I -S would hide the editable install; what site itself loads is not the command's doing
    before = subprocess.run(
        [sys.executable, "-P", "-c", "import sys; print(sorted(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "--data", str(live.data), *words],
        env=live.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = done.stderr.partition("LOADED ")[2]
    allowed = [name for name in HEAVY if f"'{name}'" in before]
    found = [name for name in HEAVY if f"'{name}'" in loaded and name not in allowed]
    assert found == []
    assert loaded.strip().endswith(" 0")


def _cpu_s(words: list[str], env: dict[str, str]) -> float:
    """CPU seconds of one run, its own children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_and_status_cost_at_most_five_bare_pythons(live: Any) -> None:
    """The goal of docs/performance.md, in rotation so that a busy machine slows all three alike."""
    env = {key: value for key, value in live.env.items() if key != "PYTHONDONTWRITEBYTECODE"}
    assert os.access(sys.executable, os.X_OK)
    variants = {
        "pass": [sys.executable, "-c", "pass"],
        "help": [*CLI, "--help"],
        "status": [*CLI, "--data", str(live.data), "status"],
    }
    for words in variants.values():  # bytecode is written once
        _cpu_s(words, env)
    rounds = [{name: _cpu_s(words, env) for name, words in variants.items()} for _ in range(9)]
    bare = statistics.median(one["pass"] for one in rounds)
    ratios = {name: statistics.median(one[name] for one in rounds) / bare for name in ("help", "status")}
    assert ratios["help"] <= 5, ratios
    assert ratios["status"] <= 5, ratios


def test_the_bridge_imports_only_the_standard_library(live: Any, tmp_path: Any) -> None:
    """Every agent of every user runs one: it must start quickly and stay small."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(live.token("light", "lara"))
    code = (
        "import sys; from cotenant.ui.cli import main; code = main(sys.argv[1:]);"
        "print('LOADED', sorted(name for name in sys.modules if '.' not in name or name.startswith('cotenant.')), file=sys.stderr)"
    )
    words = ["mcp-stdio", "--url", live.url, "--token-file", str(token)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        input='{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},'
        '"clientInfo":{"name":"x","version":"1"}}}\n',
        env=live.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert '"serverInfo"' in done.stdout
    loaded = set(ast.literal_eval(done.stderr.partition("LOADED ")[2]))
    foreign = {name for name in loaded if "." not in name} - sys.stdlib_module_names
    assert not foreign - {"cotenant", "__main__", "sitecustomize", "usercustomize"} - site_modules()
    assert not [name for name in loaded if name.startswith(("cotenant.server", "cotenant.tools", "cotenant.hostd"))]


def site_modules() -> set[str]:
    """What the interpreter's own start loads here, before any line of ours."""
    words = [sys.executable, "-P", "-c", "import sys; print(sorted(sys.modules))"]
    return set(ast.literal_eval(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
