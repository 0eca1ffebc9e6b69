"""Foreign text made harmless."""

from __future__ import annotations

import pytest

from cotenant.server.model.text import clean, signal_name


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('  File "train.py", line 3, in <module>', '  File "train.py", line 3, in <module>'),
        ("\tindented by a tab", "\tindented by a tab"),
        ("    ünïcode  ", "    ünïcode"),
        ("  \x1b[31mred\x1b[0m", "   [31mred [0m"),
        ("", ""),
    ],
)
def test_a_log_line_keeps_its_indent_and_loses_its_control_characters(line, shown):
    assert clean(line, 200, indent=True) == shown


def test_a_name_keeps_no_blanks_at_its_ends_and_has_a_length():
    assert clean("  a name\n", 200) == "a name"
    assert clean("x" * 300, 200) == "x" * 199 + "…"
    assert clean(" " * 5 + "x" * 300, 200, indent=True) == " " * 5 + "x" * 194 + "…"


def test_every_signal_has_a_name():
    named = {number: signal_name(number) for number in range(1, 65)}
    assert (named[9], named[15], named[10]) == ("SIGKILL", "SIGTERM", "SIGUSR1")
    assert named[35] == "SIGRTMIN+1"
    assert len(set(named.values())) == 64
    unnamed = {number for number, name in named.items() if not name.startswith("SIG")}
    assert unnamed <= {32, 33}, "only those two, which the C library keeps to itself, have none"
