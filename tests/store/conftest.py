"""`db`: a real database in a directory of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cotenant.server.store.db import Database


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(tmp_path / "control.db")
    yield opened
    await opened.close()
