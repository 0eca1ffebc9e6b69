"""Deciding from one event to the next: what `decide` decides, without looking at everything each time.

An engine keeps the world (`Mirror`) and the queue (`Lanes`), is told what changed, and gives the same decisions as `decide`
on the same world, but for the waits: why somebody waits is worked out by `decide` when somebody wants to know.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import compress, count
from operator import is_not, itemgetter
from typing import Any

from cotenant.server.deciding import idle, preempt, reasons
from cotenant.server.deciding.decide import takings_for
from cotenant.server.deciding.lanes import Entry, Lane, Lanes
from cotenant.server.deciding.leases import direct_ends, expired, rule_changes
from cotenant.server.deciding.mirror import Mirror
from cotenant.server.deciding.order import STARVING, Key, past_use
from cotenant.server.deciding.passes import OWN, Pass
from cotenant.server.deciding.shape import Shape
from cotenant.server.deciding.trials import Trials
from cotenant.server.deciding.world import (
    Ask,
    Decided,
    GiveUp,
    Holding,
    Policy,
    Preemption,
    Slot,
    Spent,
    Start,
    Wait,
    World,
)


class Changes:
    """What became of a world: `world` anew where it was built anew, and then what was put (or None: is gone) of each part."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world
        self.parts: dict[str, dict[Any, Any]] = {}  # part -> key -> what is there now
        self.whole: dict[str, tuple[Any, ...]] = {}  # parts that are replaced as a whole

    def note(self, part: str, key: Any, what: Any) -> None:
        """One of a part is there, is another, or is gone."""
        self.parts.setdefault(part, {})[key] = what

    def go_on(self, later: Changes) -> None:
        """Add what became of it after that."""
        if later.world is not None:
            self.world, self.parts, self.whole = later.world, {}, {}
        for name, part in later.parts.items():
            self.parts.setdefault(name, {}).update(part)
        self.whole.update(later.whole)


class Engine:
    """Keeps a world and decides on it."""

    def __init__(self, world: World, now_ms: int, policy: Policy, *, record: bool = False) -> None:
        """`record`: `take_changes` will be asked for, and must be, since changes gather until then."""
        self._policy = policy
        self._record = record
        self._changes = Changes()
        self._mirror: Mirror
        self._build(world, now_ms)
        self.lanes = Lanes(self._mirror.pools, now_ms)
        for ask in world.asks:
            self.put(ask)

    def take_changes(self) -> Changes:
        """What became of the world since this was last called."""
        changes, self._changes = self._changes, Changes()
        return changes

    def _build(self, world: World, now_ms: int) -> None:
        self._world = world
        self._changes.world = replace(world, asks=())
        self._mirror = Mirror(world, now_ms, self._policy)
        #: Every lease by its identity: one that is another object has changed.
        self._known = {id(lease): lease for lease in (*world.holdings, *world.cleaning)}
        self._direct = {lease.id: lease for lease in world.holdings if lease.kind == "direct"}
        self._past = past_use(world.spent)
        self._fair = {pool.name for pool in world.pools if pool.order == "fairshare"}
        self._generation = (-1, -1)  # of the fleet that the lanes' shapes are of
        self._booked: dict[
            str, Key
        ] = {}  # pool -> the place of the ask that something is kept for, as of the last turn
        #: pool -> the pools whose work may be stopped for it; and pools that tell idle leases
        self._preempting = {
            pool.name: (pool.name, *(pool.preempt_from if pool.preempt == "from" else ()))
            for pool in world.pools
            if pool.preempt != "off"
        }
        self._telling = {pool.name for pool in world.pools if pool.idle_s}
        self._victims: dict[str, Holding] = {}
        self._watched: set[str] = set()
        for lease in world.holdings:
            self._count(lease)

    # ---- what changed -------------------------------------------------------------------------

    def _note(self, part: str, key: Any, what: Any) -> None:
        if self._record:
            self._changes.note(part, key, what)

    def put(self, ask: Ask) -> bool:
        """Something waits, or waits otherwise than before. Gives whether that can change what the next turn decides."""
        known = ask.id in self.lanes.asks
        self._note("asks", ask.id, ask)
        lane = self.lanes.put(ask)
        return known or lane is None or ask.not_after_ms is not None or self._matters(lane, ask)

    def _matters(self, lane: Lane, ask: Ask) -> bool:
        """Whether an ask that came may start, or comes before the one that something is kept for."""
        booked = self._booked.get(lane.pool)
        return (
            booked is None
            or self._key(lane, self.lanes.entry(ask.id)) < booked
            or self._mirror.fleet.possible(self._shape(lane))
        )

    def drop(self, ask_id: str) -> None:
        """It waits no more."""
        if self.lanes.drop(ask_id) is not None:
            self._note("asks", ask_id, None)

    def hold(self, lease: Holding, *, cleaning: bool = False) -> None:
        """A lease is there, or is over and its slots are being cleaned."""
        self._mirror.hold(lease, cleaning=cleaning)
        self._known[id(lease)] = lease
        self._note("cleaning" if cleaning else "holdings", lease.id, lease)
        if not cleaning:
            self._count(lease)
            if lease.kind == "direct":
                self._direct[lease.id] = lease

    def _count(self, lease: Holding) -> None:
        """Remember a lease that may be stopped for another, or whose work is watched."""
        if self._preempting and lease.kind == "job" and lease.preemptible and lease.resumable:
            self._victims[lease.id] = lease
        if lease.pool in self._telling and lease.progress_ms is not None:
            self._watched.add(lease.id)

    def let_go(self, lease_id: str) -> None:
        """A lease is over and its slots are clean."""
        self._note("holdings" if lease_id in self._mirror.living else "cleaning", lease_id, None)
        lease = self._mirror.let_go(lease_id)
        del self._known[id(lease)]
        self._direct.pop(lease_id, None)
        self._victims.pop(lease_id, None)
        self._watched.discard(lease_id)

    def sync(self, world: World, now_ms: int) -> None:
        """Take everything but the asks from `world`. What is the same object as before is taken to be as it was."""
        was = self._world
        rules = (world.pools, world.owners, world.agents)
        if rules != (was.pools, was.owners, was.agents) or not self._see_fleet(was, world):
            self._build(world, now_ms)
            self.lanes.set_rules(self._mirror.pools)
            self._changes = Changes(replace(world, asks=tuple(self.lanes.asks.values())))
            return
        mirror = self._mirror
        there = set(map(id, world.holdings))
        there.update(map(id, world.cleaning))
        if there != self._known.keys():
            for identity in [identity for identity in self._known if identity not in there]:
                self.let_go(self._known[identity].id)
            for leases, cleaning in ((world.holdings, False), (world.cleaning, True)):
                for lease in [lease for lease in leases if id(lease) not in self._known]:
                    self.hold(lease, cleaning=cleaning)
        mirror.reservations = world.reservations
        for name in ("reservations", "preemptions", "spent"):
            if getattr(world, name) is not getattr(was, name):
                self._changes.whole[name] = getattr(world, name)
        if world.spent is not was.spent:
            self.spend(world.spent)
        self._world = world

    def preempt(self, preemptions: tuple[Preemption, ...]) -> None:
        """Other preemptions are under way."""
        self._world = replace(self._world, preemptions=preemptions)

    def spend(self, spent: tuple[Spent, ...]) -> None:
        """The sums of past use are others."""
        self._mirror.spend(spent)
        self._past = past_use(spent)

    def _see_fleet(self, was: World, world: World) -> bool:
        """Take over the states of hosts and slots; False where the fleet is another one."""
        if len(was.hosts) != len(world.hosts) or len(was.slots) != len(world.slots):
            return False
        if world.hosts is not was.hosts:
            for before, after in zip(was.hosts, world.hosts, strict=True):
                if before is after:
                    continue
                if before.name != after.name or not self._mirror.look(after):
                    return False
                self._note("hosts", after.name, after)
        changed: list[Slot] = []
        for number in compress(count(), map(is_not, was.slots, world.slots)):
            before_slot, slot = was.slots[number], world.slots[number]
            if not _same_slot(before_slot, slot):
                return False
            changed.append(slot)
        for slot in changed:
            self._mirror.see(slot)
            self._note("slots", slot.key, slot)
        return True

    # ---- deciding -----------------------------------------------------------------------------

    def turn(self, now_ms: int) -> Decided:
        """What should change now: as `decide` has it, without `blockers` and without a Wait for those that wait."""
        mirror, lanes, preemptions = self._mirror, self.lanes, self._world.preemptions
        mirror.advance(now_ms)
        lanes.advance(now_ms)
        ends = expired(self._direct.values(), now_ms)
        late = lanes.closed(now_ms)
        given_up = [GiveUp(ask.id, reasons.window_closed(ask)) for ask in late]
        due = direct_ends(self._direct.values())
        if (at := lanes.next_ms()) is not None:
            due.append(at)
        if len(lanes):
            due += rule_changes(mirror.pools.values(), mirror.reservations, now_ms)
        due_ms = min((at for at in due if at > now_ms), default=None)
        if len(lanes) <= len(late) and not preemptions:
            return Decided((*ends, *given_up), due_ms)
        out = {ask.id for ask in late}
        state = Pass(mirror)
        trials = Trials(mirror, state)
        try:
            askers = {
                one.ask_id: lanes.asks[one.ask_id] for one in preemptions if one.ask_id in lanes.asks.keys() - out
            }
            of_preemptions, met = preempt.keep(trials, state, preemptions, askers)
            out |= met
            waits: list[Wait] = []
            starts = self._starts(state, out, self._watch(now_ms), waits)
            bookings = tuple(state.bookings[pool] for pool in sorted(state.bookings))
            takings, again_ms = takings_for(trials, lanes.asks, waits, preemptions)
        finally:
            trials.let_out()
            state.undo()
        wake_ms = min((at for at in (due_ms, again_ms) if at is not None), default=None)
        return Decided((*ends, *given_up, *of_preemptions, *starts, *takings), wake_ms, bookings=bookings)

    def _watch(self, now_ms: int) -> dict[str, int]:
        """Pools where somebody may be stopped for one who waits, or told that he is idle: how many of those who wait to look at."""
        found: dict[str, int] = {}
        if self._watched:
            found = dict.fromkeys(self._telling, idle.ASKS)
        if self._preempting and self._victims:
            without_right = any(owner.no_preempt_until_ms > now_ms for owner in self._world.owners)
            lowest: dict[str, int] = {}
            for lease in self._victims.values():
                lowest[lease.pool] = min(lowest.get(lease.pool, lease.priority), lease.priority)
            for lane in self.lanes:
                for pool in self._preempting.get(lane.pool, ()):
                    if without_right or (pool in lowest and lane.priorities[-1] > lowest[pool]):
                        found.setdefault(lane.pool, 1)
        return found

    def _starts(self, state: Pass, out: set[str], watch: dict[str, int], waits: list[Wait]) -> list[Start]:
        """Those that start, in the order of the queue. Goes through the lanes together, each only as far as it can matter.

        Those in `out` take no part. Of the pools in `watch` so many lanes whose first waits for what others hold are told
        in `waits`, with their reasons.
        """
        heap: list[tuple[Key, Lane, int]] = []
        full: dict[str, list[tuple[Key, Lane]]] = {}  # pool -> lanes where nobody can start
        for lane in self.lanes:
            if state.queue(lane.pool):
                continue
            key = self._key(lane, lane.entries[0])
            if watch.get(lane.pool) or self._room(lane):
                heap.append((key, lane, 0))
            else:
                full.setdefault(lane.pool, []).append((key, lane))
        # of those where nobody can start only the first matters, for what is kept for it
        for lanes in full.values():
            heap.append((*_take_first(lanes), 0))
        heapify(heap)
        starts: list[Start] = []
        told: set[Lane] = set()
        self._booked.clear()
        while heap:
            key, lane, place = heappop(heap)
            ask = lane.asks[place]
            shape = self._shape(lane)
            after = place + 1
            watched = watch.get(lane.pool, 0) > 0 and lane not in told
            if lane.pool in state.bookings and not watched:
                # no more is to be kept in this pool: only whoever can start matters
                if not self._room(lane):
                    continue
                hours_ms = state.latest_ms(lane.human, shape, lane.pool) - state.fleet.ends_ms()
                if ask.hours_ms > hours_ms:
                    self._push(heap, lane, lane.shorter(after, hours_ms + 1))
                    continue
            if ask.id not in out:
                for _ in range(ask.count):
                    look = state.look(ask, shape)
                    if look.where is None:
                        if watched:
                            why = tuple(state.blockers(ask, shape, look))
                            if all(blocker.code in preempt.HELPED for blocker in why):
                                told.add(lane)
                                watch[lane.pool] -= 1
                                waits.append(Wait((ask.id,), why))
                        if look.array_full:
                            pass  # others of the lane are of other arrays
                        elif look.closed or any(limit.code in OWN for limit in look.reached):
                            after = -1
                        else:
                            if state.keep(ask, shape, look) and lane.pool in state.bookings:
                                self._booked[lane.pool] = key
                            # what refuses this one refuses those that take as long
                            shorter = look.wanted > look.kept or not look.reached
                            after = lane.shorter(after, ask.hours_ms) if shorter else -1
                        break
                    starts.append(Start(ask.id, ask.kind, state.start(ask, look)))
            self._push(heap, lane, after)
            if lane.pool not in state.bookings and full.get(lane.pool):
                heappush(heap, (*_take_first(full[lane.pool]), 0))
        return starts

    def _room(self, lane: Lane) -> bool:
        """Whether caps and hosts leave room for one of the lane, what is kept for others left out."""
        shape, limits = self._shape(lane), lane.limits
        assert limits is not None
        return self._mirror.fleet.possible(shape) and (shape.cpu or limits.room() >= shape.least_units)

    def _push(self, heap: list[tuple[Key, Lane, int]], lane: Lane, place: int) -> None:
        if 0 <= place < len(lane.entries):
            heappush(heap, (self._key(lane, lane.entries[place]), lane, place))

    def _shape(self, lane: Lane) -> Shape:
        fleet = self._mirror.fleet
        if (id(fleet), fleet.generation) != self._generation:
            self._generation = (id(fleet), fleet.generation)
            for other in self.lanes:
                other.shape = None
        if lane.shape is None:
            lane.shape = fleet.shape(lane.pool, lane.needs)
            lane.limits = self._mirror.limits(lane.asks[0])
        return lane.shape

    def _key(self, lane: Lane, entry: Entry) -> Key:
        """The place among all asks of the one that has this place in its lane."""
        if lane.pool in self._fair and entry[0] != -STARVING:
            return (entry[0], self._past.get((lane.pool, lane.owner), 0), entry[2], entry[3])
        return entry


def _take_first(lanes: list[tuple[Key, Lane]]) -> tuple[Key, Lane]:
    """The lane with the lowest key, which is taken out."""
    first = min(lanes, key=_key_of)
    lanes.remove(first)
    return first


_key_of = itemgetter(0)


def _same_slot(before: Slot, after: Slot) -> bool:
    """Whether it is the same place with the same card, in whatever state."""
    return (
        before.host == after.host
        and before.uuid == after.uuid
        and before.share == after.share
        and before.shares == after.shares
        and before.index == after.index
        and before.pool == after.pool
        and before.kind == after.kind
        and before.memory_mib == after.memory_mib
        and before.model == after.model
        and before.capability == after.capability
        and before.mig == after.mig
    )
