"""Sessions and links by the clock, over restarts, and bound to their token."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import Bench

from cotenant.server.control.logins import LINK_S, MAX_SESSIONS, SESSION_S
from cotenant.server.errors import Forbidden


async def person(bench: Bench, name: str = "alice", **options: object) -> str:
    """A person's token."""
    await bench.caller(name, name, "human", "read,write", **options)
    return bench.tokens[name]


async def test_a_link_ends_by_itself(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        await person(bench)
        logins = bench.control.logins
        early, _ = await logins.link(bench.callers["alice"], "test")
        bench.clock.advance(LINK_S - 1)
        assert logins.usable(early)
        assert (await logins.by_link(early)).caller.name == "alice"
        late, expires = await logins.link(bench.callers["alice"], "test")
        assert expires == bench.clock.now_ms() + LINK_S * 1000
        bench.clock.advance(LINK_S)
        assert not logins.usable(late)
        with pytest.raises(Forbidden, match="older than ten minutes"):
            await logins.by_link(late)
        bench.check()


async def test_a_link_of_a_revoked_token_opens_nothing(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        await person(bench)
        code, _ = await bench.control.logins.link(bench.callers["alice"], "test")
        await bench.control.tokens.revoke(await bench.person(), "alice", "test")
        with pytest.raises(Forbidden):
            await bench.control.logins.by_link(code)
        assert not bench.events("session.opened")


async def test_a_session_ends_after_its_day_or_with_its_token(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        logins = bench.control.logins
        long = logins.cookie_of(await logins.by_token(await person(bench)))
        short = logins.cookie_of(await logins.by_token(await person(bench, "bob", expires_s=60)))
        assert logins.session_of(long) and logins.session_of(short)
        bench.clock.advance(60)
        assert logins.session_of(long) and not logins.session_of(short)
        bench.clock.advance(SESSION_S - 61)
        assert logins.session_of(long)
        bench.clock.advance(1)
        assert logins.session_of(long) is None


async def test_a_session_lives_on_after_a_crash_and_one_that_was_left_does_not(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        logins = bench.control.logins
        token = await person(bench)
        kept, left = [await logins.by_token(token) for _ in range(2)]
        cookies = [logins.cookie_of(session) for session in (kept, left)]
        await logins.leave(left)
        await bench.restart(kill=True)
        assert [bench.control.logins.session_of(cookie) is not None for cookie in cookies] == [True, False]
        await bench.control.tokens.revoke(await bench.person(), "alice", "test")
        assert bench.control.logins.session_of(cookies[0]) is None
        await bench.restart()
        assert bench.control.logins.session_of(cookies[0]) is None
        bench.check()


async def test_what_is_on_disk_opens_nothing(tmp_path: Path) -> None:
    """Neither a copy of the database nor the log of events holds a code, a cookie or what signs one."""
    async with Bench(tmp_path) as bench:
        logins = bench.control.logins
        token = await person(bench)
        code, _ = await logins.link(bench.callers["alice"], "test")
        cookie = logins.cookie_of(await logins.by_link(code))
        await logins.by_token(token)
        dump = bench.dump()
        for secret in (token, code, cookie, cookie.partition(".")[2], (tmp_path / "panel.key").read_text().strip()):
            assert secret not in dump
        assert [event["type"] for event in bench.events() if event["type"].startswith("session.")] == [
            "session.link_made", "session.opened", "session.opened",
        ]  # fmt: skip
        assert {event["door"] for event in bench.events("session.opened")} == {"panel"}


async def test_the_oldest_sessions_of_a_token_make_room(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        logins = bench.control.logins
        alice, bob = await person(bench), await person(bench, "bob")
        other = logins.cookie_of(await logins.by_token(bob))
        cookies = []
        for _ in range(MAX_SESSIONS + 2):
            bench.clock.advance(1)
            cookies.append(logins.cookie_of(await logins.by_token(alice)))
        assert [logins.session_of(cookie) is not None for cookie in cookies] == [False] * 2 + [True] * MAX_SESSIONS
        assert logins.session_of(other)
        await bench.restart()
        assert sum(bench.control.logins.session_of(cookie) is not None for cookie in cookies) == MAX_SESSIONS


async def test_a_key_that_others_could_read_is_not_used(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        cookie = bench.control.logins.cookie_of(await bench.control.logins.by_token(await person(bench)))
        (tmp_path / "panel.key").chmod(0o644)
        await bench.restart()
        assert bench.control.logins.session_of(cookie) is None
        assert (tmp_path / "panel.key").stat().st_mode & 0o077 == 0
