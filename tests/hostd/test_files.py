"""Descriptors: hostd may have many, what it starts has its own limit, and a start that finds none leaves nothing behind."""

import os
import resource

from cotenant.hostd.protocol import Refused


def limit_of(pid):
    with open(f"/proc/{pid}/limits") as file:
        line = next(line for line in file if line.startswith("Max open files"))
    return int(line.split()[3])


async def test_hostd_may_open_more_files_than_what_it_starts(hostd):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limit_of(hostd.process.pid) == hard
    await hostd.start("a1", ["sh", "-c", "ulimit -n; env | grep FILES_SOFT; true"], slots=())
    await hostd.ended("a1")
    assert (await hostd.log_text("a1")).split() == [str(soft)], "its own limit, and no word of ours"


async def test_a_start_that_finds_no_descriptor_is_refused_and_may_come_again(hostd):
    """Whatever number is left when it is asked: it runs, or is refused and nothing is there."""
    pid = hostd.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)

    def open_now():
        return len(os.listdir(f"/proc/{pid}/fd"))

    refused = 0
    for left in range(12):
        name = f"few{left}"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now() + left, hard))
        try:
            await hostd.start(name, ["true"], slots=())
        except Refused as error:
            refused += 1
            assert error.code == "storage"
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
            assert (await hostd.probe(name))["state"] in ("unknown", "never")
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
    assert refused, "some had too few"
    await hostd.start("after", ["sh", "-c", "exit 3"], slots=())
    assert (await hostd.ended("after"))["exit"]["code"] == 3
