"""A question before a final act is good for five minutes."""

from __future__ import annotations

import pytest
from bench import Bench

from cotenant.server.errors import Conflict


async def test_an_old_question_is_asked_anew(bench: Bench) -> None:
    a = await bench.caller("a", "alice")
    job = await bench.submit(a, gpus=0)
    token, _ = await bench.control.confirmations.mint(a, "cancel_job", job)
    await bench.advance(301)
    with pytest.raises(Conflict) as caught:
        await bench.control.jobs.cancel(a, job, confirm_token=token)
    assert caught.value.code == "confirm_token_expired"
