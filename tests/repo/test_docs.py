"""Documents that say what code says: states, commands, links."""

import re
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

import pytest

from cotenant.server.model import states
from cotenant.tools import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "node_modules" for part in path.relative_to(ROOT).parts)
)
STATES = (ROOT / "docs" / "states.md").read_text()


def section(title: str) -> str:
    """The text under a heading of docs/states.md, up to the next one."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", STATES, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def rows(text: str) -> dict[str, list[str]]:
    """First cell -> all cells, of every table row whose first cell is a word in backquotes."""
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    return {row[0].strip("`"): row for row in table}


def arrows(text: str) -> set[tuple[str, str]]:
    return set(re.findall(r"^ +(\w+) --> (\w+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("Job", states.JobState),
        ("Lease", states.LeaseState),
        ("Slot", states.SlotUse),
        ("Attempt", states.AttemptState),
        ("Link to a host", states.LinkState),
    ],
)
def test_each_state_has_its_sentence(title: str, words: type[StrEnum]) -> None:
    table = rows(section(title))
    assert list(table) == [word.value for word in words]
    assert all(len(row[1]) > 10 and row[1].endswith(".") for row in table.values())


@pytest.mark.parametrize(("title", "moves"), [("Job", states.JOB_NEXT), ("Lease", states.LEASE_NEXT)])
def test_the_moves_are_those_of_the_code(title: str, moves: dict[StrEnum, frozenset[StrEnum]]) -> None:
    table = {name: set(re.findall(r"`(\w+)`", row[2])) for name, row in rows(section(title)).items()}
    assert table == {state.value: {to.value for to in after} for state, after in moves.items()}
    allowed = {(state.value, to.value) for state, after in moves.items() for to in after}
    assert arrows(section(title)) <= allowed


@pytest.mark.parametrize(("title", "words"), [("Slot", states.SlotUse), ("Attempt", states.AttemptState)])
def test_the_other_pictures_have_every_state_and_no_other(title: str, words: type[StrEnum]) -> None:
    drawn = {state for arrow in arrows(section(title)) for state in arrow}
    assert drawn == {word.value for word in words}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_every_script_is_named_where_people_look() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    for script in (ROOT / "scripts").iterdir():
        if script.suffix != ".sh":
            assert f"scripts/{script.name}" in text, (
                f"scripts/{script.name} is in neither README.md nor CONTRIBUTING.md"
            )


def test_the_readme_shows_commands_that_exist() -> None:
    listing = subprocess.run(
        [Path(sys.executable).with_name("cotenant"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = set(re.findall(r"^  ([a-z-]+) {2,}", listing, re.MULTILINE))
    shown = set(re.findall(r"(?:^|bin/)cotenant ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert shown <= commands, f"README.md shows {sorted(shown - commands)}"


def test_the_page_of_tools_is_the_one_made_from_the_code() -> None:
    stored = (ROOT / "docs" / "tools.md").read_text()
    assert stored == reference.page(), "make it anew: .venv/bin/python -m cotenant.tools.reference > docs/tools.md"
