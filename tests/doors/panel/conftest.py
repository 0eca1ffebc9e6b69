"""Servers and a browser for tests of the page."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from labfixtures import cannot

sys.path.insert(0, os.path.dirname(__file__))

import chromium
from desk import Desk


@pytest.fixture(scope="package")
def desk() -> Iterator[Desk]:
    """One server with two cards for all tests that leave it as they found it."""
    with tempfile.TemporaryDirectory(prefix="ctn-panel-", ignore_cleanup_errors=True) as folder:
        made = Desk(Path(folder) / "data")
        try:
            yield made
            code, _ = made.stop()
            assert code == 0
            assert "Traceback" not in made.errors.read_text()
        finally:
            made.end()


@pytest.fixture(scope="package")
def people(desk: Desk) -> dict[str, str]:
    """Tokens: alice and bob are people of different owners, olga may operate, and alice has an agent."""
    return {
        "alice": desk.token("alice", "alice"),
        "bob": desk.token("bob", "bob"),
        "olga": desk.token("olga", "olga", "human", "read,write,operate"),
        "agent": desk.token("alice-agent", "alice", "agent"),
    }


@pytest.fixture
def own_desk(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    """Servers of a test's own."""
    made: list[Desk] = []

    def make(**options: object) -> Desk:
        made.append(Desk(tmp_path / f"d{len(made)}", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for item in made:
        item.end()


@pytest.fixture(scope="package")
def chromium_program() -> str:
    program = chromium.find()
    if program is None:
        cannot("no Chromium is installed (scripts/test installs it as root)")
    return str(program)


@pytest.fixture
def web(chromium_program: str) -> Iterator[chromium.Chromium]:
    """A browser of the test's own."""
    made = chromium.Chromium(chromium_program)
    try:
        yield made
    finally:
        made.close()
