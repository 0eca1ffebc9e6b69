"""`cotenant mcp-config`: what is printed is what each client takes, and --write leaves the rest of its file alone."""

from __future__ import annotations

import json
import os
import shlex
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest

CLIENTS = ("claude-code", "codex", "cursor", "vscode", "generic")
URL = "http://gpubox:8425"


class Home:
    """A home directory with a project in it, and the command run there."""

    def __init__(self, live: Any, root: Path) -> None:
        self.root = root
        self.project = root / "project"
        self.project.mkdir()
        self._live = live

    def __call__(self, *words: str, code: int | None = 0, **env: str) -> Any:
        env = {"HOME": str(self.root), "XDG_CONFIG_HOME": str(self.root / ".config"), "PWD": str(self.project), **env}
        here = os.getcwd()
        os.chdir(self.project)
        try:
            return self._live("mcp-config", *words, code=code, **env)
        finally:
            os.chdir(here)

    def read(self, name: str) -> str:
        return (self.root / name).read_text()


@pytest.fixture
def home(live: Any, tmp_path: Path) -> Home:
    return Home(live, tmp_path)


def servers(client: str, text: str) -> dict[str, Any]:
    """The server's entry in what is pasted."""
    parsed: dict[str, Any] = tomllib.loads(text) if client == "codex" else json.loads(text)
    table = {"codex": "mcp_servers", "vscode": "servers"}.get(client, "mcpServers")
    entry: dict[str, Any] = parsed[table]["cotenant"]
    return entry


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_that_connects_itself(home: Home, client: str) -> None:
    done = home(client, "--url", URL)
    entry = servers(client, done.out)
    tools = "?tools=core" if client == "cursor" else ""
    assert entry["url"] == f"{URL}/mcp{tools}"
    told = {
        "claude-code": "Bearer ${COTENANT_TOKEN}", "cursor": "Bearer ${env:COTENANT_TOKEN}", "generic": "Bearer ${COTENANT_TOKEN}",
        "vscode": "Bearer ${input:cotenant-token}",
    }.get(client)  # fmt: skip
    if told is None:
        assert entry["bearer_token_env_var"] == "COTENANT_TOKEN" and "headers" not in entry
    else:
        assert entry["headers"] == {"Authorization": told}
    if client == "vscode":
        assert json.loads(done.out)["inputs"] == [
            {"type": "promptString", "id": "cotenant-token", "description": "Cotenant token", "password": True}
        ]
    assert "cotenant token create" in done.err


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_that_starts_the_bridge(home: Home, client: str) -> None:
    entry = servers(client, home(client, "--stdio", "--url", URL, "--token-file", "/etc/agent.token").out)
    words = ["mcp-stdio", "--url", URL, "--token-file", "/etc/agent.token"]
    assert entry["args"] == [*words, *(["--tools", "core"] if client == "cursor" else [])]
    assert os.path.isabs(entry["command"]) and os.access(entry["command"], os.X_OK)
    assert "env" not in entry
    named = servers(client, home(client, "--stdio", "--token-env", "MY_TOKEN", "--tools", "full").out)
    assert "--token-file" not in named["args"] and "core" not in named["args"]
    handed = named.get("env_vars") or list(named["env"].values())
    assert "MY_TOKEN" in str(handed) or client == "vscode"


@pytest.mark.parametrize("client", ["claude-code", "codex", "cursor"])
def test_what_is_pasted_works(home: Home, live: Any, client: str, Frames: Any) -> None:
    """The printed command, started as the client would, answers."""
    done = home(client, "--stdio", "--create-token", f"pasted-{client}")
    path = home.root / ".config" / "cotenant" / f"{client}.token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text().strip() not in done.out + done.err
    entry = servers(client, done.out)
    assert Frames([entry["command"], *entry["args"]])["me"]["name"] == f"pasted-{client}"
    assert os.getcwd() in live("agents").out


def test_the_users_own_of_claude_code_is_a_command(home: Home) -> None:
    words = shlex.split(home("claude-code", "--scope", "user", "--url", URL).out)
    assert words[:6] == ["claude", "mcp", "add-json", "--scope", "user", "cotenant"]
    assert json.loads(words[6])["url"] == f"{URL}/mcp"
    done = home("claude-code", "--scope", "user", "--write", "--yes", code=2)
    assert "claude mcp add-json" in done.out and not (home.root / ".claude.json").exists()


@pytest.mark.parametrize(
    ("client", "file"),
    [
        ("claude-code", "project/.mcp.json"),
        ("codex", ".codex/config.toml"),
        ("cursor", ".cursor/mcp.json"),
        ("vscode", "project/.vscode/mcp.json"),
    ],
)
def test_write_shows_the_difference_and_keeps_what_was(home: Home, client: str, file: str) -> None:
    done = home(client, "--write", "--yes", "--url", URL)
    first = home.read(file)
    assert servers(client, first)["url"].startswith(URL) and "+" in done.out and file.split("/")[-1] in done.out
    assert home(client, "--write", "--url", URL).out == ""  # nothing to do, so nothing to ask
    home(client, "--write", "--yes", "--url", "http://other:1", "--name", "second")
    text = home.read(file)
    assert "http://other:1" in text and URL in text
    kept = list((home.root / file).parent.glob("*.before-cotenant-*"))
    assert [path.read_text() for path in kept] == [first]
    assert not list((home.root / file).parent.glob("*.cotenant-new"))


def test_write_asks_and_is_not_done_where_nobody_can_be_asked(home: Home) -> None:
    done = home("cursor", "--write", code=2)
    assert "--yes" in done.err and not (home.root / ".cursor").exists()


def test_write_asks_on_a_terminal(terminal: Any, tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    words = ("mcp-config", "cursor", "--write", "--file", str(file))
    for answer, code in (("n", 1), ("y", 0)):
        asked = terminal(*words)
        asked.expect("[y/N]")
        assert '"cotenant"' in asked.seen  # the difference is shown before
        asked.type(f"{answer}\n")
        assert asked.end() == code
        assert file.exists() == (answer == "y")


def test_where_a_users_file_of_vscode_is_can_be_found(home: Home) -> None:
    assert "MCP: Open User Configuration" in home("vscode", "--scope", "user").err


@pytest.mark.parametrize("client", ["cursor", "generic"])
def test_what_is_not_written_makes_no_token(home: Home, live: Any, client: str) -> None:
    name = f"unwritten-{client}"
    home(client, "--stdio", "--create-token", name, "--write", code=2)
    assert not (home.root / ".config").exists()
    assert name not in live("token", "list").out


def test_a_token_is_made_once_and_used_in_the_next_project(home: Home, live: Any) -> None:
    words = ("claude-code", "--stdio", "--write", "--yes")
    home(*words, "--create-token", "two-projects")
    token = home.read(".config/cotenant/claude-code.token")
    (home.project / ".mcp.json").unlink()  # as the next project: it has no such file yet
    done = home(*words, "--create-token", "two-projects", code=2)
    assert "Leave out --create-token" in done.err and not (home.project / ".mcp.json").exists()
    home(*words)
    assert home.read(".config/cotenant/claude-code.token") == token
    assert servers("claude-code", home.read("project/.mcp.json"))["args"][-1].endswith("claude-code.token")


def test_the_difference_shows_the_name_of_a_variable_and_hides_a_secret(home: Home) -> None:
    file = home.root / ".codex" / "config.toml"
    file.parent.mkdir()
    file.write_text('[mcp_servers.other]\nurl = "http://x"\nenv = { API_TOKEN = "very-secret" }\n')
    done = home("codex", "--write", "--yes")
    assert 'bearer_token_env_var = "COTENANT_TOKEN"' in done.out
    assert "very-secret" not in done.out + done.err


def test_write_leaves_a_file_with_comments_alone(home: Home) -> None:
    file = home.project / ".vscode" / "mcp.json"
    file.parent.mkdir()
    file.write_text('{\n  // mine\n  "servers": {}\n}\n')
    done = home("vscode", "--write", "--yes", code=1)
    assert file.read_text() == '{\n  // mine\n  "servers": {}\n}\n'
    assert "comments" in done.err and "by hand" in done.err and '"cotenant"' in done.out


def test_write_follows_a_link_and_keeps_the_mode(home: Home) -> None:
    real = home.root / "dotfiles.json"
    real.write_text('{"mcpServers": {"old": {"env": {"API_KEY": "very-secret"}}}}')
    real.chmod(0o600)
    (home.root / ".cursor").mkdir()
    (home.root / ".cursor" / "mcp.json").symlink_to(real)
    done = home("cursor", "--write", "--yes")
    assert (home.root / ".cursor" / "mcp.json").is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o600
    assert json.loads(real.read_text())["mcpServers"]["old"] == {"env": {"API_KEY": "very-secret"}}
    assert "very-secret" not in done.out + done.err


@pytest.mark.parametrize(
    "words",
    [
        ["codex", "--token-file", "x"],
        ["codex", "--create-token", "x"],
        ["codex", "--name", "a.b"],
        ["nobody"],
        ["generic", "--write", "--yes"],
        ["codex", "--url", "http://u:p@h"],
    ],
)
def test_what_cannot_be_meant_is_said(home: Home, words: list[str]) -> None:
    assert home(*words, code=2).err


def test_a_token_file_that_others_can_read_is_refused(home: Home) -> None:
    path = home.root / "t"
    path.write_text("ctn_x")
    path.chmod(0o644)
    assert "chmod 600" in home("codex", "--stdio", "--token-file", str(path), code=1).err
