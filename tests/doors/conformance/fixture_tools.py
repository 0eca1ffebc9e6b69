"""The tools that the official conformance suite calls by fixed names; each returns a result in the words of the wire."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
import struct
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mcp_types as wire
from fixture_tasks import MemoryTasks, ProtocolError, Work
from mcp.shared.message import ServerMessageMetadata

from cotenant.server.mcp import sdk
from cotenant.server.mcp.tasks import TASKS, BecameTask, missing

_KEY = secrets.token_bytes(32)


def _png() -> str:
    """One red dot."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    dot = zlib.compress(b"\x00\xff\x00\x00")
    return base64.b64encode(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", dot) + chunk(b"IEND", b"")
    ).decode()


PNG = _png()
WAV = base64.b64encode(
    b"RIFF" + struct.pack("<I", 38) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 8000, 1, 8)
    + b"data" + struct.pack("<I", 2) + b"\x80\x80"
).decode()  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """One call: its context, arguments, the answers and state that came with it, and where tasks are kept."""

    ctx: sdk.Context
    arguments: Mapping[str, Any]
    responses: Mapping[str, Any]
    state: str | None
    tasks: MemoryTasks
    changed: Callable[[str], None]

    def related(self) -> ServerMessageMetadata:
        return ServerMessageMetadata(related_request_id=self.ctx.request_id)

    def capability(self, name: str) -> bool:
        return getattr(self.ctx.session.client_capabilities, name, None) is not None

    def need(self, **capabilities: Any) -> None:
        """Refuse a client that has not declared what the call needs."""
        if not all(self.capability(name) for name in capabilities):
            raise sdk.error(
                wire.MISSING_REQUIRED_CLIENT_CAPABILITY, "missing capability", {"requiredCapabilities": capabilities}
            )

    def as_task(self, work: Callable[[Work], Awaitable[dict[str, Any]]]) -> BecameTask:
        return BecameTask(self.tasks.start(sdk.caller_of(self.ctx), work))


Run = Callable[[Asked], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Fixture:
    name: str
    run: Run
    schema: dict[str, Any] = field(default_factory=dict)

    @property
    def listing(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "description": f"What the conformance suite expects of {self.name}.",
            "inputSchema": {"type": "object", "properties": {}, **self.schema},
        }


TOOLS: dict[str, Fixture] = {}


def tool(name: str, /, **properties: Any) -> Callable[[Run], Run]:
    """Register `run` under the suite's name; `properties` are JSON Schemas of its arguments."""

    def keep(run: Run) -> Run:
        TOOLS[name] = Fixture(name, run, {"properties": properties})
        return run

    return keep


def said(*texts: str, error: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": item} for item in texts], "isError": error}


def form(message: str, **properties: Any) -> dict[str, Any]:
    """A question with a form; every field has to be filled in."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"method": "elicitation/create", "params": {"mode": "form", "message": message, "requestedSchema": schema}}


def sample(prompt: str, tokens: int = 100) -> dict[str, Any]:
    message = {"role": "user", "content": {"type": "text", "text": prompt}}
    return {"method": "sampling/createMessage", "params": {"messages": [message], "maxTokens": tokens}}


ROOTS: dict[str, Any] = {"method": "roots/list", "params": {}}


def needs_input(state: str | None = None, **requests: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"resultType": "input_required", "inputRequests": requests}
    return out if state is None else {**out, "requestState": state}


def seal(state: str) -> str:
    return f"{state}.{hmac.new(_KEY, state.encode(), hashlib.sha256).hexdigest()}"


def unseal(sealed: str | None) -> str:
    state = (sealed or "").rpartition(".")[0]
    if sealed is None or not hmac.compare_digest(seal(state), sealed):
        raise sdk.error(wire.INVALID_PARAMS, "the requestState is not one of ours")
    return state


def content_of(answer: Any) -> dict[str, Any] | None:
    """What was filled into a form that was accepted."""
    if isinstance(answer, wire.ElicitResult):
        return dict(answer.content or {}) if answer.action == "accept" else None
    return dict(answer["content"]) if isinstance(answer, dict) and isinstance(answer.get("content"), dict) else None


# ---- contents -----------------------------------------------------------------------------------

STRING = {"type": "string"}
IMAGE = {"type": "image", "data": PNG, "mimeType": "image/png"}


def fixed(name: str, *content: dict[str, Any], error: bool = False) -> None:
    async def run(asked: Asked) -> dict[str, Any]:
        return {"content": list(content), "isError": error}

    tool(name)(run)


def _text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def _embedded(uri: str, mime: str, text: str) -> dict[str, Any]:
    return {"type": "resource", "resource": {"uri": uri, "mimeType": mime, "text": text}}


fixed("test_simple_text", _text("This is a simple text response for testing."))
fixed("test_image_content", IMAGE)
fixed("test_audio_content", {"type": "audio", "data": WAV, "mimeType": "audio/wav"})
fixed(
    "test_embedded_resource",
    _embedded("test://embedded-resource", "text/plain", "This is an embedded resource content."),
)
fixed(
    "test_multiple_content_types",
    _text("Multiple content types test:"),
    IMAGE,
    _embedded("test://mixed-content-resource", "application/json", '{"test":"data","value":123}'),
)
fixed("test_error_handling", _text("This tool intentionally returns an error for testing"), error=True)
fixed("test_reconnection", _text("Reconnection is not offered; the call is done."))
fixed("test_logging_tool", _text("No log message is sent unasked."))

TOOLS["json_schema_2020_12_tool"] = Fixture(
    "json_schema_2020_12_tool",
    TOOLS["test_simple_text"].run,
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {
            "address": {"$anchor": "addressDef", "type": "object", "properties": {"street": STRING, "city": STRING}}
        },
        "properties": {
            "name": STRING,
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": STRING,
            "email": STRING,
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": False,
    },
)


@tool("test_custom_header", region={"type": "string", "x-mcp-header": "Region"})
async def custom_header(asked: Asked) -> dict[str, Any]:
    return said(f"region {asked.arguments.get('region')}")


@tool("test_tool_with_progress")
async def with_progress(asked: Asked) -> dict[str, Any]:
    for done in (0, 50, 100):
        await asked.ctx.session.report_progress(done, 100, f"{done} of 100")
        await asyncio.sleep(0.02)
    return said("Done, with progress.")


@tool("test_tool_with_logging")
async def with_logging(asked: Asked) -> dict[str, Any]:
    for text in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        params = wire.LoggingMessageNotificationParams(level="info", data=text)
        await asked.ctx.session.send_notification(
            wire.LoggingMessageNotification(params=params), related_request_id=asked.ctx.request_id
        )
        await asyncio.sleep(0.02)
    return said("Done, with log messages.")


def changes(name: str, what: str) -> None:
    async def run(asked: Asked) -> dict[str, Any]:
        asked.changed(what)
        return said(f"The list of {what} changed.")

    tool(name)(run)


changes("test_trigger_tool_change", "tools")
changes("test_trigger_prompt_change", "prompts")


# ---- asking while the call lasts: protocols before 2026-07-28 -------------------------------------


async def elicit(asked: Asked, message: str, schema: dict[str, Any]) -> wire.ElicitResult:
    asked.need(elicitation={})
    params = wire.ElicitRequestFormParams(message=message, requested_schema=schema)
    return await asked.ctx.session.send_request(
        wire.ElicitRequest(params=params), wire.ElicitResult, metadata=asked.related()
    )


@tool("test_sampling", prompt=STRING)
async def sampling(asked: Asked) -> dict[str, Any]:
    asked.need(sampling={})
    text = wire.TextContent(type="text", text=str(asked.arguments.get("prompt")))
    params = wire.CreateMessageRequestParams(messages=[wire.SamplingMessage(role="user", content=text)], max_tokens=100)
    answer = await asked.ctx.session.send_request(
        wire.CreateMessageRequest(params=params), wire.CreateMessageResult, metadata=asked.related()
    )
    return said(f"LLM response: {getattr(answer.content, 'text', '')}")


@tool("test_elicitation", message=STRING)
async def elicitation(asked: Asked) -> dict[str, Any]:
    fields = {
        "username": {"type": "string", "description": "User's response"},
        "email": {"type": "string", "description": "User's email address"},
    }
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    answer = await elicit(asked, str(asked.arguments.get("message")), schema)
    return said(f"User response: action: {answer.action}, content: {answer.content}")


@tool("test_elicitation_sep1034_defaults")
async def defaults(asked: Asked) -> dict[str, Any]:
    fields = {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        "verified": {"type": "boolean", "default": True},
    }
    answer = await elicit(asked, "Take the defaults?", {"type": "object", "properties": fields})
    return said(f"Elicitation completed: action={answer.action}, content={answer.content}")


@tool("test_elicitation_sep1330_enums")
async def enums(asked: Asked) -> dict[str, Any]:
    plain = ["option1", "option2", "option3"]
    titled = [
        {"const": f"value{i}", "title": f"{word} Option"} for i, word in ((1, "First"), (2, "Second"), (3, "Third"))
    ]
    fields = {
        "untitledSingle": {"type": "string", "enum": plain},
        "titledSingle": {"type": "string", "oneOf": titled},
        "legacyEnum": {
            "type": "string",
            "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": plain}},
        "titledMulti": {"type": "array", "items": {"anyOf": titled}},
    }
    answer = await elicit(asked, "Choose.", {"type": "object", "properties": fields})
    return said(f"Elicitation completed: action={answer.action}, content={answer.content}")


# ---- asking by ending the call: 2026-07-28 ---------------------------------------------------------


@tool("test_missing_capability")
async def missing_capability(asked: Asked) -> dict[str, Any]:
    asked.need(sampling={})
    return said("sampling is there")


@tool("test_input_required_result_elicitation")
async def input_form(asked: Asked) -> dict[str, Any]:
    answer = content_of(asked.responses.get("user_name"))
    if answer is None or not isinstance(answer.get("name"), str):
        return needs_input(user_name=form("What is your name?", name=STRING))
    return said(f"Hello, {answer['name']}!")


TOOLS["test_streaming_elicitation"] = Fixture("test_streaming_elicitation", input_form)


@tool("test_input_required_result_sampling")
async def input_sample(asked: Asked) -> dict[str, Any]:
    answer = asked.responses.get("capital_question")
    if answer is None:
        return needs_input(capital_question=sample("What is the capital of France?"))
    return said(f"The model said: {getattr(getattr(answer, 'content', None), 'text', answer)}")


@tool("test_input_required_result_list_roots")
async def input_roots(asked: Asked) -> dict[str, Any]:
    answer = asked.responses.get("client_roots")
    if answer is None:
        return needs_input(client_roots=ROOTS)
    return said("Roots: " + ", ".join(str(root.uri) for root in getattr(answer, "roots", ())))


@tool("test_input_required_result_request_state")
async def input_state(asked: Asked) -> dict[str, Any]:
    if content_of(asked.responses.get("confirm")) is None:
        return needs_input(seal("asked"), confirm=form("Please confirm", ok={"type": "boolean"}))
    unseal(asked.state)
    return said("state-ok")


TOOLS["test_input_required_result_tampered_state"] = Fixture("test_input_required_result_tampered_state", input_state)


@tool("test_input_required_result_multiple_inputs")
async def input_several(asked: Asked) -> dict[str, Any]:
    requests = {
        "user_name": form("What is your name?", name=STRING),
        "greeting": sample("Generate a greeting", 50),
        "client_roots": ROOTS,
    }
    if not requests.keys() <= asked.responses.keys():
        return needs_input(seal("several"), **requests)
    unseal(asked.state)
    return said("All three are there.")


@tool("test_input_required_result_multi_round")
async def input_rounds(asked: Asked) -> dict[str, Any]:
    if asked.state is None:
        return needs_input(seal("1"), step1=form("Step 1: What is your name?", name=STRING))
    if unseal(asked.state) == "1":
        return needs_input(seal("2"), step2=form("Step 2: What is your favorite color?", color=STRING))
    return said("Both steps are done.")


@tool("test_input_required_result_capabilities")
async def input_capabilities(asked: Asked) -> dict[str, Any]:
    requests = {
        "question": ("elicitation", form("What is your name?", name=STRING)),
        "sample": ("sampling", sample("Say hello")),
        "roots": ("roots", ROOTS),
    }
    wanted = {key: request for key, (capability, request) in requests.items() if asked.capability(capability)}
    return said("Nothing can be asked.") if not wanted or asked.responses else needs_input(**wanted)


# ---- tasks ------------------------------------------------------------------------------------------


@tool("greet", name=STRING)
async def greet(asked: Asked) -> dict[str, Any]:
    return said(f"Hello, {asked.arguments.get('name', 'you')}!")


async def maybe_task(asked: Asked, work: Callable[[Work], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """As a task where the client takes one, else within the call."""
    if sdk.declares(asked.ctx, TASKS):
        raise asked.as_task(work)
    return await work(Work(""))


@tool("slow_compute", seconds={"type": "number"}, label=STRING)
async def slow_compute(asked: Asked) -> dict[str, Any]:
    seconds = float(asked.arguments.get("seconds", 1))

    async def work(task: Work) -> dict[str, Any]:
        await asyncio.sleep(seconds)
        return said(f"computed for {seconds} s")

    return await maybe_task(asked, work)


@tool("failing_job")
async def failing_job(asked: Asked) -> dict[str, Any]:
    if not sdk.declares(asked.ctx, TASKS):
        raise missing()

    async def work(task: Work) -> dict[str, Any]:
        await asyncio.sleep(0.3)
        return said("the job failed", error=True)

    raise asked.as_task(work)


@tool("protocol_error_job")
async def protocol_error_job(asked: Asked) -> dict[str, Any]:
    async def work(task: Work) -> dict[str, Any]:
        await asyncio.sleep(0.05)
        raise ProtocolError("the work broke")

    return await maybe_task(asked, work)


@tool("confirm_delete", filename=STRING)
async def confirm_delete(asked: Asked) -> dict[str, Any]:
    async def work(task: Work) -> dict[str, Any]:
        question = form(f"Delete {asked.arguments.get('filename')}?", confirm={"type": "boolean"})
        answers = await task.ask({f"ask_{task.id[-6:]}": question})
        return said(f"answered: {answers}")

    return await maybe_task(asked, work)


@tool("multi_input")
async def multi_input(asked: Asked) -> dict[str, Any]:
    async def work(task: Work) -> dict[str, Any]:
        questions = {f"{key}_{task.id[-6:]}": form(f"Your {key}?", value=STRING) for key in ("name", "color")}
        return said(f"answered: {await task.ask(questions)}")

    return await maybe_task(asked, work)


@tool("test_tool_with_task")
async def with_task(asked: Asked) -> dict[str, Any]:
    if not sdk.declares(asked.ctx, TASKS):
        raise missing()
    answer = content_of(asked.responses.get("user_name"))
    if answer is None:
        return needs_input(seal("task"), user_name=form("What is your name?", name=STRING))

    async def work(task: Work) -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return said(f"Hello from a task, {answer['name']}!")

    raise asked.as_task(work)
