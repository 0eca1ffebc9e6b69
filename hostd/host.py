"""What the server may ask of this host, one method per request; and what hostd does by itself.

Owns what follows a start: stops, direct leases, ends, cleaning, reports. Must not know: sockets and frames
(daemon.py). Every method answers with a value of protocol.py or raises Refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import Any, Callable, Coroutine, Dict, List, Optional, Set, Tuple

from cotenant.hostd import logs, processes
from cotenant.hostd.attempts import Attempt, Attempts, check_id
from cotenant.hostd.cards import Cards
from cotenant.hostd.clean import Judge
from cotenant.hostd.facts import read_facts
from cotenant.hostd.locks import CardLocks
from cotenant.hostd.looks import Looks
from cotenant.hostd.protocol import (
    PROTOCOL,
    AttemptReport,
    CardLinks,
    CardProcess,
    CardState,
    CleanCheck,
    Hello,
    HostFacts,
    LogPage,
    Progress,
    Refused,
    SlotRef,
    StartSpec,
    Welcome,
    slots_of,
    to_wire,
)
from cotenant.hostd.starting import Starting
from cotenant.hostd.state import State
from cotenant.hostd.supervisor import Supervisor
from cotenant.hostd.watching import Watching

#: The longest that a command may wait for its word.
GATE_MAX_S = 3600.0
#: How many ports are tried in one request; each costs about 10 us.
PORTS_MAX = 4096
#: How often slots that an ended lease left unclean are looked at again.
SWEEP_S = 1.0
#: A stop that is not over this long after its KILL is told as unkillable.
UNKILLABLE_AFTER_S = 10.0
#: How long after the server has stored an end the record says so. Mostly it is forgotten before, and need not.
NOTE_ACKED_AFTER_S = 2.0

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
        shows: str = "",
    ) -> None:
        self.state = state
        self.cards = cards
        self.attempts = attempts
        self.locks = locks
        self.supervisor = Supervisor(
            attempts,
            self._changed,
            self._ended,
            lambda attempt: self.starting.resume(attempt),  # made below
        )
        self.judge = Judge(attempts, lambda: self.state.holds, residents)
        self._report = report
        self._shows = shows
        self.looks = Looks(cards)
        self.watching = Watching(attempts, self.supervisor, self._later)
        self.starting = Starting(
            state, attempts, self.supervisor, self.looks, self.judge, locks, self._later, self._changed, self.watching
        )
        self._tasks: Set[asyncio.Task[None]] = set()
        self._card_told: Dict[str, Tuple[Any, ...]] = {}
        self._log_sizes: Dict[str, int] = {}
        self._acked: List[Attempt] = []  # whose records do not say so yet
        self._links_told: Tuple[CardLinks, ...] = ()
        self._driver_told: Tuple[Any, ...] = (cards.driver.status, cards.driver.version)

    # ---- life

    def adopt(self) -> None:
        """Take in what is on disk, after hostd's start."""
        for attempt in self.supervisor.adopt():
            self.starting.resume(attempt)
        for lease_id, hold in self.state.holds.items():
            for slot in hold["slots"]:
                self._relock(slot["uuid"], lease_id)
        for attempt in self.attempts.living():
            for uuid in attempt.cards:
                self._relock(uuid, attempt.id)
        for lease_id in self.state.endings:
            self._later(self._sweep_lease(lease_id))
        self.attempts.sweep_forgotten()
        self.starting.make_ready_soon()
        self.supervisor.start_warm()

    def _relock(self, uuid: str, user: str) -> None:
        if uuid != "cpu" and not uuid.startswith("SIM-"):
            # Refused: another hostd has taken it while we were dead; its users see ours as occupied.
            with contextlib.suppress(Refused):
                self.locks.take(uuid, user, ours_lives=True)

    async def close(self) -> None:
        """Stop watching; attempts run on."""
        self.starting.close()
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
            links=self._tell_links(),
        )

    async def set_floor(self, fence: int) -> Dict[str, Any]:
        """Refuse every start below `fence` from now on; says whether a lost memory still has processes here."""
        self.state.set_floor(fence)
        return {"needs_floor": self.state.needs_floor}

    async def start(self, spec: StartSpec) -> AttemptReport:
        """Start one attempt, once: a repeat answers where it stands. Returns when it runs, or could not be executed."""
        return await self.starting.start(spec)

    async def prepare(self, spec: StartSpec) -> AttemptReport:
        """The same up to the last step: the command waits, made ready on its locked cards, for `go` or a stop.

        Without either it never starts: after `gate_s` its shim gives up, whoever else has died by then.
        """
        if spec.gate_s is None or not 0 < spec.gate_s <= GATE_MAX_S:
            raise Refused("bad_request", f"gate_s: above 0 and at most {GATE_MAX_S:.0f} s was expected")
        return await self.starting.start(spec)

    async def go(self, attempt_id: str) -> AttemptReport:
        """Let what `prepare` made ready begin. Repeating is safe."""
        attempt = self._get(attempt_id)
        await self.supervisor.go(attempt)
        return attempt.report()

    async def free_port(self, low: int, high: int, but: List[int]) -> Dict[str, Any]:
        """The lowest TCP port from `low` to `high` that nobody listens on now; None when there is none."""
        if not 0 < low <= high <= 65535 or high - low > PORTS_MAX:
            raise Refused("bad_request", f"low, high: ports in this order, at most {PORTS_MAX} of them, were expected")
        taken = frozenset(but)
        return {"port": next((port for port in range(low, high + 1) if port not in taken and _is_free(port)), None)}

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
        ended = None if self.attempts.find(attempt_id) else self.attempts.find_forgotten(attempt_id)
        if ended is not None:
            return ended.report()  # it ended during the sync, and the server has it: it was not one that never ran
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

    async def suspend(self, attempt_id: str, max_s: float) -> AttemptReport:
        """Stop the attempt's whole tree where it stands, at most `max_s` over all its suspensions."""
        attempt = self._get(attempt_id)
        await self.supervisor.suspend(attempt, max_s)
        return attempt.report()

    async def resume(self, attempt_id: str) -> AttemptReport:
        """Let a suspended attempt go on."""
        attempt = self._get(attempt_id)
        await self.supervisor.resume(attempt)
        return attempt.report()

    async def notice(
        self, attempt_id: str, notice_id: str, what: str, why: str, by_s: Optional[float], number: Optional[int]
    ) -> Progress:
        """Tell a running attempt to save, that it will be stopped, or never mind: see `Watching.notice`."""
        return await self.watching.notice(self._get(attempt_id), check_id(notice_id), what, why, by_s, number)

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
        seen = {card.uuid: card for card in await self.looks.fresh(uuids)} if uuids else {}
        self.state.check_fence(tuple(slots), fence)
        self.starting.check_free(slots, lease_id)
        before = self.state.holds.get(lease_id)
        if before is None:
            self.starting.check_cards(uuids, seen, lease_id)
        try:
            for uuid in uuids:
                if not uuid.startswith("SIM-"):
                    self.locks.take(uuid, lease_id, self.starting.lives_on(uuid, ""))
            self.state.holds[lease_id] = {"fence": fence, "slots": to_wire(slots)}
            self.state.endings.pop(lease_id, None)
            await self.state.raise_fence(tuple(slots), fence)
            self.state.save()
        except Refused:
            if before is None:
                self.state.holds.pop(lease_id, None)
                self.locks.release(lease_id)
            else:
                self.state.holds[lease_id] = before  # a repeat that failed ends nothing
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
        self.locks.release(lease_id)
        if self.state.endings.pop(lease_id, None) is not None:
            with contextlib.suppress(Refused):  # then a hostd that starts anew looks at its slots once more
                self.state.save()

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
        seen = await self.looks.fresh(uuids) if uuids else []
        return self.judge.check(slots, seen, ())

    async def look(self) -> Dict[str, Any]:
        """A fresh look at all cards, with the machine's facts."""
        cards = self.judge.judge(await self.looks.fresh())
        return {"cards": cards, "facts": self.facts()}

    async def seen(self) -> List[CardState]:
        """The cards as last seen."""
        return self.judge.judge(await self.looks.last())

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
        return read_facts(self.state.directory, self.cards.driver, self._shows)

    def _changed(self, attempt: Attempt) -> None:
        if not attempt.living:
            self.locks.release(attempt.id)
        self._report("attempt", attempt.id, attempt.report())

    def _ended(self, attempt: Attempt) -> None:
        if attempt.cards or attempt.survivors or (attempt.spec is not None and attempt.spec.checkpoint is not None):
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
        if attempt.spec is not None and attempt.spec.checkpoint is not None:
            await self.watching.last_look(attempt)
        while True:
            left = self._left_of(attempt)
            seen = await self.looks.fresh(attempt.cards) if attempt.cards else []
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
        cards = self.judge.judge(await self.looks.fresh())
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
        if self.cards.links != self._links_told:
            self._report("links", "", {"links": to_wire(self._tell_links())})
        driver = self.cards.driver
        if (driver.status, driver.version) != self._driver_told:
            self._driver_told = (driver.status, driver.version)
            self._report("facts", "", self.facts())
        return cards

    def _tell_links(self) -> Tuple[CardLinks, ...]:
        self._links_told = self.cards.links
        return self._links_told

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
        """Once in a while, while attempts live: cap logs, see who goes on, tell of stops that do not come to an end."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        for attempt in self.attempts.living():
            if attempt.suspended:
                self.supervisor.look_again(attempt)  # its shim lets it go on in time, and may have no socket to tell us
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


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def claims_of(attempts: Attempts) -> List[Tuple[int, Tuple[str, ...], int]]:
    """What living attempts claim of simulated cards: pid, uuids, MiB on each."""
    found = []
    for attempt in attempts.living():
        if attempt.state in ("running", "stopping") and attempt.pid is not None and attempt.spec is not None:
            asked = attempt.spec.env.get("COTENANT_SIM_MEMORY_MIB", "0")
            found.append((attempt.pid, attempt.cards, int(asked) if asked.isdigit() else 0))
    return found
