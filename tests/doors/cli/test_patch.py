"""Edits of other programs' settings: the entry is there, every other byte is as it was, and what is unclear is refused."""

from __future__ import annotations

import itertools
import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.ui.cli import patch
from cotenant.ui.cli.patch import Unreadable

ENTRY: dict[str, Any] = {"command": "/bin/cotenant", "args": ["mcp-stdio", "--url", "http://h:1"]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
SERVERS = st.dictionaries(st.text(max_size=5) | st.just("cotenant"), JSON, max_size=3)
FILES = st.dictionaries(st.text(max_size=5), JSON, max_size=3).flatmap(
    lambda rest: SERVERS.map(lambda servers: {**rest, "mcpServers": servers}) | st.just(rest)
)


def common(one: str, other: str) -> str:
    """What both begin with."""
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@given(content=FILES, indent=st.sampled_from([None, 0, 2, 4, "\t"]), end=st.sampled_from(["", "\n"]))
def test_json_keeps_everything_else(content: dict[str, Any], indent: Any, end: str) -> None:
    text = json.dumps(content, indent=indent) + end
    if not isinstance(content.get("mcpServers", {}), dict):
        with pytest.raises(Unreadable):
            patch.json_with(text, "mcpServers", "cotenant", ENTRY)
        return
    changed = patch.json_with(text, "mcpServers", "cotenant", ENTRY)
    servers = {**content.get("mcpServers", {}), "cotenant": ENTRY}
    assert json.loads(changed) == {**content, "mcpServers": servers}
    assert list(json.loads(changed)) == list({**content, "mcpServers": servers})
    assert patch.json_with(changed, "mcpServers", "cotenant", ENTRY) == changed
    if "cotenant" not in content.get("mcpServers", {}):  # then nothing that was there goes
        before = common(text, changed)
        rest = text[len(before) :]
        after = common(rest[::-1], changed[len(before) :][::-1])
        assert not rest[: len(rest) - len(after)].strip()


def test_json_is_written_as_the_file_is() -> None:
    text = '{\n    "mcpServers": {\n        "other": {"url": "x",   "a":1}\n    },\n    "last": [1,2]\n}\n'
    changed = patch.json_with(text, "mcpServers", "cotenant", {"url": "y"})
    wanted = '"other": {"url": "x",   "a":1},\n        "cotenant": {\n            "url": "y"\n        }\n    },\n    "last": [1,2]\n}\n'
    assert changed == f'{{\n    "mcpServers": {{\n        {wanted}'


@pytest.mark.parametrize(
    "text",
    [
        '{"mcpServers": {} // mine\n}',
        '{"mcpServers": {},}',
        '{/* x */"a": 1}',
        "not json",
        "[]",
        '{"mcpServers": []}',
        '{"a": 1, "a": 2}',
        '{"mcpServers": {"x": {"k": 1, "k": 2}}}',
        "[" * 100_000,
    ],
)
def test_json_that_is_not_plain_is_left_alone(text: str) -> None:
    with pytest.raises(Unreadable):
        patch.json_with(text, "mcpServers", "cotenant", ENTRY)


def test_inputs_are_added_once() -> None:
    asked = [{"type": "promptString", "id": "t"}]
    first = patch.json_with('{"inputs": [{"id": "other"}]}', "servers", "cotenant", ENTRY, asked)
    assert [item["id"] for item in json.loads(first)["inputs"]] == ["other", "t"]
    assert patch.json_with(first, "servers", "cotenant", ENTRY, asked) == first


TOML = """\
# mine
model = "x"

[mcp_servers.other]   # stays
command = "a"

[mcp_servers.other.env]
KEY = "[mcp_servers.cotenant]"

# about the profile
[profiles.p]
text = \"\"\"
several
lines\"\"\"
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_toml_gets_a_table_and_keeps_the_rest(end: str) -> None:
    text = TOML.replace("\n", end)
    changed = patch.toml_with(text, "mcp_servers", "cotenant", ENTRY)
    assert changed.startswith(text) and tomllib.loads(changed)["mcp_servers"]["cotenant"] == ENTRY
    assert patch.toml_with(changed, "mcp_servers", "cotenant", ENTRY) == changed
    again = patch.toml_with(changed, "mcp_servers", "cotenant", {"url": "y"})
    assert again.startswith(text) and tomllib.loads(again)["mcp_servers"]["cotenant"] == {"url": "y"}
    assert all(line.endswith(end.removesuffix("\n")) for line in again.split("\n")[:-1])


def test_toml_replaces_the_old_table_where_it_was() -> None:
    old = '[mcp_servers."cotenant"]\nurl = "old"\n[mcp_servers.cotenant.env]\nA = "1"\n\n'
    text = TOML.replace("# about", old + "# about")
    changed = patch.toml_with(text, "mcp_servers", "cotenant", ENTRY)
    assert changed.partition("[mcp_servers.cotenant]\ncommand")[0] == text.partition(old)[0]
    assert changed.endswith("\n\n# about" + text.partition("# about")[2]) and "old" not in changed


@pytest.mark.parametrize(
    "text",
    [
        'mcp_servers = { cotenant = { url = "x" } }\n',
        'mcp_servers.cotenant.url = "x"\n',
        '[mcp_servers]\ncotenant = { url = "x" }\n',
        "mcp_servers = 3\n",
        "= nothing\n",
        'a = """\n[mcp_servers.cotenant]\n"""\n[mcp_servers.cotenant]\nurl = "x"\n',
    ],
)
def test_toml_in_another_form_is_left_alone(text: str) -> None:
    with pytest.raises(Unreadable):
        patch.toml_with(text, "mcp_servers", "cotenant", ENTRY)


def test_the_difference_shows_no_secret() -> None:
    before = '{\n "API_KEY": "very-secret-1",\n "headers": {"Authorization": "Bearer very-secret-2"},\n "x": 1\n}'
    shown = "\n".join(patch.difference(before, before.replace('"x": 1', '"x": "ctn_0123456789abcdefghijklmn"'), "f"))
    assert "very-secret" not in shown and "0123456789abcdef" not in shown and shown.count("***") == 3
    toml = 'HF_TOKEN = "very-secret-3"\n'
    assert "very-secret" not in "\n".join(patch.difference(toml, toml + "a = 1\n", "f"))
    assert "${COTENANT_TOKEN}" in "\n".join(patch.difference("", '"Authorization": "Bearer ${COTENANT_TOKEN}"', "f"))
