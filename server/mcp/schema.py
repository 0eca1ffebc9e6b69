"""JSON schemas as small as they can be: agents pay for every byte of tools/list.

What pydantic writes is kept in meaning: titles go, `anyOf` with null becomes a list of types, references used once
are put in place, and empty words are dropped. Nothing here knows any tool.
"""

from __future__ import annotations

import json
import re
from typing import Any

_REF = "#/$defs/"
_ANY_LENGTH = 64_000


def compact(schema: dict[str, Any], *, describe: bool) -> dict[str, Any]:
    """`schema` with the same meaning and fewer bytes; descriptions and defaults stay only with `describe`."""
    defs = {name: _shrink(body, describe) for name, body in schema.get("$defs", {}).items()}
    body: dict[str, Any] = _shrink({key: value for key, value in schema.items() if key != "$defs"}, describe)
    while once := [name for name in defs if _count(body, name) + sum(_count(d, name) for d in defs.values()) <= 1]:
        for name in once:
            inner = defs.pop(name)
            body = _inline(body, name, inner)
            defs = {key: _inline(value, name, inner) for key, value in defs.items()}
    if defs:
        short = {name: re.sub(r"Answer$|Spec$", "", name) for name in defs}
        body["$defs"] = {short[name]: _rename(value, short) for name, value in defs.items()}
        body = {key: value if key == "$defs" else _rename(value, short) for key, value in body.items()}
    return body


def names_only(schema: dict[str, Any]) -> dict[str, Any]:
    """The first that is always there, by name: for answers that another tool's schema describes in full."""
    return {"type": "object", "required": schema.get("required", [])[:2]}


def without_limits(node: Any) -> Any:
    """`node` without limits of texts and lists, which are checked all the same."""
    if isinstance(node, list):
        return [without_limits(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: without_limits(value)
        for key, value in node.items()
        if not (key in ("minLength", "maxLength", "maxItems") and isinstance(value, int))
        and not (key == "pattern" and isinstance(value, str))
    }


def without_inner_required(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` where only the outermost object says what is always there."""

    def strip(node: Any) -> Any:
        if isinstance(node, list):
            return [strip(item) for item in node]
        if not isinstance(node, dict):
            return node
        return {key: strip(value) for key, value in node.items() if not (key == "required" and isinstance(value, list))}

    out: dict[str, Any] = strip(schema)
    return {**out, "required": schema["required"]} if schema.get("required") else out


def shallow(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` of an answer whose inner objects name what they hold, but not what objects within those hold."""
    defs = schema.get("$defs", {})

    def resolved(node: dict[str, Any]) -> dict[str, Any]:
        name = str(node.get("$ref", "")).rpartition("/")[2]
        return defs.get(name, node) if name else node

    def bare(node: dict[str, Any]) -> dict[str, Any]:
        """A property of an inner object: objects in it only say that they are objects."""
        here = resolved(node)
        if "anyOf" in here:
            kinds = [bare(option).get("type") for option in here["anyOf"]]
            return {"type": kinds} if "object" in kinds or "array" in kinds else node
        if "properties" in here:
            return {"type": here["type"]}
        if "items" in here and bare(here["items"]) != here["items"]:
            return {"type": here["type"]}
        return node

    def inner(node: dict[str, Any]) -> dict[str, Any]:
        here = resolved(node)
        if "anyOf" in here:
            return {**here, "anyOf": [inner(option) for option in here["anyOf"]]}
        if "properties" in here:
            return {**here, "properties": {name: bare(value) for name, value in here["properties"].items()}}
        if "items" in here:
            return {**here, "items": node["items"] if "$ref" in node.get("items", {}) else inner(here["items"])}
        return node

    out = {**schema, "properties": {name: inner(value) for name, value in schema.get("properties", {}).items()}}
    if "$defs" in out:
        used = json.dumps(out["properties"])
        out["$defs"] = {name: inner(value) for name, value in defs.items() if f"#/$defs/{name}" in used}
        if not out["$defs"]:
            del out["$defs"]
    return out


def _shrink(node: Any, describe: bool, *, names: bool = False) -> Any:
    """One level of a schema; `names` says that the keys of `node` are names of properties, not words of JSON Schema."""
    if isinstance(node, list):
        return [_shrink(item, describe) for item in node]
    if not isinstance(node, dict):
        return node
    if names:
        return {key: _shrink(value, describe) for key, value in node.items()}
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key == "title" or (key in ("description", "default") and not describe):
            continue
        if key == "default" and value in (None, "", [], {}):
            continue  # the same as leaving it out
        if (key == "additionalProperties" and value is True) or key == "propertyNames":
            continue
        if key == "maxLength" and value >= _ANY_LENGTH:
            continue  # the limit of every text: said once, in the documentation
        out[key] = (
            value
            if key in ("default", "enum", "const", "required")
            else _shrink(value, describe, names=key in ("properties", "$defs"))
        )
    return _one_type(out)


def _one_type(node: dict[str, Any]) -> dict[str, Any]:
    """`anyOf: [{type: string, …}, {type: null}]` as `type: [string, null], …`."""
    options = node.get("anyOf")
    if not isinstance(options, list) or len(options) != 2:
        return node
    rest = [item for item in options if item != {"type": "null"}]
    if len(rest) != 1 or not isinstance(rest[0].get("type"), str) or "enum" in rest[0] or "const" in rest[0]:
        return node
    merged = {key: value for key, value in node.items() if key != "anyOf"}
    return {**rest[0], "type": [rest[0]["type"], "null"], **merged}


def _count(node: Any, name: str) -> int:
    if isinstance(node, list):
        return sum(_count(item, name) for item in node)
    if isinstance(node, dict):
        return (node.get("$ref") == _REF + name) + sum(_count(item, name) for item in node.values())
    return 0


def _inline(node: Any, name: str, inner: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, name, inner) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("$ref") == _REF + name:
        return {**inner, **{key: value for key, value in node.items() if key != "$ref"}}
    return {key: _inline(value, name, inner) for key, value in node.items()}


def _rename(node: Any, short: dict[str, str]) -> Any:
    if isinstance(node, list):
        return [_rename(item, short) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: _rename(value, short) for key, value in node.items()}
    if isinstance(ref := node.get("$ref"), str):
        out["$ref"] = _REF + short.get(ref.removeprefix(_REF), ref.removeprefix(_REF))
    return out
