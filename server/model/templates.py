"""Templates of jobs: a job's specification with typed parameters, as a TOML file says it.

description = "fine-tune a model"
[params.lr]
type = "float"
default = 3e-4
[job]
command = ["python", "train.py", "--lr", "{lr}"]
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cotenant.server.model.arrays import INDEX
from cotenant.server.model.placeholders import NAME, Scalar, filled, filled_words, written
from cotenant.server.model.spec import JobSpec
from cotenant.server.model.text import clean, quoted

FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
#: Fields of a job in which only text may stand.
_TEXTS: Final = frozenset(
    {"command", "name", "purpose", "project", "experiment", "env", "labels", "workdir", "pool", "prefer"}
)
_TYPES: Final = ("int", "float", "str", "bool", "choice")
_KEYS: Final = {
    "int": ("min", "max"), "float": ("min", "max"), "str": ("pattern",), "bool": (), "choice": ("choices",),
}  # fmt: skip


class BrokenTemplate(ValueError):
    """A file that is no template; the message has the line where that is known."""


class WrongParams(ValueError):
    """Parameters that do not fit a template: all that is wrong with them."""

    def __init__(self, template: str, problems: list[str]) -> None:
        super().__init__(f"template {quoted(template)}: {'; '.join(problems)}")
        self.problems = problems


@dataclass(frozen=True)
class Param:
    """One parameter. Without a default it has to be given."""

    name: str
    type: str  # int | float | str | bool | choice
    description: str = ""
    required: bool = True
    default: Scalar | None = None
    min: float | None = None
    max: float | None = None
    pattern: str | None = None
    choices: tuple[Scalar, ...] = ()

    def read(self, value: Any) -> Scalar:
        """The value as the job gets it.

        Raises:
            ValueError: it is none of this type, with what would be.
        """
        if self.type == "choice":
            found = next((choice for choice in self.choices if choice == value or written(choice) == str(value)), None)
            if found is None:
                raise ValueError(f"must be one of {', '.join(quoted(written(choice), 60) for choice in self.choices)}")
            return found
        if self.type == "bool":
            if not isinstance(value, bool):
                raise ValueError("must be true or false")
            return value
        if self.type == "str":
            if not isinstance(value, (str, int, float)):
                raise ValueError("must be text")
            said = value if isinstance(value, str) else written(value)
            if self.pattern is not None and re.fullmatch(self.pattern, said) is None:
                raise ValueError(f"must match {quoted(self.pattern, 100)}")
            return said
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError("must be a whole number" if self.type == "int" else "must be a number")
        if self.type == "int" and not isinstance(value, int):
            raise ValueError("must be a whole number")
        if self.min is not None and value < self.min:
            raise ValueError(f"must be at least {self.min:g}")
        if self.max is not None and value > self.max:
            raise ValueError(f"must be at most {self.max:g}")
        return value if self.type == "int" else float(value)


@dataclass(frozen=True)
class Template:
    """A job's specification with holes."""

    name: str
    description: str
    job: Mapping[str, Any]
    params: Mapping[str, Param] = field(default_factory=dict)

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The specification with the parameters filled in; names that are none of them stay as they stand.

        Raises:
            WrongParams: what is missing, unknown or wrong, all of it.
        """
        problems: list[str] = []
        values: dict[str, Scalar] = {}
        for name, param in self.params.items():
            if name in given:
                try:
                    values[name] = param.read(given[name])
                except ValueError as error:
                    problems.append(f"{name} {error}")
            elif param.default is not None:
                values[name] = param.default
            elif param.required:
                problems.append(
                    f"{name} is missing ({param.type}{f': {param.description}' if param.description else ''})"
                )
            else:
                values[name] = ""
        unknown = [clean(str(name), 60) for name in given if name not in self.params]
        if unknown:
            known = ", ".join(self.params) or "none"
            problems.append(f"there is no {' and no '.join(map(quoted, unknown))}; its parameters are {known}")
        if problems:
            raise WrongParams(self.name, problems)
        return {
            key: filled_words(value, values) if key in _TEXTS else filled(value, values)
            for key, value in self.job.items()
        }


def parse(text: str, stem: str) -> Template:
    """Read a template; `stem` is the file's name without its ending, and the template's unless it says another.

    Raises:
        BrokenTemplate: what is wrong, and in which line.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BrokenTemplate(str(error)) from None
    lines = text.splitlines()

    def broken(said: str, *path: str) -> BrokenTemplate:
        at = _line(lines, path)
        return BrokenTemplate(f"{said} (at line {at})" if at else said)

    if unknown := [key for key in data if key not in ("name", "description", "params", "job")]:
        raise broken(f"{quoted(unknown[0])} is not known: a template has name, description, params and job", unknown[0])
    name = data.get("name", stem)
    if not isinstance(name, str) or FILE_NAME.fullmatch(name) is None:
        raise broken("its name may have letters, digits, - and _, at most 64", "name")
    if not isinstance(data.get("description", ""), str):
        raise broken("description must be text", "description")
    job, params = data.get("job"), data.get("params", {})
    if not isinstance(job, dict) or "command" not in job:
        raise broken("it needs a table [job] with a command", "job")
    if wrong := [key for key in job if key not in JobSpec.model_fields or key in ("template", "params")]:
        raise broken(f"job.{wrong[0]} is no field of a job", "job", wrong[0])
    if not isinstance(params, dict):
        raise broken("params must be tables [params.NAME]", "params")
    found = {}
    for key, value in params.items():
        try:
            found[key] = _param(key, value)
        except ValueError as error:
            raise broken(f"params.{clean(key, 60)}: {error}", "params", key) from None
    return Template(name, clean(data.get("description", ""), 500), job, found)


def _param(name: str, value: Any) -> Param:
    if re.fullmatch(NAME, name) is None or name == INDEX:
        raise ValueError("a parameter's name has letters, digits and _, and is not index")
    if not isinstance(value, dict) or value.get("type") not in _TYPES:
        raise ValueError(f"it needs a type: {', '.join(_TYPES)}")
    kind = value["type"]
    allowed = ("type", "description", "default", "required", *_KEYS[kind])
    if unknown := [key for key in value if key not in allowed]:
        raise ValueError(f"{quoted(unknown[0])} makes no sense for type {kind}")
    for key in ("min", "max"):
        if key in value and (isinstance(value[key], bool) or not isinstance(value[key], (int, float))):
            raise ValueError(f"{key} must be a number")
    if kind == "choice" and not (isinstance(value.get("choices"), list) and value["choices"]):
        raise ValueError("type choice needs choices, a list")
    if "pattern" in value:
        try:
            re.compile(value["pattern"])
        except (re.error, TypeError) as error:
            raise ValueError(f"pattern is no regular expression: {error}") from None
    if not isinstance(value.get("required", True), bool):
        raise ValueError("required must be true or false")  # noqa: TRY004
    param = Param(
        name=name,
        type=kind,
        description=clean(str(value.get("description", "")), 300),
        required="default" not in value and value.get("required", True),
        min=value.get("min"),
        max=value.get("max"),
        pattern=value.get("pattern"),
        choices=tuple(value.get("choices", ())),
    )
    if "default" not in value:
        return param
    try:
        default = param.read(value["default"])
    except ValueError as error:
        raise ValueError(f"its default {error}") from None
    return Param(**{**param.__dict__, "default": default})


def _line(lines: list[str], path: tuple[str, ...]) -> int | None:
    """The line in which a key of a table stands, or at least its table; None where that is not found."""
    table, key = ".".join(path[:-1]), path[-1]
    inside, best = "", None
    for number, line in enumerate(lines, 1):
        if (header := re.match(r"\s*\[\s*([^\]]+?)\s*\]", line)) is not None:
            inside = header[1].replace(" ", "")
            if inside == ".".join(path):
                return number
            if inside == table:
                best = best or number
        elif inside == table and re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", line):
            return number
    return best
