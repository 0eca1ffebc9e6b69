"""The short count behind `near_cap` agrees with the sums that decide."""

from __future__ import annotations

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.server.deciding.usage import usage


@pytest.mark.parametrize("toml", ["", "[pools.default]\ncap = 3\n", '[hosts.local]\nshares = { "0" = 4 }\n'])
async def test_the_short_count_is_the_sum_that_decides(make_bench, toml: str) -> None:
    bench: Bench = await make_bench(Machine(cards=4), toml=toml)
    keeper = bench.control.context.keeper
    callers = [await bench.caller(name, "alice") for name in ("a", "b", "c")]
    held = []
    for caller in callers:
        held.append(await bench.control.leases.acquire(caller, gpus=1))
        await bench.control.leases.acquire(caller, gpus=0) if caller is not callers[2] else None
        await bench.settle()
        keeper.refresh(0)
        use = usage(keeper.world(), "default")
        assert keeper.used_and_cap("default") == (use.used, use.cap)
    await bench.control.leases.release(callers[0], held[0].lease_id)
    await bench.settle()
    keeper.refresh(0)
    use = usage(keeper.world(), "default")
    assert keeper.used_and_cap("default") == (use.used, use.cap)
