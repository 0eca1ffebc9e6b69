"""Start and end of the HTTP server: one socket, one `ready` line, streams that end with the signal.

uvicorn waits at its end for every open request. A client that holds a stream open would keep it forever, and closing
the streams in the application's own shutdown is too late, because that runs after the wait (measured, uvicorn 0.54).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

#: Requests that have not ended by then are cut off. Together with the rest this stays below the promised 5 s.
GRACE_S = 2
READ_ON_S = 1.0
#: Bytes that the system keeps for a connection whose client does not read; Linux doubles it.
SEND_BUFFER = 128 * 1024


class GracefulServer(uvicorn.Server):
    """A uvicorn server that leaves the signals to us and says when it answers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own handler raises the signal again at the end, so that the process would not exit with 0.
        yield

    def stop(self) -> None:
        """End in good order. Clients that do not read what is sent to them get READ_ON_S for it."""
        self.should_exit = True
        asyncio.get_running_loop().call_later(READ_ON_S, self._drop_stalled)

    def _drop_stalled(self) -> None:
        """Break connections that still have something to send: their requests would hang in it until they are cancelled,
        and each would leave a traceback in the log."""
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None and not transport.is_closing() and transport.get_write_buffer_size():
                transport.abort()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OSError: the address is not ours, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is (3.11): without, an answer in
    # two writes waits for the client's delayed ACK. Measured: 48 ms a call instead of 1.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Connections inherit it. Left to itself the system keeps up to 4 MiB (Linux, tcp_wmem) for each client that does
        # not read; a thousand such streams would be a denial of service, and what they get at last would be minutes old.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        sock.bind((host, port))
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock


def url_of(sock: socket.socket, host: str) -> str:
    """Where to reach a socket bound to `host`; its own port where 0 was asked for."""
    port = sock.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def config_of(app: ASGIApp) -> uvicorn.Config:
    """uvicorn on uvloop and httptools, without its own log set-up."""
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here believes what a client says about its address
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=75,
    )


@contextlib.contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """While inside, SIGTERM and SIGINT call `stop` on the loop, once or more."""
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
