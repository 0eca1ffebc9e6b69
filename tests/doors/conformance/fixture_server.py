"""A server with the fixed names of the official conformance suite, over the same modules as Cotenant's own.

    python fixture_server.py PORT

What it shares with `cotenant serve`: the SDK module with its two session managers and checks, the endpoint with its
subscriptions and middleware, the tasks methods. What it lacks: tokens (the suite cannot send any) and the control plane.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import mcp_types as wire
from fixture_tasks import MemoryTasks
from fixture_tools import IMAGE, PNG, STRING, TOOLS, Asked, content_of, form, needs_input
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cotenant.server.http import serving
from cotenant.server.mcp import sdk
from cotenant.server.mcp.endpoint import McpEndpoint
from cotenant.server.mcp.tasks import TASKS, BecameTask
from cotenant.server.mcp.watching import Watching
from cotenant.server.model.caller import Caller

CALLER = Caller("suite", "agent", "suite", frozenset({"read", "write"}), token_id="tok_suite", door="mcp")
RESOURCES: dict[str, dict[str, Any]] = {
    "test://static-text": {"mimeType": "text/plain", "text": "This is the content of the static text resource."},
    "test://static-binary": {"mimeType": "image/png", "blob": PNG},
    "test://watched-resource": {"mimeType": "text/plain", "text": "This one may be watched."},
}
_DATA = ("test://template/", "/data")
PROMPTS: dict[str, tuple[str, ...]] = {
    "test_simple_prompt": (),
    "test_prompt_with_arguments": ("arg1", "arg2"),
    "test_prompt_with_embedded_resource": ("resourceUri",),
    "test_prompt_with_image": (),
    "test_input_required_result_prompt": (),
}


class Resources:
    """The ResourceSet; see `cotenant.server.mcp.endpoint`."""

    def templates(self) -> list[dict[str, Any]]:
        return [{"uriTemplate": "test://template/{id}/data", "name": "data", "description": "data by id"}]

    def known(self, uri: str) -> bool:
        return uri in RESOURCES

    async def listing(
        self, control: Any, caller: Caller, cursor: str | None = None
    ) -> tuple[list[dict[str, Any]], str | None]:
        page = [
            {"uri": uri, "name": uri.removeprefix("test://"), "description": "a fixture", "mimeType": body["mimeType"]}
            for uri, body in RESOURCES.items()
        ]
        return page, None

    async def read(self, control: Any, caller: Caller, uri: str) -> Any:
        raise AssertionError("the fixture endpoint reads its resources itself")

    async def complete(
        self,
        control: Any,
        caller: Caller,
        name: str,
        begun: str,
        *,
        of: str = "",
        given: Mapping[str, str] | None = None,
    ) -> list[str]:
        return [word for word in ("paris", "park", "party") if word.startswith(begun)]


class Prompts:
    """The PromptSet; see `cotenant.server.mcp.endpoint`."""

    def listing(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "description": f"What the conformance suite expects of {name}.",
                "arguments": [{"name": item, "description": "an argument", "required": True} for item in arguments],
            }
            for name, arguments in PROMPTS.items()
        ]

    def find(self, name: str, arguments: Mapping[str, str]) -> str | None:
        """A text, for those that are one; the endpoint makes the others itself and only asks whether they exist."""
        texts = {
            "test_simple_prompt": "This is a simple prompt for testing.",
            "test_prompt_with_arguments": "Prompt with arguments: "
            f"arg1='{arguments.get('arg1')}', arg2='{arguments.get('arg2')}'",
        }
        return texts.get(name, "" if name in PROMPTS else None)


class FixtureEndpoint(McpEndpoint):
    """Cotenant's endpoint with the suite's tools, resources and prompts in place of ours."""

    def __init__(
        self, tasks: MemoryTasks, watching: Watching, stopping: asyncio.Event, has_room: Callable[[str], bool]
    ) -> None:
        super().__init__(
            None,  # type: ignore[arg-type]  # no control plane: whatever would need it is overridden
            tools=(),
            resources=Resources(),
            prompts=Prompts(),
            tasks=tasks,
            watching=watching,
            stopping=stopping,
            has_room=has_room,
        )
        self._memory = tasks

    async def list_tools(self, ctx: sdk.Context, params: Any) -> dict[str, Any]:
        return {"tools": [item.listing for item in TOOLS.values()]}

    async def call_tool(self, ctx: sdk.Context, params: wire.CallToolRequestParams) -> dict[str, Any]:
        if params.name not in TOOLS:
            return await super().call_tool(ctx, params)
        asked = Asked(
            ctx, params.arguments or {}, params.input_responses or {}, params.request_state, self._memory, self._changed
        )
        try:
            return await TOOLS[params.name].run(asked)
        except BecameTask as became:
            return self.became(became)

    def _changed(self, what: str) -> None:
        self._watching.changed(frozenset({what}))

    async def read_resource(self, ctx: sdk.Context, params: wire.ReadResourceRequestParams) -> dict[str, Any]:
        uri = params.uri
        if uri in RESOURCES:
            return {"contents": [{"uri": uri, **RESOURCES[uri]}]}
        if uri.startswith(_DATA[0]) and uri.endswith(_DATA[1]):
            number = uri.removeprefix(_DATA[0]).removesuffix(_DATA[1])
            text = f'{{"id":"{number}","templateTest":true,"data":"Data for ID: {number}"}}'
            return {"contents": [{"uri": uri, "mimeType": "application/json", "text": text}]}
        return await super().read_resource(ctx, params)

    async def get_prompt(self, ctx: sdk.Context, params: wire.GetPromptRequestParams) -> dict[str, Any]:
        def user(content: dict[str, Any]) -> dict[str, Any]:
            return {"role": "user", "content": content}

        def text(value: str) -> dict[str, Any]:
            return user({"type": "text", "text": value})

        if params.name == "test_prompt_with_embedded_resource":
            uri = (params.arguments or {}).get("resourceUri", "")
            body = {"uri": uri, "mimeType": "text/plain", "text": "Embedded resource content for testing."}
            about = text("Please process the embedded resource above.")
            return {"messages": [user({"type": "resource", "resource": body}), about]}
        if params.name == "test_prompt_with_image":
            return {"messages": [user(IMAGE), text("Please analyze the image above.")]}
        if params.name == "test_input_required_result_prompt":
            answer = content_of((params.input_responses or {}).get("user_context"))
            if answer is None:
                return needs_input(user_context=form("What context should the prompt use?", context=STRING))
            return {"messages": [text(f"In the context of {answer.get('context')}")]}
        return await super().get_prompt(ctx, params)


def build() -> tuple[Starlette, asyncio.Event, Watching]:
    """The application. Call it on a running event loop."""
    stopping = asyncio.Event()

    async def visible(caller: Caller, address: str) -> bool:
        return True

    watching = Watching(visible)
    handlers = FixtureEndpoint(MemoryTasks(), watching, stopping, lambda session: endpoint.has_room(session))
    server = sdk.make_server(
        version="1",
        instructions="Only for the conformance suite.",
        handlers=handlers.handlers(),
        middleware=handlers.gate,
        extensions=(TASKS,),
        input_schema=lambda name: TOOLS[name].listing["inputSchema"] if name in TOOLS else None,
    )

    async def set_level(ctx: Any, params: wire.SetLevelRequestParams) -> wire.EmptyResult:
        return wire.EmptyResult()

    server.add_request_handler("logging/setLevel", wire.SetLevelRequestParams, set_level)
    endpoint = sdk.Endpoint(
        server,
        allowed_hosts=["127.0.0.1:*", "localhost:*"],
        allowed_origins=["http://127.0.0.1:*", "http://localhost:*"],
        max_body=4 * 1024 * 1024,
        session_idle_s=600,
    )

    class Known:
        """Everybody is the suite."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            known = {"user": sdk.user_of(CALLER), sdk.CALLER: CALLER, sdk.CALLER_NOW: lambda: CALLER}
            await endpoint({**scope, **known}, receive, send)

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        async with endpoint.run():
            yield
            stopping.set()
            watching.close()
        await watching.join()

    return Starlette(routes=[Route("/mcp", Known())], lifespan=life), stopping, watching


async def main(port: int) -> None:
    app, stopping, watching = build()
    sock = serving.bind("127.0.0.1", port)
    with contextlib.closing(sock), serving.on_signals(stopping.set):
        server = serving.GracefulServer(
            serving.config_of(app), lambda: print(f"ready {serving.url_of(sock, '127.0.0.1')}", flush=True)
        )

        async def end() -> None:
            await stopping.wait()
            watching.close()
            server.stop()

        ending = asyncio.create_task(end())
        await server.serve(sockets=[sock])
        ending.cancel()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
