"""What the journal costs: CPU and bytes of one pass that starts a job and lets one go, beside the pass itself.

`engine` is the turn alone; `noted` what the loop pays to hand a pass over; `written` what the thread pays to write it.
CPU time of the process, median of the rounds.

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

from cotenant.server.deciding.engine import Changes, Engine
from cotenant.server.deciding.world import Ask, Decided, Holding, Policy, Start
from cotenant.server.journal import Journal
from cotenant.server.segments import segments

PASSES = 300


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
        decided = engine.turn(now, lambda here=here: here)  # type: ignore[misc]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| cards, waiting | engine ms | noted ms | written ms | bytes a pass |\n|---|---|---|---|---|")
    for hosts, waiting in ((1, 100), (125, 1000), (125, 10_000)):
        rows = []
        for _ in range(args.rounds):
            seen, turn_ms = passes(hosts, waiting)
            with tempfile.TemporaryDirectory() as place:
                journal = Journal(Path(place))
                begin, mine = time.process_time_ns(), time.thread_time_ns()
                for changes, now, decided in seen:
                    journal.note(changes, now, Policy(), decided)
                noted = time.thread_time_ns() - mine
                journal.close()
                written = time.process_time_ns() - begin - noted
                size = sum(path.stat().st_size for path in segments(Path(place)))
            count = len(seen)
            rows.append((turn_ms, noted / count / 1e6, written / count / 1e6, size / count))
        middle = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"| {hosts * 8}, {waiting} | {middle[0]:.3f} | {middle[1]:.4f} | {middle[2]:.3f} | {middle[3]:.0f} |")


if __name__ == "__main__":
    main()
