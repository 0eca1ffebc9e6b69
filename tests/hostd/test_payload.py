"""What is brought to a host: the folder alone, under every Python from 3.9 on, with nothing installed."""

import glob
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hostdclient import ROOT, Hostd

OLDEST = (3, 9)


def pythons():
    """Every Python of this machine that hostd must run under: those on PATH and those that pyenv keeps."""
    found = {}
    names = ["python3", *(f"python3.{minor}" for minor in range(9, 20))]
    candidates = [shutil.which(name, path=folder) for folder in os.get_exec_path() for name in names]
    roots = {os.environ.get("PYENV_ROOT", ""), os.path.expanduser("~/.pyenv")} - {""}
    for root in sorted(roots):
        candidates += sorted(glob.glob(f"{root}/versions/*/bin/python3"))
    for path in candidates:
        if path is None:
            continue
        code = "import sys; print(sys.version_info[0], sys.version_info[1], sys.base_prefix)"
        done = subprocess.run([path, "-S", "-E", "-c", code], capture_output=True, text=True, check=False, timeout=30)
        told = re.match(r"(\d+) (\d+) (.+)", done.stdout)
        if told and (int(told[1]), int(told[2])) >= OLDEST:
            found.setdefault((int(told[1]), int(told[2]), told[3]), path)
    return [pytest.param(path, id=f"{major}.{minor}") for (major, minor, _), path in sorted(found.items())]


PYTHONS = pythons()


def test_there_is_a_python_to_test_with():
    assert PYTHONS


def folder(base):
    target = base / "payload" / "cotenant" / "hostd"
    shutil.copytree(ROOT / "hostd", target, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    return base / "payload"


def archive(base):
    path = base / "payload.zip"
    with zipfile.ZipFile(path, "w") as file:
        for name in ("cotenant/", "cotenant/hostd/"):  # without them a package that has no __init__ is not found
            file.writestr(zipfile.ZipInfo(name), "")
        for source in sorted((ROOT / "hostd").glob("*.py")):
            file.write(source, f"cotenant/hostd/{source.name}")
    return path


@pytest.mark.parametrize("make", [folder, archive])
@pytest.mark.parametrize("python", PYTHONS)
async def test_the_payload_runs_a_job_and_survives_its_own_death(tmp_path, python, make):
    bare = {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "error"}
    async with Hostd(tmp_path, simulate=1, python=python, root=make(tmp_path), env=bare) as hostd:
        card = hostd.cards[0]["uuid"]
        await hostd.start("a1", ["sh", "-c", "echo out; exit 3"], card)
        end = await hostd.ended("a1")
        assert end["exit"]["code"] == 3 and end["clean"] and await hostd.log_text("a1") == "out\n"
        await hostd.start("a2", ["sleep", "100"], card)
        await hostd.kill()
        await hostd.again()
        await hostd.stop("a2")
        assert (await hostd.ended("a2"))["exit"]["reason"] == "cancel"
        assert await hostd.down() == 0
        assert "Error" not in hostd.log.read_text() and "Warning" not in hostd.log.read_text()


@pytest.mark.parametrize("python", PYTHONS)
async def test_without_the_nvml_package_cpu_jobs_run_and_the_reason_is_told(tmp_path, python):
    root = folder(tmp_path)
    # a module of that name that cannot be imported stands for one that is not installed
    (root / "pynvml.py").write_text("raise ImportError('not here')\n")
    async with Hostd(tmp_path, python=python, root=root) as hostd:
        assert hostd.welcome["facts"]["nvml"] == "no_library" and "pynvml" in hostd.welcome["facts"]["nvml_message"]
        await hostd.start("a1", ["sh", "-c", "exit 5"])
        assert (await hostd.ended("a1"))["exit"]["code"] == 5


def test_it_imports_the_standard_library_alone():
    """pynvml is asked for in one place, inside a function; nothing else of others' is needed."""
    for source in (ROOT / "hostd").glob("*.py"):
        for line in Path(source).read_text().splitlines():
            told = re.match(r"\s*(?:from|import) ([A-Za-z_]\w*)", line)
            if told and told[1] not in (*sys.stdlib_module_names, "cotenant"):
                assert (source.name, told[1], line[0]) == ("nvml.py", "pynvml", " "), (source.name, line)
