#!/usr/bin/env python3
"""A training that can be preempted at any moment: fits a line by gradient descent, with numpy alone.

What it shows:

- a notice (SIGUSR1, or the file that COTENANT_NOTICE_FILE names) makes it save at once and go on;
- a checkpoint is written beside its final name and renamed when it is whole, so that none is ever half there;
- --resume PATH goes on from one, and the numbers that follow are those of a run that was never interrupted.

    cotenant submit --resumable --priority batch --checkpoint-dir runs/line --checkpoint-signal SIGUSR1 \\
        --resume-arg "--resume={path}" --workdir "$PWD" -- python examples/resumable/train.py --out runs/line
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import argparse
import io
import json
import signal
import sys
import time
from pathlib import Path

import numpy as np


class Notices:
    """What the training was asked for, by signal or by file; looked at between two steps."""

    def __init__(self) -> None:
        self._asked = False
        self._file = os.environ.get("COTENANT_NOTICE_FILE", "")
        self._known = ""
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._asked = True

    def save_now(self) -> bool:
        """Whether somebody has asked for a save since the last call. Says on stdout what the notice file says."""
        asked, self._asked = self._asked, False
        try:
            said = json.loads(Path(self._file).read_text()) if self._file else {}
        except (OSError, ValueError):
            said = {}
        if said and said["id"] != self._known:
            self._known = said["id"]
            print(f"notice: {said['what']}: {said['why']}", flush=True)
            asked = asked or said["what"] in ("save", "stop")
        return asked


def save(folder: Path, step: int, weights: np.ndarray, seconds: float) -> Path:
    """Write a checkpoint, whole or not at all, in about `seconds` (as a big one would take); return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    np.savez(data, step=np.array(step), weights=weights)
    path = folder / f"step-{step:07d}.npz"
    part = folder / f"{path.name}.part"
    pieces = max(1, int(seconds / 0.2))
    whole = data.getvalue()
    with open(part, "wb") as out:
        for n in range(pieces):
            out.write(whole[len(whole) * n // pieces : len(whole) * (n + 1) // pieces])
            out.flush()
            if pieces > 1:
                time.sleep(0.2)
        os.fsync(out.fileno())
    os.replace(part, path)
    print(f"saved {path.name}", flush=True)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description="Fit a line; be preempted politely.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=400, help="steps in all (20 each second)")
    parser.add_argument(
        "--every", type=int, default=0, help="save every so many steps; 0: only when asked and at the end"
    )
    parser.add_argument("--save-seconds", type=float, default=0.0, help="how long a save takes")
    parser.add_argument("--resume", type=Path, help="the checkpoint to go on from")
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 2))
    y = x @ np.array([2.0, -3.0])
    weights, first = np.zeros(2), 0
    if args.resume is not None:
        with np.load(args.resume) as kept:
            weights, first = kept["weights"], int(kept["step"])
        print(f"resumed at step {first} from {args.resume.name}", flush=True)
    notices = Notices()
    for step in range(first, args.steps):
        weights = weights - 0.01 * (x.T @ (x @ weights - y)) / len(x)
        if step % 20 == 0:
            print(f"step {step} loss {float(np.mean((x @ weights - y) ** 2)):.6f}", flush=True)
        time.sleep(0.05)
        if notices.save_now() or (args.every and (step + 1) % args.every == 0):
            save(args.out, step + 1, weights, args.save_seconds)
    save(args.out, args.steps, weights, 0.0)
    print(f"done {weights[0]:.9f} {weights[1]:.9f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
