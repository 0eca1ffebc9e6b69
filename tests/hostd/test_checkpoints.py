"""What counts as a complete checkpoint, and what is newer than a moment; with real files, and time by hand."""

import io
import json
import os
import struct
import zipfile

import pytest

from cotenant.hostd.checkpoints import STABLE_S, Directory, prove_file


def zipped(size=100):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("weights", os.urandom(size))
    return data.getvalue()


def tensors(torn=False):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(7 if torn else 8)


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def write(path, data, at_s):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (at_s, at_s))


def names(directory, now, over=False):
    newest, skipped = directory.newest(now, over)
    return newest and newest.name, skipped


@pytest.mark.parametrize(
    ("name", "data", "proof"),
    [
        ("a.npz", zipped(), "whole"),
        ("a.pt", zipped()[:-3], "torn"),
        ("a.pt", zipped() + b"more", "torn"),
        ("a.safetensors", tensors(), "whole"),
        ("a.safetensors", tensors(torn=True), "torn"),
        ("a.safetensors", b"short", "torn"),
        ("a.bin", b"whatever", "none"),
        ("a.bin", b"", "torn"),
    ],
)
def test_formats_that_say_whether_they_are_whole(folder, name, data, proof):
    (folder / name).write_bytes(data)
    assert prove_file(str(folder / name)) == proof


def test_a_whole_archive_counts_at_once_and_a_torn_one_is_named(folder):
    directory = Directory(str(folder))
    directory.look(0.0)
    write(folder / "step-1.npz", zipped(), 100)
    write(folder / "step-2.npz", zipped()[:-5], 200)
    directory.look(1.0)
    assert names(directory, 1.0) == ("step-1.npz", ["step-2.npz: step-2.npz is not whole"])
    write(folder / "step-2.npz", zipped(), 201)
    directory.look(1.5)
    assert names(directory, 1.5) == ("step-2.npz", [])


def test_what_says_nothing_about_itself_counts_once_it_stood_still(folder):
    directory = Directory(str(folder))
    directory.look(0.0)
    write(folder / "step-1.bin", b"half", 100)
    directory.look(1.0)
    assert names(directory, 1.0)[0] is None
    write(folder / "step-1.bin", b"half and half", 101)
    directory.look(1.0 + STABLE_S)
    assert names(directory, 1.0 + STABLE_S)[0] is None, "it changed since"
    directory.look(1.0 + 2 * STABLE_S)
    assert names(directory, 1.0 + 2 * STABLE_S)[0] == "step-1.bin"


def test_one_that_ended_by_itself_has_finished_what_it_wrote_and_a_killed_one_has_not(folder):
    directory = Directory(str(folder))
    directory.look(0.0)
    write(folder / "step-1.bin", b"all of it", 100)
    directory.look(0.1)
    assert names(directory, 0.1, over=True)[0] == "step-1.bin"
    assert names(directory, 0.1)[0] is None


def test_what_an_earlier_attempt_left_counts_only_with_a_proof(folder):
    write(folder / "old.bin", b"torn by a kill, and it stands still", 100)
    write(folder / "known.bin", b"the one it goes on from", 50)
    directory = Directory(str(folder), trusted={"known.bin": None})
    for now in (0.0, 10.0, 20.0):
        directory.look(now)
    newest, skipped = names(directory, 20.0)
    assert newest == "known.bin" and "earlier attempt" in skipped[0]
    write(folder / "proved.npz", zipped(), 200)
    fresh = Directory(str(folder))
    fresh.look(0.0)
    assert names(fresh, 0.0)[0] == "proved.npz"


@pytest.mark.parametrize("manifest", ["done.json", "{name}.done"])
def test_a_manifest_decides(folder, manifest):
    directory = Directory(str(folder), manifest)
    directory.look(0.0)
    name = "checkpoint-1" if manifest == "done.json" else "checkpoint-1.bin"
    write(folder / name / "part" if manifest == "done.json" else folder / name, b"data", 100)
    directory.look(1.0)
    directory.look(1.0 + 2 * STABLE_S)
    newest, skipped = names(directory, 1.0 + 2 * STABLE_S)
    assert newest is None and "manifest" in skipped[0]
    write(folder / manifest.format(name=name) if "{" in manifest else folder / name / manifest, b"{}", 101)
    directory.look(9.0)
    assert names(directory, 9.0) == (name, [])


def test_a_directory_counts_once_it_stood_still_and_holds_nothing_unfinished(folder):
    directory = Directory(str(folder))
    directory.look(0.0)
    write(folder / "checkpoint-5" / "model.safetensors", tensors(), 100)
    directory.look(1.0)
    assert names(directory, 1.0)[0] is None, "more files may come"
    write(folder / "checkpoint-5" / "optimizer.pt.tmp", b"x", 101)
    for now in (5.0, 10.0):
        directory.look(now)
    assert names(directory, 10.0)[0] is None
    os.rename(folder / "checkpoint-5" / "optimizer.pt.tmp", folder / "checkpoint-5" / "optimizer.bin")
    for now in (11.0, 11.0 + STABLE_S):
        directory.look(now)
    assert names(directory, 11.0 + STABLE_S)[0] == "checkpoint-5"


@pytest.mark.parametrize(
    "name", [".hidden.npz", "x.npz.tmp", "tmp-checkpoint-3", "latest", "log.txt", "events.out.tfevents.1", "a.json"]
)
def test_what_lies_beside_is_no_checkpoint_but_shows_that_somebody_writes(folder, name):
    directory = Directory(str(folder))
    directory.look(0.0)
    assert directory.changed_at is None
    write(folder / name, zipped(), 100)
    directory.look(1.0)
    directory.look(9.0)
    assert names(directory, 9.0) == (None, []) and directory.changed_at == 1.0


def test_newer_than_a_moment_is_what_was_not_there_whatever_the_clock_of_the_files_says(folder):
    write(folder / "a.npz", zipped(), 5_000_000_000)
    directory = Directory(str(folder))
    directory.look(0.0)
    before = json.loads(json.dumps(directory.signatures()))  # as a record keeps it
    assert directory.newer_than(before, 1.0) is None
    write(folder / "b.npz", zipped(), 10)  # a file server whose clock is behind
    directory.look(2.0)
    newer = directory.newer_than(before, 2.0)
    assert newer is not None and newer.name == "b.npz"


def test_a_checkpoint_that_is_written_over_is_newer_too(folder):
    write(folder / "last.npz", zipped(50), 100)
    directory = Directory(str(folder))
    directory.look(0.0)
    before = directory.signatures()
    write(folder / "last.npz", zipped(60), 101)
    directory.look(1.0)
    newer = directory.newer_than(before, 1.0)
    assert newer is not None and newer.name == "last.npz"


def test_a_missing_directory_holds_nothing_and_a_forbidden_one_says_why(folder):
    directory = Directory(str(folder / "not" / "there"))
    directory.look(0.0)
    assert names(directory, 0.0) == (None, []) and directory.error == ""
    (folder / "file").write_bytes(b"")
    other = Directory(str(folder / "file"))
    other.look(0.0)
    assert "Not a directory" in other.error
