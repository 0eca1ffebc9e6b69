"""What each page shows: one frozen context a page, and the templates that render it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cotenant.server.model.overview import Alert, Overview, PoolNow, Waiter, Work
from cotenant.ui.panel import words

if TYPE_CHECKING:
    from cotenant.server.model.answers import EventAnswer, GpuAnswer, HostAnswer

FOLDER: Final = Path(__file__).parent
#: Seconds after which a page without JavaScript loads itself again.
RELOAD_S: Final = 15
_TYPES: Final = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class LoginPage:
    """`code` is of a one-time link that is still good; `trouble` says why the last try failed."""

    base: str  # relative way to the panel's root
    form: str
    code: str = ""
    trouble: str = ""
    hint: str = ""


@dataclass(frozen=True)
class HostCards:
    """One host and its cards, as the page groups them."""

    host: HostAnswer
    gpus: list[GpuAnswer]


@dataclass(frozen=True)
class BoardPage:
    """The first page."""

    base: str
    form: str
    at: str
    name: str
    owner: str
    headline: str
    simulated: bool
    pools: list[PoolNow]
    alerts: list[Alert]
    stale: frozenset[str]  # UUIDs of cards
    hosts: list[HostCards]
    working: list[Work]
    working_more: int
    waiting: list[Waiter]
    waiting_more: int
    ended: Overview
    events: list[EventAnswer]
    reload_s: int = RELOAD_S


def board(seen: Overview, *, base: str, form: str) -> BoardPage:
    """The first page over one reading of everything."""
    hosts = [HostCards(host, [gpu for gpu in seen.gpus if gpu.host == host.host]) for host in seen.hosts]
    return BoardPage(
        base=base,
        form=form,
        at=seen.at,
        name=seen.me.name,
        owner=seen.me.owner,
        headline=seen.headline,
        simulated=any(gpu.simulated for gpu in seen.gpus),
        pools=seen.pools,
        alerts=seen.alerts,
        stale=frozenset(seen.gpus_stale),
        hosts=hosts,
        working=seen.working,
        working_more=seen.working_total - len(seen.working),
        waiting=seen.waiting,
        waiting_more=seen.waiting_total - len(seen.waiting),
        ended=seen,
        events=seen.events,
    )


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    media_type: str
    digest: str


class Pages:
    """Templates and static files, read when first asked for: a server whose page nobody opens does without."""

    def warm(self) -> None:
        """Read, import and compile everything that a page needs: 0.1 s once, in a thread, instead of in the loop."""
        for name in ("login.html", "page.html", "board.html", "trouble.html"):
            self._environment.get_template(name)
        self._address_of("panel.css")

    def login(self, page: LoginPage) -> str:
        return self._render("login.html", page)

    def board(self, page: BoardPage) -> str:
        """The whole page."""
        return self._render("page.html", page)

    def fragment(self, page: BoardPage) -> str:
        """The part of the page that changes."""
        return self._render("board.html", page)

    def trouble(self, base: str, title: str, what: str) -> str:
        return self._environment.get_template("trouble.html").render(base=base, title=title, what=what)

    @cached_property
    def static(self) -> dict[str, StaticFile]:
        """By file name."""
        found = {}
        for path in (FOLDER / "static").iterdir():
            content = path.read_bytes()
            if path.suffix in _TYPES:
                found[path.name] = StaticFile(content, _TYPES[path.suffix], hashlib.sha256(content).hexdigest()[:16])
        return found

    def _render(self, template: str, page: LoginPage | BoardPage) -> str:
        return self._environment.get_template(template).render(page=page, base=page.base)

    @cached_property
    def _environment(self) -> jinja2.Environment:
        import jinja2

        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        environment.filters |= {
            "span": words.span, "clock": words.clock, "tone": words.tone, "data": words.data, "happened": words.happened,
            "memory": words.memory,
        }  # fmt: skip
        environment.globals |= {"static": self._address_of, "count": words.count, "card_states": words.CARD_STATES}
        return environment

    def _address_of(self, name: str) -> str:
        """The way to a static file from the panel's root; it changes with the content, so it may be kept for ever."""
        return f"static/{name}?v={self.static[name].digest}"


if TYPE_CHECKING:
    import jinja2
