"""`cotenant quota`, `queue` and `reserve` change the rules of a running server."""

from __future__ import annotations

from typing import Any

import pytest

from cotenant.ui.cli.problems import Usage
from cotenant.ui.cli.quota import read_value
from cotenant.ui.cli.reserve import when_ms


def test_words_become_values() -> None:
    assert [read_value(word) for word in ("6", "none", "true", "False", "fairshare")] == [
        6,
        None,
        True,
        False,
        "fairshare",
    ]
    with pytest.raises(Usage):
        read_value("")


def test_times_in_words() -> None:
    now = 1_800_000_000_000
    assert when_ms("now", now, "--from") == now
    assert when_ms("in 2h", now, "--from") == now + 7_200_000
    assert when_ms("in 1.5d", now, "--from") == now + 129_600_000
    assert when_ms("2027-01-15T08:00Z", now, "--to") == 1_800_000_000_000
    assert when_ms("2027-01-15T09:00+01:00", now, "--to") == 1_800_000_000_000
    for word in ("", "soon", "in h", "in 2y", "2027-13-01", "tomorrow", "in -2h", "999999-01-01T00:00Z"):
        with pytest.raises(Usage, match="is no time"):
            when_ms(word, now, "--to")


def test_a_person_sets_rules_and_sees_who_did(live: Any) -> None:
    try:
        assert "cap none -> 1" in live("quota", "set", "pool", "default", "cap", "1", "--reason", "a test").out
        rules = {(r["scope"], r["key"]): r for r in live.json("quota", "list")["rules"]}
        assert rules["pool", "cap"]["value"] == 1 and rules["pool", "cap"]["reason"] == "a test"
        assert live.json("quota")["pools"][0]["cap"] == 1
        refused = live("quota", "set", "pool", "default", "reserve", "2", "--reason", "too many", code=1)
        assert "above cap 1" in refused.err
        live(
            "quota",
            "set",
            "pool",
            "default",
            "windows",
            "daily 00:00-12:00",
            "daily 12:00-24:00",
            "--reason",
            "all day",
        )
        assert "daily 12:00-24:00" in live("quota", "list").out
        assert "nothing was above the rules" in live("quota", "evict-excess", "default", "--reason", "x", "--yes").out
        assert "starts nothing more" in live("queue", "pause", "default", "--reason", "noon").out
        assert "paused" in live("quota").out
    finally:
        for key in ("cap", "windows", "paused"):
            live("quota", "reset", "pool", "default", key, "--reason", "the test is over")
    assert live.json("quota")["pools"][0]["paused"] is False


def test_cards_are_booked_and_given_back(live: Any) -> None:
    made = live.json(
        "reserve",
        "add",
        "default",
        "--owner",
        "zoe",
        "--cards",
        "2",
        "--from",
        "in 1h",
        "--to",
        "in 2h",
        "--reason",
        "x",
    )
    try:
        assert made["reservation_id"] in live("reserve", "list").out
        too_many = live(
            "reserve", "add", "default", "--owner", "eve", "--cards", "1", "--to", "in 3h", "--reason", "x", code=1
        )
        assert "cannot be reserved" in too_many.err
        assert "Nobody can be asked" in live("reserve", "remove", made["reservation_id"], "--reason", "x", code=2).err
    finally:
        live("reserve", "remove", made["reservation_id"], "--reason", "over", "--yes")
    assert live.json("reserve", "list")["reservations"] == []
