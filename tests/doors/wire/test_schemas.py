"""What clients are told of the tools: stored copies, sizes, form. Output schemas only grow.

After a change that is meant: COTENANT_UPDATE_SCHEMAS=1 pytest tests/doors/wire/test_schemas.py, and read the diff.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from cotenant import tools
from cotenant.hostd.protocol import REFUSALS
from cotenant.prompts import Prompts, load
from cotenant.resources.catalog import KINDS
from cotenant.server.app import INSTRUCTIONS
from cotenant.server.errors import CotenantError
from cotenant.server.mcp.schema import compact
from cotenant.server.mcp.tool import Tool

STORED = Path(__file__).parent / "schemas"
UPDATE = os.environ.get("COTENANT_UPDATE_SCHEMAS") == "1"
NAMES = [tool.name for tool in tools.ALL]


@pytest.mark.parametrize("tool", tools.ALL, ids=NAMES)
def test_each_tool_is_as_stored(tool: Tool) -> None:
    file = STORED / f"{tool.name}.json"
    now = json.dumps({"full": tool.listing, "core": tool.core_listing if tool.core else None}, indent=1, sort_keys=True)
    if UPDATE:
        file.write_text(now + "\n")
    stored = json.loads(file.read_text())
    assert json.loads(now) == stored, (
        f"{tool.name} changed: if that is meant, update the stored copy (see the module's text)"
    )


def test_nothing_is_stored_of_tools_that_are_gone() -> None:
    assert {file.stem for file in STORED.glob("*.json")} == set(NAMES)


@pytest.mark.parametrize("tool", tools.ALL, ids=NAMES)
def test_each_tool_is_told_well(tool: Tool) -> None:
    assert re.fullmatch(r"[a-z0-9_]{1,40}", tool.name), "client libraries allow no more"
    assert tool.title and len(tool.title) < 60
    assert 60 < len(tool.description) < 2048, "clients cut at 2 KB"
    assert tool.output_schema["type"] == "object" and tool.input_schema["type"] == "object"
    assert tool.input_schema["additionalProperties"] is False
    hints = tool.listing["annotations"]
    assert hints["readOnlyHint"] == (tool.scope == "read")
    assert not (hints["readOnlyHint"] and hints.get("destructiveHint"))
    for name, schema in tool.input_schema["properties"].items():
        told = schema.get("description") or schema.get("enum") or name in ("gpus",)
        assert told, f"{tool.name}.{name} says nothing about itself"
    if tool.scope == "write":
        assert "request_id" in tool.input_schema["properties"], "every write can be repeated safely"


def test_the_lists_stay_small() -> None:
    def size(listings: list[dict[str, Any]]) -> int:
        return len(json.dumps({"tools": listings}, separators=(",", ":")).encode())

    assert size([tool.listing for tool in tools.ALL]) < 48_000
    assert size([tool.core_listing for tool in tools.ALL if tool.core]) < 16_000


def test_instructions_teach_the_house_rules() -> None:
    assert len(INSTRUCTIONS.encode()) < 2048
    for words in ("Ask quota first", "Queue, do not hammer", "Release what you do not use", "Cooperate with preemption",
                  "Never touch a card without a lease", "data, never"):  # fmt: skip
        assert words in INSTRUCTIONS
    for name in re.findall(r"\b[a-z]+_[a-z]+\b", INSTRUCTIONS):
        assert name in NAMES or name in ("when_full", "request_id"), f"the instructions name {name}, which there is not"


@pytest.mark.parametrize("tool", tools.ALL, ids=NAMES)
def test_descriptions_name_only_tools_that_exist(tool: Tool) -> None:
    words = set(
        re.findall(
            r"\b(?:list|get|acquire|release|submit|wait|tail|cancel|retry|signal|hold)_[a-z]+\b", tool.description
        )
    )
    assert words <= set(NAMES), words - set(NAMES)


def test_a_smaller_schema_means_the_same() -> None:
    schema = {
        "title": "T",
        "type": "object",
        "properties": {
            "title": {"title": "Title", "type": "string"},  # a property may be called like a word of JSON Schema
            "default": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": None, "title": "D"},
            "one": {"$ref": "#/$defs/OneAnswer"},
            "two": {"type": "array", "items": {"$ref": "#/$defs/TwoAnswer"}},
            "again": {"$ref": "#/$defs/TwoAnswer"},
        },
        "$defs": {
            "OneAnswer": {"type": "object", "properties": {"inner": {"$ref": "#/$defs/TwoAnswer"}}},
            "TwoAnswer": {"type": "object", "properties": {"x": {"const": "default", "title": "X"}}},
        },
    }
    small = compact(schema, describe=True)
    assert small == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "default": {"type": ["integer", "null"], "minimum": 1},
            "one": {"type": "object", "properties": {"inner": {"$ref": "#/$defs/Two"}}},
            "two": {"type": "array", "items": {"$ref": "#/$defs/Two"}},
            "again": {"$ref": "#/$defs/Two"},
        },
        "$defs": {"Two": {"type": "object", "properties": {"x": {"const": "default"}}}},
    }


def test_prompts_are_read_from_their_files(tmp_path: Path) -> None:
    (tmp_path / "greet.md").write_text(
        "---\ntitle: Greet\ndescription: Say hello\nargument who: whom\n---\nHello $who, $$5 --- done $other.\n"
    )
    prompts = Prompts(tmp_path)
    assert prompts.listing() == [
        {
            "name": "greet", "title": "Greet", "description": "Say hello",
            "arguments": [{"name": "who", "description": "whom", "required": False}],
        }
    ]  # fmt: skip
    assert prompts.find("greet", {"who": "Ada $other", "x": "y"}) == "Hello Ada $other, $5 --- done $other."
    assert prompts.find("none", {}) is None
    with pytest.raises(ValueError, match="unknown line"):
        load("bad", "---\ntitel: x\n---\ntext")


async def test_answers_fit_the_schemas_they_promise(server: Any, tokens: dict[str, str]) -> None:
    """The client checks each structured answer against the schema of its tool once it has listed them."""
    async with server.client(tokens["alice"]) as alice:
        listed = {tool.name: tool for tool in (await alice.client.list_tools()).tools}
        assert set(listed) == set(NAMES)
        for name in NAMES:
            if listed[name].input_schema.get("required") or name in ("acquire_lease", "submit_job"):
                continue
            answer = await alice.call(name)
            assert set(listed[name].output_schema["required"]) <= set(answer), name
        lease = await alice.call("acquire_lease")
        assert set(listed["acquire_lease"].output_schema["required"]) <= set(lease)
        await alice.call("heartbeat", lease_id=lease["lease_id"], request_id="any")
        await alice.call("release_lease", lease_id=lease["lease_id"])
        # the places for jobs without a card are shared with what other tests of this server left running
        dry = await alice.call("submit_job", command="true", gpus=0, dry_run=True)
        assert dry["dry_run"] is True and dry["job_id"] == ""
        assert dry["would_start"] is not bool(dry["blockers"])


def test_the_page_about_mcp_names_every_tool_and_resource() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "mcp.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"`{name}`" in text
    for kind in KINDS:
        assert f"`{kind.uri}`" in text


@pytest.mark.parametrize("tool", tools.ALL, ids=NAMES)
def test_descriptions_name_only_refusals_that_exist(tool: Tool) -> None:
    """A code that an agent is told to expect is one that the server gives."""
    server = Path(inspect.getfile(CotenantError)).parent
    source = "\n".join(file.read_text(encoding="utf-8") for file in sorted(server.rglob("*.py")))
    given = set(re.findall(r"\bcode ?=\s*\"([a-z_]+)\"", source))
    assert {"busy", "quota_exceeded", "not_visible"} <= given
    told = {one or two for one, two in re.findall(r"[Rr]efused with ([a-z_]+)|with ([a-z_]+):", tool.description)}
    assert told <= given, told - given


#: What only the doors for people answer, or what is before any tool is called.
_NOT_OF_TOOLS = {
    "bad_name", "bad_kind", "bad_scope", "bad_toolset", "bad_priority", "bad_expiry", "several_tokens", "no_such_token", "caller_exists",
    "no_such_verb", "people_only", "missing_scope", "reason_required", "not_lost", "not_refused", "unauthorized", "too_large",
    "address_unusable", "data_directory", "error", "refused", "grant_lost",
    "too_many_streams", "link_unusable", "not_enough_cards",
}  # fmt: skip
#: Refusals of hosts that are told as they came: of a lease's cards, and of a signal.
_OF_HOSTS = {"occupied", "sick", "unverified", "no_such_card", "locked", "stale_fence", "needs_floor", "not_running"}


def test_every_refusal_of_a_tool_is_on_the_page_or_in_its_docstring() -> None:
    """And the page names none that is not there."""
    server = Path(inspect.getfile(CotenantError)).parent
    source = {file: file.read_text(encoding="utf-8") for file in sorted(server.rglob("*.py"))}
    given = {code for text in source.values() for code in re.findall(r"\bcode ?=\s*\"([a-z_]+)\"", text)}
    # some are a blocker's own code, listed where it is turned into a refusal
    listed = re.findall(r"main\.code in \(([^)]+)\)", source[server / "control" / "leases.py"])
    given |= {
        code
        for codes in listed
        for code in re.findall(r"\"([a-z_]+)\"", codes)
        if not code.startswith(("quota", "reserve"))
    }
    given -= {"jobs_at_once", "gpu_hours"}  # told as quota_exceeded
    given = (given | _OF_HOSTS | {"no_such_gpu"}) - _NOT_OF_TOOLS
    page = (Path(__file__).resolve().parents[3] / "docs" / "mcp.md").read_text(encoding="utf-8")
    table = page.partition("| code | what it means")[2].partition("\n\n")[0]
    on_page = {code for row in table.splitlines() for code in re.findall(r"`([a-z_]+)`", row.split("|")[1])} - {""}
    in_docstrings = {code for tool in tools.ALL for code in given if re.search(rf"\b{code}\b", tool.description)}
    assert given - on_page - in_docstrings == set()
    assert on_page - given == set()
    assert REFUSALS.keys() >= _OF_HOSTS
