"""The host's memory: what must survive, and where it may lie."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    assert max(line.get("fence", 0) for line in lines) == 49 and {"tombstone": "a1"} in lines
    first = state.state_id
    state = opened()
    assert state.state_id == first and state.max_fence == 49 and state.tombstones == {"a1"} and state.starts == 2
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


async def test_a_long_journal_is_made_short_and_says_the_same(opened, tmp_path):
    state = opened()
    await asyncio.gather(*(state.raise_fence((SlotRef(f"GPU-{n % 3}" + "x" * 40),), n) for n in range(1, 4001)))
    await state.bury("a1")
    before = (tmp_path / "state" / "journal").stat().st_size
    assert before > 256 * 1024
    state = opened()
    assert (tmp_path / "state" / "journal").stat().st_size < 1000
    assert state.max_fence == 4000 and state.tombstones == {"a1"}
    assert opened().max_fence == 4000


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
