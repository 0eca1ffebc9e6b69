"""`cotenant demo`: two agents share one card, start to end, over MCP, and everything is checked while it happens."""

from __future__ import annotations

import os
import sys

from cotenant.ui.cli import show
from cotenant.ui.cli.problems import Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse

    from cotenant.ui.cli.entry import Parser

#: Seconds that the training runs: long enough to be watched, and under --fast long enough to be a training.
LONG_S, SHORT_S = 20, 4


def configure(parser: Parser, _: str) -> None:
    demo = parser.command(act, example="cotenant demo\n  cotenant demo --simulate-gpus 1 --fast")
    demo.add_argument(
        "--simulate-gpus", type=int, metavar="N", help="N simulated cards instead of real ones (1 where there are none)"
    )
    demo.add_argument("--fast", action="store_true", help=f"train for {SHORT_S} s instead of {LONG_S}")
    demo.add_argument(
        "--train", metavar="FILE", help="the training to submit (examples/moons/train.py of the checkout)"
    )
    demo.add_argument("--keep", action="store_true", help="keep the data directory, and say where it is")


def act(args: argparse.Namespace) -> int:
    if args.url or args.token_file:
        raise Usage("demo starts a server of its own: it takes neither --url nor --token-file.")
    if args.simulate_gpus is not None and args.simulate_gpus < 1:
        raise Usage("--simulate-gpus takes a number from 1.")
    train = os.path.abspath(args.train) if args.train else example()
    if not os.path.isfile(train):
        raise Usage(f"{train} is not there. The example comes with the checkout; name a training with --train FILE.")
    simulate = args.simulate_gpus
    if simulate is None and not _real_cards():
        simulate = 1
    from cotenant.ui.cli import demo_stage

    return demo_stage.perform(
        train=train,
        seconds=SHORT_S if args.fast else LONG_S,
        simulate=simulate,
        data=args.data,
        keep=args.keep,
        as_json=args.json,
    )


def example() -> str:
    """The example training beside the package; it is part of the checkout, not of the wheel."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    return os.path.join(root, "examples", "moons", "train.py")


def _real_cards() -> bool:
    """Whether the driver here has a card. Asked in a process of its own: a broken driver may hang."""
    if not os.path.exists("/dev/nvidiactl"):
        return False
    import subprocess

    code = "import pynvml, sys; pynvml.nvmlInit(); sys.exit(0 if pynvml.nvmlDeviceGetCount() else 1)"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=15, check=False)
    except subprocess.TimeoutExpired:
        show.say("the NVIDIA driver does not answer; simulated cards are used")
        return False
    return done.returncode == 0
