"""Reading the file that a job's secret stands in, and no other file that the server happens to be able to read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from cotenant.server.errors import BadRequest
from cotenant.server.model.spec import SecretRef

#: A variable of the environment cannot be longer (Linux, MAX_ARG_STRLEN), less room for its name.
SECRET_MAX_BYTES: Final = 128 * 1024 - 256
#: What opens a file for others than its owner.
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class SecretUnreadable(Exception):
    """A secret cannot be had; the message names the variable, never a word of the content."""


def check_secrets(secrets: tuple[SecretRef, ...], data_dir: Path) -> None:
    """Refuse a job whose secrets could not be read now; what they hold is not kept.

    Raises:
        BadRequest: the first one that cannot be had, and why.
    """
    for ref in secrets:
        try:
            read_secret(ref.env, Path(ref.file), data_dir)
        except SecretUnreadable as error:
            raise BadRequest(
                str(error), code="secret_unreadable", data={"env": ref.env},
                hint="Name a plain text file that belongs to the user of the server and is closed to others (chmod 600).",
            ) from error  # fmt: skip


def read_secret(name: str, path: Path, data_dir: Path) -> str:
    """The content of the file of the secret for variable `name`, without the line break at its end.

    A name in a job must not be a way to whatever the server may read: the file is a plain one, named by an absolute path
    that does not end in a link, belongs to the server's own user, is closed to everybody else, and lies outside
    `data_dir`, where the server keeps its own keys. All of it is asked of the opened file, so that nothing can be put in
    its place between. Neither a pipe nor a device can hold the loop up, and at most SECRET_MAX_BYTES are read.

    Raises:
        SecretUnreadable: it is none of that, too large, or not a text that a variable can hold.
    """
    said = f"the file of the secret for {name}"
    if not path.is_absolute():
        raise SecretUnreadable(f"{said} is not named by an absolute path")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY)
        try:
            _check(said, fd, data_dir)
            with os.fdopen(fd, "rb", closefd=False) as file:
                content = file.read(SECRET_MAX_BYTES + 1)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no possible path"
        if path.is_symlink():
            why = "it is a link; name the file itself"
        raise SecretUnreadable(f"{said} cannot be read: {why}") from error
    if len(content) > SECRET_MAX_BYTES:
        raise SecretUnreadable(f"{said} is larger than {SECRET_MAX_BYTES} bytes")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise SecretUnreadable(f"{said} is not a text")
    return text.rstrip("\n")


def _check(said: str, fd: int, data_dir: Path) -> None:
    """Raises SecretUnreadable unless the opened file may be read for a job."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise SecretUnreadable(f"{said} is not a plain file")
    if found.st_uid != os.geteuid():
        raise SecretUnreadable(f"{said} belongs to another user (uid {found.st_uid}) than the server's")
    if found.st_mode & _OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise SecretUnreadable(f"{said} is open to others (mode {mode:04o}); chmod 600 closes it")
    if Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(data_dir.resolve()):
        raise SecretUnreadable(f"{said} lies in the server's data directory, which is the server's alone")
