"""The page docs/tools.md, made of what clients are told of each tool.

.venv/bin/python -m cotenant.tools.reference > docs/tools.md
"""

from __future__ import annotations

import json
import sys
from typing import Any

from cotenant import tools
from cotenant.server.mcp.tool import Tool

_HEAD = """\
# The tools

Made from the code by `python -m cotenant.tools.reference`; do not edit by hand. What holds for all tools (answers,
refusals, waiting, being asked) stands in [mcp.md](mcp.md).

Arguments without a default have to be given. Unknown arguments are refused with the closest known name. A text takes at
most 64,000 characters where nothing less is said.

| tool | what for | scope | toolsets |
|---|---|---|---|
"""


def page() -> str:
    """The whole page, in the order in which clients are told of the tools."""
    rows = [
        f"| [`{item.name}`](#{item.name}) | {item.title} | {item.scope} | {'core, full' if item.core else 'full'} |"
        for item in tools.ALL
    ]
    return _HEAD + "\n".join(rows) + "\n\n" + "\n".join(_section(item) for item in tools.ALL)


def _section(item: Tool) -> str:
    lines = [f"## {item.name}", "", f"*{item.title}.* {_effects(item)}", "", item.description, ""]
    schema = item.input_schema
    if schema["properties"]:
        lines += ["| argument | type | default | meaning |", "|---|---|---|---|"]
        for name, one in schema["properties"].items():
            default = "" if name in schema.get("required", ()) else f"`{_default(item, name)}`"
            meaning = _cell(one.get("description", ""))
            lines.append(f"| `{name}` | {_cell(_type(one, schema))} | {default} | {meaning} |")
        lines.append("")
    else:
        lines += ["No arguments.", ""]
    lines += [f"Answer: {_answer(item)}", ""]
    return "\n".join(lines)


def _default(item: Tool, name: str) -> str:
    """As JSON; schemas leave empty ones out."""
    field = item.arguments.model_fields[name]
    return json.dumps(field.get_default(call_default_factory=True), default=list)


def _effects(item: Tool) -> str:
    if item.read_only:
        return "Only reads."
    said = ["Writes."]
    if item.destructive:
        said.append("May destroy work.")
    if item.idempotent:
        said.append("Safe to repeat.")
    return " ".join(said)


def _answer(item: Tool) -> str:
    return _names(list(item.whole_output_schema.get("properties", {}))) + "."


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _type(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """A schema in a few words: `integer 1 to 64`, `text of at most 64`, `list of text`."""
    if ref := schema.get("$ref"):
        return _type(root["$defs"][ref.rpartition("/")[2]], root)
    if options := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(_type(one, root) for one in options if one != {"type": "null"}))
    if words := schema.get("enum"):
        return ", ".join(f"`{word}`" for word in words if word is not None)
    if "const" in schema:
        return f"`{schema['const']}`"
    kinds = schema.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(_one(kind, schema, root) for kind in kinds if kind != "null")


def _one(kind: str, schema: dict[str, Any], root: dict[str, Any]) -> str:
    if kind == "string":
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        limit = f" of {least} to {most}" if least and most else f" of at most {most}" if most else ""
        return f"text{limit}"
    if kind == "array":
        inner = schema.get("items")
        return f"list of {_type(inner, root)}" if isinstance(inner, dict) else "list"
    if kind == "object":
        fields = schema.get("properties")
        return f"object with {', '.join(fields)}" if fields else "object"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    if low is not None and "exclusiveMinimum" in schema:
        low = f"above {low}"
    high = schema.get("maximum")
    return f"{kind} {low} to {high}" if low is not None and high is not None else kind


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
