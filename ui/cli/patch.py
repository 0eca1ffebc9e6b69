"""Changes to other programs' settings files, as small as they can be: only the bytes of one entry change.

A file that cannot be read with certainty (JSON with comments, a key twice, an entry written another way) is refused
and left alone. After every change the new text is read again and compared with what it should say.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]

from cotenant.ui.cli.problems import Problem

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class Unreadable(Problem):
    """The file is left alone; the text says why."""


# ---- JSON ----------------------------------------------------------------------------------------


def json_with(text: str, table: str, name: str, entry: dict[str, Any], inputs: Sequence[dict[str, Any]] = ()) -> str:
    """`text` with `entry` as `table`.`name`, and with `inputs` among its inputs where their ids are not there yet.

    Raises:
        Unreadable: it is not plain JSON, or what stands in the way is no object.
    """
    wanted = _loads(text) if text.strip() else {}
    if not isinstance(wanted, dict) or not isinstance(wanted.setdefault(table, {}), dict):
        raise Unreadable(f"It has no object {table} where one should be.")
    wanted[table][name] = entry
    changed = _put(text if text.strip() else "{}\n", [table, name], entry)
    if inputs:
        there = wanted.setdefault("inputs", [])
        if not isinstance(there, list):
            raise Unreadable("Its inputs are no list.")
        known = [item.get("id") for item in there if isinstance(item, dict)]
        there += [item for item in inputs if item["id"] not in known]
        changed = _put(changed, ["inputs"], there) if len(there) != len(known) else changed
    if _loads(changed) != wanted:
        raise Unreadable("It cannot be changed with certainty.")
    return changed


def _loads(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except _Twice as exc:
        raise Unreadable(f"It has the key {exc.args[0]!r} twice in one object.") from None
    except (ValueError, RecursionError):
        commented = re.search(r"(^|\s)//|/\*|,\s*[}\]]", text) is not None
        raise Unreadable(
            "It has comments or commas that plain JSON does not have." if commented else "It is not JSON."
        ) from None


class _Twice(Exception):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


def _put(text: str, path: list[str], value: Any) -> str:
    """`text` with `value` at `path`; everything outside of it stays as it is."""
    unit = _unit(text)
    start = _blank(text, 0)
    for depth, key in enumerate(path):
        members, end = _members(text, start)
        found = next((member for member in members if member[0] == key), None)
        if found is None:
            for missing in reversed(path[depth + 1 :]):
                value = {missing: value}
            shown = f"{json.dumps(key)}: {_shown(value, unit, depth + 1)}"
            inner = f"\n{unit * (depth + 1)}{shown}"
            if members:
                at = members[-1][2]
                return f"{text[:at]},{inner}{text[at:]}"
            return f"{text[: start + 1]}{inner}\n{unit * depth}{text[end:]}"
        _, begin, after = found
        if depth == len(path) - 1:
            if json.loads(text[begin:after]) == value:
                return text
            return text[:begin] + _shown(value, unit, depth + 1) + text[after:]
        if text[begin] != "{":
            raise Unreadable(f"Its {key} is no object.")
        start = begin
    raise AssertionError("a path has at least one key")


def _members(text: str, start: int) -> tuple[list[tuple[str, int, int]], int]:
    """((key, begin of the value, end of the value) …, the place of the closing brace) of the object at `start`."""
    decoder = json.JSONDecoder()
    found = []
    i = _blank(text, start + 1)
    while text[i] != "}":
        key, i = scanstring(text, i + 1, True)
        begin = _blank(text, _blank(text, i) + 1)
        _, i = decoder.raw_decode(text, begin)
        found.append((key, begin, i))
        i = _blank(text, i)
        if text[i] == ",":
            i = _blank(text, i + 1)
    return found, i


def _blank(text: str, i: int) -> int:
    while text[i] in " \t\r\n":
        i += 1
    return i


def _unit(text: str) -> str:
    found = re.search(r"\n([ \t]+)\"", text)
    return found[1] if found else "  "


def _shown(value: Any, unit: str, depth: int) -> str:
    return json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", f"\n{unit * depth}")


# ---- TOML ----------------------------------------------------------------------------------------


def toml_with(text: str, table: str, name: str, entry: dict[str, Any]) -> str:
    """`text` with `entry` as the table [`table`.`name`]; its sub-tables, which were the old entry's, go.

    Raises:
        Unreadable: it is not TOML, or the entry is there in another form than a table of its own.
    """
    wanted = _toml(text)
    servers = wanted.setdefault(table, {})
    if not isinstance(servers, dict):
        raise Unreadable(f"Its {table} is no table.")
    servers[name] = entry
    end = "\r" if "\r\n" in text else ""
    block = [f"[{table}.{_key(name)}]", *(f"{key} = {_toml_value(value)}" for key, value in entry.items())]
    block = [line + end for line in block]
    lines = text.removesuffix("\n").split("\n") if text else []
    own = _lines_of(lines, table, name)
    kept = [line for i, line in enumerate(lines) if i not in own]
    if own:
        place = min(own)
        kept[place:place] = block
    else:
        kept += [*([end] if kept and kept[-1].strip() else []), *block]
    changed = "\n".join(kept) + "\n"
    if _toml(changed) != wanted:
        raise Unreadable(f"It has {table}.{name} in a form that cannot be changed with certainty.")
    return changed


def _lines_of(lines: list[str], table: str, name: str) -> set[int]:
    """The numbers of the lines that are the entry's: its table and sub-tables, each up to what stands above the next."""
    key = rf"(?:{re.escape(name)}|\"{re.escape(name)}\"|'{re.escape(name)}')"
    head = re.compile(rf"\s*\[\s*{re.escape(table)}\s*\.\s*{key}\s*(?:\.[^\]]*)?\]\s*(?:#.*)?$")
    own: set[int] = set()
    begin: int | None = None
    for i, line in enumerate([*lines, "["]):
        if begin is not None and line.lstrip().startswith("["):
            last = i
            # Comments and blank lines right above a table are that table's, not the one's before it.
            while last > begin + 1 and (not lines[last - 1].strip() or lines[last - 1].lstrip().startswith("#")):
                last -= 1
            own.update(range(begin, last))
            begin = None
        if begin is None and i < len(lines) and head.match(line):
            begin = i
    return own


def _toml(text: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise Unreadable(f"It is not TOML: {exc}.") from None


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _toml_value(value: Any) -> str:
    # TOML's basic strings take the same escapes as JSON's, as long as nothing but ASCII is left.
    return json.dumps(value) if not isinstance(value, list) else f"[{', '.join(json.dumps(item) for item in value)}]"


def toml_block(table: str, name: str, entry: dict[str, Any]) -> str:
    """The entry as what is pasted."""
    return toml_with("", table, name, entry)


def json_block(table: str, name: str, entry: dict[str, Any], inputs: Sequence[dict[str, Any]] = ()) -> str:
    """The entry as what is pasted: a whole file with nothing else in it."""
    whole: dict[str, Any] = {"inputs": list(inputs)} if inputs else {}
    return json.dumps({**whole, table: {name: entry}}, indent=2, ensure_ascii=False) + "\n"


# ---- what is shown ---------------------------------------------------------------------------------

_SECRET = re.compile(
    r"""((?:["']?)(?![\w-]*_env_var\b)[\w-]*(?:token|key|secret|password|passwd|authorization|credential)[\w-]*["']?\s*[:=]\s*["'](?:Bearer\s+)?)"""
    r"""(?!\$|Bearer\s)([^"'$]{4,})(["'])""",
    re.IGNORECASE,
)


def difference(before: str, after: str, path: str) -> list[str]:
    """The lines of a unified diff; values that look like secrets are masked, as a terminal is no place for them."""
    import difflib

    from cotenant.server.model.text import MASK, mask

    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), path, path, lineterm="")
    return [_SECRET.sub(lambda m: m[1] + MASK + m[3], mask(line)) for line in lines]
