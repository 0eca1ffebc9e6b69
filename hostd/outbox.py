"""Reports that the server has not acknowledged yet.

Owns the sequence numbers and the order. A number is never used twice, also after hostd's own death: the count of
hostd's starts on this state directory is its upper part. Reports of the same thing replace each other while nobody
listens, so that the box stays as small as the host is.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

from cotenant.hostd import protocol

#: Numbers of one life of hostd. 2**53 / 2**32 lives fit into a JSON number.
LIFE = 1 << 32


class Outbox:
    """Sends reports while a server is there, keeps them until it says that it has them."""

    def __init__(self, starts: int) -> None:
        self._next = starts * LIFE + 1
        self._kept: Dict[int, Tuple[str, str, bytes]] = {}  # seq -> (name, key, frame), rising
        self._send: Optional[Callable[[bytes], None]] = None

    def add(self, name: str, key: str, body: Any) -> int:
        """Report `body` about `key`; returns the number."""
        seq = self._next
        self._next += 1
        frame = protocol.report(seq, name, body)
        if self._send is None:
            for old, (old_name, old_key, _) in list(self._kept.items()):
                if (old_name, old_key) == (name, key):
                    del self._kept[old]
        self._kept[seq] = (name, key, frame)
        if self._send is not None:
            self._send(frame)
        return seq

    def ack(self, seq: int) -> Optional[Tuple[str, str]]:
        """The server has this one report; returns (name, key), or None when it was no longer kept."""
        kept = self._kept.pop(seq, None)
        return kept[:2] if kept else None

    def connect(self, send: Callable[[bytes], None]) -> None:
        """A server listens from now on: repeat everything it has not acknowledged, oldest first."""
        self._send = send
        for _name, _key, frame in list(self._kept.values()):
            send(frame)

    def disconnect(self) -> None:
        """Nobody listens; keep what comes."""
        self._send = None

    def __len__(self) -> int:
        return len(self._kept)
