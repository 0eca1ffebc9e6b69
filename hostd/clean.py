"""Whose processes are on a card, and is a slot free of what a lease left behind?

Owns the judgement from sightings to CardState and CleanCheck. Must not know: how cards are read, connections. A process
is explained when it is a resident, or belongs to a living attempt or a held direct lease of this host; anything else
makes the card `occupied`, and so does memory that no process explains. Of a foreign process only user, pid, program and
memory are told. Nothing is ever signalled from here.
"""

from __future__ import annotations

from typing import Callable, Dict, FrozenSet, Iterable, List, Optional, Sequence, Tuple

from cotenant.hostd import processes
from cotenant.hostd.attempts import Attempt, Attempts, is_id
from cotenant.hostd.cards import OnCard, Sighting, ago_ms
from cotenant.hostd.protocol import CardProcess, CardState, CleanCheck, SlotRef

#: Memory beyond the baseline and the listed processes that is still taken for the driver's own. A guess: an idle H100
#: shows some MiB, a context's overhead is counted in its process.
UNEXPLAINED_MIB = 1024
#: An idle card's own use is learned up to here; more than this with nobody on it is a leak.
BASELINE_MAX_MIB = 2048


class Judge:
    """Turns what the driver shows into what the server is told."""

    def __init__(
        self,
        attempts: Attempts,
        held_leases: Callable[[], Iterable[str]],
        residents: Sequence[str],
    ) -> None:
        self._attempts = attempts
        self._held_leases = held_leases
        self._residents: FrozenSet[str] = frozenset(residents)
        self._baseline: Dict[str, int] = {}
        self._lease_of: Dict[Tuple[int, int], Tuple[Optional[str], Optional[str]]] = {}

    def judge(self, sightings: Iterable[Sighting], taking: str = "") -> List[CardState]:
        """The cards as the server sees them. `taking` is a direct lease that is about to be held."""
        # An ended attempt's leftovers are found by what their environment says.
        alive = self._attempts.living()
        shims = {attempt.shim[0]: attempt for attempt in alive if attempt.shim}
        leaders = {attempt.pid: attempt for attempt in alive if attempt.pid is not None}
        held = frozenset((*self._held_leases(), taking))
        living = {attempt.id for attempt in alive}
        return [self._judge_one(sighting, shims, leaders, held, living) for sighting in sightings]

    def _judge_one(
        self,
        card: Sighting,
        shims: Dict[int, Attempt],
        leaders: Dict[int, Attempt],
        held: FrozenSet[str],
        living: "set[str]",
    ) -> CardState:
        seen: List[CardProcess] = []
        strangers: List[CardProcess] = []
        for one in card.processes:
            process = self._who(one, shims, leaders)
            seen.append(process)
            ours = process.attempt_id in living or (process.lease_id is not None and process.lease_id in held)
            if not ours and not process.resident:
                strangers.append(process)
        state, reason = card.health, card.reason
        if state == "ok" and strangers:
            state = "occupied"
            reason = "processes that no lease explains: " + ", ".join(_name(one) for one in strangers[:4])
        elif state == "ok":
            spare = self._unexplained_mib(card, seen)
            if spare is not None and spare > UNEXPLAINED_MIB:
                state = "occupied"
                reason = f"{spare} MiB in use that no process on the card explains"
        return CardState(
            index=card.index,
            uuid=card.uuid,
            name=card.name,
            memory_mib=card.memory_mib,
            memory_used_mib=card.memory_used_mib,
            util_pct=card.util_pct,
            temperature_c=card.temperature_c,
            power_w=card.power_w,
            state=state,
            reason=reason,
            processes=tuple(seen),
            simulated=card.simulated,
            mig_parent=card.mig_parent,
            compute_capability=card.compute_capability,
            pci_bus_id=card.pci_bus_id,
            observed_ago_ms=ago_ms(card),
            xids=card.xids,
        )

    def _unexplained_mib(self, card: Sighting, seen: List[CardProcess]) -> Optional[int]:
        """Memory in use beyond the idle card's own and the processes'; None when it cannot be told."""
        if card.memory_used_mib is None or card.simulated:
            return None
        if not seen:
            idle = min(card.memory_used_mib, BASELINE_MAX_MIB)
            self._baseline[card.uuid] = min(idle, self._baseline.get(card.uuid, idle))
        if any(one.memory_mib is None for one in seen):
            return None
        explained = sum(one.memory_mib or 0 for one in seen)
        return max(0, card.memory_used_mib - self._baseline.get(card.uuid, 0) - explained)

    def _who(self, one: OnCard, shims: Dict[int, Attempt], leaders: Dict[int, Attempt]) -> CardProcess:
        stat = processes.stat(one.pid)
        attempt_id: Optional[str] = None
        lease_id: Optional[str] = None
        if stat is not None:
            key = (stat.pid, stat.ticks)
            if key not in self._lease_of:
                if len(self._lease_of) > 4096:
                    self._lease_of.clear()
                self._lease_of[key] = self._trace(stat, shims, leaders)
            attempt_id, lease_id = self._lease_of[key]
        program = processes.program(one.pid)
        return CardProcess(
            pid=one.pid,
            user=processes.owner(one.pid),
            program=program,
            memory_mib=one.memory_mib,
            attempt_id=attempt_id,
            lease_id=lease_id,
            resident=program is not None and program in self._residents,
            state=stat.state if stat else None,
        )

    def _trace(
        self, stat: processes.Stat, shims: Dict[int, Attempt], leaders: Dict[int, Attempt]
    ) -> Tuple[Optional[str], Optional[str]]:
        """Attempt and lease of a process, by ancestry, session, or environment (its own or an ancestor's)."""
        pid: int = stat.pid
        lease: Optional[str] = None
        for _ in range(64):
            seen = processes.stat(pid)
            if seen is None or pid <= 1:
                break
            attempt = shims.get(pid)
            leader = leaders.get(pid) or leaders.get(seen.sid)
            if attempt is None and leader is not None and (seen.pid != leader.pid or seen.ticks == leader.ticks):
                attempt = leader
            if attempt is not None:
                return attempt.id, attempt.lease_id
            env = processes.environ(pid) or {}
            if _id_in(env, "COTENANT_ATTEMPT"):
                return env["COTENANT_ATTEMPT"], _id_in(env, "COTENANT_LEASE") or lease
            lease = lease or _id_in(env, "COTENANT_LEASE")
            pid = seen.ppid
        return None, lease

    def check(self, slots: Iterable[SlotRef], sightings: Iterable[Sighting], left: Sequence[CardProcess]) -> CleanCheck:
        """Whether `slots` are free: healthy cards with nothing unexplained, and no process in `left`."""
        wanted = {slot.uuid for slot in slots if slot.uuid != "cpu"}
        cards = tuple(card for card in self.judge(sightings) if card.uuid in wanted)
        unclean = list(left)
        for card in cards:
            if card.state == "occupied":
                unclean += [one for one in card.processes if not one.resident and one not in unclean]
        all_seen = wanted == {card.uuid for card in cards}
        clean = all_seen and not left and all(card.state == "ok" for card in cards)
        return CleanCheck(clean=clean, unclean=tuple(unclean), cards=cards)


def _id_in(env: Dict[str, str], name: str) -> Optional[str]:
    """An id in the environment of a process, which is anybody's word: what is no id is not passed on."""
    value = env.get(name, "")
    return value if is_id(value) else None


def _name(one: CardProcess) -> str:
    who = f"{one.program or 'unknown program'} (pid {one.pid}, {one.user or 'unknown user'}"
    return who + (f", {one.memory_mib} MiB)" if one.memory_mib is not None else ")")
