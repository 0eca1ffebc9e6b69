"""Many subscribers, some of whom do not read, while resources change all the time: what `heartbeat` takes meanwhile.

    .venv/bin/python benchmarks/subscribers.py [--subscribers 200] [--stalled 20] [--rate 2000] [--seconds 20] [--json]

One server; half of the subscribers speak 2026-07-28 (a listen stream each), half an older protocol (a session with a
standing stream each). First those who will stall are told until nothing more goes to them. Whoever reads is told of a card's changes and reads the card again each time; the stalled ones keep
their streams open and read nothing, with buffers as small as the system allows. A process of its own calls `heartbeat`
fifty times a second, first without subscribers and changes, then with them. Afterwards half of the stalled ones read on
and must hear the last word, which was published while they did not read; the others keep their streams until the end, which
must come in good order all the same. tests/e2e/test_subscribers.py runs this with fewer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from wire import Caller, Line, Server, cpu_s, frame, serving, spread

CARD = "cotenant://hosts/local/gpus/0"
LAST_WORD = "cotenant://jobs/job_last_word"
EXTRA = 200
PER_TOKEN = 20
BEAT_S = 0.02
FILL_S = 60.0


def beats(url: str, token: str, lease_id: str, seconds: float, out: Any) -> None:
    """Seconds that each heartbeat took; runs in a process of its own."""
    caller, took = Caller(url, token), []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        caller.call("heartbeat", lease_id=lease_id)
        took.append(time.perf_counter() - began)
        time.sleep(max(0.0, BEAT_S - took[-1]))
    caller.close()
    out.send(took)


class Subscriber:
    """One client with one stream. `last` is what it read of the card when it was last told of it."""

    def __init__(self, url: str, token: str, *, old: bool, stalled: bool) -> None:
        self._url, self._token, self._old, self._stalled = url, token, old, stalled
        self._stream = Line(url, token, slow=stalled)
        self._asks = Line(url, token)
        self.last = -1
        self.told = 0
        self.heard: set[str] = set()
        self.task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        uris = [CARD]
        if self._stalled:
            uris += [f"cotenant://jobs/job_extra{n}" for n in range(EXTRA)] + [LAST_WORD]
        await self._stream.open()
        await self._asks.open()
        if self._old:
            await self._asks.hello()
            self._stream.session = self._asks.session
            status, _ = await self._stream.send({}, b"", "GET")
            for uri in uris:
                await self._asks.ask("resources/subscribe", uri=uri)
        else:
            status, _ = await self._stream.send(
                *frame("subscriptions/listen", {"notifications": {"resourceSubscriptions": uris}})
            )
        assert status == 200, status
        if not self._stalled:
            self.read_on()

    def read_on(self) -> None:
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            async for event in self._stream.events():
                if event.get("method") != "notifications/resources/updated":
                    continue
                self.told += 1
                self.heard.add(event["params"]["uri"])
                if event["params"]["uri"] == CARD:
                    await self.read()

    async def read(self) -> None:
        answer = await self._asks.ask("resources/read", uri=CARD)
        self.last = json.loads(answer["contents"][0]["text"])["memory_used_mib"]

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        self._stream.close()
        self._asks.close()


async def until(there: Any, within_s: float) -> bool:
    """Whether `there` comes true in time."""
    end = time.monotonic() + within_s
    while not there():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


async def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    live_count = options.subscribers - options.stalled
    tokens = [server.token(f"subscriber{n}", "sam") for n in range(-(-options.subscribers // PER_TOKEN))]
    beater = server.token("beater", "bea")
    caller = Caller(server.url, beater)
    lease = caller.lease()
    caller.close()

    async def beating() -> list[float]:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=beats, args=(server.url, beater, lease, options.seconds, theirs)
        )
        process.start()
        took: list[float] = await asyncio.to_thread(ours.recv)
        await asyncio.to_thread(process.join)
        return took

    quiet = await beating()
    everyone = [
        Subscriber(server.url, tokens[n // PER_TOKEN], old=n % 2 == 1, stalled=n >= live_count)
        for n in range(options.subscribers)
    ]
    for one in everyone:
        await one.open()
    live, stalled = everyone[:live_count], everyone[live_count:]

    async def stuck_now() -> int:
        server.say(f"stuck {LAST_WORD}")
        return int((await asyncio.to_thread(server.answer, "stuck")).split()[1])

    # Until the buffers between are full, a stalled reader is none yet.
    full = 0.0
    while (stuck := await stuck_now()) < options.stalled and full < FILL_S:
        server.say(f"publish {EXTRA} 2 {EXTRA}")
        await asyncio.to_thread(server.answer, "published")
        full += 2
        await until(lambda: False, 4.0)
    for one in live:
        one.told = 0
    began = time.monotonic()
    server.say(f"publish {options.rate} {options.seconds}")
    answered = asyncio.create_task(asyncio.to_thread(server.answer, "published"))
    cpu = cpu_s(server.process.pid)
    busy = await beating()
    cpu = cpu_s(server.process.pid) - cpu
    last = int((await answered).split()[1])
    ended = await until(lambda: all(one.last == last for one in live), 60)
    # The first change of a while is told at once, so one more than the seconds is right.
    told = [(one.told - 1) / (time.monotonic() - began) for one in live]
    server.say(f"tell {LAST_WORD}")
    await asyncio.to_thread(server.answer, "told")
    resumed = stalled[::2] + stalled[1::4]
    for one in resumed:
        one.read_on()
    heard = await until(lambda: all(LAST_WORD in one.heard and one.last == last for one in resumed), 60)
    code, took = await asyncio.to_thread(server.end)
    for one in everyone:
        await one.close()
    return {
        "subscribers": options.subscribers, "stalled": len(stalled), "updates": last, "seconds": options.seconds,
        "live_on_last_state": sum(one.last == last for one in live), "live": len(live), "all_live_ended_there": ended,
        "told_each_a_second": sum(told) / len(told), "told_each_a_second_at_most": max(told), "streams_stuck_at_first": stuck, "resumed": len(resumed), "resumed_heard_the_last_word": heard,
        "server_cpu_pct": 100 * cpu / options.seconds, "exit_code": code, "end_s": took, "quiet": spread(quiet), "busy": spread(busy),
        "p50_ratio": spread(busy)["p50_ms"] / spread(quiet)["p50_ms"],
        "p99_ratio": spread(busy)["p99_ms"] / spread(quiet)["p99_ms"],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subscribers", type=int, default=200)
    parser.add_argument("--stalled", type=int, default=20)
    parser.add_argument("--rate", type=float, default=2000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cotenant-subscribers-") as folder:
        with serving(Path(folder) / "data") as server:
            found = asyncio.run(measure(server, options))
    print(json.dumps(found) if options.json else "\n".join(f"{key}: {value}" for key, value in found.items()))
    good = found["all_live_ended_there"] and found["resumed_heard_the_last_word"] and found["exit_code"] == 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
