"""The MCP clients that Cotenant knows: where each keeps its servers, in which form, and how much it can take.

Checked against each one's documentation in 2026; what a client limits was read there or in its issues, not tried here.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Entry = dict[str, Any]

TOKEN_VARIABLE = "COTENANT_TOKEN"
_INPUT = "cotenant-token"


class Known:
    """One client. `table` is the key under which its file names servers, `tools` the toolset that suits it."""

    __slots__ = ("form", "limits", "name", "other", "reference", "table", "title", "tools", "where")

    def __init__(
        self, name: str, title: str, *, form: str, table: str, where: Callable[[bool], str | None], reference: str,
        tools: str = "full", limits: dict[str, int] | None = None, other: str = "",
    ) -> None:  # fmt: skip
        self.name = name
        self.title = title
        self.form = form  # json or toml
        self.table = table
        #: where(project) is the file to edit, or None where one should not.
        self.where = where
        #: How its file refers to a variable of the environment, with % for the name; empty where it cannot.
        self.reference = reference
        self.tools = tools
        #: tools: how many it takes of all its servers together; name: characters of server and tool name together.
        self.limits = limits or {}
        #: What to say where no file is to be edited.
        self.other = other


def _home(*parts: str) -> str:
    return os.path.join(os.path.expanduser("~"), *parts)


def _codex(project: bool) -> str:
    if project:
        return os.path.join(os.getcwd(), ".codex", "config.toml")
    return os.path.join(os.environ.get("CODEX_HOME") or _home(".codex"), "config.toml")


KNOWN = {
    known.name: known
    for known in (
        Known(
            "claude-code", "Claude Code", form="json", table="mcpServers", reference="${%}",
            where=lambda project: os.path.join(os.getcwd(), ".mcp.json") if project else None,
            limits={"name": 64, "description": 2048},
            other="Claude Code rewrites its own user file while it runs: use its command `claude mcp add-json`, shown above.",
        ),
        Known(
            "codex", "Codex", form="toml", table="mcp_servers", reference="", where=_codex, limits={"name": 64},
        ),
        Known(
            "cursor", "Cursor", form="json", table="mcpServers", reference="${env:%}", tools="core",
            where=lambda project: os.path.join(os.getcwd(), ".cursor", "mcp.json") if project else _home(".cursor", "mcp.json"),
            limits={"tools": 40, "name": 60},
        ),
        Known(
            "vscode", "VS Code", form="json", table="servers", reference=f"${{input:{_INPUT}}}",
            where=lambda project: os.path.join(os.getcwd(), ".vscode", "mcp.json") if project else None,
            limits={"tools": 128, "name": 64},
            other="Where VS Code keeps a user's file depends on its profile: run its command `MCP: Open User Configuration`.",
        ),
        Known(
            "generic", "another client", form="json", table="mcpServers", reference="${%}", where=lambda project: None,
            other="Give the client's file with --file.",
        ),
    )
}  # fmt: skip

#: Clients whose servers are usually a project's own; the others' are the user's.
PROJECT_FIRST = frozenset({"claude-code", "vscode"})


def over_http(known: Known, url: str, tools: str, variable: str) -> Entry:
    """The entry for a client that connects by itself; the token stays in its environment (VS Code asks for it)."""
    address = f"{url}/mcp{'?tools=core' if tools == 'core' else ''}"
    if known.name == "codex":
        return {"url": address, "bearer_token_env_var": variable, "tool_timeout_sec": 120}
    header = {"Authorization": f"Bearer {known.reference.replace('%', variable)}"}
    kind = {} if known.name == "cursor" else {"type": "http"}
    return {**kind, "url": address, "headers": header}


def over_stdio(known: Known, command: list[str], variable: str | None) -> Entry:
    """The entry for a client that starts `command`; with `variable` the token is handed on from its environment."""
    entry: Entry = {} if known.name == "codex" else {"type": "stdio"}
    entry |= {"command": command[0], "args": command[1:]}
    if known.name == "codex":
        if variable is not None:
            entry["env_vars"] = [variable]  # it hands on nothing that is not named
        entry["tool_timeout_sec"] = 120
    elif variable is not None:
        entry["env"] = {TOKEN_VARIABLE: known.reference.replace("%", variable)}
    return entry


def inputs(known: Known, entry: Entry) -> list[Entry]:
    """What VS Code has to ask for, where the entry refers to it."""
    if known.name != "vscode" or _INPUT not in str(entry):
        return []
    return [{"type": "promptString", "id": _INPUT, "description": "Cotenant token", "password": True}]
