"""The panel's doors: the page, its stream, logging in and out. Reads are views of the store, logins use cases of control."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cotenant.server.control.logins import SESSION_S, Session
from cotenant.server.errors import BadRequest, CotenantError, Forbidden
from cotenant.ui.panel import guard, pages
from cotenant.ui.panel.live import MAX_EACH, Live, TooManyStreams

if TYPE_CHECKING:
    from cotenant.server.control import Control

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
#: Checks the Host header as /mcp does; a refusal, or None.
CheckHost = Callable[[Request], Awaitable[Response | None]]
_CLIENT = "browser"


class Panel:
    """The page for people, as routes for the composition root. `close` ends its streams."""

    def __init__(self, control: Control, check_host: CheckHost, allowed_origins: tuple[str, ...]) -> None:
        self._control = control
        self._check_host = check_host
        self._allowed_origins = allowed_origins
        self._cookies = guard.Cookies(control.context.cluster_id)
        self._pages = pages.Pages()
        self._warm = False
        self.live = Live()

    def routes(self) -> list[Route]:
        return [
            Route("/", self._guarded(self._board), methods=["GET"]),
            Route("/board", self._guarded(self._fragment), methods=["GET"]),
            Route("/live", self._guarded(self._stream), methods=["GET"]),
            Route("/login", self._guarded(self._login_form), methods=["GET"]),
            Route("/login", self._guarded(self._login), methods=["POST"]),
            Route("/login/{code}", self._guarded(self._login_link), methods=["GET"]),
            Route("/logout", self._guarded(self._logout), methods=["POST"]),
            Route("/static/{name}", self._guarded(self._static), methods=["GET"]),
        ]

    def close(self) -> None:
        self.live.close()

    # ---- the page -------------------------------------------------------------------------------

    async def _board(self, request: Request) -> Response:
        session = self._session(request)
        if session is None:
            return _see("login")
        return HTMLResponse(self._pages.board(await self._seen(session)))

    async def _fragment(self, request: Request) -> Response:
        session = self._session(request)
        if session is None:
            return PlainTextResponse("The session is over: log in again.", status_code=401)
        return HTMLResponse(self._pages.fragment(await self._seen(session)))

    async def _seen(self, session: Session) -> pages.BoardPage:
        self._control.auth.seen(session.caller, _CLIENT)
        overview = await self._control.views.overview(session.caller)
        return pages.board(overview, base="", form=self._control.logins.form_token(session.id))

    async def _stream(self, request: Request) -> Response:
        session = self._session(request)
        if session is None:
            return PlainTextResponse("The session is over: log in again.", status_code=401)
        cookie = request.cookies[self._cookies.session]
        return _StreamResponse(
            self.live, session.caller.name, lambda: self._control.logins.session_of(cookie) is not None
        )

    async def _static(self, request: Request) -> Response:
        found = self._pages.static.get(request.path_params["name"])
        if found is None:
            return PlainTextResponse("There is no such file.", status_code=404)
        keep = request.query_params.get("v") == found.digest
        headers = {"Cache-Control": "public, max-age=31536000, immutable" if keep else "no-cache"}
        return Response(found.content, media_type=found.media_type, headers=headers)

    # ---- in and out -----------------------------------------------------------------------------

    async def _login_form(self, request: Request) -> Response:
        if self._session(request) is not None:
            return _see("./")
        return self._visit(request, lambda form: pages.LoginPage("", form))

    async def _login_link(self, request: Request) -> Response:
        """Shows a button and uses nothing up: what looks at links in mails and chats before people do must not log in."""
        code = request.path_params["code"]
        if self._control.logins.usable(code):
            return self._visit(request, lambda form: pages.LoginPage("../", form, code=code))
        if self._session(request) is not None:
            return _see("../")
        trouble, hint = "This link was used already, or is too old.", "cotenant login-link prints a new one."
        return self._visit(request, lambda form: pages.LoginPage("../", form, trouble=trouble, hint=hint), status=403)

    async def _login(self, request: Request) -> Response:
        fields = await guard.form_of(request)
        visit = request.cookies.get(self._cookies.visit, "")
        try:
            if not visit or not self._control.logins.form_is_ours(visit, fields.get("form", "")):
                raise Forbidden(
                    "the form is too old, or your browser keeps no cookies",
                    hint="Try again; if it does not help, allow cookies for this address.",
                    code="form_unusable",
                )
            if code := fields.get("code"):
                session = await self._control.logins.by_link(code)
            elif token := fields.get("token", "").strip():
                session = await self._control.logins.by_token(token)
            else:
                raise BadRequest("there is no token in the form", hint="Paste one.", code="no_token")
        except CotenantError as error:
            trouble, hint = _sentence(error.message), error.hint.replace("`", "")
            return self._visit(
                request,
                lambda form: pages.LoginPage("", form, trouble=trouble, hint=hint),
                status=400 if isinstance(error, BadRequest) else 403,
            )
        if (old := self._session(request)) is not None:
            await self._control.logins.leave(old)
        response = _see("./")
        self._cookies.give(response, request, self._cookies.session, self._control.logins.cookie_of(session), SESSION_S)
        self._cookies.take(response, request, self._cookies.visit)
        return response

    async def _logout(self, request: Request) -> Response:
        session = self._session(request)
        fields = await guard.form_of(request)
        if session is not None:
            if not self._control.logins.form_is_ours(session.id, fields.get("form", "")):
                raise Forbidden("the form is of another session; you are still logged in", code="form_unusable")
            await self._control.logins.leave(session)
        response = _see("login")
        self._cookies.take(response, request, self._cookies.session)
        return response

    def _visit(self, request: Request, page: Callable[[str], pages.LoginPage], *, status: int = 200) -> Response:
        """A page with a form for somebody who is not logged in: the form is bound to a mark that only this browser has."""
        mark = request.cookies.get(self._cookies.visit, "")
        if not (len(mark) == 32 and mark.isalnum()):
            mark = secrets.token_hex(16)
        html = self._pages.login(page(self._control.logins.form_token(mark)))
        response = HTMLResponse(html, status_code=status)
        self._cookies.give(response, request, self._cookies.visit, mark, guard.VISIT_S)
        return response

    def _session(self, request: Request) -> Session | None:
        cookie = request.cookies.get(self._cookies.session, "")
        return self._control.logins.session_of(cookie) if cookie else None

    # ---- before and after each ------------------------------------------------------------------

    def _guarded(self, handler: Handler) -> Handler:
        """Checks whose page asks, answers errors as pages, and shuts every answer in."""

        async def guarded(request: Request) -> Response:
            if not self._warm:
                await asyncio.to_thread(self._pages.warm)
                self._warm = True
            try:
                refused = await self._check_host(guard.without_origin(request))
                if refused is None:
                    guard.check_origin(request, self._allowed_origins)
                    response = await handler(request)
                else:
                    response = refused
            except CotenantError as error:
                status = 400 if isinstance(error, BadRequest) else 403 if isinstance(error, Forbidden) else 503
                response = self._trouble(
                    request, "That did not work", f"{_sentence(error.message)} {error.hint}", status
                )
            except Exception:
                reference = secrets.token_hex(4)
                log.exception("the page failed (reference %s)", reference)
                what = f"The server failed. Its log has more under the reference {reference}."
                response = self._trouble(request, "A mistake of ours", what, 500)
            for name, value in guard.HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return guarded

    def _trouble(self, request: Request, title: str, what: str, status: int) -> Response:
        base = "../" * (request.url.path.count("/") - 1)
        return HTMLResponse(self._pages.trouble(base, title, what.strip()), status_code=status)


class _StreamResponse(Response):
    """The stream as a response. Counted from its first byte to its last, whatever ends it."""

    def __init__(self, live: Live, caller: str, living: Callable[[], bool]) -> None:
        super().__init__(None, media_type="text/event-stream")
        self._live = live
        self._caller = caller
        self._living = living

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value for name, value in self.headers.items() if name != "content-length"}
        try:
            with self._live.reading(self._caller) as stream:
                await stream.serve(scope, receive, send, self._living, {**headers, "X-Accel-Buffering": "no"})
        except TooManyStreams:
            text = f"At most {MAX_EACH} streams for one person: close another tab. The page goes on without."
            too_many = PlainTextResponse(text, status_code=429, headers={**guard.HEADERS, "Retry-After": "15"})
            await too_many(scope, receive, send)


def _see(where: str) -> RedirectResponse:
    """Go there with a GET. Relative, so that the panel also works under a path of a proxy."""
    return RedirectResponse(where, status_code=303)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
