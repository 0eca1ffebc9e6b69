"""What can go wrong for the command line, each with its exit code. The text is all that a person sees.

Problem                1
├── Usage              2   the command cannot mean anything
├── ToolRefused        1   the server understood, and no: nothing changed
├── TokenRefused       1   the server does not know the token
├── NoServer           3   nothing answers; nothing was sent
└── Torn               3   sent, and the answer broke off: it may have happened
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    from typing import Any


EXIT_OK, EXIT_REFUSED, EXIT_USAGE, EXIT_NO_SERVER = 0, 1, 2, 3


class Problem(Exception):
    """Something to tell the person; the command ends with `exit_code`."""

    exit_code = EXIT_REFUSED
    code = "failed"

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def record(self) -> dict[str, Any]:
        """The same for `--json`."""
        return {"error": {"code": self.code, "message": self.text}}


class Usage(Problem):
    exit_code = EXIT_USAGE
    code = "usage"


class ToolRefused(Problem):
    """A tool's or an operation's refusal: `code` is stable, `data` holds its numbers.

    `text` is for a person, in the words of the command line; `exact` is the server's own sentence, for `--json`.
    """

    def __init__(self, code: str, text: str, data: dict[str, Any] | None = None, *, command: str = "") -> None:
        from cotenant.ui.cli.words import for_people

        super().__init__(for_people(text, command))
        self.code = code
        self.exact = text
        self.data = data or {}

    def record(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": self.exact, **self.data}}


class TokenRefused(Problem):
    code = "token_refused"


class NoServer(Problem):
    """`refused` says that the machine answered and nothing listens there: the server is down, not merely out of reach."""

    exit_code = EXIT_NO_SERVER
    code = "no_server"

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class Torn(Problem):
    exit_code = EXIT_NO_SERVER
    code = "outcome_unknown"
