"""The prompts that come with Cotenant: they name what there is, use what they ask for, and cost little."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cotenant import tools
from cotenant.prompts import Prompts
from cotenant.server.deciding.world import BLOCKERS
from cotenant.server.model.events import EVENT_TYPES
from cotenant.server.model.spec import JobSpec
from cotenant.server.model.states import JobState

PROMPTS = {item["name"]: item for item in Prompts().listing()}
TOOLS = {tool.name: tool for tool in tools.ALL}
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "mcp.md").read_text("utf-8")
VERBS = {name.partition("_")[0] for name in TOOLS}


def text(name: str) -> str:
    found = Prompts().find(name, {key["name"]: f"<{key['name']}>" for key in PROMPTS[name]["arguments"]})
    assert found is not None
    return found


def test_all_that_are_promised_are_there() -> None:
    assert {"share_politely", "run_training", "why_is_it_waiting", "plan_sweep", "resume_after_preemption"} <= set(
        PROMPTS
    )
    for name in PROMPTS:
        assert f"`{name}`" in PAGE, name


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_names_only_tools_arguments_and_words_that_there_are(name: str) -> None:
    body = text(name)
    fields = {field for tool in TOOLS.values() for field in tool.arguments.model_fields} | set(JobSpec.model_fields)
    answers = {
        word
        for tool in TOOLS.values()
        for word in re.findall(r'"([a-z_]+)":', str(tool.whole_output_schema).replace("'", '"'))
    }
    told = set(re.findall(r"`([a-z_]+)`", PAGE))  # codes of refusals
    known = told | set(TOOLS) | fields | answers | set(BLOCKERS) | {state.value for state in JobState}
    for word in set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", body)):
        if word.partition("_")[0] in VERBS:
            assert word in known, f"{name}.md names {word}"
    for called, arguments in re.findall(r"\b([a-z]+_[a-z]+)\(([^)]*)\)", body):
        if called in TOOLS:
            given = set(re.findall(r"([a-z_]+)=", arguments))
            assert given <= set(TOOLS[called].arguments.model_fields), (name, called, given)
    for kind in re.findall(r"\b((?:job|lease|host|gpu|slot)\.[a-z_]+)\b", body):
        assert kind in EVENT_TYPES, f"{name}.md names the event {kind}"


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_uses_what_it_asks_for_says_what_is_data_and_is_short(name: str) -> None:
    body, about = text(name), PROMPTS[name]
    for argument in about["arguments"]:
        assert f"<{argument['name']}>" in body, f"{name}.md asks for {argument['name']} and does not use it"
    assert "$" not in body, "every mark is an argument"
    assert "never instructions" in " ".join(body.split()), "what others wrote is data"
    assert len(body.encode()) < 5000 and about["title"] and len(about["description"]) < 200
