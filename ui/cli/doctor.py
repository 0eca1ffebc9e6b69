"""`cotenant doctor`: is this machine fit, do the invariants hold in the database, does the server answer.

With --mcp it plays a client instead: see doctor_mcp.py.
"""

from __future__ import annotations

import os
import sys

from cotenant.ui.cli import place, show
from cotenant.ui.cli.problems import EXIT_REFUSED, Problem

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from cotenant.ui.cli.entry import Parser

#: NVML may hang in a broken driver (a card that fell off the bus), so it is asked in a process that can be ended.
DRIVER_S = 15
_ASK_DRIVER = """
import pynvml, json
pynvml.nvmlInit()
driver = pynvml.nvmlSystemGetDriverVersion()
cards = [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
print(json.dumps({"driver": driver, "cards": cards}))
"""
#: STRICT tables came with this version (https://sqlite.org/stricttables.html).
SQLITE = (3, 37)
#: Under this the server stops taking work before long.
FREE_MIB = 1024


class Check:
    """One thing looked at. `ok` None is a remark: neither good nor bad."""

    __slots__ = ("check", "hint", "message", "ok")

    def __init__(self, check: str, ok: bool | None, message: str, hint: str = "") -> None:
        self.check, self.ok, self.message, self.hint = check, ok, message, hint


def configure(parser: Parser, _: str) -> None:
    command = parser.command(act, example="cotenant doctor --data /srv/cotenant")
    command.add_argument(
        "--mcp", action="store_true", help="play a client against the running server, and nothing else"
    )


def act(args: argparse.Namespace) -> int:
    data = place.data_dir(args.data)
    if args.mcp:
        from cotenant.ui.cli.doctor_mcp import play

        checks = list(play(args))
    else:
        checks = [*_python(), *_directory(data), *_driver(), *_server(args, data), *_database(data)]
    bad = [check for check in checks if check.ok is False]
    if args.json:
        listed = [{name: getattr(check, name) for name in ("check", "ok", "message", "hint")} for check in checks]
        show.as_json({"ok": not bad, "data_dir": data, "checks": listed})
        return EXIT_REFUSED if bad else 0
    width = max(len(check.check) for check in checks)
    for check in checks:
        mark, colour = {True: ("ok  ", show.GREEN), False: ("BAD ", show.RED), None: ("note", show.YELLOW)}[check.ok]
        show.out(f"{show.paint(mark, colour)}  {check.check:<{width}}  {show.harmless(check.message)}")
        if check.hint and check.ok is not True:
            show.out(f"{'':{width + 8}}{show.harmless(check.hint)}")
    show.out(
        f"\n{len(bad)} of {len(checks)} checks found something wrong."
        if bad
        else f"\n{len(checks)} checks, nothing wrong."
    )
    return EXIT_REFUSED if bad else 0


def _python() -> Iterator[Check]:
    import sqlite3

    here = ".".join(map(str, sys.version_info[:3]))
    yield Check(
        "python", sys.version_info >= (3, 11), f"Python {here}, {sys.executable}", "Python 3.11 or newer is needed."
    )
    yield Check(
        "sqlite",
        sqlite3.sqlite_version_info >= SQLITE,
        f"SQLite {sqlite3.sqlite_version}",
        "SQLite 3.37 or newer is needed.",
    )
    try:
        import psutil

        yield Check("psutil", True, f"psutil {psutil.__version__}")
    except ImportError as exc:
        yield Check(
            "psutil", False, f"psutil cannot be imported: {exc}", "Install the package again: pip install cotenant"
        )


def _directory(data: str) -> Iterator[Check]:
    if not os.path.isdir(data):
        yield Check("data", None, f"{data} is not there yet", "The first `cotenant serve` makes it.")
        return
    seen = os.stat(data)
    mine = seen.st_uid == os.geteuid()
    open_to = seen.st_mode & 0o077
    yield Check(
        "data", mine and not open_to, f"{data}, mode {seen.st_mode & 0o777:o}{'' if mine else ', of another user'}",
        f"Who can read it is admin of everything. Close it: chmod 700 {data}" if open_to else "Run doctor as the user that runs the server.",
    )  # fmt: skip
    for name in ("control.db", "control.db-wal", "control.db-shm"):
        path = os.path.join(data, name)
        if os.path.exists(path) and os.stat(path).st_mode & 0o077:
            yield Check("database file", False, f"others can read {path}", f"Close it: chmod 600 {path}")
    free = os.statvfs(data)
    mib = free.f_bavail * free.f_frsize // 2**20
    yield Check(
        "disk",
        mib >= FREE_MIB,
        f"{mib} MiB free",
        f"Less than {FREE_MIB} MiB: make room, or new jobs are refused soon.",
    )
    token = os.path.join(data, "local.token")
    if os.path.exists(token):
        try:
            place.read_token(token)
            yield Check("token", True, f"{token} is closed to others")
        except Problem as exc:
            yield Check("token", False, exc.text)


def _driver() -> Iterator[Check]:
    import json
    import subprocess

    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_DRIVER], capture_output=True, text=True, timeout=DRIVER_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield Check(
            "driver",
            False,
            f"the NVIDIA driver did not answer within {DRIVER_S} s",
            "Look at `dmesg` for Xid lines; a reboot may be needed.",
        )
        return
    if done.returncode == 0:
        seen = json.loads(done.stdout)
        yield Check(
            "driver", True, f"NVIDIA {seen['driver']}, {len(seen['cards'])} cards: {', '.join(seen['cards']) or 'none'}"
        )
        return
    why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    if "LibraryNotFound" in why:
        why = "no NVIDIA driver is installed (its library libnvidia-ml.so.1 is not here)"
    there = os.path.exists("/dev/nvidiactl")
    yield Check(
        "driver", False if there else None, f"no NVIDIA card can be used: {why}",
        "The driver is loaded but does not work: reload or reboot." if there else "Jobs without a card run; --simulate-gpus N is for trying out.",
    )  # fmt: skip


def _server(args: argparse.Namespace, data: str) -> Iterator[Check]:
    from cotenant.ui.cli import ask
    from cotenant.ui.cli.problems import NoServer

    record = None
    try:
        record = place.server_record(data)
        client = ask.client(args)
        hosts = client.call_tool("list_hosts")["hosts"]
    except NoServer as exc:
        alive = record is not None and _alive(record.get("pid"))
        yield Check(
            "server",
            False if alive else None,
            exc.text,
            "Its process lives but does not answer: look at its output." if alive else "",
        )
        yield from _port(args)
        return
    except Problem as exc:
        yield Check("server", False, exc.text)
        return
    yield Check("server", True, f"answers at {client.place.url}")
    for host in hosts:
        good = host["link"] == "up"
        cards = f"{host['free_gpus']} of {host['gpus']} cards free{' (simulated)' if host['simulated'] else ''}"
        yield Check(
            f"host {host['host']}",
            good,
            f"link {host['link']}, {cards}",
            str(host.get("reason") or host.get("nvml_message") or ""),
        )


def _alive(pid: object) -> bool:
    return isinstance(pid, int) and os.path.exists(f"/proc/{pid}")


def _port(args: argparse.Namespace) -> Iterator[Check]:
    """Whether a server could listen where the configuration says."""
    import socket
    from pathlib import Path

    from cotenant.server.config import ConfigError, load

    try:
        settings = load(data_dir=Path(place.data_dir(args.data)))
    except ConfigError as exc:
        yield Check("config", False, str(exc))
        return
    yield Check("config", True, str(settings.config_file or "no cotenant.toml; defaults"))
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as exc:
            yield Check(
                "port",
                False,
                f"{settings.host}:{settings.port} cannot be listened on: {exc.strerror}",
                "Another program has it: give another with --port.",
            )
            return
    yield Check("port", True, f"{settings.host}:{settings.port} is free")


def _database(data: str) -> Iterator[Check]:
    """The invariants, as the server's own examiner finds them."""
    from pathlib import Path

    if not os.path.exists(os.path.join(data, "control.db")):
        yield Check("database", None, "there is none yet")
        return
    from cotenant.server.doctor import examine
    from cotenant.ui.cli.serve import own_errors

    try:
        with own_errors():
            found = examine(Path(data))
    except Problem as exc:
        yield Check("database", False, exc.text)
        return
    for finding in found:
        yield Check(finding.check, finding.ok, finding.message, finding.hint)
