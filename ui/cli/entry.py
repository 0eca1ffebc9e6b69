"""Which command was meant, its options, and how it ends. Only the module of that one command is imported."""

from __future__ import annotations

import sys

from cotenant.ui.cli import show
from cotenant.ui.cli.problems import EXIT_REFUSED, EXIT_USAGE, Problem, Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any, NoReturn

#: command -> (module, what it does). The order is that of the help.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("serve", "start the server and stay"),
    "demo": ("demo", "see two agents share a card, start to end"),
    "status": ("status", "who holds what, what runs, what waits"),
    "top": ("top", "the same, kept up to date on the whole screen"),
    "submit": ("submit", "run a command detached on leased cards: submit [options] -- CMD"),
    "run": ("run", "lease cards and run a command in the foreground: run [options] -- CMD"),
    "lease": ("lease", "acquire, wait, heartbeat, release, list, show, hand-over, evict"),
    "job": ("job", "list, show, wait, cancel, retry, signal, hold, release, hand-over, evict, abandon"),
    "estimate": ("foresight", "when a waiting job will start, or one that you think of"),
    "suggest": ("foresight", "what to ask for, from like runs of yours"),
    "templates": ("templates", "what submit --template can fill in"),
    "logs": ("logs", "what a job printed; -f follows"),
    "quota": ("quota", "how many cards you may take now; set, reset, list, evict-excess"),
    "queue": ("queue", "list, pause, resume, drain, undrain"),
    "reserve": ("reserve", "cards booked in advance: add, list, remove"),
    "gpus": ("fleet", "every card: state, holder, memory, use"),
    "hosts": ("fleet", "every machine: link, cards, driver, load"),
    "host": ("host", "list, take-over"),
    "queues": ("fleet", "every pool's waiting line"),
    "agents": ("fleet", "who is on line and holds what"),
    "slot": ("slot", "clear a card that stays occupied"),
    "events": ("events", "what happened; -f follows"),
    "login-link": ("login", "a link that logs you in to the page, once"),
    "token": ("tokens", "create, list and revoke tokens"),
    "mcp-config": (
        "mcp_config",
        "what an agent's client needs to find the server; --write puts it there",
    ),
    "mcp-stdio": ("mcp_stdio", "MCP on standard input and output, for clients that start programs"),
    "replay": ("replay", "decide the recorded past again, show it, or run it under other rules"),
    "simulate": ("simulate", "run a trace of jobs through the rules, on a virtual clock"),
    "doctor": ("doctor", "check this machine, the database and the server"),
}

_HEAD = """usage: cotenant COMMAND [options]

Share GPUs between coding agents and people.

commands:
"""
_TAIL = """
options of every command:
  --json             the exact answer for programs
  --data DIR         the server's data directory (default: ~/.local/share/cotenant)
  --url URL          the server's address (else COTENANT_URL, else from the data directory)
  --token-file FILE  the file that holds your token (else COTENANT_TOKEN, COTENANT_TOKEN_FILE, else the data directory's)
  -h, --help         help, with examples: cotenant COMMAND --help
  -V, --version      the installed version (of cotenant alone)

exit codes: 0 done · 1 refused · 2 wrong usage · 3 no server answers · a waited-for job's own · 128+n signal n

example:
  cotenant serve &
  cotenant submit --gpus 1 --follow -- python train.py
"""


def overview() -> str:
    """The help of `cotenant` itself."""
    return _HEAD + "".join(f"  {name:<11} {what}\n" for name, (_, what) in COMMANDS.items()) + _TAIL


def run(argv: list[str]) -> int:
    """Run the command that `argv` names; its exit code. Problems are told on standard error, one sentence each."""
    as_json = "--json" in _before_dashes(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # foreign text may hold what the terminal's encoding cannot say
            stream.reconfigure(errors="replace")
    try:
        return _dispatch(argv)
    except Problem as problem:
        _tell(problem, as_json)
        return problem.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has had enough
        _discard_stdout()
        return 141


def _tell(problem: Problem, as_json: bool) -> None:
    if as_json:
        try:
            show.as_json(problem.record())
        except BrokenPipeError:
            _discard_stdout()
    show.say(problem.text)


def _discard_stdout() -> None:
    """Let nothing be flushed into a pipe that nobody reads, or Python would complain at exit."""
    import os

    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _before_dashes(argv: list[str]) -> list[str]:
    return argv[: argv.index("--")] if "--" in argv else argv


def _dispatch(argv: list[str]) -> int:
    front, command, rest = _split(argv)
    if command is None:
        if "-h" in front or "--help" in front or argv == ["help"]:
            sys.stdout.write(overview())
            sys.stdout.flush()
            return 0
        if "-V" in front or "--version" in front:
            _version(as_json="--json" in front)
            return 0
        sys.stderr.write(overview())
        return EXIT_USAGE
    if command == "help":
        return _dispatch([*rest, "--help"])
    if command not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(command, COMMANDS, n=1)
        raise Usage(
            f"There is no command {command!r}{f'; did you mean {near[0]}?' if near else '.'} See: cotenant --help"
        )
    try:
        args = _parse(command, front + rest)
    except SystemExit as done:  # argparse has said everything
        return done.code if isinstance(done.code, int) else EXIT_REFUSED
    code: int = args.act(args)
    return code


def _version(*, as_json: bool) -> None:
    from importlib import metadata  # 20 ms of CPU: nothing else needs it

    try:
        version = metadata.version("cotenant")
    except metadata.PackageNotFoundError:
        version = "0"  # a bare checkout, as the server says of itself too
    if as_json:
        show.as_json({"version": version})
    else:
        show.out(f"cotenant {version}")


def _split(argv: list[str]) -> tuple[list[str], str | None, list[str]]:
    """(options before the command, the command, everything after it)."""
    i = 0
    while i < len(argv) and argv[i].startswith("-") and argv[i] != "--":
        i += 2 if argv[i] in ("--data", "--url", "--token-file") else 1
    return argv[:i], argv[i] if i < len(argv) and argv[i] != "--" else None, argv[i + 1 :]


def _parse(command: str, words: list[str]) -> argparse.Namespace:
    from importlib import import_module

    module = import_module(f"cotenant.ui.cli.{COMMANDS[command][0]}")
    before = _before_dashes(words)
    behind = words[len(before) + 1 :] if len(before) < len(words) else None
    parser = Parser(command, COMMANDS[command][1])
    module.configure(parser, command)
    args = parser.root.parse_args(before)
    for name, default in (("json", False), ("data", None), ("url", None), ("token_file", None)):
        if not hasattr(args, name):
            setattr(args, name, default)
    if behind is not None and not getattr(args, "takes_command", False):
        parser.root.error("nothing may follow --")
    args.command_line = behind
    args.command = command
    return args


class Parser:
    """One command's parser, with the options of every command, examples in its help, and sub-commands where it has some."""

    def __init__(self, command: str, what: str) -> None:
        import argparse

        class Quiet(argparse.ArgumentParser):
            """What is wrong as a Usage, told and coded as every other one; argparse alone would print and exit."""

            def error(self, message: str) -> NoReturn:
                if message.startswith("unrecognized arguments") and self.get_default("takes_command"):
                    message += f". The command to run stands behind --: {self.prog} [options] -- CMD"
                raise Usage(f"{message}. See: {self.prog} --help")

        # argparse makes a formatter for every option; left to find the width itself it imports shutil and all of
        # its compressors, 6 ms of CPU.
        width = show.columns(sys.stdout) - 2

        def form(prog: str) -> argparse.HelpFormatter:
            return argparse.RawDescriptionHelpFormatter(prog, width=width, max_help_position=30)

        self._form: Any = form
        self._common = common = argparse.ArgumentParser(add_help=False, formatter_class=self._form)
        group = common.add_argument_group("options of every command")
        # No defaults: the same options may stand before and after an action, and a default would overwrite the first.
        none = argparse.SUPPRESS
        group.add_argument("--json", action="store_true", default=none, help="the exact answer for programs")
        group.add_argument("--data", metavar="DIR", default=none, help="the server's data directory")
        group.add_argument("--url", metavar="URL", default=none, help="the server's address, else COTENANT_URL")
        group.add_argument("--token-file", metavar="FILE", default=none, help="the file that holds your token")
        self.root: argparse.ArgumentParser = Quiet(
            prog=f"cotenant {command}",
            parents=[common],
            description=_sentence(what),
            formatter_class=self._form,
            allow_abbrev=False,
        )
        self._sub: Any = None

    def command(
        self, act: Any, *, example: str, takes_command: bool = False, usage: str | None = None
    ) -> argparse.ArgumentParser:
        """The command itself does something: its parser."""
        self.root.epilog = f"example:\n  {example}"
        self.root.usage = usage
        self.root.set_defaults(act=act, takes_command=takes_command)
        return self.root

    def alone(self, act: Any) -> None:
        """What the command does without one of its sub-commands; they are named before."""
        self._sub.required = False
        self.root.set_defaults(act=act, takes_command=False)

    def sub(self, name: str, act: Any, what: str, *, example: str) -> argparse.ArgumentParser:
        """One sub-command's parser."""
        if self._sub is None:
            self._sub = self.root.add_subparsers(metavar="ACTION", required=True, title="actions")
        parser: argparse.ArgumentParser = self._sub.add_parser(
            name, parents=[self._common], help=what, description=_sentence(what), epilog=f"example:\n  {example}",
            formatter_class=self._form, allow_abbrev=False,
        )  # fmt: skip
        parser.set_defaults(act=act, takes_command=False)
        return parser


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
