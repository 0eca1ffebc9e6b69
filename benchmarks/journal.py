"""What the journal costs: CPU and bytes of one pass that starts a job and lets one go, beside the pass itself.

`turn` is the engine's turn alone; `handed over` what the loop pays to hand a pass over; `written` what the thread pays to write one;
`whole world` the same for the first of a file; the last columns how late another thread, such as the loop's, is woken meanwhile.
CPU time of the thread, median of the rounds.

usage: .venv/bin/python benchmarks/journal.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from deciding import HOUR_MS, NOW_MS, asks, fleet, full

from cotenant.server import journal as writing
from cotenant.server.deciding.engine import Changes, Engine
from cotenant.server.deciding.world import Ask, Decided, Holding, Policy, Start
from cotenant.server.journal import Journal
from cotenant.server.segments import segments

PASSES = 300
#: The probe sleeps so long at a time.
SLEEP_S = 0.0005


def passes(hosts: int, waiting: int) -> tuple[list[tuple[Changes, int, Decided]], float]:
    """One job ends and another starts, again and again: (changes, time, what was decided) of each; ms of CPU in a turn."""
    world = full(fleet(hosts), 0)
    queue: dict[str, Ask] = {ask.id: ask for ask in asks(waiting, 4, True, (1,))}
    engine = Engine(replace(world, asks=tuple(queue.values())), NOW_MS, Policy(), record=True)
    slots, leases = {slot.key: slot for slot in world.slots}, {lease.id: lease for lease in world.holdings}
    seen, spent = [], 0
    for number, ended in enumerate(list(leases.values())[:PASSES]):
        now = NOW_MS + 1000 * number
        del leases[ended.id]
        for key in ended.slots:
            slots[key] = replace(slots[key], state="free")
        here = replace(
            world, slots=tuple(slots.values()), holdings=tuple(leases.values()), asks=tuple(queue.values())
        )  # fmt: skip
        begin = time.process_time_ns()
        engine.sync(here, now)
        decided = engine.turn(now)
        spent += time.process_time_ns() - begin
        seen.append((engine.take_changes(), now, decided))
        for start in decided.decisions:
            assert isinstance(start, Start)
            ask = queue.pop(start.ask_id)
            engine.drop(ask.id)
            leases[ask.id] = Holding(
                ask.id, "job", ask.owner, ask.agent, False, "main", start.slots, now, now + HOUR_MS
            )  # fmt: skip
            for key in start.slots:
                slots[key] = replace(slots[key], state="held")
    return seen, spent / len(seen) / 1e6


def finish(journal: Journal, count: int, late_ms: list[float]) -> None:
    """Wait until so many passes are written; meanwhile measure how late this thread gets the interpreter after each sleep."""
    while journal.written < count:
        begin = time.perf_counter_ns()
        time.sleep(SLEEP_S)
        late_ms.append((time.perf_counter_ns() - begin) / 1e6 - SLEEP_S * 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    writing.GATHER_S = 0.0  # type: ignore[misc]
    print(
        "| cards, waiting | turn | handed over | written | bytes | whole world | its bytes | another thread is late by, p50 | p95 |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for hosts, waiting in ((8, 100), (125, 1000), (125, 10_000)):
        rows = []
        for _ in range(args.rounds):
            seen, turn_ms = passes(hosts, waiting)
            cpu, size, noted = [0], [0], 0
            late: list[float] = []
            with tempfile.TemporaryDirectory() as place:
                journal = Journal(Path(place))
                for part in (seen[:1], seen[1:]):
                    begin = time.thread_time_ns()
                    for changes, now, decided in part:
                        journal.note(changes, now, Policy(), decided)
                    noted += time.thread_time_ns() - begin
                    finish(journal, journal.written + len(part), late)
                    thread = journal._thread
                    assert thread is not None and thread.ident is not None
                    cpu.append(time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident)))
                    size.append(sum(path.stat().st_size for path in segments(Path(place))))
                journal.close()
            others = len(seen) - 1
            late.sort()
            rows.append(
                (
                    turn_ms, noted / len(seen) / 1e6, (cpu[2] - cpu[1]) / others / 1e6, (size[2] - size[1]) / others,
                    (cpu[1] - cpu[0]) / 1e6, size[1], late[len(late) // 2], late[len(late) * 95 // 100],
                )
            )  # fmt: skip
        m = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(
            f"| {hosts * 8}, {waiting} | {m[0]:.2f} ms | {m[1]:.3f} ms | {m[2]:.2f} ms | {m[3]:.0f} | {m[4]:.0f} ms | {m[5]:.0f} "
            f"| {m[6]:.2f} ms | {m[7]:.2f} ms |"
        )


if __name__ == "__main__":
    main()
