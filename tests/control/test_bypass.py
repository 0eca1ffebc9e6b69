"""Whoever uses a leased card without its lease is named once, and nothing else is done about him."""

from __future__ import annotations

from dataclasses import replace

from bench import Bench

from cotenant.hostd.protocol import CardProcess, to_wire


def seen(bench: Bench, *processes: CardProcess) -> None:
    """The machine tells that these processes are on its first card."""
    machine = bench.machine
    cards = [replace(machine.card(n), processes=processes if n == 0 else ()) for n in range(machine.cards)]
    body = {"cards": [to_wire(card) for card in cards], "facts": to_wire(machine.facts())}
    bench.control.hosts.telemetry(machine.name, "cards", body)


async def test_a_process_without_the_lease_is_named_once(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    lease = await bench.control.leases.acquire(a, gpus=1)
    await bench.settle()
    mine = CardProcess(10, "alice", "python", 100, lease_id=lease.lease_id)
    xorg = CardProcess(11, "root", "Xorg", 20, resident=True)
    stranger = CardProcess(12, "mallory", "python --token hf_0123456789abcdefghij", 4000)
    seen(bench, mine, xorg)
    await bench.settle()
    assert bench.events("gpu.bypass") == []
    for _ in range(2):
        seen(bench, mine, xorg, stranger)
        await bench.settle()
    (event,) = bench.events("gpu.bypass")
    assert (event["severity"], event["lease_id"], event["owner"]) == ("warning", lease.lease_id, "alice")
    assert "pid 12 of mallory" in event["reason"] and "hf_" not in event["reason"]
    seen(bench, mine)
    seen(bench, mine, CardProcess(13, "mallory", "python", 1))
    await bench.settle()
    assert len(bench.events("gpu.bypass")) == 2, "another process is another event"


async def test_on_a_card_without_a_lease_nobody_bypasses_anything(bench: Bench) -> None:
    seen(bench, CardProcess(12, "mallory", "python", 4000))
    await bench.settle()
    assert bench.events("gpu.bypass") == []
