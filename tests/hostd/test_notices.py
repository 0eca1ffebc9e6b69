"""Notices to running attempts and what hostd sees of their checkpoints, with real processes."""

import json
import sys

import pytest
from hostdclient import until

from cotenant.hostd.protocol import CheckpointRef, Refused

#: Saves at SIGUSR1, in two steps with a pause when told so; tells what the notice file says; obeys TERM.
TRAINING = """
import json, os, signal, sys, time, zipfile
saves = 0
def save(*_):
    global saves
    saves += 1
    path = os.path.join(os.environ["COTENANT_CHECKPOINT_DIR"], "step-%d.npz" % saves)
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("weights", b"x" * 1000)
    with open(os.environ["COTENANT_NOTICE_FILE"]) as file:
        said = json.load(file)
    print("told", said["what"], said["why"], said["by_s"], flush=True)
signal.signal(signal.SIGUSR1, save)
print("ready", os.environ.get("COTENANT_RESUME_FROM", "-"), flush=True)
while True:
    time.sleep(0.05)
"""
USR1 = 10


def notice(hostd, **more):
    args = {"attempt_id": "a1", "notice_id": "n1", "what": "save", "why": "a test", "by_s": 30, "signal": USR1, **more}
    return hostd.ask("notice", **args)


async def progress(hostd, wanted):
    """The newest telemetry about a1 for which `wanted` holds."""

    def found():
        for message in reversed(hostd.link.telemetry):
            if message["telemetry"] == "progress":
                for one in message["body"]["attempts"]:
                    if one["attempt_id"] == "a1" and wanted(one):
                        return one
        return None

    return await until(found, "progress")


async def test_a_notice_reaches_the_command_and_its_checkpoint_is_told(hostd, tmp_path):
    folder = tmp_path / "ck"
    folder.mkdir()
    await hostd.start("a1", [sys.executable, "-c", TRAINING], checkpoint=CheckpointRef(str(folder)))
    await hostd.printed("a1", "ready -")
    answer = await notice(hostd)
    assert answer["notice"] == "n1" and not answer.get("saved")
    await hostd.printed("a1", "told save a test 30")
    seen = await progress(hostd, lambda one: one.get("saved"))
    assert seen["checkpoint"]["path"] == str(folder / "step-1.npz") and seen["checkpoint"]["size_bytes"] > 1000
    assert seen["notice"] == "n1" and seen["log_bytes"] > 0 and seen["writing_ago_ms"] >= 0
    # the same notice again tells nobody anything
    assert (await notice(hostd))["saved"]
    await notice(hostd, notice_id="n2", what="stop")
    text = await hostd.printed("a1", "told stop")
    assert text.count("told") == 2
    await notice(hostd, notice_id="n3", what="none", signal=None)
    assert json.loads(next(hostd.state.glob("attempts/*.notice")).read_text())["what"] == "none"
    await hostd.stop("a1", "preempt")
    end = await hostd.ended("a1")
    assert end["progress"]["checkpoint"]["name"] == "step-2.npz" and end["exit"]["reason"] == "preempt"


async def test_a_notice_outlives_hostd(hostd, tmp_path):
    folder = tmp_path / "ck"
    folder.mkdir()
    await hostd.start("a1", [sys.executable, "-c", TRAINING], checkpoint=CheckpointRef(str(folder)))
    await hostd.printed("a1", "ready")
    await notice(hostd, signal=None)
    await hostd.kill()
    await hostd.again()
    assert not (await notice(hostd)).get("saved"), "the same notice, not a new one"
    await hostd.ask("signal", attempt_id="a1", signal=USR1)
    assert (await progress(hostd, lambda one: one.get("saved")))["notice"] == "n1"


async def test_what_is_half_written_at_a_kill_is_no_checkpoint(hostd, tmp_path):
    folder = tmp_path / "ck"
    folder.mkdir()
    script = f"""
printf 'whole' > {folder}/one.bin; sleep 4
while :; do printf 'x' >> {folder}/two.bin; echo wrote; sleep 0.1; done
"""
    await hostd.start("a1", ["sh", "-c", "trap '' TERM;" + script], checkpoint=CheckpointRef(str(folder)))
    await hostd.printed("a1", "wrote")
    seen = await progress(hostd, lambda one: one.get("checkpoint") and one.get("skipped"))
    assert seen["checkpoint"]["name"] == "one.bin"
    await hostd.stop("a1", "preempt", grace_s=0.2)
    end = (await hostd.ended("a1"))["progress"]
    assert end["checkpoint"]["name"] == "one.bin"
    assert end["skipped"] == ["two.bin: it was still being written"]


async def test_a_start_goes_on_from_a_checkpoint_or_is_refused_without_it(hostd, tmp_path):
    there = tmp_path / "step-9.npz"
    with pytest.raises(Refused, match="not on this host") as refused:
        await hostd.start("a1", ["true"], resume_path=str(there))
    assert refused.value.code == "no_checkpoint"
    there.write_bytes(b"x")
    ref = CheckpointRef(str(tmp_path))
    await hostd.start("a1", [sys.executable, "-c", TRAINING], checkpoint=ref, resume_path=str(there))
    await hostd.printed("a1", f"ready {there}")
    assert (await progress(hostd, lambda one: "checkpoint" in one))["checkpoint"]["name"] == "step-9.npz"


async def test_who_has_no_process_gets_no_notice(hostd):
    with pytest.raises(Refused) as refused:
        await notice(hostd)
    assert refused.value.code == "unknown_attempt"
    await hostd.start("a1", ["true"])
    await hostd.ended("a1")
    with pytest.raises(Refused) as refused:
        await notice(hostd)
    assert refused.value.code == "not_running"
    await hostd.start("a2", ["sleep", "60"])
    for wrong in ({"what": "dance"}, {"signal": 99}, {"by_s": -1}):
        with pytest.raises(Refused) as refused:
            await notice(hostd, attempt_id="a2", **wrong)
        assert refused.value.code == "bad_request"


async def test_log_growth_is_a_sign_of_work(hostd):
    await hostd.start("a1", ["sh", "-c", "echo one; sleep 1; echo two; sleep 60"])
    seen = await progress(hostd, lambda one: one.get("log_ago_ms") is not None)
    assert seen["log_bytes"] == 8 and "checkpoint" not in seen and "writing_ago_ms" not in seen


async def test_files_of_a_forgotten_attempt_go_with_its_notice(hostd, tmp_path):
    await hostd.start("a1", ["sleep", "60"])
    await until(lambda: [p for p in hostd.state.glob("attempts/*.record") if b'"pid"' in p.read_bytes()])
    await notice(hostd, signal=None)
    assert list(hostd.state.glob("attempts/*.notice"))
    await hostd.stop("a1")
    await hostd.ended("a1")
    await hostd.ask("forget", attempt_ids=["a1"])
    assert not list(hostd.state.glob("attempts/*.notice"))
