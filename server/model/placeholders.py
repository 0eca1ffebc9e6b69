"""Words in braces that stand for values: ``{lr}`` in a command, the environment, the config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

Scalar: TypeAlias = str | int | float | bool

NAME = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
#: ``${lr}`` is a variable of the shell's and stays; ``{{lr}}`` is how to write ``{lr}`` itself.
_BRACES = re.compile(rf"\$\{{{NAME}\}}|\{{\{{({NAME})\}}\}}|\{{({NAME})\}}")


def names_in(value: Any) -> set[str]:
    """Every name that stands in braces anywhere in nested JSON."""
    found: set[str] = set()
    for text in _texts(value):
        if "{" in text:
            found.update(match[2] for match in _BRACES.finditer(text) if match[2])
    return found


def filled(value: Any, values: Mapping[str, Scalar]) -> Any:
    """Nested JSON with the known names replaced. A text that is nothing but one name becomes its value, type and all.

    Names that are not in `values` stay as they are: a command may hold braces of its own.
    """
    if isinstance(value, str):
        return _filled_text(value, values)
    if isinstance(value, Mapping):
        return {key: filled(item, values) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [filled(item, values) for item in value]
    return value


def filled_words(value: Any, values: Mapping[str, Scalar]) -> Any:
    """The same where only text may stand, as in a command: every value is written out."""
    if isinstance(value, str):
        found = _filled_text(value, values)
        return found if isinstance(found, str) else written(found)
    if isinstance(value, Mapping):
        return {key: filled_words(item, values) for key, item in value.items()}
    return [filled_words(item, values) for item in value]


def written(value: Scalar) -> str:
    """A value as a program reads it on its command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _filled_text(text: str, values: Mapping[str, Scalar]) -> Any:
    if "{" not in text:
        return text
    alone = _BRACES.fullmatch(text)
    if alone is not None and alone[2] in values:
        return values[alone[2]]

    def replacement(match: re.Match[str]) -> str:
        if match[1] is not None:
            return f"{{{match[1]}}}" if match[1] in values else match[0]
        return written(values[match[2]]) if match[2] in values else match[0]

    return _BRACES.sub(replacement, text)


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
