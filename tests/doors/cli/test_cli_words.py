"""What the server says to agents reaches a person in the command line's own words, whatever it names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cotenant import tools
from cotenant.server.model.spec import JobSpec
from cotenant.ui.cli import words

Live = Any  # conftest.Server
ROOT = Path(__file__).resolve().parents[3]
TOOL_NAMES = {tool.name for tool in tools.ALL}
ARGUMENT_NAMES = {name for tool in tools.ALL for name in tool.arguments.model_fields}
#: Words of the surface that cannot be mistaken for plain English: every tool but `heartbeat`, every argument with an underscore.
FOREIGN = sorted((TOOL_NAMES - {"heartbeat"}) | {name for name in ARGUMENT_NAMES if "_" in name})
FOREIGN_WORD = re.compile(rf"\b(?:{'|'.join(FOREIGN)})\b")
#: Keyword arguments and fields whose text a caller reads.
READ = {"hint", "helps", "message", "notice", "advice", "said_it", "note"}


def _texts(path: Path) -> list[tuple[int, str]]:
    """Every sentence of a module: its strings of several words, the parts of an f-string joined with 1 for what is put in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
        id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append(
                (node.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "1" for v in node.values))
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | inner:
            found.append((node.lineno, node.value))
    return [
        (line, text)
        for line, text in found
        if " " in text and not re.match(r"\s*(SELECT|UPDATE|INSERT|DELETE)|.*\?", text)
    ]


def _spoken() -> list[Any]:
    """Every sentence in the server that names a tool or an argument and may come to the command line."""
    found = []
    for folder in (
        "server/control",
        "server/store",
        "server/deciding",
        "server/backends",
        "server/http",
        "server/mcp",
        "tools",
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "spec.py":
                continue
            for line, text in _texts(path):
                if FOREIGN_WORD.search(text) and "description=" not in text:
                    found.append(pytest.param(text, id=f"{path.relative_to(ROOT)}:{line}"))
    return found


def test_the_table_knows_every_tool_and_every_argument() -> None:
    assert set(words.TOOLS) == TOOL_NAMES
    assert set(words.ARGUMENTS) | words.SPEC >= ARGUMENT_NAMES, ARGUMENT_NAMES - set(words.ARGUMENTS) - words.SPEC
    assert set(words.SPEC) <= set(JobSpec.model_fields), "what stands in no job cannot be given with --spec"
    assert not words.SPEC & set(words.ARGUMENTS)


@pytest.mark.parametrize("name", sorted(words.TOOLS))
def test_every_command_in_the_table_exists(name: str) -> None:
    command = words.TOOLS[name].split()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cotenant.ui.cli", *command[1:], "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_option_in_the_table_exists() -> None:
    """Each is an option of some command, as its own help shows it."""
    commands = {words.TOOLS[name] for name in words.TOOLS} | {"cotenant token create"}
    shown = "".join(
        subprocess.run(
            [sys.executable, "-P", "-m", "cotenant.ui.cli", *command.split()[1:], "--help"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for command in sorted(commands)
    )
    options = {word for text in words.ARGUMENTS.values() for word in re.findall(r"--[a-z-]+", text)}
    assert {option for option in options if not re.search(rf"{option}\b", shown)} == set()


@pytest.mark.parametrize("text", _spoken())
@pytest.mark.parametrize("command", ["lease", "submit"])
def test_no_sentence_of_the_server_names_a_tool_or_argument_to_a_person(text: str, command: str) -> None:
    said = words.for_people(text, command)
    outside = re.sub(r"--spec\)|\w+ \(of --spec\)", "", said)
    assert not FOREIGN_WORD.search(outside), said


def test_there_are_such_sentences() -> None:
    assert len(_spoken()) > 25


def test_words_of_others_are_left_alone() -> None:
    foreign = 'forbidden: "submit_job when_full=x" is not yours: "say \\"get_job\\" now". list_jobs shows yours.'
    assert words.for_people(foreign) == foreign.replace("list_jobs", "`cotenant job list`")


@pytest.mark.parametrize(
    ("text", "command", "said"),
    [
        ('busy: full. when_full="queue" waits for it in order.', "lease", "With --queue it waits"),
        ('busy: full. when_full="queue" waits for it in order.', "run", "Without --no-queue it waits"),
        ('busy: Ask again, or with when_full="queue".', "submit", "or without --no-queue."),
        ("invalid_arguments: hours is 5; it must be 1", "submit", "invalid_arguments: --hours is 5"),
        ("bad_name: name must be 1 to 64 letters", "token", "bad_name: NAME must be"),
        ("secret_in_arguments: env.API_KEY seems to hold a secret", "submit", ": --env API_KEY seems"),
        (
            "submit_job was not called:\n- env.A: bad\n- gpus: too many\n",
            "submit",
            "- --env A: bad\n- --gpus: too many",
        ),
        ("its ttl ran out without a heartbeat", "lease", "without a heartbeat"),
    ],
)
def test_a_sentence_reads_as_one(text: str, command: str, said: str) -> None:
    assert said in words.for_people(text, command)


def test_people_read_commands_and_programs_the_servers_own_words(live: Live) -> None:
    live.idle()
    first = live.json("lease", "acquire", "--gpus", "2")
    for command, way in (("lease", "--queue"), ("run", "--no-queue")):
        words_of = ["lease", "acquire"] if command == "lease" else ["run", "--no-queue", "--", "true"]
        refused = live(*words_of, code=1).err
        assert way in refused
        assert not FOREIGN_WORD.search(refused), refused
    as_json = live("lease", "acquire", "--json", code=1)
    assert "when_full" in as_json.json["error"]["message"]
    line = live("lease", "acquire", "--queue", "--no-wait")
    claim = line.out.split()[1]
    assert f"cotenant lease wait {claim}" in line.err, "what comes next is said"
    assert "`cotenant lease wait`" in live("lease", "heartbeat", claim, code=1).err
    live("lease", "release", first["lease_id"])
    assert live.json("lease", "wait", claim)["state"] == "running", "the claim was waited for and picked up"
    assert not FOREIGN_WORD.search(live("quota").out)
    live("lease", "release", claim)
    assert "released" in live("lease", "wait", claim, code=1).err
    wrong = live("submit", "--gpus", "900", "--stop-grace", "-1", "--", "true", code=1).err
    assert "- --gpus:" in wrong and "- --stop-grace:" in wrong


def test_a_lease_and_a_job_are_handed_over_and_accepted(live: Live) -> None:
    live.idle()
    bob = live.token("bob-hand", "bob-hand")
    lease = live.json("lease", "acquire")["lease_id"]
    assert "offered to bob-hand" in live("lease", "hand-over", lease, "bob-hand").out
    assert live.json("lease", "hand-over", lease, "bob-hand", COTENANT_TOKEN=bob)["status"] == "handed_over"
    assert live.json("lease", "show", lease)["holder"] == "bob-hand"
    refused = live("lease", "hand-over", lease, "nobody-here", code=1, COTENANT_TOKEN=bob)
    assert "`cotenant agents`" in refused.err
    live("lease", "release", lease, COTENANT_TOKEN=bob)
    job = live("submit", "--gpus", "0", "--", "sleep", "60", COTENANT_TOKEN=bob).out.strip()
    me = live.json("quota")["me"]["name"]
    assert "offered" in live("job", "hand-over", job, me, COTENANT_TOKEN=bob).out
    assert "belongs to" in live("job", "hand-over", job, me).out
    live("job", "cancel", job, "--yes")
