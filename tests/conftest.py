"""What every test may use: the lab's fixtures, and the rule when a test may skip.

Only a test marked `gpu` may skip for lack of hardware, and only one marked `lab` for lack of root or of a system
program; each says what was missing.
"""

import os
import signal
import tempfile

import pytest

# A shell that starts the suite in the background hands SIGINT on as ignored, nohup does so with SIGHUP, and every program
# under test would inherit that: the tests that send one would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Two suites on one machine, or what an earlier one left, must not look like each other's lost processes.
if "COTENANT_LOCK_DIR" not in os.environ:
    os.environ["COTENANT_LOCK_DIR"] = tempfile.mkdtemp(prefix="cotenant-locks-")
    os.chmod(os.environ["COTENANT_LOCK_DIR"], 0o1777)  # some tests run as other users

pytest_plugins = ["labfixtures", "journaled"]  # tests/lab is on the path: pyproject.toml, pythonpath


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where the NVIDIA driver has no device node."""
    if os.path.exists("/dev/nvidiactl"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA card on this machine (/dev/nvidiactl is not there)"))
