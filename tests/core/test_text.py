"""Foreign text made harmless."""

from __future__ import annotations

import pytest

from cotenant.server.model.text import clean


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
