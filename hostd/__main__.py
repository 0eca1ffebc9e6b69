"""Start hostd: read the arguments, put the parts together, serve until told to end.

    cotenant-hostd --state DIR --socket PATH [--simulate-gpus N | --cards LIST | --without-cards LIST]
        [--residents NAME,NAME] [--lock-dir DIR]

Prints `ready PATH` on its own line once it listens. SIGTERM and SIGINT end it with status 0; attempts run on under
their shims, and the next hostd on the same directory adopts them. Exit status 2: the arguments or directories cannot
be used, and a sentence on stderr says what to do.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from typing import List, Optional, Tuple

# asyncio brings ssl along where it can, for 3 MiB that hostd never uses: it speaks on a unix socket alone.
if "asyncio" not in sys.modules:
    sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]

import asyncio

from cotenant.hostd.attempts import Attempts
from cotenant.hostd.cards import Cards, NoCards, SomeCards
from cotenant.hostd.daemon import Daemon
from cotenant.hostd.host import Host, claims_of
from cotenant.hostd.locks import CardLocks, default_lock_directory, open_lock_directory
from cotenant.hostd.outbox import Outbox
from cotenant.hostd.protocol import shown_cards
from cotenant.hostd.simulated import SimulatedCards
from cotenant.hostd.state import State, StateError
from cotenant.hostd.warm import raise_files

#: What _run returns when the same program shall start again in this process.
AGAIN = -1


def main(argv: Optional[List[str]] = None) -> int:
    """Run hostd; returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        status = asyncio.run(_run(options))
        if status == AGAIN:
            # All truth is on disk and attempts have their shims: starting over costs a moment of silence.
            print("the driver was upgraded: starting over to load its library", file=sys.stderr, flush=True)
            os.execv(
                sys.executable, [sys.executable, "-m", "cotenant.hostd", *(sys.argv[1:] if argv is None else argv)]
            )
        return status
    except StateError as error:
        print(f"cotenant-hostd: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cotenant-hostd: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cotenant-hostd", description="Keep this machine's GPUs and jobs for a Cotenant server."
    )
    parser.add_argument("--state", required=True, metavar="DIR", help="private directory on a local disk")
    parser.add_argument(
        "--socket", required=True, metavar="PATH", help="unix socket to listen on, in a private directory"
    )
    parser.add_argument(
        "--simulate-gpus", type=int, default=0, metavar="N", help="show N simulated cards and no real ones"
    )
    which = "uuids or indices, with commas"
    parser.add_argument("--cards", default=None, metavar="LIST", help=f"show these cards alone: {which}; empty: none")
    parser.add_argument("--without-cards", default="", metavar="LIST", help=f"do not show these cards: {which}")
    parser.add_argument("--residents", default="", metavar="NAME,NAME", help="programs that may be on a card always")
    parser.add_argument(
        "--lock-dir", default=None, metavar="DIR", help="where card locks of all users of this machine lie"
    )
    return parser


async def _run(options: argparse.Namespace) -> int:
    raise_files()
    lock_directory = open_lock_directory(options.lock_dir or default_lock_directory())
    state = State(options.state, lock_directory)
    state.open()
    outbox = Outbox(state.starts)
    attempts = Attempts(state.directory, state.boot_id)
    only = None if options.cards is None else _names(options.cards)
    but = _names(options.without_cards)
    cards = _cards(options.simulate_gpus, only, but, state, attempts)
    await cards.look()
    residents = _names(options.residents)
    locks = CardLocks(lock_directory, f"{os.geteuid()} {state.directory}")
    host = Host(state, cards, attempts, locks, residents, outbox.add, shown_cards(options.simulate_gpus, only, but))
    daemon = Daemon(options.socket, outbox)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, daemon.ended.set)
    host.adopt()
    await daemon.open(host)
    # The journal's thread sends the word to begin; it must not wait 5 ms (the default) for the loop to let it run.
    sys.setswitchinterval(0.0005)
    # What is loaded now stays: the collector need not look at it again, and small garbage may gather.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    print(f"ready {options.socket}", flush=True)
    try:
        await daemon.ended.wait()
    finally:
        again = cards.needs_new_process
        await daemon.close()
        await host.close()
        state.close()
    return AGAIN if again else 0


def _names(text: str) -> Tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _cards(
    simulated: int, only: Optional[Tuple[str, ...]], but: Tuple[str, ...], state: State, attempts: Attempts
) -> Cards:
    if simulated > 0:
        return SimulatedCards(simulated, state.state_id, lambda: claims_of(attempts))
    if only == ():
        return NoCards("no_library", "the configuration gives this host no cards")
    from cotenant.hostd.nvml import open_nvml

    cards = open_nvml()
    return cards if only is None and not but else SomeCards(cards, only, but)


if __name__ == "__main__":
    sys.exit(main())
