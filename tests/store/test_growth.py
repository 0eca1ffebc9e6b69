"""What is asked every second, or for every grant, must not cost in proportion to all that ever was."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cotenant.server import config
from cotenant.server.control.grants import recheck
from cotenant.server.control.hosts import _due
from cotenant.server.store import jobs, requests, worlds
from cotenant.server.store.db import Tx, configure, migrate

#: Partial indexes: they hold what lives, and may be walked.
LIVING = ("attempt_living", "job_living", "slots_in_use", "one_live_attempt_per_job")


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    path = tmp_path / "control.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as opened:
        configure(opened)
        migrate(opened, path)
        opened.row_factory = sqlite3.Row
        yield opened


def _recheck(c: sqlite3.Connection) -> Any:
    settings = config.parse("[pools.default]\ncap = 4\n", data_dir=Path("/nowhere"))
    return recheck(Tx(c), settings, pool="default", owner="o", caller="a", human=False, units=840)


@pytest.mark.parametrize(
    "asked",
    [
        lambda c: _due(c, 1),
        _recheck,
        lambda c: jobs.attempts_on(c, "local"),
        lambda c: jobs.find_same(Tx(c), "a", "hash", 1),
        lambda c: requests.find(Tx(c), "a", "r", "verb", "digest"),
        lambda c: worlds.asks(c, ["job_1"], ["lse_1"]),
        lambda c: worlds.holdings(c, ["lse_1"]),
        lambda c: worlds.spent(c, 1, {}),
    ],
    ids=["tick", "recheck", "attempts", "same spec", "request", "asks", "holdings", "gpu hours"],
)
def test_no_table_of_ended_things_is_walked(
    connection: sqlite3.Connection, asked: Callable[[sqlite3.Connection], Any]
) -> None:
    said: list[str] = []
    connection.set_trace_callback(said.append)
    asked(connection)
    connection.set_trace_callback(None)
    assert said
    for sql in said:
        for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}"):
            walks = row["detail"].startswith("SCAN") and not row["detail"].endswith(LIVING)
            assert not walks, f"{row['detail']}: {sql}"
