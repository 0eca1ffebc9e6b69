"""The real server for benchmarks: told over stdin to publish changes, with what it is compared with in the same process.

    python benchmarks/bench_server.py --data DIR --simulate-gpus 2 [--trivial] [--untuned]

Prints `ready URL`, and with --trivial before that `trivial URL`: the SDK's own server with one tool that returns a number,
served by the same loop. --untuned serves with what uvicorn takes by default (asyncio's loop, h11) and with Python's own
garbage collector settings. Lines on stdin:

    publish RATE SECONDS [EXTRA]   changes of a card, each told like a host's report; with EXTRA each of so many further
                                   addresses is told about once a second. Answers `published N`: the card's memory is N MiB
    tell ADDRESS                   one change of one resource; answers `told TIME` just before
    stuck ADDRESS                  answers `stuck N`: of the streams that watch it, those whose readers do not read
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from cotenant.server import app, config
from cotenant.server.control import Control
from cotenant.server.http import serving

TICK_S = 0.005
#: What was due so long ago and is not told waits for its reader.
LATE_S = 2.0


class Publisher:
    """Takes the place of a host that reports very often."""

    def __init__(self, control: Control, served: app.App) -> None:
        self._control = control
        self._served = served
        self._count = itertools.count(1)
        self.card = "local/gpus/0"

    async def obey(self) -> None:
        """What stdin says, line by line."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := (await reader.readline()).decode().split():
            if line[0] == "publish":
                extra = int(line[3]) if len(line) > 3 else 0
                print(f"published {await self._publish(float(line[1]), float(line[2]), extra)}", flush=True)
            elif line[0] == "tell":
                print(f"told {time.time()}", flush=True)
                self._control.changes.publish(frozenset({line[1]}))
            elif line[0] == "stuck":
                now, watchers = time.monotonic(), self._served._watching._watchers
                late = [
                    watcher
                    for watcher in watchers
                    if line[1] in watcher.addresses
                    and any(now - watcher._not_before.get(address, now) > LATE_S for address in watcher._dirty)
                ]
                print(f"stuck {len(late)}", flush=True)

    async def _publish(self, rate: float, seconds: float, extra: int) -> int:
        # The host's own reports would overwrite ours.
        self._control.hosts.telemetry = lambda host, name, body: None  # type: ignore[method-assign]
        cards = self._control.context.live.cards
        uuid = min(uuid for uuid, live in cards.items() if live.state.index == 0)
        about = {"cotenant://gpus", "cotenant://quota/me", "cotenant://hosts/local", "cotenant://hosts/local/gpus/0"}
        others = itertools.cycle([f"cotenant://jobs/job_extra{n}" for n in range(extra)] or [""])
        began, done, number = time.perf_counter(), 0, 0
        while (spent := time.perf_counter() - began) < seconds or done < rate * seconds:
            while done < min(rate * spent, rate * seconds):
                done, number = done + 1, next(self._count)
                live = cards[uuid]
                cards[uuid] = replace(
                    live, state=replace(live.state, memory_used_mib=number), at_ms=self._control.context.now()
                )
                self._control.changes.publish(frozenset(about | {next(others)}))
            await asyncio.sleep(TICK_S)
        return number


def _trivial() -> Any:
    """The SDK's own server as its documentation shows it."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("trivial")

    @server.tool()
    async def number() -> dict[str, int]:
        """A number."""
        return {"number": 42}

    return server.streamable_http_app()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--simulate-gpus", type=int, default=2)
    parser.add_argument("--trivial", action="store_true")
    parser.add_argument("--untuned", action="store_true")
    options = parser.parse_args()
    tasks: list[asyncio.Task[None]] = []
    build = app.build_app

    def build_app(control: Control, settings: config.Settings) -> app.App:
        served = build(control, settings)
        tasks.append(asyncio.create_task(Publisher(control, served).obey()))
        if options.trivial:
            sock = serving.bind("127.0.0.1", 0)
            beside = serving.GracefulServer(serving.config_of(_trivial()), lambda: None)
            tasks.append(asyncio.create_task(beside.serve(sockets=[sock])))
            stop = served.stop
            served.stop = lambda: (stop(), beside.stop())  # type: ignore[method-assign,assignment,func-returns-value]
            print(f"trivial {serving.url_of(sock, '127.0.0.1')}", flush=True)
        return served

    app.build_app = build_app
    if options.untuned:
        app.uvloop.new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]
        app.gc.freeze = app.gc.set_threshold = lambda *args: None  # type: ignore[assignment]
        serving.config_of = lambda made: uvicorn.Config(
            made, log_config=None, access_log=False, http="h11", timeout_graceful_shutdown=serving.GRACE_S
        )
    settings = config.load(data_dir=options.data, port=0, simulate_gpus=options.simulate_gpus)
    code = app.serve(settings)
    assert gc.isenabled()
    return code


if __name__ == "__main__":
    sys.exit(main())
