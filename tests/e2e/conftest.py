"""Servers of a test's own: whatever they started is gone when the test is over."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakenvml import FakeNvml

sys.path.insert(0, os.path.dirname(__file__))

from rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Makes servers, clients and jobs in `tmp_path`; ends everything afterwards."""
    made = Rig(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def module_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The same for all tests of a module; each leaves nothing running."""
    made = Rig(tmp_path_factory.mktemp("rig"))
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """`make_rig(env={…})` for servers in an environment of their own."""
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(tmp_path, **options))
        return made[-1]

    try:
        yield make
    finally:
        for item in made:
            item.end()


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    """Four cards that no other test on this machine has: cards are locked by UUID in a place that all users share."""
    return FakeNvml(tmp_path / "nvml.state").create(gpus=4, host=uuid.uuid4().hex)
