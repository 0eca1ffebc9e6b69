"""The lab's pytest fixtures, loaded for every test by tests/conftest.py.

nvml_libdir  session: folder with the fake libnvidia-ml.so.1, built once (needs gcc)
nvml         function: fakenvml.FakeNvml with 4 cards, nothing on them

lab    session: 3 hosts, 4 GPUs each, torn down at the end; skipped without root / sshd / iproute2
hosts  function: the same hosts, healed before each test (links, wires, power, sshd, GPU faults, claims)
ssh    function: async def connect(host, **kw) -> asyncssh connection, closed after the test
"""

import os
import shutil

import asyncssh
import fakenvml
import labhosts
import pytest


@pytest.fixture(scope="session")
def nvml_libdir(tmp_path_factory):
    libdir = tmp_path_factory.mktemp("nvmllib")
    fakenvml.build(libdir)
    return libdir


@pytest.fixture
def nvml(tmp_path):
    return fakenvml.FakeNvml(tmp_path / "nvml.state").create(gpus=4, host="t")


def missing():
    if os.geteuid():
        return "not root"
    return next(
        (t for t in ("ip", "bridge", "nsenter", "ssh-keygen", "gcc") if not shutil.which(t)),
        None if os.path.exists("/usr/sbin/sshd") else "sshd",
    )


@pytest.fixture(scope="session")
def lab_able():
    """Skips, and says why, where hosts cannot be made."""
    why = missing()
    if why:
        pytest.skip("lab: " + why + (" missing" if why != "not root" else ""))


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
