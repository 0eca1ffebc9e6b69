"""The official conformance suite, at two pinned versions, against a fixture server of the same modules and our own.

The suite calls tools, prompts and resources by names of its own. The fixture server has them, so everything must pass
there. On our own server passes whatever needs no such name; what does need one is listed here, with the reason.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import foreign
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent
SUITE = "@modelcontextprotocol/conformance/dist/index.js"
STABLE = "conformance-stable/dist/index.js"

_NAMED = "calls tools, prompts or resources by names that only the fixture server has"
#: Scenario -> why our own server cannot pass it. Everything else must.
NOT_OURS: dict[str, str] = {
    **dict.fromkeys(
        (
            "tools-call-simple-text", "tools-call-image", "tools-call-audio", "tools-call-embedded-resource",
            "tools-call-mixed-content", "tools-call-error", "tools-call-with-progress", "tools-call-elicitation",
            "json-schema-2020-12", "elicitation-sep1034-defaults", "elicitation-sep1330-enums", "resources-read-text",
            "resources-read-binary", "resources-templates-read", "resources-subscribe", "resources-unsubscribe",
            "completion-complete", "prompts-get-simple", "prompts-get-with-args", "prompts-get-embedded-resource", "prompts-get-with-image",
            "tasks-lifecycle", "tasks-capability-negotiation", "tasks-wire-fields", "tasks-request-state-removal",
            "tasks-mrtr-input", "tasks-request-headers", "tasks-dispatch-and-envelope", "tasks-required-task-error",
            "tasks-mrtr-composition", "input-required-result-basic-elicitation", "input-required-result-basic-list-roots",
            "input-required-result-request-state", "input-required-result-multiple-input-requests",
            "input-required-result-multi-round", "input-required-result-non-tool-request",
            "input-required-result-result-type", "input-required-result-tampered-state",
            "input-required-result-capability-check",
        ),
        _NAMED,
    ),
    "logging-set-level": "Cotenant sends no log messages to clients, so it does not offer to filter them",
    "tools-call-with-logging": "the same",
    "tools-call-sampling": "Cotenant never asks a client's model",
    "input-required-result-basic-sampling": "the same",
    "http-custom-header-server-validation": "no argument of Cotenant's tools is repeated in a header",
}  # fmt: skip
#: Within a scenario that passes otherwise: checks that call a diagnostic tool by name.
NOT_OURS_WITHIN = {
    "server-stateless": {
        "sep-2575-server-rejects-undeclared-capability",
        "sep-2575-missing-capability-http-400",
        "sep-2575-http-server-no-independent-requests-on-stream",
        "sep-2575-server-no-log-without-loglevel",
    }
}


@contextmanager
def serving(script: str, argument: str, log: Path) -> Iterator[str]:
    """The address of a server that runs while inside, and ends in good order."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, HERE / script, argument], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            line = next((item for item in process.stdout if item.startswith("ready ")), "")
            assert line, log.read_text()
            yield line.split()[1]
        finally:
            process.terminate()
            code = process.wait(20)
            process.stdout.close()
    told = log.read_text()
    assert code == 0 and "Traceback" not in told, told[-3000:]


def run(url: str, results: Path, program: str, *options: str) -> dict[str, list[dict[str, Any]]]:
    """Scenario -> its checks."""
    command = foreign.command(program, "server", "--url", f"{url}/mcp", *options, "-o", str(results))
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=foreign.environment(), timeout=300)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(results.glob("server-*/checks.json")):
        name = re.sub(r"-\d{4}-\d\d-\d\dT.*", "", file.parent.name.removeprefix("server-"))
        found[name] = json.loads(file.read_text())
    assert found, done.stdout + done.stderr
    return found


def failures(found: dict[str, list[dict[str, Any]]]) -> dict[str, set[str]]:
    """Scenario -> ids of the checks that failed."""
    failed = {name: {item["id"] for item in checks if item["status"] == "FAILURE"} for name, checks in found.items()}
    return {name: ids for name, ids in failed.items() if ids}


@pytest.mark.parametrize(
    ("program", "options", "scenarios", "checks"),
    [
        (SUITE, ("--suite", "all"), 60, 200),
        (SUITE, ("--requirements", "2025-11-25"), 30, 70),
        (SUITE, ("--suite", "active", "--spec-version", "2025-06-18"), 25, 50),
        (STABLE, (), 28, 35),
    ],
    ids=["all", "2025-11-25", "2025-06-18", "stable"],
)
def test_everything_passes_on_the_fixture_server(
    tmp_path: Path, program: str, options: tuple[str, ...], scenarios: int, checks: int
) -> None:
    with serving("fixture_server.py", "0", tmp_path / "log") as url:
        found = run(url, tmp_path / "results", program, *options)
    passed = [item for checks in found.values() for item in checks if item["status"] == "SUCCESS"]
    assert len(found) >= scenarios and len(passed) >= checks, "the suite has looked at as much as it did"
    assert failures(found) == {}, {
        name: [item for item in found[name] if item["status"] == "FAILURE"] for name in failures(found)
    }


@pytest.mark.parametrize(
    ("options", "scenarios"),
    [(("--suite", "all"), 20), (("--requirements", "2025-11-25"), 8)],
    ids=["all", "2025-11-25"],
)
def test_whatever_needs_no_fixture_passes_on_our_own_server(
    tmp_path: Path, options: tuple[str, ...], scenarios: int
) -> None:
    with serving("own_server.py", str(tmp_path / "data"), tmp_path / "log") as url:
        found = run(url, tmp_path / "results", SUITE, *options)
    failed = failures(found)
    unexpected = {
        name: ids - NOT_OURS_WITHIN.get(name, set())
        for name, ids in failed.items()
        if name not in NOT_OURS and ids - NOT_OURS_WITHIN.get(name, set())
    }
    assert not unexpected, {name: [c for c in found[name] if c["id"] in ids] for name, ids in unexpected.items()}
    surplus = (NOT_OURS.keys() & found.keys()) - failed.keys()
    assert not surplus, f"these pass now, so the list of what cannot is too long: {sorted(surplus)}"
    assert len(found.keys() - NOT_OURS.keys()) >= scenarios
