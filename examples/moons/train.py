#!/usr/bin/env python3
"""Train a small neural network on the two-moons problem, with numpy alone: the example job of Cotenant.

It behaves as a training should that shares its machine with others:

- one log line per epoch on stdout, and the same numbers as TensorBoard event files in OUT;
- checkpoints OUT/checkpoints/epoch-NNNN-step-NNNN.npz, each written whole or not at all;
- SIGTERM: saves and exits with 143; SIGUSR1: saves and goes on;
- --resume goes on from the newest checkpoint that can be read, and what follows is bit for bit what an uninterrupted
  run with the same seed would have computed (on the same machine and numpy);
- OUT/result.json at the end.

Run it by hand: python examples/moons/train.py --seconds 10 --out runs/moons
"""

from __future__ import annotations

import os

# Set before numpy starts its thread pool: one thread keeps the sums in one order, and leaves the other cores to others.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import argparse
import contextlib
import io
import itertools
import json
import signal
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

Array = NDArray[np.float64]

EXIT_TERMINATED = 128 + signal.SIGTERM  # what a shell shows for a program that SIGTERM ended
KEPT_CHECKPOINTS = 3


def two_moons(count: int, noise: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return `count` points (count × 2) on two interleaved half circles, and their class (count), 0 or 1."""
    label = (np.arange(count) % 2).astype(np.float64)
    angle = rng.uniform(0.0, np.pi, count)
    upper = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    lower = np.stack([1.0 - np.cos(angle), 0.5 - np.sin(angle)], axis=1)
    points = np.where(label[:, None] == 0.0, upper, lower) + rng.normal(0.0, noise, (count, 2))
    return points, label


class Network:
    """A multilayer perceptron with tanh layers and one logit, trained by Adam on the logistic loss.

    `state` holds everything that learning changes, as named arrays, so that a checkpoint is nothing but its copy.
    """

    def __init__(self, sizes: list[int], learning_rate: float, rng: np.random.Generator) -> None:
        self.depth = len(sizes) - 1
        self.learning_rate = learning_rate
        self.state: dict[str, Array] = {"updates": np.zeros(())}
        for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            # Glorot: keeps the variance of a tanh layer's output near that of its input.
            self.state[f"w{i}"] = rng.normal(0.0, np.sqrt(2.0 / (fan_in + fan_out)), (fan_in, fan_out))
            self.state[f"b{i}"] = np.zeros(fan_out)
        for name in [name for name in self.state if name != "updates"]:
            self.state[f"m.{name}"] = np.zeros_like(self.state[name])
            self.state[f"v.{name}"] = np.zeros_like(self.state[name])

    def forward(self, points: Array) -> list[Array]:
        """Return every layer's output, the input first and the logits (n × 1) last."""
        outputs = [points]
        for i in range(self.depth):
            z = outputs[-1] @ self.state[f"w{i}"] + self.state[f"b{i}"]
            outputs.append(z if i == self.depth - 1 else np.tanh(z))
        return outputs

    def evaluate(self, points: Array, label: Array) -> tuple[float, float]:
        """Return the mean loss (nats) and the accuracy (0 to 1)."""
        logit = self.forward(points)[-1][:, 0]
        # log(1 + e^x) - y x, in the form that does not overflow
        loss = np.maximum(logit, 0.0) - logit * label + np.log1p(np.exp(-np.abs(logit)))
        return float(loss.mean()), float(((logit > 0.0) == (label > 0.5)).mean())

    def learn(self, points: Array, label: Array) -> float:
        """Take one Adam step on a batch; return its mean loss from before the step."""
        outputs = self.forward(points)
        logit = outputs[-1][:, 0]
        loss = np.maximum(logit, 0.0) - logit * label + np.log1p(np.exp(-np.abs(logit)))
        probability = 0.5 * (1.0 + np.tanh(0.5 * logit))
        delta = ((probability - label) / len(label))[:, None]
        self.state["updates"] = self.state["updates"] + 1.0
        for i in reversed(range(self.depth)):
            gradient_w, gradient_b = outputs[i].T @ delta, delta.sum(axis=0)
            if i > 0:
                delta = (delta @ self.state[f"w{i}"].T) * (1.0 - outputs[i] ** 2)
            self._adam(f"w{i}", gradient_w)
            self._adam(f"b{i}", gradient_b)
        return float(loss.mean())

    def _adam(self, name: str, gradient: Array) -> None:
        # Kingma and Ba 2015, with the paper's constants.
        beta1, beta2, epsilon = 0.9, 0.999, 1e-8
        updates = float(self.state["updates"])
        m = self.state[f"m.{name}"] = beta1 * self.state[f"m.{name}"] + (1.0 - beta1) * gradient
        v = self.state[f"v.{name}"] = beta2 * self.state[f"v.{name}"] + (1.0 - beta2) * gradient**2
        step = (m / (1.0 - beta1**updates)) / (np.sqrt(v / (1.0 - beta2**updates)) + epsilon)
        self.state[name] = self.state[name] - self.learning_rate * step


@dataclass
class Position:
    """Where a training stands: the next step of an epoch to take, and the loss summed over the steps before it."""

    epoch: int = 1
    step: int = 0
    loss_sum: float = 0.0


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees all of it or none."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with open(part, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name too
    finally:
        os.close(folder)


def save(folder: Path, network: Network, at: Position, seed: int) -> Path:
    """Write a checkpoint and drop all but the newest few; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"epoch-{at.epoch:04d}-step-{at.step:04d}.npz"
    where = {"at": np.array([at.epoch, at.step]), "loss_sum": np.array(at.loss_sum), "seed": np.array(seed)}
    data = io.BytesIO()
    np.savez(data, allow_pickle=False, **where, **{f"net.{name}": array for name, array in network.state.items()})
    write_whole(path, data.getvalue())
    for old in sorted(folder.glob("epoch-*.npz"))[:-KEPT_CHECKPOINTS]:
        old.unlink()
    return path


def load(folder: Path, network: Network, seed: int) -> Position:
    """Put the newest readable checkpoint into `network`; return where it stands.

    The beginning when there is none. A checkpoint that cannot be read, or that another seed or network shape made, is
    named on stdout and passed over.
    """
    for path in sorted(folder.glob("epoch-*.npz"), reverse=True):
        try:
            with np.load(path, allow_pickle=False) as data:
                state = {name: data[f"net.{name}"] for name in network.state}
                if int(data["seed"]) != seed or any(a.shape != network.state[name].shape for name, a in state.items()):
                    raise ValueError("made with another seed or network")
                at = Position(int(data["at"][0]), int(data["at"][1]), float(data["loss_sum"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as why:
            print(f"checkpoint {path} passed over: {why}", flush=True)
            continue
        network.state.update(state)
        print(f"resumed from {path} (epoch {at.epoch}, step {at.step})", flush=True)
        return at
    print("no checkpoint to resume from: starting at the beginning", flush=True)
    return Position()


class Wishes:
    """What signals asked for; looked at between two steps, so that state is never saved half changed."""

    def __init__(self) -> None:
        self.stop = False
        self.save = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
        else:
            self.stop = True


def log_scalars(writer: EventFileWriter, step: int, values: dict[str, float]) -> None:
    """Write one point of each series, and flush: what was logged is there for a reader now."""
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    writer.flush()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the arguments; see --help."""
    parser = argparse.ArgumentParser(description="Train a two-moons classifier with numpy.")
    parser.add_argument("--seconds", type=float, help="stop after this long (default 20, unless --epochs is given)")
    parser.add_argument("--epochs", type=int, help="stop after this many epochs in all, those before a resume included")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/moons"), help="folder for everything (default runs/moons)"
    )
    parser.add_argument("--seed", type=int, default=0, help="fixes data, start and order (default 0)")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in OUT, if there is one"
    )
    parser.add_argument("--points", type=int, default=40_000, help="training points (default 40000)")
    parser.add_argument("--hidden", type=int, default=96, help="width of the two hidden layers (default 96)")
    parser.add_argument("--batch", type=int, default=256, help="points a step (default 256)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="Adam's step size (default 0.002)")
    parser.add_argument("--noise", type=float, default=0.2, help="standard deviation of each point (default 0.2)")
    parser.add_argument("--save-every", type=int, default=5, help="epochs between checkpoints (default 5)")
    args = parser.parse_args(argv)
    if args.seconds is None and args.epochs is None:
        args.seconds = 20.0
    for name in ("points", "hidden", "batch", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    """Train; return the exit status: 0 when done, 143 when a signal ended it (saved, can be resumed)."""
    args = parse(argv)
    began = time.monotonic()
    wishes = Wishes()
    checkpoints: Path = args.out / "checkpoints"
    rng = np.random.default_rng(args.seed)
    points, label = two_moons(args.points, args.noise, rng)
    held_points, held_label = two_moons(4_000, args.noise, rng)
    network = Network([2, args.hidden, args.hidden, 1], args.learning_rate, rng)
    at = load(checkpoints, network, args.seed) if args.resume else Position()
    steps = -(-args.points // args.batch)
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "(not set)")
    print(
        f"moons: {args.points} points, {steps} steps an epoch, seed {args.seed}, CUDA_VISIBLE_DEVICES={cards}",
        flush=True,
    )

    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(EventFileWriter(str(args.out))) as writer:
        loss, accuracy = network.evaluate(held_points, held_label)
        while args.epochs is None or at.epoch <= args.epochs:
            # The order of an epoch comes from the seed and the epoch alone: a resumed run needs no generator's state.
            order = np.random.default_rng([args.seed, at.epoch]).permutation(args.points)
            epoch_began, first = time.monotonic(), at.step
            while at.step < steps:
                if wishes.stop:
                    path = save(checkpoints, network, at, args.seed)
                    print(f"stopped by a signal; saved {path}", flush=True)
                    return EXIT_TERMINATED
                if wishes.save:
                    wishes.save = False
                    print(f"saved {save(checkpoints, network, at, args.seed)} (asked by a signal)", flush=True)
                batch = order[at.step * args.batch : (at.step + 1) * args.batch]
                at.loss_sum += network.learn(points[batch], label[batch])
                at.step += 1
            loss, accuracy = network.evaluate(held_points, held_label)
            rate = (at.step - first) * args.batch / max(time.monotonic() - epoch_began, 1e-9)
            values = {
                "train/loss": at.loss_sum / steps,
                "val/loss": loss,
                "val/accuracy": accuracy,
                "perf/points_per_s": rate,
            }
            log_scalars(writer, at.epoch * steps, values)
            print(
                f"epoch {at.epoch} step {at.epoch * steps} train/loss {values['train/loss']:.6f} val/loss {loss:.6f} "
                f"val/accuracy {accuracy:.4f} points/s {rate:.0f}",
                flush=True,
            )
            at = Position(at.epoch + 1)
            if args.seconds is not None and time.monotonic() - began >= args.seconds:
                break
            if (at.epoch - 1) % args.save_every == 0:
                save(checkpoints, network, at, args.seed)
    path = save(checkpoints, network, at, args.seed)
    result = {
        "epochs": at.epoch - 1,
        "val/loss": loss,
        "val/accuracy": accuracy,
        "seed": args.seed,
        "checkpoint": str(path),
    }
    write_whole(args.out / "result.json", json.dumps(result, indent=2).encode() + b"\n")
    print(f"done: {at.epoch - 1} epochs, val/loss {loss:.6f}, val/accuracy {accuracy:.4f}, {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
