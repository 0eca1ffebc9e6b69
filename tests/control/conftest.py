"""`bench`: a server with one machine of two cards, checked by doctor at the end of every test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bench import Bench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with Bench(tmp_path / "data") as running:
        yield running
        await running.settle()
        running.check()
