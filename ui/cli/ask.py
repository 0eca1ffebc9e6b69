"""What most commands begin with: a client from the options, and a question before what cannot be undone."""

from __future__ import annotations

import os
import sys

from cotenant.ui.cli import place
from cotenant.ui.cli.client import Client
from cotenant.ui.cli.problems import Problem, Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse


#: Seconds in a unit of time, as times are written on the command line: 90s, 12h, 30d.
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def client(args: argparse.Namespace) -> Client:
    """A client for the server and the token that the options, the environment or the data directory name."""
    return Client(place.find(url=args.url, token_file=args.token_file, data=args.data), args.command)


def sure(args: argparse.Namespace, question: str) -> None:
    """Ask on a terminal; elsewhere --yes must have been given.

    Raises:
        Usage: nobody can be asked and --yes is missing.
        Problem: the person said no; nothing was done.
    """
    if args.yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Usage(f"{question} Nobody can be asked here: give --yes to do it.")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Problem("Nothing was done.")


def yes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def number(text: str) -> float:
    """A number from 0 up, for an option; argparse turns the error into one of usage. NaN and infinity are none."""
    import argparse

    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 up")
    return value


def named(words: list[str], what: str) -> dict[str, str] | None:
    """NAME=VALUE words as a dictionary, or None where there are none. Raises Usage where one has no =."""
    pairs: dict[str, str] = {}
    for word in words:
        name, mark, value = word.partition("=")
        if not mark or not name:
            raise Usage(f"{what} takes NAME=VALUE, not {word!r}.")
        pairs[name] = value
    return pairs or None


def one_program(words: list[str], for_a_line: str) -> None:
    """Raises Usage where a line of shell is given in the place of a program; a path may hold blanks."""
    if len(words) == 1 and len(words[0].split()) > 1 and not os.path.lexists(words[0]) and not words[0].startswith("/"):
        raise Usage(
            f"{words[0]!r} is one word and would be the name of a program. Give a program's arguments as words of their "
            f"own, and a line of shell as {for_a_line}."
        )


def split_words(text: str, option: str) -> list[str]:
    """Words between commas. Raises Usage where there are none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise Usage(f"{option} names nothing.")
    return words
