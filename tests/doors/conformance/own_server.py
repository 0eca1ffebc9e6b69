"""Cotenant's own server for a client that cannot send a token: the whole of it, with one put into every request.

    python own_server.py DATA_DIR

The conformance suite has no option for headers. What stands in front of the application is this one line; the bearer
check, the control plane, the store and a hostd with simulated cards are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from starlette.types import Receive, Scope, Send

from cotenant.server import config
from cotenant.server.app import build_app
from cotenant.server.clock import SystemClock
from cotenant.server.http import serving
from cotenant.server.ids import Ids
from cotenant.server.services import LOCAL_TOKEN, services


async def main(data: Path) -> None:
    stopping = asyncio.Event()
    settings = config.load(data_dir=data, host="127.0.0.1", port=0, simulate_gpus=2)
    sock = serving.bind("127.0.0.1", 0)
    with contextlib.closing(sock), serving.on_signals(stopping.set):
        async with services(settings, SystemClock(), Ids()) as control:
            app = build_app(control, settings)
            token = (data / LOCAL_TOKEN).read_text().strip().encode()

            async def known(scope: Scope, receive: Receive, send: Send) -> None:
                if scope["type"] == "http":
                    scope = {**scope, "headers": [*scope["headers"], (b"authorization", b"Bearer " + token)]}
                await app(scope, receive, send)

            url = serving.url_of(sock, "127.0.0.1")
            server = serving.GracefulServer(serving.config_of(known), lambda: print(f"ready {url}", flush=True))

            async def end() -> None:
                await stopping.wait()
                app.stop()
                server.stop()

            ending = asyncio.create_task(end())
            await server.serve(sockets=[sock])
            ending.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
