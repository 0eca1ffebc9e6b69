"""docs/events.md lists the event types that the code knows, and the code writes no others."""

from __future__ import annotations

import re
from pathlib import Path

from cotenant.server.model.events import EVENT_TYPES

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_lists_the_types_that_the_code_knows():
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+) \|$", (ROOT / "docs" / "events.md").read_text("utf-8"), re.MULTILINE)
    assert dict(rows) == EVENT_TYPES


def test_the_code_writes_only_known_types_and_each_known_one_somewhere():
    written: set[str] = set()
    for path in (ROOT / "server").rglob("*.py"):
        if path.name == "events.py" and path.parent.name == "model":
            continue  # the list itself
        text = path.read_text("utf-8")
        written |= {word for word in re.findall(r"\"([a-z]+\.[a-z_]+)\"", text) if word in EVENT_TYPES}
        for match in re.findall(r"append\(\s*tx,\s*\"([a-z_.]+)\"", text):
            assert match in EVENT_TYPES, f"{path}: {match}"
    composed = {"lease.released", "lease.expired", "lease.revoked", "job.succeeded", "job.failed", "job.cancelled"}
    composed |= {"lease.handed_over", "job.handed_over"}
    assert set(EVENT_TYPES) - written - composed == set()
