"""What deciding never does, on random worlds. COTENANT_EXAMPLES=2000 looks longer."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from cotenant.server.deciding.blockers import blockers, could_ever, room_now, would_start
from cotenant.server.deciding.caps import UNLIMITED
from cotenant.server.deciding.decide import decide
from cotenant.server.deciding.fit import Fleet
from cotenant.server.deciding.mirror import Mirror
from cotenant.server.deciding.order import in_order
from cotenant.server.deciding.passes import Pass
from cotenant.server.deciding.usage import usage
from cotenant.server.deciding.world import (
    BLOCKERS,
    UNITS_PER_CARD,
    Ask,
    Blocker,
    Decided,
    Holding,
    HostView,
    Needs,
    OwnerRules,
    Policy,
    PoolRules,
    Slot,
    SlotKey,
    Spent,
    Start,
    Wait,
    World,
)

NOW = 1_000_000
HOUR = 3_600_000
POLICY = Policy()
POOLS = ("main", "side")
PEOPLE = (("alice", "ada"), ("alice", "axel"), ("bob", "bert"))
SHARED = {"busy", "behind", "host_cpu", "host_memory", "host_disk", "host_cpu_jobs"}

look = settings(
    max_examples=int(os.environ.get("COTENANT_EXAMPLES", "20")),
    deadline=None,
    derandomize="COTENANT_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

maybe_cap = st.sampled_from((None, None, 0, 1, 2, 3))


@st.composite
def needs(draw: st.DrawFn) -> Needs:
    low = draw(st.sampled_from((0, 1, 1, 1, 2, 3)))
    odd = draw(st.integers(0, 9))
    return Needs(
        gpus_min=low,
        gpus_max=low + (draw(st.integers(0, 2)) if low else 0),
        gpu_memory_mib=draw(st.sampled_from((0, 0, 8_000, 20_000, 90_000))),
        models=("h100",) if odd == 1 else (),
        capability=90 if odd == 2 else 0,
        cpus=draw(st.sampled_from((0, 0, 0, 3))),
        nodes=2 if odd == 3 else 1,
        exclusive_host=odd == 4,
        hosts=("h0",) if odd == 5 else (),
        avoid_hosts=("h0",) if odd == 6 else (),
        avoid_cards=("h0-c0",) if odd == 7 else (),
        prefer_hosts=("h1",) if odd == 8 else (),
        labels=(("rack", "a"),) if odd == 9 else (),
    )


@st.composite
def asks(draw: st.DrawFn, ask_id: str) -> Ask:
    owner, agent = draw(st.sampled_from(PEOPLE))
    odd = draw(st.integers(0, 24))
    return Ask(
        ask_id,
        draw(st.sampled_from(("job", "claim"))),
        owner,
        agent,
        draw(st.booleans()),
        draw(st.sampled_from(POOLS)) if odd else "nowhere",
        draw(needs()),
        draw(st.sampled_from((0, 10, 10, 20))),
        draw(st.integers(1, 4)),
        HOUR,
        held="by a person" if odd == 1 else "",
        not_before_ms=NOW + 5 if odd in (2, 3) else 0,
        not_before_why="start_window" if odd == 3 else "backing_off",
        resumed=odd == 4,
        own_cap=1 if odd == 5 else 0,
        after=("j9",) if odd == 6 else (),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    hosts: list[HostView] = []
    slots: list[Slot] = []
    for n in range(draw(st.integers(1, 3))):
        name = f"h{n}"
        hosts.append(
            HostView(
                name,
                link=draw(st.sampled_from(("up", "up", "up", "up", "suspect", "lost"))),
                mode=draw(st.sampled_from(("ready", "ready", "ready", "ready", "draining", "quarantined"))),
                cpus=draw(st.sampled_from((2, 4, 8))),
                labels=(("rack", "a"),) if draw(st.booleans()) else (),
            )
        )
        pool = draw(st.sampled_from(POOLS))
        for c in range(draw(st.integers(0, 4))):
            shares = draw(st.sampled_from((1, 1, 1, 2, 4)))
            model, memory, capability = draw(st.sampled_from((("NVIDIA H100", 80_000, 90), ("RTX 3090", 24_000, 86))))
            for share in range(shares):
                state = draw(
                    st.sampled_from(("free", "free", "free", "free", "held", "occupied", "sick", "unverified"))
                )
                slots.append(
                    Slot(
                        name, f"{name}-c{c}", share, shares, c, pool, "gpu", memory // shares, model, capability, state
                    )
                )
        slots.extend(Slot(name, "cpu", n, 1, None, pool, "cpu", 0) for n in range(draw(st.integers(0, 2))))
    holdings: list[Holding] = []
    cleaning: list[Holding] = []
    for index, slot in enumerate(slots):
        if draw(st.integers(0, 3)):
            continue
        owner, agent = draw(st.sampled_from(PEOPLE))
        direct = draw(st.booleans())
        lease = Holding(
            f"l{index}",
            "direct" if direct else "job",
            owner,
            agent,
            draw(st.booleans()),
            slot.pool,
            (slot.key,),
            NOW - HOUR,
            NOW + draw(st.integers(-5, 1000)),
            expires_ms=NOW + draw(st.integers(-5, 1000)) if direct else None,
            pickup_ms=NOW + draw(st.integers(-5, 1000)) if direct and draw(st.booleans()) else None,
            missed_pickups=draw(st.integers(0, 1)),
            lost=draw(st.booleans()),
            cpus=draw(st.integers(0, 2)),
            exclusive=draw(st.integers(0, 9)) == 0,
        )
        (cleaning if draw(st.integers(0, 3)) == 0 else holdings).append(lease)
    pools = tuple(
        PoolRules(
            name,
            cap=draw(maybe_cap),
            reserve=draw(st.sampled_from((0, 0, 1, 2))),
            paused=draw(st.integers(0, 9)) == 0,
            draining=draw(st.integers(0, 9)) == 0,
            owner_cap=draw(maybe_cap),
            agent_cap=draw(maybe_cap),
            owner_jobs=draw(maybe_cap),
            agent_jobs=draw(maybe_cap),
        )
        for name in POOLS
    )
    owners = (
        OwnerRules(
            "alice", cap=draw(maybe_cap), jobs=draw(maybe_cap), gpu_hours=draw(st.sampled_from((None, None, 1)))
        ),
    )
    waiting = tuple(draw(asks(f"j{n}")) for n in range(draw(st.integers(0, 7))))
    if waiting and draw(st.booleans()):  # equal asks share what blocks them
        waiting += tuple(replace(waiting[0], id=f"k{n}", queued_at_ms=5) for n in range(2))
    return World(
        tuple(hosts),
        tuple(slots),
        pools,
        owners,
        tuple(holdings),
        tuple(cleaning),
        waiting,
        spent=(Spent("alice", "ada", "main", draw(st.sampled_from((0, HOUR)))),),
    )


def starts(decided: Decided) -> list[Start]:
    return [d for d in decided.decisions if isinstance(d, Start)]


def grantable(world: World) -> set[SlotKey]:
    taken = {key for lease in (*world.holdings, *world.cleaning) for key in lease.slots}
    well = {host.name for host in world.hosts if host.link == "up" and host.mode == "ready"}
    return {s.key for s in world.slots if s.state == "free" and s.host in well and s.key not in taken}


def meets(ask: Ask, slot: Slot, host: HostView, avoid: bool) -> bool:
    """Whether a slot meets an ask's needs, written down a second time."""
    wish = ask.needs
    if slot.pool != ask.pool or (slot.kind == "cpu") != (wish.gpus_max == 0):
        return False
    if (wish.hosts and slot.host not in wish.hosts) or wish.cpus > host.cpus:
        return False
    if any(label not in host.labels for label in wish.labels):
        return False
    if avoid and (slot.host in wish.avoid_hosts or slot.uuid in wish.avoid_cards):
        return False
    if slot.kind == "cpu":
        return True
    if wish.models and not any(m.lower() in slot.model.lower() for m in wish.models):
        return False
    if slot.memory_mib < wish.gpu_memory_mib or slot.capability < wish.capability:
        return False
    return slot.shares == 1 or (wish.gpu_memory_mib > 0 and wish.gpus_min == 1 and wish.nodes == 1)


@look
@given(worlds())
def test_every_ask_is_answered_once_and_with_known_reasons(world: World) -> None:
    decided = decide(world, NOW, POLICY)
    answered = Counter(s.ask_id for s in starts(decided))
    for decision in decided.decisions:
        if isinstance(decision, Wait):
            assert decision.ask_ids and decision.blockers
            assert all(blocker.code in BLOCKERS and blocker.message and blocker.helps for blocker in decision.blockers)
            assert all(decided.blockers[ask_id] == decision.blockers for ask_id in decision.ask_ids)
            answered.update(decision.ask_ids)
    assert answered == Counter(ask.id for ask in world.asks)
    assert set(decided.blockers) == {a.id for a in world.asks} - {s.ask_id for s in starts(decided)}


@look
@given(worlds())
def test_a_slot_is_granted_once_and_only_when_it_is_free_and_meets_the_needs(world: World) -> None:
    free = grantable(world)
    by_key = {slot.key: slot for slot in world.slots}
    hosts = {host.name: host for host in world.hosts}
    of = {ask.id: ask for ask in world.asks}
    seen: set[SlotKey] = set()
    for start in starts(decide(world, NOW, POLICY)):
        ask = of[start.ask_id]
        assert start.slots and len(set(start.slots)) == len(start.slots)
        assert set(start.slots) <= free - seen
        seen |= set(start.slots)
        assert all(meets(ask, by_key[key], hosts[key[0]], avoid=False) for key in start.slots)
        by_host = Counter(key[0] for key in start.slots)
        assert len(by_host) == ask.needs.nodes
        low, high = max(1, ask.needs.gpus_min), max(1, ask.needs.gpus_max)
        assert all(low <= count <= high for count in by_host.values())
        assert len(set(by_host.values())) == 1
        assert start.kind == ask.kind


@look
@given(worlds())
def test_no_host_is_booked_over_its_processors_and_exclusive_ones_are_alone(world: World) -> None:
    of = {ask.id: ask for ask in world.asks}
    booked: Counter[str] = Counter()
    leases: Counter[str] = Counter()
    alone: set[str] = set()
    for lease in (*world.holdings, *world.cleaning):
        for name in {key[0] for key in lease.slots}:
            booked[name] += lease.cpus
            leases[name] += 1
            if lease.exclusive:
                alone.add(name)
    for start in starts(decide(world, NOW, POLICY)):
        ask = of[start.ask_id]
        for name in {key[0] for key in start.slots}:
            assert name not in alone
            booked[name] += ask.needs.cpus
            cpus = next(h.cpus for h in world.hosts if h.name == name)
            assert ask.needs.cpus == 0 or booked[name] <= cpus
            if ask.needs.exclusive_host:
                assert leases[name] == 0
                alone.add(name)
            leases[name] += 1


@look
@given(worlds())
def test_no_grant_goes_over_a_cap_or_into_the_reserve(world: World) -> None:
    units = {slot.key: (UNITS_PER_CARD // slot.shares if slot.kind == "gpu" else 0) for slot in world.slots}
    pools = {pool.name: pool for pool in world.pools}
    owners = {owner.owner: owner for owner in world.owners}
    cards = Counter({p: sum(units[s.key] for s in world.slots if s.pool == p) for p in POOLS})
    rows = [  # (owner, agent, human, pool, units, is a living lease)
        (lease.owner, lease.agent, lease.human, lease.pool, sum(units[k] for k in lease.slots), living)
        for living, leases in ((True, world.holdings), (False, world.cleaning))
        for lease in leases
    ]
    of = {ask.id: ask for ask in world.asks}
    for start in starts(decide(world, NOW, POLICY)):
        ask = of[start.ask_id]
        pool = pools[ask.pool]
        assert not (pool.paused or pool.draining or ask.held or ask.after or ask.not_before_ms > NOW)
        mine = sum(units[key] for key in start.slots)
        here = [row for row in rows if row[3] == ask.pool]
        if mine:
            if pool.cap is not None:
                assert sum(row[4] for row in here) + mine <= pool.cap * UNITS_PER_CARD
            if not ask.human:
                cap = cards[ask.pool] if pool.cap is None else pool.cap * UNITS_PER_CARD
                if pool.reserve:
                    assert sum(r[4] for r in here if not r[2]) + mine <= cap - pool.reserve * UNITS_PER_CARD
                if pool.agent_cap is not None:
                    assert sum(r[4] for r in here if r[1] == ask.agent) + mine <= pool.agent_cap * UNITS_PER_CARD
            if pool.owner_cap is not None:
                assert sum(r[4] for r in here if r[0] == ask.owner) + mine <= pool.owner_cap * UNITS_PER_CARD
            if ask.own_cap:
                assert sum(r[4] for r in rows if r[1] == ask.agent) + mine <= ask.own_cap * UNITS_PER_CARD
            owner = owners.get(ask.owner)
            if owner is not None and owner.cap is not None:
                assert sum(r[4] for r in rows if r[0] == ask.owner) + mine <= owner.cap * UNITS_PER_CARD
            if owner is not None and owner.gpu_hours is not None:
                assert sum(s.day_ms for s in world.spent if s.owner == ask.owner) < owner.gpu_hours * HOUR
        if (rules := owners.get(ask.owner)) is not None and rules.jobs is not None:
            assert sum(1 for r in rows if r[5] and r[0] == ask.owner) < rules.jobs
        if pool.owner_jobs is not None:
            assert sum(1 for r in here if r[5] and r[0] == ask.owner) < pool.owner_jobs
        if pool.agent_jobs is not None and not ask.human:
            assert sum(1 for r in here if r[5] and r[1] == ask.agent) < pool.agent_jobs
        rows.append((ask.owner, ask.agent, ask.human, ask.pool, mine, True))


@look
@given(worlds(), st.randoms(use_true_random=False))
def test_equal_worlds_give_equal_answers_in_any_order(world: World, dice: object) -> None:
    def shuffled(items: tuple[object, ...]) -> tuple[object, ...]:
        found = list(items)
        dice.shuffle(found)  # type: ignore[attr-defined]
        return tuple(found)

    other = World(**{name: shuffled(value) for name, value in vars(world).items()})
    first, second = decide(world, NOW, POLICY), decide(other, NOW, POLICY)
    assert first == second
    assert list(first.blockers) == list(second.blockers)


@look
@given(worlds(), asks("zz"))
def test_blockers_say_what_decide_says(world: World, new: Ask) -> None:
    decided = decide(world, NOW, POLICY)
    started = {start.ask_id: start.slots for start in starts(decided)}
    for ask in world.asks:
        assert blockers(world, ask, NOW, POLICY) == decided.blockers.get(ask.id, ())
        assert would_start(world, ask, NOW, POLICY) == started.get(ask.id)
    both = decide(replace(world, asks=(new, *world.asks)), NOW, POLICY)
    assert blockers(world, new, NOW, POLICY) == both.blockers.get("zz", ())
    assert (would_start(world, new, NOW, POLICY) is None) == ("zz" in both.blockers)


def lifted(world: World, ask: Ask, blocker: Blocker) -> tuple[World, Ask]:
    """The world and the ask without what the blocker says, and no more than that where it can be told apart."""
    code, names = blocker.code, dict(blocker.names)

    def pool(**change: object) -> World:
        return replace(
            world,
            pools=tuple(replace(p, **change) if p.name == names["pool"] else p for p in world.pools),  # type: ignore[arg-type]
        )

    def owner(**change: object) -> World:
        return replace(
            world,
            owners=tuple(replace(o, **change) if o.owner == names["owner"] else o for o in world.owners),  # type: ignore[arg-type]
        )

    def slots(*states: str) -> World:
        return replace(world, slots=tuple(replace(s, state="free") if s.state in states else s for s in world.slots))

    match code:
        case "held":
            return world, replace(ask, held="")
        case "dependency":
            return world, replace(ask, after=())
        case "backing_off" | "start_window":
            return world, replace(ask, not_before_ms=0)
        case "queue_paused":
            return pool(paused=False), ask
        case "queue_draining":
            return pool(draining=False), ask
        case "quota_owner":
            return (pool(owner_cap=None) if "pool" in names else owner(cap=None)), ask
        case "quota_agent":
            return (pool(agent_cap=None), ask) if "pool" in names else (world, replace(ask, own_cap=0))
        case "quota_pool":
            return pool(cap=None), ask
        case "reserve":
            return pool(reserve=0), ask
        case "jobs_at_once":
            if "pool" not in names:
                return owner(jobs=None), ask
            return (pool(owner_jobs=None) if "owner" in names else pool(agent_jobs=None)), ask
        case "gpu_hours":
            return replace(world, spent=()), ask
        case "occupied":
            return slots("occupied", "unverified"), ask
        case "host_sick":
            return slots("sick"), ask
        case "host_draining" | "host_policy":
            return replace(world, hosts=tuple(replace(h, mode="ready") for h in world.hosts)), ask
        case "host_down":
            return replace(world, hosts=tuple(replace(h, link="up") for h in world.hosts)), ask
        case "behind" | "reserved_for":
            return replace(world, asks=tuple(a for a in world.asks if a.id != names["ahead"])), ask
        case "no_such_gpu":
            wish = ask.needs
            extra = [f"new{n}" for n in range(wish.nodes)]
            hosts = tuple(HostView(name, cpus=64, labels=(("rack", "a"),)) for name in extra)
            kind = "gpu" if wish.gpus_max else "cpu"
            cards = tuple(
                Slot(name, f"{name}-{c}", 0, 1, c, ask.pool, kind, 99_000, "H100", 90)  # type: ignore[arg-type]
                for name in extra
                for c in range(3)
            )
            more = replace(world, hosts=world.hosts + hosts, slots=world.slots + cards)
            return more, replace(ask, needs=replace(wish, hosts=()))
        case "busy" | "host_cpu" | "host_cpu_jobs":
            # What others of this pass start with is held as well, so they go with the holdings.
            return replace(slots("held", "cleaning"), holdings=(), cleaning=(), asks=()), ask
    raise AssertionError(f"nothing lifts {code}")


@look
@given(worlds())
def test_the_first_blocker_is_true_and_lifting_all_of_them_in_turn_starts_the_ask(world: World) -> None:
    decided = decide(world, NOW, POLICY)
    for ask in world.asks:
        here, mine = world, ask
        found = decided.blockers.get(ask.id, ())
        for _ in range(40):
            if not found:
                break
            first = found[0]
            note(f"{ask.id}: {first}")
            here, mine = lifted(here, mine, first)
            found = blockers(here, mine, NOW, POLICY)
            assert not found or (found[0].code, found[0].names) != (first.code, first.names)
        assert not found, "lifting what is told never ends"


@look
@given(worlds())
def test_nobody_takes_what_an_earlier_ask_waits_for(world: World) -> None:
    decided = decide(world, NOW, POLICY)
    granted = {start.ask_id: start.slots for start in starts(decided)}
    by_key = {slot.key: slot for slot in world.slots}
    hosts = {host.name: host for host in world.hosts}
    order = in_order(world, NOW)
    for place, first in enumerate(order):
        why = decided.blockers.get(first.id)
        if why is None or not {b.code for b in why} <= SHARED:
            continue
        if any(b.code == "behind" for b in why):
            continue  # it may be behind an ask that waits at a cap, and keeps nothing of its own then
        for later in order[place + 1 :]:
            if later.pool == first.pool:
                for key in granted.get(later.id, ()):
                    assert not meets(first, by_key[key], hosts[key[0]], avoid=True)


@look
@given(worlds())
def test_an_ask_that_could_ever_start_does_so_alone_in_an_empty_pool(world: World) -> None:
    empty = World(
        tuple(replace(host, link="up", mode="ready") for host in world.hosts),
        tuple(replace(slot, state="free") for slot in world.slots),
        tuple(replace(pool, paused=False, draining=False) for pool in world.pools),
        world.owners,
    )
    for ask in world.asks:
        alone = replace(ask, held="", after=(), not_before_ms=0)
        never = could_ever(world, alone)
        assert (never is None) == (would_start(empty, alone, NOW, POLICY) is not None)
        if never is not None:
            assert never.code in {"no_such_gpu", "quota_owner", "quota_agent", "quota_pool", "reserve", "jobs_at_once"}
            assert decide(world, NOW, POLICY).blockers[ask.id]


@look
@given(worlds())
def test_room_is_what_can_be_taken_card_by_card(world: World) -> None:
    """As many asks for one card start as the room says, if nobody else waits."""
    for owner, agent in PEOPLE:
        for pool in POOLS:
            room = room_now(world, owner, agent, False, pool)
            one = Ask("n", "claim", owner, agent, False, pool, Needs(), 10, 1, HOUR)
            # Jobs at once may end the series earlier; they are no cap on cards.
            plain = replace(
                world,
                asks=tuple(replace(one, id=f"n{n}") for n in range(20)),
                pools=tuple(replace(p, owner_jobs=None, agent_jobs=None) for p in world.pools),
                owners=tuple(replace(o, jobs=None) for o in world.owners),
            )
            whole = len(starts(decide(plain, NOW, POLICY)))
            assert room == whole or (room == 0 and blockers(world, one, NOW, POLICY))


@look
@given(worlds())
def test_equal_asks_that_share_an_answer_would_get_the_same_one_by_one(world: World) -> None:
    one_by_one = Pass(Mirror(world, NOW, POLICY))
    expected = {ask.id: keys for ask in in_order(world, NOW) if (keys := one_by_one.answer(ask)[0])}
    assert {start.ask_id: start.slots for start in starts(decide(world, NOW, POLICY))} == expected


@look
@given(worlds())
def test_the_heap_of_hosts_finds_what_a_look_at_every_host_finds(world: World) -> None:
    expected = decide(world, NOW, POLICY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fleet, "_best", lambda self, shape, ends_ms: self._scan(shape, UNLIMITED, 0, ends_ms))
        assert decide(world, NOW, POLICY) == expected


@look
@given(worlds())
def test_usage_is_the_sum_of_the_leases(world: World) -> None:
    for pool in POOLS:
        use = usage(world, pool)
        assert sum(units for _, units in use.owners) == use.used == sum(units for _, units in use.callers)
        assert use.used_by_agents <= use.used
        assert use.used <= use.cards
