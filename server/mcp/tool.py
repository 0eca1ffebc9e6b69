"""What a tool is: a function with typed arguments, and what clients are told about it.

    @tool(title="Give a lease back", scope="write", idempotent=True)
    async def release_lease(call: Call, lease_id: LeaseId) -> LeaseAnswer:
        '''Docstring for an agent.'''

Arguments are checked strictly (a number in quotes is not a number), unknown ones are refused with the closest known
name, and nothing of what was sent is repeated in the refusal except names, as quoted JSON strings.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import mcp_types as wire
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from cotenant.server.errors import BadRequest
from cotenant.server.mcp.schema import compact, names_only, shallow, without_inner_required, without_limits
from cotenant.server.model import text

Scope = Literal["read", "write"]
_PLAIN = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,39}$")
_MAX_COMPLAINTS = 8


class Flat:
    """Marks a parameter whose model's fields are arguments of the tool themselves; `hidden` ones are not advertised."""

    def __init__(self, *hidden: str) -> None:
        self.hidden = hidden


class Arguments(BaseModel):
    """The base of every tool's arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_max_length=64_000)


@dataclass(frozen=True)
class Tool:
    """A tool and what is said about it. `output` lists the types that an answer may have."""

    name: str
    title: str
    description: str
    scope: Scope
    core: bool
    read_only: bool
    destructive: bool
    idempotent: bool
    function: Callable[..., Awaitable[Any]]
    output: tuple[Any, ...]
    extra_output: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    brief: bool = False
    core_arguments: tuple[str, ...] = ()

    @cached_property
    def _parameters(self) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[type[BaseModel], Flat]]]:
        """(plain arguments with type and default, parameters that are spread into arguments)."""
        hints = typing.get_type_hints(self.function, include_extras=True)
        plain: dict[str, tuple[Any, Any]] = {}
        flat: dict[str, tuple[type[BaseModel], Flat]] = {}
        for name, parameter in list(inspect.signature(self.function).parameters.items())[1:]:
            marks = [m for m in getattr(hints[name], "__metadata__", ()) if isinstance(m, Flat)]
            if marks:
                flat[name] = (typing.get_args(hints[name])[0], marks[0])
            else:
                default = ... if parameter.default is inspect.Parameter.empty else parameter.default
                plain[name] = (hints[name], default)
        return plain, flat

    @cached_property
    def arguments(self) -> type[BaseModel]:
        """The model of all arguments."""
        plain, flat = self._parameters
        bases = tuple(model for model, _ in flat.values())
        made: type[BaseModel] = create_model(f"{self.name}_arguments", __base__=(*bases, Arguments), **plain)  # type: ignore[call-overload]
        return made

    @cached_property
    def input_schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments."""
        schema = compact(self.arguments.model_json_schema(), describe=True)
        schema.pop("description", None)
        for _, mark in self._parameters[1].values():
            for name in mark.hidden:
                schema.get("properties", {}).pop(name, None)
        schema.setdefault("properties", {})
        return schema

    @cached_property
    def output_schema(self) -> dict[str, Any]:
        """What is told of the answer: all of it, or of a brief tool only what names it."""
        return names_only(self.whole_output_schema) if self.brief else self.whole_output_schema

    @cached_property
    def whole_output_schema(self) -> dict[str, Any]:
        """JSON Schema of the structured answer; where there are several types, of what any of them may hold."""
        schemas = [TypeAdapter(item).json_schema(mode="serialization") for item in self.output]
        merged = schemas[0]
        for other in schemas[1:]:
            merged = {
                "type": "object",
                "properties": {**merged["properties"], **_union(merged["properties"], other["properties"])},
                "required": [name for name in merged.get("required", ()) if name in other.get("required", ())],
                "$defs": {**merged.get("$defs", {}), **other.get("$defs", {})},
            }
        merged["properties"] = {**merged["properties"], **self.extra_output}
        small = compact(merged, describe=False)
        small.pop("description", None)
        return shallow(without_inner_required(small))

    @cached_property
    def listing(self) -> dict[str, Any]:
        """The entry of tools/list, in the words of the wire.

        Every byte is paid for by every agent, so limits of texts stand in the documentation and in refusals, as does that an
        unknown argument is refused; and of a tool that only reads nothing is said which the protocol takes for granted then.
        """
        hints = {"destructiveHint": self.destructive, "idempotentHint": self.idempotent}
        return {
            "name": self.name,
            "title": self.title,
            "description": self.description,
            "inputSchema": {k: v for k, v in without_limits(self.input_schema).items() if k != "additionalProperties"},
            "outputSchema": self.output_schema,
            "annotations": {
                "readOnlyHint": self.read_only,
                **({} if self.read_only else hints),
                "openWorldHint": False,
            },
        }

    @cached_property
    def core_listing(self) -> dict[str, Any]:
        """The same for clients with little room: the arguments that matter, and nothing of the answer.

        Further arguments are taken all the same, so the schema does not forbid them.
        """
        schema = dict(self.listing["inputSchema"])
        if self.core_arguments:
            schema["properties"] = {name: schema["properties"][name] for name in self.core_arguments}
        hints = {"readOnlyHint": True} if self.read_only else {"destructiveHint": self.destructive}
        listing = {**self.listing, "inputSchema": schema, "annotations": hints}
        del listing["outputSchema"]
        return listing

    def parse(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the function.

        Raises:
            BadRequest: what is wrong with which argument, and the closest known name of an unknown one.
        """
        try:
            # Through JSON, because pydantic's strict mode takes a list for a tuple only there.
            parsed = self.arguments.model_validate_json(json.dumps(raw, allow_nan=False), strict=True)
        except ValidationError as exc:
            raise BadRequest(self._complaint(exc), hint=f"Correct the arguments and call {self.name} again.") from None
        except (ValueError, RecursionError):
            raise BadRequest(
                f"{self.name}: the arguments hold NaN, Infinity or too many levels of nesting.",
                hint="Send plain JSON values.",
            ) from None
        plain, flat = self._parameters
        given: dict[str, Any] = {name: getattr(parsed, name) for name in plain}
        for name, (model, _) in flat.items():
            fields = set(model.model_fields)
            # The values have just been checked as fields of a subclass of `model`.
            given[name] = model.model_construct(
                parsed.model_fields_set & fields, **{item: getattr(parsed, item) for item in model.model_fields}
            )
        return given

    def _complaint(self, exc: ValidationError) -> str:
        """Readable sentences; values are never repeated."""
        known = list(self.arguments.model_fields)
        by_place: dict[str, list[str]] = {}
        for item in exc.errors(include_url=False, include_input=False, include_context=False):
            place = ".".join(_part(part) for part in item["loc"]) or "arguments"
            if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
                near = difflib.get_close_matches(str(item["loc"][0])[:64], known, n=1, cutoff=0.5)
                said = "there is no such argument" + (
                    f"; did you mean {near[0]}?"
                    if near
                    else f"; known: {', '.join(known)}"
                    if known
                    else "; it takes none"
                )
            elif item["type"] == "json_invalid":
                said = "not valid Unicode text"
            else:
                said = re.sub(r"^Value error, ", "", item["msg"])
            # The branches of a union each complain under their own type's name: told together.
            first = _part(item["loc"][0]) if item["loc"] else place
            by_place.setdefault(first if len(item["loc"]) > 1 and first in known else place, []).append(
                said
                if place in (first, "arguments") or not isinstance(item["loc"][-1], int)
                else f"item {item['loc'][-1]}: {said}"
            )
        told = [f"- {place}: {'; or: '.join(dict.fromkeys(said))}" for place, said in by_place.items()]
        more = f"\n- and {len(told) - _MAX_COMPLAINTS} more" if len(told) > _MAX_COMPLAINTS else ""
        return f"{self.name} was not called:\n" + "\n".join(told[:_MAX_COMPLAINTS]) + more + "\n"


def _part(part: str | int) -> str:
    return str(part) if isinstance(part, int) or _PLAIN.match(part) else text.quoted(part, 40)


def _union(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Properties of `other`; where both have one and they differ, either fits."""
    out: dict[str, Any] = {}
    for name, schema in other.items():
        mine = one.get(name)
        if mine is None or mine == schema:
            out[name] = schema
        else:
            options = [*mine.get("anyOf", [mine]), *schema.get("anyOf", [schema])]
            unique = list({json.dumps(item, sort_keys=True): item for item in options}.values())
            out[name] = unique[0] if len(unique) == 1 else {"anyOf": unique}
    return out


def tool(
    *,
    title: str,
    scope: Scope,
    core: bool = False,
    destructive: bool = False,
    idempotent: bool | None = None,
    output: tuple[Any, ...] | None = None,
    extra_output: Mapping[str, dict[str, Any]] | None = None,
    brief: bool = False,
    core_arguments: tuple[str, ...] = (),
) -> Callable[[Callable[..., Awaitable[Any]]], Tool]:
    """Make a tool of a function; reading tools are idempotent unless said otherwise.

    `brief` lists only the names of the answer's fields, where another tool's schema has it in full;
    `core_arguments` are the ones advertised in the core toolset.
    """

    def make(function: Callable[..., Awaitable[Any]]) -> Tool:
        returned = typing.get_type_hints(function)["return"]
        return Tool(
            name=function.__name__,
            title=title,
            description=inspect.cleandoc(function.__doc__ or ""),
            scope=scope,
            core=core,
            read_only=scope == "read",
            destructive=destructive,
            idempotent=scope == "read" if idempotent is None else idempotent,
            function=function,
            output=output or (returned,),
            extra_output=extra_output or {},
            brief=brief,
            core_arguments=core_arguments,
        )

    return make


__all__ = ["Arguments", "Flat", "Scope", "Tool", "tool", "wire"]
