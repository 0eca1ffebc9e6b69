"""Keeps the world in memory and reads again only the rows that a commit touched.

A pass of the loop would otherwise read and parse every waiting job: with a thousand of them that costs more than
all else together. The database stays the truth: `distrust` forgets everything and reads it anew.
"""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from typing import TypeAlias, cast, get_args

from cotenant.hostd.protocol import CardState
from cotenant.server.config import Settings
from cotenant.server.deciding.draining import draining
from cotenant.server.deciding.engine import Changes, Engine
from cotenant.server.deciding.world import (
    UNITS_PER_CARD,
    Ask,
    Booking,
    Decided,
    Holding,
    HostView,
    OwnerRules,
    Policy,
    Preemption,
    Slot,
    SlotKey,
    SlotState,
    Spent,
    World,
)
from cotenant.server.live import Live, LiveProgress
from cotenant.server.model.rules import Rules
from cotenant.server.model.states import LinkState
from cotenant.server.store import hosts as host_rows
from cotenant.server.store import preemptions, worlds
from cotenant.server.store import rules as rule_rows
from cotenant.server.store.db import Database
from cotenant.server.waiting import Waiting

_SLOT_STATES = frozenset(get_args(SlotState))
#: How old the sums of past use may be. A cap on GPU-hours is met that much late at most.
_SPENT_EVERY_MS = 60_000
#: What a refresh reads: asks by id; leases as `worlds.holdings` has them; hosts and cards, where they are read.
_Rows: TypeAlias = tuple[
    dict[str, Ask],
    tuple[dict[str, Holding], dict[str, Holding], dict[SlotKey, tuple[str, str, str]]],
    tuple[list[sqlite3.Row], list[sqlite3.Row]] | None,
]


class Keeper:
    """The world as of the newest commit that this process knows of."""

    def __init__(self, db: Database, live: Live, settings: Settings) -> None:
        self._db = db
        self._live = live
        self._settings = settings
        self.version = 0  # rises with every change of the world
        self.inventory = 0  # rises whenever cards and hosts were read anew
        self._all_dirty = True
        self._dirty_jobs: set[str] = set()
        self._dirty_leases: set[str] = set()
        self._hosts_dirty = True
        self._rules_dirty = True
        self.rules = settings.rules  # as of the last refresh
        self._foreseen: set[tuple[str, str]] = set()  # rows read here whose COMMIT is still under way
        self._read_meanwhile: set[str] | None = set()  # ids read as committed since; None = all
        self.waiting = Waiting()
        self.bookings: dict[str, Booking] = {}  # by ask, as of the last pass
        self._undecided = True
        self._engine: Engine | None = None
        self.living: dict[str, Holding] = {}
        self.ended: dict[str, Holding] = {}
        self.uses: dict[SlotKey, tuple[str, str, str]] = {}
        self._taken: dict[str, set[SlotKey]] = {}  # lease -> its keys in `uses`
        self._base: dict[SlotKey, Slot] = {}  # slots without their state
        self._slots: dict[SlotKey, Slot] = {}
        self._cards: dict[str, int] = {}  # pool -> units of its cards
        self._host_rows: list[sqlite3.Row] = []
        self._hosts: tuple[HostView, ...] = ()
        self.hosts: dict[str, HostView] = {}  # by name
        self.preemptions: dict[str, Preemption] = {}
        self._preemptions_dirty = False
        self._progress: dict[str, LiveProgress] = {}  # by lease
        self._work: dict[str, int] = {}  # lease -> when its cards were last seen to do something, or first looked at
        self._blind: set[str] = set()  # leases with a card that does not tell what it does
        self._without_right: dict[str, int] = {}  # owners who may not preempt -> until when
        self._spent: tuple[Spent, ...] = ()
        self._spent_at_ms: int | None = None  # when it was summed up
        self._draining: tuple[int, frozenset[str]] = (-1, frozenset())
        db.on_commit(self._committed)

    def foresee(self, dirty: set[tuple[str, str]]) -> None:
        """These rows are about to be committed: the next `refresh` reads them from the writer's connection."""
        self._foreseen = dirty
        self._read_meanwhile = set()
        self._mark(dirty)

    def _committed(self, changed: set[str], dirty: set[tuple[str, str]]) -> None:
        if self._read_meanwhile is not None:
            # read with the group itself already; a start that joined it is as it was assumed
            dirty = {
                row
                for row in dirty
                # a start ends the preemption that was for it, which an earlier row of the group may have changed too
                if row not in self._foreseen or row[1] in self._read_meanwhile or row[0] == "preemption"
            }
        self._foreseen, self._read_meanwhile = set(), set()
        self._mark(dirty)

    def _mark(self, dirty: set[tuple[str, str]]) -> None:
        for kind, key in dirty:
            if kind == "job":
                self._dirty_jobs.add(key)
            elif kind == "lease":
                self._dirty_leases.add(key)
            elif kind == "preemption":
                self._preemptions_dirty = True
            elif kind == "rule":
                self._rules_dirty = True
            else:
                self._hosts_dirty = True

    @property
    def stale(self) -> bool:
        """Whether something was committed or doubted since the last refresh."""
        return bool(
            self._all_dirty
            or self._dirty_jobs
            or self._dirty_leases
            or self._hosts_dirty
            or self._rules_dirty
            or self._preemptions_dirty
        )

    def used_and_cap(self, pool: str) -> tuple[int, int]:
        """Units in use in a pool and units that may be: `deciding.usage` for one pool, without its other sums."""
        cards = self._cards.get(pool, 0)
        cap = self.rules.pools[pool].cap
        used = 0
        for lease in (*self.living.values(), *self.ended.values()):
            if lease.pool == pool:
                for key in lease.slots:
                    slot = self._base.get(key)
                    used += slot.units if slot is not None else 0 if key[1] == "cpu" else UNITS_PER_CARD
        return used, cards if cap is None else cap * UNITS_PER_CARD

    def draining(self) -> frozenset[str]:
        """Living leases that drain (as of the last refresh): see `deciding.draining`."""
        if _may_drain(self.rules) and self._draining[0] != self.version:
            self._draining = (self.version, draining(self.world(waiting=False)))
        return self._draining[1]

    def holder_of(self, host: str, uuid: str) -> str | None:
        """The living lease on the card's first share, or None (as of the last refresh)."""
        use = self.uses.get((host, uuid, 0))
        return use[1] if use is not None and use[0] == "held" else None

    def distrust(self) -> None:
        """Read everything anew before the next decision."""
        self._all_dirty = True
        self._engine = None

    def observe_cards(self) -> None:
        """Cards or links were seen in another state."""
        self._undecided = True
        self.version += 1
        for key, slot in self._base.items():
            self._slots[key] = self._with_state(key, slot)
        self._see_hosts()

    def doubt(self, *ids: str) -> None:
        """Read these jobs and leases again before the next decision: what was assumed of them did not come true."""
        for key in ids:
            (self._dirty_leases if key.startswith("lse") else self._dirty_jobs).add(key)
            # what shares an array's room was assumed to have less of it
            self._dirty_jobs.update(ask.id for ask in self.waiting.of_array(key.partition(".")[0]))

    def refresh(self, now_ms: int, writer: sqlite3.Connection | None = None) -> None:
        """Bring the world up to the newest commit, or with `writer` to what is about to be committed.

        Never gives the loop away in between: two refreshes that overlap would each see half of what changed.
        """
        if not self.stale:
            return
        everything = self._all_dirty
        preempting, self._preemptions_dirty = self._preemptions_dirty or everything, False
        rules, self._rules_dirty = self._rules_dirty or everything, False
        jobs, leases, hosts = list(self._dirty_jobs), list(self._dirty_leases), self._hosts_dirty or everything
        self._all_dirty = self._hosts_dirty = False
        self.version += 1
        self._dirty_jobs.clear()
        self._dirty_leases.clear()
        if writer is None and self._foreseen:
            if everything:
                self._read_meanwhile = None
            elif self._read_meanwhile is not None:
                self._read_meanwhile.update(jobs, leases)

        def read(connection: sqlite3.Connection) -> _Rows:
            if rules:
                self.rules = rule_rows.read(connection, self._settings.rules, now_ms)
            if preempting:
                self.preemptions = {one.id: one for one in preemptions.world(connection)}
                self._without_right = preemptions.without_right(connection)
            return self._read(connection, everything, jobs, leases, hosts, now_ms)

        try:
            asks, held, host_data = read(writer) if writer is not None else self._db.peek(read)
        except BaseException:
            self._all_dirty = True
            raise
        living, ended, uses = held
        living = {lease_id: self._with_progress(lease) for lease_id, lease in living.items()}
        moved = (
            everything
            or hosts
            or rules
            or preempting
            or any(not self._as_assumed(lease_id, living, uses) for lease_id in leases)
        )
        if everything:
            self.living, self.ended, self.uses = living, ended, uses
            self.waiting.clear()
            self._taken = {}
        else:
            for key in (*jobs, *leases):
                if key not in asks:
                    self.waiting.drop(key)
            for lease_id in leases:
                self.living.pop(lease_id, None)
                if lease_id not in living:
                    self._progress.pop(lease_id, None)
                    self._work.pop(lease_id, None)
                    self._blind.discard(lease_id)
                self.ended.pop(lease_id, None)
                for slot_key in self._taken.pop(lease_id, ()):
                    if self.uses.get(slot_key, ("", "", ""))[1] == lease_id:
                        del self.uses[slot_key]
                        self._touch(slot_key)
            self.living.update(living)
            self.ended.update(ended)
            self.uses.update(uses)
            for slot_key in uses:
                self._touch(slot_key)
        for ask in asks.values():
            self.waiting.put(ask)
        self._undecided = self._undecided or moved
        for slot_key, (_, lease_id, _) in uses.items():
            self._taken.setdefault(lease_id, set()).add(slot_key)
        if host_data is not None:
            self._host_rows, gpus = host_data
            self._rebuild(gpus)

    def assume_preemption(self, preemption: Preemption) -> None:
        """Count a preemption that is being written as under way, so that the next pass does not begin it again."""
        self.version += 1
        self.preemptions[preemption.id] = preemption

    def doubt_preemptions(self) -> None:
        """Read them again before the next decision."""
        self._preemptions_dirty = True

    def assume_idle_notice(self, lease_id: str, now_ms: int) -> None:
        """Count a notice that is being written as given."""
        lease = self.living.get(lease_id)
        if lease is not None:
            self.living[lease_id] = replace(lease, idle_notice_ms=now_ms)

    def see_card_work(self, host: str, uuid: str, worked: bool | None, now_ms: int) -> None:
        """A card was looked at: whether it did something since the last look; None where it does not say."""
        if not _watches_work(self.rules):
            return
        for lease_id in {use[1] for key, use in self.uses.items() if key[:2] == (host, uuid) and use[0] == "held"}:
            lease = self.living.get(lease_id)
            if lease is None:
                continue
            if worked is None:
                self._blind.add(lease_id)
            elif worked or lease_id not in self._work:
                self._work[lease_id] = now_ms
            after = self._with_progress(lease)
            if after != lease:
                self.living[lease_id] = after
                self.version += 1
                # work only puts off what would be done; who was told has to be looked at
                self._undecided = self._undecided or lease.idle_notice_ms is not None or lease.progress_ms is None

    def see_progress(self, lease_id: str, progress: LiveProgress) -> None:
        """A host told signs of work of the attempt on this lease."""
        lease = self.living.get(lease_id)
        if lease is None:
            return
        self._progress[lease_id] = progress
        after = self._with_progress(lease)
        if after != lease:
            self.living[lease_id] = after
            self.version += 1
            # signs of work decide nothing where nobody is preempted and nobody reclaimed
            self._undecided = self._undecided or _watches_work(self.rules)

    def _with_progress(self, lease: Holding) -> Holding:
        seen, worked = self._progress.get(lease.id), self._work.get(lease.id)
        if seen is None and worked is None:
            return lease
        signs = [at for at in (worked, None if seen is None else seen.progress_ms) if at is not None]
        progress = None if lease.id in self._blind or worked is None else max(signs)
        if seen is None:
            return replace(lease, progress_ms=progress)
        return replace(lease, checkpoint_ms=seen.checkpoint_ms, writing_ms=seen.writing_ms, progress_ms=progress)

    def _as_assumed(self, lease_id: str, living: dict[str, Holding], uses: dict[SlotKey, tuple[str, str, str]]) -> bool:
        """Whether a lease was read as it stood here already: a grant that came true, a heartbeat.

        A later end of its ttl is no news to a pass: the wake-up at the earlier one looks again.
        """
        before, after = self.living.get(lease_id), living.get(lease_id)
        if before is None or after is None:
            return False
        # what a grant does not know yet of the job behind it, nor which element of an array it was
        unknown = ["expires_ms", "stop_s", "job_id"]
        if not before.preemptible and all(pool.preempt == "off" for pool in self.rules.pools.values()):
            unknown += ["preemptible", "resumable", "immune_until_ms"]
        known = {name: getattr(after, name) for name in unknown}
        if replace(before, **known) != after:
            return False
        return all(self.uses.get(key, ("", ""))[:2] == ("held", lease_id) == uses[key][:2] for key in after.slots)

    def _read(
        self,
        connection: sqlite3.Connection,
        everything: bool,
        jobs: list[str],
        leases: list[str],
        hosts: bool,
        now_ms: int,
    ) -> _Rows:
        asks = worlds.asks(connection) if everything else worlds.asks(connection, jobs, leases)
        held = worlds.holdings(connection, None if everything else leases)
        host_data = (host_rows.all_hosts(connection), host_rows.all_gpus(connection)) if hosts else None
        if _counts_use(self.rules) and (
            self._spent_at_ms is None or not 0 <= now_ms - self._spent_at_ms < _SPENT_EVERY_MS
        ):
            # what was used changes slowly, and to sum it up is the dearest thing here
            self._spent_at_ms = now_ms
            self._spent = worlds.spent(
                connection, now_ms, {pool.name: pool.half_life_h for pool in self.rules.pools.values()}
            )
        return asks, held, host_data

    def _rebuild(self, gpus: list[sqlite3.Row]) -> None:
        base: dict[SlotKey, Slot] = {}
        for gpu in gpus:
            major, _, minor = (gpu["capability"] or "0.0").partition(".")
            for share in range(gpu["shares"]):
                slot = Slot(
                    host=gpu["host"],
                    uuid=gpu["uuid"],
                    share=share,
                    shares=gpu["shares"],
                    index=gpu["idx"],
                    pool=gpu["pool"],
                    kind="gpu",
                    memory_mib=gpu["memory_mib"] // gpu["shares"],
                    model=gpu["name"],
                    capability=int(major or 0) * 10 + int(minor or 0),
                    mig=gpu["uuid"].startswith("MIG-"),
                )
                base[slot.key] = slot
        for host in self._host_rows:
            pool = (
                self._settings.hosts[host["name"]].pool
                if host["name"] in self._settings.hosts
                else self._settings.default_pool
            )
            for place in range(host["cpu_places"]):
                slot = Slot(host["name"], "cpu", place, host["cpu_places"], None, pool, "cpu", 0)
                base[slot.key] = slot
        self._base = base
        self.inventory += 1
        self._cards = {}
        for slot in base.values():
            self._cards[slot.pool] = self._cards.get(slot.pool, 0) + slot.units
        self._slots = {key: self._with_state(key, slot) for key, slot in base.items()}
        self._see_hosts()

    def _touch(self, key: SlotKey) -> None:
        if key in self._base:
            self._slots[key] = self._with_state(key, self._base[key])

    def _with_state(self, key: SlotKey, slot: Slot) -> Slot:
        use = self.uses.get(key)
        if use is not None:
            return replace(slot, state=cast(SlotState, use[0]), lease_id=use[1], reason=use[2])
        if slot.kind == "cpu":
            return slot
        card = self._live.cards.get(slot.uuid)
        if card is None:
            return replace(slot, state="lost", reason="not seen since the server started")
        return replace(slot, state=_slot_state(card.state), reason=card.state.reason or "")

    def _see_hosts(self) -> None:
        views = []
        for row in self._host_rows:
            live = self._live.hosts.get(row["name"])
            facts = live.facts if live else None
            settings = self._settings.hosts.get(row["name"])
            views.append(
                HostView(
                    name=row["name"],
                    link=(live.link if live else LinkState.CONNECTING).value,
                    mode="quarantined" if live is not None and live.needs_floor else row["mode"],
                    reason=row["mode_reason"] or (live.reason if live else ""),
                    cpus=_at_most(settings.cpus if settings else None, facts.cpus if facts else 0),
                    memory_mib=_at_most(
                        settings.memory_mib if settings else None, facts.memory_mib * 9 // 10 if facts else 0
                    ),
                    disk_mib=facts.disk_free_mib * 9 // 10 if facts else 0,
                    driver=(facts.driver if facts else None) or "",
                    cuda=worlds.cuda_number((facts.cuda if facts else None) or ""),
                    labels=tuple(sorted(settings.labels.items())) if settings else (),
                    max_jobs=settings.max_jobs if settings else 0,
                    links=live.links if live else (),
                )
            )
        self._hosts = tuple(views)
        self.hosts = {view.name: view for view in views}

    def assume(self, ask_id: str | None, holding: Holding) -> None:
        """Count a grant that is being written as made, so that the next decision does not give it again.

        Of an array that waits one element less is left.
        """
        self.version += 1
        self._undecided = True
        if ask_id is not None:
            ask = self.waiting.get(ask_id)
            if ask is not None and ask.count > 1:
                self.waiting.put(replace(ask, count=ask.count - 1))
            else:
                self.waiting.drop(ask_id)
            for other in self.waiting.of_array(holding.array):
                self.waiting.put(replace(other, array_room=max(0, (other.array_room or 0) - 1)))
        self.living[holding.id] = holding
        self._taken[holding.id] = set(holding.slots)
        for key in holding.slots:
            self.uses[key] = ("held", holding.id, "")
            self._touch(key)

    @property
    def undecided(self) -> bool:
        """Whether anything changed since `heads` that a pass could answer differently."""
        return self._undecided or self.waiting.undecided

    def world(self, *, waiting: bool = True) -> World:
        """Everything there is; without `waiting` all but the asks, for what does not look at them."""
        return self._world(tuple(self.waiting.everyone()) if waiting else ())

    def settled(self) -> None:
        """What the pass itself set in motion is no news to it: it counted its own grants."""
        self._undecided = self.waiting.undecided = False

    def turn(self, now_ms: int, policy: Policy) -> Decided:
        """What should change now, without why the others wait: see `heads` for that."""
        self.settled()
        if self._engine is None:
            self.waiting.take_touched()
            self._engine = Engine(self.world(), now_ms, policy, record=True)
        else:
            self._engine.sync(self._world(()), now_ms)
            for ask_id in self.waiting.take_touched():
                ask = self.waiting.get(ask_id)
                if ask is None:
                    self._engine.drop(ask_id)
                else:
                    self._engine.put(ask)
        return self._engine.turn(now_ms)

    def take_changes(self) -> Changes:
        """What became of the world from the turn before the last to the last one. To be asked for after every turn."""
        assert self._engine is not None
        return self._engine.take_changes()

    def doubt_decided(self) -> None:
        """Decide again, though nothing is known to have changed."""
        self._undecided = True

    def heads(self) -> World:
        """Everything that `decide` has to look at: of equal asks no more than could start, and one."""
        free = sum(1 for slot in self._slots.values() if slot.state == "free")
        heads = self.waiting.heads(free + 1)
        if self.preemptions:  # the slots that are kept for somebody are his, however many equal asks came before
            known = {ask.id for ask in heads}
            askers = [self.waiting.get(p.ask_id) for p in self.preemptions.values() if p.ask_id not in known]
            heads += tuple(ask for ask in askers if ask is not None)
        return self._world(heads)

    def _world(self, asks: tuple[Ask, ...]) -> World:
        return World(
            hosts=self._hosts,
            slots=tuple(self._slots.values()),
            pools=tuple(self.rules.pools.values()),
            owners=self._owners(),
            agents=tuple(self.rules.agents.values()),
            reservations=self.rules.reservations,
            holdings=tuple(self.living.values()),
            cleaning=tuple(self.ended.values()),
            asks=asks,
            spent=self._spent,
            preemptions=tuple(self.preemptions.values()),
        )

    def _owners(self) -> tuple[OwnerRules, ...]:
        owners = dict(self.rules.owners)
        for owner, until_ms in self._without_right.items():
            owners[owner] = replace(owners.get(owner) or OwnerRules(owner), no_preempt_until_ms=until_ms)
        return tuple(owners.values())

    def slot(self, key: SlotKey) -> Slot:
        return self._slots[key]

    def slots(self) -> list[Slot]:
        return list(self._slots.values())


def _at_most(limit: int | None, there: int) -> int:
    return there if limit is None else min(limit, there)


def _watches_work(rules: Rules) -> bool:
    """Whether signs of work decide anything: somebody may be preempted, or an idle lease taken back."""
    return any(pool.preempt != "off" or pool.idle_s for pool in rules.pools.values())


def _may_drain(rules: Rules) -> bool:
    """Whether some rule could make a lease drain; without any nobody has to look."""
    pools = rules.pools.values()
    caps = [cap for pool in pools for cap in (pool.cap, pool.owner_cap, pool.agent_cap)]
    caps += [owner.cap for owner in rules.owners.values()] + [agent.cap for agent in rules.agents.values()]
    return any(pool.draining or pool.reserve for pool in pools) or any(cap is not None for cap in caps)


def _counts_use(rules: Rules) -> bool:
    """Whether somebody has a cap on GPU-hours, or a pool goes by what was used."""
    if any(pool.order == "fairshare" for pool in rules.pools.values()):
        return True
    limited = [owner.gpu_hours for owner in rules.owners.values()] + [a.gpu_hours for a in rules.agents.values()]
    for pool in rules.pools.values():
        limited += [pool.gpu_hours, pool.owner_gpu_hours, pool.agent_gpu_hours]
    return any(hours is not None for hours in limited)


def _slot_state(card: CardState) -> SlotState:
    if card.state == "ok":
        return "free"
    return cast(SlotState, card.state) if card.state in _SLOT_STATES else "unverified"
