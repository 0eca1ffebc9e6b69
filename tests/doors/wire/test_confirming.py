"""Confirmation where it is easy to get wrong: restarts, replays, objects that changed, clients that can only half ask.

What the plain combinations do is in test_eras.py. Nothing here has to run: a job that waits can be cancelled as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mcp_types as wire
import pytest

FORM = {"elicitation": {"form": {}}}
YES = {"confirm": {"action": "accept", "content": {"confirm": True}}}


def cancel(
    server: Any, token: str, job: str, capabilities: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **arguments: Any
) -> dict[str, Any]:  # fmt: skip
    """The result of one cancel_job of 2026-07-28 in plain frames; `more` stands beside the arguments."""
    params = {"name": "cancel_job", "arguments": {"job_id": job, **arguments}, **(more or {})}
    status, answer = server.modern(token, "tools/call", params, capabilities=capabilities or {})
    assert status == 200, answer
    result: dict[str, Any] = answer["result"]
    return result


def code(result: dict[str, Any]) -> str:
    assert result["isError"] is True, result
    return str(result["_meta"]["cotenant.dev/error"]["code"])


@pytest.fixture
def answer() -> Callable[[str], dict[str, Any]]:
    return lambda state: {"inputResponses": YES, "requestState": state}


async def queued(server: Any, token: str) -> tuple[str, Any]:
    """A job that waits behind a lease on every card, and how to end both."""
    async with server.client(token) as agent:
        lease = await agent.call("acquire_lease", gpus=2)
        job = await agent.call("submit_job", command="true", gpus=1)

        async def over() -> None:
            async with server.client(token) as again:
                await again.call("release_lease", lease_id=lease["lease_id"])

        return str(job["job_id"]), over


async def test_a_question_outlives_the_server_and_is_answered_once(
    make_server: Callable[..., Any], answer: Callable[[str], dict[str, Any]]
) -> None:
    server = make_server()
    token = server.token("asker", "alice")
    job, _ = await queued(server, token)
    asked = cancel(server, token, job, FORM)
    assert asked["resultType"] == "input_required" and job in asked["inputRequests"]["confirm"]["params"]["message"]
    server.stop()
    server.start()
    done = cancel(server, token, job, FORM, answer(asked["requestState"]))
    assert done["structuredContent"]["status"] == "cancelled"
    server.stop()
    server.start()
    again = cancel(server, token, job, FORM, answer(asked["requestState"]))
    assert again["structuredContent"]["status"] == "already_final"
    async with server.client(token) as agent:
        events = (await agent.call("list_events", job_id=job, types=["job.cancelled"]))["events"]
        assert len(events) == 1, "a replay does nothing, also after a restart"


async def test_an_answer_counts_for_what_was_asked_about(
    server: Any, tokens: dict[str, str], answer: Callable[[str], dict[str, Any]]
) -> None:
    job, over = await queued(server, tokens["alice"])
    try:
        asked = cancel(server, tokens["alice"], job, FORM)["requestState"]
        by_token = cancel(server, tokens["alice"], job)["structuredContent"]["confirm_token"]
        async with server.client(tokens["alice"]) as agent:
            await agent.call("hold_job", job_id=job)
            assert code(cancel(server, tokens["alice"], job, FORM, answer(asked))) == "changed_since_asked"
            assert code(cancel(server, tokens["alice"], job, confirm_token=by_token)) == "changed_since_asked"
            other = (await agent.call("submit_job", command="echo other", gpus=1))["job_id"]
            fresh = cancel(server, tokens["alice"], job, FORM)["requestState"]
            assert code(cancel(server, tokens["alice"], other, FORM, answer(fresh))) == "wrong_confirm_token"
            for tampered in (fresh[:-1], fresh + "0", "", "yes_" + "0" * 26):
                result = cancel(server, tokens["alice"], job, FORM, answer(tampered))
                assert result.get("isError") is True or result["resultType"] == "input_required", tampered
            assert (await agent.call("get_job", job_id=job))["state"] == "held"
            done = cancel(server, tokens["alice"], job, FORM, answer(fresh))
            assert done["structuredContent"]["status"] == "cancelled"
            assert (
                cancel(server, tokens["alice"], job, FORM, answer(fresh))["structuredContent"]["status"]
                == "already_final"
            )
            last = cancel(server, tokens["alice"], other)["structuredContent"]["confirm_token"]
            assert (
                cancel(server, tokens["alice"], other, confirm_token=last)["structuredContent"]["status"] == "cancelled"
            )
    finally:
        await over()


@pytest.mark.parametrize(
    "capabilities",
    [{}, {"elicitation": {"url": {}}}, {"sampling": {}}],
    ids=["nothing", "addresses only", "something else"],
)
async def test_who_cannot_show_a_form_gets_a_token(
    server: Any, tokens: dict[str, str], capabilities: dict[str, Any]
) -> None:
    job, over = await queued(server, tokens["alice"])
    try:
        asked = cancel(server, tokens["alice"], job, capabilities)["structuredContent"]
        assert asked["status"] == "confirmation_required" and "leave the queue" in asked["message"]
        done = cancel(server, tokens["alice"], job, capabilities, confirm_token=asked["confirm_token"])
        assert done["structuredContent"]["status"] == "cancelled"
    finally:
        await over()


@pytest.mark.parametrize("given", [{}, {"form": {}}], ids=["as before there were modes", "form"])
async def test_who_can_show_a_form_is_asked(
    server: Any, tokens: dict[str, str], given: dict[str, Any], answer: Callable[[str], dict[str, Any]]
) -> None:
    job, over = await queued(server, tokens["alice"])
    capabilities = {"elicitation": given}
    try:
        asked = cancel(server, tokens["alice"], job, capabilities)
        assert asked["resultType"] == "input_required"
        for no in (
            {"action": "accept", "content": {"confirm": False}},
            {"action": "accept", "content": {}},
            {"action": "accept", "content": {"confirm": "yes"}},
            {"action": "decline"},
            {"action": "cancel"},
        ):
            more = {"inputResponses": {"confirm": no}, "requestState": asked["requestState"]}
            kept = cancel(server, tokens["alice"], job, capabilities, more)
            assert kept["structuredContent"]["status"] == "not_cancelled", no
        done = cancel(server, tokens["alice"], job, capabilities, answer(asked["requestState"]))
        assert done["structuredContent"]["status"] == "cancelled", "no is no answer that spends the question"
    finally:
        await over()


async def test_a_client_that_lost_its_session_is_given_a_token_instead_of_a_question(
    make_server: Callable[..., Any],
) -> None:
    """It declared forms when it began, but there is nothing left over which to ask it."""
    server = make_server()
    token = server.token("old-timer", "alice")
    job, _ = await queued(server, token)
    asked: list[str] = []

    async def ask(context: Any, params: Any) -> wire.ElicitResult:
        asked.append(params.message)
        return wire.ElicitResult(action="decline")

    async with server.client(token, "legacy", elicitation_callback=ask) as agent:
        assert (await agent.call("cancel_job", job_id=job))["status"] == "not_cancelled" and len(asked) == 1
    call = {"name": "cancel_job", "arguments": {"job_id": job}}
    body = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
    headers = {"Accept": "application/json, text/event-stream", "Mcp-Session-Id": "of-before"}
    status, told, _ = server.post("/mcp", body, token, headers)
    assert status == 200 and "confirmation_required" in str(told)
