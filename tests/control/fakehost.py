"""A host in memory and a clock by hand: everything that a server meets outside itself, without a process or a wait.

`FakeHost` implements `backends.base.Host` over a `Machine`. Every request, answer and report goes through the frames of
hostd.protocol, so the wire's form is exercised too. The machine keeps hostd's rules (fences, tombstones, floors, whom to
obey) and, apart from them, what really runs: that outlives hostd's memory, as processes do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from cotenant.hostd import protocol
from cotenant.hostd.protocol import (
    AttemptReport,
    CardLinks,
    CardProcess,
    CardState,
    CheckpointSeen,
    CleanCheck,
    ExitRecord,
    Hello,
    HostFacts,
    LogPage,
    Progress,
    Refused,
    SlotRef,
    StartSpec,
    Welcome,
    from_wire,
    to_wire,
)
from cotenant.server.backends.base import HostRefused
from cotenant.server.errors import OutcomeUnknown, Unreachable

T = TypeVar("T")
LIVING = ("starting", "ready", "running", "stopping")


class FakeClock:
    """Time moves only when a test says so; the wall clock can be moved by itself."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self.wall_ms = now_ms
        self.steady_s = 1000.0
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_s(self) -> float:
        return self.steady_s

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.append((self.steady_s + seconds, future))
        await future

    def advance(self, seconds: float) -> None:
        """Both clocks go on; whoever slept until then wakes."""
        self.wall_ms += round(seconds * 1000)
        self.steady_s += seconds
        for until, future in self._sleeping:
            if until <= self.steady_s and not future.done():
                future.set_result(None)
        self._sleeping = [(until, future) for until, future in self._sleeping if not future.done()]

    def step_wall(self, seconds: float) -> None:
        """Somebody sets the wall clock."""
        self.wall_ms += round(seconds * 1000)


@dataclass
class Process:
    """What really runs, whoever remembers it."""

    attempt_id: str
    job_id: str
    fence: int
    slots: tuple[SlotRef, ...]
    pid: int


@dataclass
class Machine:
    """One machine: its cards, its processes, and hostd's state directory."""

    name: str = "local"
    driver: str | None = None
    cuda: str | None = None
    links: tuple[tuple[str, str, int], ...] = ()
    cards: int = 2
    nvml: str = "simulated"
    boot: int = 1
    states: int = 1
    cluster_id: str | None = None
    incarnation: int = 0
    nonce: str = ""
    floor: int = 0
    amnesia: bool = False
    fences: dict[str, int] = field(default_factory=dict)  # uuid/share -> highest
    tombstones: set[str] = field(default_factory=set)
    attempts: dict[str, AttemptReport] = field(default_factory=dict)
    forgotten: dict[str, AttemptReport] = field(default_factory=dict)
    holds: dict[str, tuple[int, tuple[SlotRef, ...]]] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    specs: dict[str, StartSpec] = field(default_factory=dict)
    card_states: dict[str, tuple[str, str]] = field(default_factory=dict)  # uuid -> (state, reason)
    dirty: dict[str, list[CardProcess]] = field(default_factory=dict)  # uuid -> what stays on the card
    outbox: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    obeys_stops: bool = True
    lost_files: set[str] = field(default_factory=set)
    util: dict[str, int | None] = field(default_factory=dict)  # of cards that are in use, or do not tell
    starts_slowly: bool = False
    deaf: bool = False  # its shims do not come to suspend anything
    stands_ms: int = 60_000
    exits_at_once: int | None = None
    asked: Counter[str] = field(default_factory=Counter)
    signals: list[tuple[str, int]] = field(default_factory=list)  # (attempt, number) of every signal that arrived
    notices: list[tuple[str, str, str]] = field(default_factory=list)  # (attempt, what, why) of every notice, each once
    progress: dict[str, Progress] = field(default_factory=dict)  # attempt -> what is seen of its work
    history: list[tuple[str, str, int]] = field(default_factory=list)  # (job, attempt, fence) of every process
    broken: list[str] = field(default_factory=list)  # rules that the server has made the machine break
    _seq: Any = field(default_factory=lambda: itertools.count(1))
    _pid: Any = field(default_factory=lambda: itertools.count(4000))

    @property
    def uuids(self) -> list[str]:
        return [f"SIM-{self.name}-{n}" for n in range(self.cards)]

    @property
    def boot_id(self) -> str:
        return f"boot-{self.name}-{self.boot}"

    @property
    def state_id(self) -> str:
        return f"state-{self.name}-{self.states}"

    # ---- what happens to it

    def finish(self, attempt_id: str, code: int | None = 0, *, clean: bool = True, **record: Any) -> None:
        """The attempt's process ends; hostd, if it remembers it, reports the end."""
        self.processes.pop(attempt_id, None)
        known = self.attempts.get(attempt_id)
        if known is None or known.state not in LIVING:
            return
        values = {"code": code, "duration_s": 5.0, **record}
        if values.get("signal") is not None or values.get("exec_error") is not None:
            values["code"] = None
        over = {"state": "exited", "exit": ExitRecord(**values), "clean": clean, "pid": None, "suspended": False}
        self._put(replace(known, **over, progress=self.progress.get(attempt_id)))

    def works(self, attempt_id: str, **seen: Any) -> Progress:
        """Something is seen of an attempt's work: fields of Progress; `path` for a complete checkpoint."""
        known = self.attempts[attempt_id]
        path = seen.pop("path", None)
        if path is not None:
            seen["checkpoint"] = CheckpointSeen(path.rsplit("/", 1)[-1], path, 1000, seen.pop("age_ms", 0))
        before = self.progress.get(attempt_id, Progress(attempt_id, known.lease_id))
        self.progress[attempt_id] = replace(before, **seen)
        return self.progress[attempt_id]

    def notice(self, attempt_id: str, notice_id: str, what: str, why: str) -> Progress:
        known = self.attempts.get(attempt_id)
        if known is None or known.state not in LIVING:
            raise Refused("not_running", "the attempt has no process now")
        if self.works(attempt_id).notice != notice_id:
            self.notices.append((attempt_id, what, why))
            self.works(attempt_id, notice=None if what == "none" else notice_id, saved=False)
        return self.progress[attempt_id]

    def got_clean(self, attempt_id: str) -> None:
        """What an ended attempt had left behind is gone."""
        self._put(replace(self.attempts[attempt_id], clean=True, unclean=()))

    def shim_dies(self, attempt_id: str) -> None:
        """The supervisor of an attempt died, and with it the exit code."""
        self.processes.pop(attempt_id, None)
        self._put(replace(self.attempts[attempt_id], state="lost", clean=True, pid=None))

    def reboot(self) -> None:
        self.boot += 1
        self.processes.clear()
        self.dirty.clear()
        self.amnesia = False
        for known in list(self.attempts.values()):
            if known.state in LIVING:
                self._put(replace(known, state="lost", clean=True, pid=None, message="the machine was restarted"))
            elif not known.clean:
                self._put(replace(known, clean=True, unclean=()))

    def lose_memory(self) -> None:
        """The state directory is wiped within a boot; what runs, runs on."""
        self.states += 1
        self.cluster_id, self.incarnation, self.nonce, self.floor = None, 0, "", 0
        self.fences, self.tombstones, self.attempts, self.holds = {}, set(), {}, {}
        self.forgotten, self.outbox = {}, []
        self._seq = itertools.count(1)
        self.amnesia = True

    def orphans(self) -> list[Process]:
        """Processes that carry a lease and that hostd knows nothing of. A tombstone says nothing of what runs."""
        return [
            p
            for p in self.processes.values()
            if (known := self.attempts.get(p.attempt_id)) is None or known.state not in LIVING
        ]

    def _put(self, report: AttemptReport) -> None:
        self.attempts[report.attempt_id] = report
        self.report("attempt", report)

    def report(self, name: str, body: Any) -> None:
        self.outbox.append((next(self._seq), name, _json(protocol.report(1, name, body))["body"]))

    def card(self, index: int) -> CardState:
        uuid = self.uuids[index]
        state, reason = self.card_states.get(uuid, ("ok", ""))
        util = self.util.get(uuid, 0)
        return CardState(
            index, uuid, "Simulated GPU", 81920, 0, util, state=state, reason=reason or None, simulated=True
        )

    def facts(self) -> HostFacts:
        return HostFacts(self.name, 16, 65536, 60000, 100_000, 0.5, nvml=self.nvml, driver=self.driver, cuda=self.cuda)

    # ---- hostd's rules

    def greet(self, hello: Hello) -> Welcome:
        if self.cluster_id is not None and hello.cluster_id != self.cluster_id and not hello.take_over:
            raise Refused("other_cluster", f"this host obeys {self.cluster_id}", {"cluster_id": self.cluster_id})
        moved = hello.cluster_id != self.cluster_id
        old = (hello.incarnation, hello.nonce) != (self.incarnation, self.nonce) and (
            hello.incarnation < self.incarnation or (hello.incarnation == self.incarnation and self.nonce)
        )
        if not moved and old:
            raise Refused("old_incarnation", "a newer start was here", {"incarnation": self.incarnation})
        highest = max([self.floor, *self.fences.values()])
        if not moved and not hello.take_over and hello.fence is not None and hello.fence < highest:
            raise Refused("old_incarnation", "the records are of an older past", {"fence": highest})
        self.cluster_id, self.incarnation, self.nonce = hello.cluster_id, hello.incarnation, hello.nonce
        return Welcome(
            protocol.PROTOCOL, self.state_id, self.boot_id, 1, highest, self.amnesia, self.facts(),
            tuple(self.card(n) for n in range(self.cards)), tuple(self.attempts.values()), tuple(self.holds),
            tuple(CardLinks(*pair) for pair in self.links),
        )  # fmt: skip

    def set_floor(self, fence: int) -> dict[str, Any]:
        self.floor = max(self.floor, fence)
        if self.amnesia and self.floor > 0 and not self.orphans():
            self.amnesia = False
        return {"needs_floor": self.amnesia}

    def _check(self, lease_id: str, fence: int, slots: Sequence[SlotRef], attempt_id: str = "") -> None:
        if self.amnesia:
            raise Refused("needs_floor", "this host has lost its state")
        if fence < self.floor:
            raise Refused("stale_fence", f"fence {fence} is below the floor", {"floor": self.floor})
        for slot in slots:
            key = f"{slot.uuid}/{slot.share}"
            if self.fences.get(key, 0) > fence:
                raise Refused("stale_fence", f"a higher fence was seen on {key}", {"fence": self.fences[key]})
            for other in self.attempts.values():
                if other.state in LIVING and other.lease_id != lease_id and slot in other.slots:
                    raise Refused("occupied", f"attempt {other.attempt_id} lives there", {"uuid": slot.uuid})
            for other_id, (_, held) in self.holds.items():
                if other_id != lease_id and slot in held:
                    raise Refused("occupied", f"lease {other_id} holds {slot.uuid}", {"uuid": slot.uuid})
            if slot.uuid == "cpu":
                continue
            if slot.uuid not in self.uuids:
                raise Refused("no_such_card", f"no card {slot.uuid} is here", {"uuid": slot.uuid})
            state, reason = self.card_states.get(slot.uuid, ("ok", ""))
            if state in ("sick", "lost"):
                raise Refused("sick", reason, {"uuid": slot.uuid})
            if state != "ok" or self.dirty.get(slot.uuid):
                raise Refused(
                    state if state != "ok" else "occupied", reason or "somebody is there", {"uuid": slot.uuid}
                )

    def start(self, spec: StartSpec) -> AttemptReport:
        known = self.attempts.get(spec.attempt_id)
        if known is not None:
            if known.state == "never":
                raise Refused("tombstoned", "it was stopped before it started")
            return known
        if spec.attempt_id in self.tombstones:
            raise Refused("tombstoned", "a stop came before its start")
        self._check(spec.lease_id, spec.fence, spec.slots, spec.attempt_id)
        if spec.resume_path is not None and spec.resume_path in self.lost_files:
            raise Refused("no_checkpoint", f"{spec.resume_path} is not on this host")
        if spec.workdir == "/missing":
            raise Refused("bad_workdir", "/missing is not a directory")
        for slot in spec.slots:
            self.fences[f"{slot.uuid}/{slot.share}"] = spec.fence
        running = [p for p in self.processes.values() if p.job_id == spec.job_id]
        if running:
            self.broken.append(f"two live attempts of {spec.job_id}: {running[0].attempt_id} and {spec.attempt_id}")
        for slot in spec.slots:
            if slot.uuid != "cpu" and any(slot in p.slots for p in self.processes.values()):
                self.broken.append(f"two processes on {slot.uuid}: the second is {spec.attempt_id}")
        for other in self.attempts.values():
            if other.state not in LIVING and not other.clean and set(other.slots) & set(spec.slots):
                self.broken.append(f"{spec.attempt_id} starts where {other.attempt_id} left something behind")
        self.specs[spec.attempt_id] = spec
        if spec.gate_s is not None:
            ready = AttemptReport(
                spec.attempt_id, "ready", spec.job_id, spec.lease_id, spec.epoch, spec.fence, spec.slots, boot_id=self.boot_id
            )  # fmt: skip
            self.attempts[spec.attempt_id] = ready
            return ready
        return self._run(spec)

    def go(self, attempt_id: str) -> AttemptReport:
        known = self.probe(attempt_id)
        if known.state == "unknown":
            raise Refused("unknown_attempt", "no such attempt was ever here")
        return self._run(self.specs[attempt_id]) if known.state == "ready" else known

    def gate_closes(self, attempt_id: str) -> None:
        """The word to begin did not come in time."""
        self._put(replace(self.attempts[attempt_id], state="never", clean=True, message="the word did not come"))

    def _run(self, spec: StartSpec) -> AttemptReport:
        pid = next(self._pid)
        self.processes[spec.attempt_id] = Process(spec.attempt_id, spec.job_id, spec.fence, spec.slots, pid)
        self.history.append((spec.job_id, spec.attempt_id, spec.fence))
        report = AttemptReport(
            spec.attempt_id, "starting" if self.starts_slowly else "running", spec.job_id, spec.lease_id, spec.epoch, spec.fence, spec.slots,
            pid=pid, start_ticks=pid * 10, boot_id=self.boot_id, running_for_ms=0,
        )  # fmt: skip
        self._put(report)
        if self.exits_at_once is not None:
            self.finish(spec.attempt_id, self.exits_at_once)
        return self.attempts[spec.attempt_id]

    def stop(self, attempt_id: str, reason: str) -> AttemptReport:
        self.tombstones.add(attempt_id)
        known = self.attempts.get(attempt_id)
        if known is None:
            known = self.attempts[attempt_id] = AttemptReport(attempt_id, "never", refusal="tombstoned", clean=True)
        elif known.state in LIVING:
            if known.state == "ready":
                self._put(replace(known, state="never", clean=True))
                return self.attempts[attempt_id]
            self._put(replace(known, state="stopping", suspended=False))
            if self.obeys_stops:
                self.finish(attempt_id, None, signal=15, sender="shim", reason=reason)
        return self.attempts[attempt_id]

    def stand(self, attempt_id: str, still: bool, max_s: float = 1e9) -> AttemptReport:
        """Suspend or resume. Each suspension is `stands_ms` long once it is over."""
        known = self.attempts.get(attempt_id)
        if known is None or known.state not in LIVING:
            raise Refused("not_running", "the attempt has no process now")
        if known.state == "running" and known.suspended is not still and not (still and self.deaf):
            if still and known.suspended_ms >= max_s * 1000:
                return known
            more = 0 if still else self.stands_ms
            self._put(replace(known, suspended=still, suspended_ms=known.suspended_ms + more))
        return self.attempts[attempt_id]

    def probe(self, attempt_id: str) -> AttemptReport:
        known = self.attempts.get(attempt_id) or self.forgotten.get(attempt_id)
        if known is None and attempt_id in self.tombstones:
            return AttemptReport(attempt_id, "never", refusal="tombstoned", clean=True)
        return known or AttemptReport(attempt_id, "unknown")

    def check(self, slots: Sequence[SlotRef]) -> CleanCheck:
        left = [p for slot in slots for p in self.dirty.get(slot.uuid, ())]
        for slot in slots:
            left += [
                CardProcess(p.pid, "me", "python", 100, lease_id="x")
                for p in self.processes.values()
                if slot in p.slots and slot.uuid != "cpu"
            ]
        return CleanCheck(not left, tuple(left))

    def hold(self, lease_id: str, fence: int, slots: tuple[SlotRef, ...]) -> CleanCheck:
        self._check(lease_id, fence, slots)
        self.holds[lease_id] = (fence, slots)
        for slot in slots:
            self.fences[f"{slot.uuid}/{slot.share}"] = fence
        return CleanCheck(clean=True)

    def unhold(self, lease_id: str, slots: Sequence[SlotRef]) -> CleanCheck:
        held = self.holds.get(lease_id)
        if held is None:
            return self.check(tuple(slots))
        check = self.check(held[1])
        if check.clean:
            del self.holds[lease_id]
        return check


class FakeHost:
    """A link to a machine. `away`, `lose` and `drop` say which words do not arrive."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.name = machine.name
        self.away = False
        self.lose: set[str] = set()  # the request is lost: nothing happens, no answer comes
        self.drop: set[str] = set()  # it happens, and the answer is lost
        self.never_answers: set[str] = set()  # it happens, and whoever asked waits for ever
        self.kept_waiting = asyncio.Event()  # somebody does

    def _ask(self, op: str, args: Any, kind: type[T] | None, do: Any) -> T:
        self.machine.asked[op] += 1
        if self.away:
            raise Unreachable(f'host "{self.name}" does not answer')
        if op in self.lose:
            self.lose.discard(op)
            raise OutcomeUnknown(f"{op} was not answered")
        message = _json(protocol.request(7, op, args))
        assert message["op"] == op
        try:
            answer = _json(protocol.reply(7, do(message["args"])))
        except Refused as error:
            answer = _json(protocol.refusal(7, error))
        if op in self.drop:
            self.drop.discard(op)
            raise OutcomeUnknown(f"the answer to {op} was lost")
        if not answer["ok"]:
            raise HostRefused(answer["message"], code=answer["code"], data=answer["detail"])
        return answer["result"] if kind is None else from_wire(kind, answer["result"])  # type: ignore[no-any-return]

    def hello(self, hello: Hello) -> Welcome:
        return self._ask("hello", hello, Welcome, lambda a: self.machine.greet(from_wire(Hello, a)))

    async def start(self, spec: StartSpec) -> AttemptReport:
        return self._ask("start", spec, AttemptReport, lambda a: self.machine.start(from_wire(StartSpec, a)))

    async def prepare(self, spec: StartSpec) -> AttemptReport:
        return self._ask("prepare", spec, AttemptReport, lambda a: self.machine.start(from_wire(StartSpec, a)))

    async def go(self, attempt_id: str) -> AttemptReport:
        return self._ask("go", {"attempt_id": attempt_id}, AttemptReport, lambda a: self.machine.go(a["attempt_id"]))

    async def free_port(self, low: int, high: int, but: Sequence[int]) -> int | None:
        def do(a: dict[str, Any]) -> dict[str, Any]:
            free = [port for port in range(a["low"], a["high"] + 1) if port not in a["but"]]
            return {"port": free[0] if free else None}

        answer: dict[str, Any] = self._ask("free_port", {"low": low, "high": high, "but": list(but)}, None, do)
        return answer["port"]

    async def stop(self, attempt_id: str, reason: str, grace_s: float) -> AttemptReport:
        args = {"attempt_id": attempt_id, "reason": reason, "grace_s": grace_s}
        return self._ask("stop", args, AttemptReport, lambda a: self.machine.stop(a["attempt_id"], a["reason"]))

    async def signal(self, attempt_id: str, signal: int) -> AttemptReport:
        def do(args: dict[str, Any]) -> AttemptReport:
            known = self.machine.probe(args["attempt_id"])
            if known.state not in LIVING:
                raise Refused("not_running", "the attempt has no process now")
            self.machine.signals.append((args["attempt_id"], args["signal"]))
            return known

        report = self._ask("signal", {"attempt_id": attempt_id, "signal": signal}, AttemptReport, do)
        if "signal" in self.never_answers:
            self.kept_waiting.set()
            await asyncio.get_running_loop().create_future()
        return report

    async def suspend(self, attempt_id: str, max_s: float) -> AttemptReport:
        args = {"attempt_id": attempt_id, "max_s": max_s}
        return self._ask(
            "suspend", args, AttemptReport, lambda a: self.machine.stand(a["attempt_id"], True, a["max_s"])
        )

    async def resume(self, attempt_id: str) -> AttemptReport:
        args = {"attempt_id": attempt_id}
        return self._ask("resume", args, AttemptReport, lambda a: self.machine.stand(a["attempt_id"], False))

    async def notice(
        self, attempt_id: str, notice_id: str, what: str, why: str, by_s: float | None, signal: int | None
    ) -> Progress:
        args = {
            "attempt_id": attempt_id,
            "notice_id": notice_id,
            "what": what,
            "why": why,
            "by_s": by_s,
            "signal": signal,
        }

        def do(a: dict[str, Any]) -> Progress:
            found = self.machine.notice(a["attempt_id"], a["notice_id"], a["what"], a["why"])
            if a["signal"] is not None:
                self.machine.signals.append((a["attempt_id"], a["signal"]))
            return found

        return self._ask("notice", args, Progress, do)

    async def probe(self, attempt_id: str) -> AttemptReport:
        return self._ask(
            "probe", {"attempt_id": attempt_id}, AttemptReport, lambda a: self.machine.probe(a["attempt_id"])
        )

    async def hold(self, lease_id: str, fence: int, slots: Sequence[SlotRef]) -> CleanCheck:
        def do(a: dict[str, Any]) -> CleanCheck:
            return self.machine.hold(a["lease_id"], a["fence"], tuple(protocol.slots_of(a["slots"])))

        return self._ask("hold", {"lease_id": lease_id, "fence": fence, "slots": list(slots)}, CleanCheck, do)

    async def unhold(self, lease_id: str, slots: Sequence[SlotRef]) -> CleanCheck:
        return self._ask(
            "unhold", {"lease_id": lease_id}, CleanCheck, lambda a: self.machine.unhold(a["lease_id"], slots)
        )

    async def check(self, slots: Sequence[SlotRef]) -> CleanCheck:
        args = {"slots": list(slots)}
        return self._ask("check", args, CleanCheck, lambda a: self.machine.check(protocol.slots_of(a["slots"])))

    async def look(self) -> tuple[tuple[CardState, ...], HostFacts]:
        return tuple(self.machine.card(n) for n in range(self.machine.cards)), self.machine.facts()

    async def read_log(
        self, attempt_id: str, stream: str, *, offset: int | None, tail_lines: int | None, max_bytes: int
    ) -> LogPage:
        def do(a: dict[str, Any]) -> LogPage:
            text = f"{a['stream']} of {a['attempt_id']}\n"
            known = self.machine.attempts.get(a["attempt_id"])
            return LogPage(text, 0, len(text), len(text), 0, known is not None and known.state not in LIVING)

        args = {
            "attempt_id": attempt_id,
            "stream": stream,
            "offset": offset,
            "tail_lines": tail_lines,
            "max_bytes": max_bytes,
        }
        return self._ask("read_log", args, LogPage, do)

    async def forget(self, attempt_ids: Sequence[str]) -> None:
        def do(a: dict[str, Any]) -> dict[str, Any]:
            for attempt_id in a["attempt_ids"]:
                known = self.machine.attempts.get(attempt_id)
                if known is not None and known.state not in LIVING:
                    self.machine.forgotten[attempt_id] = self.machine.attempts.pop(attempt_id)
            return {}

        self._ask("forget", {"attempt_ids": list(attempt_ids)}, None, do)

    async def set_floor(self, fence: int) -> bool:
        answer: dict[str, Any] = self._ask(
            "set_floor", {"fence": fence}, None, lambda a: self.machine.set_floor(a["fence"])
        )
        return bool(answer["needs_floor"])


def _json(frame: bytes) -> dict[str, Any]:
    """What the other end reads of a frame."""
    message: dict[str, Any] = json.loads(frame[4:])
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    return message


__all__ = ["FakeClock", "FakeHost", "Machine", "Process", "to_wire"]
