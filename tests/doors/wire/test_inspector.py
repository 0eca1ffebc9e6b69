"""The MCP Inspector's command line, of a pinned version: both eras, over HTTP and through `cotenant mcp-stdio`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

INSPECTOR = "@modelcontextprotocol/inspector/clients/launcher/build/index.js"
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(params=["http", "bridge"])
def ask(request: pytest.FixtureRequest, server: Any, tokens: dict[str, str], tmp_path: Path) -> Ask:
    """Runs one method in an era and returns what it printed, with the exit code under `exit`."""
    home = tmp_path / "home"
    home.mkdir()
    if request.param == "http":
        target = [f"{server.url}/mcp", "--header", f"Authorization: Bearer {tokens['alice']}", "--transport", "http"]
    else:
        file = tmp_path / "token"
        file.touch(mode=0o600)
        file.write_text(tokens["alice"])
        target = [sys.executable, "-m", "cotenant.ui.cli", "mcp-stdio", "--url", server.url, "--token-file", str(file)]

    def run(era: str, method: str, *more: str) -> dict[str, Any]:
        options = ["--method", method, "--protocol-era", era, "--format", "json", "--quiet", *more]
        if request.param == "http":
            command = foreign.command(INSPECTOR, "--cli", *target, *options)
        else:
            # What belongs to the program to be started stands behind the dashes.
            command = foreign.command(INSPECTOR, "--cli", *options, "--", *target)
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=90, cwd=tmp_path,
            env=foreign.environment(HOME=str(home)),
        )  # fmt: skip
        text = done.stdout.strip() or done.stderr.strip()
        assert text.startswith("{"), (done.returncode, done.stdout[-1500:], done.stderr[-1500:])
        told: dict[str, Any] = json.loads(text)
        return {"exit": done.returncode, **told}

    return run


@pytest.mark.parametrize("inspected_as", ["legacy", "modern"])
def test_the_inspector_finds_everything_in_order(ask: Ask, inspected_as: str) -> None:
    listed = ask(inspected_as, "tools/list", "--strict")
    assert listed["exit"] == 0, "no schema that some client could not take"
    tools = listed.get("tools") or listed["result"]["tools"]
    assert {"quota_status", "submit_job"} <= {tool["name"] for tool in tools}

    def result(*options: str) -> dict[str, Any]:
        told = ask(inspected_as, *options)
        assert told["exit"] == 0, told
        inner: dict[str, Any] = told.get("result", told)
        return inner

    quota = result("tools/call", "--tool-name", "quota_status", "--tool-args-json", "{}")
    assert quota["structuredContent"]["me"]["name"] == "alice-agent"
    job = result("tools/call", "--tool-name", "submit_job", "--tool-args-json", '{"command": "sleep 15", "gpus": 0}')
    job_id = job["structuredContent"]["job_id"]
    # It declares tasks: in 2026-07-28 this one is a task that it polls, and the answer is the same.
    wait = json.dumps({"job_id": job_id, "max_wait_s": 1.5})
    waited = result("tools/call", "--tool-name", "wait_job", "--tool-args-json", wait)["structuredContent"]
    assert waited["done"] is False and waited["job_id"] == job_id and waited["waited_s"] >= 1.4
    assert "cotenant://gpus" in json.dumps(result("resources/list"))
    assert "Simulated" in json.dumps(result("resources/read", "--uri", "cotenant://gpus"))
    assert "share_politely" in json.dumps(result("prompts/list"))
    assert "quota_status" in json.dumps(result("prompts/get", "--prompt-name", "share_politely"))
    refused = ask(inspected_as, "tools/call", "--tool-name", "get_job", "--tool-args-json", '{"job_id": "job_none"}')
    assert refused["exit"] != 0 and "no_such_job" in json.dumps(refused)
