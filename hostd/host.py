"""What the server may ask of this host, one method per request; and what hostd does by itself.

Owns the order of things: check, remember (synced), obey; look, judge, report. Must not know: sockets and frames
(daemon.py). Every method answers with a value of protocol.py or raises Refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from typing import Any, Callable, Collection, Coroutine, Dict, Iterable, List, Optional, Set, Tuple

from cotenant.hostd import logs, processes
from cotenant.hostd.attempts import Attempt, Attempts, check_id, plain
from cotenant.hostd.cards import Cards, Sighting
from cotenant.hostd.clean import Judge
from cotenant.hostd.environment import launch_environment
from cotenant.hostd.facts import read_facts
from cotenant.hostd.locks import CardLocks
from cotenant.hostd.protocol import (
    PROTOCOL,
    AttemptReport,
    CardProcess,
    CardState,
    CleanCheck,
    Hello,
    HostFacts,
    LogPage,
    Refused,
    SlotRef,
    StartSpec,
    Welcome,
    slots_of,
    to_wire,
)
from cotenant.hostd.state import State, overlap
from cotenant.hostd.supervisor import RESUME_START_WITHIN_S, Gate, Supervisor

#: How often slots that an ended lease left unclean are looked at again.
SWEEP_S = 1.0
#: A stop that is not over this long after its KILL is told as unkillable.
UNKILLABLE_AFTER_S = 10.0
#: Secrets reach the shim in one message of a unix socket, which Linux cuts off at 212,992 bytes (wmem_default).
SECRETS_MAX_BYTES = 160 * 1024
#: How long after the server has stored an end the record says so. Mostly it is forgotten before, and need not.
NOTE_ACKED_AFTER_S = 2.0
#: How long after a start the files of the next are made: when its command has surely begun.
MAKE_READY_AFTER_S = 0.01

Report = Callable[[str, str, Any], object]


class Host:
    """This machine: its memory, cards and attempts. `report(name, key, body)` sends a report to the server."""

    def __init__(
        self,
        state: State,
        cards: Cards,
        attempts: Attempts,
        locks: CardLocks,
        residents: Tuple[str, ...],
        report: Report,
    ) -> None:
        self.state = state
        self.cards = cards
        self.attempts = attempts
        self.locks = locks
        self.supervisor = Supervisor(attempts, self._changed, self._ended, self._resume)
        self.judge = Judge(attempts, lambda: self.state.holds, residents)
        self._report = report
        self._home = {"COTENANT_STATE_DIR": state.directory, "COTENANT_LOCK_DIR": state.lock_directory}
        self._starts: Dict[str, Tuple[str, asyncio.Future[AttemptReport]]] = {}
        self._tasks: Set[asyncio.Task[None]] = set()
        self._unmade: Set[str] = set()  # accepted by a hostd that died; not handed to a shim yet
        self._closed = False
        self._making_ready = False
        self._card_told: Dict[str, Tuple[Any, ...]] = {}
        self._log_sizes: Dict[str, int] = {}
        self._acked: List[Attempt] = []  # whose records do not say so yet
        self._driver_told: Tuple[Any, ...] = (cards.driver.status, cards.driver.version)

    # ---- life

    def adopt(self) -> None:
        """Take in what is on disk, after hostd's start."""
        for attempt in self.supervisor.adopt():
            self._resume(attempt)
        for lease_id, hold in self.state.holds.items():
            for slot in hold["slots"]:
                self._relock(slot["uuid"], lease_id)
        for attempt in self.attempts.living():
            for uuid in attempt.cards:
                self._relock(uuid, attempt.id)
        for lease_id in self.state.endings:
            self._later(self._sweep_lease(lease_id))
        self.attempts.sweep_forgotten()
        self._make_ready_soon()
        self.supervisor.start_warm()

    def _relock(self, uuid: str, user: str) -> None:
        if uuid != "cpu" and not uuid.startswith("SIM-"):
            # Refused: another hostd has taken it while we were dead; its users see ours as occupied.
            with contextlib.suppress(Refused):
                self.locks.take(uuid, user, ours_lives=True)

    def _resume(self, attempt: Attempt) -> None:
        """A start that hostd's death interrupted is made now, under the same checks.

        Where its secrets died with hostd it waits for the server to repeat it; unrepeated it never will be.
        """
        self._unmade.add(attempt.id)

        async def make() -> None:
            if attempt.wants_secrets:
                await asyncio.sleep(RESUME_START_WITHIN_S)
                if attempt.id not in self._unmade:
                    return
                self._give_up(attempt, Refused("storage", "its secrets died with hostd, and it was not repeated"))
            else:
                with contextlib.suppress(Refused):
                    await self._once(attempt.id, attempt.plain, self._make(attempt))
            self._changed(attempt)

        self._later(make())

    async def close(self) -> None:
        """Stop watching; attempts run on."""
        self._closed = True
        self._note_acked()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.supervisor.close()
        self.attempts.close()
        self.cards.close()

    # ---- requests

    async def hello(self, hello: Hello) -> Welcome:
        """Greet the control plane, and tell it everything this host has."""
        self.state.greet(hello)
        cards = await self.seen()
        return Welcome(
            protocol=min(PROTOCOL, hello.protocol),
            state_id=self.state.state_id,
            boot_id=self.state.boot_id,
            hostd_pid=os.getpid(),
            max_fence=self.state.max_fence,
            needs_floor=self.state.needs_floor,
            facts=self.facts(),
            cards=tuple(cards),
            # who takes over may have restored older records, in which what it let us forget has yet to run
            attempts=tuple(
                attempt.report()
                for attempt in [*(self.attempts.newest_forgotten() if hello.take_over else []), *self.attempts]
            ),
            holds=tuple(self.state.holds),
        )

    async def set_floor(self, fence: int) -> Dict[str, Any]:
        """Refuse every start below `fence` from now on; says whether a lost memory still has processes here."""
        self.state.set_floor(fence)
        return {"needs_floor": self.state.needs_floor}

    async def start(self, spec: StartSpec) -> AttemptReport:
        """Start one attempt, once: a repeat answers where it stands. Returns when it runs, or could not be executed."""
        attempt_id = check_id(spec.attempt_id)
        if not spec.argv or not all(isinstance(word, str) and "\0" not in word for word in spec.argv):
            raise Refused("bad_request", "argv: at least one word, and no NUL in any, was expected")
        if spec.secret_env and len(json.dumps(spec.secret_env)) > SECRETS_MAX_BYTES:
            raise Refused("bad_request", f"the secrets together are longer than {SECRETS_MAX_BYTES} bytes as JSON")
        text = plain(spec)
        going = self._starts.get(attempt_id)
        if going is not None:
            _same(going[0], text, attempt_id)
            return await asyncio.shield(going[1])
        known = self.attempts.find(attempt_id) or self.attempts.find_forgotten(attempt_id)
        if known is not None and known.spec is not None:
            _same(known.plain, text, attempt_id)
            if known.state == "never":
                raise Refused("tombstoned", f"attempt {attempt_id} was stopped before it started; it never will")
            if attempt_id in self._unmade:
                known.secrets = dict(spec.secret_env)
                return await self._once(attempt_id, text, self._make(known))
            return known.report()
        if attempt_id in self.state.tombstones or known is not None:
            raise Refused("tombstoned", f"a stop of attempt {attempt_id} came before its start")
        return await self._once(attempt_id, text, self._start(spec, text))

    async def _once(self, attempt_id: str, text: str, work: Coroutine[Any, Any, AttemptReport]) -> AttemptReport:
        """Do `work` so that a repeat which comes meanwhile waits for the same answer."""
        answer: asyncio.Future[AttemptReport] = asyncio.get_running_loop().create_future()
        self._starts[attempt_id] = (text, answer)
        try:
            result = await work
        except BaseException as error:
            refused = error if isinstance(error, Refused) else Refused("storage", f"hostd failed: {error!r}")
            answer.set_exception(refused)
            answer.exception()  # nobody need ask
            raise
        else:
            answer.set_result(result)
            return result
        finally:
            del self._starts[attempt_id]

    async def _start(self, spec: StartSpec, text: str) -> AttemptReport:
        self.state.check_memory()
        self.state.check_fence(spec.slots, spec.fence)
        if spec.workdir and not _enterable(spec.workdir):
            raise Refused("bad_workdir", f"{spec.workdir} is not a directory that this host's user can enter")
        seen = await self._admit(spec)
        if spec.attempt_id in self.state.tombstones:
            raise Refused("tombstoned", f"a stop of attempt {spec.attempt_id} came before its start")
        env = launch_environment(spec, seen, self._home)
        locks = self._lock_cards(spec)
        # The sync of the fence is begun first; the writing of the record and the shim's preparations run beside it.
        gate = Gate()
        self.state.raise_fence_then(spec.slots, spec.fence, gate.open, gate.fail)
        attempt: Optional[Attempt] = None
        try:
            attempt = self.attempts.create(spec, text, env)
            await self.supervisor.launch(attempt, locks, gate)
        except Refused:
            if attempt is not None and attempt.state == "starting":
                self.attempts.discard(attempt)
            self.locks.release(spec.attempt_id)
            raise
        self._make_ready_soon()
        return attempt.report()

    def _make_ready_soon(self) -> None:
        if not self._making_ready and self.attempts.needs_ready:
            self._making_ready = True
            asyncio.get_running_loop().call_later(MAKE_READY_AFTER_S, self._make_ready)

    def _make_ready(self) -> None:
        self._making_ready = False
        if not self._closed:
            self.attempts.make_ready()
            self._make_ready_soon()  # one at a time, so that no request waits for all

    async def _make(self, attempt: Attempt) -> AttemptReport:
        """Start an attempt that a hostd before us accepted. Refused now, it never will start."""
        assert attempt.spec is not None
        self._unmade.discard(attempt.id)
        try:
            self.state.check_fence(attempt.spec.slots, attempt.spec.fence)
            await self._admit(attempt.spec)
            locks = self._lock_cards(attempt.spec)
            gate = Gate()
            self.state.raise_fence_then(attempt.spec.slots, attempt.spec.fence, gate.open, gate.fail)
            await self.supervisor.launch(attempt, locks, gate)
        except Refused as error:
            self._give_up(attempt, error)
            raise
        return attempt.report()

    async def _admit(self, spec: StartSpec) -> Dict[str, Sighting]:
        """Look at the cards of `spec` in this moment. Returns them by uuid; raises Refused when one may not be used."""
        uuids = [slot.uuid for slot in spec.slots if slot.uuid != "cpu"]
        seen = {card.uuid: card for card in await self._look(uuids)} if uuids else {}
        self.state.check_fence(spec.slots, spec.fence)  # a higher one may have come during the look
        self._check_free(spec.slots, spec.lease_id, spec.attempt_id)
        self._check_cards(uuids, seen)
        return seen

    def _lock_cards(self, spec: StartSpec) -> List[int]:
        """Lock the cards of `spec` machine-wide; the descriptors for its shim. Raises Refused("locked")."""
        found = []
        try:
            for uuid in dict.fromkeys(slot.uuid for slot in spec.slots):
                if uuid != "cpu" and not uuid.startswith("SIM-"):
                    fd = self.locks.take(uuid, spec.attempt_id, self._lives_on(uuid, spec.attempt_id))
                    if fd is not None:
                        found.append(fd)
        except Refused:
            self.locks.release(spec.attempt_id)
            raise
        return found

    def _give_up(self, attempt: Attempt, error: Refused) -> None:
        if attempt.living:
            attempt.state, attempt.clean = "never", True
            attempt.message = f"{error.code}: {error.message}"
            attempt.append({"tombstone": True})
        self.locks.release(attempt.id)

    def _lives_on(self, uuid: str, but: str) -> bool:
        if any(uuid == slot["uuid"] for hold in self.state.holds.values() for slot in hold["slots"]):
            return True
        return any(uuid in attempt.cards and attempt.id != but for attempt in self.attempts.living())

    def _check_free(self, slots: Iterable[SlotRef], lease_id: str, attempt_id: str = "") -> None:
        """Raises Refused("occupied") when an attempt or hold of another lease lives on one of `slots`."""
        for slot in slots:
            for attempt in self.attempts.living():
                if attempt.lease_id == lease_id or attempt.id == attempt_id:
                    continue
                if any(overlap(slot, other) for other in attempt.slots):
                    raise Refused(
                        "occupied",
                        f"attempt {attempt.id} of lease {attempt.lease_id} still lives on {slot.uuid}",
                        {"uuid": slot.uuid, "attempt_id": attempt.id},
                    )
            for other_lease, hold in self.state.holds.items():
                if other_lease != lease_id and any(overlap(slot, held) for held in slots_of(hold["slots"])):
                    raise Refused(
                        "occupied",
                        f"direct lease {other_lease} holds {slot.uuid}",
                        {"uuid": slot.uuid, "lease_id": other_lease},
                    )

    def _check_cards(self, uuids: List[str], seen: Dict[str, Sighting]) -> None:
        """Raises Refused when a card is missing, ill, or has something on it that nobody explains."""
        for card in self.judge.judge(seen[uuid] for uuid in uuids if uuid in seen):
            if card.state in ("sick", "lost"):
                raise Refused("sick", f"card {card.uuid}: {card.reason or card.state}", {"uuid": card.uuid})
            if card.state != "ok":
                raise Refused(
                    card.state, f"card {card.uuid}: {card.reason}", {"uuid": card.uuid, "processes": card.processes}
                )
        for uuid in uuids:
            if uuid not in seen:
                raise Refused("no_such_card", f"no card {uuid} is here", {"uuid": uuid})

    async def stop(self, attempt_id: str, reason: str, grace_s: float) -> AttemptReport:
        """Make sure that the attempt ends, or never starts. Returns at once; reports tell the end."""
        check_id(attempt_id)
        forgotten = None if self.attempts.find(attempt_id) else self.attempts.find_forgotten(attempt_id)
        if forgotten is not None:
            return forgotten.report()
        known = self.attempts.find(attempt_id)
        if known is not None and not known.living:
            return known.report()
        # On disk before it is answered: from then on no start of this id is obeyed, also after a power cut.
        await self.state.bury(attempt_id)
        attempt = self.attempts.bury(attempt_id)
        self.supervisor.stop(attempt, reason, grace_s)
        return attempt.report()

    async def signal(self, attempt_id: str, number: int) -> AttemptReport:
        """Signal the command's process group."""
        attempt = self._get(attempt_id)
        if not 1 <= number <= 64:
            raise Refused("bad_request", f"signal: 1 to 64 was expected, not {number}")
        self.supervisor.signal(attempt, number)
        return attempt.report()

    async def probe(self, attempt_id: str) -> AttemptReport:
        """Where the attempt stands; `unknown` when this host knows nothing of it."""
        check_id(attempt_id)
        attempt = self.attempts.find(attempt_id) or self.attempts.find_forgotten(attempt_id)
        if attempt is not None:
            return attempt.report()
        if attempt_id in self.state.tombstones:
            return AttemptReport(attempt_id, "never", refusal="tombstoned", clean=True)
        return AttemptReport(attempt_id, "unknown")

    def _get(self, attempt_id: str) -> Attempt:
        attempt = self.attempts.find(check_id(attempt_id)) or self.attempts.find_forgotten(attempt_id)
        if attempt is None:
            raise Refused("unknown_attempt", f"no attempt {attempt_id} was ever here")
        return attempt

    async def hold(self, lease_id: str, fence: int, slots: List[SlotRef]) -> CleanCheck:
        """A direct lease begins: lock its cards. Repeating is safe."""
        check_id(lease_id)
        self.state.check_memory()
        self.state.check_fence(tuple(slots), fence)
        uuids = [slot.uuid for slot in slots if slot.uuid != "cpu"]
        seen = {card.uuid: card for card in await self._look(uuids)} if uuids else {}
        self.state.check_fence(tuple(slots), fence)
        self._check_free(slots, lease_id)
        if lease_id not in self.state.holds:
            self._check_cards(uuids, seen)
        try:
            for uuid in uuids:
                if not uuid.startswith("SIM-"):
                    self.locks.take(uuid, lease_id, self._lives_on(uuid, ""))
            self.state.holds[lease_id] = {"fence": fence, "slots": to_wire(slots)}
            self.state.endings.pop(lease_id, None)
            await self.state.raise_fence(tuple(slots), fence)
            self.state.save()
        except Refused:
            self.state.holds.pop(lease_id, None)
            self.locks.release(lease_id)
            raise
        return self.judge.check(slots, seen.values(), ())

    async def unhold(self, lease_id: str, slots: Optional[List[SlotRef]] = None) -> CleanCheck:
        """A direct lease ended. When its slots are not clean yet, a `clean` report follows once they are.

        Of a lease that was never held here only `slots` can be looked at; without them it is refused.
        """
        hold = self.state.holds.pop(check_id(lease_id), None)
        if hold is None:
            hold = self.state.endings.get(lease_id)
            if hold is None:
                if slots is None:
                    raise Refused(
                        "bad_request", f"no lease {lease_id} is held here; name its slots to have them looked at"
                    )
                return await self.check(slots)
        else:
            self.state.endings[lease_id] = hold
            self.state.save()
        check = await self.check(slots_of(hold["slots"]))
        if check.clean:
            self._lease_clean(lease_id)
        else:
            self._later(self._sweep_lease(lease_id))
        return check

    def _lease_clean(self, lease_id: str) -> None:
        if self.state.endings.pop(lease_id, None) is not None:
            self.state.save()
        self.locks.release(lease_id)

    async def _sweep_lease(self, lease_id: str) -> None:
        while lease_id in self.state.endings:
            await asyncio.sleep(SWEEP_S)
            hold = self.state.endings.get(lease_id)
            if hold is None:
                return
            check = await self.check(slots_of(hold["slots"]))
            if check.clean:
                self._lease_clean(lease_id)
                self._report("clean", lease_id, {"lease_id": lease_id, "check": to_wire(check)})

    async def check(self, slots: List[SlotRef]) -> CleanCheck:
        """Are these slots clean now?"""
        uuids = [slot.uuid for slot in slots if slot.uuid != "cpu"]
        seen = await self._look(uuids) if uuids else []
        return self.judge.check(slots, seen, ())

    async def look(self) -> Dict[str, Any]:
        """A fresh look at all cards, with the machine's facts."""
        cards = self.judge.judge(await self._look())
        return {"cards": cards, "facts": self.facts()}

    async def seen(self) -> List[CardState]:
        """The cards as last seen."""
        return self.judge.judge(await self._without_ghosts(self.cards.last()))

    async def _look(self, uuids: Optional[Collection[str]] = None) -> List[Sighting]:
        """A fresh look at these cards, or all, in which nobody is listed who ended while it was made."""
        return await self._without_ghosts(await self.cards.look(uuids))

    async def _without_ghosts(self, seen: List[Sighting]) -> List[Sighting]:
        """`seen`, with a second look at cards that list a process which is not there.

        One that ended after the driver was read is no stranger on the card. One that is listed again lives where we
        cannot see it (another PID namespace), and is one.
        """
        gone = [card.uuid for card in seen if any(_is_gone(one.pid) for one in card.processes)]
        if not gone:
            return seen
        fresh = {card.uuid: card for card in await self.cards.look(gone)}
        return [fresh.get(card.uuid, card) for card in seen]

    async def read_log(
        self, attempt_id: str, stream: str, offset: Optional[int], tail_lines: Optional[int], max_bytes: int
    ) -> LogPage:
        """A piece of an attempt's log."""
        check_id(attempt_id)
        if stream not in ("out", "err"):
            raise Refused("bad_request", f"stream: out or err was expected, not {stream!r}")
        attempt = self._get(attempt_id)
        try:
            return logs.read_page(attempt.log_path(stream), offset, tail_lines, max_bytes, not attempt.living)
        except OSError as error:
            raise Refused("storage", f"the log of attempt {attempt_id} cannot be read: {error}") from error

    async def forget(self, attempt_ids: List[str]) -> Dict[str, Any]:
        """The server has these records; logs stay readable for a while."""
        self.attempts.forget([check_id(attempt_id) for attempt_id in attempt_ids])
        self.attempts.sweep_forgotten()
        return {}

    def acked(self, name: str, key: str) -> None:
        """The server has stored a report; an end is not told again after a restart."""
        if name == "attempt":
            attempt = self.attempts.find(key)
            if attempt is not None and not attempt.living and not attempt.acked and attempt.clean:
                attempt.acked = True
                self._acked.append(attempt)
                if len(self._acked) == 1:
                    asyncio.get_running_loop().call_later(NOTE_ACKED_AFTER_S, self._note_acked)

    def _note_acked(self) -> None:
        acked, self._acked = self._acked, []
        with contextlib.suppress(Refused):  # then the server is told once more after a restart
            for attempt in acked:
                if self.attempts.find(attempt.id) is attempt:
                    attempt.append({"acked": True})

    # ---- by itself

    def facts(self) -> HostFacts:
        return read_facts(self.state.directory, self.cards.driver)

    def _changed(self, attempt: Attempt) -> None:
        if not attempt.living:
            self.locks.release(attempt.id)
        self._report("attempt", attempt.id, attempt.report())

    def _ended(self, attempt: Attempt) -> None:
        if attempt.cards or attempt.survivors:
            self._later(self._clean_up(attempt))
        else:
            attempt.clean = True
            self._changed_soon(attempt)

    def _changed_soon(self, attempt: Attempt) -> None:
        # After the answer to a start that is just being given: its task was woken first.
        asyncio.get_running_loop().call_soon(self._changed, attempt)

    async def _clean_up(self, attempt: Attempt) -> None:
        """Check that the attempt's slots are free, tell its end with the answer, and look on until they are."""
        told = False
        while True:
            left = self._left_of(attempt)
            seen = await self._look(attempt.cards) if attempt.cards else []
            check = self.judge.check(attempt.slots, seen, left)
            attempt.clean, attempt.unclean = check.clean, check.unclean
            if not told:
                told = True
                self._report("attempt", attempt.id, attempt.report())
            elif check.clean:
                self._report("clean", attempt.lease_id, {"lease_id": attempt.lease_id, "check": to_wire(check)})
                self._report("attempt", attempt.id, attempt.report())
            if check.clean:
                self.locks.release(attempt.id)
                return
            await asyncio.sleep(SWEEP_S)

    def _left_of(self, attempt: Attempt) -> List[CardProcess]:
        """Processes of an ended attempt that survived even KILL; none by the shim's count means none."""
        if not attempt.survivors:
            return []
        left = self.supervisor.orphans(attempt)
        attempt.survivors = len(left)
        return [
            CardProcess(
                pid=seen.pid,
                user=processes.owner(seen.pid),
                program=seen.name,
                memory_mib=None,
                attempt_id=attempt.id,
                lease_id=attempt.lease_id,
                state=seen.state,
            )
            for seen in left
        ]

    async def sample(self) -> List[CardState]:
        """One look at all cards: reports what changed, notes the most memory per attempt, returns the cards."""
        cards = self.judge.judge(await self._look())
        peaks: Dict[str, Dict[str, int]] = {}
        for card in cards:
            told = (card.state, card.reason if card.state != "ok" else None, tuple(p.pid for p in card.processes))
            if self._card_told.get(card.uuid, ("ok", None, ())) != told:
                self._report("card", card.uuid, card)
            self._card_told[card.uuid] = told
            for process in card.processes:
                if process.attempt_id and process.memory_mib is not None:
                    mine = peaks.setdefault(process.attempt_id, {})
                    mine[card.uuid] = mine.get(card.uuid, 0) + process.memory_mib
        for attempt_id, seen in peaks.items():
            attempt = self.attempts.find(attempt_id)
            if attempt is not None and attempt.living:
                attempt.keep_peaks(seen)
        driver = self.cards.driver
        if (driver.status, driver.version) != self._driver_told:
            self._driver_told = (driver.status, driver.version)
            self._report("facts", "", self.facts())
        return cards

    def grown_logs(self) -> List[str]:
        """Jobs whose living attempt has written since the last call, so that readers need not ask for nothing."""
        grown, sizes = [], {}
        for attempt in self.attempts.living():
            sizes[attempt.id] = sum(_size(attempt.log_path(stream)) for stream in ("out", "err"))
            if attempt.spec is not None and sizes[attempt.id] != self._log_sizes.get(attempt.id, 0):
                grown.append(attempt.spec.job_id)
        self._log_sizes = sizes
        return grown

    def tend(self) -> None:
        """Once in a while, while attempts live: cap logs, and tell of stops that do not come to an end."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        for attempt in self.attempts.living():
            if attempt.spec is not None:
                for stream in ("out", "err"):
                    logs.cap(attempt.log_path(stream), attempt.spec.log_max_mib * 1024 * 1024)
            if attempt.stop_by is not None and now > attempt.stop_by + UNKILLABLE_AFTER_S:
                attempt.stop_by = None
                attempt.survivors = 1
                attempt.clean, attempt.unclean = False, tuple(self._left_of(attempt))
                attempt.message = "it does not end after KILL; a process stuck in the kernel waits for a reboot"
                self._report("attempt", attempt.id, attempt.report())

    @property
    def busy(self) -> bool:
        """Whether anything is leased here."""
        return bool(self.state.holds or self.state.endings or self.attempts.living())

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_gone(pid: int) -> bool:
    """Not there, or only waiting to be reaped: the driver has let go of it by now, and it may vanish at any moment."""
    stat = processes.stat(pid)
    return stat is None or stat.state in "ZX"


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _enterable(path: str) -> bool:
    return os.path.isdir(path) and os.access(path, os.X_OK)


def _same(known: str, fresh: str, attempt_id: str) -> None:
    if known != fresh:
        raise Refused("spec_conflict", f"attempt {attempt_id} came before with another command or other needs")


def claims_of(attempts: Attempts) -> List[Tuple[int, Tuple[str, ...], int]]:
    """What living attempts claim of simulated cards: pid, uuids, MiB on each."""
    found = []
    for attempt in attempts.living():
        if attempt.state in ("running", "stopping") and attempt.pid is not None and attempt.spec is not None:
            asked = attempt.spec.env.get("COTENANT_SIM_MEMORY_MIB", "0")
            found.append((attempt.pid, attempt.cards, int(asked) if asked.isdigit() else 0))
    return found
