"""`cotenant token`: make, list and revoke tokens, over a running server or on its database while it does not run."""

from __future__ import annotations

import os
from collections.abc import Callable

from cotenant.ui.cli import ask, place, show
from cotenant.ui.cli.problems import NoServer, Problem, Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

    Answer = dict[str, Any]


def configure(parser: Parser, _: str) -> None:
    create = parser.sub(
        "create",
        act_create,
        "make a token; it is shown once",
        example="cotenant token create alice-codex --owner alice --scopes read,write",
    )
    create.add_argument("name", metavar="NAME", help="the caller's name")
    create.add_argument("--kind", choices=("agent", "human"), default="agent", help="(agent)")
    create.add_argument("--owner", help="the person who answers for it (your unix user)")
    create.add_argument("--scopes", default="read,write", help="of read, write, operate, admin, report (read,write)")
    create.add_argument("--expires", metavar="TIME", help="end after 12h, 30d, … (never)")
    create.add_argument(
        "--tools", "--toolset", dest="toolset", choices=("core", "full"), help="which tools it is told of (full)"
    )
    create.add_argument("--pools", help="only these pools, by commas (all)")
    create.add_argument(
        "--max-priority", choices=("critical", "high", "normal", "batch"), help="the highest it may ask for"
    )
    create.add_argument("--autopilot", action="store_true", help="what is its own and final needs no second question")
    create.add_argument("--own-only", action="store_true", help="bound to its own objects, not to all of its owner's")
    create.add_argument("--out", metavar="FILE", help="write the token to this new file (0600) instead of showing it")
    create.add_argument("--reason", default="made on the command line", help="why; recorded")
    parser.sub("list", act_list, "all tokens, without their secrets", example="cotenant token list")
    revoke = parser.sub("revoke", act_revoke, "end a token now", example="cotenant token revoke alice-codex --yes")
    revoke.add_argument(
        "token", metavar="NAME|ID", help="a caller's name, or the id of one token (cotenant token list)"
    )
    revoke.add_argument("--all", action="store_true", help="every living token of that name")
    revoke.add_argument("--reason", default="revoked on the command line", help="why; recorded")
    ask.yes_option(revoke)


def act_create(args: argparse.Namespace) -> int:
    owner = _unix_user() if args.owner is None else args.owner.strip()
    if not owner:
        raise Usage("--owner names nobody. Give the person who answers for the token, or leave it out for yourself.")
    wanted: Answer = {
        "name": args.name,
        "kind": args.kind,
        "owner": owner,
        "scopes": ask.split_words(args.scopes, "--scopes"),
        "expires_s": _seconds(args.expires),
        "toolset": args.toolset,
        "pools": ask.split_words(args.pools, "--pools") if args.pools else None,
        "max_priority": args.max_priority,
        "autopilot": args.autopilot or None,
        "own_only": args.own_only or None,
    }
    wanted = {key: value for key, value in wanted.items() if value is not None}

    def offline(data: Any) -> Answer:
        from cotenant.server.offline import create_token

        new = not os.path.exists(os.path.join(data, "control.db"))
        made = create_token(data, reason=args.reason, **wanted)
        if new:  # a mistyped --data looks just like a first one: only the person can tell
            show.say(
                f"made a new data directory: {data}. A server must be started with the same --data to know this token."
            )
        return made

    def make() -> Answer:
        return _either(args, lambda client: client.operate("token.create", wanted, args.reason), offline)

    answer = _into(args.out, make) if args.out else make()
    if args.out:
        answer = {
            **{key: value for key, value in answer.items() if key != "token"},
            "token_file": os.path.abspath(args.out),
        }
    if args.json:
        show.as_json(answer)
    elif args.out:
        show.out(f"{args.name}: token in {args.out}")
    else:
        show.out(str(answer["token"]))
        show.say("this is the only time that it is shown")
    if others := answer.get("others"):
        them = (
            "another living token, which goes" if len(others) == 1 else f"{len(others)} other living tokens, which go"
        )
        show.say(f"{args.name} has {them} on working: {', '.join(others)}. End one with `cotenant token revoke ID`.")
    return 0


def _into(path: str, make: Callable[[], Answer]) -> Answer:
    """Make a token and write it to a new file. The file is opened first: a token that nobody has would live on unseen."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise Usage(f"{path} is there already; name a new file.") from None
    except OSError as exc:
        raise Usage(f"{path} cannot be made: {exc.strerror}.{_make_folder(path)}") from exc
    try:
        answer = make()
        with os.fdopen(fd, "w") as file:
            file.write(str(answer["token"]) + "\n")
    except BaseException:
        os.unlink(path)
        raise
    return answer


def _make_folder(path: str) -> str:
    """What to do where the folder of a token's file is not there."""
    folder = os.path.dirname(path)
    return f" First: mkdir -p -m 700 {folder}" if folder and not os.path.lexists(folder) else ""


def act_list(args: argparse.Namespace) -> int:
    def offline(data: Any) -> Answer:
        from cotenant.server.offline import list_tokens

        return {"tokens": list_tokens(_there(data))}

    from cotenant.ui.cli.fleet import clock

    answer = _either(args, lambda client: client.operate("token.list", {}, "listed on the command line"), offline)
    if args.json:
        show.as_json(answer)
        return 0
    rows = (
        (
            t.get("name"), t.get("kind"), t.get("owner"), _joined(t.get("scopes")), t.get("toolset"),
            t.get("state"), clock(t.get("expires_at")), clock(t.get("last_seen_at")), t.get("id"),
        )
        for t in answer["tokens"]
    )  # fmt: skip
    show.table(
        rows, ("NAME", "KIND", "OWNER", "SCOPES", "TOOLS", "STATE", "EXPIRES", "SEEN", "ID"), empty="There is no token."
    )
    return 0


def _joined(words: Any) -> str:
    return words if isinstance(words, str) else ",".join(words or ())


def act_revoke(args: argparse.Namespace) -> int:
    def offline(data: Any) -> Answer:
        from cotenant.server.offline import revoke_token

        return revoke_token(_there(data), args.token, args.reason, every=args.all)

    ask.sure(args, f"End the token of {args.token} now? What it started goes on.")
    wanted = {"token": args.token, "all": args.all or None}
    answer = _either(args, lambda client: client.operate("token.revoke", wanted, args.reason), offline)
    if args.json:
        show.as_json(answer)
    else:
        ended = answer["revoked"]
        show.out(f"{args.token} revoked" + (f" ({len(ended)} tokens)" if len(ended) > 1 else ""))
    return 0


def _either(args: argparse.Namespace, online: Callable[[Any], Answer], offline: Callable[[Any], Answer]) -> Answer:
    """Through the server where it runs, else on the database of its data directory.

    The database has one writer: while a server holds it, `offline` refuses by itself, whatever was seen here.
    """
    data = place.data_dir(args.data)
    elsewhere = args.url or (not args.data and os.environ.get("COTENANT_URL"))
    if elsewhere:
        return online(ask.client(args))
    if place.server_record(data) is not None:
        try:
            return online(ask.client(args))
        except NoServer as exc:
            if not exc.refused:
                raise
    from pathlib import Path

    from cotenant.ui.cli.serve import own_errors

    with own_errors(args.command):
        return offline(Path(data))


def _there(data: Any) -> Any:
    """The data directory, which must hold a store: to look or to revoke nobody wants a new one."""
    if not os.path.exists(os.path.join(data, "control.db")):
        raise Problem(
            f"There is no data directory of a server at {data}. Give the right one with --data, or a running server's "
            "address with --url."
        )
    return data


def _unix_user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _seconds(text: str | None) -> int | None:
    if text is None:
        return None
    number, unit = (text[:-1], text[-1:]) if text[-1:] in ask.UNITS_S else (text, "s")
    if not number.isdigit() or not int(number):
        raise Usage(f"--expires takes a time such as 12h or 30d, not {text!r}.")
    return int(number) * ask.UNITS_S[unit]
