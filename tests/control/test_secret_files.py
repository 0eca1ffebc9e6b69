"""A secret's file: read for the job that names it, refused where it is none, at the submit and again at the start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench import Bench

from cotenant.server.control import secrets
from cotenant.server.errors import BadRequest

CANARY = "canary-4711"


def key(path: Path, mode: int = 0o600) -> Path:
    path.touch(mode)
    path.write_text(f"{CANARY}\n")
    path.chmod(mode)
    return path


def refs(path: Path) -> dict[str, object]:
    return {"secrets": ({"env": "MY_KEY", "file": str(path)},)}


async def test_secrets_reach_the_process_and_no_record(bench: Bench, tmp_path: Path) -> None:
    a = await bench.caller("a")
    for mode in (0o600, 0o400):
        job = await bench.submit(a, f"job {mode}", gpus=1, **refs(key(tmp_path / f"key{mode}", mode)))
        assert bench.machine.specs[bench.attempt(job)["id"]].secret_env == {"MY_KEY": CANARY}
        shown = await bench.control.views.get_job(a, job)
        assert shown.env_names == ["MY_KEY"]
        assert CANARY not in bench.dump() + repr(shown)


def spoil(bench: Bench, path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put something in the place of the file that is no secret's file; returns the path that names it."""
    path.unlink(missing_ok=True)
    if what == "directory":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path, 0o600)
    elif what == "device":
        return Path("/dev/zero")
    elif what == "a link to a device":
        path.symlink_to("/dev/zero")
    elif what == "a link to a good file":
        path.symlink_to(key(path.with_name("other")))
    elif what == "binary":
        key(path).write_bytes(b"canary-4711\xff\xfe")
    elif what == "huge":
        key(path).write_bytes(CANARY.encode() * 20_000)
    elif what == "open to the group":
        key(path, 0o640)
    elif what == "open to everybody":
        key(path, 0o604)
    elif what == "of another user":
        key(path)
        monkeypatch.setattr(secrets.os, "geteuid", lambda: os.getuid() + 1)
    elif what == "in the data directory":
        return key(bench.folder / "hostd.key")
    elif what == "in the data directory, by a linked directory":
        key(bench.folder / "hostd.key")
        path.symlink_to(bench.folder)
        return path / "hostd.key"
    elif what == "by a relative path":
        return Path(os.path.relpath(key(path)))
    else:
        assert what == "missing"
    return path


SPOILT = {
    "missing": "No such file", "directory": "plain file", "pipe": "plain file", "device": "plain file", "a link to a device": "is a link",
    "a link to a good file": "is a link", "binary": "not a text", "huge": "larger than", "open to the group": "mode 0640",
    "open to everybody": "mode 0604", "of another user": "another user", "in the data directory": "data directory",
    "in the data directory, by a linked directory": "data directory", "by a relative path": "absolute path",
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT)
async def test_what_is_no_secrets_file_is_refused_at_the_submit(
    bench: Bench, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a = await bench.caller("a")
    path = spoil(bench, tmp_path / "key", what, monkeypatch)
    for options in ({}, {"when_full": "refuse"}):
        with pytest.raises(BadRequest, match=SPOILT[what]) as refused:
            await bench.submit(a, **refs(path), **options)
        assert refused.value.code == "secret_unreadable" and "MY_KEY" in refused.value.text()
        assert "chmod 600" in refused.value.hint
        assert CANARY not in refused.value.text() + caplog.text
    assert bench.rows("SELECT * FROM job") == []
    monkeypatch.undo()


@pytest.mark.parametrize(
    "what", [w for w in SPOILT if "data dir" not in w and w not in ("device", "by a relative path")]
)
async def test_a_secret_that_was_spoilt_before_the_start_fails_the_job_and_holds_nothing_up(
    bench: Bench, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a = await bench.caller("a")
    blocking = await bench.control.leases.acquire(a, gpus=2)
    job = await bench.submit(a, **refs(key(tmp_path / "key")))
    spoil(bench, tmp_path / "key", what, monkeypatch)
    await bench.control.leases.release(a, blocking.lease_id)
    await bench.settle()
    row = bench.job(job)
    assert (row["state"], row["failure_class"]) == ("failed", "start")
    assert "MY_KEY" in row["message"] and SPOILT[what] in row["message"]
    assert CANARY not in bench.dump() + caplog.text
    assert bench.uses() == ["free", "free"]
    monkeypatch.undo()


async def test_a_repeat_is_answered_from_the_first_also_when_the_secret_is_gone(bench: Bench, tmp_path: Path) -> None:
    a = await bench.caller("a")
    first = await bench.submit(a, request_id="r", **refs(key(tmp_path / "key")))
    (tmp_path / "key").unlink()
    assert await bench.submit(a, request_id="r", **refs(tmp_path / "key")) == first


async def test_a_secret_that_goes_after_the_start_does_not_end_what_runs(bench: Bench, tmp_path: Path) -> None:
    a = await bench.caller("a")
    bench.hosts["local"].drop = {"start"}  # it is obeyed, and neither the answer nor the report comes
    bench.reports_held = True
    job = await bench.submit(a, **refs(key(tmp_path / "key")))
    assert bench.job(job)["state"] == "deploying" and bench.machine.processes
    (tmp_path / "key").unlink()
    await bench.advance(60)  # the start is asked for again
    assert bench.job(job)["state"] == "running" and bench.attempt(job)["state"] == "running"
    bench.machine.finish(bench.attempt(job)["id"], 7)
    bench.reports_held = False
    await bench.settle()
    assert bench.job(job)["exit_code"] == 7
