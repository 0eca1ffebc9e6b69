"""The link to one hostd: connect, say hello, ask and answer, take reports, come back after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from cotenant.hostd import protocol
from cotenant.hostd.protocol import (
    AttemptReport,
    CardState,
    CleanCheck,
    Hello,
    HostFacts,
    LogPage,
    Progress,
    SlotRef,
    StartSpec,
    Welcome,
)
from cotenant.server.backends.base import HostEvents, HostRefused
from cotenant.server.errors import CotenantError, OutcomeUnknown, Unreachable

T = TypeVar("T")
log = logging.getLogger(__name__)

#: A request that is not answered within this has an unknown outcome; the longest work hostd does for an answer is an
#: NVML deadline of a few seconds.
REPLY_TIMEOUT_S: Final = 20.0
HELLO_TIMEOUT_S: Final = 15.0
#: How often a host is asked whether it is still there, and how long it has to say so: a connection can stay open to a
#: process that hangs. hostd answers at once, whatever its driver does.
BEAT_S: Final = 10.0
#: How long after a report could not be taken the connection is made anew, so that the host tells everything again.
TELL_AGAIN_S: Final = 5.0

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class _Unsuited(Exception):
    """The hostd that answered is not the one that is wanted."""

    def __init__(self, replace: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.replace = replace


class HostLink:
    """A `Host` over any stream that reaches a hostd. `run` keeps it up until cancelled."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        hello: Callable[[], Hello],
        events: HostEvents,
        back_off_s: tuple[float, ...],
        *,
        beat_s: float = BEAT_S,
        tell_again_s: float = TELL_AGAIN_S,
        unsuited: Callable[[Welcome], Callable[[], Awaitable[None]] | None] | None = None,
    ) -> None:
        self.name = name
        self._connect = connect
        self._hello = hello
        self._events = events
        self._back_off_s = back_off_s
        self._beat_s = beat_s
        self._tell_again_s = tell_again_s
        self._unsuited = (
            unsuited  # what is to be done before another hostd can take the place of this one; None: it suits
        )
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self._retry = asyncio.Event()
        self._early: list[tuple[str, int, dict[str, Any]]] | None = []  # reports before welcome was dealt with
        self.welcomed: Welcome | None = None
        self.tried = asyncio.Event()  # the first try has come to something: a welcome, a refusal, or no connection

    # ---- staying connected

    async def run(self) -> None:
        """Connect, and connect again; back off after each failure in a row."""
        failures = 0
        while True:
            reason = "the connection ended"
            try:
                reader, writer = await self._connect()
            except (OSError, TimeoutError) as error:
                reason = f"cannot connect: {error}"
            else:
                try:
                    if await self._serve(reader, writer):
                        failures = 0
                except _Unsuited as unsuited:
                    self._drop(writer)
                    await unsuited.replace()
                    continue
                except (OSError, EOFError, TimeoutError, protocol.ProtocolError, CotenantError) as error:
                    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                except Exception as error:
                    # a mistake of ours in settling one hello must not leave the host without a link for ever
                    log.exception("the link to host %s failed", self.name)
                    reason = f"the server failed: {type(error).__name__}"
                finally:
                    self._drop(writer)
            await self._events.lost(self.name, reason)
            self.tried.set()
            delay = self._back_off_s[min(failures, len(self._back_off_s) - 1)]
            failures += 1
            self._retry.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._retry.wait(), delay)

    def retry_now(self) -> None:
        """Do not sit out the back-off."""
        self._retry.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One connection from hello to its end. False when the host refuses this server, or leaves before its welcome."""
        self._writer = writer
        self._early = []
        listen = asyncio.create_task(self._listen(reader), name=f"link {self.name}")
        settle = asyncio.create_task(self._settle(), name=f"settle {self.name}")
        tasks: list[asyncio.Task[Any]] = [settle, listen]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not settle.done():
                listen.result()  # it ended before it had answered: no better than no connection
                return False
            if not settle.result():
                return False
            tasks.append(asyncio.create_task(self._beat(), name=f"beat {self.name}"))
            for ended in (await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED))[0]:
                ended.result()
            return True
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _settle(self) -> bool:
        try:
            welcome = protocol.from_wire(Welcome, await self._call("hello", self._hello(), HELLO_TIMEOUT_S))
        except HostRefused as error:
            await self._events.refused(self.name, error.code, error.message, error.data)
            return False
        if self._unsuited is not None and (replace := self._unsuited(welcome)) is not None:
            raise _Unsuited(replace)
        self.welcomed = welcome
        await self._events.welcome(self, welcome)
        self.tried.set()
        # what was reported meanwhile is counted from the state that welcome has set
        early, self._early = self._early or [], None
        for name, seq, body in early:
            self._take(name, seq, body)
        return True

    async def _beat(self) -> None:
        """Ask again and again whether the host is there; raises OutcomeUnknown when it does not say so in time."""
        number = 0
        while True:
            await asyncio.sleep(self._beat_s)
            number += 1
            await self._call("beat", {"n": number}, self._beat_s)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while (message := await protocol.read_frame(reader)) is not None:
            if "re" in message:
                future = self._waiting.pop(message["re"], None)
                if future is None or future.done():
                    continue
                if message.get("ok"):
                    future.set_result(message.get("result"))
                else:
                    future.set_exception(
                        HostRefused(
                            str(message.get("message", "")),
                            code=str(message.get("code", "refused")),
                            data=dict(message.get("detail") or {}),
                        )
                    )
            elif "report" in message:
                report = (str(message["report"]), int(message["seq"]), message.get("body") or {})
                if self._early is not None:
                    self._early.append(report)
                else:
                    self._take(*report)
            elif "telemetry" in message:
                self._events.telemetry(self.name, str(message["telemetry"]), message.get("body") or {})

    def _take(self, name: str, seq: int, body: dict[str, Any]) -> None:
        taken = self._events.report(self.name, name, seq, body)
        taken.add_done_callback(lambda done: self._acknowledge(seq, done))

    def _acknowledge(self, seq: int, done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            # not acknowledged; what it told is told again with the next hello, so there has to be one
            log.error("report %d of %s was not taken", seq, self.name, exc_info=error)
            if self._writer is not None:
                asyncio.get_running_loop().call_later(self._tell_again_s, self._writer.close)
            return
        with contextlib.suppress(ConnectionError):  # it is told again after the next hello
            self._write(protocol.encode({"op": "ack", "args": {"seq": seq}}))

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writer = None
        writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(OutcomeUnknown(f'the link to host "{self.name}" broke before it answered'))
        self._waiting.clear()

    # ---- asking

    def _write(self, frame: bytes) -> asyncio.StreamWriter:
        """Put a frame on its way.

        Raises:
            ConnectionError: there is no connection any more; nothing of the frame was sent.
        """
        writer = self._writer
        if writer is None or writer.is_closing():
            raise ConnectionResetError("not connected")
        try:
            writer.write(frame)
        except RuntimeError as error:
            # uvloop's word for a transport whose end nobody has read yet
            raise ConnectionResetError(str(error)) from error
        return writer

    async def _call(self, op: str, args: Any, timeout_s: float = REPLY_TIMEOUT_S) -> Any:
        self._next_id += 1
        request_id = self._next_id
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            try:
                writer = self._write(protocol.request(request_id, op, args))
            except ConnectionError as error:
                raise Unreachable(
                    f'host "{self.name}" does not answer', hint="list_hosts shows why.", retry_after_s=10
                ) from error
            async with asyncio.timeout(timeout_s):
                await writer.drain()
                return await future
        except TimeoutError as error:
            raise OutcomeUnknown(f'host "{self.name}" did not answer {op} within {timeout_s:.0f} s') from error
        except ConnectionError as error:
            raise OutcomeUnknown(f'the link to host "{self.name}" broke during {op}') from error
        finally:
            self._waiting.pop(request_id, None)

    async def start(self, spec: StartSpec) -> AttemptReport:
        return protocol.from_wire(AttemptReport, await self._call("start", spec))

    async def prepare(self, spec: StartSpec) -> AttemptReport:
        return protocol.from_wire(AttemptReport, await self._call("prepare", spec))

    async def go(self, attempt_id: str) -> AttemptReport:
        return protocol.from_wire(AttemptReport, await self._call("go", {"attempt_id": attempt_id}))

    async def free_port(self, low: int, high: int, but: Sequence[int]) -> int | None:
        answer = await self._call("free_port", {"low": low, "high": high, "but": list(but)})
        return None if answer["port"] is None else int(answer["port"])

    async def stop(self, attempt_id: str, reason: str, grace_s: float) -> AttemptReport:
        answer = await self._call("stop", {"attempt_id": attempt_id, "reason": reason, "grace_s": grace_s})
        return protocol.from_wire(AttemptReport, answer)

    async def signal(self, attempt_id: str, signal: int) -> AttemptReport:
        return protocol.from_wire(
            AttemptReport, await self._call("signal", {"attempt_id": attempt_id, "signal": signal})
        )

    async def suspend(self, attempt_id: str, max_s: float) -> AttemptReport:
        return protocol.from_wire(
            AttemptReport, await self._call("suspend", {"attempt_id": attempt_id, "max_s": max_s})
        )

    async def resume(self, attempt_id: str) -> AttemptReport:
        return protocol.from_wire(AttemptReport, await self._call("resume", {"attempt_id": attempt_id}))

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
        return protocol.from_wire(Progress, await self._call("notice", args))

    async def probe(self, attempt_id: str) -> AttemptReport:
        return protocol.from_wire(AttemptReport, await self._call("probe", {"attempt_id": attempt_id}))

    async def hold(self, lease_id: str, fence: int, slots: Sequence[SlotRef]) -> CleanCheck:
        answer = await self._call("hold", {"lease_id": lease_id, "fence": fence, "slots": list(slots)})
        return protocol.from_wire(CleanCheck, answer)

    async def unhold(self, lease_id: str, slots: Sequence[SlotRef]) -> CleanCheck:
        answer = await self._call("unhold", {"lease_id": lease_id, "slots": list(slots)})
        return protocol.from_wire(CleanCheck, answer)

    async def check(self, slots: Sequence[SlotRef]) -> CleanCheck:
        return protocol.from_wire(CleanCheck, await self._call("check", {"slots": list(slots)}))

    async def look(self) -> tuple[tuple[CardState, ...], HostFacts]:
        answer = await self._call("cards", {})
        return read_cards(answer)

    async def read_log(
        self, attempt_id: str, stream: str, *, offset: int | None, tail_lines: int | None, max_bytes: int
    ) -> LogPage:
        args = {
            "attempt_id": attempt_id,
            "stream": stream,
            "offset": offset,
            "tail_lines": tail_lines,
            "max_bytes": max_bytes,
        }
        return protocol.from_wire(LogPage, await self._call("read_log", args))

    async def forget(self, attempt_ids: Sequence[str]) -> None:
        await self._call("forget", {"attempt_ids": list(attempt_ids)})

    async def set_floor(self, fence: int) -> bool:
        answer = await self._call("set_floor", {"fence": fence})
        return bool(answer.get("needs_floor"))


def read_cards(body: dict[str, Any]) -> tuple[tuple[CardState, ...], HostFacts]:
    """The content of a `cards` answer or telemetry."""
    cards = tuple(protocol.from_wire(CardState, card) for card in body.get("cards", ()))
    return cards, protocol.from_wire(HostFacts, body["facts"])
