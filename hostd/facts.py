"""The machine's totals, read from /proc: what placement needs and a person wants to see."""

from __future__ import annotations

import os
import platform
import socket
from typing import Dict, Optional

from cotenant.hostd.cards import Driver
from cotenant.hostd.protocol import HostFacts

#: Of this payload; the package's own version where it is installed.
VERSION = "0.1.0"  # of the whole package: pyproject.toml takes it from here


def read_facts(state_directory: str, driver: Driver, shows: str = "") -> HostFacts:
    """The facts of this moment. Costs about 0.1 ms."""
    memory = _memory_mib()
    disk = os.statvfs(state_directory)
    return HostFacts(
        hostname=socket.gethostname(),
        cpus=_cpus(),
        memory_mib=memory.get("MemTotal", 0),
        memory_available_mib=memory.get("MemAvailable", memory.get("MemFree", 0)),
        disk_free_mib=disk.f_bavail * disk.f_frsize // (1024 * 1024),
        load_1m=round(os.getloadavg()[0], 2),
        driver=driver.version,
        cuda=driver.cuda,
        nvml=driver.status,
        nvml_message=driver.message,
        python=platform.python_version(),
        hostd_version=VERSION,
        shows=shows,
    )


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except OSError:
        return os.cpu_count() or 1


def _memory_mib(path: str = "/proc/meminfo") -> Dict[str, int]:
    found: Dict[str, int] = {}
    text: Optional[str] = None
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read()
    except OSError:
        return found
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            found[name] = int(fields[0]) // 1024
    return found
