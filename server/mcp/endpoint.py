"""What /mcp answers: tools, resources, prompts, completions and subscriptions, for both protocol eras.

This module decides what a caller gets to see and maps errors; what a tool does is in tools/, what a resource shows in
resources/. Those are handed in, because doors stand on the server and not the other way round.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import mcp_types as wire

from cotenant.server.errors import Busy, CotenantError, Forbidden, Unavailable
from cotenant.server.mcp import results, sdk
from cotenant.server.mcp.call import Call, NeedsAnswer
from cotenant.server.mcp.tasks import TASKS, BecameTask, TaskMethods, TaskSet, missing
from cotenant.server.mcp.tool import Tool
from cotenant.server.mcp.watching import TooManyWatchers, Watcher, Watching
from cotenant.server.model import text
from cotenant.server.model.addresses import LIST, PROMPTS_LIST, TOOLS_LIST
from cotenant.server.model.caller import Caller

if TYPE_CHECKING:
    from cotenant.server.control import Control

log = logging.getLogger(__name__)

#: A client of an older protocol that does not read its stream is given this long per notification, then later again.
_OLD_SEND_S = 5.0
_LISTS = {LIST: "resources", TOOLS_LIST: "tools", PROMPTS_LIST: "prompts"}
_NEED_READ = ("resources/", "prompts/", "completion/", "subscriptions/", "tasks/")


class ResourceSet(Protocol):
    """What resources/ provides."""

    def templates(self) -> list[dict[str, Any]]: ...
    def known(self, uri: str) -> bool: ...
    async def listing(
        self, control: Control, caller: Caller, cursor: str | None = None
    ) -> tuple[list[dict[str, Any]], str | None]: ...
    async def read(self, control: Control, caller: Caller, uri: str) -> Any: ...
    async def complete(
        self, control: Control, caller: Caller, name: str, begun: str, *, of: str = "", given: Mapping[str, str] = ...
    ) -> list[str]: ...


class PromptSet(Protocol):
    """What prompts/ provides."""

    def listing(self) -> list[dict[str, Any]]: ...
    def find(self, name: str, arguments: Mapping[str, str]) -> str | None: ...


class McpEndpoint:
    """The handlers behind /mcp. `stopping` is set when the server begins to shut down.

    `has_room` says whether a session of an older client can be told something now.
    """

    def __init__(
        self,
        control: Control,
        *,
        tools: Sequence[Tool],
        resources: ResourceSet,
        prompts: PromptSet,
        tasks: TaskSet,
        watching: Watching,
        stopping: asyncio.Event,
        has_room: Callable[[str], bool],
    ) -> None:
        self._control = control
        self._tools = {tool.name: tool for tool in tools}
        self._resources = resources
        self._prompts = prompts
        self._tasks = TaskMethods(tasks)
        self._watching = watching
        self._stopping = stopping
        self._has_room = has_room
        self._old_watchers: dict[str, Watcher] = {}
        self._writes: set[asyncio.Task[dict[str, Any]]] = set()
        self._listings: dict[tuple[bool, frozenset[str]], list[dict[str, Any]]] = {}

    def handlers(self) -> sdk.Handlers:
        return sdk.Handlers(
            list_tools=self.list_tools,
            call_tool=self.call_tool,
            list_resources=self.list_resources,
            list_templates=self.list_templates,
            read_resource=self.read_resource,
            list_prompts=self.list_prompts,
            get_prompt=self.get_prompt,
            complete=self.complete,
            listen=self.listen,
            subscribe=self.subscribe,
            unsubscribe=self.unsubscribe,
            more=self._tasks.methods,
        )

    # ---- scopes ---------------------------------------------------------------------------------

    async def gate(self, ctx: sdk.Context, call_next: sdk.CallNext) -> sdk.HandlerResult:
        """Middleware: what the token's scopes do not allow goes no further."""
        if ctx.request_id is None:
            return await call_next(ctx)
        if ctx.method == "tools/call":
            name = (ctx.params or {}).get("name")
            tool = self._tools.get(name) if isinstance(name, str) else None
            if tool is not None and (refused := _scope_refusal(sdk.caller_of(ctx), tool)) is not None:
                result = results.refusal(refused)
                return {**result, "resultType": "complete"} if sdk.modern(ctx) else result
        elif ctx.method.startswith(_NEED_READ) and "read" not in sdk.caller_of(ctx).scopes:
            raise sdk.error(wire.INVALID_REQUEST, f"forbidden: {ctx.method} needs a token with the scope read.")
        return await call_next(ctx)

    # ---- tools ----------------------------------------------------------------------------------

    async def list_tools(self, ctx: sdk.Context, params: Any) -> dict[str, Any]:
        """The tools that this token may use, of the toolset that it or the address names."""
        caller = sdk.caller_of(ctx)
        core = (sdk.query_of(ctx, "tools") or caller.toolset) == "core"
        key = (core, caller.scopes)
        if key not in self._listings:
            if len(self._listings) > 64:  # there are few combinations of scopes, so this never happens by itself
                self._listings.clear()
            self._listings[key] = [
                tool.core_listing if core else tool.listing
                for tool in self._tools.values()
                if (tool.core or not core) and _scope_refusal(caller, tool) is None
            ]
        return {"tools": self._listings[key]}

    async def call_tool(self, ctx: sdk.Context, params: wire.CallToolRequestParams) -> dict[str, Any]:
        """Do one call; whatever goes wrong inside is answered, never told."""
        tool = self._tools.get(params.name)
        if tool is None:
            near = difflib.get_close_matches(params.name[:64], list(self._tools), n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]}?" if near else " See tools/list."
            raise sdk.error(wire.INVALID_PARAMS, f"Unknown tool {text.quoted(params.name, 64)}.{hint}")
        caller = sdk.caller_of(ctx)
        self._control.auth.seen(caller, sdk.client_of(ctx), *sdk.place_of(ctx))
        call = Call(caller, self._control, sdk.HttpPeer(ctx, params), self._stopping)
        if tool.read_only:
            return await self._do(tool, call, params.arguments or {})
        # A client that goes away cancels its request. A write that has begun is brought to its end all the same: it has
        # several steps, and half of one would be left for somebody to clean up.
        work = asyncio.create_task(self._do(tool, call, params.arguments or {}))
        self._writes.add(work)
        work.add_done_callback(self._writes.discard)
        return await asyncio.shield(work)

    @staticmethod
    def became(call: BecameTask) -> dict[str, Any]:
        """The result of a call that goes on as a task."""
        return {"resultType": "task", **call.task.created()}

    async def finish(self, within_s: float) -> None:
        """Let writes whose clients have gone come to their end; what takes longer is cancelled."""
        if self._writes:
            await asyncio.wait(self._writes, timeout=within_s)
        for work in list(self._writes):
            work.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)

    async def _do(self, tool: Tool, call: Call, arguments: dict[str, Any]) -> dict[str, Any]:
        """One call as its result; never raises but when it is cancelled."""
        try:
            return results.success(await tool.function(call, **tool.parse(arguments)))
        except NeedsAnswer as asked:
            return sdk.question(asked)
        except BecameTask as became:
            return self.became(became)
        except CotenantError as exc:
            return results.refusal(exc)
        except Exception:
            reference = secrets.token_hex(4)
            log.exception("tool %s failed (reference %s)", tool.name, reference)
            return results.unexpected(tool.name, reference)

    # ---- resources ------------------------------------------------------------------------------

    async def list_resources(self, ctx: sdk.Context, params: Any) -> dict[str, Any]:
        """One page of what there is now; the next one's cursor if there is more."""
        cursor = params.cursor if params is not None else None
        try:
            page, following = await self._resources.listing(self._control, sdk.caller_of(ctx), cursor)
        except CotenantError as exc:
            raise sdk.error(wire.INVALID_PARAMS, exc.text(), exc.record()) from None
        return {"resources": page, **({"nextCursor": following} if following is not None else {})}

    async def list_templates(self, ctx: sdk.Context, params: Any) -> dict[str, Any]:
        return {"resourceTemplates": self._resources.templates()}

    async def read_resource(self, ctx: sdk.Context, params: wire.ReadResourceRequestParams) -> dict[str, Any]:
        """The same view as the tool over the same thing, as JSON text."""
        uri = params.uri
        try:
            if not self._resources.known(uri):
                raise sdk.error(
                    wire.INVALID_PARAMS,
                    f"not_found: there is no resource {text.quoted(uri, 120)}. See resources/list and resources/templates/list.",
                    {"uri": uri[:400]},
                )
            answer = await self._resources.read(self._control, sdk.caller_of(ctx), uri)
        except CotenantError as exc:
            raise sdk.error(wire.INVALID_PARAMS, exc.text(), {"uri": uri[:400], **exc.record()}) from None
        body = results.as_json(results.plain(answer))
        return {"contents": [{"uri": uri, "mimeType": "application/json", "text": body}]}

    async def visible(self, caller: Caller, address: str) -> bool:
        """Whether the caller may be told now that this changed: whoever may read it may."""
        if address == LIST or not address.endswith("/log"):
            return "read" in caller.scopes
        try:
            job = await self._control.views.get_job(
                caller, address.removeprefix("cotenant://jobs/").removesuffix("/log")
            )
        except CotenantError:
            return False
        # A view without the command is a view from outside: neither may the log be seen.
        return "read" in caller.scopes and job.command is not None

    async def complete(self, ctx: sdk.Context, params: wire.CompleteRequestParams) -> dict[str, Any]:
        """Values for parameters of resource templates and arguments of prompts, as far as the caller may see them."""
        asked = params.argument
        of = params.ref.uri if isinstance(params.ref, wire.ResourceTemplateReference) else ""
        if isinstance(params.ref, wire.PromptReference) and self._prompts.find(params.ref.name, {}) is None:
            raise self._unknown_prompt(params.ref.name)
        given = (params.context.arguments if params.context is not None else None) or {}
        values = await self._resources.complete(
            self._control, sdk.caller_of(ctx), asked.name, asked.value[:100], of=of, given=given
        )
        return {"completion": {"values": values[:100], "total": len(values), "hasMore": len(values) > 100}}

    # ---- prompts --------------------------------------------------------------------------------

    async def list_prompts(self, ctx: sdk.Context, params: Any) -> dict[str, Any]:
        return {"prompts": self._prompts.listing()}

    async def get_prompt(self, ctx: sdk.Context, params: wire.GetPromptRequestParams) -> dict[str, Any]:
        body = self._prompts.find(params.name, params.arguments or {})
        if body is None:
            raise self._unknown_prompt(params.name)
        return {"messages": [{"role": "user", "content": {"type": "text", "text": body}}]}

    def _unknown_prompt(self, name: str) -> Exception:
        names = ", ".join(str(item["name"]) for item in self._prompts.listing())
        return sdk.error(wire.INVALID_PARAMS, f"Unknown prompt {text.quoted(name, 64)}; there are: {names}.")

    # ---- subscriptions --------------------------------------------------------------------------

    async def listen(self, ctx: sdk.Context, params: wire.SubscriptionsListenRequestParams) -> Any:
        """One stream of notifications (2026-07-28), until the client goes, the token ends or the server stops."""
        wanted = params.notifications
        if "taskIds" in (wanted.model_extra or {}) and not sdk.declares(ctx, TASKS):
            raise missing()
        uris = [uri for uri in dict.fromkeys(wanted.resource_subscriptions or ()) if self._resources.known(uri)]
        lists = {
            LIST: wanted.resources_list_changed,
            TOOLS_LIST: wanted.tools_list_changed,
            PROMPTS_LIST: wanted.prompts_list_changed,
        }
        watcher = self._open(ctx, [*uris, *(address for address, asked in lists.items() if asked)])

        async def tell(address: str) -> None:
            if address in lists:
                await sdk.tell_list_changed(ctx, _LISTS[address])
            else:
                await sdk.tell_updated(ctx, address)

        honoured = wire.SubscriptionFilter(
            # Our tools and prompts never change while the server runs; saying yes and never firing is what that means.
            tools_list_changed=wanted.tools_list_changed or None,
            prompts_list_changed=wanted.prompts_list_changed or None,
            resources_list_changed=wanted.resources_list_changed or None,
            resource_subscriptions=[uri for uri in uris if uri in watcher.addresses] or None,
        )
        try:
            # Watching began before this frame, so nothing is lost between the two.
            await sdk.acknowledge(ctx, honoured)
        except BaseException:
            watcher.close()
            await watcher.run(tell)  # closed: it only cleans up
            raise
        await watcher.run(tell)
        return sdk.listened(ctx)

    async def subscribe(self, ctx: sdk.Context, params: wire.SubscribeRequestParams) -> wire.EmptyResult:
        """One resource on the standing stream of an older client's session."""
        uri = str(params.uri)
        if not self._resources.known(uri):
            raise sdk.error(
                wire.INVALID_PARAMS, f"not_found: there is no resource {text.quoted(uri, 120)}.", {"uri": uri[:400]}
            )
        session = sdk.session_of(ctx)
        if session is None:
            raise sdk.error(
                sdk.REFUSED,
                "no_session: this session is from before a restart of the server, and nothing can be sent to it."
                " Connect anew to subscribe; until then poll with the get and list tools.",
            )
        watcher = self._old_watchers.get(session)
        if watcher is None or watcher.closed:
            watcher = self._open(ctx, ())
            self._old_watchers[session] = watcher
            sdk.at_session_end(ctx, watcher.close)
            sdk.at_session_end(ctx, lambda: self._forget(session))
            # Never awaited by whoever publishes: a reader that stalls would hold everybody up.
            self._watching.start(
                watcher,
                lambda address: sdk.tell_session_updated(ctx, address),
                send_timeout_s=_OLD_SEND_S,
                room=lambda: self._has_room(session),
            )
        watcher.add([uri])
        if uri not in watcher.addresses:
            raise sdk.error(
                sdk.REFUSED,
                f"too_many_subscriptions: {len(watcher.addresses)} resources are the most for one session."
                " Unsubscribe from some; cotenant://gpus and cotenant://events cover all cards and all that happens.",
            )
        return wire.EmptyResult()

    async def unsubscribe(self, ctx: sdk.Context, params: wire.UnsubscribeRequestParams) -> wire.EmptyResult:
        if (watcher := self._old_watchers.get(sdk.session_of(ctx) or "")) is not None:
            watcher.remove(str(params.uri))
        return wire.EmptyResult()

    def stream_opened(self, session: str) -> None:
        """An older client opens its standing stream: what it subscribed to may have changed while it had none."""
        if (watcher := self._old_watchers.get(session)) is not None:
            watcher.mark_all()

    def _forget(self, session: str) -> None:
        self._old_watchers.pop(session, None)

    def _open(self, ctx: sdk.Context, addresses: Sequence[str]) -> Watcher:
        try:
            return self._watching.open(sdk.caller_now_of(ctx), addresses)
        except TooManyWatchers as many:
            refused = self.no_stream(many)
            raise sdk.error(sdk.REFUSED, refused.text(), refused.record()) from None

    def no_stream(self, many: TooManyWatchers) -> CotenantError:
        """Why a caller gets no further stream."""
        if many.mine is not None:
            return Busy(
                f"you have {many.mine} streams open, the most that one caller may have.",
                hint="Close those you do not read, and watch several resources in one stream.",
                code="too_many_streams",
                data={"open": many.mine},
            )
        why = "the server is stopping" if self._watching.closed else "the server has too many streams open already"
        return Unavailable(f"{why}.", hint="Poll with the get and list tools instead.", retry_after_s=30)


def _scope_refusal(caller: Caller, tool: Tool) -> Forbidden | None:
    if tool.scope in caller.scopes:
        return None
    have = ", ".join(sorted(caller.scopes)) or "none"
    return Forbidden(
        f"{tool.name} needs the scope {tool.scope}; this token has: {have}.",
        hint="Ask the person who gave you the token for one with that scope. Do not look for a way around it.",
        data={"needs": tool.scope},
    )
