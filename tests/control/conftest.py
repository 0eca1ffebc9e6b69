"""`bench`: a server with one machine of two cards; `make_bench` with others. Doctor checks each at the end of its test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from bench import Bench
from fakehost import Machine

MakeBench = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def make_bench(tmp_path: Path) -> AsyncIterator[MakeBench]:
    made: list[Bench] = []

    async def make(*machines: Machine, toml: str = "", **options: Any) -> Bench:
        bench = Bench(tmp_path / f"data{len(made)}", *machines, toml=toml, **options)
        made.append(bench)
        await bench.open()
        return bench

    yield make
    for bench in made:
        await bench.settle()
        bench.check()
        await bench.close()


@pytest.fixture
async def bench(make_bench: MakeBench) -> Bench:
    return await make_bench()
