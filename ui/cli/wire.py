"""HTTP/1.1 over a plain socket, as much as one POST needs: lengths, chunks, streams of events, one kept connection.

http.client would cost every command 15 ms of CPU (it imports the email package; measured in September 2026), a socket 3.
This module knows bytes and nothing of what they mean.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from cotenant.ui.cli.place import split
from cotenant.ui.cli.problems import NoServer, Torn

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    from typing import Self

CONNECT_S = 5.0
#: The server's own limit for what it takes is 4 MiB; what it sends may be longer, but not without an end.
LONGEST_ANSWER = 64 * 1024 * 1024
LONGEST_LINE = 64 * 1024
#: Beyond the time for an answer: how long its body may take, however often a byte comes.
BODY_S = 120.0


class Reply:
    """One answer: status, headers (lower case) and the body, read as it comes. It must be read to its end or closed."""

    def __init__(self, wire: Wire, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers
        self._wire = wire

    def parts(self) -> Iterator[bytes]:
        """The body piece by piece. Raises Torn where it breaks off."""
        wire, taken = self._wire, 0
        for part in self._framed():
            taken += len(part)
            if taken > LONGEST_ANSWER:
                wire.close()
                raise Torn(f"The answer is longer than {LONGEST_ANSWER} bytes; given up.")
            yield part
        if self.headers.get("connection", "").lower() == "close":
            wire.close()

    def _framed(self) -> Iterator[bytes]:
        wire = self._wire
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while True:
                size = wire.line().partition(b";")[0].strip()
                try:
                    left = int(size, 16)
                except ValueError:
                    raise wire.broken("a chunk without a length") from None
                if left < 0:
                    raise wire.broken("a chunk without a length")
                if left == 0:
                    while wire.line():
                        pass
                    return
                while left:
                    part = wire.some(left)
                    left -= len(part)
                    yield part
                if wire.line():
                    raise wire.broken("a chunk that does not end where it should")
        elif (length := self.headers.get("content-length")) is not None:
            if not length.isdigit():
                raise wire.broken("a length that is no number")
            left = int(length)
            while left:
                part = wire.some(left)
                left -= len(part)
                yield part
        else:
            while part := wire.some(65536, end_is_fine=True):
                yield part
            wire.close()

    def body(self) -> bytes:
        """The whole body."""
        return b"".join(self.parts())

    def events(self) -> Iterator[bytes]:
        """The data of each event of a text/event-stream body; comments and other fields are left out."""
        rest, data = b"", list[bytes]()
        for part in self.parts():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                line = line.removesuffix(b"\r")
                if not line:
                    if data:
                        yield b"\n".join(data)
                    data = []
                elif line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
        # a last event without its empty line was cut off and does not count

    def close(self) -> None:
        """Give the connection up before the body's end."""
        self._wire.close()


class Wire:
    """One connection to one server, made when first needed and kept between posts. Not for several threads at once."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._scheme, self._host, self._port, self._path = split(url)
        self._socket: socket.socket | None = None
        self._buffer = bytearray()
        self._until = 0.0

    def post(self, path: str, body: bytes, headers: dict[str, str], *, answer_s: float) -> Reply:
        """Send one POST and return its answer once the headers are there; `answer_s` bounds each wait for bytes, and BODY_S more the whole.

        A kept connection that the server closed meanwhile is made anew once, as HTTP expects of every client.

        Raises:
            NoServer: no connection could be made; nothing was sent.
            Torn: sent, and no whole answer came.
        """
        name = f"[{self._host}]" if ":" in self._host else self._host
        default = 443 if self._scheme == "https" else 80
        lines = [
            f"POST {self._path}{path} HTTP/1.1",
            f"Host: {name}" + ("" if self._port == default else f":{self._port}"),
        ]
        lines += [f"{key}: {value}" for key, value in headers.items()]
        lines += [f"Content-Length: {len(body)}", "", ""]
        message = "\r\n".join(lines).encode("latin-1") + body
        kept = self._socket is not None
        try:
            return self._exchange(message, answer_s)
        except _Idle:
            if not kept:
                raise self.broken("nothing") from None
        try:
            return self._exchange(message, answer_s)
        except _Idle:
            raise self.broken("nothing") from None

    def _exchange(self, message: bytes, answer_s: float) -> Reply:
        sock = self._connected()
        sock.settimeout(answer_s)
        self._until = time.monotonic() + answer_s + BODY_S
        try:
            sock.sendall(message)
        except TimeoutError as exc:
            self.close()
            raise Torn(f"The server at {self.url} did not take the request within {answer_s:.0f} s.") from exc
        except OSError:
            # The server may have answered before it had read all (413): then the answer is there to be read.
            pass
        return self._reply()

    def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        try:
            sock: socket.socket = socket.create_connection((self._host, self._port), timeout=CONNECT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._scheme == "https":
                import ssl

                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=self._host)
        except OSError as exc:
            why = "it does not answer" if isinstance(exc, TimeoutError) else exc.strerror or str(exc)
            raise NoServer(
                f"No server answers at {self.url} ({why}). Start it with `cotenant serve`, or name another with --url or --data.",
                refused=isinstance(exc, ConnectionRefusedError),
            ) from exc
        self._socket = sock
        self._buffer.clear()
        return sock

    def _reply(self) -> Reply:
        while True:
            status_line = self.line(first=True).split(None, 2)
            if len(status_line) < 2 or not status_line[0].startswith(b"HTTP/1.") or not status_line[1].isdigit():
                raise self.broken("something that is not HTTP")
            headers: dict[str, str] = {}
            while line := self.line():
                key, _, value = line.partition(b":")
                headers[key.strip().lower().decode("latin-1")] = value.strip().decode("latin-1")
                if len(headers) > 200:
                    raise self.broken("too many headers")
            if (status := int(status_line[1])) >= 200:  # 1xx only says that there is more to come
                return Reply(self, status, headers)

    def line(self, *, first: bool = False) -> bytes:
        """The next line without its end. With `first`, an end before any byte raises _Idle."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > LONGEST_LINE:
                raise self.broken("a line without an end")
            if not self._fill(end_is_fine=first and not self._buffer):
                raise _Idle
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line.removesuffix(b"\r")

    def some(self, most: int, *, end_is_fine: bool = False) -> bytes:
        """From one to `most` bytes; b"" at the end where `end_is_fine`."""
        if not self._buffer and not self._fill(end_is_fine=end_is_fine):
            return b""
        part = bytes(self._buffer[:most])
        del self._buffer[:most]
        return part

    def _fill(self, *, end_is_fine: bool) -> bool:
        if self._socket is None:
            raise Torn(f"The connection to {self.url} was given up.")
        try:
            part = self._socket.recv(65536)
        except TimeoutError as exc:
            waited = self._socket.gettimeout() or 0
            self.close()
            raise Torn(
                f"The server at {self.url} did not answer within {waited:.0f} s. It may still have done it: look."
            ) from exc
        except OSError:
            part = b""
        if time.monotonic() > self._until:
            self.close()
            raise Torn(f"The answer of {self.url} does not come to its end; given up. It may have been done: look.")
        if not part:
            if end_is_fine:
                self.close()
                return False
            raise self.broken("only a part")
        self._buffer += part
        return True

    def broken(self, what: str) -> Torn:
        """The connection is closed; the error says that the answer was `what`."""
        self.close()
        return Torn(
            f"The answer of {self.url} broke off: {what} came. It may have been done: look before you repeat it."
        )

    def close(self) -> None:
        """Close the connection; the next post makes a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._buffer.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Idle(Exception):
    """The server closed the connection without a byte."""
