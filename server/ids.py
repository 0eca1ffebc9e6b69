"""Ids: a prefix that names the kind, then 48 bits of time and 30 of chance in Crockford's base 32.

They sort by time of making, can be read aloud, and hold no character that a shell or a URL minds.
"""

from collections.abc import Callable
from random import Random
from secrets import randbits

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"

#: kind -> prefix
PREFIXES = {
    "job": "job",
    "lease": "lse",
    "attempt": "att",
    "token": "tok",
    "run": "run",
    "cluster": "clu",
    "state": "sta",
    "session": "ses",
    "preemption": "pre",
    "reservation": "rsv",
}


def _base32(value: int, length: int) -> str:
    out = []
    for _ in range(length):
        out.append(_DIGITS[value & 31])
        value >>= 5
    return "".join(reversed(out))


class Ids:
    """Makes ids and secrets. `random_bits(n)` is injected so that tests can repeat themselves.

    Ids need no secrecy, only no repeats: they come from a generator that the system seeds once, since a system call
    for each is a tenth of a millisecond on some virtual machines. Secrets always come from the system.
    """

    def __init__(self, random_bits: Callable[[int], int] | None = None) -> None:
        self._random_bits = random_bits or Random(randbits(256)).getrandbits
        self._secret_bits = random_bits or randbits

    def new(self, kind: str, now_ms: int) -> str:
        """A new id of `kind` (a key of PREFIXES), such as job_01jf3k2m9q7h2c4d."""
        return f"{PREFIXES[kind]}_{_base32(now_ms, 10)}{_base32(self._random_bits(30), 6)}"

    def secret(self, nbytes: int = 32) -> str:
        """An unguessable word for tokens and confirmations."""
        return _base32(self._secret_bits(nbytes * 8), (nbytes * 8 + 4) // 5)
