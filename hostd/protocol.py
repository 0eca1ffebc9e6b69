"""The words that a server and hostd exchange, and how they are framed.

Owns the wire: one frame is a 4-byte big-endian length and one JSON object in UTF-8. Three kinds of
object travel: a request ``{"id", "op", "args"}`` answered by a reply ``{"re", "ok", ...}``; a report
``{"report", "seq", "body"}`` from hostd, repeated until the server has said ``ack``; and telemetry
``{"telemetry", "body"}``, which may be lost. Must not know: the database, MCP, NVML.

Standard library only, Python 3.9: this file also runs on hosts that we do not own. Times on the wire
are durations or the host's own clock for display; clocks of two machines are never compared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import struct
import typing
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Type, TypeVar, Union

#: Raised when a message changes meaning. A server accepts this version and the one before.
PROTOCOL = 1
#: Longest frame either side accepts. A log page is 1 MiB at most, so this is a fault, not a limit to tune.
MAX_FRAME_BYTES = 16 * 1024 * 1024

_LENGTH = struct.Struct(">I")
_T = TypeVar("_T")


class ProtocolError(Exception):
    """The peer sent something that is not a frame of this protocol; the connection is of no more use."""


class Refused(Exception):
    """hostd understood the request and will not do it. `code` is one of `REFUSALS`."""

    def __init__(self, code: str, message: str, detail: Optional[Dict[str, Any]] = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail or {}


#: Every refusal, with what it means. The server maps them; hostd raises no other.
REFUSALS: Dict[str, str] = {
    "protocol_unsupported": "the two versions have no protocol in common",
    "other_cluster": "this host is pinned to another control plane",
    "old_incarnation": "a newer start or restore of the same control plane was here already",
    "superseded": "a newer connection of the control plane has taken over",
    "not_greeted": "the first request on a connection must be hello",
    "needs_floor": "the state directory is new on a host that is not: a floor of fences must be set first",
    "stale_fence": "a higher fence was seen on this slot",
    "tombstoned": "a stop of this attempt came before its start",
    "spec_conflict": "the same attempt id came with another command",
    "occupied": "a process or memory that nobody explains is on the card",
    "sick": "the card or its driver does not answer as a healthy one",
    "unverified": "the processes on the card cannot be told",
    "no_such_card": "no card with this UUID is here",
    "locked": "another hostd on this machine holds the card",
    "bad_workdir": "the working directory is missing or not accessible",
    "unknown_attempt": "no such attempt was ever here",
    "not_running": "the attempt has no process now",
    "no_checkpoint": "the checkpoint that the attempt shall go on from is not here",
    "bad_request": "an argument is missing or has the wrong type",
    "storage": "the host's state directory cannot be written",
}

# ---- what travels -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotRef:
    """One slot on this host. `uuid` is an NVML UUID, or ``cpu`` for a cpu place. `share` counts from 0."""

    uuid: str
    share: int = 0
    shares: int = 1


@dataclass(frozen=True)
class CardProcess:
    """A process seen on a card. Of a process that is not ours only these fields are ever told."""

    pid: int
    user: Optional[str]
    program: Optional[str]
    memory_mib: Optional[int]
    attempt_id: Optional[str] = None
    lease_id: Optional[str] = None  # from COTENANT_LEASE in its environment or ancestry
    resident: bool = False  # named in the configuration, such as Xorg
    state: Optional[str] = None  # one letter of /proc/PID/stat, None when it cannot be read


@dataclass(frozen=True)
class CardState:
    """One card as last seen. None always means "not known", never 0."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    memory_used_mib: Optional[int] = None
    util_pct: Optional[int] = None
    temperature_c: Optional[int] = None
    power_w: Optional[int] = None
    state: str = "ok"  # ok | occupied | sick | lost | unverified
    reason: Optional[str] = None
    processes: Tuple[CardProcess, ...] = ()
    simulated: bool = False
    mig_parent: Optional[str] = None
    compute_capability: Optional[str] = None
    pci_bus_id: Optional[str] = None
    observed_ago_ms: int = 0
    xids: Tuple[int, ...] = ()  # critical Xid numbers seen since hostd started


@dataclass(frozen=True)
class CardLinks:
    """Two cards of this host, by uuid, and how many NVLinks join them, directly or through switches."""

    a: str
    b: str
    links: int


@dataclass(frozen=True)
class HostFacts:
    """The machine: totals for placement, and how its driver answers."""

    hostname: str
    cpus: int
    memory_mib: int
    memory_available_mib: int
    disk_free_mib: int
    load_1m: float
    driver: Optional[str] = None
    cuda: Optional[str] = None
    nvml: str = "ok"  # ok | no_library | no_driver | version_mismatch | hanging | error | simulated
    nvml_message: Optional[str] = None
    python: str = ""
    hostd_version: str = ""
    shows: str = ""  # which of the machine's cards it was told to show, in words (shown_cards)


@dataclass(frozen=True)
class ExitRecord:
    """How an attempt's process ended, written once by its shim.

    Exactly one of `code`, `signal`, `exec_error` is set. `sender` says who sent the deadly signal:
    ``shim`` (with `reason`), ``cotenant`` (a signal asked for through hostd), ``kernel_oom``
    (signal 9 and the host's OOM-kill counter moved), ``fault`` (SIGSEGV, SIGABRT and their kin, which the kernel or
    the process itself raises when it crashes; the host cannot rule out that another process sent it), ``outside``
    otherwise: not by Cotenant, and by whom the kernel does not tell a parent.
    """

    code: Optional[int] = None
    signal: Optional[int] = None
    exec_error: Optional[str] = None
    sender: Optional[str] = None
    reason: Optional[str] = None  # cancel | preempt | evict | time_limit | self_stop | release
    cpu_user_s: float = 0.0
    cpu_sys_s: float = 0.0
    peak_memory_mib: int = 0
    peak_card_memory_mib: Dict[str, int] = field(default_factory=dict)  # by uuid; absent when never sampled
    duration_s: float = 0.0
    escapees_killed: int = 0
    ended_at_ms: int = 0  # the host's clock, for display
    suspended_s: float = 0.0  # part of `duration_s` in which it was suspended


@dataclass(frozen=True)
class CheckpointRef:
    """Where an attempt saves its progress. `dir` is absolute; `manifest` as in checkpoints.Directory."""

    dir: str
    manifest: Optional[str] = None


@dataclass(frozen=True)
class CheckpointSeen:
    """The newest complete checkpoint in an attempt's directory. `age_ms` is by the host's clock."""

    name: str
    path: str
    size_bytes: int = 0
    age_ms: int = 0


@dataclass(frozen=True)
class Progress:
    """Signs of work of one attempt. Ages in milliseconds before this was told; None: never seen, or nothing to look at."""

    attempt_id: str
    lease_id: str = ""
    log_bytes: int = 0
    log_ago_ms: Optional[int] = None  # since its logs grew
    checkpoint: Optional[CheckpointSeen] = None
    writing_ago_ms: Optional[int] = None  # since something changed in its checkpoint directory
    skipped: Tuple[str, ...] = ()  # newer checkpoints that are not complete, each with its reason
    notice: Optional[str] = None  # id of the last notice that it was given
    saved: bool = False  # a complete checkpoint is there that was not when that notice was given


@dataclass(frozen=True)
class AttemptReport:
    """Where one attempt stands on its host.

    `state`: ``starting`` (accepted, process not seen yet), ``ready`` (made ready, waits for `go`), ``running``, ``stopping``, ``exited``
    (see `exit`), ``lost`` (its shim died: the process was found and ended, or is gone; no exit code),
    ``never`` (it certainly never ran and never will), ``unknown`` (this host knows nothing of it).
    `clean` is True once its processes are gone and the cards' memory came back.
    """

    attempt_id: str
    state: str
    job_id: str = ""
    lease_id: str = ""
    epoch: int = 0
    fence: int = 0
    slots: Tuple[SlotRef, ...] = ()
    pid: Optional[int] = None
    start_ticks: Optional[int] = None
    boot_id: Optional[str] = None
    running_for_ms: Optional[int] = None
    exit: Optional[ExitRecord] = None
    clean: Optional[bool] = None
    unclean: Tuple[CardProcess, ...] = ()
    refusal: Optional[str] = None  # why a start was not made, one of REFUSALS
    message: Optional[str] = None
    progress: Optional[Progress] = None  # of one that is over: the last look at its checkpoints
    suspended: bool = False  # while running: its processes are stopped, and its time limit stands still
    suspended_ms: int = 0  # in all suspensions that are over


@dataclass(frozen=True)
class StartSpec:
    """Everything a host needs for one attempt. Repeating it is safe: hostd keys on `attempt_id`.

    `env` is added to hostd's own environment. `secret_env` is too, and is kept out of every file that
    outlives the start. `time_limit_s` and the stop ladder are enforced by the attempt's own shim.
    """

    attempt_id: str
    job_id: str
    lease_id: str
    epoch: int
    fence: int
    argv: Tuple[str, ...]
    slots: Tuple[SlotRef, ...] = ()
    env: Dict[str, str] = field(default_factory=dict)
    secret_env: Dict[str, str] = field(default_factory=dict)
    workdir: Optional[str] = None
    pty: bool = False
    time_limit_s: Optional[float] = None
    stop_grace_s: float = 10.0
    visible_by: str = "index"  # index | uuid: what CUDA_VISIBLE_DEVICES is set to
    log_max_mib: int = 1024
    gate_s: Optional[float] = None  # made ready, it waits this long for `go`, and never starts without it
    checkpoint: Optional[CheckpointRef] = None
    resume_path: Optional[str] = (
        None  # the checkpoint it goes on from; refused with no_checkpoint where it is not there
    )


@dataclass(frozen=True)
class Hello:
    """The server's first word. Both ids are pinned on the host at arrival."""

    cluster_id: str
    incarnation: int
    nonce: str = ""  # of this start: a copied data directory has the same incarnation, but not the same nonce
    protocol: int = PROTOCOL
    protocol_min: int = PROTOCOL
    server_version: str = ""
    take_over: bool = False
    #: The highest fence the server has ever given; None from one that does not say. A server writes a fence down before
    #: a host hears of it, so one that knows of fewer than the host is a copy of the past.
    fence: Optional[int] = None


@dataclass(frozen=True)
class Welcome:
    """hostd's answer to hello: who it is, and everything it has that the server must know."""

    protocol: int
    state_id: str
    boot_id: str
    hostd_pid: int
    max_fence: int
    needs_floor: bool
    facts: HostFacts
    cards: Tuple[CardState, ...] = ()
    attempts: Tuple[AttemptReport, ...] = ()  # all not yet forgotten
    holds: Tuple[str, ...] = ()  # lease ids of direct leases held on this host
    links: Tuple[CardLinks, ...] = ()  # pairs of cards that are joined


@dataclass(frozen=True)
class LogPage:
    """A piece of an attempt's log. `text` holds whole lines while more may come; `end` is where to go on.

    Offsets are bytes of the file as written; `oldest` is the first byte that rotation has left.
    `final` means the attempt is over and nothing follows `end`.
    """

    text: str
    start: int
    end: int
    size: int
    oldest: int
    final: bool


@dataclass(frozen=True)
class CleanCheck:
    """Whether slots are free of what a lease left behind."""

    clean: bool
    unclean: Tuple[CardProcess, ...] = ()
    cards: Tuple[CardState, ...] = ()


# Requests, with their arguments and their answer (see also README of the folder):
#   hello        Hello                                                -> Welcome
#   set_floor    {fence}                       lower starts are refused -> {"needs_floor": bool}
#   start        StartSpec                                            -> AttemptReport
#   prepare      StartSpec with gate_s         make ready, and wait    -> AttemptReport (`ready`)
#   go           {attempt_id}                  start what is ready     -> AttemptReport
#   free_port    {low, high, but}              one that nobody has     -> {"port": int | null}
#   stop         {attempt_id, reason, grace_s} tombstone, then ladder  -> AttemptReport
#   signal       {attempt_id, signal}          to its process group    -> AttemptReport
#   suspend      {attempt_id, max_s}       STOP to its tree, at most so long in all -> AttemptReport
#   resume       {attempt_id}                  CONT to its tree        -> AttemptReport
#                (both are safe to repeat; a report that does not say so means that its shim has not come to it yet)
#   notice       {attempt_id, notice_id, what: save|stop|none, why, by_s | null, signal | null} once per id -> Progress
#   probe        {attempt_id}                                         -> AttemptReport
#   hold         {lease_id, fence, slots}      a direct lease begins   -> CleanCheck (Refused when not clean)
#   unhold       {lease_id, slots?}            a direct lease ended    -> CleanCheck (of `slots` when it was never held)
#   check        {slots}                       are they clean now?     -> CleanCheck
#   cards        {}                            a fresh look            -> {"cards": [CardState], "facts": HostFacts}
#   read_log     {attempt_id, stream: out|err, offset | null, tail_lines | null, max_bytes} -> LogPage
#                (with both: from the offset, at most that many lines)
#   forget       {attempt_ids}                 the record is stored    -> {}
#   beat         {n}                                                  -> {"n": n}
#   ack          {seq}                         no reply
# Reports: "attempt" (AttemptReport) on every change; "clean" {lease_id, CleanCheck} when slots of an
#   ended lease became clean; "card" (CardState) when a card's state changed; "facts" (HostFacts) when nvml changed;
#   "links" {"links": [CardLinks]} when other cards are joined than before.
# Telemetry: "cards" {"cards": [CardState], "facts": HostFacts}; "logs" {"jobs": [job_id]} when logs of these grew;
#   "progress" {"attempts": [Progress]} when a checkpoint came or is being written, and of all every few seconds.


def shown_cards(simulated: int, only: Optional[Sequence[str]], but: Sequence[str]) -> str:
    """What a hostd with these options shows, in words; equal words for equal options."""
    if simulated:
        return f"{simulated} simulated cards"
    if only is not None:
        return f"the cards {', '.join(sorted(only))}" if only else "no cards"
    return f"the real cards but {', '.join(sorted(but))}" if but else "the real cards"


# ---- to and from JSON -------------------------------------------------------------------------

_Reader = Callable[[Any, str], Any]
#: Per dataclass: (field, reader, required), made once; looking the types up anew cost half a millisecond a message.
_READERS: Dict[type, List[Tuple[str, _Reader, bool]]] = {}
#: Per dataclass: (field, default or MISSING).
_DEFAULTS: Dict[type, List[Tuple[str, Any]]] = {}
_PLAIN = frozenset((str, int, float, bool, type(None)))
#: Made once: json.dumps with options makes one for each call.
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def to_wire(value: Any) -> Any:
    """A dataclass of this module as plain JSON values; fields at their default are left out."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return [to_wire(item) for item in value]
    if kind is dict:
        return {str(key): to_wire(item) for key, item in value.items()}
    fields = _DEFAULTS.get(kind)
    if fields is None:
        if not dataclasses.is_dataclass(kind):
            return value
        fields = _DEFAULTS[kind] = [(f.name, f.default) for f in dataclasses.fields(kind)]
    out = {}
    for name, default in fields:
        item = getattr(value, name)
        if default is dataclasses.MISSING or item != default:
            out[name] = item if type(item) in _PLAIN else to_wire(item)
    return out


def from_wire(kind: Type[_T], value: Any) -> _T:
    """Read `kind` from plain JSON values. Unknown keys are ignored (a newer peer may send them).

    Raises:
        ProtocolError: a key without a default is missing, or a value has the wrong type.
    """
    if not isinstance(value, dict):
        raise ProtocolError(f"{kind.__name__}: an object was expected, not {type(value).__name__}")
    readers = _READERS.get(kind)
    if readers is None:
        hints = typing.get_type_hints(kind)
        readers = _READERS[kind] = [
            (
                f.name,
                _reader(hints[f.name]),
                f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
            )
            for f in dataclasses.fields(kind)  # type: ignore[arg-type]
        ]
    given = {}
    for name, read, required in readers:
        if name in value:
            given[name] = read(value[name], name)
        elif required:
            raise ProtocolError(f"{kind.__name__}.{name} is missing")
    return kind(**given)


def _reader(hint: Any) -> _Reader:
    """A function that checks and reads one value of type `hint`; its second argument names the place for errors."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return lambda value, where: value
    if origin is typing.Union:
        inner = _reader([a for a in typing.get_args(hint) if a is not type(None)][0])
        return lambda value, where: None if value is None else inner(value, where)
    if origin is tuple:
        item = _reader(typing.get_args(hint)[0])

        def read_tuple(value: Any, where: str) -> Any:
            if not isinstance(value, list):
                raise ProtocolError(f"{where}: a list was expected")
            return tuple([item(one, where) for one in value])

        return read_tuple
    if origin is dict:
        member = _reader(typing.get_args(hint)[1])

        def read_dict(value: Any, where: str) -> Any:
            if not isinstance(value, dict):
                raise ProtocolError(f"{where}: an object was expected")
            return {str(key): member(one, where) for key, one in value.items()}

        return read_dict
    if dataclasses.is_dataclass(hint):
        kind = typing.cast(type, hint)
        return lambda value, where: from_wire(kind, value)

    def read_plain(value: Any, where: str) -> Any:
        if type(value) is hint:
            return value
        if hint is float and type(value) is int:
            return float(value)
        raise ProtocolError(f"{where}: {hint.__name__} was expected, not {type(value).__name__}")

    return read_plain


def encode(message: Dict[str, Any]) -> bytes:
    """One frame, length and all.

    Raises:
        ProtocolError: the message is longer than MAX_FRAME_BYTES.
    """
    body = _ENCODER.encode(message).encode("utf-8", "replace")
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Messages out of bytes that come as they like."""

    def __init__(self) -> None:
        self._unread = bytearray()

    @property
    def torn(self) -> bool:
        """Whether part of a frame has come and the rest has not."""
        return bool(self._unread)

    def feed(self, data: bytes) -> Iterator[Dict[str, Any]]:
        """The messages that `data` completes.

        Raises:
            ProtocolError: too long, or not a JSON object; the rest of the stream is of no use.
        """
        self._unread += data
        while len(self._unread) >= _LENGTH.size:
            end = _LENGTH.size + _length(self._unread)
            if len(self._unread) < end:
                return
            body = bytes(self._unread[_LENGTH.size : end])
            del self._unread[:end]
            yield _message(body)


def _length(head: Union[bytes, bytearray]) -> int:
    length: int = _LENGTH.unpack_from(head)[0]
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes was announced, the limit is {MAX_FRAME_BYTES}")
    return length


def _message(body: bytes) -> Dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a whole JSON frame: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError("a frame must hold a JSON object")
    return message


async def read_frame(reader: asyncio.StreamReader) -> Optional[Dict[str, Any]]:
    """The next message, or None when the peer closed between two frames.

    Raises:
        ProtocolError: torn, too long, or not a JSON object.
    """
    try:
        head = await reader.readexactly(_LENGTH.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ProtocolError("the connection ended inside a frame") from error
        return None
    length = _length(head)
    try:
        return _message(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        raise ProtocolError(f"not a whole JSON frame: {error}") from error


def request(request_id: int, op: str, args: Any) -> bytes:
    """A request frame."""
    return encode({"id": request_id, "op": op, "args": to_wire(args)})


def reply(request_id: int, result: Any) -> bytes:
    """The frame that answers request `request_id`."""
    return encode({"re": request_id, "ok": True, "result": to_wire(result)})


def refusal(request_id: int, error: Refused) -> bytes:
    """The frame that refuses request `request_id`."""
    return encode(
        {"re": request_id, "ok": False, "code": error.code, "message": error.message, "detail": to_wire(error.detail)}
    )


def report(seq: int, name: str, body: Any) -> bytes:
    """A report frame; hostd repeats it after a reconnect until the server has acknowledged `seq`."""
    return encode({"report": name, "seq": seq, "body": to_wire(body)})


def telemetry(name: str, body: Any) -> bytes:
    """A telemetry frame; it may be dropped."""
    return encode({"telemetry": name, "body": to_wire(body)})


def slots_of(value: Any) -> List[SlotRef]:
    """Read a list of slots from a request's arguments."""
    if not isinstance(value, list):
        raise Refused("bad_request", "slots: a list was expected")
    return [from_wire(SlotRef, item) for item in value]
