"""`cotenant mcp-stdio`: MCP on standard input and output, for clients that only start programs."""

from __future__ import annotations

import os
import sys

from cotenant.ui.cli import place
from cotenant.ui.cli.problems import Problem, Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse

    from cotenant.ui.cli.entry import Parser

PATIENCE_S = 60.0
#: The server pings a stream every 15 s; one that says nothing for so long is dead, however open its connection looks.
SILENCE_S = 120.0
#: How long what was asked last may take after the end of the input; clients that mean to end the program send a signal.
FINISH_S = 10.0


def configure(parser: Parser, _: str) -> None:
    command = parser.command(
        act, example="cotenant mcp-stdio --url http://gpubox:8425 --token-file ~/.config/agent.token"
    )
    command.add_argument("--tools", choices=("core", "full"), help="which tools the client sees (the token's)")
    command.add_argument(
        "--patience", type=float, default=PATIENCE_S, metavar="S", help="wait for a server that does not answer (60)"
    )
    command.add_argument(
        "--silence", type=float, default=SILENCE_S, metavar="S", help="give a silent connection up after (120)"
    )


def act(args: argparse.Namespace) -> int:
    if not (args.patience > 0 and args.silence > 0):
        raise Usage("--patience and --silence take seconds above 0.")
    if not (args.token_file or os.environ.get("COTENANT_TOKEN") or os.environ.get("COTENANT_TOKEN_FILE")):
        # The data directory's own token is its person's: an agent under it would pass for that person.
        raise Problem(
            "An agent needs a token of its own. Make one with `cotenant token create NAME --out FILE` and give it with "
            "--token-file FILE, COTENANT_TOKEN_FILE or COTENANT_TOKEN."
        )
    if args.token_file:
        place.read_token(args.token_file)  # what is wrong with it is better said now than at the first call
    import asyncio

    # Whatever prints by accident must not land between the frames.
    frames_out = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.stdout = sys.stderr
    return asyncio.run(_bridge(args, frames_out))


async def _bridge(args: argparse.Namespace, frames_out: int) -> int:
    import asyncio
    import signal

    from cotenant.ui.cli.bridge import frames, pipes
    from cotenant.ui.cli.bridge.relay import Relay
    from cotenant.ui.cli.bridge.upstream import Upstream

    loop = asyncio.get_running_loop()
    out = pipes.Writer(frames_out, loop, "stdout")
    notes = pipes.Writer(2, loop, "stderr")

    def say(text: str) -> None:
        if notes.waiting < 1 << 15:  # nobody reads them: then they are lost, not in the way
            notes.put(f"cotenant mcp-stdio: {' '.join(text.split())}".encode())

    def find() -> place.Place:
        return place.find(url=args.url, token_file=args.token_file, data=args.data)

    upstream = Upstream(find, tools=args.tools, silence_s=args.silence)
    relay = Relay(upstream, out, say, patience_s=args.patience)
    lines = pipes.Lines(0, loop)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    ends = {asyncio.create_task(out.broken.wait()), asyncio.create_task(stopped.wait())}

    async def read() -> None:
        while (line := await lines.get()) is not None:
            if isinstance(line, pipes.Overlong):
                told = f"A message may have {pipes.LONGEST_LINE} bytes; this one was left out."
                await out.send(frames.dumps(frames.error(None, frames.INVALID_REQUEST, told)))
            else:
                await relay.take(line)

    relay.catalog.begin()

    async def to_the_end() -> None:
        await read()
        await relay.settle(FINISH_S)

    working = asyncio.create_task(to_the_end())
    await asyncio.wait({working, *ends}, return_when=asyncio.FIRST_COMPLETED)
    for task in (working, *ends):
        task.cancel()
    await relay.finish()
    out.close(0.5)
    notes.close(0.2)
    return 0
