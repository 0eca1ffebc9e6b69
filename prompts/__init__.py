"""MCP prompts: one Markdown file each. A head between two lines of three dashes, then the text itself.

The head has `title`, `description` and, indented by nothing, one `argument NAME: what it is` line per argument;
`$NAME` in the text is replaced by what the caller gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One prompt as its file has it."""

    name: str
    title: str
    description: str
    arguments: dict[str, str]
    text: str


def load(name: str, source: str) -> Prompt:
    """The prompt in a file's text.

    Raises:
        ValueError: the head is missing or has an unknown line.
    """
    _, head, body = source.split("---\n", 2)
    fields: dict[str, str] = {}
    arguments: dict[str, str] = {}
    for line in head.strip().splitlines():
        key, _, value = line.partition(":")
        if key.startswith("argument "):
            arguments[key.removeprefix("argument ").strip()] = value.strip()
        elif key in ("title", "description"):
            fields[key] = value.strip()
        else:
            raise ValueError(f"{name}.md: unknown line in the head: {line}")
    return Prompt(name, fields["title"], fields["description"], arguments, body.strip())


class Prompts:
    """All prompts of a folder, by default this one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(__file__).parent

    @cached_property
    def _all(self) -> dict[str, Prompt]:
        files = sorted(self._folder.glob("*.md"))
        return {file.stem: load(file.stem, file.read_text(encoding="utf-8")) for file in files}

    def listing(self) -> list[dict[str, Any]]:
        """Entries of prompts/list."""
        return [
            {
                "name": item.name,
                "title": item.title,
                "description": item.description,
                "arguments": [
                    {"name": name, "description": what, "required": False} for name, what in item.arguments.items()
                ],
            }
            for item in self._all.values()
        ]

    def find(self, name: str, arguments: Mapping[str, str]) -> str | None:
        """The text of a prompt with its arguments put in, or None. Arguments it does not have are ignored."""
        prompt = self._all.get(name)
        if prompt is None:
            return None
        given = {key: arguments.get(key, "") for key in prompt.arguments}
        return Template(prompt.text).safe_substitute(given)
