"""The files of the journal: a line that says what they are, then frames of length, CRC-32 and zlib-compressed records.

A file is only ever appended to, one frame by one write, so that one who reads beside a running server, or after one that was
killed, finds whole frames and at most one that was begun. Each file begins with a whole world and can be read by itself.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cotenant.server.deciding.records import Reading, Tick

FOLDER: Final = "journal"
SUFFIX: Final = ".ticks"
#: Rises when what stands in a file cannot be read by the code before.
FORMAT: Final = 1
_MAGIC: Final = b"cotenant journal "
#: Longest first line that there can be.
_FIRST: Final = 200
_HEAD: Final = struct.Struct(">II")
#: What is left free on the disk: the journal is the first that goes without, the database the last.
LEAVE_BYTES: Final = 32 << 20


class OtherFormat(Exception):
    """A file of the journal was written in a form that this version does not read; the message says which, and what to do."""


@dataclass
class Found:
    """What was wrong with the files that were read, one sentence each."""

    torn: list[str] = field(default_factory=list)  # ends that were never written out: expected after a kill
    damaged: list[str] = field(default_factory=list)  # what was written once and is something else now


class Segment:
    """One file, open for writing. It comes into being with its first frame.

    `number` is the time at which it begins, in ms; one more than the newest file's where the clock was set back, since the
    names tell the order. `version` stands in the first line.
    """

    def __init__(self, folder: Path, begin_ms: int, version: str) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        newest = max((number(path) for path in folder.glob(f"*{SUFFIX}")), default=-1)
        self.path = folder / f"{max(begin_ms, newest + 1):015d}{SUFFIX}"
        self._first = b"%s%d %s\n" % (_MAGIC, FORMAT, version.encode())
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self.passes = 0  # since the last whole world
        self.size = 0

    def write(self, lines: list[str]) -> None:
        """One frame with these records. What cannot be written whole is taken back.

        Raises:
            OSError: there is no room for it, or the file cannot be written.
        """
        body = zlib.compress("\n".join(lines).encode(), 1)
        frame = (b"" if self.size else self._first) + _HEAD.pack(len(body), zlib.crc32(body)) + body
        disk = os.fstatvfs(self._fd)
        if disk.f_bavail * disk.f_frsize < LEAVE_BYTES + len(frame):
            raise OSError(errno.ENOSPC, f"less than {LEAVE_BYTES >> 20} MiB are free")
        written = append(self._fd, frame)
        if written != len(frame):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += written
        self.passes += len(lines)

    def give_up(self) -> None:
        """Close after a failure: nothing stays of a frame that was begun, and no file without one."""
        try:
            if self.size:
                os.ftruncate(self._fd, self.size)
            else:
                self.path.unlink(missing_ok=True)
        finally:
            self.close()

    def close(self) -> None:
        """No more comes."""
        os.close(self._fd)


def append(fd: int, frame: bytes) -> int:
    """Write at the end of a file, in one call; gives how many bytes there was room for."""
    return os.write(fd, frame)


def number(path: Path) -> int:
    """When a file begins, ms since the epoch; -1 for one that is not of the journal."""
    return int(path.stem) if path.stem.isdigit() else -1


def segments(data_dir: Path, *, since_ms: int | None = None, until_ms: int | None = None) -> list[Path]:
    """The files of a journal, oldest first: all that can hold something between the two times."""
    found = sorted(path for path in (data_dir / FOLDER).glob(f"*{SUFFIX}") if number(path) >= 0)
    last = len(found) - 1
    return [
        path
        for place, path in enumerate(found)
        if (until_ms is None or number(path) <= until_ms)
        and (since_ms is None or place == last or number(found[place + 1]) > since_ms)
    ]


def ticks(path: Path, found: Found) -> Iterator[Tick]:
    """All ticks of one file. What cannot be read ends it and is told in `found`.

    Raises:
        OtherFormat: it is of another format.
        OSError: it cannot be read.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return  # a server that runs beside has just forgotten it
    begin, whole, _ = raw[:_FIRST].partition(b"\n")
    if not whole:
        _torn(path, len(raw), found)
        return
    form, _, version = begin.removeprefix(_MAGIC).partition(b" ")
    if not begin.startswith(_MAGIC) or not form.isdigit():
        found.damaged.append(f"{path.name}: this is no file of the journal")
        return
    if int(form) != FORMAT:
        raise OtherFormat(
            f"{path.name} was written in format {int(form)} of the journal, by version {version.decode(errors='replace')}; "
            f"this version reads format {FORMAT}. Replay it with that version, or leave it out with --from or --until."
        )
    at, reading = len(begin) + 1, Reading()
    while at < len(raw):
        body = b""
        if at + _HEAD.size <= len(raw):
            length, crc = _HEAD.unpack_from(raw, at)
            body = raw[at + _HEAD.size : at + _HEAD.size + length]
        if not body or len(body) < length:
            _torn(path, len(raw) - at, found)
            return
        if zlib.crc32(body) != crc:
            found.damaged.append(f"{path.name}: damaged at byte {at}; what follows in this file is left out")
            return
        for line in zlib.decompress(body).decode().split("\n"):
            try:
                tick = reading.follow(line)
            except ValueError as error:
                found.damaged.append(f"{path.name}: at byte {at}: {error}")
                return
            if tick is not None:
                yield tick
        at += _HEAD.size + length


def last_tick(data_dir: Path, found: Found, *, until_ms: int | None = None) -> Tick | None:
    """The newest tick that is not after `until_ms`; only the file that holds it is read. Errors as `ticks`."""
    for path in reversed(segments(data_dir, until_ms=until_ms)):
        last = None
        for tick in ticks(path, found):
            if until_ms is None or tick.at_ms <= until_ms:
                last = tick
        if last is not None:
            return last
    return None


def _torn(path: Path, left: int, found: Found) -> None:
    found.torn.append(
        f"{path.name}: its last {left} bytes are a record that was not written to its end, by a server that was killed or "
        "that is writing it now; it is left out"
    )


def all_ticks(
    data_dir: Path, found: Found | None = None, *, since_ms: int | None = None, until_ms: int | None = None
) -> Iterator[Tick]:
    """The ticks of a data directory's journal between two times, oldest first. Errors as `ticks`."""
    found = Found() if found is None else found
    for path in segments(data_dir, since_ms=since_ms, until_ms=until_ms):
        for tick in ticks(path, found):
            if (since_ms is None or tick.at_ms >= since_ms) and (until_ms is None or tick.at_ms <= until_ms):
                yield tick
