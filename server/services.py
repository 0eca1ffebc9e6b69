"""Builds what runs behind the doors: data directory, store, world, loop, links to hosts. Ends it in good order."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import logging
import os
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from cotenant.server.backends.local import LocalRoad
from cotenant.server.backends.road import Road
from cotenant.server.clock import Clock, SystemClock
from cotenant.server.config import FILE, HostSettings, Settings
from cotenant.server.control import Control
from cotenant.server.control.context import Context
from cotenant.server.control.tokens import NAME, TOKEN_PREFIX, write_token
from cotenant.server.deciding.world import Policy
from cotenant.server.errors import Unavailable
from cotenant.server.ids import Ids
from cotenant.server.journal import Journal
from cotenant.server.keeper import Keeper
from cotenant.server.live import Live
from cotenant.server.loop import Loop
from cotenant.server.model.caller import LOOP, SCOPES
from cotenant.server.store import callers, events, hosts, meta
from cotenant.server.store.db import Database, DataLock, StoreRefused, Tx, read_only_uri, refuse_network_file_system

log = logging.getLogger(__name__)

#: How each kind of host is reached.
KINDS: Final[dict[str, Callable[[Settings, HostSettings], Road]]] = {"local": LocalRoad}
#: How long a start waits for the first word of this machine's hostd, which takes 0.3 s to start and has drivers to ask.
FIRST_WORD_S: Final = 10.0
LOCAL_TOKEN: Final = "local.token"
PANEL_KEY: Final = "panel.key"
SERVER_FILE: Final = "server.json"
DATABASE: Final = "control.db"


@contextlib.asynccontextmanager
async def services(settings: Settings, clock: Clock | None = None, ids: Ids | None = None) -> AsyncIterator[Control]:
    """Everything behind the doors, running; on the way out what runs on hosts is left running.

    Raises:
        StoreRefused: the data directory cannot be used; the message says why.
    """
    async with core(settings, clock, ids) as control, _running(control):
        yield control


@contextlib.asynccontextmanager
async def core(settings: Settings, clock: Clock | None = None, ids: Ids | None = None) -> AsyncIterator[Control]:
    """The store and the use cases over it, without a loop and without a host: nothing starts by itself.

    Raises:
        StoreRefused: the data directory cannot be used; the message says why.
    """
    clock, ids = clock or SystemClock(), ids or Ids()
    prepare_directory(settings.data_dir)
    lock = DataLock(settings.data_dir)
    try:
        db = await Database.open(settings.data_dir / DATABASE)
        try:
            cluster_id, incarnation = await db.write(lambda tx: _begin(tx, settings, ids, clock.now_ms()))
            live = Live()
            context = Context(
                db=db,
                keeper=Keeper(db, live, settings),
                live=live,
                settings=settings,
                clock=clock,
                ids=ids,
                cluster_id=cluster_id,
                incarnation=incarnation,
                start_nonce=secrets.token_hex(8),
                policy=Policy(pickup_s=settings.pickup_s),
            )
            context.journal = _journal(context)
            control = Control(context)
            await control.auth.load()
            await _local_token(control)
            control.logins.load(_panel_key(settings.data_dir))
            context.db.on_commit(context.committed)
            try:
                yield control
            finally:
                if context.journal is not None:
                    await asyncio.to_thread(context.journal.close)
            await db.write(lambda tx: events.append(tx, "server.stopped", LOOP, clock.now_ms(), old=str(incarnation)))
        finally:
            await db.close()
    finally:
        lock.release()


def _journal(context: Context) -> Journal | None:
    """The journal of this server; that it fails, or works again, becomes an event. None where nobody wants one."""
    settings, loop = context.settings, asyncio.get_running_loop()
    if not settings.journal_days:
        return None

    async def record(reason: str | None) -> None:
        kind, severity = ("journal.resumed", "info") if reason is None else ("journal.failed", "warning")

        def write(tx: Tx) -> None:
            events.append(tx, kind, LOOP, context.now(), severity=severity, reason=reason)

        # on a full disk there may be no room for the event either; the log has it
        with contextlib.suppress(Unavailable):
            await context.db.write(write)

    def tell(reason: str | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: context.background_task(record(reason)))

    return Journal(settings.data_dir, days=settings.journal_days, mib=settings.journal_mib, tell=tell)


@contextlib.asynccontextmanager
async def _running(control: Control) -> AsyncIterator[None]:
    context = control.context
    loop = Loop(context, control.leases, control.holds, control.hosts, control.auth, control.preempting, control.idling)
    context.wake = loop.wake

    await loop.renew_all("the server was down")
    tasks = [asyncio.create_task(loop.run(), name="loop")]
    roads = {host.name: KINDS[host.kind](context.settings, host) for host in context.settings.hosts.values()}
    for name, road in roads.items():
        link = road.link(partial(control.hosts.hello, name), control.hosts)
        control.hosts.links[name] = link
        tasks.append(asyncio.create_task(link.run(), name=f"link {name}"))
    loop.wake()
    try:
        # Who asks right after `ready` shall be told of this machine's cards, not that there are none.
        near = [control.hosts.links[name].tried.wait() for name, road in roads.items() if road.near]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*near), FIRST_WORD_S)
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for work in tuple(context.background):
            work.cancel()
        await asyncio.gather(*context.background, return_exceptions=True)
        for name, road in roads.items():
            await road.leave(await context.db.read(partial(_has_work, host=name)))


def _has_work(connection: Any, host: str) -> bool:
    return bool(
        connection.execute(
            "SELECT EXISTS (SELECT 1 FROM attempt WHERE state <> 'ended' AND host = ?)"
            " OR EXISTS (SELECT 1 FROM lease_slot WHERE use <> 'freed' AND host = ?)",
            (host, host),
        ).fetchone()[0]
    )


def _begin(tx: Tx, settings: Settings, ids: Ids, now: int) -> tuple[str, int]:
    """This start's identity: the cluster's id for ever, the incarnation one higher.

    Raises:
        StoreRefused: the directory is a copy of another that is still there.
    """
    folder = settings.data_dir
    cluster_id = meta.get(tx.connection, "cluster_id")
    if cluster_id is None:
        cluster_id = ids.new("cluster", now)
        meta.put(tx, "cluster_id", cluster_id)
    home, here = meta.get(tx.connection, "home"), str(folder.resolve())
    if home != here:
        if home is not None and _same_cluster(Path(home), folder, cluster_id):
            raise StoreRefused(
                f"{here} is a copy of the data directory {home}: two servers with one identity would give the same cards twice."
                f" Serve {home}, or begin anew in an empty --data; if this one shall replace it for good, remove {home} first"
            )
        meta.put(tx, "home", here)
    hosts.without_entry(tx, sorted(settings.hosts))
    incarnation = meta.next_of(tx, "incarnation")
    events.append(tx, "server.started", LOOP, now, new=str(incarnation))
    return cluster_id, incarnation


def _same_cluster(home: Path, folder: Path, cluster_id: str) -> bool:
    """Whether `home` still holds the records of this cluster, and is another directory than `folder`."""
    with contextlib.suppress(OSError, sqlite3.Error):
        if not (home / DATABASE).exists() or home.samefile(folder):
            return False
        with contextlib.closing(sqlite3.connect(read_only_uri(home / DATABASE), uri=True)) as other:
            return meta.get(other, "cluster_id") == cluster_id
    return False


def prepare_directory(folder: Path) -> None:
    """Make the data directory, for this user alone.

    Raises:
        StoreRefused: it cannot be made or written, or lies on a network file system.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _close_to_others(folder)
        probe = folder / ".probe"
        probe.touch(0o600)
        probe.unlink()
    except OSError as error:
        raise StoreRefused(
            f"the data directory {folder} cannot be written ({error.strerror}): choose another --data"
        ) from error
    refuse_network_file_system(folder)


def _close_to_others(folder: Path) -> None:
    """Who can read the data directory is admin: one of ours, or a new one, becomes its user's alone.

    A directory with other things in it is left as it is, since others may need it; what we put there is closed anyway.
    """
    seen = folder.stat()
    if not seen.st_mode & 0o077:
        return
    there = {entry.name for entry in folder.iterdir()}
    if seen.st_uid == os.geteuid() and (DATABASE in there or there <= {FILE}):
        folder.chmod(0o700)
    else:
        log.warning("others can look into the data directory %s: give a directory of its own with --data", folder)


# ---- the token of this machine's user ---------------------------------------------------------


async def _local_token(control: Control) -> None:
    """Keep DIR/local.token good: who can read the data directory is admin (design section 3)."""
    path = control.context.settings.data_dir / LOCAL_TOKEN
    with contextlib.suppress(OSError):
        if control.auth.caller_of(path.read_text("ascii", "replace").strip(), door="cli") is not None:
            return
    now = control.context.now()
    secret = await control.context.db.write(lambda tx: make_local_token(tx, control.context.ids, now))
    write_private(path, secret + "\n")
    await control.auth.load()


def _panel_key(folder: Path) -> bytes:
    """The key that signs cookies and forms of the page: the same over restarts, and in no database or backup of one."""
    path = folder / PANEL_KEY
    with contextlib.suppress(OSError, ValueError):
        key = bytes.fromhex(path.read_text("ascii").strip())
        if len(key) >= 32 and not path.stat().st_mode & 0o077:
            return key
    key = secrets.token_bytes(32)  # a key that others could read, or half a one, is no key: everybody logs in anew
    write_private(path, key.hex() + "\n")
    return key


def make_local_token(tx: Tx, ids: Ids, now: int) -> str:
    """A token with every right for the unix user who runs the server; earlier ones of this kind are revoked."""
    owner = unix_user()
    name = f"{owner}@local"
    for row in callers.revoke(tx, name, now):
        events.append(tx, "token.revoked", LOOP, now, token_id=row["id"], old=name, reason="the file with it was lost")
    values = {
        "caller": name, "kind": "human", "owner": owner, "scopes": tuple(s for s in SCOPES if s != "report"), "toolset": "full", "pools": (),
        "max_priority": 30, "autopilot": False, "own_only": False, "expires_at_ms": None,
    }  # fmt: skip
    token = write_token(tx, LOOP, values, ids, now)["token"]
    assert token.startswith(TOKEN_PREFIX)
    return str(token)


def unix_user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"uid{os.getuid()}"
    return name if NAME.fullmatch(name) else f"uid{os.getuid()}"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its user can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def announce(data_dir: Path, url: str) -> None:
    """Tell local clients where the server is."""
    write_private(data_dir / SERVER_FILE, json.dumps({"url": url, "pid": os.getpid()}) + "\n")


def unannounce(data_dir: Path) -> None:
    with contextlib.suppress(OSError):
        (data_dir / SERVER_FILE).unlink()
