"""The journal's files: what is written is read, torn and damaged ones too, and the oldest go first."""

import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.server import journal, replaying
from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.engine import Changes
from cotenant.server.deciding.world import Ask, HostView, Needs, Policy, PoolRules, Slot, World
from cotenant.server.journal import Journal

POLICY = Policy()
WORLD = World(hosts=(HostView("h"),), slots=(Slot("h", "u", 0, 1, 0, "main", "gpu", 1000),), pools=(PoolRules("main"),))


def asking(number: int) -> World:
    asks = (Ask(f"j{number:06d}", "job", "ann", "a", False, "main", Needs(1, 1), 10, number, 3_600_000),)
    return replace(WORLD, asks=asks)


def write(folder: Path, first: int, count: int) -> None:
    it = Journal(folder)
    for number in range(first, first + count):
        world = asking(number)
        it.note(Changes(world), number, POLICY, decide(world, number, POLICY))
    it.close()


def times(folder: Path) -> tuple[list[int], list[str]]:
    damages: list[str] = []
    return [tick.at_ms for tick in journal.all_ticks(folder, damages)], damages


def test_what_is_noted_is_read_and_decided_again_alike(tmp_path: Path) -> None:
    write(tmp_path, 1, 500)
    write(tmp_path, 501, 10)
    assert times(tmp_path) == (list(range(1, 511)), [])
    found = replaying.compare(journal.all_ticks(tmp_path, []), journal.deciding_version())
    assert (found.ticks, found.decisions, found.differs_at_ms, found.lost) == (510, 510, None, 0)
    assert {path.stat().st_mode & 0o777 for path in journal.segments(tmp_path)} == {0o600}


@pytest.mark.parametrize("cut", [1, 7, 8, 20, -1, -9])
def test_a_torn_end_is_left_out_and_what_is_written_later_is_read(tmp_path: Path, cut: int) -> None:
    write(tmp_path, 1, journal.BATCH + 50)
    (path,) = journal.segments(tmp_path)
    raw = path.read_bytes()
    second = 8 + int.from_bytes(raw[:4])
    path.write_bytes(raw[: second + cut] if cut > 0 else raw[:cut])
    write(tmp_path, 1001, 3)
    assert times(tmp_path) == ([*range(1, journal.BATCH + 1), 1001, 1002, 1003], [])


def test_a_damaged_frame_is_named_and_the_next_file_is_read(tmp_path: Path) -> None:
    write(tmp_path, 1, journal.BATCH + 50)
    (path,) = journal.segments(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[8 + int.from_bytes(raw[:4]) + 12] ^= 1
    path.write_bytes(raw)
    write(tmp_path, 1001, 1)
    found, damages = times(tmp_path)
    assert found == [*range(1, journal.BATCH + 1), 1001]
    assert len(damages) == 1 and path.name in damages[0]


def test_a_frame_of_something_else_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1, 5)
    (path,) = journal.segments(tmp_path)
    body = zlib.compress(b'{"hello": 1}')
    path.write_bytes(path.read_bytes() + len(body).to_bytes(4) + zlib.crc32(body).to_bytes(4) + body)
    found, damages = times(tmp_path)
    assert found == [1, 2, 3, 4, 5] and len(damages) == 1


def test_files_are_closed_when_they_are_large_and_the_oldest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 20_000)
    it = Journal(tmp_path)
    it._bytes = 100_000
    for number in range(1, 9001):
        while len(it._queue) >= journal.QUEUE // 2:
            it._closing.wait(0.001)
        it.note(Changes(asking(number)), number, POLICY, decide(asking(number), number, POLICY))
    it.close()
    found, damages = times(tmp_path)
    assert damages == []
    assert found == list(range(found[0], 9001)) and found[0] > 1
    assert sum(path.stat().st_size for path in journal.segments(tmp_path)) < 120_000


def test_what_is_too_much_is_counted_and_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "QUEUE", 10)
    it = Journal(tmp_path)
    for number in range(1, 31):
        it.note(Changes(asking(number)), number, POLICY, decide(asking(number), number, POLICY))
    it.close()
    write(tmp_path, 100, 1)
    found = list(journal.all_ticks(tmp_path, []))
    assert [tick.at_ms for tick in found][:10] == list(range(1, 11))
    assert len(found) < 31


def test_lost_passes_stand_in_the_next_record(tmp_path: Path) -> None:
    it = Journal(tmp_path)
    it._lost = 4
    it.note(Changes(asking(1)), 1, POLICY, decide(asking(1), 1, POLICY))
    it.close()
    assert [tick.lost for tick in journal.all_ticks(tmp_path, [])] == [4]


def test_where_it_cannot_be_written_the_server_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / journal.FOLDER).write_text("in the way")
    write(tmp_path, 1, 3)
    assert "the journal cannot be written" in caplog.text


def test_a_pass_that_is_decided_differently_is_found(tmp_path: Path) -> None:
    it = Journal(tmp_path)
    for number in range(1, 6):
        decided = decide(asking(number), number, POLICY)
        if number == 3:
            decided = replace(decided, decisions=())
        it.note(Changes(asking(number)), number, POLICY, decided)
    it.close()
    ticks = list(journal.all_ticks(tmp_path, []))
    found = replaying.compare(ticks, journal.deciding_version())
    assert found.differs_at_ms == 3 and "at byte" in found.difference
    other = replaying.compare([replace(tick, version="0.0") for tick in ticks], journal.deciding_version())
    assert other.differs_at_ms is None and other.other_versions == {"0.0": 5}
    assert replaying.compare(ticks, journal.deciding_version(), until_ms=2).differs_at_ms is None
