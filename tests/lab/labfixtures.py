"""The lab's pytest fixtures, loaded for every test by tests/conftest.py.

nvml_libdir  session: folder with the fake libnvidia-ml.so.1, built once (needs gcc)
nvml         function: fakenvml.FakeNvml with 4 cards, nothing on them

lab    session: 3 hosts, 4 GPUs each, torn down at the end; skipped without root / sshd / iproute2
hosts  function: the same hosts, healed before each test (links, wires, power, sshd, GPU faults, claims)
ssh    function: async def connect(host, **kw) -> asyncssh connection, closed after the test
"""

import os
import shutil
import subprocess

import asyncssh
import fakenvml
import labhosts
import pytest


def cannot(why):
    """Skips, unless the run was told that everything must be there (scripts run by CI say so): then fails."""
    if os.environ.get("COTENANT_REQUIRE_LAB"):
        pytest.fail(f"{why} (and COTENANT_REQUIRE_LAB is set)")
    pytest.skip(why)


def missing():
    """Why hosts cannot be made here, or None."""
    if os.geteuid():
        return "making hosts needs root"
    tools = ("ip", "bridge", "nsenter", "unshare", "setpriv", "pgrep", "ssh-keygen", "gcc")
    absent = [tool for tool in tools if not shutil.which(tool)] + ["sshd"] * (not os.path.exists("/usr/sbin/sshd"))
    if absent:
        return f"not installed: {', '.join(absent)} (scripts/test installs them as root)"
    probe = subprocess.run(["unshare", "-n", "-m", "-p", "-f", "true"], capture_output=True, text=True, check=False)
    return f"namespaces are not permitted here: {probe.stderr.strip()}" if probe.returncode else None


@pytest.fixture(scope="session")
def nvml_libdir(tmp_path_factory):
    if not shutil.which("gcc"):
        cannot("the fake NVML cannot be built: gcc is not installed (scripts/test installs it as root)")
    libdir = tmp_path_factory.mktemp("nvmllib")
    fakenvml.build(libdir)
    return libdir


@pytest.fixture
def nvml(tmp_path):
    return fakenvml.FakeNvml(tmp_path / "nvml.state").create(gpus=4, host="t")


@pytest.fixture(scope="session")
def lab_able():
    """Skips, and says why, where hosts cannot be made."""
    if why := missing():
        cannot(f"lab: {why}")


@pytest.fixture(scope="session")
def lab(lab_able, tmp_path_factory):
    lab = labhosts.Lab(tmp_path_factory.mktemp("lab"))
    try:
        yield lab.up(3, gpus=4, owner=os.getpid())
    finally:
        lab.down()


@pytest.fixture
def hosts(lab):
    lab.heal()
    return lab.hosts


@pytest.fixture
async def ssh(lab):
    conns = []

    async def connect(host, **kw):
        c = await asyncssh.connect(**{**lab.ssh_kw(host), **kw})
        conns.append(c)
        return c

    yield connect
    for c in reversed(conns):  # what came through a jump host before the jump host
        c.abort()
        await c.wait_closed()
