"""Foreign text: made harmless where it is taken in, quoted where it is shown, and searched for secrets.

Names, purposes, notes and log lines are written by others. They are data: no control characters, a length,
and never part of a sentence of ours except as a quoted JSON string.
"""

from __future__ import annotations

import json
import re
import signal
import unicodedata

# Cc control, Cf format (bidi overrides, zero width), Cs surrogates, Co private use
_UNWANTED = {"Cc", "Cf", "Cs", "Co"}

#: Shapes of credentials, each with the name by which a refusal calls it. Prefixes as published by their issuers.
_SECRET_SHAPES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("an API key (sk-…)", re.compile(r"\bsk-[A-Za-z0-9_-]{16,}")),
    ("a Hugging Face token (hf_…)", re.compile(r"\bhf_[A-Za-z0-9]{16,}")),
    ("a GitHub token", re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,})")),
    ("a GitLab token (glpat-…)", re.compile(r"\bglpat-[A-Za-z0-9_-]{16,}")),
    ("a Slack token (xox…)", re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}")),
    ("an AWS access key", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    ("a Cotenant token (ctn_…)", re.compile(r"\bctn_[0-9a-z]{20,}")),
    ("a password in a URL", re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@]*:([^\s/@]+)@", re.IGNORECASE)),
    ("a private key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")),
    (
        "a value after a secret's option",
        re.compile(
            r"(?:^|[\s\"'])--?(?:token|api[-_]?key|password|passwd|secret|auth[-_]token|access[-_]token)"
            r"(?:[=\s]+|[\"'],\s*[\"'])(?![$<{%])([^\s\"',]{4,})",
            re.IGNORECASE,
        ),
    ),
    (
        "a value of a secret's variable",
        re.compile(
            r"\b[A-Z0-9_]*(?:API_?KEY|TOKEN|PASSWORD|PASSWD|SECRET(?:_?KEY)?)=(?![$<{%]|\s|$)([^\s\"',]{4,})",
        ),
    ),
)
#: All shapes in one, to leave the usual text alone after a single search.
_ANY_SECRET = re.compile(
    "|".join(f"(?{'i' if shape.flags & re.IGNORECASE else ''}:{shape.pattern})" for _, shape in _SECRET_SHAPES)
)
_SECRET_NAME = re.compile(r"(?:API_?KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL)S?$", re.IGNORECASE)
_PASSWORD_NAME = re.compile(
    r"(?:api_?key|(?:access|auth|secret)_?token|password|passwd|secret|secret_?key|credential)s?$", re.IGNORECASE
)
# names that end like secrets and are not: tokenizers and counts are common in training
_HARMLESS_NAME = re.compile(r"(?:MAX|NUM|N|PAD|EOS|BOS|UNK|MASK)_?TOKENS?$|TOKENIZERS?_", re.IGNORECASE)
MASK = "***"


def clean(text: str, limit: int, *, newlines: bool = False, indent: bool = False) -> str:
    """`text` without control and format characters, cut to `limit` characters (an ellipsis marks the cut).

    Blanks at both ends go; with `indent` those at the begin stay, as a log line needs them.
    """
    if text.isascii() and text.isprintable() and len(text) <= limit:
        return text.rstrip() if indent else text.strip()
    kept = "".join(
        c if (newlines and c == "\n") or c == "\t" or unicodedata.category(c) not in _UNWANTED else " "
        for c in text[: limit * 4]
    )
    kept = kept.rstrip() if indent else kept.strip()
    return kept if len(kept) <= limit and len(text) <= limit * 4 else kept[: limit - 1] + "…"


def quoted(text: str, limit: int = 80) -> str:
    """Foreign text inside a sentence of ours: a JSON string."""
    return json.dumps(clean(text, limit), ensure_ascii=False)


def signal_name(number: int) -> str:
    """A signal as people call it: SIGKILL for 9, SIGRTMIN+1 for 35; a number that is none stays one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        if signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return f"signal {number}"


def find_secret(text: str) -> str | None:
    """What kind of credential `text` seems to hold, or None."""
    if _ANY_SECRET.search(text) is None:
        return None
    for what, shape in _SECRET_SHAPES:
        if shape.search(text):
            return what
    return None


def find_secret_in_argv(argv: tuple[str, ...] | list[str]) -> str | None:
    """The same for a command, where an option and its value are two words."""
    for word in argv:
        if (what := find_secret(word)) is not None:
            return what
    return find_secret(" ".join(argv))


def secret_name(name: str) -> bool:
    """Whether an environment variable's name says that its value is a secret."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def password_name(name: str) -> bool:
    """The same for a hyper-parameter or label, where "token" is a usual word and means no secret."""
    return bool(_PASSWORD_NAME.search(name))


def mask(text: str) -> str:
    """`text` with what looks like a credential replaced by ***; used wherever foreign text is shown."""
    if _ANY_SECRET.search(text) is None:
        return text
    for _, shape in _SECRET_SHAPES:
        if shape.groups:
            text = shape.sub(lambda m: m.group(0).replace(m.group(1), MASK), text)
        else:
            text = shape.sub(MASK, text)
    return text
