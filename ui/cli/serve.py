"""`cotenant serve`: the server itself, in this process. The one command that imports it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cotenant.ui.cli import place
from cotenant.ui.cli.problems import Problem, ToolRefused, Usage

if TYPE_CHECKING:
    import argparse

    from cotenant.ui.cli.entry import Parser


def configure(parser: Parser, _: str) -> None:
    serve = parser.command(
        act, example="cotenant serve --port 8425\n  cotenant serve --data /tmp/try --port 0 --simulate-gpus 2"
    )
    serve.add_argument("--host", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=port_number, help="TCP port; 0: any free one (8425)")
    serve.add_argument(
        "--simulate-gpus", type=int, metavar="N", help="N simulated cards instead of real ones, for trying out"
    )
    serve.add_argument("--config", metavar="FILE", help="configuration (cotenant.toml in the data directory)")


def port_number(text: str) -> int:
    """A TCP port; argparse turns the error into one of usage."""
    import argparse

    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no TCP port: give 0 to 65535")
    return int(text)


def act(args: argparse.Namespace) -> int:
    from pathlib import Path

    if args.url or args.token_file:
        raise Usage("serve is the server: it takes --host and --port, neither --url nor --token-file.")
    with own_errors(args.command):
        from cotenant.server import app, config

        settings = config.load(
            data_dir=Path(place.data_dir(args.data)),
            config_file=Path(args.config) if args.config else None,
            host=args.host,
            port=args.port,
            simulate_gpus=args.simulate_gpus,
        )
        code = app.serve(settings)
    return code if isinstance(code, int) else 0


@contextmanager
def own_errors(command: str = "") -> Iterator[None]:
    """The server's own refusals as problems of the command line; anything else is a bug and keeps its traceback."""
    from cotenant.server.config import ConfigError
    from cotenant.server.errors import CotenantError
    from cotenant.server.store.db import StoreRefused

    try:
        yield
    except ConfigError as exc:
        raise Usage(str(exc)) from exc
    except CotenantError as exc:
        raise ToolRefused(exc.code, exc.text(), exc.data, command=command) from exc
    except StoreRefused as exc:
        raise Problem(str(exc)) from exc
    except OSError as exc:
        if exc.filename is None and exc.strerror is None:
            raise
        raise Problem(f"{exc.strerror}{f': {exc.filename}' if exc.filename else ''}.") from exc
