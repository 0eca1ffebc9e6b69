"""hostd's socket: who may speak, what they say, and the reports that must not be lost.

Owns connections: peer check, hello, one control connection at a time, dispatch, reports, telemetry, and the pace at
which the host looks at itself. Must not know: how anything is done (host.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
import sys
import traceback
from typing import Any, Awaitable, Callable, Dict, Optional, Set

from cotenant.hostd import protocol
from cotenant.hostd.host import Host
from cotenant.hostd.outbox import Outbox
from cotenant.hostd.protocol import Hello, ProtocolError, Refused, StartSpec, from_wire, slots_of
from cotenant.hostd.state import StateError, check_private_directory

#: How often logs are capped and stuck stops noticed, while attempts live.
TEND_S = 5.0
#: How often a connected server hears of load, memory and disk.
FACTS_S = 15.0
#: Seconds between two looks at whether logs grew; who follows one waits at most this long.
LOGS_S = 0.5
#: Seconds between two times at which the signs of work of living attempts are gathered.
WATCH_S = 0.5
#: How soon after an answer the pace is looked at anew: something may have been leased.
PACE_AGAIN_S = 0.05
#: Telemetry is dropped while this much waits to be sent.
TELEMETRY_BACKLOG_BYTES = 1024 * 1024


class Connection(asyncio.Protocol):
    """One peer on the socket. Not a pair of streams: those cost three times as much for each message."""

    def __init__(self, daemon: Daemon) -> None:
        self.greeted = False
        self.superseded = False
        self.tasks: Set[asyncio.Task[None]] = set()
        self._daemon = daemon
        self._frames = protocol.Frames()
        self._transport: Optional[asyncio.Transport] = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if _peer_may(transport):
            self._daemon.connected(self)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._daemon.take(self, message)
        except ProtocolError as error:
            print(f"a connection ended: {error}", file=sys.stderr, flush=True)
            self.close()

    def connection_lost(self, error: Optional[Exception]) -> None:
        if self._frames.torn:
            print("a connection ended: inside a frame", file=sys.stderr, flush=True)
        self._daemon.disconnected(self)

    def send(self, frame: bytes) -> None:
        """Queue a frame; a peer that is gone loses it."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    @property
    def backlog(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def close(self) -> None:
        """End it; nothing more is read."""
        if self._transport is not None:
            self._transport.close()


class Daemon:
    """Serves one Host on one unix socket."""

    def __init__(self, socket_path: str, outbox: Outbox) -> None:
        self._path = socket_path
        self._outbox = outbox
        self._host: Optional[Host] = None
        self.ended = asyncio.Event()  # set when this process shall end
        self._control: Optional[Connection] = None
        self._server: Optional[asyncio.AbstractServer] = None
        self._pace: Optional[asyncio.Task[None]] = None
        self._wake = asyncio.Event()
        self._waking: Optional[asyncio.TimerHandle] = None
        self._connections: Set[Connection] = set()
        self._operations: Dict[str, Callable[[Dict[str, Any]], Awaitable[Any]]] = {}

    # ---- life

    async def open(self, host: Host) -> None:
        """Listen. The socket is 0600, in a directory that is ours alone.

        Raises:
            StateError: the directory is not ours alone, or the path is too long or in use.
        """
        self._host = host
        self._operations = _operations(host)
        directory = os.path.dirname(os.path.abspath(self._path))  # noqa: ASYNC240 (once, before anything is served)
        check_private_directory(directory)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self._path).st_mode):
                raise StateError(f"{self._path} is not a socket; give --socket another path")
            # A dead hostd leaves its socket behind; a living one on this state directory was excluded by its lock.
            if _answers(self._path):
                raise StateError(f"another process serves {self._path}; give --socket another path")
            os.unlink(self._path)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(lambda: Connection(self), self._path)
        except OSError as error:
            raise StateError(f"{self._path} cannot be listened on: {error}") from error
        finally:
            os.umask(before)
        self._pace = asyncio.get_running_loop().create_task(self._keep_pace())

    async def close(self) -> None:
        """Stop serving; attempts run on."""
        if self._pace is not None:
            self._pace.cancel()
            await asyncio.gather(self._pace, return_exceptions=True)
        if self._waking is not None:
            self._waking.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
            for task in list(connection.tasks):
                task.cancel()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    # ---- connections

    def connected(self, connection: Connection) -> None:
        """A peer that may speak is there."""
        self._connections.add(connection)

    def disconnected(self, connection: Connection) -> None:
        """It is gone; what it asked for goes on."""
        self._connections.discard(connection)
        if self._control is connection:
            self._control = None
            self._outbox.disconnect()

    def take(self, connection: Connection, message: Dict[str, Any]) -> None:
        """One message. Raises ProtocolError when the connection is of no more use."""
        op, args, number = message.get("op"), message.get("args", {}), message.get("id")
        if op == "ack":
            seq = args.get("seq") if isinstance(args, dict) else None
            if connection is self._control and isinstance(seq, int):
                acked = self._outbox.ack(seq)
                if acked is not None and self._host is not None:
                    with contextlib.suppress(Refused):
                        self._host.acked(*acked)
            return
        if not isinstance(number, int) or not isinstance(op, str) or not isinstance(args, dict):
            raise ProtocolError("a request has a number as id, a word as op, and an object as args")
        task = asyncio.get_running_loop().create_task(self._answer(connection, number, op, args))
        connection.tasks.add(task)
        task.add_done_callback(connection.tasks.discard)

    async def _answer(self, connection: Connection, number: int, op: str, args: Dict[str, Any]) -> None:
        try:
            if op == "hello":
                result = await self._hello(connection, from_wire(Hello, args))
            elif connection.superseded:
                raise Refused("superseded", "a newer connection of the control plane has taken over")
            elif not connection.greeted:
                raise Refused("not_greeted", "the first request on a connection must be hello")
            elif op == "beat":
                result = {"n": _number(args, "n")}
            else:
                operation = self._operations.get(op)
                if operation is None:
                    raise Refused("bad_request", f"op: {op!r} is not known to this hostd")
                result = await operation(args)
            frame = protocol.reply(number, result)
        except Refused as error:
            frame = protocol.refusal(number, error)
        except ProtocolError as error:
            frame = protocol.refusal(number, Refused("bad_request", str(error)))
        except OSError as error:
            traceback.print_exc()
            frame = protocol.refusal(number, Refused("storage", f"hostd could not do this: {error}"))
        except Exception as error:  # noqa: BLE001
            # A bug. The peer must not wait for ever, and the log must have it.
            traceback.print_exc()
            frame = protocol.refusal(number, Refused("bad_request", f"hostd failed: {error!r}"))
        connection.send(frame)
        if op == "hello" and self._control is connection:
            self._outbox.connect(connection.send)
        if self._waking is None:  # one look at the pace for all answers of a moment
            self._waking = asyncio.get_running_loop().call_later(PACE_AGAIN_S, self._wake_pace)

    def _wake_pace(self) -> None:
        self._waking = None
        self._wake.set()

    async def _hello(self, connection: Connection, hello: Hello) -> Any:
        if hello.protocol_min > protocol.PROTOCOL or hello.protocol < protocol.PROTOCOL:
            raise Refused(
                "protocol_unsupported",
                f"this hostd speaks protocol {protocol.PROTOCOL}, the server {hello.protocol_min} to {hello.protocol}",
                {"protocol": protocol.PROTOCOL},
            )
        assert self._host is not None
        welcome = await self._host.hello(hello)
        if self._control is not None and self._control is not connection:
            self._control.superseded = True
            self._outbox.disconnect()
        connection.greeted = True
        connection.superseded = False
        self._control = connection
        return welcome

    # ---- by itself

    async def _keep_pace(self) -> None:
        """Look at cards and logs as often as needed and no oftener; idle without cards costs nothing."""
        host, loop = self._host, asyncio.get_running_loop()
        assert host is not None
        looked = tended = told = listened = watched = loop.time()
        while True:
            now = loop.time()
            waits = []
            interval = host.cards.busy_interval_s if host.busy else host.cards.idle_interval_s
            if interval is not None:
                if now >= looked + interval:
                    looked = now
                    cards = await self._guarded(host.sample())
                    if host.cards.needs_new_process:
                        self.ended.set()
                    if cards is not None:
                        self._telemetry({"cards": cards, "facts": host.facts()})
                        told = now
                waits.append(looked + interval - now)
            if self._control is not None and host.attempts.living():
                if now >= listened + LOGS_S:
                    listened = now
                    if grown := host.grown_logs():
                        self._telemetry({"jobs": grown}, name="logs")
                waits.append(listened + LOGS_S - now)
            if host.attempts.living():
                if now >= watched + WATCH_S:
                    watched = now
                    if news := host.watching.tick():
                        self._telemetry({"attempts": news}, name="progress")
                waits.append(watched + WATCH_S - now)
            if len(host.attempts) and host.busy:
                if now >= tended + TEND_S:
                    tended = now
                    host.tend()
                waits.append(tended + TEND_S - now)
            if self._control is not None:
                if now >= told + FACTS_S:
                    told = now
                    self._telemetry({"cards": await host.seen(), "facts": host.facts()})
                waits.append(told + FACTS_S - now)
            self._wake.clear()
            # Not wait_for: before Python 3.12 it could swallow the cancellation that close() sends.
            timer = loop.call_later(max(0.05, min(waits)), self._wake.set) if waits else None
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    async def _guarded(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except Exception:  # noqa: BLE001 (a bug in one look must not end all looking)
            traceback.print_exc()
            return None

    def _telemetry(self, body: Any, name: str = "cards") -> None:
        control = self._control
        if control is not None and control.backlog < TELEMETRY_BACKLOG_BYTES:
            control.send(protocol.telemetry(name, body))


def _operations(host: Host) -> Dict[str, Callable[[Dict[str, Any]], Awaitable[Any]]]:
    """Each request's arguments, read and checked."""
    return {
        "set_floor": lambda a: host.set_floor(_number(a, "fence")),
        "start": lambda a: host.start(from_wire(StartSpec, a)),
        "prepare": lambda a: host.prepare(from_wire(StartSpec, a)),
        "go": lambda a: host.go(_text(a, "attempt_id")),
        "free_port": lambda a: host.free_port(_number(a, "low"), _number(a, "high"), _numbers(a, "but")),
        "stop": lambda a: host.stop(_text(a, "attempt_id"), _text(a, "reason"), _seconds(a, "grace_s")),
        "signal": lambda a: host.signal(_text(a, "attempt_id"), _number(a, "signal")),
        "suspend": lambda a: host.suspend(_text(a, "attempt_id"), _seconds(a, "max_s")),
        "resume": lambda a: host.resume(_text(a, "attempt_id")),
        "notice": lambda a: host.notice(
            _text(a, "attempt_id"),
            _text(a, "notice_id"),
            _what(a),
            _text(a, "why"),
            None if a.get("by_s") is None else _seconds(a, "by_s"),
            _maybe_number(a, "signal"),
        ),
        "probe": lambda a: host.probe(_text(a, "attempt_id")),
        "hold": lambda a: host.hold(_text(a, "lease_id"), _number(a, "fence"), slots_of(a.get("slots"))),
        "unhold": lambda a: host.unhold(_text(a, "lease_id"), None if a.get("slots") is None else slots_of(a["slots"])),
        "check": lambda a: host.check(slots_of(a.get("slots"))),
        "cards": lambda a: host.look(),
        "read_log": lambda a: host.read_log(
            _text(a, "attempt_id"),
            _text(a, "stream"),
            _maybe_number(a, "offset"),
            _maybe_number(a, "tail_lines"),
            _maybe_number(a, "max_bytes") or 256 * 1024,
        ),
        "forget": lambda a: host.forget(_texts(a, "attempt_ids")),
    }


def _what(args: Dict[str, Any]) -> str:
    what = _text(args, "what")
    if what not in ("save", "stop", "none"):
        raise Refused("bad_request", f"what: save, stop or none was expected, not {what!r}")
    return what


def _number(args: Dict[str, Any], name: str) -> int:
    value = args.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused("bad_request", f"{name}: a whole number was expected")
    return value


def _numbers(args: Dict[str, Any], name: str) -> "list[int]":
    value = args.get(name)
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        raise Refused("bad_request", f"{name}: a list of whole numbers was expected")
    return value


def _maybe_number(args: Dict[str, Any], name: str) -> Optional[int]:
    return None if args.get(name) is None else _number(args, name)


def _seconds(args: Dict[str, Any], name: str) -> float:
    value = args.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise Refused("bad_request", f"{name}: seconds from 0 on were expected")
    return float(value)


def _text(args: Dict[str, Any], name: str) -> str:
    value = args.get(name)
    if not isinstance(value, str):
        raise Refused("bad_request", f"{name}: a text was expected")
    return value


def _texts(args: Dict[str, Any], name: str) -> "list[str]":
    value = args.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Refused("bad_request", f"{name}: a list of texts was expected")
    return value


def _peer_may(transport: asyncio.BaseTransport) -> bool:
    """Only our own user and root may speak; the socket's mode says so too, but a mode can be changed."""
    peer: socket.socket = transport.get_extra_info("socket")
    _pid, uid, _gid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (0, os.geteuid())


def _answers(path: str) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
