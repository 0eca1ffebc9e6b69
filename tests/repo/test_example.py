"""examples/moons/train.py: a training that can be stopped anywhere and loses nothing."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "moons" / "train.py"
SMALL = ["--points", "4000", "--hidden", "32", "--save-every", "2"]


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(TRAIN), "--out", str(out), *SMALL, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(out: Path, *arguments: str) -> str:
    with start(out, *arguments) as process:
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    return text


def until(process: subprocess.Popen[str], words: str) -> Iterator[str]:
    """Lines of the program, up to and with the first that has `words`."""
    assert process.stdout
    for line in process.stdout:
        yield line
        if words in line:
            return
    pytest.fail(f"the program ended without saying {words!r}")


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as data:
        return {name: data[name] for name in data.files}


def test_it_learns_and_says_so(tmp_path: Path) -> None:
    text = train(tmp_path, "--epochs", "12", "--batch", "32")
    assert [line.split()[1] for line in text.splitlines() if line.startswith("epoch ")] == [
        str(n) for n in range(1, 13)
    ]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["epochs"] == 12
    assert result["val/accuracy"] > 0.95
    assert Path(result["checkpoint"]).exists()


def test_a_stopped_run_resumes_to_the_very_same_numbers(tmp_path: Path) -> None:
    with start(tmp_path / "cut", "--epochs", "1000000", "--seed", "7") as process:
        list(until(process, "epoch 3 "))
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM
    stopped = re.search(r"stopped by a signal; saved .*/epoch-(\d+)-step-\d+.npz", rest)
    assert stopped, rest
    epochs = int(stopped[1]) + 2  # where it was stopped depends on the machine
    assert "resumed from" in train(tmp_path / "cut", "--epochs", str(epochs), "--seed", "7", "--resume")
    train(tmp_path / "whole", "--epochs", str(epochs), "--seed", "7")

    last = f"epoch-{epochs + 1:04d}-step-0000.npz"
    whole, cut = (arrays(tmp_path / name / "checkpoints" / last) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(np.array_equal(whole[name], cut[name]) for name in whole)


def test_usr1_saves_and_goes_on(tmp_path: Path) -> None:
    with start(tmp_path, "--epochs", "1000000", "--save-every", "1000000") as process:
        list(until(process, "epoch 1 "))
        process.send_signal(signal.SIGUSR1)
        asked = list(until(process, "(asked by a signal)"))[-1]
        assert Path(asked.split()[1]).exists()
        list(until(process, "epoch "))
        process.terminate()
        process.communicate(timeout=60)


def test_a_broken_checkpoint_is_named_and_passed_over(tmp_path: Path) -> None:
    train(tmp_path, "--epochs", "3")
    newest = tmp_path / "checkpoints" / "epoch-0004-step-0000.npz"
    newest.write_bytes(newest.read_bytes()[:1000])
    text = train(tmp_path, "--epochs", "4", "--resume")
    assert f"checkpoint {newest} passed over" in text
    assert "resumed from" in text
    other = train(tmp_path, "--epochs", "4", "--resume", "--seed", "99")
    assert "made with another seed or network" in other


def test_its_event_files_can_be_read(tmp_path: Path) -> None:
    train(tmp_path, "--epochs", "3")
    read = """
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
seen = EventAccumulator(sys.argv[1]).Reload()
for tag in sorted(seen.Tags()["scalars"]):
    print(tag, *[point.step for point in seen.Scalars(tag)])
"""
    done = subprocess.run(
        [sys.executable, "-c", read, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [
        f"{tag} 16 32 48" for tag in ("perf/points_per_s", "train/loss", "val/accuracy", "val/loss")
    ]
