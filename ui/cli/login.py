"""`cotenant login-link`: a link that logs its person in to the page, once."""

from __future__ import annotations

import os

from cotenant.ui.cli import ask, show
from cotenant.ui.cli.problems import Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse

    from cotenant.ui.cli.entry import Parser

#: A server that listens everywhere names no address that a browser could go to.
_EVERYWHERE = {"://0.0.0.0": "://127.0.0.1", "://[::]": "://[::1]"}


def configure(parser: Parser, _: str) -> None:
    login = parser.command(
        act, example="cotenant login-link\n  ssh -L 8425:127.0.0.1:8425 gpu1   # then open the link here"
    )
    login.add_argument("--out", metavar="FILE", help="write the link to this new file (0600) instead of showing it")


def act(args: argparse.Namespace) -> int:
    if args.out and os.path.lexists(args.out):
        raise Usage(f"{args.out} is there already; name a new file.")
    client = ask.client(args)
    answer = client.operate("login.link", {}, "asked for on the command line")
    url = client.place.url
    for everywhere, here in _EVERYWHERE.items():
        url = url.replace(everywhere, here)
    link = url + str(answer.pop("path"))
    if args.out:
        fd = os.open(args.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(link + "\n")
        answer["link_file"] = os.path.abspath(args.out)
    else:
        answer["link"] = link
    minutes = max(1, round(int(answer["expires_in_s"]) / 60))
    if args.json:
        show.as_json(answer)
    elif args.out:
        show.out(f"link in {args.out}; good for one login within {minutes} minutes")
    else:
        show.out(link)
        show.say(f"good for one login within {minutes} minutes; it is shown this once")
    return 0
