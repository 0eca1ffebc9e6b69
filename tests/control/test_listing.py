"""resources/list: live objects, in pages that neither repeat nor hide anything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from bench import Bench
from fakehost import Machine

from cotenant.resources import catalog
from cotenant.resources.catalog import Catalog
from cotenant.server.errors import BadRequest
from cotenant.server.model.caller import Caller

MakeBench = Callable[..., Awaitable[Bench]]


async def pages(bench: Bench, caller: Caller) -> list[list[str]]:
    out, cursor = [], None
    while True:
        page, cursor = await Catalog().listing(bench.control, caller, cursor)
        out.append([item["uri"] for item in page])
        if cursor is None:
            return out


async def test_pages_hold_everything_once(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "PAGE", 7)
    bench = await make_bench(Machine(cards=12))
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    jobs = [await bench.submit(a, f"train {n}", gpus=1) for n in range(15)]
    await bench.submit(b, "another's", gpus=1)
    lease = await bench.queue(a, gpus=1)
    found = await pages(bench, a)
    flat = [uri for page in found for uri in page]
    assert all(len(page) == 7 for page in found[:-1]) and 0 < len(found[-1]) <= 7
    assert len(set(flat)) == len(flat)
    assert set(flat) == {item["uri"] for item in await Catalog().whole(bench.control, a)}
    mine = [uri for uri in flat if "/jobs/" in uri]
    assert mine == [f"cotenant://jobs/{job}{part}" for job in reversed(jobs) for part in ("", "/log")], "newest first"
    assert f"cotenant://leases/{lease}" in flat
    assert {uri for uri in flat if "/gpus/" in uri} == {f"cotenant://hosts/local/gpus/{n}" for n in range(12)}


async def test_what_goes_between_two_pages_hides_nothing(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await make_bench()
    a = await bench.caller("a", "alice")
    before = len(await Catalog().whole(bench.control, a))
    monkeypatch.setattr(catalog, "PAGE", before + 4)  # the page ends with the log of the second job
    jobs = [await bench.submit(a, f"train {n}", gpus=1) for n in range(6)]
    first, cursor = await Catalog().listing(bench.control, a)
    last = jobs[-2]
    assert cursor == f"cotenant://jobs/{last}/log"
    token, _ = await bench.control.confirmations.mint(a, "cancel_job", last)
    await bench.control.jobs.cancel(a, last, confirm_token=token)  # the very entry that the cursor names
    await bench.settle()
    seen = {item["uri"] for item in first}
    while cursor is not None:
        page, cursor = await Catalog().listing(bench.control, a, cursor)
        assert not seen & {item["uri"] for item in page}
        seen |= {item["uri"] for item in page}
    assert {f"cotenant://jobs/{job}" for job in jobs if job != last} <= seen


@pytest.mark.parametrize("cursor", ["", "7", "cotenant://nothing", "x" * 5000, "cotenant://jobs/a b"])
async def test_what_is_no_cursor_is_refused(bench: Bench, cursor: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await Catalog().listing(bench.control, await bench.caller("a"), cursor)
    assert refused.value.code == "bad_cursor"


async def test_a_token_bound_to_its_name_lists_its_own_work_alone(bench: Bench) -> None:
    a, bound = await bench.caller("a", "alice"), await bench.caller("bound", "alice", own_only=True)
    job = await bench.submit(a, "train", gpus=0)
    mine = await bench.submit(bound, "train mine", gpus=0)
    listed = {item["uri"] for item in await Catalog().whole(bench.control, bound)}
    assert f"cotenant://jobs/{mine}" in listed and f"cotenant://jobs/{job}" not in listed
