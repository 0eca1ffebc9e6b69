"""`cotenant mcp-config CLIENT`: what to paste into a client so that its agent finds the server, or the edit itself."""

from __future__ import annotations

import os
import sys

from cotenant.ui.cli import agents_known, ask, patch, place, show
from cotenant.ui.cli.agents_known import KNOWN, PROJECT_FIRST, TOKEN_VARIABLE, Known
from cotenant.ui.cli.problems import Problem, Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

DEFAULT_URL = "http://127.0.0.1:8425"
_LONGEST = 8 * 1024 * 1024


def configure(parser: Parser, _: str) -> None:
    command = parser.command(act, example="cotenant mcp-config codex --stdio --write")
    command.add_argument("client", metavar="CLIENT", choices=sorted(KNOWN), help=", ".join(KNOWN))
    command.add_argument(
        "--stdio", action="store_true", help="let the client start `cotenant mcp-stdio` (it connects itself)"
    )
    command.add_argument("--tools", choices=("core", "full"), help="which tools it is told of (what suits the client)")
    command.add_argument("--name", default="cotenant", help="the server's name in the client (cotenant)")
    command.add_argument("--token-env", metavar="NAME", help=f"the variable with the token ({TOKEN_VARIABLE})")
    command.add_argument("--create-token", metavar="NAME", help="with --stdio: make an agent's token in the token file")
    command.add_argument("--scope", choices=("user", "project"), help="whose file (what is usual for the client)")
    command.add_argument("--file", metavar="FILE", help="the client's file, if it is another")
    command.add_argument("--write", action="store_true", help="edit the client's file, after showing the difference")
    ask.yes_option(command)


class Plan:
    """What one client needs: the entry, the text to paste, the file it belongs to, and what else is to be done."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.known: Known = KNOWN[args.client]
        self.name: str = args.name
        if not self.name.replace("-", "").replace("_", "").isalnum() or not self.name.isascii():
            raise Usage("--name takes letters, digits, - and _.")
        url, self.url_from = _address(args)
        tools = args.tools or self.known.tools
        self.token_file: str | None = None
        self.variable: str | None = None
        if args.stdio:
            if args.token_env:
                self.variable = args.token_env
            else:
                self.token_file = os.path.abspath(args.token_file or _token_file(self.known))
            self.entry = agents_known.over_stdio(self.known, self._command(url, tools), self.variable)
        else:
            if args.token_file:
                raise Usage(
                    "A client that connects by itself cannot read a file. Add --stdio, or use --token-env NAME."
                )
            if args.create_token:
                raise Usage("--create-token writes the token file of --stdio.")
            self.variable = args.token_env or TOKEN_VARIABLE
            self.entry = agents_known.over_http(self.known, url, tools, self.variable)
        self.inputs = agents_known.inputs(self.known, self.entry)
        self.project = args.scope == "project" or (args.scope is None and args.client in PROJECT_FIRST)
        self.file: str | None = os.path.abspath(args.file) if args.file else self.known.where(self.project)
        self.text = self._text()

    def _command(self, url: str, tools: str) -> list[str]:
        """The bridge by its whole path: what starts the client has another PATH than this terminal."""
        beside = os.path.join(os.path.dirname(sys.executable), "cotenant")
        command = [beside] if os.access(beside, os.X_OK) else [sys.executable, "-P", "-m", "cotenant.ui.cli"]
        command += ["mcp-stdio", "--url", url]
        if self.token_file is not None:
            command += ["--token-file", self.token_file]
        return [*command, *(["--tools", "core"] if tools == "core" else [])]

    def _text(self) -> str:
        import json

        if self.known.form == "toml":
            return patch.toml_block(self.known.table, self.name, self.entry)
        if self.known.name == "claude-code" and self.file is None:
            import shlex

            return f"claude mcp add-json --scope user {self.name} {shlex.quote(json.dumps(self.entry))}\n"
        return patch.json_block(self.known.table, self.name, self.entry, self.inputs)

    def changed(self, before: str) -> str:
        """The client's file with the entry in it. Raises patch.Unreadable."""
        if self.known.form == "toml":
            return patch.toml_with(before, self.known.table, self.name, self.entry)
        return patch.json_with(before, self.known.table, self.name, self.entry, self.inputs)

    def hints(self) -> list[str]:
        """What the person has to know or do beside the paste; one sentence or two each."""
        told = [self.url_from] if self.url_from else []
        if self.known.name == "generic" and self.variable is not None:
            told.append("Not every client replaces ${…} by a variable's value; where yours does not, use --stdio.")
        if self.known.name == "vscode" and self.file is None:
            told.append(self.known.other)
        if self.token_file is not None:
            if not os.path.exists(self.token_file):
                told.append(
                    f"Its token belongs into {self.token_file} (0600), which is not there yet: add --create-token NAME, or run "
                    f"mkdir -p -m 700 {os.path.dirname(self.token_file)} && cotenant token create NAME --out {self.token_file}"
                )
        elif self.inputs:
            told.append("VS Code asks for the token once and keeps it. Make one with `cotenant token create NAME`.")
        else:
            told.append(
                f"The token comes from {self.variable} in the environment of the client, never from this file. Make one with "
                f"`cotenant token create NAME`, then set {self.variable} where the client is started."
            )
        return told


def act(args: argparse.Namespace) -> int:
    plan = Plan(args)
    if plan.token_file is not None and os.path.lexists(plan.token_file):
        if args.create_token:
            raise Usage(
                f"{plan.token_file} is there already. Leave out --create-token to go on with the token in it, or name "
                "a new file with --token-file."
            )
        place.read_token(plan.token_file)  # others may not read it: said now, not when the agent fails to start
    if args.write:
        return _write(args, plan)
    _create_token(args, plan)
    if args.json:
        record: dict[str, Any] = {
            "client": plan.known.name, "file": plan.file, "format": plan.known.form, "entry": plan.entry,
            "paste": plan.text, "hints": plan.hints(),
        }  # fmt: skip
        show.as_json(record)
        return 0
    target = "run" if plan.text.startswith("claude ") else f"into {plan.file or 'its file'}"
    show.say(f"For {plan.known.title}, {target}:")
    sys.stdout.write(plan.text)
    sys.stdout.flush()
    for hint in plan.hints():
        show.say(hint)
    return 0


def _address(args: argparse.Namespace) -> tuple[str, str]:
    """(the server's address, what to say about it): no token is needed to write a client's file."""
    given = args.url or (None if args.data else os.environ.get("COTENANT_URL"))
    if given:
        return place.normal(given), ""
    record = place.server_record(place.data_dir(args.data))
    if record is not None:
        return place.normal(str(record["url"])), ""
    return DEFAULT_URL, f"No server runs here, so its usual address {DEFAULT_URL} is used. Give another with --url."


def _token_file(known: Known) -> str:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    base = base if base.startswith("/") else os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(base, "cotenant", f"{known.name}.token")


def _create_token(args: argparse.Namespace, plan: Plan) -> None:
    """Where --create-token asks for it: a token that may read and write, in a new file of its owner's own."""
    if not args.create_token:
        return
    from argparse import Namespace

    from cotenant.ui.cli import tokens

    path = plan.token_file
    assert path is not None
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    wanted = {
        "name": args.create_token, "kind": "agent", "owner": None, "scopes": "read,write", "expires": None, "toolset": None,
        "pools": None, "max_priority": None, "autopilot": False, "own_only": False, "out": path,
        "reason": f"made by mcp-config for {args.client}",
    }  # fmt: skip
    there = {"command": "token", "json": False, "data": args.data, "url": args.url, "token_file": None}
    stdout, sys.stdout = sys.stdout, sys.stderr  # what is pasted stands alone on standard output
    try:
        tokens.act_create(Namespace(**wanted, **there))
    finally:
        sys.stdout = stdout


# ---- writing ---------------------------------------------------------------------------------------


def _write(args: argparse.Namespace, plan: Plan) -> int:
    if plan.file is None:
        sys.stdout.write(plan.text)
        sys.stdout.flush()
        raise Usage(plan.known.other)
    path = os.path.realpath(plan.file)  # a link, as dotfiles often are, stays one
    before = _read(path)
    try:
        after = plan.changed(before or "")
    except patch.Unreadable as exc:
        sys.stdout.write(plan.text)
        sys.stdout.flush()
        raise patch.Unreadable(f"{plan.file} is left alone. {exc.text} Paste what stands above by hand.") from None
    if after == before:
        _create_token(args, plan)
        show.say(f"{plan.file} has it already; nothing to do.")
        return 0
    for line in patch.difference(before or "", after, plan.file):
        show.out(show.harmless(line))
    also = f"Make a token for {args.create_token} in {plan.token_file}, and write" if args.create_token else "Write"
    ask.sure(args, f"{also} {plan.file}?")
    if _read(path) != before:
        raise Problem(f"{plan.file} was changed meanwhile; nothing was written. Do it again.")
    _create_token(args, plan)  # not before the answer: a no leaves neither a token nor a file in the next one's way
    kept = _replace(path, before, after)
    show.say(f"{plan.file} is written{f'; what it was is in {kept}' if kept else ''}. Start {plan.known.title} anew.")
    for hint in plan.hints():
        show.say(hint)
    return 0


def _read(path: str) -> str | None:
    """The file as text, or None where there is none."""
    try:
        if not os.path.isfile(path) and os.path.lexists(path):
            raise Problem(f"{path} is not a regular file.")
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read(_LONGEST + 1)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise Problem(f"{path} cannot be read: {getattr(exc, 'strerror', None) or 'it is not UTF-8'}.") from exc
    if len(text) > _LONGEST:
        raise Problem(f"{path} is too large to be a client's settings.")
    return text


def _replace(path: str, before: str | None, after: str) -> str | None:
    """Put `after` in the place of the file in one step; where the old content is kept, or None where there was none."""
    import time

    kept = None
    mode = 0o644
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if before is not None:
            mode = os.stat(path).st_mode & 0o777
            kept = f"{path}.before-cotenant-{time.strftime('%Y%m%d-%H%M%S')}"
            _put(kept, before, mode)
        _put(f"{path}.cotenant-new", after, mode)
        os.replace(f"{path}.cotenant-new", path)
    except OSError as exc:
        raise Problem(f"{path} cannot be written: {exc.strerror}.") from exc
    return kept


def _put(path: str, text: str, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
