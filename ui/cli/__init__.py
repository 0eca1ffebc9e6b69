"""The `cotenant` command. One file per noun; what is heavy is imported by the command that needs it, never here.

Common paths (`--help`, `status`, `submit`, …) import the standard library only: no mcp, pydantic, asyncssh, starlette,
asyncio or ssl. They speak protocol 2026-07-28, which is one stateless POST, over a plain socket.
"""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done, 1 refused or failed, 2 wrong usage, 3 no server answers; the job's own code where a job is waited for;
    128 + n where signal n ended it.
    """
    from cotenant.ui.cli.entry import run

    return run(sys.argv[1:] if argv is None else argv)
