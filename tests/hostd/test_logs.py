"""Log pages: whole lines, offsets that stay valid, and the cap under a live writer."""

import os
import sys
import time

import pytest
from hostdclient import until

from cotenant.hostd import logs

PY = sys.executable


def page(path, offset=None, tail=None, size=1000, over=False):
    return logs.read_page(str(path), offset, tail, size, over)


def test_a_missing_or_empty_log_is_empty(tmp_path):
    assert page(tmp_path / "none", 0).end == 0
    (tmp_path / "log").write_text("")
    for tail in (None, 0, 5):
        got = page(tmp_path / "log", None, tail, over=True)
        assert (got.text, got.start, got.end, got.final) == ("", 0, 0, True)


def test_a_line_that_is_still_written_waits(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\ntw")
    assert page(log, 0).text == "one\n"
    assert page(log, 4).text == "" and page(log, 4).end == 4 and not page(log, 4).final
    log.write_text("one\ntwo")
    last = page(log, 4, over=True)
    assert last.text == "two" and last.final


def test_pages_join_to_the_whole_with_no_line_torn(tmp_path):
    log = tmp_path / "log"
    whole = "".join(f"line {number} ü\n" for number in range(3000))
    log.write_text(whole)
    at, parts = 0, []
    while True:
        got = page(log, at, size=777, over=True)
        parts.append(got.text)
        assert got.start == at and got.text.endswith("\n")
        at = got.end
        if got.final:
            break
    assert "".join(parts) == whole


def test_a_line_longer_than_a_page_comes_in_pieces_of_whole_characters(tmp_path):
    log = tmp_path / "log"
    log.write_text("€" * 1000 + "\nend\n")
    at, text = 0, ""
    while at < log.stat().st_size:
        got = page(log, at, size=100)
        assert got.end > at and "\ufffd" not in got.text
        at, text = got.end, text + got.text
    assert text == "€" * 1000 + "\nend\n"


@pytest.mark.parametrize(("tail", "text"), [(0, ""), (1, "3\n"), (2, "2\n3\n"), (3, "1\n2\n3\n"), (9, "1\n2\n3\n")])
def test_the_last_lines(tmp_path, tail, text):
    log = tmp_path / "log"
    log.write_text("1\n2\n3\n")
    assert page(log, None, tail).text == text
    log.write_text("1\n2\n3\nunfinished")
    assert page(log, None, tail).text == text
    assert page(log, None, 1, over=True).text == "unfinished"


def test_the_last_lines_of_a_log_of_many_blocks(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"{number:>99}\n" for number in range(5000)))
    got = page(log, None, 2000, size=1 << 20)
    assert got.text.split() == [str(number) for number in range(3000, 5000)]


def test_the_cap_frees_the_oldest_part_and_keeps_offsets(tmp_path):
    log = tmp_path / "log"
    with open(log, "ab", buffering=0) as writer:
        writer.writelines(b"%99d\n" % number for number in range(60_000))
        size = log.stat().st_size
        assert logs.cap(str(log), 1 << 20)
        assert not logs.cap(str(log), 1 << 20), "nothing more to free"
        writer.write(b"after\n")
    assert log.stat().st_size == size + 6 and log.stat().st_blocks * 512 <= (1 << 20) + 65536
    first = page(log, 0)
    assert first.start == first.oldest > 0
    begin = int(first.text.split("\n")[0])
    assert begin == first.oldest // 100, "the page begins with a whole line at its own offset"
    assert page(log, None, 1).text == "after\n"
    assert page(log, size - 100).text.startswith(f"{59_999:>99}\n")


async def test_a_job_that_fills_its_log_is_capped_while_it_writes(hostd):
    """The job is never blocked or told; disk use falls; what is left are whole lines."""
    writer = "import time\nfor n in range(60000): print('%99d' % n)\nprint('done')\ntime.sleep(100)"
    await hostd.start("a1", [PY, "-u", "-c", writer], log_max_mib=1)
    record = next(path for path in hostd.state.glob("attempts/*.record") if '"a1"' in path.read_text())
    out = record.with_suffix(".out")
    await until(lambda: out.stat().st_size >= 6_000_005, "all lines", 60)
    await until(lambda: out.stat().st_blocks * 512 < 1_300_000, "the cap", 20)
    got = await hostd.ask("read_log", attempt_id="a1", stream="out", offset=0, tail_lines=None, max_bytes=1000)
    assert got["oldest"] == got["start"] > 4_000_000 and got["size"] == out.stat().st_size
    lines = got["text"].splitlines()
    assert [int(line) for line in lines] == list(range(int(lines[0]), int(lines[0]) + len(lines)))
    assert (await hostd.ask("read_log", attempt_id="a1", stream="out", tail_lines=1))["text"] == "done\n"


async def test_logs_stay_readable_after_forgetting(hostd):
    await hostd.start("a1", ["sh", "-c", "echo one; printf two"])
    await hostd.ended("a1")
    await hostd.ask("forget", attempt_ids=["a1"])
    for _ in range(2):
        got = await hostd.ask("read_log", attempt_id="a1", stream="out", offset=0)
        assert got["text"] == "one\ntwo" and got["final"]
        await hostd.kill()
        await hostd.again()


async def test_logs_of_long_forgotten_attempts_go_while_hostd_runs(hostd):
    for name in ("a1", "a2", "a3"):
        await hostd.start(name, ["echo", name])
        await hostd.ended(name)
    await hostd.ask("forget", attempt_ids=["a1", "a2"])
    files = {
        name: next(p for p in hostd.state.glob("attempts/*.record") if f'"{name}"' in p.read_text())
        for name in ("a1", "a2")
    }
    long_ago = time.time() - 15 * 86_400
    os.utime(files["a1"], (long_ago, long_ago))
    await hostd.ask("forget", attempt_ids=["a3"])
    assert not list(files["a1"].parent.glob(f"{files['a1'].stem}.*")), "nobody wrote to it for more than 14 days"
    assert files["a2"].exists()
    assert (await hostd.ask("probe", attempt_id="a1"))["state"] == "unknown"


async def test_a_job_that_dies_in_a_line_leaves_the_line(hostd):
    await hostd.start("a1", ["sh", "-c", "printf 'half a li'; kill -9 $$"])
    await hostd.ended("a1")
    got = await hostd.ask("read_log", attempt_id="a1", stream="out", offset=0)
    assert got["text"] == "half a li" and got["final"]
