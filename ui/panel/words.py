"""How the page says numbers, times and states. Whole words; unknown is "unknown", never 0.

`static/panel.js` says spans in the same way, so that ages can go on between two answers; a test compares the two.
"""

from __future__ import annotations

from typing import Final

from cotenant.server.model.answers import EventAnswer
from cotenant.server.model.events import EVENT_TYPES
from cotenant.server.model.text import clean

CARD_STATES: Final = {
    "free": "free",
    "held": "in use",
    "cleaning": "being cleaned",
    "occupied": "occupied",
    "sick": "sick",
    "lost": "lost",
    "unverified": "unverified",
    "unknown": "unknown",
}
#: Where the list of event types says it for a reader of the log rather than of a page.
EVENTS: Final = {
    "lease.released": "A lease was given back, or its job ended",
    "job.running": "A job’s command runs",
    "job.succeeded": "A job succeeded",
    "job.failed": "A job failed",
    "job.lost": "A job’s host does not answer",
    "job.stopping": "A job is being stopped",
    "job.requeued": "A job gets another attempt",
    "gpu.changed": "A card’s state changed",
}
#: What a colour says as well; everything else stays neutral.
TONES: Final = {
    "free": "good", "running": "good", "up": "good", "succeeded": "good",
    "sick": "bad", "lost": "bad", "failed": "bad", "critical": "bad",
    "occupied": "warn", "unverified": "warn", "unknown": "warn", "stopping": "warn", "suspect": "warn", "connecting": "warn",
    "preempted": "warn", "suspended": "warn", "warning": "warn",
}  # fmt: skip


def span(seconds: int | None) -> str:
    """A duration in at most two units: 45 s, 12 min, 2 h 05 min, 3 d 4 h."""
    if seconds is None:
        return "unknown"
    left = max(0, int(seconds))
    if left < 60:
        return f"{left} s"
    if left < 3600:
        return f"{left // 60} min"
    if left < 86400:
        return f"{left // 3600} h {left % 3600 // 60:02} min"
    return f"{left // 86400} d {left % 86400 // 3600} h"


def clock(iso: str) -> str:
    """An ISO time as the page writes it: 2026-11-30 22:53:04 UTC."""
    return f"{iso[:19].replace('T', ' ')} UTC"


def memory(mib: int) -> str:
    """An amount of memory: 512 MiB, 79.6 GiB."""
    return f"{mib} MiB" if 0 < mib < 1024 else f"{mib / 1024:.1f} GiB".replace(".0 ", " ")


def count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def tone(word: str) -> str:
    return TONES.get(word, "plain")


def happened(event: EventAnswer) -> str:
    """What an event's type means, as a sentence of ours without its full stop; of a changed card also to what."""
    said = EVENTS.get(event.type) or EVENT_TYPES.get(event.type, event.type).partition(";")[0]
    to = (
        f" from {event.old if (event.old or '').isalpha() else 'unseen'} to {event.new}"
        if event.type == "gpu.changed" and event.new in CARD_STATES
        else ""
    )
    return said[:1].upper() + said[1:] + to


def data(text: object, limit: int = 300) -> str:
    """Foreign text for a page: no control or direction marks, cut. Escaping is the template's part."""
    return clean(str(text), limit)
