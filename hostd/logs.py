"""A job's log files: pages of whole lines, and a cap that a writer does not notice.

Owns read_log and the cap. The job appends to the file itself (O_APPEND), so hostd's death loses nothing. Renaming does
nothing to a writer that keeps its descriptor, and truncating would move offsets, so the oldest part is punched out:
its disk space is free, every offset stays valid.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Optional

from cotenant.hostd.protocol import LogPage

#: Most that one page may hold, well under the frame limit even when every byte is escaped in JSON.
MAX_PAGE_BYTES = 1024 * 1024
_BLOCK = 64 * 1024
_KEEP_SIZE_AND_PUNCH = 0x03
_libc: Any = None


def read_page(path: str, offset: Optional[int], tail_lines: Optional[int], max_bytes: int, over: bool) -> LogPage:
    """A piece of the log at `path`; `over` says that nobody writes any more.

    From `offset` (at most `tail_lines` lines of it, if given), else the last `tail_lines` lines, else from the oldest
    byte. The text ends with a whole line unless the
    log is over there, or one line alone is longer than `max_bytes` (then it comes in pieces). A missing file is empty.
    """
    max_bytes = max(1, min(max_bytes, MAX_PAGE_BYTES))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return LogPage("", 0, 0, 0, 0, over)
    try:
        size = os.fstat(fd).st_size
        oldest = oldest_offset(fd, size)
        if offset is not None:
            start = min(max(offset, oldest), size)
        elif tail_lines is not None:
            start = _tail_start(fd, size, oldest, max(0, tail_lines), over)
        else:
            start = oldest
        data = os.pread(fd, min(max_bytes, size - start), start)
    finally:
        os.close(fd)
    to_end = start + len(data) >= size
    if not (to_end and over):
        cut = data.rfind(b"\n") + 1
        if cut:
            data = data[:cut]
        elif len(data) < max_bytes:
            data = b""  # a line that is still being written
        else:
            data = _whole_characters(data)
    if offset is not None and tail_lines is not None:
        data = _first_lines(data, tail_lines)
    end = start + len(data)
    return LogPage(data.decode("utf-8", "replace"), start, end, size, oldest, over and end >= size)


def _first_lines(data: bytes, lines: int) -> bytes:
    """The first `lines` lines of `data`."""
    at = 0
    for _ in range(lines):
        found = data.find(b"\n", at)
        if found < 0:
            return data
        at = found + 1
    return data[:at]


def oldest_offset(fd: int, size: int) -> int:
    """The first byte that the cap has left, at the begin of a line; 0 while nothing was dropped."""
    if size == 0:
        return 0
    try:
        first = os.lseek(fd, 0, os.SEEK_DATA)
    except OSError:
        return 0  # a file system that cannot tell has not been punched either
    if first == 0:
        return 0
    at = first
    while at < size:
        block = os.pread(fd, _BLOCK, at)
        if not block:
            break
        found = block.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(block)
    return first


def cap(path: str, max_bytes: int) -> bool:
    """Free the oldest part of the file when it holds more than `max_bytes`; True when something was freed.

    A sixteenth more than needed goes, so that a fast writer does not cause a call per block.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        seen = os.fstat(fd)
        if seen.st_blocks * 512 <= max_bytes + _BLOCK:
            return False
        upto = (seen.st_size - max_bytes + max_bytes // 16) // _BLOCK * _BLOCK
        if upto <= 0:
            return False
        return _punch(fd, upto)
    finally:
        os.close(fd)


def _punch(fd: int, upto: int) -> bool:
    global _libc
    if _libc is None:
        _libc = ctypes.CDLL(None, use_errno=True)
        _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(_libc.fallocate(fd, _KEEP_SIZE_AND_PUNCH, 0, upto) == 0)


def _tail_start(fd: int, size: int, oldest: int, lines: int, over: bool) -> int:
    """Where the last `lines` whole lines begin; an unfinished last line counts only when the log is over."""
    end = size
    if size > oldest:
        last = os.pread(fd, 1, size - 1)
        if last != b"\n" and not over:
            newline = _newline_before(fd, size, oldest)
            end = oldest if newline is None else newline + 1
    if lines == 0:
        return end
    at = end - 1  # the newline that ends the last line is not a begin
    for _ in range(lines):
        found = _newline_before(fd, at, oldest)
        if found is None:
            return oldest
        at = found
    return at + 1


def _newline_before(fd: int, before: int, oldest: int) -> Optional[int]:
    """The offset of the last newline in [oldest, before), or None."""
    while before > oldest:
        start = max(oldest, before - _BLOCK)
        found = os.pread(fd, before - start, start).rfind(b"\n")
        if found >= 0:
            return start + found
        before = start
    return None


def _whole_characters(data: bytes) -> bytes:
    """`data` without a torn UTF-8 character at its end; never empty."""
    for back in range(1, min(4, len(data))):
        byte = data[-back]
        if byte & 0xC0 == 0xC0:
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < need else data
        if byte & 0x80 == 0:
            break
    return data
