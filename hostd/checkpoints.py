"""A job's checkpoint directory as seen from outside: what lies there, what is complete, whether something is being saved.

Owns the judgement that a checkpoint is complete. Proved is what its manifest (written last) says, or a format that ends with
what closes it (zip archives, among them .npz and today's .pt files; safetensors). Anything else counts once it stood still
for a while and its writer went on; what an earlier attempt left without a proof counts for nothing, since a KILL leaves files
that stand still as well. Must not know: attempts, the wire. No clock of the files is compared with another: what is newer
than a moment is what was not there, or looked different, at that moment's look.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import threading
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

#: What stood still for so long, over two looks at least, is no longer being written. A guess: above the pauses that
#: writers of big files make between two buffers.
STABLE_S = 2.0
#: Entries looked at below one directory; what lies beyond is not seen.
MOST_ENTRIES = 20_000
#: Files of one checkpoint whose end is looked at.
MOST_PROOFS = 64
#: Endings and beginnings of names that writers give to what is not finished.
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".writing", "~")
_STAGING = (".", "tmp-", "tmp_", "_tmp")
#: What lies beside checkpoints and is none.
_BESIDE = (
    ".json",
    ".jsonl",
    ".txt",
    ".log",
    ".yaml",
    ".yml",
    ".toml",
    ".csv",
    ".tsv",
    ".md",
    ".out",
    ".err",
    ".lock",
    ".sh",
    ".py",
)
_NAMES_BESIDE = frozenset(
    ("latest", "last", "checkpoint", "runs", "logs", "wandb", "mlruns", "tensorboard", "lightning_logs")
)
_ZIP_TAIL = 22 + 65_535  # the end record of a zip archive with its longest comment

#: Size, newest change (ns, the file system's clock), number of files: equal means untouched.
Signature = Tuple[int, int, int]


@dataclass(frozen=True)
class Entry:
    """One checkpoint, a file or a directory, as it lay there at a look. `proof`: whole, torn (with `why`), or none."""

    name: str
    signature: Signature
    proof: str = "none"
    why: str = ""


@dataclass
class _Known:
    entry: Entry
    since: float  # when it was first seen as it is
    looks: int
    inherited: bool  # it lay there like this before this attempt wrote anything


@dataclass
class Directory:
    """One attempt's checkpoint directory over many looks. `path` is absolute; times are CLOCK_BOOTTIME, given by the caller.

    `manifest`: a file inside a checkpoint's directory that is written last; with ``{name}`` in it, beside a checkpoint file.
    `trusted` names what is known to be complete from before the first look: the checkpoint that this attempt goes on from,
    and with its signature what a hostd before us has proved.
    """

    path: str
    manifest: Optional[str] = None
    trusted: Dict[str, Optional[Signature]] = field(default_factory=dict)
    known: Dict[str, _Known] = field(default_factory=dict)
    changed_at: Optional[float] = None  # when something in it was last seen to be another
    error: str = ""  # why it cannot be read, if so
    _stir: Optional[Tuple[int, int, int]] = None
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def look(self, now: float) -> None:
        """Look at the directory once. May block as long as its file system does; of two looks at a time one waits."""
        with self._looking:
            self._look(now)

    def _look(self, now: float) -> None:
        found, stir, self.error = scan(self.path, self.manifest, {n: k.entry for n, k in self.known.items()})
        first = self._stir is None
        if not first and stir != self._stir:
            self.changed_at = now
        self._stir = stir
        known: Dict[str, _Known] = {}
        for name, entry in found.items():
            before = self.known.get(name)
            if before is not None and before.entry.signature == entry.signature:
                known[name] = _Known(entry, before.since, before.looks + 1, before.inherited)
            else:
                known[name] = _Known(entry, now, 1, first)
        self.known = known

    def signatures(self) -> Dict[str, Signature]:
        """What lies there, for a later comparison."""
        return {name: known.entry.signature for name, known in self.known.items()}

    def _why_not(self, known: _Known, now: float, over: bool, inherited: bool) -> str:
        """Why a checkpoint does not count as complete; empty when it does. `over`: its writer ended by itself."""
        entry = known.entry
        if entry.proof == "torn":
            return entry.why
        if entry.proof == "whole":
            return ""
        if inherited:
            if entry.name in self.trusted and self.trusted[entry.name] in (None, entry.signature):
                return ""
            return "an earlier attempt left it, and nothing proves that it is complete"
        if over or (known.looks > 1 and now - known.since >= STABLE_S):
            return ""
        return "it was still being written"

    def newest(self, now: float, over: bool = False) -> Tuple[Optional[Entry], List[str]]:
        """(the newest complete checkpoint or None, the newer ones that do not count, each with its reason)."""
        skipped: List[str] = []
        for known in sorted(self.known.values(), key=lambda k: (k.entry.signature[1], k.entry.name), reverse=True):
            why = self._why_not(known, now, over, known.inherited)
            if not why:
                return known.entry, skipped
            skipped.append(f"{known.entry.name}: {why}")
        return None, skipped

    def newer_than(self, before: Dict[str, Any], now: float, over: bool = False) -> Optional[Entry]:
        """The newest complete checkpoint that was not there like this in `before` (see `signatures`), or None."""
        for known in sorted(self.known.values(), key=lambda k: (k.entry.signature[1], k.entry.name), reverse=True):
            there = before.get(known.entry.name)
            if there is not None and tuple(there) == known.entry.signature:
                continue
            # whoever watched first, what was not there then this attempt has written
            if not self._why_not(known, now, over, inherited=False):
                return known.entry
        return None


def scan(
    path: str, manifest: Optional[str], before: Dict[str, Entry]
) -> Tuple[Dict[str, Entry], Tuple[int, int, int], str]:
    """(checkpoints by name, a value that changes whenever anything below does, why it cannot be read).

    `before` spares the proofs of what has not changed since.
    """
    found: Dict[str, Entry] = {}
    stir = [0, 0, 0]
    try:
        with os.scandir(path) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return found, (0, 0, 0), ""
    except OSError as error:
        return found, (0, 0, 0), f"{path}: {error.strerror}"
    left = MOST_ENTRIES
    for entry in listed:
        try:
            signature, files = _measure(entry.path, left)
        except OSError:
            continue  # it went away during the look
        left -= len(files) + 1
        stir[0] += signature[0]
        stir[1] = max(stir[1], signature[1])
        stir[2] += signature[2] + 1
        if not _may_be_one(entry.name, manifest) or not files:
            continue
        known = before.get(entry.name)
        settled = known is not None and (known.proof == "whole" or (known.proof == "torn" and not manifest))
        if known is not None and settled and known.signature == signature:
            found[entry.name] = known
        else:
            proof, why = _prove(path, entry.name, files, manifest)
            found[entry.name] = Entry(entry.name, signature, proof, why)
        if left <= 0:
            break
    return found, (stir[0], stir[1], stir[2]), ""


def _may_be_one(name: str, manifest: Optional[str]) -> bool:
    lower = name.lower()
    if lower.startswith(_STAGING) or lower.endswith(_UNFINISHED) or ".tmp" in lower:
        return False
    if lower.endswith(_BESIDE) or lower in _NAMES_BESIDE or lower.startswith("events.out."):
        return False
    ending = manifest.replace("{name}", "") if manifest and "{name}" in manifest else ""
    return not (ending and name.endswith(ending))


def _measure(path: str, most: int) -> Tuple[Signature, List[str]]:
    """(signature, the files below) of a file or a directory. Raises OSError."""
    seen = os.stat(path)
    if not stat.S_ISDIR(seen.st_mode):
        return (seen.st_size, seen.st_mtime_ns, 1), [path]
    size, newest = 0, seen.st_mtime_ns
    files: List[str] = []
    waiting = [path]
    while waiting and len(files) < most:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                below = entry.stat(follow_symlinks=False)
                newest = max(newest, below.st_mtime_ns)
                if stat.S_ISDIR(below.st_mode):
                    waiting.append(entry.path)
                else:
                    size += below.st_size
                    files.append(entry.path)
    return (size, newest, len(files)), files


def _prove(folder: str, name: str, files: List[str], manifest: Optional[str]) -> Tuple[str, str]:
    """(proof, why not): see `Entry`."""
    path = os.path.join(folder, name)
    inside = os.path.isdir(path)
    if manifest:
        witness = (
            os.path.join(folder, manifest.replace("{name}", name))
            if "{name}" in manifest
            else os.path.join(path, manifest)
        )
        if inside or "{name}" in manifest:
            there = os.path.exists(witness)
            return ("whole", "") if there else ("torn", f"its manifest {os.path.basename(witness)} is not there")
    if inside and any(os.path.basename(file).lower().endswith(_UNFINISHED) for file in files):
        return "torn", "a file in it is unfinished"
    whole = 0
    for file in files[:MOST_PROOFS]:
        try:
            proof = prove_file(file)
        except OSError as error:
            return "torn", f"{os.path.basename(file)} cannot be read: {error.strerror}"
        if proof == "torn":
            return "torn", f"{os.path.basename(file)} is not whole"
        whole += proof == "whole"
    # a directory may get more files, however whole those are that it has
    return ("whole", "") if whole and not inside else ("none", "")


def prove_file(path: str) -> str:
    """``whole`` or ``torn`` where the file's format says so, ``none`` where it does not. Raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return "torn"
        head = file.read(8)
        if head[:4] == b"PK\x03\x04":
            file.seek(max(0, size - _ZIP_TAIL))
            return "whole" if _zip_ends(file.read(_ZIP_TAIL)) else "torn"
        if path.endswith(".safetensors"):
            return "whole" if _tensors_end(head, file.read(16 * 1024 * 1024), size) else "torn"
    return "none"


def _zip_ends(tail: bytes) -> bool:
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 22:
        return False
    comment = struct.unpack_from("<H", tail, at + 20)[0]
    return bool(at + 22 + comment == len(tail))


def _tensors_end(head: bytes, header: bytes, size: int) -> bool:
    if len(head) < 8:
        return False
    length = struct.unpack("<Q", head)[0]
    if length > len(header):
        return False
    try:
        tensors = json.loads(header[:length])
        ends = [one["data_offsets"][1] for name, one in tensors.items() if name != "__metadata__"]
        return bool(8 + length + max(ends, default=0) == size)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return False
