"""A small world that things happen to, by the dice of a seed: for tests that follow it from event to event."""

from __future__ import annotations

import random
from dataclasses import replace

from cotenant.server.deciding.engine import Engine
from cotenant.server.deciding.world import (
    AgentRules,
    Ask,
    Decided,
    GiveUp,
    Holding,
    HostView,
    Needs,
    Notice,
    OwnerRules,
    PoolRules,
    Preempt,
    Preemption,
    Reservation,
    Slot,
    SlotKey,
    Spent,
    Start,
    Window,
    Withdraw,
    World,
)

HOUR = 3_600_000
BEGIN = 1_767_571_200_000
PEOPLE = (("alice", "ada"), ("alice", "axel"), ("bob", "bert"), ("cora", "cai"))


class Lab:
    """A world that things happen to, by the dice of a seed."""

    def __init__(self, seed: int, *, preempt: bool = False) -> None:
        self.dice = dice = random.Random(seed)
        self.preempt = preempt
        self.now = BEGIN
        self.number = 0
        pools = []
        for name in ("main", "side"):
            cap = dice.choice((None, None, 4, 8))
            pools.append(
                PoolRules(
                    name, cap=cap, reserve=dice.choice((0, 0, 1)), order=dice.choice(("fifo", "fairshare", "shortest")), starve_h=dice.choice((1, 24)),
                    owner_cap=dice.choice((None, 3)), agent_jobs=dice.choice((None, None, 3)), gpu_hours=dice.choice((None, None, None, 40)) if dice.random() < 0.3 else None,
                    paused=dice.random() < 0.05, preempt="within" if preempt else "off", idle_s=1800 if preempt and dice.random() < 0.3 else 0, windows=(Window((0, 1, 2), 60, 1200),) if dice.random() < 0.2 else (), timezone="Europe/Berlin",
                )
            )  # fmt: skip
        hosts, slots = [], []
        for n in range(dice.randint(2, 5)):
            name = f"h{n}"
            hosts.append(HostView(name, cpus=8, memory_mib=1000, max_jobs=dice.choice((0, 0, 3))))
            pool = dice.choice(("main", "main", "side"))
            for card in range(dice.randint(1, 4)):
                shares = dice.choice((1, 1, 1, 2))
                mig = shares == 1 and dice.random() < 0.1
                slots += [
                    Slot(name, f"{name}-c{card}", share, shares, card, pool, "gpu", 80_000 // shares, mig=mig)
                    for share in range(shares)
                ]
            slots += [Slot(name, "cpu", place, 2, None, pool, "cpu", 0) for place in range(2)]
        self.slots = {slot.key: slot for slot in slots}
        self.living: dict[str, Holding] = {}
        self.cleaning: dict[str, Holding] = {}
        self.asks: dict[str, Ask] = {}
        self._told: dict[str, Ask] = {}  # what the engine knows
        self.base = World(
            hosts=tuple(hosts), pools=tuple(pools), owners=(OwnerRules("alice", cap=4, jobs=dice.choice((None, 3))),),
            agents=(AgentRules("bert", cap=dice.choice((None, 2))),),
            reservations=(Reservation("r", "main", "cora", 2, BEGIN + 2 * HOUR, BEGIN + 5 * HOUR),) if dice.random() < 0.3 else (),
        )  # fmt: skip

    def world(self) -> World:
        return replace(
            self.base, slots=tuple(self.slots.values()), holdings=tuple(self.living.values()), cleaning=tuple(self.cleaning.values()),
            asks=tuple(self.asks.values()),
        )  # fmt: skip

    def arrive(self) -> Ask:
        dice = self.dice
        self.number += 1
        owner, agent = dice.choice(PEOPLE)
        low = dice.choice((0, 1, 1, 1, 1, 2, 2, 3))
        needs = Needs(
            gpus_min=low, gpus_max=low + (dice.randint(0, 2) if low and dice.random() < 0.3 else 0), gpu_memory_mib=dice.choice((0, 0, 0, 30_000)),
            cpus=dice.choice((0, 0, 0, 3)), nodes=2 if low and dice.random() < 0.1 else 1, exclusive_host=dice.random() < 0.05,
        )  # fmt: skip
        odd = dice.random()
        array = dice.random() < 0.15
        return Ask(
            f"j{self.number:04d}", "job", owner, agent, dice.random() < 0.3, "nowhere" if dice.random() < 0.02 else dice.choice(("main", "main", "side")), needs,
            dice.choice((0, 10, 10, 20, 30)), self.now, dice.choice((1, 2, 5)) * HOUR + dice.randint(0, 3) * 60_000, held="x" if odd < 0.05 else "",
            not_before_ms=self.now + HOUR if 0.05 < odd < 0.15 else 0, resumed=0.15 < odd < 0.2, own_cap=1 if 0.2 < odd < 0.25 else 0,
            not_after_ms=self.now + 3 * HOUR if 0.25 < odd < 0.3 else None, after=("gone",) if 0.3 < odd < 0.33 else (),
            count=dice.randint(1, 4) if array else 1, array=f"j{self.number:04d}" if array else "",
            array_room=dice.randint(0, 3) if array and dice.random() < 0.5 else None,
        )  # fmt: skip

    def start(self, start: Start) -> None:
        ask = self.asks[start.ask_id]
        if ask.count > 1:
            room = None if ask.array_room is None else ask.array_room - 1
            self.asks[ask.id] = replace(ask, count=ask.count - 1, array_room=room)
        else:
            del self.asks[ask.id]
        self.number += 1
        self.put_lease(
            Holding(
                f"l{self.number:04d}", "job" if self.dice.random() < 0.7 else "direct", ask.owner, ask.agent, ask.human, ask.pool, start.slots,
                self.now, self.now + ask.hours_ms, expires_ms=self.now + HOUR, cpus=ask.needs.cpus, exclusive=ask.needs.exclusive_host,
                priority=ask.priority, preemptible=self.preempt and self.dice.random() < 0.5, resumable=True,
                progress_ms=self.now if self.preempt and self.dice.random() < 0.2 else None,
            )
        )  # fmt: skip

    def put_lease(self, lease: Holding) -> None:
        self.living[lease.id] = lease
        for key in lease.slots:
            self.slots[key] = replace(self.slots[key], state="held", lease_id=lease.id)

    def free(self, keys: tuple[SlotKey, ...], state: str = "free") -> None:
        for key in keys:
            self.slots[key] = replace(self.slots[key], state=state, lease_id=None)  # type: ignore[arg-type]

    def happen(self) -> None:
        """One thing or a few."""
        dice = self.dice
        self.now += dice.choice((0, 1, 1000, 60_000, 60_000, HOUR // 4, HOUR // 2, HOUR))
        for _ in range(dice.choice((1, 1, 1, 3))):
            what = dice.random()
            if what < 0.4:
                ask = self.arrive()
                self.asks[ask.id] = ask
            elif what < 0.65 and self.living:
                lease = self.living.pop(dice.choice(sorted(self.living)))
                if dice.random() < 0.5:
                    self.cleaning[lease.id] = replace(lease, lost=dice.random() < 0.1)
                    self.free(lease.slots, "cleaning")
                else:
                    self.free(lease.slots)
            elif what < 0.75 and self.cleaning:
                self.free(self.cleaning.pop(dice.choice(sorted(self.cleaning))).slots)
            elif what < 0.8 and self.living:
                name = dice.choice(sorted(self.living))
                self.living[name] = replace(self.living[name], lost=dice.random() < 0.3, expires_ms=self.now + HOUR)
            elif what < 0.85 and self.asks:
                name = dice.choice(sorted(self.asks))
                if dice.random() < 0.5:
                    del self.asks[name]
                else:
                    self.asks[name] = replace(self.asks[name], held="", after=(), priority=dice.choice((0, 20)))
            elif what < 0.9:
                key = dice.choice(sorted(self.slots))
                if self.slots[key].state in ("free", "occupied", "sick"):
                    self.free((key,), dice.choice(("free", "occupied", "sick")))
            elif what < 0.95:
                views = list(self.base.hosts)
                number = dice.randrange(len(views))
                views[number] = replace(
                    views[number], link=dice.choice(("up", "up", "lost")), mode=dice.choice(("ready", "ready", "draining"))
                )  # fmt: skip
                self.base = replace(self.base, hosts=tuple(views))
            elif what < 0.98:
                spent = tuple(
                    Spent(owner, agent, "main", dice.randint(0, 50) * HOUR, dice.randint(0, 9))
                    for owner, agent in PEOPLE
                )
                self.base = replace(self.base, spent=spent)
            elif what < 0.99:
                pools = list(self.base.pools)
                pools[0] = replace(pools[0], cap=dice.choice((None, 1, 4)), paused=False)
                self.base = replace(self.base, pools=tuple(pools))
            else:
                self.now -= HOUR
        for one in self.base.preemptions:
            if dice.random() < 0.3:  # a victim ends
                for name in one.victims:
                    if name in self.living and dice.random() < 0.8:
                        lease = self.living.pop(name)
                        self.free(lease.slots)
            if dice.random() < 0.2:
                stopped = tuple(replace(p, stopping=True) if p.id == one.id else p for p in self.base.preemptions)
                self.base = replace(self.base, preemptions=stopped)
            elif dice.random() < 0.1:
                self.base = replace(self.base, preemptions=tuple(p for p in self.base.preemptions if p.id != one.id))
        if dice.random() < 0.1:
            views = list(self.base.hosts)
            views[0] = replace(views[0], cpus=dice.choice((2, 8)))
            self.base = replace(self.base, hosts=tuple(views))

    def tell(self, engine: Engine) -> None:
        """Let an engine know all that has happened."""
        for name in [name for name in self._told if name not in self.asks]:
            engine.drop(name)
            del self._told[name]
        for name, ask in self.asks.items():
            if self._told.get(name) is not ask:
                engine.put(ask)
                self._told[name] = ask
        engine.sync(self.world(), self.now)

    def carry_out(self, decided: Decided) -> int:
        """Most of what was decided comes true. Gives how many started."""
        started = 0
        for decision in decided.decisions:
            if isinstance(decision, Start) and self.dice.random() < 0.9:
                self.start(decision)
                started += 1
                self.base = replace(
                    self.base, preemptions=tuple(p for p in self.base.preemptions if p.ask_id != decision.ask_id)
                )
            elif isinstance(decision, GiveUp):
                del self.asks[decision.ask_id]
            elif isinstance(decision, Withdraw):
                self.base = replace(
                    self.base, preemptions=tuple(p for p in self.base.preemptions if p.id != decision.preemption_id)
                )
            elif isinstance(decision, Preempt) and self.dice.random() < 0.8:
                self.number += 1
                pool = self.asks[decision.ask_id].pool
                one = Preemption(f"p{self.number}", pool, decision.ask_id, decision.victims, decision.slots, self.now)
                self.base = replace(self.base, preemptions=(*self.base.preemptions, one))
            elif isinstance(decision, Notice):
                self.living[decision.lease_id] = replace(self.living[decision.lease_id], idle_notice_ms=self.now)
        return started
