"""The MCP SDK, as far as its parts are private or provisional: `mcp` is held to one minor version because of this file.

Everything else of the server talks to the functions and classes here. What is used and why:
- the low-level `Server` with its provisional middleware (the high-level one adds prefixes to our errors, ignores unknown
  arguments and hides what it lists behind its own registries);
- two `StreamableHTTPSessionManager`s over it, and the private table of sessions of one of them: a client of an older
  protocol that kept its session id over a restart of ours goes on, served without a session;
- the private connection behind a session, which outlives the request that subscribed, and its private table of streams:
  what is sent while the standing stream is not open is dropped, and once its buffer is full the session's own answers
  wait behind it, so nothing is sent then.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

import mcp_types as wire
from mcp.server import context as sdk_context
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.caching import CacheHint
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import GET_STREAM_KEY
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.subscriptions import SUBSCRIPTION_ID_META_KEY
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cotenant.server.mcp import sessions
from cotenant.server.mcp.call import NeedsAnswer, Reply
from cotenant.server.model import text
from cotenant.server.model.caller import Caller

log = logging.getLogger(__name__)

Context = sdk_context.ServerRequestContext[Any, Any]
Result = Mapping[str, Any]
CallNext: TypeAlias = sdk_context.CallNext
HandlerResult: TypeAlias = sdk_context.HandlerResult
Handler = Callable[[Context, Any], Awaitable[Any]]

#: Keys of the ASGI scope under which the bearer check leaves its findings.
CALLER = "cotenant.caller"
CALLER_NOW = "cotenant.caller_now"

_SESSION = b"mcp-session-id"
_VERSION = b"mcp-protocol-version"


#: JSON-RPC leaves this range to implementations; -32001 is what other servers use for a request that is refused.
REFUSED = -32001

#: One question per call at most, so one name for it is enough.
_QUESTION = "confirm"
_QUESTION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "confirm": {"type": "boolean", "title": "Yes, do it", "description": "Tick to go on", "default": False}
    },
    "required": ["confirm"],
}
_LIST_CHANGED: dict[str, Any] = {
    "resources": wire.ResourceListChangedNotification,
    "tools": wire.ToolListChangedNotification,
    "prompts": wire.PromptListChangedNotification,
}
#: How long an older client may take to answer before the call ends without an answer.
_ASK_S = 300.0
#: Of the 16 messages that the SDK keeps for a standing stream, how many may be ours: the rest is for questions.
_BUFFERED = 8


@dataclass(frozen=True)
class Handlers:
    """What is served; each takes the request's context and its typed parameters and returns the wire's result."""

    list_tools: Handler
    call_tool: Handler
    list_resources: Handler
    list_templates: Handler
    read_resource: Handler
    list_prompts: Handler
    get_prompt: Handler
    complete: Handler
    listen: Handler
    subscribe: Handler
    unsubscribe: Handler
    #: Methods of extensions: (method, model of its parameters, handler).
    more: Sequence[tuple[str, type[wire.RequestParams], Handler]] = ()


def _answered(handler: Handler) -> Handler:
    """A handler whose results say that they are whole, and whose bugs go to the log instead of to the client.

    2026-07-28 wants the word; older protocols drop it. On those the SDK would send an exception's text out.
    """

    async def handle(ctx: Context, params: Any) -> Any:
        try:
            result = await handler(ctx, params)
        except MCPError:
            raise
        except Exception:
            reference = secrets.token_hex(4)
            log.exception("%s failed (reference %s)", ctx.method, reference)
            raise MCPError(
                wire.INTERNAL_ERROR,
                f"internal_error: {ctx.method} failed inside the server; its log has it under {reference}.",
            ) from None
        return {"resultType": "complete", **result} if isinstance(result, dict) else result

    return handle


def make_server(
    *,
    version: str,
    instructions: str,
    handlers: Handlers,
    middleware: sdk_context.ServerMiddleware[Any],
    extensions: Sequence[str] = (),
    input_schema: Callable[[str], dict[str, Any] | None] = lambda name: None,
) -> Server[Any]:
    """The low-level server over our handlers. tools/list depends on the token, so caches must keep it private.

    `input_schema` is asked at every call with arguments which of them come in headers as well; ours never do.
    """
    lists = CacheHint(ttl_ms=60_000, scope="private")
    live = CacheHint(ttl_ms=0, scope="private")
    server: Server[Any] = Server(
        "cotenant",
        version=version,
        title="Cotenant",
        description="Shares GPUs among coding agents and people: leases, jobs, queues and why something waits.",
        instructions=instructions,
        cache_hints={
            "server/discover": CacheHint(ttl_ms=300_000, scope="public"),
            "tools/list": lists,
            "prompts/list": lists,
            "resources/templates/list": lists,
            "resources/list": live,
            "resources/read": live,
        },
        on_list_tools=_answered(handlers.list_tools),
        on_call_tool=_answered(handlers.call_tool),
        on_list_resources=_answered(handlers.list_resources),
        on_list_resource_templates=_answered(handlers.list_templates),
        on_read_resource=_answered(handlers.read_resource),
        on_list_prompts=_answered(handlers.list_prompts),
        on_get_prompt=_answered(handlers.get_prompt),
        on_completion=_answered(handlers.complete),
        on_subscriptions_listen=_answered(handlers.listen),
        on_subscribe_resource=_answered(handlers.subscribe),
        on_unsubscribe_resource=_answered(handlers.unsubscribe),
        # Without this the SDK lists all tools again for every call with arguments, to look for header parameters.
        get_tool_input_schema=input_schema,
    )
    server.extensions.update({name: {} for name in extensions})
    for method, kind, handler in handlers.more:
        server.add_request_handler(method, kind, _answered(handler))
    server.middleware.append(middleware)
    return server


# ---- who asks ---------------------------------------------------------------------------------


def user_of(caller: Caller) -> AuthenticatedUser:
    """The caller in the SDK's words: it binds older clients' sessions to their caller."""
    name = f"{caller.owner}/{caller.name}"
    return AuthenticatedUser(AccessToken(token="-", client_id=name, subject=name, scopes=sorted(caller.scopes)))


def caller_of(ctx: Context) -> Caller:
    """Who sent this request. Per request, also within a session."""
    caller: Caller = _request(ctx).scope[CALLER]
    return caller


def caller_now_of(ctx: Context) -> Callable[[], Caller | None]:
    """A function that looks the request's token up anew: None once it is revoked or expired."""
    now: Callable[[], Caller | None] = _request(ctx).scope[CALLER_NOW]
    return now


def _request(ctx: Context) -> Request:
    request = ctx.request
    if not isinstance(request, Request):
        raise MCPError(wire.INTERNAL_ERROR, "No HTTP request is behind this message.")
    return request


def query_of(ctx: Context, key: str) -> str | None:
    """One parameter of the endpoint's address, such as tools in /mcp?tools=core."""
    return _request(ctx).query_params.get(key)


def client_of(ctx: Context) -> str | None:
    """The client program as it calls itself: name and version, for the list of agents."""
    params = ctx.session.client_params
    if params is None:
        return None
    return text.clean(f"{params.client_info.name} {params.client_info.version}", 80) or None


def place_of(ctx: Context) -> tuple[str | None, str | None]:
    """(machine, directory) where the agent sits, as the bridge (`cotenant mcp-stdio`) tells it; None where nothing does."""
    headers = _request(ctx).headers
    host, cwd = (headers.get(f"cotenant-agent-{name}", "")[:4096] for name in ("host", "cwd"))
    return text.clean(unquote(host), 64) or None, text.clean(unquote(cwd), 240) or None


def modern(ctx: Context) -> bool:
    """Whether the request speaks 2026-07-28 or later."""
    return ctx.protocol_version in MODERN_PROTOCOL_VERSIONS


def error(code: int, message: str, data: Any = None) -> MCPError:
    """A JSON-RPC error, for misuse of the protocol only: models rarely see it."""
    return MCPError(code, message, data)


# ---- extensions ---------------------------------------------------------------------------------


def declares(ctx: Context, extension: str) -> bool:
    """Whether this very request says that its client understands the extension; older protocols cannot carry one."""
    capabilities = ctx.session.client_capabilities
    return modern(ctx) and capabilities is not None and extension in (capabilities.extensions or {})


def name_header(ctx: Context) -> str | None:
    """The header Mcp-Name, decoded; the SDK compares it itself, but only for methods that it knows."""
    return decode_header_value(_request(ctx).headers.get(MCP_NAME_HEADER))


# ---- asking and telling within a call ---------------------------------------------------------


class HttpPeer:
    """The client behind one tools/call; see `cotenant.server.mcp.call.Peer`."""

    def __init__(self, ctx: Context, params: wire.CallToolRequestParams) -> None:
        self._ctx = ctx
        self._params = params

    def can_ask(self) -> bool:
        capabilities = self._ctx.session.client_capabilities
        elicitation = capabilities.elicitation if capabilities else None
        # An empty object was the only shape before there were modes, and means forms.
        form = elicitation is not None and (elicitation.form is not None or elicitation.url is None)
        return form and (modern(self._ctx) or self._ctx.session.can_send_request)

    def declares(self, extension: str) -> bool:
        return declares(self._ctx, extension)

    async def ask(self, question: str, state: str) -> bool | None:
        if modern(self._ctx):
            raise NeedsAnswer(question, state)
        try:
            answer = await self._ctx.session.send_request(
                wire.ElicitRequest(
                    params=wire.ElicitRequestFormParams(message=question, requested_schema=_QUESTION_SCHEMA)
                ),
                wire.ElicitResult,
                request_read_timeout_seconds=_ASK_S,
                metadata=_related(self._ctx),
            )
        except (MCPError, ValidationError):
            return None
        return _yes(answer)

    def reply(self) -> Reply | None:
        answers, state = self._params.input_responses, self._params.request_state
        if state is None or not answers or _QUESTION not in answers:
            return None
        answer = answers[_QUESTION]
        return Reply(_yes(answer) if isinstance(answer, wire.ElicitResult) else None, state)

    async def progress(self, done: float, total: float | None, message: str) -> None:
        await self._ctx.session.report_progress(done, total, message)


def _related(ctx: Context) -> ServerMessageMetadata:
    return ServerMessageMetadata(related_request_id=ctx.request_id)


def _yes(answer: wire.ElicitResult) -> bool | None:
    if answer.action == "cancel":
        return None
    return answer.action == "accept" and (answer.content or {}).get("confirm") is True


def question(asked: NeedsAnswer) -> dict[str, Any]:
    """The result that asks: the client calls again with the answer and the state."""
    request = wire.ElicitRequest(
        params=wire.ElicitRequestFormParams(message=asked.question, requested_schema=_QUESTION_SCHEMA)
    )
    return {
        "resultType": "input_required",
        "inputRequests": {_QUESTION: request.model_dump(by_alias=True, mode="json", exclude_none=True)},
        "requestState": asked.state,
    }


# ---- subscriptions ----------------------------------------------------------------------------


async def acknowledge(ctx: Context, honoured: wire.SubscriptionFilter) -> None:
    """The first frame of a listen stream: what will be told."""
    await ctx.session.send_notification(
        wire.SubscriptionsAcknowledgedNotification(
            params=wire.SubscriptionsAcknowledgedNotificationParams(notifications=honoured, _meta=_stamp(ctx))
        ),
        related_request_id=ctx.request_id,
    )


async def tell_updated(ctx: Context, uri: str) -> None:
    """On a listen stream: read this again."""
    await ctx.session.send_notification(
        wire.ResourceUpdatedNotification(params=wire.ResourceUpdatedNotificationParams(uri=uri, _meta=_stamp(ctx))),
        related_request_id=ctx.request_id,
    )


async def tell_list_changed(ctx: Context, what: str) -> None:
    """On a listen stream: other resources, tools or prompts exist now."""
    await ctx.session.send_notification(
        _LIST_CHANGED[what](params=wire.NotificationParams(_meta=_stamp(ctx))), related_request_id=ctx.request_id
    )


def listened(ctx: Context) -> wire.SubscriptionsListenResult:
    """The last frame of a listen stream that ends in good order."""
    return wire.SubscriptionsListenResult(_meta=_stamp(ctx))


def _stamp(ctx: Context) -> dict[str, Any]:
    return {SUBSCRIPTION_ID_META_KEY: ctx.request_id}


async def tell_session_updated(ctx: Context, uri: str) -> None:
    """To a session of an older client, on its standing stream; dropped where it has none open."""
    await ctx.session.send_resource_updated(uri)


def session_of(ctx: Context) -> str | None:
    """The id of an older client's session, which outlives the request; None where it is served without one."""
    return _request(ctx).headers.get("mcp-session-id")


def at_session_end(ctx: Context, callback: Callable[[], None]) -> None:
    """Call back when the session of an older client ends."""
    ctx.session._connection.exit_stack.callback(callback)


def watch_requests(
    allowed_hosts: list[str], allowed_origins: list[str], *, json_only: bool = True
) -> Callable[[Request], Awaitable[Response | None]]:
    """The SDK's checks of Host, Origin and (`json_only`) content type, for doors that it does not serve: a refusal, or None."""
    check = TransportSecurityMiddleware(
        TransportSecuritySettings(allowed_hosts=allowed_hosts, allowed_origins=allowed_origins)
    )

    async def refuse(request: Request) -> Response | None:
        return await check.validate_request(request, is_post=json_only and request.method == "POST")

    return refuse


# ---- HTTP -------------------------------------------------------------------------------------


class Endpoint:
    """The ASGI application at /mcp: both protocol eras, and older clients that kept a session id over a restart."""

    def __init__(
        self,
        server: Server[Any],
        *,
        allowed_hosts: list[str],
        allowed_origins: list[str],
        max_body: int,
        session_idle_s: float,
    ) -> None:
        security = TransportSecuritySettings(allowed_hosts=allowed_hosts, allowed_origins=allowed_origins)
        self._sessions = StreamableHTTPSessionManager(
            app=server, security_settings=security, max_request_body_size=max_body, session_idle_timeout=session_idle_s
        )
        self._sessionless = StreamableHTTPSessionManager(
            app=server, security_settings=security, max_request_body_size=max_body, stateless=True
        )
        self._ended = sessions.Ended()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Serve while inside."""
        async with self._sessions.run(), self._sessionless.run():
            yield

    def has_room(self, session_id: str) -> bool:
        """Whether a session's standing stream is open and its client keeps up with it."""
        transport = self._sessions._server_instances.get(session_id)
        stream = transport._request_streams.get(GET_STREAM_KEY) if transport is not None else None
        return stream is not None and stream[0].statistics().current_buffer_used < _BUFFERED

    def end_stream(self, session_id: str) -> None:
        """End the standing GET stream of a session, if it has one open."""
        if (transport := self._sessions._server_instances.get(sessions.unmarked(session_id)[0])) is not None:
            transport.close_standalone_sse_stream()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # White space around a value is no part of it (RFC 9110, 5.5), and httptools leaves what stands behind.
        headers = [(key, value.strip(b" \t")) for key, value in scope["headers"]]
        scope = {**scope, "headers": headers}
        if not any(key == _VERSION and value.decode("latin-1") in MODERN_PROTOCOL_VERSIONS for key, value in headers):
            send = sessions.worded(send)
        given = next((value for key, value in headers if key == _SESSION), b"").decode("latin-1")
        if not given:
            anew = False
            if scope["method"] == "POST" and not any(key == _VERSION for key, _ in headers):
                anew, receive = await sessions.opening(receive)
            await self._sessions.asgi_app(scope, receive, _marking(send) if anew else send)
            return
        session, anew = sessions.unmarked(given)
        rest = [(key, value) for key, value in headers if key != _SESSION]
        known = session in self._sessions._server_instances
        if known or anew or session in self._ended:
            scope = {**scope, "headers": [*rest, (_SESSION, session.encode("latin-1"))]}
            await self._sessions.asgi_app(scope, receive, _marking(send) if anew else send)
            if known and scope["method"] == "DELETE" and session not in self._sessions._server_instances:
                self._ended.add(session)
            return
        # A session of before a restart, or one that ran out: served as far as that goes without one, which is without
        # questions and without a standing stream.
        if scope["method"] != "POST":
            await Response(status_code=405, headers={"Allow": "POST"})(scope, receive, send)
            return
        await self._sessionless.asgi_app({**scope, "headers": rest}, receive, send)


def _marking(send: Send) -> Send:
    """Answers whose session id carries the mark of a client that starts anew."""

    async def marking(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [
                (key, sessions.marked(value.decode("latin-1")).encode("latin-1") if key.lower() == _SESSION else value)
                for key, value in message.get("headers", ())
            ]
            message = {**message, "headers": headers}
        await send(message)

    return marking
