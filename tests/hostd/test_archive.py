"""Attempts that wrote nothing leave a line in one file when they are forgotten, and their files serve another."""

import contextlib
import fcntl
import json
import os
import time

import pytest
from hostdclient import Hostd

from cotenant.hostd import archive
from cotenant.hostd.archive import Archive
from cotenant.hostd.protocol import Refused


def bases(hostd: Hostd) -> set[str]:
    return {path.stem for path in hostd.state.glob("attempts/*.record")}


async def test_the_files_of_a_silent_attempt_serve_another_and_it_is_still_known(hostd):
    for number in range(12):
        begun = await hostd.start(f"a{number}", ["sh", "-c", f"exit {number}"])
        await hostd.ended(f"a{number}")
        await hostd.ask("forget", attempt_ids=[f"a{number}"])
    assert len(bases(hostd)) <= 6, "made once, used again"
    for again in (False, True):
        if again:
            await hostd.kill()
            await hostd.again()
        known = await hostd.probe("a7")
        assert known["exit"]["code"] == 7 and known["clean"]
        assert await hostd.log_text("a7") == ""
        with pytest.raises(Refused) as refused:
            await hostd.start("a7", ["sh", "-c", "exit 9"], fence=8)
        assert refused.value.code == "spec_conflict", "it never runs twice, and never as something else"
        assert hostd.welcome.get("attempts", []) == []
    assert (await hostd.probe("a11"))["boot_id"] == begun["boot_id"]
    taken_over = await hostd.greet(take_over=True)
    assert [one["attempt_id"] for one in taken_over["attempts"]] == [f"a{number}" for number in range(12)]


async def test_files_that_somebody_has_locked_are_passed_over(hostd):
    for number in range(3):
        await hostd.start(f"a{number}", ["true"])
        await hostd.ended(f"a{number}")
    await hostd.ask("forget", attempt_ids=["a0", "a1", "a2"])
    with contextlib.ExitStack() as held:
        for path in hostd.state.glob("attempts/*.record"):
            fcntl.flock(held.enter_context(open(path, "rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        await hostd.start("b", ["sh", "-c", "exit 3"])
        assert (await hostd.ended("b"))["exit"]["code"] == 3


async def test_the_lock_is_free_when_the_end_is_told(hostd):
    """Forgotten in the same moment, the files serve the next start at once."""
    for number in range(150):
        await hostd.start(f"a{number}", ["true"])
        await hostd.ended(f"a{number}")
        hostd.reports.clear()
        await hostd.ask("forget", attempt_ids=[f"a{number}"])
    assert len(bases(hostd)) <= 6


async def test_what_wrote_a_log_keeps_its_files(hostd):
    await hostd.start("a1", ["sh", "-c", "echo mine >&2"])
    await hostd.ended("a1")
    await hostd.ask("forget", attempt_ids=["a1"])
    for number in range(8):
        await hostd.start(f"b{number}", ["echo", "other"])
        await hostd.ended(f"b{number}")
    assert await hostd.log_text("a1", "err") == "mine\n" and await hostd.log_text("a1") == ""


async def test_a_hostd_that_died_while_forgetting_goes_on_with_it(hostd):
    await hostd.start("a1", ["true"])
    await hostd.ended("a1")
    await hostd.kill()
    record = next(path for path in hostd.state.glob("attempts/*.record") if '"a1"' in path.read_text())
    with Archiving(hostd.state) as there:
        there.add([("a1", record.read_bytes())])
    await hostd.again()
    assert hostd.welcome.get("attempts", []) == [] and record.read_bytes() == b"\n"
    assert (await hostd.probe("a1"))["state"] == "exited"


class Archiving:
    """An archive on hostd's file, closed at the end."""

    def __init__(self, folder, keep_s=3600.0):
        self.archive = Archive(str(folder / "forgotten"), keep_s)

    def __enter__(self):
        return self.archive

    def __exit__(self, *_):
        self.archive.close()


def test_a_torn_line_costs_only_itself(tmp_path):
    with Archiving(tmp_path) as there:
        there.add([("a", b"one\n"), ("b", b"two \xff\n")])
    with open(tmp_path / "forgotten", "ab") as file:
        file.write(b'{"id": "c", "rec')
    with Archiving(tmp_path) as there:
        assert there.find("b") == b"two \xff\n" and "c" not in there
        there.add([("d", b"three\n")])
    with Archiving(tmp_path) as there:
        assert [there.find(name) for name in "abcd"] == [b"one\n", b"two \xff\n", None, b"three\n"]


def test_a_line_that_is_whole_but_for_its_end_was_never_written(tmp_path):
    """Else the attempt's own files would serve another, and nothing of it would be left."""
    with Archiving(tmp_path) as there:
        there.add([("a", b"one\n"), ("b", b"two\n")])
    os.truncate(tmp_path / "forgotten", os.stat(tmp_path / "forgotten").st_size - 1)
    with Archiving(tmp_path) as there:
        assert "a" in there and "b" not in there


async def test_files_whose_removal_was_cut_short_are_not_made_ahead(hostd):
    await hostd.kill()
    left = hostd.state / "attempts" / "00000777"
    for ending in (".out", ".err"):
        left.with_suffix(ending).touch(0o600)
    await hostd.again()
    assert not left.with_suffix(".out").exists()
    for number in range(8):
        await hostd.start(f"a{number}", ["true"])


def test_it_stays_bounded_by_age_and_by_size(tmp_path, monkeypatch):
    with Archiving(tmp_path) as there:
        there.add([(f"old{number}", b"x") for number in range(10)])
    lines = [json.loads(line) for line in (tmp_path / "forgotten").read_text().splitlines()]
    for line in lines:
        line["at"] = time.time() - 7200
    (tmp_path / "forgotten").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Archiving(tmp_path) as there:
        there.add([("new", b"y")])
        there.sweep()
        assert there.ids()[0][1] == "new" and there.find("new") == b"y" and there.find("old1") is None
        monkeypatch.setattr(archive, "MAX_BYTES", 4000)
        for number in range(200):
            there.add([(f"n{number}", b"z" * 50)])
            assert os.stat(tmp_path / "forgotten").st_size <= 4000
        assert there.find("n199") == b"z" * 50 and there.find("new") is None
