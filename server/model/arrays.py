"""What an array of jobs is: how many elements, with which parameters, and what each of them is asked to run."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cotenant.server.model import text
from cotenant.server.model.indices import ARRAY_MAX
from cotenant.server.model.placeholders import NAME, Scalar, filled, filled_words, names_in, written

INDEX: Final = "index"
_NAME = re.compile(NAME)

Params = dict[str, bool | int | float | str]


class ArraySpec(BaseModel):
    """Many jobs of one kind: `n` of them, or one for each set of `params`, or for each combination of `grid`."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_max_length=4096, allow_inf_nan=False)

    n: int | None = Field(default=None, ge=1, le=ARRAY_MAX, description="elements, with indices 0 to n-1")
    params: tuple[Params, ...] | None = Field(
        default=None, min_length=1, max_length=ARRAY_MAX, description="one element for each set of values"
    )
    grid: dict[str, tuple[bool | int | float | str, ...]] | None = Field(
        default=None,
        min_length=1,
        description="one element for each combination of these values, the last name fastest",
    )
    max_parallel: int | None = Field(default=None, ge=1, le=ARRAY_MAX, description="elements at once; default: all")

    @model_validator(mode="after")
    def _one_kind(self) -> ArraySpec:
        if sum(given is not None for given in (self.n, self.params, self.grid)) != 1:
            raise ValueError("give exactly one of n, params and grid")
        for name in self.names:
            if _NAME.fullmatch(name) is None or name == INDEX:
                raise ValueError(f"{text.quoted(name, 70)} cannot be a parameter's name: letters, digits and _")
        if len({name.upper() for name in self.names}) != len(self.names):
            raise ValueError("two parameters differ only in upper and lower case")
        names = set(self.names)
        for number, values in enumerate(self.params or ()):
            if values.keys() != names:
                other = text.quoted(min(values.keys() ^ names), 70)
                raise ValueError(f"params[{number}] has other names than params[0]: {other} is in one of them only")
        if self.grid is not None:
            if empty := [name for name, values in self.grid.items() if not values]:
                raise ValueError(f"grid.{empty[0]} has no values")
            if self.size > ARRAY_MAX:
                raise ValueError(f"the grid has {self.size} combinations; an array has {ARRAY_MAX} elements at most")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return tuple(self.grid) if self.grid is not None else tuple(self.params[0]) if self.params else ()

    @property
    def size(self) -> int:
        if self.n is not None:
            return self.n
        return len(self.params) if self.params is not None else prod(map(len, (self.grid or {}).values()))

    def sets(self) -> list[dict[str, Scalar]]:
        """The parameters of each element by its index; empty where there are none."""
        if self.grid is not None:
            return [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]
        return [dict(values) for values in self.params or ()]

    def kept(self) -> ArraySpec:
        """What the job's row keeps: the number. The sets of parameters have rows of their own."""
        return ArraySpec(n=self.size, max_parallel=self.max_parallel)

    def find_secret(self) -> tuple[str, str] | None:
        """(field, what it seems to be) of the first value that looks like a credential, or None."""
        for name in self.names:
            if text.password_name(name):
                return f"array.{name}", "a secret by its name"
            words = self.grid[name] if self.grid is not None else [values[name] for values in self.params or ()]
            # one search over all that is text: there may be 100,000
            said = "\n".join({word for word in words if isinstance(word, str)})
            if said and (what := text.find_secret(said)) is not None:
                return f"array.{name}", what
        return None


#: What of an array's spec is the array's alone and not its elements'.
OF_THE_ARRAY: Final = ("array", "after", "start_window")
#: Where placeholders stand for text, and where values keep their type.
_TEXTS: Final = ("command", "env", "name", "workdir")


@dataclass(frozen=True)
class Pattern:
    """An array's spec as its elements are made from it."""

    plain: str  # the JSON of an element without placeholders and parameters
    spec: Mapping[str, Any]
    fills: bool  # whether something has to be filled in

    def element(self, index: int, params: Mapping[str, Scalar]) -> str:
        """The spec of one element, as its row keeps it. Parameters are kept in its config too, to compare runs by."""
        if not (self.fills or params):
            return self.plain
        values = {**params, INDEX: index}
        out = dict(self.spec)
        for key in _TEXTS:
            if key in out:
                out[key] = filled_words(out[key], values)
        config = filled(out.get("config", {}), values)
        if params or config:
            out["config"] = {**params, **config}
        return _dumps(out)


@functools.lru_cache(maxsize=256)
def pattern_of(kept: str) -> Pattern:
    """The pattern of an array whose row keeps this spec."""
    spec = {key: value for key, value in json.loads(kept).items() if key not in OF_THE_ARRAY}
    return Pattern(_dumps(spec), spec, bool(names_in([spec.get(key) for key in (*_TEXTS, "config")])))


def environment(array_id: str, index: int, size: int, params: Mapping[str, Scalar]) -> dict[str, str]:
    """What an element finds in its environment."""
    return {
        "COTENANT_ARRAY_ID": array_id,
        "COTENANT_ARRAY_INDEX": str(index),
        "COTENANT_ARRAY_SIZE": str(size),
        **{f"COTENANT_PARAM_{name.upper()}": written(value) for name, value in params.items()},
    }


def element_id(array_id: str, index: int) -> str:
    return f"{array_id}.{index}"


_ELEMENT = re.compile(r"(job_[0-9a-z]+)\.(0|[1-9]\d{0,5})", re.ASCII)


def of_element(job_id: str) -> tuple[str, int] | None:
    """(array, index) of an element's id; None for another id."""
    found = _ELEMENT.fullmatch(job_id)
    return None if found is None else (found[1], int(found[2]))


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
