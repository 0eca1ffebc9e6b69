"""What a server decided, from its journal: decided again, shown, and run under other rules; at the command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from bench import Bench

from cotenant.server import journal, replaying, segments
from cotenant.server.segments import _HEAD

COTENANT = Path(sys.executable).with_name("cotenant")


async def cotenant(*words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run, [COTENANT, *words], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
async def recorded(bench: Bench) -> Path:
    """Two cards; a job over both, one that waits for it, and a small one behind: 100 s, 50 s and 10 s long."""
    a, b = await bench.caller("a", "alice"), await bench.caller("b", "bob")
    first = await bench.submit(a, gpus=2, name="first", hours=1)
    second = await bench.submit(b, gpus=2, name="second", hours=1)
    third = await bench.submit(a, gpus=1, name="third", hours=0.01)
    for job, runs_s in ((first, 100), (second, 50), (third, 10)):
        bench.clock.advance(runs_s)
        bench.machine.finish(bench.attempt(job)["id"], 0)
        await bench.settle()
    await bench.close()
    return bench.settings.data_dir


async def test_it_is_decided_alike_again(recorded: Path) -> None:
    done = await cotenant("replay", "--data", str(recorded))
    assert (done.returncode, done.stderr) == (0, "")
    assert "every byte the same" in done.stdout
    told = json.loads((await cotenant("replay", "--data", str(recorded), "--json")).stdout)
    assert told["matches"] and told["decisions"] >= 3 and not told["other_versions"]


@pytest.mark.usefixtures("spoils_journals")
async def test_another_decision_ends_it_with_the_first_difference(recorded: Path) -> None:
    _rewrite(recorded, lambda line: line.replace('"Start"', '"Begin"'))
    done = await cotenant("replay", "--data", str(recorded))
    assert done.returncode == 1
    assert "is decided differently now" in done.stdout and "Begin" in done.stdout


@pytest.mark.usefixtures("spoils_journals")
async def test_another_version_is_named_and_not_compared(recorded: Path) -> None:
    _rewrite(
        recorded, lambda line: line.replace(journal.deciding_version(), "0.0.1+other").replace('"Start"', '"Begin"')
    )
    done = await cotenant("replay", "--data", str(recorded))
    assert done.returncode == 0 and "another version" in done.stdout and "0.0.1+other" in done.stdout
    assert (await cotenant("replay", "--data", str(recorded), "--any-version")).returncode == 1


async def test_the_world_at_a_time_is_shown(recorded: Path) -> None:
    ticks = list(segments.all_ticks(recorded))
    when = next(tick for tick in ticks if len(tick.world.asks) == 2 and tick.world.holdings)
    stamp = _iso(when.at_ms)
    done = await cotenant("replay", "--data", str(recorded), "--until", stamp, "--show")
    assert done.returncode == 0, done.stderr
    assert "alice" in done.stdout and "bob" in done.stdout and "main" not in done.stderr
    told = json.loads((await cotenant("replay", "--data", str(recorded), "--until", stamp, "--show", "--json")).stdout)
    assert [one["agent"] for one in told["holders"]] == ["a"]
    assert [one["owner"] for one in told["waiting"]] == ["bob", "alice"]
    assert all(one["why"] for one in told["waiting"])
    early = await cotenant("replay", "--data", str(recorded), "--until", "2001-01-01", "--show")
    assert early.returncode == 1 and "begins later" in early.stderr


async def test_other_rules_say_who_would_have_waited_how_long(recorded: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[pools.default]\norder = "shortest"\n')
    words = ("replay", "--data", str(recorded), "--policy", str(rules))
    told = json.loads((await cotenant(*words, "--json")).stdout)
    waits = {
        (row["owner"], row["gpus"]): (round(row["waited_s"]), round(row["would_wait_s"])) for row in told["leases"]
    }
    assert waits["alice", 1] == (150, 100), "the short one goes first"
    assert waits["bob", 2] == (100, 110)
    assert round(told["waited_s"]["mean"]) == round(told["wait_s_as_before"]["mean"]), "the model does what was done"
    shown = await cotenant(*words)
    assert shown.returncode == 0 and "under these rules" in shown.stdout, shown.stderr


async def test_what_ran_before_the_time_asks_for_the_rest(bench: Bench, tmp_path: Path) -> None:
    a = await bench.caller("a", "alice")
    first = await bench.submit(a, gpus=2, hours=1)
    bench.clock.advance(15)
    second = await bench.submit(a, gpus=1, hours=2)
    since = _iso(bench.control.context.now() - 1)
    for job, runs_s in ((first, 10), (second, 10)):
        bench.clock.advance(runs_s)
        bench.machine.finish(bench.attempt(job)["id"], 0)
        await bench.settle()
    await bench.close()
    rules = tmp_path / "rules.toml"
    rules.write_text('[pools.default]\norder = "fifo"\n')
    done = await cotenant(
        "replay", "--data", str(bench.settings.data_dir), "--policy", str(rules), "--from", since, "--json"
    )
    told = json.loads(done.stdout)
    assert [(row["gpus"], row["waited_s"], row["would_wait_s"]) for row in told["leases"]] == [(2, 0, 0), (1, 10, 10)]


async def test_rules_for_a_pool_that_was_not_there_are_refused(recorded: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[pools.elsewhere]\ncap = 1\n")
    done = await cotenant("replay", "--data", str(recorded), "--policy", str(rules))
    assert done.returncode == 2 and "no pool elsewhere" in done.stderr and "default" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--until", "yesterday"), 2, "is no time"),
        (("--from", "2026-02-01", "--until", "2026-01-01"), 2, "after"),
        (("--url", "http://x"), 2, "asks no server"),
        ((), 1, "There is no journal"),
    ],
)
async def test_what_cannot_be_meant(tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    done = await cotenant("replay", "--data", str(tmp_path), *words)
    assert done.returncode == code and said in done.stderr, done


async def test_no_journal_is_written_where_none_is_wanted(make_bench: Any) -> None:
    bench = await make_bench(toml="[server]\njournal_days = 0\n")
    await bench.submit(await bench.caller("a", "alice"), gpus=1)
    await bench.close()
    assert segments.segments(bench.settings.data_dir) == []


async def test_a_restart_begins_another_file_and_both_are_followed(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    first = await bench.submit(a, gpus=2)
    await bench.restart(kill=True)
    bench.machine.finish(bench.attempt(first)["id"], 0)
    await bench.settle()
    await bench.close()
    assert len(segments.segments(bench.settings.data_dir)) == 2
    found = replaying.compare(segments.all_ticks(bench.settings.data_dir), journal.deciding_version())
    assert found.differs_at_ms is None and found.ticks > 2


async def test_a_journal_that_cannot_be_written_is_an_event_and_so_is_its_return(
    make_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "GATHER_S", 0.0)
    monkeypatch.setattr(journal, "RETRY_S", 0.0)
    bench = await make_bench()
    a, hours = await bench.caller("a", "alice"), count(1)

    async def until(kind: str) -> Any:
        """Submit jobs, each of another kind and so a reason for a pass, until the event is there."""
        for _ in range(200):
            await bench.submit(a, gpus=1, hours=next(hours))
            await asyncio.sleep(0.01)
            await bench.settle()
            if found := bench.events(kind):
                return found
        raise AssertionError(f"no {kind}")

    monkeypatch.setattr(segments, "LEAVE_BYTES", 1 << 60)
    (event,) = await until("journal.failed")
    assert event["severity"] == "warning" and "MiB are free" in event["reason"]
    monkeypatch.setattr(segments, "LEAVE_BYTES", 0)
    await until("journal.resumed")
    assert len(bench.events("journal.failed", "journal.resumed")) == 2
    await bench.close()
    ticks = list(segments.all_ticks(bench.settings.data_dir))
    assert any(tick.lost for tick in ticks)


def _rewrite(data: Path, change: Callable[[str], str]) -> None:
    """Write the journal again with every line changed."""
    for path in segments.segments(data):
        raw = path.read_bytes()
        at = raw.index(b"\n") + 1
        out = raw[:at]
        while at < len(raw):
            length, _ = _HEAD.unpack_from(raw, at)
            lines = zlib.decompress(raw[at + _HEAD.size : at + _HEAD.size + length]).decode().split("\n")
            body = zlib.compress("\n".join(map(change, lines)).encode())
            out += _HEAD.pack(len(body), zlib.crc32(body)) + body
            at += _HEAD.size + length
        path.write_bytes(out)


def _iso(at_ms: int) -> str:
    return datetime.fromtimestamp((at_ms + 1) / 1000, UTC).isoformat(timespec="milliseconds")
