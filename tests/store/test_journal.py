"""The journal's files: what is written is read, torn and damaged ones too, and the oldest go first."""

import os
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.server import journal, replaying, segments
from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.engine import Changes
from cotenant.server.deciding.world import Ask, HostView, Needs, Policy, PoolRules, Slot, World
from cotenant.server.journal import Journal
from cotenant.server.segments import Found

pytestmark = pytest.mark.usefixtures("spoils_journals")
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


def times(folder: Path) -> tuple[list[int], Found]:
    found = Found()
    return [tick.at_ms for tick in segments.all_ticks(folder, found)], found


def first_frame(raw: bytes) -> tuple[int, int]:
    """Where the first frame of a file begins, and where it ends."""
    begin = raw.index(b"\n") + 1
    return begin, begin + 8 + int.from_bytes(raw[begin : begin + 4])


def test_what_is_noted_is_read_and_decided_again_alike(tmp_path: Path) -> None:
    write(tmp_path, 1, 500)
    write(tmp_path, 501, 10)
    assert times(tmp_path) == (list(range(1, 511)), Found())
    found = replaying.compare(segments.all_ticks(tmp_path), journal.deciding_version())
    assert (found.ticks, found.decisions, found.differs_at_ms, found.lost) == (510, 510, None, 0)
    assert {path.stat().st_mode & 0o777 for path in segments.segments(tmp_path)} == {0o600}


@pytest.mark.parametrize("cut", [1, 7, 8, 20, -1, -9])
def test_a_torn_end_is_told_and_left_out_and_what_is_written_later_is_read(tmp_path: Path, cut: int) -> None:
    write(tmp_path, 1, journal.BATCH + 50)
    (path,) = segments.segments(tmp_path)
    raw = path.read_bytes()
    _, second = first_frame(raw)
    path.write_bytes(raw[: second + cut] if cut > 0 else raw[:cut])
    write(tmp_path, 1001, 3)
    read, found = times(tmp_path)
    assert read == [*range(1, journal.BATCH + 1), 1001, 1002, 1003]
    assert len(found.torn) == 1 and path.name in found.torn[0] and not found.damaged


@pytest.mark.parametrize("kept", [0, 5, 30])
def test_a_file_that_was_torn_in_its_first_line_is_told(tmp_path: Path, kept: int) -> None:
    write(tmp_path, 1, 5)
    (path,) = segments.segments(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    write(tmp_path, 1001, 1)
    read, found = times(tmp_path)
    assert read == [1001] and len(found.torn) == 1 and not found.damaged


def test_a_damaged_frame_is_named_and_the_next_file_is_read(tmp_path: Path) -> None:
    write(tmp_path, 1, journal.BATCH + 50)
    (path,) = segments.segments(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[first_frame(raw)[1] + 12] ^= 1
    path.write_bytes(raw)
    write(tmp_path, 1001, 1)
    read, found = times(tmp_path)
    assert read == [*range(1, journal.BATCH + 1), 1001]
    assert len(found.damaged) == 1 and path.name in found.damaged[0] and not found.torn


def test_a_frame_of_something_else_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1, 5)
    (path,) = segments.segments(tmp_path)
    body = zlib.compress(b'{"hello": 1}')
    path.write_bytes(path.read_bytes() + len(body).to_bytes(4) + zlib.crc32(body).to_bytes(4) + body)
    read, found = times(tmp_path)
    assert read == [1, 2, 3, 4, 5] and len(found.damaged) == 1


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1, 5)
    (tmp_path / segments.FOLDER / f"{7:015d}{segments.SUFFIX}").write_text("a shopping list\n")
    (tmp_path / segments.FOLDER / f"notes{segments.SUFFIX}").write_text("of no interest")
    read, found = times(tmp_path)
    assert read == [1, 2, 3, 4, 5] and len(found.damaged) == 1


def test_another_format_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    write(tmp_path, 1, 5)
    (path,) = segments.segments(tmp_path)
    other = f"cotenant journal {segments.FORMAT + 1} 9.9+abc"
    path.write_bytes(other.encode() + path.read_bytes()[first_frame(path.read_bytes())[0] - 1 :])
    write(tmp_path, 1001, 2)
    with pytest.raises(segments.OtherFormat, match=rf"{path.name} .*format 2.*9\.9\+abc.*--from"):
        times(tmp_path)
    assert [tick.at_ms for tick in segments.all_ticks(tmp_path, since_ms=1001)] == [1001, 1002]


def test_only_the_files_of_the_time_are_read(tmp_path: Path) -> None:
    for begin in (100, 200, 300):
        write(tmp_path, begin, 5)
    files = segments.segments(tmp_path)
    assert [segments.number(path) for path in files] == [100, 200, 300]
    assert segments.segments(tmp_path, since_ms=250, until_ms=299) == files[1:2]
    assert segments.segments(tmp_path, since_ms=200) == files[1:]
    assert segments.segments(tmp_path, until_ms=99) == []
    assert [tick.at_ms for tick in segments.all_ticks(tmp_path, since_ms=203, until_ms=301)] == [203, 204, 300, 301]
    files[0].write_text("not even looked at")
    for until, at in ((250, 204), (202, 202), (None, 304)):
        tick = segments.last_tick(tmp_path, Found(), until_ms=until)
        assert tick is not None and tick.at_ms == at


def test_where_the_clock_was_set_back_the_names_still_tell_the_order(tmp_path: Path) -> None:
    write(tmp_path, 5000, 2)
    write(tmp_path, 10, 2)
    assert times(tmp_path)[0] == [5000, 5001, 10, 11]


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
    found, wrong = times(tmp_path)
    assert wrong == Found()
    assert found == list(range(found[0], 9001)) and found[0] > 1
    assert sum(path.stat().st_size for path in segments.segments(tmp_path)) < 120_000


def test_what_is_older_than_the_days_goes_when_a_file_begins(tmp_path: Path) -> None:
    for begin in (100, 200, 300):
        write(tmp_path, begin, 2)
    old, younger, newest = segments.segments(tmp_path)
    now = newest.stat().st_mtime
    os.utime(old, (now, now - 31 * 86_400))
    os.utime(younger, (now, now - 29 * 86_400))
    write(tmp_path, 400, 2)
    assert times(tmp_path)[0] == [200, 201, 300, 301, 400, 401]


def test_what_is_too_much_is_counted_and_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "QUEUE", 10)
    it = Journal(tmp_path)
    for number in range(1, 31):
        it.note(Changes(asking(number)), number, POLICY, decide(asking(number), number, POLICY))
    it.close()
    write(tmp_path, 100, 1)
    found = list(segments.all_ticks(tmp_path))
    assert [tick.at_ms for tick in found][:10] == list(range(1, 11))
    assert len(found) < 31


def test_lost_passes_stand_in_the_next_record(tmp_path: Path) -> None:
    it = Journal(tmp_path)
    it._unqueued = 4
    it.note(Changes(asking(1)), 1, POLICY, decide(asking(1), 1, POLICY))
    it.close()
    assert [tick.lost for tick in segments.all_ticks(tmp_path)] == [4]


class Trouble:
    """A journal with a disk that has room or has not, and what it told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str | None] = []
        self.journal = Journal(folder, tell=self.told.append)
        self.room = True
        monkeypatch.setattr(journal, "RETRY_S", 0.0)
        monkeypatch.setattr(journal, "GATHER_S", 0.0)
        monkeypatch.setattr(segments, "append", self._append)

    def _append(self, fd: int, frame: bytes) -> int:
        """As a disk that fills up: half of it, which is how a file system says so."""
        return os.write(fd, frame if self.room else frame[: len(frame) // 2])

    def note(self, *numbers: int) -> None:
        for number in numbers:
            world = asking(number)
            self.journal.note(Changes(world), number, POLICY, decide(world, number, POLICY))
        deadline = time.monotonic() + 10
        while self.journal._queue or self.journal.busy:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_on_a_full_disk_passes_are_left_out_it_is_told_once_and_it_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Trouble(tmp_path, monkeypatch)
    it.note(1, 2)
    it.room = False
    it.note(3)
    it.note(4, 5)
    assert it.told == ["No space left on device"]
    it.room = True
    it.note(6)
    it.journal.close()
    assert it.told == ["No space left on device", None]
    read, found = times(tmp_path)
    assert read == [1, 2, 6] and found == Found(), "nothing torn stays, and no empty file"
    assert [tick.lost for tick in segments.all_ticks(tmp_path)] == [0, 0, 3]
    assert replaying.compare(segments.all_ticks(tmp_path), journal.deciding_version()).differs_at_ms is None


def test_after_a_failure_nothing_is_tried_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Trouble(tmp_path, monkeypatch)
    monkeypatch.setattr(journal, "RETRY_S", 3600.0)
    it.room = False
    it.note(1)
    it.room = True
    it.note(2, 3)
    it.journal.close()
    assert times(tmp_path) == ([], Found()) and len(it.told) == 1


def test_room_is_left_for_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Trouble(tmp_path, monkeypatch)
    monkeypatch.setattr(segments, "LEAVE_BYTES", 1 << 60)
    it.note(1)
    it.journal.close()
    assert times(tmp_path)[0] == [] and it.told[0] is not None and "MiB are free" in it.told[0]


def test_where_it_cannot_be_written_the_server_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / segments.FOLDER).write_text("in the way")
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
    ticks = list(segments.all_ticks(tmp_path))
    found = replaying.compare(ticks, journal.deciding_version())
    assert found.differs_at_ms == 3
    assert found.difference.splitlines()[0].startswith(("-", "+", " ")), found.difference
    assert any(line.startswith(("-", "+")) for line in found.difference.splitlines())
    other = replaying.compare([replace(tick, version="0.0") for tick in ticks], journal.deciding_version())
    assert other.differs_at_ms is None and other.other_versions == {"0.0": 5}
    assert replaying.compare(ticks[:2], journal.deciding_version()).differs_at_ms is None
