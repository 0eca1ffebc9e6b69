"""What is shipped is what is in the repository: links, wheel, sdist, and an install into an empty environment."""

import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from cotenant.hostd import facts
from cotenant.server.version import version

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["server", "tools", "resources", "prompts", "hostd", "ui"]


def files_of(*folders: str) -> set[str]:
    """Files that are, or with the next commit could be, in the repository; what .gitignore names is not."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {name for name in listing.split("\0") if name and (ROOT / name).exists()}


def build(source: Path, target: str, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = into.iterdir()
    return built


def modules_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


def test_the_links_for_development_are_right() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / ".pkg" / "cotenant").iterdir() if path.is_symlink()}
    assert links == {folder: f"../../{folder}" for folder in FOLDERS}


def test_the_wheel_holds_every_file_of_the_six_folders_and_no_other(wheel: Path) -> None:
    expected = {f"cotenant/{name}" for name in files_of(*FOLDERS)}
    assert len(expected) > len(FOLDERS)
    assert modules_in(wheel) == expected


def test_the_wheel_names_its_licence_and_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name.split(".dist-info/")[1]: archive.read(name).decode() for name in archive.namelist() if "info/" in name
        }
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Apache License" in texts["licenses/LICENSE"]
    assert "cotenant = cotenant.ui.cli:main" in texts["entry_points.txt"]
    assert "cotenant-hostd = cotenant.hostd.__main__:main" in texts["entry_points.txt"]


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert (source / "tests" / "repo" / "test_packaging.py").exists()
    again = build(source, "wheel", tmp_path / "again")
    assert modules_in(again) == modules_in(wheel)


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)  # without pip: the one that runs this installs
    python = home / "bin" / "python"
    install = ["install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    # What Cotenant depends on is lent by this environment; its editable install is not (a .pth of a .pth is not read).
    lib = next(home.glob("lib/python*/site-packages"))
    (lib / "lent.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run(
        str(python), "-c", "import cotenant.server, cotenant.hostd as h; print(cotenant.server.__file__, h.__file__)"
    )
    assert all(path.startswith(str(lib)) for path in where.split())
    assert "serve" in run(str(home / "bin" / "cotenant"), "--help")
    assert "--socket" in run(str(home / "bin" / "cotenant-hostd"), "--help")

    serves(home / "bin" / "cotenant", tmp_path)


def serves(cotenant: Path, folder: Path) -> None:
    """`cotenant serve` becomes ready, answers, and ends with 0 after SIGTERM; its hostd is ended by the test."""
    data = folder / "data"
    command = [cotenant, "serve", "--data", data, "--port", "0", "--simulate-gpus", "1"]
    with (folder / "err").open("w+b") as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err) as server:
        try:
            assert server.stdout
            line = server.stdout.readline().decode()
            assert line.startswith("ready http://127.0.0.1:"), (folder / "err").read_text()
            status = [cotenant, "status", "--data", data, "--json"]
            done = subprocess.run(status, capture_output=True, text=True, timeout=30, check=False)
            assert done.returncode == 0, done.stderr
            server.terminate()
            assert server.wait(timeout=10) == 0
        finally:
            server.kill()
            for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if str(data).encode() in cmdline.read_bytes():
                        os.kill(int(cmdline.parent.name), signal.SIGTERM)


def test_both_ends_of_a_link_know_the_version_of_the_package() -> None:
    """It stands in one place, from where the build takes it: a host has no package that could be asked."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"] and "version" not in settings["project"]
    assert (ROOT / settings["tool"]["hatch"]["version"]["path"]).samefile(str(facts.__file__))
    assert version() == metadata.version("cotenant") == facts.VERSION
