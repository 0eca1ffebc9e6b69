"""Every frame of the client on its way to the server and back, through restarts of the server.

What may be sent twice is: reads by their method or their tool's annotations, writes under a request_id, which the
bridge adds where it is missing. Of everything else it is said that the outcome is unknown.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Protocol

from cotenant.ui.cli.bridge import frames
from cotenant.ui.cli.bridge.frames import Frame, Message
from cotenant.ui.cli.bridge.http import Answer
from cotenant.ui.cli.bridge.request import Request
from cotenant.ui.cli.bridge.session import Session, pause
from cotenant.ui.cli.bridge.upstream import Catalog, Upstream, messages
from cotenant.ui.cli.problems import NoServer, Torn

#: A client gives its own greeting up after 10 to 30 s; it should hear the reason before.
HELLO_PATIENCE_S = 8.0
#: A cancelled request is never answered; its stream is given up if the server keeps it.
_CANCELLED_S = 10.0
_GREETINGS = frozenset({"initialize", "server/discover"})
_LOST = 404
#: A request whose answer breaks off this often may be what ends the server.
_MOST_TORN = 4
#: A connection that lasted this long says that the server is well; the next try need not wait.
_STOOD_S = 5.0
#: Requests at the server at one time, subscriptions not counted; more wait.
_MOST_AT_ONCE = 128


class Out(Protocol):
    async def send(self, line: bytes) -> None: ...


class _Again(Exception):
    """The server did nothing and may do it in a moment: it is going down, or the session has to be opened first."""


class Relay:
    """One client. `patience_s` is how long a request waits for a server that does not answer."""

    def __init__(self, upstream: Upstream, out: Out, say: Callable[[str], None], *, patience_s: float) -> None:
        self._upstream = upstream
        self._out = out
        self._say = say
        self._patience_s = patience_s
        self.catalog = Catalog(upstream)
        self.session = Session(upstream, self._from_server, say)
        self._requests: dict[str, Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Questions of the server: the id that the client saw -> (session, the server's own id).
        self._questions: dict[str, tuple[int, Any]] = {}
        self._notices: asyncio.Task[None] | None = None
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)

    # ---- from the client --------------------------------------------------------------------------

    async def take(self, line: bytes) -> None:
        """One line of the client; comes back at once but for what has to keep its order."""
        try:
            frame = frames.parse(line)
        except frames.BadFrame as bad:
            await self._out.send(frames.dumps(bad.answer))
            return
        if frame.kind == "request":
            if frame.key in self._requests:
                told = frames.error(frame.ident, frames.INVALID_REQUEST, "A request with this id is still open.")
                await self._out.send(frames.dumps(told))
                return
            request = self._requests[frame.key] = Request(frame)
            request.task = self._run(self._serve(request, self._notices))
        elif frame.kind == "notification":
            if frame.method == "notifications/cancelled":
                self._cancel(frame)
            elif frame.version is None:
                self._notices = self._run(self._notify(frame, self._notices))
            else:
                self._run(self._notify(frame, None))
        else:
            self._run(self._reply(frame))

    def _run(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _cancel(self, frame: Frame) -> None:
        request = self._requests.get(frames.key_of(frame.params.get("requestId")))
        if request is None or request.task is None:
            return
        request.cancelled = True
        if request.frame.version is not None or not request.sent:
            request.task.cancel()  # 2026-07-28 cancels by ending the connection
            return
        self._run(self._notify(frame, self._notices))
        asyncio.get_running_loop().call_later(_CANCELLED_S, request.task.cancel)

    async def _notify(self, frame: Frame, before: asyncio.Task[None] | None) -> None:
        """Pass a notification on, in the order in which the client sent them."""
        if before is not None:
            await asyncio.wait({before})
        deadline, tries = self._now() + self._patience_s, 0
        while True:
            try:
                if frame.method != "notifications/initialized" and frame.version is None:
                    await self._ready(deadline - self._now())
                headers = frame.headers() if frame.version else self.session.headers()
                async with self._upstream.request("POST", headers, frame.raw) as answer:
                    await answer.body()
                break
            except NoServer as exc:
                if self._now() > deadline:
                    self._say(f"a notification was dropped: {exc.text}")
                    return
                await asyncio.sleep(pause(tries))
                tries += 1
            except Torn:
                break
        if frame.method == "notifications/initialized":
            self.session.begin()

    async def _reply(self, frame: Frame) -> None:
        """The client's answer to a question of the server; one to a session that is gone has nobody to go to."""
        number, ident = self._questions.pop(frame.key, (0, None))
        if number != self.session.number:
            return
        raw = frame.raw if ident == frame.ident else frames.dumps({**frame.message, "id": ident})
        try:
            async with self._upstream.request("POST", self.session.headers(), raw) as answer:
                await answer.body()
        except (NoServer, Torn) as exc:
            self._say(f"an answer did not reach the server: {exc.text}")

    # ---- one request ------------------------------------------------------------------------------

    async def _serve(self, request: Request, before: asyncio.Task[None] | None) -> None:
        frame = request.frame
        try:
            if before is not None:
                await asyncio.wait({before})
            answer = await self._carry(request)
            if answer is not None and not request.cancelled:
                await self._out.send(answer)
        except Exception as exc:  # noqa: BLE001 (a fault of ours: whoever asked must not wait for ever)
            self._say(f"{frame.method} failed in the bridge: {type(exc).__name__}: {exc}")
            told = "The bridge itself failed; whether it took effect is not known."
            await self._out.send(self._failed(request, "bridge_failed", told, outcome="unknown"))
        finally:
            self._requests.pop(frame.key, None)
            await self._withdraw(request)

    async def _withdraw(self, request: Request) -> None:
        """What a call asked is over with it: an open dialog would answer to nobody."""
        for key, shown in request.questions.items():
            if self._questions.pop(key, None) is not None:
                params = {"requestId": shown, "reason": "the call that asked has ended"}
                await self._out.send(frames.dumps(frames.notification("notifications/cancelled", params)))
        request.questions.clear()

    async def _carry(self, request: Request) -> bytes | None:
        """The answer to a request as one line; None where the server ended it without one after a cancellation."""
        await self._prepare(request)
        frame = request.frame
        patience = min(HELLO_PATIENCE_S, self._patience_s) if frame.method in _GREETINGS else self._patience_s
        deadline: float | None = None
        tries = torn = 0
        while True:
            began = self._now()
            try:
                if frame.version is None and frame.method != "initialize":
                    await self._ready(patience if deadline is None else deadline - began)
                if request.listening is not None or frame.method == "subscriptions/listen":
                    return await self._once(request)
                async with self._places:
                    return await self._once(request)
            except (NoServer, _Again) as exc:
                deadline = deadline or began + patience
                if request.listening is None and self._now() > deadline:
                    return self._gone(request, exc)
            except Torn as exc:
                if request.cancelled:
                    return None
                self.catalog.forget()
                await self._withdraw(request)
                torn += request.listening is None
                if not request.repeatable or torn > _MOST_TORN:
                    return self._unknown(request, exc)
                request.again()
                deadline = None
                tries = 0 if self._now() - began > _STOOD_S else tries
            await asyncio.sleep(pause(tries))
            tries += 1

    async def _prepare(self, request: Request) -> None:
        """Find out whether the request may be sent twice, and see to it that it may."""
        frame = request.frame
        request.repeatable = frame.read_only
        if frame.tool is None or frame.arguments is None:
            return
        repeatable, takes_id = await self.catalog.look(frame.tool)
        if takes_id:
            if frame.arguments.get("request_id") is None:
                request.frame = frame.with_argument("request_id", f"bridge-{os.urandom(12).hex()}")
            repeatable = True
        request.repeatable = repeatable

    async def _ready(self, within_s: float) -> None:
        """Wait until the session stands. Raises NoServer where it does not within `within_s`."""
        if self.session.ready.is_set():
            return
        try:
            async with asyncio.timeout(max(within_s, 0.01)):
                await self.session.ready.wait()
        except TimeoutError:
            raise NoServer(f"No server answers at {self._upstream.url}.") from None

    async def _once(self, request: Request) -> bytes | None:
        """Send the request once and pass on what comes; its answer.

        Raises:
            NoServer, Torn, _Again: see `_carry`.
        """
        frame = request.frame
        within = frame.version is None and frame.method != "initialize"
        headers = frame.headers() if frame.version else self.session.headers() if within else {}
        session = self.session.number
        async with self._upstream.request("POST", headers, frame.raw, fresh=not request.repeatable) as answer:
            request.sent = True
            if answer.status == 503:
                raise _Again(f"The server at {self._upstream.url} cannot answer now.")
            lost = answer.status == _LOST and "Mcp-Session-Id" in headers
            if lost and (session != self.session.number or self.session.lost()):
                raise _Again(f"The server at {self._upstream.url} did not open a new session.")
            if answer.status >= 300:
                return await self._refused(request, answer)
            async for data, message in messages(answer):
                if "method" in message:
                    await self._told(request, data, message, session)
                elif frames.key_of(message.get("id")) == frame.key:
                    if (done := self._answered(request, data, message, answer)) is not None:
                        return done
                    break
            raise Torn(f"The answer of {self._upstream.url} ended before its result.")

    def _answered(self, request: Request, data: bytes, message: Message, answer: Answer) -> bytes | None:
        """The line for the client, or None where the bridge goes on by itself: a subscription outlives its server."""
        frame = request.frame
        if "result" in message:
            if request.listening is not None:
                return None
            if frame.method == "initialize":
                self.session.opened(frame.params, message["result"], answer.headers)
            elif frame.version is None:
                self.session.note(frame)
        elif request.gap and (message.get("error") or {}).get("code") == -32603:
            return None  # it is going down, or not quite up
        return data

    async def _told(self, request: Request, data: bytes, message: Message, session: int) -> None:
        """A message of the server on the stream of a request."""
        method = message["method"]
        if method == "notifications/subscriptions/acknowledged" and request.frame.method == "subscriptions/listen":
            first = request.listening is None
            if first:
                honoured = (message.get("params") or {}).get("notifications")
                request.listening = honoured if isinstance(honoured, dict) else {}
            elif request.gap:
                await self._missed(request)
            request.gap = False
            if not first:
                return
        elif method == "notifications/progress":
            data = request.progress(data, message)
        await self._from_server(data, message, session, request)

    async def _missed(self, request: Request) -> None:
        """Nobody repeats what was told while the stream was down: everything watched has to be read again."""
        honoured = request.listening or {}
        stamp = {"_meta": {frames.SUBSCRIPTION_KEY: request.frame.ident}}
        uris = honoured.get("resourceSubscriptions")
        for uri in uris if isinstance(uris, list) else ():
            told = frames.notification("notifications/resources/updated", {"uri": uri, **stamp})
            await self._out.send(frames.dumps(told))
        for kind in ("resources", "tools", "prompts"):
            if honoured.get(f"{kind}ListChanged"):
                told = frames.notification(f"notifications/{kind}/list_changed", stamp)
                await self._out.send(frames.dumps(told))

    # ---- from the server --------------------------------------------------------------------------

    async def _from_server(self, data: bytes, message: Message, session: int, request: Request | None = None) -> None:
        """Pass a notification or a question of the server on.

        A new session counts its questions from the begin. Under the same id, an answer that was meant for an old one
        would say yes to another question; so from the second session on they get ids of their own.
        """
        if "method" not in message:
            return
        if "id" in message:
            ident = message["id"]
            shown = ident if session <= 1 else f"{session}-{ident}"
            self._questions[frames.key_of(shown)] = (session, ident)
            if request is not None:
                request.questions[frames.key_of(shown)] = shown
            if shown is not ident:
                data = frames.dumps({**message, "id": shown})
        elif message["method"] == "notifications/cancelled" and isinstance(params := message.get("params"), dict):
            ident = params.get("requestId")
            shown = ident if session <= 1 else f"{session}-{ident}"
            self._questions.pop(frames.key_of(shown), None)
            data = frames.dumps({**message, "params": {**params, "requestId": shown}})
        await self._out.send(data)

    # ---- when it cannot be done -------------------------------------------------------------------

    async def _refused(self, request: Request, answer: Answer) -> bytes:
        """An HTTP error as the answer to a request: the server's own words where it has some."""
        said = None
        async for _, message in messages(answer):
            if isinstance(message.get("error"), dict):
                said = message["error"]
        if answer.status == 401:
            text = str((said or {}).get("message") or "the token is unknown, expired or revoked.")
            self._say(f"{self._upstream.url}: {text}")
            return self._failed(request, "unauthorized", text.removeprefix("unauthorized: "))
        if said is not None:
            return frames.dumps({"jsonrpc": "2.0", "id": request.frame.ident, "error": said})
        what = f"The server at {self._upstream.url} answered HTTP {answer.status}."
        return self._failed(request, f"http_{answer.status}", f"{what} Is the address that of a Cotenant server?")

    def _gone(self, request: Request, exc: NoServer | _Again) -> bytes:
        if request.torn and request.frame.tool is not None:
            return self._unknown(request, exc)
        self._say(str(exc))
        if isinstance(exc, _Again):
            return self._failed(request, "unavailable", f"{exc} Nothing was done. Try again later.")
        what = f"{exc} Nothing was done. Start it with `cotenant serve` on its machine, then try again."
        return self._failed(request, "no_server", what)

    def _unknown(self, request: Request, exc: NoServer | Torn | _Again) -> bytes:
        what = f"The connection broke after {request.frame.tool or request.frame.method} was sent. {exc}"
        self._say(what)
        hint = "It may have been done: look at the state with a list or get tool before you repeat it."
        return self._failed(request, "outcome_unknown", f"{what} {hint}", outcome="unknown")

    @staticmethod
    def _failed(request: Request, code: str, text: str, **data: Any) -> bytes:
        return frames.dumps(frames.failure(request.frame, code, text, **data))

    # ---- the end ----------------------------------------------------------------------------------

    async def settle(self, within_s: float) -> None:
        """The client will send nothing more: let what is under way get its answer, subscriptions left out."""
        short = {r.task for r in self._requests.values() if r.task is not None and r.listening is None}
        if short:
            await asyncio.wait(short, timeout=within_s)

    async def finish(self) -> None:
        """Give up whatever is under way, and the session."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.session.close()
        self._upstream.close()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
