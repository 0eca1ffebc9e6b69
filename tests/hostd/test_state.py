"""The host's memory: what must survive, and where it may lie."""

import asyncio
import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.hostd.durable import sync_directory, write_all
from cotenant.hostd.outbox import Outbox
from cotenant.hostd.protocol import Refused, SlotRef
from cotenant.hostd.state import NETWORK_FILE_SYSTEMS, State, StateError, file_system_of, overlap


@pytest.fixture
def opened(tmp_path):
    """A function that opens the state anew, as the next hostd would."""
    (tmp_path / "locks").mkdir()
    states = []

    def again():
        if states:
            states.pop().close()
        state = State(str(tmp_path / "state"), str(tmp_path / "locks"))
        state.open()
        states.append(state)
        return state

    yield again
    for state in states:
        state.close()


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:30 / /home rw,relatime shared:1 - nfs4 filer:/home rw
31 30 0:31 / /home/me/fast rw - tmpfs tmpfs rw
32 22 0:32 / /mnt/with\\040blank rw - cifs //server/share rw
33 22 0:33 / /twice rw - ext4 /dev/vdb rw
35 22 0:35 / /größe rw - nfs4 filer:/x rw
34 33 0:34 / /twice rw - lustre x rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/x", "ext4"),
        ("/home/me/state", "nfs4"),
        ("/home/me/fast/state", "tmpfs"),
        ("/homestead", "ext4"),
        ("/mnt/with blank/x", "cifs"),
        ("/twice/x", "lustre"),
        ("/größe/x", "nfs4"),
    ],
)
def test_the_file_system_of_a_path(path, kind):
    assert file_system_of(path, MOUNTS) == kind


def test_a_network_file_system_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("cotenant.hostd.state.file_system_of", lambda path: "nfs4")
    with pytest.raises(StateError, match="nfs4"):
        State(str(tmp_path / "state"), str(tmp_path)).open()
    assert {"nfs", "nfs4", "lustre"} <= NETWORK_FILE_SYSTEMS


async def test_fences_and_tombstones_are_on_disk_when_they_are_answered(opened, tmp_path):
    state = opened()
    await asyncio.gather(*(state.raise_fence((SlotRef("GPU-1"),), fence) for fence in range(1, 50)))
    await state.bury("a1")
    lines = [json.loads(line) for line in (tmp_path / "state" / "journal").read_text().splitlines()]
    assert max(line.get("fence", 0) for line in lines) == 49 and lines[-1]["tombstone"] == "a1"
    first = state.state_id
    state = opened()
    assert state.state_id == first and state.max_fence == 49 and set(state.tombstones) == {"a1"} and state.starts == 2
    with pytest.raises(Refused):
        state.check_fence((SlotRef("GPU-1"),), 48)


async def test_a_torn_line_at_the_end_of_the_journal_costs_nothing_else(opened, tmp_path):
    state = opened()
    await state.raise_fence((SlotRef("GPU-1"),), 7)
    with open(tmp_path / "state" / "journal", "ab") as file:
        file.write(b'{"fence": 99, "slot": ["GPU')
    state = opened()
    assert state.max_fence == 7
    await state.raise_fence((SlotRef("GPU-1"),), 8)
    assert opened().max_fence == 8


async def test_a_long_journal_is_made_short_at_the_start_and_says_the_same(opened, tmp_path):
    state = opened()
    await state.bury("a1")
    journal = tmp_path / "state" / "journal"
    lines = [json.dumps({"fence": n, "slot": [f"GPU-{n % 3}" + "x" * 40, 0, 1]}) + "\n" for n in range(1, 4001)]
    with open(journal, "a") as file:
        file.writelines(lines)
    assert journal.stat().st_size > 256 * 1024
    state = opened()
    assert journal.stat().st_size < 1000
    assert state.max_fence == 4000 and set(state.tombstones) == {"a1"}
    assert opened().max_fence == 4000


async def test_a_journal_stays_short_while_hostd_runs_and_loses_nothing(opened, tmp_path):
    state = opened()
    journal = tmp_path / "state" / "journal"
    for number in range(1, 9001):
        last = asyncio.ensure_future(state.raise_fence((SlotRef(f"GPU-{number % 3}" + "x" * 40),), number))
        if number % 900 == 0:
            await state.bury(f"a{number}")
    await last
    assert journal.stat().st_size < 2 * 256 * 1024
    again = opened()
    assert again.max_fence == 9000 and list(again.tombstones) == [f"a{number}" for number in range(900, 9001, 900)]
    with pytest.raises(Refused):
        again.check_fence((SlotRef("GPU-1" + "x" * 40),), 8997)


async def test_a_journal_that_cannot_be_made_shorter_goes_on(opened, tmp_path, monkeypatch, capsys):
    state = opened()
    (tmp_path / "state" / "journal.new").mkdir()  # so that the replacement cannot be written
    for number in range(1, 6001):
        last = asyncio.ensure_future(state.raise_fence((SlotRef("GPU-1" + "x" * 40),), number))
    await last
    assert "cannot be made shorter" in capsys.readouterr().err
    (tmp_path / "state" / "journal.new").rmdir()
    assert opened().max_fence == 6000


async def test_no_fence_is_lost_where_the_name_of_a_shorter_journal_cannot_be_synced(opened, tmp_path, monkeypatch):
    """From the rename on only the new file counts; until its name is on disk nothing in it is called written."""
    state, failing = opened(), [True]

    def sync(path):
        if failing[0]:
            raise OSError(5, "Input/output error")
        sync_directory(path)

    monkeypatch.setattr("cotenant.hostd.durable.sync_directory", sync)
    for number in range(1, 6001):
        last = asyncio.ensure_future(state.raise_fence((SlotRef("GPU-1" + "x" * 40),), number))
        last.add_done_callback(lambda done: done.exception())
    with pytest.raises(Refused) as refused:
        await last
    assert refused.value.code == "storage"
    failing[0] = False
    await state.raise_fence((SlotRef("GPU-2"),), 7000)
    assert (tmp_path / "state" / "journal").stat().st_size < 256 * 1024, "it was made shorter"
    assert opened().max_fence == 7000


async def test_what_could_not_be_written_is_written_before_anything_later_counts(opened, monkeypatch):
    """Half a line on a full disk: the repeat of a refused start must not be obeyed on the strength of a later line."""
    state = opened()
    await state.raise_fence((SlotRef("GPU-1"),), 1)
    writes = []

    def full(fd, body):
        writes.append(body)
        if len(writes) <= 2:
            os.write(fd, body[:10])
            raise OSError(28, "No space left on device")
        write_all(fd, body)

    monkeypatch.setattr("cotenant.hostd.durable.write_all", full)
    for _again in range(2):
        with pytest.raises(Refused) as refused:
            await state.raise_fence((SlotRef("GPU-1"),), 2)
        assert refused.value.code == "storage"
    await state.raise_fence((SlotRef("GPU-2"),), 1)
    await state.raise_fence((SlotRef("GPU-1"),), 2)
    assert opened().max_fence == 2


async def test_a_tombstone_goes_when_its_start_cannot_come_any_more(opened, monkeypatch):
    state = opened()
    now = time.time()
    monkeypatch.setattr("cotenant.hostd.state.time.time", lambda: now)
    monkeypatch.setattr("cotenant.hostd.state.TOMBSTONES_MAX", 3)
    for number in range(6):
        await state.bury(f"a{number}")
    assert len(opened().tombstones) == 6, "none that is younger than an hour goes, however many there are"
    now += 2 * 3600
    assert list(opened().tombstones) == ["a3", "a4", "a5"]
    now += 13 * 86_400
    assert len(opened().tombstones) == 3
    now += 86_400
    assert not opened().tombstones


async def test_a_tombstone_without_a_time_is_kept_from_now_on(opened, tmp_path):
    opened()
    with open(tmp_path / "state" / "journal", "ab") as file:
        file.write(b'{"tombstone": "old"}\n')
    assert abs(opened().tombstones["old"] - time.time()) < 60


def test_a_boot_marker_of_another_user_says_what_to_do(opened, tmp_path, monkeypatch):
    opened()
    marker = next((tmp_path / "locks").glob("state-*"))
    if os.geteuid() == 0:
        os.chown(marker, 12345, 12345)
    else:
        marker = "/etc/passwd"
        monkeypatch.setattr(State, "_marker", lambda self: marker)
    with pytest.raises(StateError, match=rf"{marker} was made by user id [0-9]+; remove it .*--lock-dir"):
        opened()


def test_a_boot_marker_that_cannot_be_written_says_what_to_do(opened, tmp_path):
    opened()
    marker = next((tmp_path / "locks").glob("state-*"))
    marker.unlink()
    marker.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match=r"cannot be written .*remove it"):
        opened()
    assert not (tmp_path / "elsewhere").exists()


def test_server_and_host_refuse_the_same_file_systems():
    from cotenant.server.store import db

    assert db.NETWORK_FILE_SYSTEMS == NETWORK_FILE_SYSTEMS


def test_a_damaged_state_says_what_to_do(opened, tmp_path):
    opened()
    (tmp_path / "state" / "state.json").write_text("{")
    with pytest.raises(StateError, match="move the directory away"):
        opened()
    (tmp_path / "state" / "state.json").unlink()


def test_sequence_numbers_rise_over_lives():
    seen = []
    for life in (1, 2, 3):
        box = Outbox(life)
        seen += [box.add("attempt", "a", {}) for _ in range(3)]
    assert seen == sorted(set(seen)) and seen[-1] < 2**53


def test_reports_of_the_same_thing_replace_each_other_while_nobody_listens():
    box = Outbox(1)
    box.add("attempt", "a", {"state": "running"})
    last = box.add("attempt", "a", {"state": "exited"})
    box.add("attempt", "b", {})
    frames = []
    box.connect(frames.append)
    assert len(frames) == 2 and b"exited" in frames[0]
    box.add("attempt", "a", {"state": "exited", "clean": True})
    assert len(frames) == 3 and len(box) == 3
    assert box.ack(last) == ("attempt", "a") and box.ack(last) is None


shares = st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


@given(shares, shares)
def test_slots_overlap_when_they_share_a_part_of_the_card(one, other):
    """Against counting in 840ths, the least common multiple of 1 to 8."""

    def parts(share):
        return set(range(share[0] * 840 // share[1], (share[0] + 1) * 840 // share[1]))

    a, b = SlotRef("GPU-1", *one), SlotRef("GPU-1", *other)
    assert overlap(a, b) == overlap(b, a) == bool(parts(one) & parts(other))
    assert not overlap(a, SlotRef("GPU-2", *other))
    assert overlap(SlotRef("cpu", *one), SlotRef("cpu", *other)) == (one[0] == other[0])
