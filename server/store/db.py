"""`control.db`: one writer that groups the commits of those who wait, and one connection that reads.

A transaction is a plain function over a `Tx`; only the COMMIT, which waits for the disk, leaves the loop's thread
(docs/adr/0002). Within a group each transaction is a savepoint; answers, change
notices and wake-ups follow the COMMIT only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.resources
import json
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import aiosqlite

from cotenant.server.errors import Unavailable

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Transactions in one COMMIT at most, so that none waits for a long tail of others and the loop is not held up.
GROUP_MAX: Final = 64
BUSY_TIMEOUT_MS: Final = 5000
#: File systems whose locks or shared memory SQLite's WAL mode cannot rely on (sqlite.org/wal.html, "network filesystem").
NETWORK_FILE_SYSTEMS: Final = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "glusterfs",
        "lustre",
        "gpfs",
        "beegfs",
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.s3fs",
        "ncpfs",
    ]
)
_EXIT_STORAGE_FAILED: Final = 74  # EX_IOERR of sysexits.h
#: What SQLite keeps in the file's header for us, so that another program's file is never taken for ours: "CtN1".
APPLICATION_ID: Final = 0x43744E31


class StoreRefused(RuntimeError):
    """The data directory cannot be used; the message says why and what to do."""


class Tx:
    """One transaction on the writer's connection. Collects what changed, for those who are told after the COMMIT."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.changed: set[str] = set()  # resource addresses
        self.dirty: set[tuple[str, str]] = set()  # (kind, id) rows that the keeper must read again
        self.opens = False  # whether something that waits may start because of it

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self.connection.execute(sql, values)

    def one(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self.connection.execute(sql, values).fetchone()
        return row

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        return self.connection.execute(sql, values).fetchall()

    def changes(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Execute, and say how many rows changed."""
        return self.connection.execute(sql, values).rowcount


class _Waiting:
    __slots__ = ("error", "fn", "future", "joined", "result", "tx")

    def __init__(self, fn: Callable[[Tx], Any], future: asyncio.Future[Any], *, joined: bool = False) -> None:
        self.fn = fn
        self.future = future
        self.joined = joined
        self.result: Any = None
        self.error: BaseException | None = None
        self.tx: Tx | None = None


class Database:
    """Open with `await Database.open(...)`, close with `await close()`."""

    def __init__(self, path: Path, writer: aiosqlite.Connection, reader: aiosqlite.Connection) -> None:
        self.path = path
        self._writer = writer
        self._reader = reader
        self._waiting: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._listeners: list[Callable[[set[str], set[tuple[str, str]]], None]] = []
        self._decide: Callable[[sqlite3.Connection, set[tuple[str, str]]], None] | None = None
        self._undone: Callable[[], None] = lambda: None
        self._joining: list[_Waiting] | None = None  # what `_decide` adds to the group that is open
        self._peeker = sqlite3.connect(read_only_uri(path), uri=True, isolation_level=None)
        self._peeker.row_factory = sqlite3.Row
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.groups = 0
        self.transactions = 0

    @classmethod
    async def open(cls, path: Path) -> Database:
        """Open or make the file, bring it to the newest migration, and start the writer.

        Raises:
            StoreRefused: network file system, a newer schema, or a file that is not ours.
        """
        refuse_network_file_system(path.parent)
        refuse_foreign(path)
        make_private(path)
        writer = await aiosqlite.connect(path, isolation_level=None, check_same_thread=False)
        try:
            await _in_thread(writer, configure)
            await _in_thread(writer, migrate, path)
            # from here on BEGIN runs on the loop's thread, which must not wait
            await _in_thread(writer, lambda connection: connection.execute("PRAGMA busy_timeout=0"))
            reader = await aiosqlite.connect(read_only_uri(path), uri=True, isolation_level=None)
        except BaseException:
            await writer.close()
            raise
        reader.row_factory = sqlite3.Row
        writer.row_factory = sqlite3.Row
        self = cls(path, writer, reader)
        self._task = asyncio.create_task(self._write_groups(), name="store writer")
        return self

    def on_commit(self, listener: Callable[[set[str], set[tuple[str, str]]], None]) -> None:
        """Call `listener(changed addresses, dirty rows)` on the loop after each COMMIT, before the answers go out."""
        self._listeners.append(listener)

    def before_commit(
        self, decide: Callable[[sqlite3.Connection, set[tuple[str, str]]], None], undone: Callable[[], None]
    ) -> None:
        """Call `decide(connection, dirty rows)` in a group that lets something start, before its COMMIT.

        What it submits joins the group, so that one COMMIT carries both an end and the start that follows from it
        (docs/adr/0007). It sees rows that are not committed yet; `undone()` says that they never were. Neither may raise.
        """
        self._decide, self._undone = decide, undone

    async def write(self, fn: Callable[[Tx], T]) -> T:
        """Run `fn` in a transaction and return its result once it is durable.

        What `fn` raises undoes this transaction alone and is raised here. A cancelled caller does not undo
        what was queued: it may be committed all the same.

        Raises:
            Unavailable: the disk is full (storage_full) or the store is closing.
        """
        return await self.submit(fn)

    def submit(self, fn: Callable[[Tx], T]) -> asyncio.Future[T]:
        """Put `fn` in line now and return its future: transactions are made in the order of these calls."""
        if self._closing:
            raise Unavailable("the server is shutting down", hint="Try again in a few seconds.")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._joining is not None:
            self._joining.append(_Waiting(fn, future, joined=True))
        else:
            self._waiting.append(_Waiting(fn, future))
            self._wake.set()
        return future

    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn` over one consistent snapshot that holds at least all that was committed before the call."""
        return await _in_thread(self._reader, _snapshot, fn)

    def peek(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """`read` for a few rows by key, on the loop's own thread: cheaper than the hop to another (docs/adr/0002).

        In WAL mode no writer makes a reader wait. Nothing that walks a table belongs here.
        """
        return _snapshot(self._peeker, fn)

    async def close(self) -> None:
        """Write out what waits, then close."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        self._peeker.close()
        await self._reader.close()
        await self._writer.close()

    async def _write_groups(self) -> None:
        while True:
            await self._wake.wait()
            group, self._waiting = self._waiting[:GROUP_MAX], self._waiting[GROUP_MAX:]
            if not self._waiting and not self._closing:
                self._wake.clear()
            if not group:
                if self._closing:
                    return
                continue
            try:
                await self._run_group(group)
            except sqlite3.Error as error:
                self._fail_group(group, error)
                self._undone()
                continue
            except Exception:
                # not a transaction's own failure, those are kept with it: nobody could be answered any more
                log.critical("the store's writer failed: ending", exc_info=True)
                _end()
            self.groups += 1
            self.transactions += len(group)
            changed: set[str] = set()
            dirty: set[tuple[str, str]] = set()
            for item in group:
                if item.error is None and item.tx is not None:
                    changed |= item.tx.changed
                    dirty |= item.tx.dirty
            if changed or dirty:
                for listener in self._listeners:
                    try:
                        listener(changed, dirty)
                    except Exception:
                        # what is committed is committed: those who wait get their answers all the same
                        log.exception("a listener to commits failed")
            # a start that joined goes out first: its host can be at work while the asker is being answered
            for item in sorted(group, key=lambda item: not item.joined):
                if item.future.cancelled():
                    continue
                if item.error is not None:
                    item.future.set_exception(item.error)
                else:
                    item.future.set_result(item.result)

    async def _run_group(self, group: list[_Waiting]) -> None:
        """Statements here, on the loop's thread; the COMMIT, which waits for the disk, in the connection's own.

        A busy loop hands the interpreter lock over every 5 ms at best: with the statements in the other thread, each
        of a dozen a transaction waited for it. They take a tenth of a millisecond here, and GROUP_MAX bounds the sum.
        The two threads never use the connection at the same time: this coroutine alone does, one step after the other.
        """
        connection = self._writer._conn
        try:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise
                await _in_thread(self._writer, _begin_patiently)
            _run_statements(connection, group)
            if self._decide is not None and not self._closing:
                dirty = self._opened(group)
                if dirty:
                    self._joining = []
                    try:
                        self._decide(connection, dirty)
                    finally:
                        joined, self._joining = self._joining, None
                    group.extend(joined)
                    _run_statements(connection, joined)
            await self._writer.commit()
        except BaseException:
            if connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    await self._writer.rollback()
            raise

    @staticmethod
    def _opened(group: list[_Waiting]) -> set[tuple[str, str]]:
        """The rows that a group changed, if something may start because of it."""
        done = [item.tx for item in group if item.error is None and item.tx is not None]
        return set().union(*(tx.dirty for tx in done)) if any(tx.opens for tx in done) else set()

    def _fail_group(self, group: list[_Waiting], error: sqlite3.Error) -> None:
        """The group as a whole failed: refuse where nothing can have been written, end where we do not know."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            refusal = Unavailable(
                "the disk that holds the data directory is full; nothing was changed",
                code="storage_full",
                hint="A person has to free space there.",
                retry_after_s=60,
            )
        elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            # BEGIN did not get the lock: another program has the file open for writing
            refusal = Unavailable(
                "another program keeps the database locked; nothing was changed",
                code="storage_busy",
                hint="Try again; if it stays, a person has to find what has the file open.",
                retry_after_s=5,
            )
        else:
            log.critical("the store failed to commit (%s): ending, so that nothing unwritten is believed", error)
            _end()
        for item in group:
            if not item.future.done():
                item.future.set_exception(refusal)


def _end() -> NoReturn:
    """End the process at once: what is on disk is the truth, and the next start reads it."""
    logging.shutdown()
    os._exit(_EXIT_STORAGE_FAILED)


async def _in_thread(connection: aiosqlite.Connection, fn: Callable[..., T], *args: Any) -> T:
    """Call `fn(sqlite3 connection, *args)` in the connection's own thread.

    aiosqlite has no public way to send more than one statement at once; this is the one private call we make of it.
    """
    result: T = await connection._execute(fn, connection._conn, *args)  # type: ignore[no-untyped-call]
    return result


def configure(connection: sqlite3.Connection) -> None:
    """Set a writing connection to the rules of the store: WAL, every COMMIT synced, foreign keys held.

    Raises:
        StoreRefused: the file system cannot do WAL.
    """
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise StoreRefused(
            f"the data directory's file system does not allow SQLite's WAL mode (got {mode!r}): use a local disk"
        )
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    # A checkpoint stalls the group that meets it: let the log grow to 16 MiB before.
    connection.execute("PRAGMA wal_autocheckpoint=4000")


def _snapshot(connection: sqlite3.Connection, fn: Callable[[sqlite3.Connection], T]) -> T:
    connection.execute("BEGIN")
    try:
        return fn(connection)
    finally:
        connection.execute("COMMIT")


def _begin_patiently(connection: sqlite3.Connection) -> None:
    """BEGIN while another program has the file: wait for it as long as the store waits for anything."""
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    try:
        connection.execute("BEGIN IMMEDIATE")
    finally:
        connection.execute("PRAGMA busy_timeout=0")


def _run_statements(connection: sqlite3.Connection, group: list[_Waiting]) -> None:
    for item in group:
        connection.execute("SAVEPOINT one")
        item.tx = Tx(connection)
        try:
            item.result = item.fn(item.tx)
        except Exception as error:  # the transaction's own failure: undone alone, raised to its caller
            item.error = error
            if not connection.in_transaction or _concerns_all(error):
                raise
            connection.execute("ROLLBACK TO one")
        connection.execute("RELEASE one")


def _concerns_all(error: Exception) -> bool:
    """Whether a statement failed for the disk's sake, which the others of the group share."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


# ---- opening ----------------------------------------------------------------------------------


def migrations() -> list[tuple[int, str, str]]:
    """(number, name, SQL) in order. Numbers have no gaps."""
    folder = importlib.resources.files("cotenant.server.store") / "migrations"
    found = []
    for entry in folder.iterdir():
        if match := re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name):
            found.append((int(match[1]), match[2], entry.read_text("utf-8")))
    found.sort()
    if [number for number, _, _ in found] != list(range(1, len(found) + 1)):
        raise RuntimeError("migrations must be numbered from 0001 without gaps")
    return found


def migrate(connection: sqlite3.Connection, path: Path) -> int:
    """Bring the schema to the newest version, each step in one transaction, with a backup before the first.

    Raises:
        StoreRefused: the file was written by a newer Cotenant, or is not one of ours.
    """
    steps = migrations()
    version = _check_identity(connection, path, len(steps))
    if 0 < version < len(steps):
        backup = path.with_name(f"{path.name}.before-{version + 1:04d}")
        make_private(backup)
        with contextlib.closing(sqlite3.connect(backup)) as copy:
            connection.backup(copy)
    for number, _, sql in steps[version:]:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in _statements(sql):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
    return len(steps)


def read_only_uri(path: Path) -> str:
    """How SQLite is told to open `path` for reading alone. A name may hold what means something in a URI, such as # or %."""
    return f"{path.absolute().as_uri()}?mode=ro"


def make_private(path: Path) -> None:
    """Make the file if it is missing, and let nobody but its user read it; the same for what SQLite keeps beside it.

    SQLite gives a new -wal and -shm the mode of the database, so the database has to be closed before its first use.

    Raises:
        StoreRefused: the file cannot be made or belongs to another user.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for file in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mode & 0o077:
                    file.chmod(0o600)
    except OSError as error:
        raise StoreRefused(f"{path} cannot be opened ({error.strerror}): run as the user it belongs to") from error


def refuse_foreign(path: Path) -> None:
    """Look before anything is touched: a file that is not ours, or of a newer version, stays exactly as it is.

    Raises:
        StoreRefused: see `migrate`.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    with contextlib.closing(sqlite3.connect(read_only_uri(path), uri=True, isolation_level=None)) as connection:
        _check_identity(connection, path, len(migrations()))


def _check_identity(connection: sqlite3.Connection, path: Path, newest: int) -> int:
    """The schema's version, once it is certain that the file is ours and not newer than we are."""
    try:
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        made_by: int = connection.execute("PRAGMA application_id").fetchone()[0]
        tables: int = connection.execute("SELECT count(*) FROM sqlite_schema WHERE type = 'table'").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise StoreRefused(
            f"{path} cannot be read as a database ({error}): choose another --data directory, or restore a backup"
        ) from error
    if made_by != APPLICATION_ID if version else tables:
        raise StoreRefused(f"{path} is an SQLite file that Cotenant did not make: choose another --data directory")
    if version > newest:
        raise StoreRefused(
            f"{path} has schema {version}, this Cotenant knows {newest}: install the newer version, or restore a backup"
        )
    return version


def _statements(sql: str) -> list[str]:
    """Single statements of a script; triggers hold semicolons, so SQLite itself says where one ends."""
    out: list[str] = []
    current = ""
    for line in sql.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            out.append(current)
            current = ""
    if current.strip():
        raise RuntimeError(f"a migration ends inside a statement: {current[:80]!r}")
    return out


def refuse_network_file_system(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
    """
    Raises:
        StoreRefused: `folder` lies on a file system that other machines share.
    """
    kind = file_system_of(folder, mountinfo)
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreRefused(
            f"{folder} is on a network file system ({kind}), where SQLite can lose data: choose a local disk with --data"
        )


def file_system_of(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that holds `folder`, such as ext4; empty when it cannot be told."""
    try:
        lines = mountinfo.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return ""
    target = str(folder.resolve())
    best, kind = "", ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        # proc(5): blank, tab, line break and backslash stand as three octal digits, all else as it is
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount on the same point hides the earlier one
            best, kind = point, right.split()[0]
    return kind


class DataLock:
    """The data directory belongs to one server at a time; the lock ends with the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise StoreRefused(
                f"another server (pid {holder or 'unknown'}) uses the data directory {folder}: stop it, or choose another --data"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


def dumps(value: Any) -> str:
    """Canonical JSON: sorted keys, no blanks, so that equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
