"""The page in a real browser: with and without JavaScript, on a phone, in the dark, with a keyboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chromium import Chromium
from desk import Desk, until

from cotenant.ui.panel import words

ON = "document.getElementById('live')?.dataset.state === 'on'"
LONG = "a-name-without-any-place-to-break-it-" * 5

#: Text whose contrast with what lies behind it is below 4.5 (WCAG 2.2, 1.4.3), as [text, ratio].
PALE = """(() => {
  const parts = (c) => c.match(/[\\d.]+/g).map(Number);
  const over = (top, under) => top.slice(0, 3).map((v, i) => v * (top[3] ?? 1) + under[i] * (1 - (top[3] ?? 1)));
  const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (node) => { const chain = []; for (let n = node; n; n = n.parentElement) chain.unshift(n);
    let c = [255, 255, 255]; for (const n of chain) c = over(parts(getComputedStyle(n).backgroundColor), c); return c; };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let t = walk.nextNode(); t; t = walk.nextNode()) {
    const node = t.parentElement;
    if (!t.nodeValue.trim() || !node.getClientRects().length || node.closest('noscript, script')) continue;
    const bg = behind(node);
    let fg = over(parts(getComputedStyle(node).color), bg);
    for (let n = node; n; n = n.parentElement) { const o = Number(getComputedStyle(n).opacity); if (o < 1) fg = over([...fg, o], bg); }
    const [a, b] = [light(fg), light(bg)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push([t.nodeValue.trim().slice(0, 40), Math.round(ratio * 100) / 100]);
  }
  return found;
})()"""


@pytest.fixture
def busy(desk: Desk, people: dict[str, str]) -> str:
    """There is something of everything to see; the id of a running job."""
    listed = desk.cli("job", "list", "--state", "active")["jobs"]
    found = [job["job_id"] for job in listed if job["name"] == LONG]
    if not found:
        found = [desk.submit(people["agent"], gpus="1", hours="2", name=LONG)]
        desk.submit(people["agent"], gpus="2", hours="1", name=f"<b>{LONG}</b>")
        desk.submit(people["agent"], "exit 3", gpus="0")
        until(lambda: desk.cli("job", "show", found[0])["state"] == "running", "it runs")
    return str(found[0])


def test_without_javascript_all_is_there_and_the_page_loads_itself_again(
    desk: Desk, people: dict[str, str], web: Chromium, busy: str
) -> None:
    web.scripts(False)
    web.go(desk.link(people["olga"]))
    assert web.run("location.pathname").startswith("/login/"), "nothing presses the button by itself"
    web.run("document.querySelector('button').click()")
    web.until("location.pathname === '/' && document.readyState === 'complete'")
    assert busy in web.run("document.getElementById('working').innerText")
    assert "wanted in pool" in web.run("document.getElementById('waiting').innerText")
    assert web.run("document.querySelector('meta[http-equiv=refresh]').content") == "15"
    assert "Loads again every 15 s" in web.run("document.getElementById('live').innerText")
    assert "/live" not in " ".join(web.asked())
    assert web.complaints() == []
    web.run("document.querySelector('form.who button').click()")
    web.until("location.pathname === '/login'")


def test_a_link_opens_the_page_and_the_page_stays_up_to_date(
    desk: Desk, people: dict[str, str], web: Chromium, busy: str
) -> None:
    web.go(desk.link(people["olga"]))
    web.until(ON)
    assert web.run("location.pathname") == "/"
    web.run("document.querySelector('form.who button').focus(); window.stayed = true")
    row = f"document.querySelector('[data-key=\"{busy}\"]')"
    web.run(f"window.row = {row}")
    job = desk.submit(people["agent"], gpus="2", name="came later")
    web.until(f"document.getElementById('waiting').innerText.includes({job!r})")
    assert web.run("window.stayed && document.activeElement === document.querySelector('form.who button')")
    assert web.run(f"window.row === {row}"), "what is the same stays the same element: a reader keeps its place"
    assert web.run("document.title.startsWith(document.getElementById('now-h').textContent)")
    desk.cli("job", "cancel", job, "--yes", token=people["agent"])
    web.until(f"!document.getElementById('waiting').innerText.includes({job!r})")
    assert web.complaints() == []
    assert {url.partition("//")[2].partition("/")[0] for url in web.asked() if url != "about:blank"} == {
        desk.url.removeprefix("http://")
    }, "nothing is fetched from elsewhere"


def test_ages_go_on_in_the_words_of_the_server(desk: Desk, people: dict[str, str], web: Chromium) -> None:
    web.go(desk.link(people["olga"]))
    web.until(ON)
    for seconds in (0, 59, 60, 3599, 3600, 7265, 86399, 86400, 200000):
        at = f"new Date(Date.now() - {seconds * 1000 + 500}).toISOString()"
        make = f"Object.assign(document.createElement('time'), {{ id: 'probe', dateTime: {at} }})"
        web.run(f"document.getElementById('probe')?.remove(); window.make = () => {{ const t = {make};"
                " t.dataset.form = 'for'; document.getElementById('board').append(t); return t; }")  # fmt: skip
        # An update takes away what is not the server's, so it is put there again.
        said = web.until("(document.getElementById('probe') || make()).textContent")
        assert said in (words.span(seconds), words.span(seconds + 1), words.span(seconds + 2)), (seconds, said)


def test_a_server_that_is_away_is_said_and_then_it_goes_on(own_desk: Callable[..., Desk], web: Chromium) -> None:
    desk = own_desk(gpus=1)
    alice = desk.token("alice", "alice")
    web.go(desk.link(alice))
    web.until(ON)
    desk.stop()
    web.until("document.getElementById('live').dataset.state === 'late'")
    assert "does not answer" in web.run("document.getElementById('live').innerText")
    assert "ago" in web.run("document.getElementById('live').innerText"), "stale is shown as stale"
    desk.start()
    web.until(ON, 60)
    desk.cli("token", "revoke", "alice", "--yes")
    web.until("location.pathname === '/login'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(
    desk: Desk, people: dict[str, str], web: Chromium, busy: str, scheme: str, tmp_path: Path
) -> None:
    web.colours(scheme)
    web.go(desk.url)
    assert web.run(PALE) == []
    assert web.run("[...document.querySelectorAll('input:not([type=hidden])')].every((i) => i.labels.length === 1)")
    web.go(desk.link(people["olga"]))
    web.until(ON)
    assert web.run(PALE) == []
    background = web.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(background) < 200) == (scheme == "dark"), background
    web.picture(tmp_path / f"{scheme}.png")  # to look at
    assert (tmp_path / f"{scheme}.png").stat().st_size > 10_000


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_has_to_be_scrolled_sideways(
    desk: Desk, people: dict[str, str], web: Chromium, busy: str, width: int
) -> None:
    web.window(width, 844, phone=width < 700)
    web.go(desk.link(people["olga"]))
    web.until(ON)
    assert web.run("document.documentElement.scrollWidth <= innerWidth"), width
    if width < 700:
        left = web.run(
            "[...document.querySelectorAll('section')].map((s) => Math.round(s.getBoundingClientRect().left))"
        )
        assert len(set(left)) == 1, "one column"
        assert (
            web.run(
                "[...document.querySelectorAll('.scroll')].filter((s) => s.scrollWidth > s.clientWidth)"
                ".flatMap((s) => [...s.querySelectorAll('*')]).filter((n) => n.getBoundingClientRect().right > innerWidth - 10)"
                ".map((n) => n.outerHTML.slice(0, 80))"
            )
            == []
        )


def test_a_keyboard_and_a_screen_reader_find_their_way(
    desk: Desk, people: dict[str, str], web: Chromium, busy: str
) -> None:
    web.window(390, 844, phone=True)  # where the tables look like cards they are tables all the same
    web.go(desk.link(people["olga"]))
    web.until(ON)
    web.press("Tab", 9)
    assert web.run("document.activeElement.className") == "skip"
    web.press("Tab", 9)
    assert web.run("document.activeElement.textContent") == "Log out"
    style = web.run(
        "(() => { const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]; })()"
    )
    assert style[0] == "solid" and float(style[1].removesuffix("px")) >= 2, "where the focus is can be seen"
    nodes = web.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in nodes if not node.get("ignored")]
    assert {"banner", "main", "contentinfo", "heading", "table", "columnheader", "rowheader", "status"} <= set(roles)
    named = [node.get("name", {}).get("value") for node in nodes if node.get("role", {}).get("value") == "region"]
    assert {"Cards", "At work", "Waiting", "What happened last"} <= set(named)
    assert web.run("document.getElementById('now-h').getAttribute('aria-live')") == "polite"
