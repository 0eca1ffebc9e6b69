"""What our reads cost over HTTP, beside the SDK's own trivial tool in the same server process; and the way of a change.

    .venv/bin/python benchmarks/http_reads.py [--rounds 5] [--n 600] [--save FILE]

- one caller: p50 of quota_status and list_gpus (8 simulated cards, a lease on one) over one kept connection, against a tool that
  returns a number, served by the SDK's high-level server in the same process and loop, without tokens. Goal: at most 2.
- 16 callers, connections of one process of its own: p99 of quota_status against the same server untuned: asyncio's own
  loop, h11, Python's garbage collector as it comes. Goal: at most half.
- publish -> client has read again: a listen stream and the resource of a card, the time from the publish in the server to
  the whole answer of the read in the client. Goal: p50 below 30 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from harness import Result, rotate, save, table
from wire import Caller, Line, Server, cpu_s, frame, head, serving, spread

CARD = "cotenant://hosts/local/gpus/0"
CALLERS = 16
CARDS = 8


def one_caller(server: Server, url: str, token: str, tool: str, n: int) -> Result:
    caller = Caller(url, token)
    request = frame("tools/call", {"name": tool, "arguments": {}})
    assert b'"isError":true' not in caller.raw(*request)
    took, cpu = [], cpu_s(server.process.pid)
    for _ in range(n):
        began = time.perf_counter()
        caller.raw(*request)
        took.append(time.perf_counter() - began)
    caller.close()
    return {"p50 ms": spread(took)["p50_ms"], "server CPU ms a call": (cpu_s(server.process.pid) - cpu) / n * 1e3}


class _Asker(asyncio.Protocol):
    """Sends the same request as soon as it has the whole answer; knows no more of HTTP than Content-Length."""

    def __init__(self, request: bytes, n: int, took: list[float], done: asyncio.Future[None]) -> None:
        self._request, self._left, self._took, self._done = request, n, took, done
        self._got = bytearray()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, blank, body = self._got.partition(b"\r\n\r\n")
        if not blank or len(body) < int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]):
            return
        self._took.append(time.perf_counter() - self._began)
        assert b" 200 " in head[:16], head
        self._got.clear()
        self._left -= 1
        if self._left:
            self._send()
        else:
            self._transport.close()
            self._done.set_result(None)


def _load(url: str, token: str, tool: str, n: int, out: Any) -> None:
    """CALLERS connections, each with one call at a time; runs in a process of its own, to take nothing from the server."""
    headers, body = frame("tools/call", {"name": tool, "arguments": {}})
    host, port = url.removeprefix("http://").split(":")
    lines = {**head(token), **headers, "Host": f"{host}:{port}", "Content-Length": str(len(body))}
    request = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    whole = f"POST /mcp HTTP/1.1\r\n{request}\r\n".encode() + body
    took: list[float] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ends = [loop.create_future() for _ in range(CALLERS)]
        for end in ends:
            await loop.create_connection(lambda end=end: _Asker(whole, n, took, end), host, int(port))
        await asyncio.gather(*ends)

    uvloop.run(run())
    out.send(took)


def many_callers(server: Server, token: str, tool: str, n: int) -> Result:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_load, args=(server.url, token, tool, n, theirs))
    process.start()
    found = spread(ours.recv())
    process.join()
    return {"p50 ms, 16 callers": found["p50_ms"], "p99 ms, 16 callers": found["p99_ms"]}


async def reread(server: Server, token: str, n: int) -> list[float]:
    """Seconds from each publish in the server to the end of the read in this process. Clocks are the same machine's."""
    stream, asks = Line(server.url, token), Line(server.url, token)
    await stream.open()
    await asks.open()
    await stream.send(*frame("subscriptions/listen", {"notifications": {"resourceSubscriptions": [CARD]}}))
    events = stream.events()
    await anext(events)  # acknowledged
    took = []
    for _ in range(n):
        await asyncio.sleep(1.05)  # further changes within a second would wait, as they should
        server.say(f"tell {CARD}")
        began = float((await asyncio.to_thread(server.answer, "told")).split()[1])
        event = await anext(events)
        assert event["params"]["uri"] == CARD
        answer = await asks.ask("resources/read", uri=CARD)
        took.append(time.time() - began)
        assert json.loads(answer["contents"][0]["text"])["index"] == 0
    stream.close()
    asks.close()
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--n", type=int, default=600)
    parser.add_argument("--save", help="write the raw numbers to this file")
    options = parser.parse_args()
    cards = ("--simulate-gpus", str(CARDS))
    with tempfile.TemporaryDirectory(prefix="cotenant-http-") as folder:
        with serving(Path(folder) / "tuned", *cards, "--trivial") as server:
            token = server.token("bench", "ben")
            holder = Caller(server.url, token)
            holder.lease()
            with serving(Path(folder) / "untuned", *cards, "--untuned") as other:
                theirs = other.token("bench", "ben")
                alone = {
                    "trivial tool of the SDK": lambda: one_caller(server, server.trivial, "", "number", options.n),
                    "quota_status": lambda: one_caller(server, server.url, token, "quota_status", options.n),
                    "list_gpus": lambda: one_caller(server, server.url, token, "list_gpus", options.n),
                }
                results = rotate(alone, options.rounds)
                print(table("one caller", results, "trivial tool of the SDK"))
                save(options.save, "one caller", results)
                together = {
                    "untuned": lambda: many_callers(other, theirs, "quota_status", options.n),
                    "as it is": lambda: many_callers(server, token, "quota_status", options.n),
                }
                results = rotate(together, options.rounds)
                print(table("16 callers", results, "untuned"))
            took = asyncio.run(reread(server, token, 20))
    print(f"publish -> read again: p50 {spread(took)['p50_ms']:.1f} ms, worst of {len(took)} {max(took) * 1e3:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
