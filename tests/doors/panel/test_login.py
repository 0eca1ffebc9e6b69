"""In and out of the page: links, tokens, cookies, forms, and who is kept out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx2
import pytest
from desk import Desk, field, log_in

ROUTES = (
    ("GET", "/"), ("GET", "/board"), ("GET", "/live"), ("GET", "/login"), ("POST", "/login"), ("GET", "/login/nonsense"),
    ("POST", "/logout"), ("GET", "/static/panel.css"), ("GET", "/static/none"),
)  # fmt: skip


def test_a_link_shows_a_button_and_logs_in_once(desk: Desk, people: dict[str, str]) -> None:
    link = desk.link(people["alice"])
    with desk.browser() as scanner, desk.browser() as browser, desk.browser() as late:
        for _ in range(3):  # what looks at links before people do
            assert scanner.get(link).status_code == 200
        assert scanner.get("/").headers["location"] == "login"
        page = browser.get(link).text
        sent = {"form": field(page, "form"), "code": field(page, "code")}
        answer = browser.post("/login", data=sent)
        assert (answer.status_code, answer.headers["location"]) == (303, "./")
        assert "alice" in browser.get("/").text
        again = log_in(late, code=sent["code"])
        assert again.status_code == 403 and "used already" in again.text
        assert late.get("/").status_code == 303
        gone = late.get(link)
        assert gone.status_code == 403 and "cotenant login-link" in gone.text
    assert link.rpartition("/")[2] not in desk.errors.read_text() + desk.said


def test_of_two_that_use_a_link_at_once_one_is_in(desk: Desk, people: dict[str, str]) -> None:
    for _ in range(5):
        code = desk.link(people["alice"]).rpartition("/")[2]
        with desk.browser() as one, desk.browser() as two, ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(partial(log_in, code=code), (one, two)))
            assert sorted(answer.status_code for answer in answers) == [303, 403]


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(desk: Desk, people: dict[str, str]) -> None:
    with desk.browser() as client:
        answer = log_in(client, token=people["alice"])
    (cookie,) = [item for item in answer.headers.get_list("set-cookie") if "visit" not in item]
    flags = [part.strip().lower() for part in cookie.split(";")[1:]]
    assert {"httponly", "samesite=lax", "path=/"} <= set(flags)
    assert "secure" not in flags, "over plain HTTP on this machine the browser would not send it back"
    assert people["alice"] not in cookie
    with httpx2.Client(base_url=desk.url, headers={"X-Forwarded-Proto": "https"}) as behind_tls:
        visit = behind_tls.get("/login").headers["set-cookie"]
        assert "secure" in visit.lower()


@pytest.mark.parametrize(
    ("who", "says"), [("agent", "for people"), ("unknown", "unknown, expired or revoked"), ("empty", "no token")]
)
def test_who_is_no_person_with_a_token_stays_out(desk: Desk, people: dict[str, str], who: str, says: str) -> None:
    token = {"unknown": "ctn_" + "0" * 52, "empty": " "}.get(who) or people[who]
    with desk.browser() as client:
        answer = log_in(client, token=token)
        assert answer.status_code in (400, 403) and says in answer.text
        assert client.get("/").status_code == 303


def test_a_reporter_sees_no_page_and_an_agent_gets_no_link(desk: Desk, people: dict[str, str]) -> None:
    reporter = desk.token("host-reporter", "rita", "human", "report")
    for token, code in ((reporter, "missing_scope"), (people["agent"], "people_only")):
        with desk.browser() as client:
            assert log_in(client, token=token).status_code == 403
            answer = client.post(
                "/operate/login.link", json={"args": {}, "reason": "x"}, headers={"Authorization": f"Bearer {token}"}
            )
            assert answer.status_code == 403 and answer.json()["error"]["code"] == code


def test_a_bearer_token_opens_no_page_and_a_cookie_no_tool(desk: Desk, people: dict[str, str]) -> None:
    with desk.browser() as client:
        bearer = {"Authorization": f"Bearer {people['alice']}"}
        assert client.get("/", headers=bearer).status_code == 303
        assert client.get("/board", headers=bearer).status_code == 401
        assert log_in(client, token=people["alice"]).status_code == 303
        for path in ("/mcp", "/operate/token.list"):
            assert client.post(path, json={}).status_code == 401


def test_a_forged_cookie_opens_nothing(desk: Desk, people: dict[str, str]) -> None:
    with desk.person(people["alice"]) as client, desk.browser() as thief:
        name, value = next(item for item in client.cookies.items() if "visit" not in item[0])
        session, _, signature = value.partition(".")
        with desk.person(people["bob"]) as bob:
            other = bob.cookies[name].partition(".")[2]
        wrong = signature[:-1] + ("0" if signature[-1] != "0" else "1")
        for forged in (
            session,
            f"{session}.",
            f"{session}.{other}",
            f"{session}.{wrong}",
            f"x.{signature}",
            ".",
            "\xff",
        ):
            raw = f"{name}={forged}".encode("latin-1")
            assert thief.get("/", headers={b"Cookie": raw}).status_code == 303, forged  # type: ignore[dict-item]
        assert thief.get("/", headers={"Cookie": f"{name}={value}"}).status_code == 200


def test_every_form_needs_its_own_token(desk: Desk, people: dict[str, str]) -> None:
    with desk.browser() as attacker, desk.browser() as client:
        foreign = field(attacker.get("/login").text, "form")
        client.get("/login")
        for form in ({}, {"form": ""}, {"form": "0" * 64}, {"form": foreign}):
            assert client.post("/login", data={"token": people["alice"], **form}).status_code == 403
    with desk.browser() as without_cookies:
        form = field(without_cookies.get("/login").text, "form")
        without_cookies.cookies.clear()
        answer = without_cookies.post("/login", data={"token": people["alice"], "form": form})
        assert answer.status_code == 403 and "cookies" in answer.text
    with desk.person(people["alice"]) as alice, desk.person(people["bob"]) as bob:
        of_bob = field(bob.get("/").text, "form")
        for form in ({"form": ""}, {"other": "1"}, {"form": of_bob}):
            assert alice.post("/logout", data=form).status_code == 403
        assert alice.get("/").status_code == 200


def test_logging_out_ends_the_cookie_wherever_it_was_copied_to(desk: Desk, people: dict[str, str]) -> None:
    with desk.person(people["alice"]) as client, desk.browser() as copy:
        copied = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        assert copy.get("/", headers={"Cookie": copied}).status_code == 200
        answer = client.post("/logout", data={"form": field(client.get("/").text, "form")})
        assert (answer.status_code, answer.headers["location"]) == (303, "login")
        assert copy.get("/", headers={"Cookie": copied}).status_code == 303
        assert copy.get("/board", headers={"Cookie": copied}).status_code == 401


def test_revoking_the_token_ends_its_sessions_and_no_others(desk: Desk, people: dict[str, str]) -> None:
    leaving = desk.token("leaving", "lea")
    with desk.person(leaving) as client, desk.person(people["bob"]) as bob:
        link = desk.link(leaving)
        assert client.get("/").status_code == 200
        desk.cli("token", "revoke", "leaving", "--yes")
        assert client.get("/").status_code == 303
        assert client.get("/board").status_code == 401
        assert client.get(link).status_code == 403
        assert bob.get("/").status_code == 200


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_other_sites_and_other_hosts_are_refused(desk: Desk, people: dict[str, str], method: str, path: str) -> None:
    port = desk.url.rpartition(":")[2]
    with desk.person(people["alice"]) as client:
        form = field(client.get("/").text, "form")

        def ask(**headers: str) -> httpx2.Response:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            return client.request(method, path, data={"form": form} if method == "POST" else None, headers=sent)

        assert ask(Host=f"evil.example:{port}").status_code in (400, 403, 421)
        assert ask(Origin="http://evil.example").status_code == 403
        assert (
            ask(Origin=f"http://127.0.0.1:{int(port) % 60000 + 1}").status_code == 403
        )  # another program of this machine
        assert ask(Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors").status_code == 403
        assert ask(Sec_Fetch_Site="same-site", Sec_Fetch_Mode="no-cors").status_code == 403
        if method == "POST":
            assert ask(Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", Origin="null").status_code == 403
        assert client.get("/").status_code == 200, "nobody was logged out by it"


def test_a_link_followed_from_elsewhere_shows_the_page(desk: Desk, people: dict[str, str]) -> None:
    with desk.person(people["alice"]) as client:
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert client.get("/", headers=headers).status_code == 200


def test_a_form_as_browsers_send_it_under_no_referrer_is_taken(desk: Desk, people: dict[str, str]) -> None:
    with desk.browser() as client:
        form = field(client.get("/login").text, "form")
        headers = {"Origin": "null", "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "navigate"}
        answer = client.post("/login", data={"form": form, "token": people["alice"]}, headers=headers)
        assert answer.status_code == 303


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("logged_in", [False, True])
def test_every_answer_is_shut_in(desk: Desk, people: dict[str, str], method: str, path: str, logged_in: bool) -> None:
    with desk.browser() as client:
        if logged_in:
            assert log_in(client, token=people["alice"]).status_code == 303
        with client.stream(method, path, data={"form": "wrong"} if method == "POST" else None) as answer:
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            if not path.startswith("/static/panel"):
                assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"form=%ff&code=%fe", b"a=1&" * 30, b"token=" + b"x" * 20_000, "form=ä".encode(), b"form=\0&token=\0"],
    ids=["empty", "json", "not utf-8", "many fields", "long", "raw bytes", "zeros"],
)
@pytest.mark.parametrize("path", ["/login", "/logout"])
def test_a_broken_form_is_refused_in_words(desk: Desk, path: str, body: bytes) -> None:
    with desk.browser() as client:
        client.get("/login")
        answer = client.post(path, content=body, headers={"Content-Type": "application/x-www-form-urlencoded"})
        assert answer.status_code in (303, 400, 403)
        assert "Traceback" not in answer.text
        plain = client.post(path, content=body, headers={"Content-Type": "text/plain"})
        assert plain.status_code == 400 and "not a form" in plain.text


def test_sessions_outlive_a_restart_and_links_do_not(own_desk: Callable[..., Desk]) -> None:
    desk = own_desk(gpus=1)
    alice = desk.token("alice", "alice")
    with desk.person(alice) as client, desk.person(alice) as left:
        left.post("/logout", data={"form": field(left.get("/").text, "form")})
        cookies = dict(left.cookies)
        link = desk.link(alice)
        assert desk.stop()[0] == 0
        assert "login/" not in desk.said, "where output is no terminal it may be a log"
        assert (desk.data / "panel.key").stat().st_mode & 0o077 == 0
        desk.start()
        assert client.get("/").status_code == 200
        assert left.get("/", headers={"Cookie": "; ".join(f"{k}={v}" for k, v in cookies.items())}).status_code == 303
        assert left.get(link).status_code == 403
        assert desk.stop()[0] == 0
        (desk.data / "panel.key").unlink()  # another key: what the old one signed counts no more
        desk.start()
        assert client.get("/").status_code == 303
