"""House rules that no linter knows: who may import what, docstrings, no traces of one machine."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["server", "tools", "resources", "prompts", "hostd", "ui"]
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in MODULES]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module.startswith("cotenant"))


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no docstring"


def test_only_serve_imports_the_composition_root() -> None:
    found = {name for name, path in zip(NAMES, MODULES, strict=True) if "cotenant.server.app" in imports(path)}
    assert found <= {"ui/cli/serve.py"}


def test_hostd_needs_the_standard_library_psutil_and_pynvml_alone() -> None:
    allowed = sys.stdlib_module_names | {"psutil", "pynvml"}
    for path in (ROOT / "hostd").rglob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in allowed or name.startswith("cotenant.hostd"), f"{path.relative_to(ROOT)} imports {name}"


def test_hostd_is_written_in_python_3_9() -> None:
    for path in (ROOT / "hostd").rglob("*.py"):
        ast.parse(path.read_text(), str(path), feature_version=(3, 9))


def test_what_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in project["dependencies"]}
    owners = importlib.metadata.packages_distributions()
    for path in MODULES:
        for name in imports(path):
            top = name.split(".")[0]
            if top == "cotenant" or top in sys.stdlib_module_names:
                continue
            assert {owner.lower() for owner in owners.get(top, [])} & declared, (
                f"{path.relative_to(ROOT)} imports {name}; no dependency in pyproject.toml brings it"
            )


def test_nothing_names_a_place_of_one_machine() -> None:
    """Paths under root's home or a work folder would work nowhere else; the repository alone must suffice."""
    places = re.compile(r"(?<![\w.~$}/-])/(?:root|work)/|\.\./" + "shared")
    for path in tracked():
        if path == ROOT / ".ci" / "run":
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            assert not places.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
