"""Forgotten attempts that left no log, in one file instead of three each.

Owns `DIR/forgotten`: a line per attempt with its whole record. Making the files of an attempt is what costs most of a start (0.1 ms
on a fresh ext4, 1 to 3 ms on one without a journal where many files were removed within minutes: it passes over each of
their inodes), so the files of an attempt that wrote nothing serve another. Must not know: what a record says.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Dict, List, NamedTuple, Optional, Tuple

from cotenant.hostd.durable import replace_open, write_all

#: The file is cut to the newer half of its lines above this; a line is about 1 KiB.
MAX_BYTES = 64 * 1024 * 1024


class _Place(NamedTuple):
    offset: int
    length: int
    at: float  # when it was forgotten, by the wall clock


class Archive:
    """The file, with an index of it in memory."""

    def __init__(self, path: str, keep_s: float) -> None:
        self._path = path
        self._places: Dict[str, _Place] = {}  # in the order of the file
        self._size = 0
        self._keep_s = keep_s
        self._read()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._places

    def ids(self) -> List[Tuple[float, str]]:
        """All, each with when it was forgotten, oldest first."""
        return [(place.at, attempt_id) for attempt_id, place in self._places.items()]

    def add(self, records: List[Tuple[str, bytes]]) -> None:
        """Take ids with their records. Not synced: after a power cut the server is told of them once more. Raises OSError."""
        now, body = time.time(), []
        at = self._size
        fresh = {}
        for attempt_id, record in records:
            line = _line(attempt_id, record.decode("utf-8", "surrogateescape"), now)
            fresh[attempt_id] = _Place(at, len(line), now)
            body.append(line)
            at += len(line)
        try:
            write_all(self._fd, b"".join(body))
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._places.update(fresh)
        self._size = at
        if self._size > MAX_BYTES:
            self._cut(list(self._places)[len(self._places) // 2 :])

    def find(self, attempt_id: str) -> Optional[bytes]:
        """The record of `attempt_id`, or None."""
        place = self._places.get(attempt_id)
        if place is None:
            return None
        with contextlib.suppress(OSError, ValueError, KeyError):
            text: str = json.loads(os.pread(self._fd, place.length, place.offset))["record"]
            return text.encode("utf-8", "surrogateescape")
        return None

    def sweep(self) -> None:
        """Drop what is older than `keep_s`, once that is half of the file: else it is rewritten for a few lines."""
        oldest = time.time() - self._keep_s
        if not self._places or next(iter(self._places.values())).at >= oldest:
            return
        kept = [attempt_id for attempt_id, place in self._places.items() if place.at >= oldest]
        if len(kept) * 2 <= len(self._places):
            self._cut(kept)

    def _read(self) -> None:
        torn, line = False, b""
        try:
            with open(self._path, "rb") as file:
                for line in file:
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        said = json.loads(line)
                        self._places.pop(said["id"], None)
                        self._places[said["id"]] = _Place(self._size, len(line), float(said["at"]))
                    self._size += len(line)
                    torn = not line.endswith(b"\n")
            if torn:
                os.truncate(self._path, self._size - len(line))
                self._size -= len(line)
                # it may have been whole but for its end
                self._places = {key: place for key, place in self._places.items() if place.offset < self._size}
        except FileNotFoundError:
            return

    def _cut(self, kept: List[str]) -> None:
        """Rewrite the file with `kept` alone."""
        body, places, at = [], {}, 0
        for attempt_id in kept:
            old = self._places[attempt_id]
            line = os.pread(self._fd, old.length, old.offset)
            places[attempt_id] = _Place(at, len(line), old.at)
            body.append(line)
            at += len(line)
        fd = replace_open(self._path, b"".join(body))
        os.close(self._fd)
        self._fd, self._places, self._size = fd, places, at

    def close(self) -> None:
        os.close(self._fd)


def _line(attempt_id: str, record: str, at: float) -> bytes:
    return json.dumps({"id": attempt_id, "at": round(at, 3), "record": record}).encode() + b"\n"
