"""From a start's arrival to its running command: checked, remembered, locked, handed to a shim. Once, however often it comes.

Owns the checks of a slot in the moment of a start, and starts that a hostd before us accepted. Must not know: how cards are
read, what becomes of an attempt after it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import Any, Callable, Coroutine, Dict, Iterable, List, Optional, Set, Tuple

from cotenant.hostd.attempts import Attempt, Attempts, check_id, plain
from cotenant.hostd.cards import Sighting
from cotenant.hostd.clean import Judge
from cotenant.hostd.environment import launch_environment
from cotenant.hostd.locks import CardLocks
from cotenant.hostd.looks import Looks
from cotenant.hostd.protocol import AttemptReport, Refused, SlotRef, StartSpec, slots_of
from cotenant.hostd.state import State, overlap
from cotenant.hostd.supervisor import RESUME_START_WITHIN_S, Gate, Supervisor
from cotenant.hostd.watching import Watching

#: Secrets reach the shim in one message of a unix socket, which Linux cuts off at 212,992 bytes (wmem_default).
SECRETS_MAX_BYTES = 160 * 1024
#: How long after a start the files of the next are made: when its command has surely begun.
MAKE_READY_AFTER_S = 0.01

Later = Callable[[Coroutine[Any, Any, None]], None]


class Starting:
    """Starts attempts. `later(work)` does something beside the requests; `on_change(attempt)` is told of what no answer carries."""

    def __init__(
        self,
        state: State,
        attempts: Attempts,
        supervisor: Supervisor,
        looks: Looks,
        judge: Judge,
        locks: CardLocks,
        later: Later,
        on_change: Callable[[Attempt], None],
        watching: Watching,
    ) -> None:
        self.state = state
        self.attempts = attempts
        self.supervisor = supervisor
        self.looks = looks
        self.judge = judge
        self.locks = locks
        self._later = later
        self._on_change = on_change
        self._watching = watching
        self._home = {"COTENANT_STATE_DIR": state.directory, "COTENANT_LOCK_DIR": state.lock_directory}
        self._going: Dict[str, Tuple[str, asyncio.Future[AttemptReport]]] = {}
        self._unmade: Set[str] = set()  # accepted by a hostd that died; not handed to a shim yet
        self._closed = False
        self._making_ready = False

    def close(self) -> None:
        """Make nothing ahead any more."""
        self._closed = True

    def resume(self, attempt: Attempt) -> None:
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
            self._on_change(attempt)

        self._later(make())

    async def start(self, spec: StartSpec) -> AttemptReport:
        """Start one attempt, once: a repeat answers where it stands. Returns when it runs, or could not be executed."""
        attempt_id = check_id(spec.attempt_id)
        if not spec.argv or not all(isinstance(word, str) and "\0" not in word for word in spec.argv):
            raise Refused("bad_request", "argv: at least one word, and no NUL in any, was expected")
        if spec.secret_env and len(json.dumps(spec.secret_env)) > SECRETS_MAX_BYTES:
            raise Refused("bad_request", f"the secrets together are longer than {SECRETS_MAX_BYTES} bytes as JSON")
        text = plain(spec)
        going = self._going.get(attempt_id)
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
        self._going[attempt_id] = (text, answer)
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
            del self._going[attempt_id]

    async def _start(self, spec: StartSpec, text: str) -> AttemptReport:
        self.state.check_memory()
        self.state.check_fence(spec.slots, spec.fence)
        if spec.workdir and not _enterable(spec.workdir):
            raise Refused("bad_workdir", f"{spec.workdir} is not a directory that this host's user can enter")
        if spec.resume_path and not _is_there(spec.resume_path):
            raise Refused("no_checkpoint", f"{spec.resume_path} is not on this host", {"path": spec.resume_path})
        await self._watching.before(spec)
        try:
            return await self._begin(spec, text)
        except (Refused, OSError):
            self._watching.forget(spec.attempt_id)
            raise

    async def _begin(self, spec: StartSpec, text: str) -> AttemptReport:
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
        except (Refused, OSError) as error:
            if attempt is not None and attempt.state == "starting":
                self.attempts.discard(attempt)
            self.locks.release(spec.attempt_id)
            raise _refused(error) from error
        self.make_ready_soon()
        return attempt.report()

    def make_ready_soon(self) -> None:
        if not self._making_ready and self.attempts.needs_ready:
            self._making_ready = True
            asyncio.get_running_loop().call_later(MAKE_READY_AFTER_S, self._make_ready)

    def _make_ready(self) -> None:
        self._making_ready = False
        if not self._closed:
            self.attempts.make_ready()
            self.make_ready_soon()  # one at a time, so that no request waits for all

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
        except (Refused, OSError) as error:
            refused = _refused(error)
            self._give_up(attempt, refused)
            raise refused from error
        return attempt.report()

    async def _admit(self, spec: StartSpec) -> Dict[str, Sighting]:
        """Look at the cards of `spec` in this moment. Returns them by uuid; raises Refused when one may not be used."""
        uuids = [slot.uuid for slot in spec.slots if slot.uuid != "cpu"]
        seen = {card.uuid: card for card in await self.looks.fresh(uuids)} if uuids else {}
        self.state.check_fence(spec.slots, spec.fence)  # a higher one may have come during the look
        self.check_free(spec.slots, spec.lease_id, spec.attempt_id)
        self.check_cards(uuids, seen)
        return seen

    def _lock_cards(self, spec: StartSpec) -> List[int]:
        """Lock the cards of `spec` machine-wide; the descriptors for its shim. Raises Refused("locked")."""
        found = []
        try:
            for uuid in dict.fromkeys(slot.uuid for slot in spec.slots):
                if uuid != "cpu" and not uuid.startswith("SIM-"):
                    fd = self.locks.take(uuid, spec.attempt_id, self.lives_on(uuid, spec.attempt_id))
                    if fd is not None:
                        found.append(fd)
        except (Refused, OSError):
            self.locks.release(spec.attempt_id)
            raise
        return found

    def _give_up(self, attempt: Attempt, error: Refused) -> None:
        self.locks.release(attempt.id)
        if attempt.living:
            attempt.state, attempt.clean = "never", True
            attempt.message = f"{error.code}: {error.message}"
            attempt.append({"tombstone": True})

    def lives_on(self, uuid: str, but: str) -> bool:
        if any(uuid == slot["uuid"] for hold in self.state.holds.values() for slot in hold["slots"]):
            return True
        return any(uuid in attempt.cards and attempt.id != but for attempt in self.attempts.living())

    def check_free(self, slots: Iterable[SlotRef], lease_id: str, attempt_id: str = "") -> None:
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

    def check_cards(self, uuids: List[str], seen: Dict[str, Sighting], taking: str = "") -> None:
        """Raises Refused when a card is missing, ill, or has something on it that nobody explains.

        What carries the lease that is being taken is its holder's: a host that lost its memory meets a lease in use anew.
        """
        for card in self.judge.judge((seen[uuid] for uuid in uuids if uuid in seen), taking):
            if card.state in ("sick", "lost"):
                raise Refused("sick", f"card {card.uuid}: {card.reason or card.state}", {"uuid": card.uuid})
            if card.state != "ok":
                raise Refused(
                    card.state, f"card {card.uuid}: {card.reason}", {"uuid": card.uuid, "processes": card.processes}
                )
        for uuid in uuids:
            if uuid not in seen:
                raise Refused("no_such_card", f"no card {uuid} is here", {"uuid": uuid})


def _refused(error: Exception) -> Refused:
    """What the machine would not do (no descriptors, a full disk) as a refusal: nothing of the start is left."""
    return error if isinstance(error, Refused) else Refused("storage", f"this host could not start it: {error}")


def _is_there(path: str) -> bool:
    return os.path.exists(path)


def _enterable(path: str) -> bool:
    return os.path.isdir(path) and os.access(path, os.X_OK)


def _same(known: str, fresh: str, attempt_id: str) -> None:
    if known != fresh:
        raise Refused("spec_conflict", f"attempt {attempt_id} came before with another command or other needs")
