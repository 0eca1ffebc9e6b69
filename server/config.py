"""What the server is told: `cotenant.toml` and the command line, read once into frozen settings.

Every key is named in `KEYS` with its unit and default, and docs/configuration.md says the same (a test compares
the two). An unknown key, a value of the wrong kind and a name that leads nowhere are errors that name the file,
the line and what was probably meant. Secrets never stand in the file: what needs one takes the path of a file.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cotenant.server.deciding.world import AgentRules, OwnerRules, PoolRules
from cotenant.server.model import text
from cotenant.server.model.rules import Rules, typed

FILE = "cotenant.toml"
#: How many ports a host is asked about at once.
PORTS_MAX = 4096
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
Visibility: TypeAlias = Literal["owner", "open"]


class ConfigError(Exception):
    """The configuration cannot be used; the text says where and what to write instead."""


@dataclass(frozen=True)
class Key:
    """One key of the file: `kind` is what the value must be, `doc` what it means, with its unit."""

    kind: str  # int | bool | str | choice | strings | ints_by_name | strings_by_name | path
    doc: str
    default: Any = None
    low: int = 0
    high: int = 1_000_000
    choices: tuple[str, ...] = ()


_POOL_KEYS: dict[str, Key] = {
    "cap": Key("int", "cards in use at once, by everybody; unset: as many as there are"),
    "reserve": Key("int", "cards of the cap that agents may not take: they are kept for people", 0),
    "order": Key("choice", "order within one priority", "fifo", choices=("fifo", "fairshare", "shortest")),
    "default_hours": Key("int", "hard end, in hours, of a lease or job that names none", 24, low=1, high=744),
    "paused": Key("bool", "nothing new starts while true", False),
    "draining": Key(
        "bool", "what runs finishes, by its hard end at the latest; nothing new starts, and no new attempt", False
    ),
    "owner_cap": Key("int", "cards at once for one owner in this pool; unset: no such cap"),
    "agent_cap": Key("int", "cards at once for one caller in this pool; unset: no such cap"),
    "owner_jobs": Key("int", "jobs and direct leases at once for one owner in this pool; unset: no such cap"),
    "agent_jobs": Key("int", "jobs and direct leases at once for one caller in this pool; unset: no such cap"),
    "preempt": Key(
        "choice",
        "whose resumable jobs a higher priority of this pool may stop: nobody's, those in it, or also those in preempt_from",
        "off",
        choices=("off", "within", "from"),
    ),
    "preempt_from": Key("strings", "the other pools, for preempt = from", ()),
    "grace_s": Key(
        "int", "seconds from a notice to the stop, for a save; three times as long while one goes on", 120, high=86400
    ),
    "idle_s": Key("int", "seconds without a sign of work after which a holder is told that it is idle; 0: never", 0),
    "idle_grace_s": Key(
        "int", "seconds from that notice to taking the lease back, while somebody waits for it", 600, low=1
    ),
    "idle_jobs": Key("bool", "take back idle jobs too, not only direct leases", False),
    "jobs": Key("int", "jobs and direct leases at once, everybody together; unset: no such cap"),
    "gpu_hours": Key("int", "GPU-hours within 24 rolling hours, everybody together; unset: no such cap"),
    "owner_gpu_hours": Key("int", "GPU-hours within 24 rolling hours for one owner in this pool; unset: no such cap"),
    "agent_gpu_hours": Key("int", "GPU-hours within 24 rolling hours for one caller in this pool; unset: no such cap"),
    "starve_h": Key(
        "int", "hours after which what waits within its caps goes before all but critical work", 24, low=1, high=8760
    ),
    "half_life_h": Key("int", "hours after which past use counts half, for fairshare", 168, low=1, high=8760),
    "windows": Key(
        "strings", 'when something may start, such as "mon-fri 20:00-08:00" or "daily 22:00-06:00"; none: always', ()
    ),
    "timezone": Key("str", "time zone of the windows, as Europe/Berlin", "UTC"),
    "visibility": Key(
        "choice",
        "who sees commands, paths, logs and metrics of the pool's jobs: their owner, or everybody; "
        "unset: everybody while all tokens have one owner",
        choices=("owner", "open"),
    ),
}

_MAX_PRIORITY = Key(
    "choice", "a grant: priorities up to this may be asked for, whatever the token says; unset: as the token says",
    choices=("critical", "high", "normal", "batch"),
)  # fmt: skip

#: Section -> key -> what it is. NAME stands for any name.
KEYS: dict[str, dict[str, Key]] = {
    "server": {
        "host": Key("str", "address to listen on", "127.0.0.1"),
        "port": Key("int", "TCP port to listen on; 0: any free one", 8425, high=65535),
        "allowed_hosts": Key(
            "strings",
            "values of the Host header to accept, NAME:PORT or NAME:*; this machine's own are always there",
            (),
        ),
        "allowed_origins": Key("strings", "values of the Origin header to accept from browsers", ()),
        "pickup_s": Key(
            "int", "seconds in which a granted claim must be picked up with heartbeat", 600, low=10, high=86400
        ),
        "default_pool": Key("str", "pool of whoever names none", "default"),
        "gang_port_from": Key(
            "int", "first TCP port at which jobs over several hosts may meet (MASTER_PORT)", 29500, low=1024, high=65535
        ),
        "gang_port_to": Key("int", "last such port", 29999, low=1024, high=65535),
        "hostd_python": Key("path", "Python that runs hostd; unset: the server's own"),
        "session_idle_s": Key(
            "int", "seconds after which an unused session of an older MCP client ends", 1800, low=1, high=604800
        ),
        "journal_days": Key(
            "int", "days for which the journal of decisions is kept; 0: none is written", 30, high=3650
        ),
        "journal_mib": Key("int", "room for the journal, MiB; the oldest goes first", 1024, low=8),
        "streams_per_caller": Key(
            "int", "streams of notifications that one caller may have open", 64, low=1, high=1024
        ),
    },
    "defaults": _POOL_KEYS,
    "pools.NAME": _POOL_KEYS,
    "owners.NAME": {
        "cap": Key("int", "cards at once over all pools; unset: no such cap"),
        "jobs": Key("int", "jobs and direct leases at once over all pools; unset: no such cap"),
        "gpu_hours": Key("int", "GPU-hours within 24 rolling hours; unset: no such cap"),
        "max_priority": _MAX_PRIORITY,
    },
    "agents.NAME": {
        "cap": Key("int", "cards at once for this caller over all pools; unset: no such cap"),
        "jobs": Key("int", "jobs and direct leases at once for this caller over all pools; unset: no such cap"),
        "gpu_hours": Key("int", "GPU-hours of this caller within 24 rolling hours; unset: no such cap"),
        "max_priority": _MAX_PRIORITY,
    },
    "hosts.NAME": {
        "kind": Key("choice", "how the host is reached: local, a hostd on this machine", "local", choices=("local",)),
        "cards": Key(
            "strings", "cards of this machine that the host has, by UUID or index; unset: all that no other host names"
        ),
        "address": Key("str", "where the other hosts of a job over several hosts reach this one", "127.0.0.1"),
        "cpus": Key("int", "processors that may be booked here; unset: all of the machine", low=1),
        "memory_mib": Key(
            "int", "host memory that may be booked here, MiB; unset: nine tenths of the machine's", high=2**31
        ),
        "pool": Key("str", "pool of the host's cards; unset: server.default_pool"),
        "gpu_pools": Key("strings_by_name", "pool by card UUID or index, for cards that are in another pool", {}),
        "cpu_jobs": Key("int", "jobs without a card that may run at once", 2, high=4096),
        "shares": Key(
            "ints_by_name", "equal memory shares (2 to 8) by card UUID or index; others are whole", {}, low=2, high=8
        ),
        "residents": Key("strings", "programs that may always be on the cards, such as Xorg", ()),
        "cuda_visible_by": Key("choice", "how CUDA_VISIBLE_DEVICES names cards", "index", choices=("index", "uuid")),
        "labels": Key(
            "strings_by_name", 'what jobs may ask for with host_labels or prefer, such as {disk = "nvme"}', {}
        ),
        "max_jobs": Key("int", "jobs and direct leases at once on this host; 0: as many as fit", 0, high=4096),
        "simulate_gpus": Key("int", "simulated cards instead of real ones, for trying out", 0, high=64),
    },
}


@dataclass(frozen=True)
class HostSettings:
    """One host. `shares` and `pools_by_gpu` are keyed by card UUID or index as text."""

    name: str
    pool: str
    cpu_jobs: int = 2
    shares: dict[str, int] = field(default_factory=dict)
    residents: tuple[str, ...] = ()
    simulate_gpus: int = 0
    cuda_visible_by: Literal["index", "uuid"] = "index"
    pools_by_gpu: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    max_jobs: int = 0
    kind: Literal["local"] = "local"
    cards: tuple[str, ...] | None = None  # None: all that no other host names
    without: tuple[str, ...] = ()  # cards of the machine that other hosts have
    address: str = "127.0.0.1"
    cpus: int | None = None
    memory_mib: int | None = None


@dataclass(frozen=True)
class Settings:
    """The whole configuration. A pool missing from `pool_visibility` says nothing about it: see KEYS."""

    data_dir: Path
    host: str
    port: int
    pools: dict[str, PoolRules]
    pool_visibility: dict[str, Visibility]
    owners: dict[str, OwnerRules]
    agents: dict[str, AgentRules]
    default_pool: str
    pickup_s: int
    hosts: dict[str, HostSettings]
    hostd_python: str | None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    session_idle_s: int = 1800
    streams_per_caller: int = 64
    journal_days: int = 30
    journal_mib: int = 1024
    gang_port_from: int = 29500
    gang_port_to: int = 29999
    config_file: Path | None = None

    @property
    def rules(self) -> Rules:
        """The rules as the configuration has them, before what people have set."""
        return Rules(self.pools, self.owners, self.agents)


def default_data_dir(environ: Mapping[str, str] | None = None) -> Path:
    """$XDG_DATA_HOME/cotenant, or ~/.local/share/cotenant."""
    env = os.environ if environ is None else environ
    base = env.get("XDG_DATA_HOME") or ""
    # The XDG specification: a relative path there is to be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "share") / "cotenant"


#: Scope of a rule -> the keys that people may set at run time, above the file.
RULE_KEYS: dict[str, dict[str, Key]] = {
    "pool": {key: item for key, item in _POOL_KEYS.items() if key != "visibility"},
    "owner": KEYS["owners.NAME"],
    "agent": KEYS["agents.NAME"],
}


def check_rule(scope: str, key: str, value: Any) -> Any:
    """A value for a rule as it is kept in JSON; None takes a cap away.

    Raises:
        ValueError: it cannot be meant; the message says what it must be.
    """
    want = RULE_KEYS[scope][key]
    if value is None and want.default is None:
        return None
    try:
        found = _Reader("", "").value(scope, key, want, value)
    except ConfigError as error:
        raise ValueError(str(error).split(": ", 2)[2]) from None
    typed(key, found)
    if key == "timezone" and (why := unknown_zone(found)) is not None:
        raise ValueError(why)
    return list(found) if isinstance(found, tuple) else found


def unknown_zone(name: str) -> str | None:
    """What is wrong with the name of a time zone, or None."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return f"{text.quoted(name)} is no time zone; write one such as UTC or Europe/Berlin."
    return None


def load(
    *,
    data_dir: Path | None = None,
    config_file: Path | None = None,
    host: str | None = None,
    port: int | None = None,
    simulate_gpus: int | None = None,
) -> Settings:
    """The settings from the file and the command line; the command line wins.

    The file is `config_file`, which must then exist, or `cotenant.toml` in the data directory where there is one.

    Raises:
        ConfigError: the file cannot be read or parsed, or something in it cannot be meant.
    """
    data = (data_dir or default_data_dir()).expanduser().absolute()
    path = config_file
    if path is None and (data / FILE).is_file():
        path = data / FILE
    raw = ""
    if path is not None:
        try:
            raw = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
            raise ConfigError(f"{path}: cannot be read: {why}. Give the right file with --config.") from exc
    return parse(
        raw, file=str(path or FILE), data_dir=data, config_file=path, host=host, port=port, simulate_gpus=simulate_gpus
    )


def parse(
    raw: str,
    *,
    data_dir: Path,
    file: str = FILE,
    config_file: Path | None = None,
    host: str | None = None,
    port: int | None = None,
    simulate_gpus: int | None = None,
) -> Settings:
    """The same from the file's text; `file` is its name in errors."""
    try:
        tree = tomllib.loads(raw)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(_not_toml(file, raw, exc)) from exc
    read = _Reader(file, raw)
    sections = read.sections(tree)
    server = sections.one("server")
    defaults = sections.one("defaults")
    default_pool: str = server["default_pool"]
    ports = server["gang_port_to"] - server["gang_port_from"]
    if not 0 <= ports <= PORTS_MAX:
        key = "gang_port_from" if "gang_port_from" in tree.get("server", {}) else "gang_port_to"
        raise read.error(
            "server", key, f"gang_port_from to gang_port_to must be 1 to {PORTS_MAX} ports, in this order."
        )

    pools: dict[str, PoolRules] = {}
    visibility: dict[str, Visibility] = {}
    named = sections.named("pools", defaults)
    for name in {default_pool: None, **named}:
        values = dict(named.get(name, defaults))
        shown = values.pop("visibility")
        if shown is not None:
            visibility[name] = shown
        section = f"pools.{name}" if name in named else "defaults"
        try:
            values["windows"] = typed("windows", values["windows"])
        except ValueError as error:
            raise read.error(section, "windows", f"{error}.") from error
        if (why := unknown_zone(values["timezone"])) is not None:
            raise read.error(section, "timezone", why)
        pools[name] = PoolRules(name=name, **values)
        if pools[name].cap is not None and pools[name].reserve > (pools[name].cap or 0):
            where = (f"pools.{name}", "reserve") if name in named else ("defaults", "reserve")
            raise read.error(*where, f"reserve {pools[name].reserve} is above cap {pools[name].cap}; lower it.")

    owners = {name: OwnerRules(owner=name, **values) for name, values in sections.named("owners").items()}
    agents = {name: AgentRules(agent=name, **values) for name, values in sections.named("agents").items()}
    hosts: dict[str, HostSettings] = {}
    host_sections = sections.named("hosts")
    for name in {"local": None, **host_sections}:
        values = dict(host_sections.get(name) or {key: item.default for key, item in KEYS["hosts.NAME"].items()})
        by_gpu: dict[str, str] = dict(values.pop("gpu_pools"))
        values["pool"] = values["pool"] or default_pool
        for key, pool in (("pool", values["pool"]), *((f"gpu_pools.{gpu}", item) for gpu, item in by_gpu.items())):
            if pool not in pools:
                raise read.error(f"hosts.{name}", key, f"there is no pool {text.quoted(pool)}{_closest(pool, pools)}")
        if name == "local" and simulate_gpus is not None:
            values["simulate_gpus"] = simulate_gpus
        hosts[name] = HostSettings(name=name, **{**values, "shares": dict(values["shares"])}, pools_by_gpu=by_gpu)
    hosts = _divide_cards(hosts, read)

    return Settings(
        data_dir=data_dir,
        host=host if host is not None else server["host"],
        port=port if port is not None else server["port"],
        pools=pools,
        pool_visibility=visibility,
        owners=owners,
        agents=agents,
        default_pool=default_pool,
        pickup_s=server["pickup_s"],
        hosts=hosts,
        hostd_python=server["hostd_python"],
        allowed_hosts=server["allowed_hosts"],
        allowed_origins=server["allowed_origins"],
        session_idle_s=server["session_idle_s"],
        journal_days=server["journal_days"],
        journal_mib=server["journal_mib"],
        streams_per_caller=server["streams_per_caller"],
        gang_port_from=server["gang_port_from"],
        gang_port_to=server["gang_port_to"],
        config_file=config_file,
    )


def _divide_cards(hosts: dict[str, HostSettings], read: _Reader) -> dict[str, HostSettings]:
    """Each card of this machine belongs to one host.

    Raises:
        ConfigError: two hosts would show the same card.
    """
    real = [host for host in hosts.values() if host.kind == "local" and not host.simulate_gpus]
    owner: dict[str, str] = {}
    for host in real:
        for card in host.cards or ():
            if card in owner:
                where = "twice" if owner[card] == host.name else f"to host {owner[card]} too"
                raise read.error(f"hosts.{host.name}", "cards", f"{text.quoted(card)} is given {where}; remove one.")
            owner[card] = host.name
    rest = [host.name for host in real if host.cards is None]
    if len(rest) > 1:
        raise read.error(
            f"hosts.{rest[1]}", "cards",
            f"hosts {rest[0]} and {rest[1]} would both show every card: name the cards of one, or give it cards = [].",
        )  # fmt: skip
    others = tuple(sorted(owner))
    return {name: replace(host, without=others) if name in rest else host for name, host in hosts.items()}


def _not_toml(file: str, raw: str, error: tomllib.TOMLDecodeError) -> str:
    """tomllib's sentence with the place at its front, as every other error here has it."""
    said = str(error)
    if found := re.search(r"\s*\(at line (\d+), column (\d+)\)$", said):
        return f"{file}:{found[1]}: not valid TOML: {said[: found.start()]}, at column {found[2]}."
    last = max(1, len(raw.splitlines()))
    return f"{file}:{last}: not valid TOML: {re.sub(r' *[(]at end of document[)]$', ', at the end of the file', said)}."


def _closest(word: str, known: Mapping[str, Any]) -> str:
    """`; did you mean "x"?`, or the list of what is known."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(sorted(known))}."


class _Sections:
    """The checked sections of one file; keys that were not given have their defaults."""

    def __init__(self, given: dict[str, dict[str, Any]]) -> None:
        self._given = given

    def one(self, section: str) -> dict[str, Any]:
        return {key: item.default for key, item in KEYS[section].items()} | self._given.get(section, {})

    def named(self, group: str, defaults: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
        base = defaults or {key: item.default for key, item in KEYS[f"{group}.NAME"].items()}
        prefix = f"{group}."
        return {s.removeprefix(prefix): base | values for s, values in self._given.items() if s.startswith(prefix)}


class _Reader:
    """Checks one file against KEYS, and knows on which line a key stands."""

    def __init__(self, file: str, raw: str) -> None:
        self._file = file
        self._lines = raw.splitlines()

    def error(self, section: str, key: str, what: str) -> ConfigError:
        line = self._line(section, key)
        where = f"{self._file}:{line}" if line else self._file
        name = f"[{section}]" + (f" {key}" if key else "")
        return ConfigError(f"{where}: {name}: {what}")

    def _line(self, section: str, key: str) -> int | None:
        """The line on which a key stands, or the nearest thing around it: an inline table, its section; or None.

        tomllib keeps no positions, so headers and assignments are looked for, in every way that TOML has to write them.
        """
        wanted = f"{section}.{key}" if key else section
        here, best, found = "", 0, None
        for number, line in enumerate(self._lines, 1):
            stripped = line.strip()
            if head := re.match(r"^\[+\s*([^\[\]]+?)\s*\]", stripped):
                here = path = re.sub(r"[\"'\s]", "", head.group(1))
            elif start := re.match(r"^([^=#]+?)\s*=", stripped):
                name = re.sub(r"[\"'\s]", "", start.group(1))
                path = f"{here}.{name}" if here else name
            else:
                continue
            if path == wanted or path.startswith(f"{wanted}."):
                return number
            if wanted.startswith(f"{path}.") and len(path) > best:
                best, found = len(path), number
        return found

    def sections(self, tree: dict[str, Any]) -> _Sections:
        """Raises ConfigError at the first thing that cannot be meant."""
        given: dict[str, dict[str, Any]] = {}
        groups = {section.split(".")[0]: section.endswith(".NAME") for section in KEYS}
        for group, body in tree.items():
            if group not in groups:
                raise self.error(group, "", f"unknown section or key{_closest(group, groups)}")
            if not isinstance(body, dict):
                raise self.error(group, "", "must be a section: write it as a line in square brackets.")
            if not groups[group]:
                given[group] = self._section(group, KEYS[group], body)
                continue
            for name, inner in body.items():
                section = f"{group}.{name}"
                if not isinstance(inner, dict):
                    raise self.error(group, name, f"stands outside a named section: write [{group}.NAME] above it.")
                if not NAME.match(name):
                    raise self.error(section, "", "a name is 1 to 64 letters, digits, dots, dashes or underscores.")
                given[section] = self._section(section, KEYS[f"{group}.NAME"], inner)
        return _Sections(given)

    def _section(self, section: str, keys: dict[str, Key], body: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in body.items():
            if key not in keys:
                raise self.error(section, key, f"unknown key{_closest(key, keys)}")
            if isinstance(value, str) and (what := text.find_secret(value)) is not None:
                raise self.error(section, key, f"looks like {what}; secrets do not belong here, only paths of files.")
            out[key] = self.value(section, key, keys[key], value)
        return out

    def value(self, section: str, key: str, want: Key, value: Any) -> Any:
        """A value of the file, checked; see `Key.kind`."""
        match want.kind:
            case "int":
                return self._int(section, key, want, value)
            case "bool" if isinstance(value, bool):
                return value
            case "str" | "path" if isinstance(value, str) and value:
                return os.path.expanduser(value) if want.kind == "path" else value
            case "choice" if isinstance(value, str):
                if value not in want.choices:
                    raise self.error(section, key, f"{text.quoted(value)} is not one of {', '.join(want.choices)}.")
                return value
            case "strings" if isinstance(value, list) and all(isinstance(item, str) for item in value):
                return tuple(value)
            case "ints_by_name" if isinstance(value, dict):
                return {name: self._int(section, f"{key}.{name}", want, item) for name, item in value.items()}
            case "strings_by_name" if isinstance(value, dict) and all(isinstance(i, str) for i in value.values()):
                return dict(value)
        words = {
            "bool": "true or false",
            "str": "a text in quotes",
            "path": "a path in quotes",
            "choice": f"one of {', '.join(want.choices)}, in quotes",
            "strings": "a list of texts",
            "ints_by_name": "a table of whole numbers",
            "strings_by_name": "a table of texts",
        }
        raise self.error(section, key, f"must be {words[want.kind]}.")

    def _int(self, section: str, key: str, want: Key, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not want.low <= value <= want.high:
            raise self.error(section, key, f"must be a whole number from {want.low} to {want.high}.")
        return value
