"""Everything that servers decide while the tests run is decided again when the run ends: a difference fails the run.

Every server writes a journal into its data directory, and pytest keeps those of a run until it ends, so that nothing has to be
gathered meanwhile. What a test throws away before, or keeps elsewhere, it hands to `check` itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant.server import journal, replaying, segments

_SPOILT: pytest.StashKey[set[Path]] = pytest.StashKey()
_TOLD: pytest.StashKey[str] = pytest.StashKey()


def check(data_dir: Path) -> tuple[int, int, list[str]]:
    """Decide the journal of one data directory again: passes, decisions, and what is wrong, one text each."""
    read = segments.Found()
    # all of them are of this checkout, even where somebody worked on it meanwhile
    found = replaying.compare(segments.all_ticks(data_dir, read), journal.deciding_version(), any_version=True)
    wrong = list(read.damaged)
    if found.differs_at_ms is not None:
        wrong.append(
            f"the pass at {found.differs_at_ms} is decided differently now (- recorded, + now):\n{found.difference}"
        )
    return found.ticks, found.decisions, [f"{'/'.join(data_dir.parts[-3:])}: {text}" for text in wrong]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SPOILT] = set()


@pytest.fixture
def spoils_journals(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The test writes journals under `tmp_path` that are wrong on purpose: nobody decides them again."""
    request.config.stash[_SPOILT].add(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def decided_alike_again(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set up before all else, so that it ends after every server."""
    yield
    spoilt = request.config.stash[_SPOILT]
    places = {
        path.parent.parent for path in tmp_path_factory.getbasetemp().rglob(f"{segments.FOLDER}/*{segments.SUFFIX}")
    }
    places = {place for place in places if spoilt.isdisjoint((place, *place.parents))}
    passes = decisions = 0
    wrong: list[str] = []
    for place in sorted(places):
        more_passes, more_decisions, more_wrong = check(place)
        passes, decisions = passes + more_passes, decisions + more_decisions
        wrong += more_wrong
    request.config.stash[_TOLD] = f"decided again: {passes} passes of {len(places)} servers, {decisions} decisions"
    if wrong:
        pytest.fail("what servers decided in this run is decided differently now:\n" + "\n".join(wrong), pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if told := config.stash.get(_TOLD, ""):
        terminalreporter.write_line(told)
