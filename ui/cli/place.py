"""Where the server is and with which token to speak: from options, the environment, or the data directory.

The server writes DIR/server.json ({"url", "pid"}) and DIR/local.token (0600) when it starts. That token is all-powerful, so
it goes to that server only, never to an address that was given some other way.
"""

from __future__ import annotations

import os
import stat

from cotenant.ui.cli.problems import NoServer, Problem, Usage


class Place:
    """A server's address without a slash at the end, a token, and where the token came from (for messages)."""

    __slots__ = ("token", "token_from", "url")

    def __init__(self, url: str, token: str, token_from: str) -> None:
        self.url = url
        self.token = token
        self.token_from = token_from


def data_dir(given: str | None) -> str:
    """The data directory: `given`, else $XDG_DATA_HOME/cotenant or ~/.local/share/cotenant, as the server itself has it."""
    if given:
        return os.path.abspath(os.path.expanduser(given))
    base = os.environ.get("XDG_DATA_HOME", "")
    if not base.startswith("/"):  # the XDG specification: a relative path there is to be ignored
        base = os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(base, "cotenant")


def read_token(path: str) -> str:
    """The token in a file that nobody else can read.

    Raises:
        Problem: the file is not there, belongs to somebody else, can be read by others, or holds no token.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not make it wait
    except OSError as exc:
        raise Problem(f"The token file {path} cannot be read: {exc.strerror}.") from exc
    try:
        seen = os.fstat(fd)  # of the open file: what is checked is what is read
        if not stat.S_ISREG(seen.st_mode):
            raise Problem(f"The token file {path} is not a regular file.")
        if seen.st_uid != os.geteuid() and os.geteuid() != 0:
            raise Problem(f"The token file {path} belongs to another user. Use a token of your own.")
        if seen.st_mode & 0o077:
            raise Problem(f"Others can read the token file {path}. Close it first: chmod 600 {path}")
        content = os.read(fd, 4096)
    finally:
        os.close(fd)
    return checked_token(content.decode("utf-8", "replace").strip(), f"the token file {path}")


def checked_token(token: str, source: str) -> str:
    """`token` if it can stand in a header. Raises Problem otherwise; the message never holds the token."""
    if not token:
        raise Problem(f"There is no token in {source}.")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise Problem(f"What stands in {source} is not a token: it must be one word of plain characters.")
    return token


def server_record(data: str) -> dict[str, object] | None:
    """What the server wrote about itself in its data directory, or None where none runs (or none was ever started)."""
    import json

    try:
        with open(os.path.join(data, "server.json"), "rb") as file:
            record = json.load(file)
    except FileNotFoundError:
        return None
    except PermissionError:
        raise Problem(
            f"Your user may not look into the data directory {data}: it is {_user_of(data)}'s. Ask for a token of your own "
            "and the server's address, and give them with COTENANT_URL and COTENANT_TOKEN_FILE (or --url, --token-file)."
        ) from None
    except (OSError, ValueError) as exc:
        raise Problem(f"{os.path.join(data, 'server.json')} cannot be read ({exc}). Start the server again.") from exc
    if not isinstance(record, dict) or not isinstance(record.get("url"), str):
        raise Problem(f"{os.path.join(data, 'server.json')} does not name a server. Start the server again.")
    return record


def _user_of(path: str) -> str:
    """Whose a directory is, as far as that can be seen: the nearest one above that can be looked at."""
    import pwd

    while True:
        try:
            uid = os.stat(path).st_uid
            break
        except OSError:
            if path == os.path.dirname(path):
                return "another user"
            path = os.path.dirname(path)
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def find(*, url: str | None, token_file: str | None, data: str | None) -> Place:
    """The server to speak to. Options go before the environment, the environment before the data directory.

    Raises:
        NoServer: no address was given and no server was started with the data directory.
        Problem: no token can be had, or its file is open to others.
    """
    directory = data_dir(data)
    given = url or (None if data else os.environ.get("COTENANT_URL")) or None
    address = normal(given) if given else None
    record = server_record(directory) if address is None or not _token_given(token_file) else None
    if address is None:
        if record is None:
            raise NoServer(
                f"No server runs with the data directory {directory}. Start one with `cotenant serve`, "
                "or name one with --data DIR, --url URL or COTENANT_URL."
            )
        address = normal(str(record["url"]))
    if token_file:
        return Place(address, read_token(token_file), f"the token file {token_file}")
    if token := os.environ.get("COTENANT_TOKEN"):
        return Place(address, checked_token(token.strip(), "COTENANT_TOKEN"), "COTENANT_TOKEN")
    if path := os.environ.get("COTENANT_TOKEN_FILE"):
        return Place(address, read_token(path), f"the token file {path} (COTENANT_TOKEN_FILE)")
    if record is None or normal(str(record["url"])) != address:
        raise Problem(
            f"No token for {address}. Give one with --token-file FILE, COTENANT_TOKEN_FILE or COTENANT_TOKEN "
            "(somebody with rights makes it with `cotenant token create NAME`)."
        )
    path = os.path.join(directory, "local.token")
    if not os.access(path, os.R_OK):
        raise Problem(
            f"Your user cannot read {path}, the token of the person who runs the server. "
            "Ask for a token of your own and give it with COTENANT_TOKEN_FILE or --token-file."
        )
    return Place(address, read_token(path), path)


def _token_given(token_file: str | None) -> bool:
    return bool(token_file or os.environ.get("COTENANT_TOKEN") or os.environ.get("COTENANT_TOKEN_FILE"))


def normal(url: str) -> str:
    """`url` as scheme://host[:port][/path] without /mcp at its end. Raises Usage for anything else."""
    scheme, mark, rest = url.strip().partition("://")
    if not mark:
        scheme, rest = "http", url.strip()
    scheme = scheme.lower()
    authority, slash, path = rest.partition("/")
    for every, this in (("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]")):
        if authority == every or authority.startswith(f"{every}:"):  # where a server listens, not where it is
            authority = this + authority.removeprefix(every)
    if scheme not in ("http", "https") or not authority or any(c.isspace() for c in rest) or not rest.isascii():
        raise Usage(f"{url!r} is not the address of a server. Give one such as http://127.0.0.1:8300.")
    if "@" in authority:
        raise Usage("The address must not hold a password. Give the token with --token-file or COTENANT_TOKEN_FILE.")
    split(f"{scheme}://{authority}")  # the port must be a number
    path = (slash + path).rstrip("/")
    return f"{scheme}://{authority}{path.removesuffix('/mcp')}"


def split(url: str) -> tuple[str, str, int, str]:
    """(scheme, host, port, path) of a normal address; [::1] loses its brackets."""
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    if authority.startswith("["):
        host, _, tail = authority[1:].partition("]")
        port = tail.removeprefix(":")
    else:
        host, _, port = authority.partition(":")
    if not host or (port and not (port.isdigit() and 0 < int(port) < 65536)):
        raise Usage(f"{url!r} is not the address of a server. Give one such as http://127.0.0.1:8300.")
    return scheme, host, int(port) if port else (443 if scheme == "https" else 80), slash + path


def is_loopback(url: str) -> bool:
    """Whether the server is on this machine, so that its paths are our paths."""
    host = split(url)[1]
    return host in ("localhost", "::1") or (host.startswith("127.") and host.replace(".", "").isdigit())
