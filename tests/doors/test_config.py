"""The configuration: what is meant, what cannot be, and that the documentation names every key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cotenant.server import config
from cotenant.server.config import KEYS, ConfigError, Settings, default_data_dir, load, parse

ROOT = Path(__file__).resolve().parents[2]
DATA = Path("/nowhere")


def read(raw: str, **options: object) -> Settings:
    return parse(raw, data_dir=DATA, **options)  # type: ignore[arg-type]


def test_an_empty_file_is_a_whole_configuration() -> None:
    settings = read("")
    assert settings.host == "127.0.0.1" and settings.port == 8425 and settings.pickup_s == 600
    assert list(settings.pools) == ["default"] and settings.default_pool == "default"
    assert settings.pools["default"].default_hours == 24 and settings.pools["default"].cap is None
    assert settings.hosts["local"].pool == "default" and settings.hosts["local"].cpu_jobs == 2
    assert settings.pool_visibility == {} and settings.owners == {}


def test_pools_take_what_they_do_not_say_from_the_defaults() -> None:
    settings = read(
        """
        [server]
        default_pool = "train"
        [defaults]
        reserve = 1
        visibility = "owner"
        [pools.train]
        cap = 6
        [pools.debug]
        reserve = 0
        visibility = "open"
        paused = true
        [owners.alice]
        cap = 4
        gpu_hours = 100
        """
    )
    train, debug = settings.pools["train"], settings.pools["debug"]
    assert (train.cap, train.reserve, train.paused) == (6, 1, False)
    assert (debug.cap, debug.reserve, debug.paused) == (None, 0, True)
    assert settings.pool_visibility == {"train": "owner", "debug": "open"}
    assert set(settings.pools) == {"train", "debug"}
    assert settings.owners["alice"].cap == 4 and settings.owners["alice"].gpu_hours == 100
    assert settings.hosts["local"].pool == "train"


def test_cards_of_a_host_are_named_by_uuid_or_index() -> None:
    settings = read(
        """
        [pools.debug]
        [hosts.local]
        shares = { "0" = 2, "GPU-abc" = 4 }
        gpu_pools = { "GPU-abc" = "debug" }
        residents = ["Xorg"]
        """
    )
    local = settings.hosts["local"]
    assert local.shares == {"0": 2, "GPU-abc": 4} and local.pools_by_gpu == {"GPU-abc": "debug"}
    assert local.residents == ("Xorg",)


def test_the_command_line_goes_first() -> None:
    raw = "[server]\nport = 1\nhost = '::1'\n[hosts.local]\nsimulate_gpus = 1"
    settings = read(raw, host="0.0.0.0", port=0, simulate_gpus=3)
    assert (settings.host, settings.port, settings.hosts["local"].simulate_gpus) == ("0.0.0.0", 0, 3)
    settings = read(raw)
    assert (settings.host, settings.port, settings.hosts["local"].simulate_gpus) == ("::1", 1, 1)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ("[sever]\n", 'cotenant.toml:1: [sever]: unknown section or key; did you mean "server"?'),
        ("\n[server]\nprt = 3\n", 'cotenant.toml:3: [server] prt: unknown key; did you mean "port"?'),
        ("server.prt = 3\n", "cotenant.toml:1: [server] prt"),
        ("[server]\nport = '80'\n", "cotenant.toml:2: [server] port: must be a whole number from 0 to 65535"),
        ("[server]\nport = true\n", "must be a whole number"),
        ("[server]\nport = 70000\n", "from 0 to 65535"),
        ("[server]\nhost = ''\n", "must be a text in quotes"),
        ("[server]\nallowed_hosts = 'x'\n", "must be a list of texts"),
        ("[pools.a]\norder = 'lifo'\n", '"lifo" is not one of fifo'),
        ("[pools.a]\npaused = 1\n", "must be true or false"),
        ("[pools.a]\ncap = 1\nreserve = 2\n", "cotenant.toml:3: [pools.a] reserve: reserve 2 is above cap 1"),
        ("[pools]\ncap = 1\n", "write [pools.NAME]"),
        ('[pools."a b"]\n', "letters, digits, dots, dashes"),
        ("x = 1\n", "cotenant.toml:1: [x]: unknown section or key"),
        ("\npools = 1\n", "cotenant.toml:2: [pools]: must be a section"),
        ("[hosts.local]\npool = 'trian'\n[pools.train]\n", 'there is no pool "trian"; did you mean "train"?'),
        ("[hosts.local]\ngpu_pools = {'0' = 'nope'}\n", 'there is no pool "nope"'),
        (
            "[hosts.local]\n[hosts.local.shares]\n0 = 9\n",
            "cotenant.toml:3: [hosts.local] shares.0: must be a whole number from 2 to 8",
        ),
        ("[hosts.gpu1]\n", "hosts local and gpu1 would both show every card: name the cards of one"),
        ("[hosts.a]\ncards = ['0']\n[hosts.b]\ncards = ['1', '0']\n", '[hosts.b] cards: "0" is given to host a too'),
        ("[hosts.a]\ncards = ['0', '0']\n", '"0" is given twice'),
        ("[server]\ngang_port_from = 30000\n", "[server] gang_port_from: gang_port_from to gang_port_to must be"),
        ("[server]\ngang_port_to = 40000\n", "[server] gang_port_to: gang_port_from to gang_port_to must be"),
        ("[hosts.a]\nkind = 'ssh'\n", '"ssh" is not one of local'),
        ("\n[server\n", "cotenant.toml:2: not valid TOML: "),
        ("[server]\nport = 1\nport = 2\n", "cotenant.toml:3: not valid TOML: "),
        ('[server]\nhost = """a', "cotenant.toml:2: not valid TOML: "),
        ("[server]\nhost = 'sk-abcdefghijklmnopqrstuvwx'\n", "secrets do not belong here"),
    ],
)
def test_what_cannot_be_meant_is_said_with_its_line(raw: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(raw)
    assert says in str(caught.value)
    assert "sk-abc" not in str(caught.value)


#: One wrong value in every way that TOML has to write it, and the line on which it stands.
WRITTEN = {
    "section": ("# a\n[{section}]\n\n{key} = {value}\n", 4),
    "dotted": ("# a\n{section}.{key} = {value}\n", 2),
    "inline": ("# a\n\n{section} = {{ {key} = {value} }}\n", 3),
    "quoted": ('[{section}]\n "{key}" = {value}\n', 2),
}


@pytest.mark.parametrize("way", WRITTEN)
@pytest.mark.parametrize(("section", "key"), [(s, k) for s, keys in KEYS.items() for k in keys])
def test_every_wrong_value_is_found_on_its_line(way: str, section: str, key: str) -> None:
    section = section.replace("NAME", "local")
    form, line = WRITTEN[way]
    with pytest.raises(ConfigError) as caught:
        read(form.format(section=section, key=key, value="1979-05-27"))  # a date: nothing takes one
    assert str(caught.value).startswith(f"cotenant.toml:{line}: [{section}] {key}: "), caught.value


def test_the_file_is_found_in_the_data_directory_or_given(tmp_path: Path) -> None:
    assert load(data_dir=tmp_path).config_file is None
    (tmp_path / config.FILE).write_text("[server]\nport = 9\n")
    assert load(data_dir=tmp_path).port == 9
    other = tmp_path / "other.toml"
    other.write_text("[server]\nport = 10\n")
    assert load(data_dir=tmp_path, config_file=other).port == 10
    with pytest.raises(ConfigError, match=r"nope\.toml: cannot be read: No such file"):
        load(data_dir=tmp_path, config_file=tmp_path / "nope.toml")
    other.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(data_dir=tmp_path, config_file=other)


def test_the_default_data_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert default_data_dir({"XDG_DATA_HOME": "/data"}) == Path("/data/cotenant")
    for value in ("", "relative"):
        assert default_data_dir({"XDG_DATA_HOME": value}) == Path("/home/ada/.local/share/cotenant")


def test_the_documentation_names_every_key_and_no_other() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    documented: dict[str, set[str]] = {}
    section = ""
    for line in text.splitlines():
        if head := re.match(r"## \[(.+)\]$", line):
            section = head[1]
            documented[section] = set()
        elif line.startswith("## "):
            section = ""
        elif section and (row := re.match(r"\| `(\w+)` \|", line)):
            documented[section].add(row[1])
    documented["defaults"] |= documented["pools.NAME"]  # said in words there
    assert documented == {name: set(keys) for name, keys in KEYS.items()}
    for keys in KEYS.values():
        for key in keys.values():
            assert key.doc in text


def test_the_documented_example_is_read() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    example = re.search(r"```toml\n(.+?)```", text, re.DOTALL)
    assert example is not None
    settings = read(example[1])
    assert settings.pools["train"].reserve == 1 and settings.hosts["local"].pools_by_gpu == {"7": "debug"}


def test_the_cards_of_this_machine_are_divided_among_its_hosts() -> None:
    hosts = read("[hosts.a]\ncards = ['1', 'GPU-x']\n[hosts.b]\nsimulate_gpus = 2\n[hosts.c]\ncards = []\n").hosts
    assert {name: (host.cards, host.without) for name, host in hosts.items()} == {
        "a": (("1", "GPU-x"), ()),
        "b": (None, ()),
        "c": ((), ()),
        "local": (None, ("1", "GPU-x")),
    }
