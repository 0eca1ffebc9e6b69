"""Opening a data directory: migrations, backups, and everything that must be refused before it is touched."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from cotenant.server import doctor
from cotenant.server.services import DATABASE, prepare_directory
from cotenant.server.store import db as store
from cotenant.server.store.db import (
    APPLICATION_ID,
    Database,
    DataLock,
    StoreRefused,
    configure,
    file_system_of,
    migrate,
    migrations,
    refuse_network_file_system,
)

ROOT = Path(__file__).resolve().parents[2]


def schema(path: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as c:
        return c.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name").fetchall()


def opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    configure(connection)
    return connection


async def test_an_empty_directory_gets_the_newest_schema(tmp_path: Path) -> None:
    db = await Database.open(tmp_path / DATABASE)
    await db.close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as c:
        assert c.execute("PRAGMA user_version").fetchone() == (len(migrations()),)
        assert c.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert c.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        tables = [
            r[0] for r in c.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
        ]
        assert len(tables) > 10
        assert all(
            c.execute("SELECT strict FROM pragma_table_list WHERE name = ?", (t,)).fetchone() == (1,) for t in tables
        )
    assert not list(tmp_path.glob("*.before-*"))
    assert all(f.ok for f in doctor.examine(tmp_path))


async def test_every_commit_is_synced_and_foreign_keys_hold(tmp_path: Path) -> None:
    db = await Database.open(tmp_path / DATABASE)
    pragmas = await db.write(
        lambda tx: [tx.execute(f"PRAGMA {p}").fetchone()[0] for p in ("synchronous", "foreign_keys")]
    )
    assert pragmas == [2, 1]
    await db.close()


@pytest.mark.parametrize("start", range(len(migrations()) + 1))
def test_every_version_migrates_to_the_same_schema(tmp_path: Path, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From empty (0) and from each version; a step added here stands for the next one."""
    steps = [
        *migrations(),
        (len(migrations()) + 1, "next", "CREATE TABLE next_one (a INTEGER) STRICT;\nCREATE INDEX n ON next_one (a);\n"),
    ]
    monkeypatch.setattr(store, "migrations", lambda: steps)
    fresh, old = tmp_path / "fresh.db", tmp_path / "old.db"
    with closing(opened(fresh)) as c:
        migrate(c, fresh)
    monkeypatch.setattr(store, "migrations", lambda: steps[:start])
    with closing(opened(old)) as c:
        migrate(c, old)
        if start:
            c.execute("INSERT INTO meta VALUES ('kept', 'yes')")
    monkeypatch.setattr(store, "migrations", lambda: steps)
    with closing(opened(old)) as c:
        assert migrate(c, old) == len(steps)
        assert c.execute("SELECT count(*) FROM meta WHERE key = 'kept'").fetchone() == (1 if start else 0,)
    assert schema(old) == schema(fresh)
    backups = list(tmp_path.glob("old.db.before-*"))
    assert len(backups) == (1 if start else 0), "a backup before the first step, none of an empty file"
    for backup in backups:
        assert oct(backup.stat().st_mode)[-3:] == "600"
        with closing(sqlite3.connect(backup)) as c:
            assert c.execute("PRAGMA user_version").fetchone() == (start,)
            assert c.execute("SELECT value FROM meta WHERE key = 'kept'").fetchone() == ("yes",)


def test_a_step_that_fails_leaves_the_version_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.db"
    with closing(opened(path)) as c:
        migrate(c, path)
        before = schema(path)
        bad = [
            *migrations(),
            (len(migrations()) + 1, "bad", "CREATE TABLE half (a INTEGER) STRICT;\nINSERT INTO nowhere VALUES (1);\n"),
        ]
        monkeypatch.setattr(store, "migrations", lambda: bad)
        with pytest.raises(sqlite3.OperationalError, match="nowhere"):
            migrate(c, path)
        assert c.execute("PRAGMA user_version").fetchone() == (len(bad) - 1,)
    assert schema(path) == before


async def test_a_newer_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / DATABASE
    await (await Database.open(path)).close()
    with closing(sqlite3.connect(path)) as c:
        c.execute(f"PRAGMA user_version = {len(migrations()) + 1}")
    content = path.read_bytes()
    with pytest.raises(StoreRefused, match="install the newer version"):
        await Database.open(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("version", [0, 1, 7])
async def test_a_foreign_sqlite_file_is_refused_and_left_as_it_is(tmp_path: Path, version: int) -> None:
    path = tmp_path / DATABASE
    with closing(sqlite3.connect(path)) as c:
        c.execute("CREATE TABLE photos (name TEXT)")
        c.execute(f"PRAGMA user_version = {version}")
        c.commit()
    content = path.read_bytes()
    with pytest.raises(StoreRefused, match="did not make"):
        await Database.open(path)
    assert path.read_bytes() == content, "not even its journal mode was touched"
    assert sorted(p.name for p in tmp_path.iterdir()) == [DATABASE]


async def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / DATABASE
    path.write_text("once upon a time " * 100)
    with pytest.raises(StoreRefused, match="cannot be read as a database"):
        await Database.open(path)
    assert path.read_text().startswith("once upon")


@pytest.mark.parametrize("kind", sorted(store.NETWORK_FILE_SYSTEMS))
def test_network_file_systems_are_refused(tmp_path: Path, kind: str) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"30 22 0:40 / /home rw - {kind} server:/home rw\n"
        "31 30 0:41 / /home/me/fast rw - xfs /dev/sdb rw\n"
    )
    with pytest.raises(StoreRefused, match="network file system"):
        refuse_network_file_system(Path("/home/me/data"), mountinfo)
    refuse_network_file_system(Path("/home/me/fast/data"), mountinfo)
    refuse_network_file_system(Path("/homeless"), mountinfo)


def test_mount_points_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_bytes(
        b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        b"23 22 8:1 / /my\\040disk rw - xfs /dev/sda1 rw\n"
        b"24 22 8:1 / /gr\xc3\xb6\xc3\x9fe rw - btrfs /dev/sda1 rw\n"
        b"25 22 8:1 / /bad\xff rw - zfs /dev/sda1 rw\n"
        b"26 22 8:1 / /twice rw - ext4 /dev/sda1 rw\n"
        b"27 22 8:1 / /twice rw - nfs4 server:/ rw\n"
        b"garbage\n"
    )
    found = {p: file_system_of(Path(p), mountinfo) for p in ("/my disk/x", "/größe/x", "/twice", "/other", "/my")}
    assert found == {"/my disk/x": "xfs", "/größe/x": "btrfs", "/twice": "nfs4", "/other": "ext4", "/my": "ext4"}
    assert file_system_of(Path(os.fsdecode(b"/bad\xff/x")), mountinfo) == "zfs"
    assert file_system_of(Path("/"), tmp_path / "missing") == ""


def test_a_second_server_on_the_directory_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cotenant.server.store.db import DataLock\n"
        "lock = DataLock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg")}
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "locked\n"
        with pytest.raises(StoreRefused, match=rf"another server \(pid {first.pid}\)"):
            DataLock(tmp_path)
    finally:
        first.kill()  # the lock ends with the process, however it ends
        first.communicate()
    lock = DataLock(tmp_path)
    with pytest.raises(StoreRefused, match=f"pid {os.getpid()}"):
        DataLock(tmp_path)
    lock.release()
    DataLock(tmp_path).release()


@pytest.mark.parametrize("there", [False, True])
async def test_only_its_user_reads_the_database_and_what_sqlite_keeps_beside_it(tmp_path: Path, there: bool) -> None:
    """Also one that an earlier version made with the mode that the umask gave."""
    path = tmp_path / DATABASE
    before = os.umask(0)
    try:
        if there:
            with closing(opened(path)) as connection:
                migrate(connection, path)
            path.chmod(0o644)
        db = await Database.open(path)
        await db.write(lambda tx: tx.execute("INSERT INTO meta (key, value) VALUES ('a', 'b')"))
    finally:
        os.umask(before)
    files = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert set(files) == {DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm"}
    assert set(files.values()) == {0o600}, files
    await db.close()


@pytest.mark.parametrize(
    ("content", "mode"), [([], 0o700), (["cotenant.toml"], 0o700), ([DATABASE, "x"], 0o700), (["thesis.tex"], 0o755)]
)
def test_a_data_directory_is_closed_and_a_shared_one_left_alone(tmp_path: Path, content: list[str], mode: int) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    folder.chmod(0o755)
    for name in content:
        (folder / name).touch()
    prepare_directory(folder)
    assert folder.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("name", ["with # and ?", "50%41", "größe", "a b"])
async def test_a_data_directory_may_have_any_name(tmp_path: Path, name: str) -> None:
    """SQLite is told by URI to read alone, in which some letters mean something else."""
    path = tmp_path / name / DATABASE
    path.parent.mkdir()
    value = "SELECT value FROM counter WHERE name = 'fence'"
    for _again in range(2):
        db = await Database.open(path)
        await db.write(lambda tx: tx.execute("INSERT OR REPLACE INTO counter (name, value) VALUES ('fence', 7)"))
        assert db.peek(lambda c: c.execute(value).fetchone()[0]) == 7
        assert (await db.read(lambda c: c.execute(value).fetchone()[0])) == 7
        await db.close()
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
