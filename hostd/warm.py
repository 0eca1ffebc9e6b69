"""The warm parent: a small single-threaded process that has forked the next shim before it is needed.

Owns the forking of shims. Started by exec, so that it holds neither NVML nor threads nor asyncio. One spare shim
always waits on the request socket that hostd writes to: a start reaches it without a fork on the way (a fork costs
about 1 ms on a small virtual machine). When the spare has taken a request it says so on a pipe and the parent forks
the next. hostd's death closes the request socket: the parent and the spare end, shims with an attempt live on. The
parent's death closes the same socket once the spare is used up, and hostd starts another parent.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys

from cotenant.hostd import shim

#: The limit on open files that commands are started with, in the environment of what is between hostd and them.
FILES = "COTENANT_FILES_SOFT"


def raise_files() -> None:
    """Let this process open as many files as the system allows: hostd holds a few for each attempt.

    What it starts gets its own limit back (`restore_files`): programs that use select() break on numbers above 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.environ.setdefault(FILES, str(soft))
    with contextlib.suppress(ValueError, OSError):  # some systems refuse what they say themselves: it stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def restore_files() -> None:
    """Undo `raise_files` for this process and all it starts."""
    soft = os.environ.pop(FILES, "")
    if soft.lstrip("-").isdigit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def main(request_fd: int) -> None:
    """Serve until hostd is gone. `request_fd` is a SOCK_SEQPACKET socket whose other end hostd holds."""
    requests = socket.socket(fileno=request_fd)
    os.set_inheritable(request_fd, False)
    restore_files()
    # A group of its own: a Ctrl-C at the terminal of `cotenant serve` must not reach it.
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Shims end without anybody waiting for them here.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    shim.prepare()
    gc.collect()
    gc.disable()
    gc.freeze()  # keeps the collector from touching, and so copying, pages that are shared with the shims
    while True:
        taken_read, taken_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(taken_read)
            shim.wait_for_request(requests, taken_write)
            os._exit(0)
        os.close(taken_write)
        poll = select.poll()
        poll.register(taken_read, select.POLLIN)
        poll.register(requests, 0)  # only the hang-up
        ready = dict(poll.poll())
        if requests.fileno() in ready:
            return
        if not os.read(taken_read, 1):
            # The spare died before it took anything. Wait a little, so that a lasting cause does not burn a core.
            poll.unregister(taken_read)
            if poll.poll(50):
                return
        os.close(taken_read)


if __name__ == "__main__":
    main(int(sys.argv[1]))
