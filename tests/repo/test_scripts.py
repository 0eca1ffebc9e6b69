"""scripts/: they parse, they find a Python, and they say what to do where they cannot go on.

The interpreters and apt-get are stand-ins on a PATH of the test's own: shell programs that answer as the real ones do.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.name for path in SCRIPTS])
def test_it_is_posix_shell_or_python_and_runs(script: Path) -> None:
    first = script.read_text().splitlines()[0]
    if script.suffix == ".sh":  # sourced
        assert not os.access(script, os.X_OK)
        subprocess.run(["sh", "-n", script], check=True)
        return
    assert os.access(script, os.X_OK), f"chmod +x scripts/{script.name}"
    assert first in ("#!/bin/sh", "#!/usr/bin/env python3")
    if first == "#!/bin/sh":
        subprocess.run(["sh", "-n", script], check=True)
    else:
        compile(script.read_text(), str(script), "exec")


class Machine:
    """A PATH with nothing but what a test puts there, and the few programs that the scripts call."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.bin = home / "bin"
        self.bin.mkdir()
        for name in ("sh", "dirname", "cat", "sed", "rm", "mkdir", "touch", "cksum", "grep"):
            found = shutil.which(name)
            assert found, name
            (self.bin / name).symlink_to(found)

    def program(self, name: str, body: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def python(self, name: str, *, version: str = "3.12", venv: bool = True, runs: bool = True) -> Path:
        """An interpreter that answers the questions of scripts/lib.sh."""
        recent = int(version.split(".")[1]) >= 11
        has_venv = "exit 0" if venv else f'[ -e "{self.home}/venv-installed" ]; exit'
        return self.program(
            name,
            f"""{"" if runs else "exit 127"}
            case "$2" in
            *version_info\\ *\\<*) exit {0 if recent else 1} ;;
            *ensurepip*) {has_venv} ;;
            *print*) echo {version} ;;
            esac""",
        )

    def run(self, call: str, **extra: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "HOME": str(self.home), "PYENV_ROOT": str(self.home / "pyenv"), **extra}
        # /usr/local and /opt are looked at too; an interpreter that lies there must not answer for the test
        text = (
            (ROOT / "scripts" / "lib.sh")
            .read_text()
            .replace("/usr/local/bin/", "/none/")
            .replace("/opt/python", "/none")
        )
        script = f"set -eu\n{text}\n{call}"
        return subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_good_python_is_taken(machine: Machine) -> None:
    machine.python("python3", version="3.9")
    machine.python("python3.13", runs=False)  # such as a pyenv shim of a version that is not selected
    good = machine.python("python3.12")
    machine.python("python3.11", version="3.11")
    done = machine.run("find_python")
    assert (done.returncode, done.stdout.strip()) == (0, str(good)), done.stderr


def test_pyenv_is_looked_at(machine: Machine) -> None:
    bin_dir = machine.home / "pyenv" / "versions" / "3.12.1" / "bin"
    bin_dir.mkdir(parents=True)
    python = machine.python("python3")
    python.rename(bin_dir / "python3")
    assert machine.run("find_python").stdout.strip() == str(bin_dir / "python3")


def test_without_any_python_it_says_what_to_do(machine: Machine) -> None:
    machine.python("python3", version="3.10")
    done = machine.run("p=$(find_python); echo never")
    assert done.returncode == 1
    assert "never" not in done.stdout
    assert "no Python 3.11 or newer" in done.stderr
    assert "COTENANT_PYTHON=" in done.stderr


def test_a_named_python_that_does_not_work_is_said(machine: Machine) -> None:
    machine.python("python3")
    done = machine.run("find_python", COTENANT_PYTHON="/not/there")
    assert done.returncode == 1
    assert "COTENANT_PYTHON=/not/there" in done.stderr


def test_a_missing_venv_module_is_installed_for_root(machine: Machine) -> None:
    python = machine.python("python3", venv=False)
    machine.program("id", "echo 0")
    machine.program(
        "apt-get",
        f'echo "$@" >>"{machine.home}/apt"; case "$*" in *python3.12-venv) touch "{machine.home}/venv-installed" ;; esac',
    )
    done = machine.run("is_debian() { true; }\nfind_python")
    assert (done.returncode, done.stdout.strip()) == (0, str(python)), done.stderr
    assert (machine.home / "apt").read_text().splitlines() == [
        "update -qq",
        "install -y -qq --no-install-recommends python3.12-venv",
    ]


def test_a_missing_venv_module_is_explained_to_others(machine: Machine) -> None:
    machine.python("python3", venv=False)
    machine.program("id", "echo 1000")
    machine.program("apt-get", f'touch "{machine.home}/apt"')
    done = machine.run("find_python")
    assert done.returncode == 1
    assert "sudo apt-get install python3.12-venv" in done.stderr
    assert not (machine.home / "apt").exists()


def test_another_python_with_venv_is_better_than_installing(machine: Machine) -> None:
    machine.python("python3", venv=False)
    good = machine.python("python3.11", version="3.11")
    machine.program("id", "echo 0")
    machine.program("apt-get", f'touch "{machine.home}/apt"')
    assert machine.run("find_python").stdout.strip() == str(good)
    assert not (machine.home / "apt").exists()


def set_up(copy: Path) -> Path:
    """A copy of the scripts whose stamp says that it is set up; the stamp."""
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "cotenant"):
        (copy / ".venv" / "bin" / name).symlink_to(sys.executable)
    cksum = subprocess.run(["cksum"], input=(copy / "pyproject.toml").read_bytes(), capture_output=True, check=True)
    stamp = copy / ".venv" / ".cotenant-setup"
    stamp.write_text(f"{copy.resolve()} {cksum.stdout.decode().strip()} dev")
    return stamp


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ([], "http://127.0.0.1:8425"),
        (["--port", "9000"], "http://127.0.0.1:9000"),
        (["--port=9001", "--simulate-gpus", "2"], "http://127.0.0.1:9001"),
        (["--host", "0.0.0.0", "--port", "9002"], "http://127.0.0.1:9002"),
        (["--host=10.0.0.7"], "http://10.0.0.7:8425"),
        (["--host", "::1"], "http://[::1]:8425"),
        (["--port", "0"], "ADDRESS"),
        (["--config", "scripts/lib.sh"], "ADDRESS"),  # a file that is there: it may name another port
        (["--data", "with-config"], "ADDRESS"),
    ],
)
def test_serve_says_the_address_that_it_will_have(tmp_path: Path, words: list[str], address: str) -> None:
    set_up(tmp_path)
    program = tmp_path / ".venv" / "bin" / "cotenant"
    program.unlink()
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    (tmp_path / "with-config").mkdir()
    (tmp_path / "with-config" / "cotenant.toml").touch()
    env = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": ""}
    done = subprocess.run(
        ["scripts/serve", *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == ["serve", *words], "what was given is passed on"
    assert f" {address}/mcp," in done.stderr
    told = [line.strip() for line in done.stderr.splitlines() if "/.venv/bin/cotenant" in line]
    assert len(told) == 3
    at = f" --data '{tmp_path}/with-config'" if "with-config" in words else ""
    assert all(line.startswith(f"{tmp_path}/.venv/bin/cotenant{at} ") for line in told), told
    named = set(re.findall(r"http://[^\s/,\"]+", done.stderr))
    assert named == ({address} if address != "ADDRESS" else set())


def test_setup_has_nothing_to_do_twice(tmp_path: Path) -> None:
    """On a copy whose stamp says that it is done; it must not touch anything, and be quick."""
    stamp = set_up(tmp_path)
    before = stamp.stat().st_mtime_ns
    for arguments in ([], ["--dev"]):
        done = subprocess.run(
            [tmp_path / "scripts" / "setup", *arguments], capture_output=True, text=True, timeout=30, check=True
        )
        assert done.stdout + done.stderr == ""
    assert stamp.stat().st_mtime_ns == before


def test_an_unknown_argument_is_refused() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "setup", "--Dev"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "unknown argument '--Dev'" in done.stderr


@pytest.mark.slow
def test_gpu_check_runs_a_job_and_leaves_nothing_behind(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / ".cotenant-setup").exists():  # made by hand: gpu-check must not reinstall under our feet
        pytest.fail("run the tests through scripts/test, or scripts/setup --dev once")
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    script = ROOT / "scripts" / "gpu-check"
    done = subprocess.run(
        [script, "--simulate-gpus", "1"], env=env, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CUDA driver" in done.stdout or "no card to see" in done.stdout
    assert "everything holds" in done.stderr or "leased and given back" in done.stderr
    assert list(tmp_path.iterdir()) == []

    def left() -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in read(path)]

    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left() == []


def read(path: Path) -> str:
    """A file of a process that may be gone by now."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
