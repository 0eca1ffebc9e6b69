"""HTTP/1.1 for the bridge: many requests at once, answers as single bodies or streams of events, kept connections.

Knows bytes and nothing of what they mean. A connection goes back to the pool only after a whole answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from cotenant.ui.cli.place import split
from cotenant.ui.cli.problems import NoServer, Torn

CONNECT_S = 5.0
LONGEST_HEAD = 64 * 1024
LONGEST_ANSWER = 64 * 1024 * 1024
#: The server closes a connection that was idle for 75 s; one that may be just closing is not used again.
KEPT_S = 30.0
KEPT = 8


class Connection:
    """One connection and the address that it leads to."""

    __slots__ = ("reader", "since", "url", "used", "writer")

    def __init__(self, url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.url = url
        self.reader = reader
        self.writer = writer
        self.since = time.monotonic()
        self.used = False

    @property
    def fit(self) -> bool:
        """Whether a request may be sent over it."""
        closed = self.reader.at_eof() or self.writer.is_closing()
        return not closed and time.monotonic() - self.since < KEPT_S

    def close(self) -> None:
        self.writer.close()


class Answer:
    """One answer: status, headers (lower case) and its body, read once."""

    def __init__(self, connection: Connection, status: int, headers: dict[str, str], silence_s: float) -> None:
        self.status = status
        self.headers = headers
        self.whole = False
        self._connection = connection
        self._silence_s = silence_s

    @property
    def kind(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def reusable(self) -> bool:
        return self.whole and self.headers.get("connection", "").lower() != "close" and self._framed

    @property
    def _framed(self) -> bool:
        return "content-length" in self.headers or self._chunked

    @property
    def _chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower() == "chunked"

    async def parts(self) -> AsyncIterator[bytes]:
        """The body piece by piece. Raises Torn where it breaks off, or where nothing came for `silence_s`."""
        reader = self._connection.reader
        try:
            if self.status in (204, 304):
                pass
            elif self._chunked:
                while size := await self._chunk_size():
                    while size:
                        part = await self._some(min(size, 65536))
                        size -= len(part)
                        yield part
                    await self._line()
                while await self._line():
                    pass
            elif "content-length" in self.headers:
                left = int(self.headers["content-length"])
                while left:
                    part = await self._some(min(left, 65536))
                    left -= len(part)
                    yield part
            else:
                while part := await self._within(reader.read(65536)):
                    yield part
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as exc:
            raise _torn(self._connection.url, exc) from exc
        self.whole = True

    async def _chunk_size(self) -> int:
        size = int((await self._line()).partition(b";")[0], 16)
        if size < 0:
            raise ValueError("a chunk of negative length")
        return size

    async def _line(self) -> bytes:
        return (await self._within(self._connection.reader.readuntil(b"\n"))).rstrip(b"\r\n")

    async def _some(self, most: int) -> bytes:
        part = await self._within(self._connection.reader.read(most))
        if not part:
            raise EOFError("the end came too early")
        return part

    async def _within(self, reading: object) -> bytes:
        async with asyncio.timeout(self._silence_s):
            return await reading  # type: ignore[misc,no-any-return]

    async def body(self) -> bytes:
        """The whole body. Raises Torn where it breaks off or is longer than LONGEST_ANSWER."""
        parts, size = [], 0
        async for part in self.parts():
            parts.append(part)
            size += len(part)
            if size > LONGEST_ANSWER:
                raise Torn(f"The answer of {self._connection.url} is longer than {LONGEST_ANSWER} bytes.")
        return b"".join(parts)

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each event of a text/event-stream body; comments and other fields are left out."""
        begun, data, size = bytearray(), list[bytes](), 0
        async for part in self.parts():
            *lines, rest = part.split(b"\n")
            for line in lines:
                whole = bytes(begun + line).removesuffix(b"\r")
                begun.clear()
                if not whole:
                    if data:
                        yield b"\n".join(data)
                    data, size = [], 0
                elif whole.startswith(b"data:"):
                    data.append(whole[5:].removeprefix(b" "))
                    size += len(whole)
            begun += rest
            if size + len(begun) > LONGEST_ANSWER:
                raise Torn(f"An event of {self._connection.url} is longer than {LONGEST_ANSWER} bytes.")
        # a last event without its empty line was cut off and does not count


class Pool:
    """Connections to servers. `silence_s` is how long an answer may say nothing (the server itself pings every 15 s)."""

    def __init__(self, *, silence_s: float) -> None:
        self._silence_s = silence_s
        self._kept: list[Connection] = []

    @contextlib.asynccontextmanager
    async def request(
        self, url: str, method: str, path: str, headers: dict[str, str], body: bytes = b"", *, fresh: bool = False
    ) -> AsyncIterator[Answer]:
        """Send one request; the answer once its headers are there. Left early, the connection is given up.

        With `fresh` no kept connection is used: on one that the server is just closing, it stays unknown whether the
        request arrived.

        Raises:
            NoServer: no connection could be made; nothing was sent.
            Torn: sent, and no whole answer came.
        """
        connection = self._take(url) if not fresh else None
        if connection is None:
            connection = await _connect(url)
        answer: Answer | None = None
        try:
            answer = await self._exchange(connection, method, path, headers, body)
            yield answer
        finally:
            if answer is not None and answer.reusable and len(self._kept) < KEPT:
                connection.since = time.monotonic()
                connection.used = True
                self._kept.append(connection)
            else:
                connection.close()

    def _take(self, url: str) -> Connection | None:
        while self._kept:
            connection = self._kept.pop()
            if connection.url == url and connection.fit:
                return connection
            connection.close()
        return None

    async def _exchange(
        self, connection: Connection, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> Answer:
        scheme, host, port, prefix = split(connection.url)
        name = f"[{host}]" if ":" in host else host
        where = name if port == (443 if scheme == "https" else 80) else f"{name}:{port}"
        lines = [f"{method} {prefix}{path} HTTP/1.1", f"Host: {where}"]
        lines += [f"{key}: {value}" for key, value in headers.items()]
        lines += [f"Content-Length: {len(body)}", "", ""] if method == "POST" else ["", ""]
        try:
            connection.writer.write("\r\n".join(lines).encode("latin-1") + body)
            async with asyncio.timeout(self._silence_s):
                with contextlib.suppress(ConnectionError):  # it may have answered before it had read all (413)
                    await connection.writer.drain()
                status = 100
                while status < 200:  # 1xx only says that there is more to come
                    status, answered = _head(await connection.reader.readuntil(b"\r\n\r\n"))
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as exc:
            raise _torn(connection.url, exc) from exc
        return Answer(connection, status, answered, self._silence_s)

    def close(self) -> None:
        """Give every kept connection up."""
        while self._kept:
            self._kept.pop().close()


async def _connect(url: str) -> Connection:
    scheme, host, port, _ = split(url)
    context = None
    if scheme == "https":
        import ssl

        context = ssl.create_default_context()
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=LONGEST_HEAD)
    except OSError as exc:  # TimeoutError is one
        why = "it does not answer" if isinstance(exc, TimeoutError) else exc.strerror or str(exc)
        refused = isinstance(exc, ConnectionRefusedError)
        raise NoServer(f"No server answers at {url} ({why.lower()}).", refused=refused) from exc
    return Connection(url, reader, writer)


def _head(data: bytes) -> tuple[int, dict[str, str]]:
    """(status, headers) of an answer's head. Raises ValueError where it is none."""
    first, *rest = data.decode("latin-1").split("\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise ValueError("that is not HTTP")
    pairs = (line.partition(":") for line in rest if line)
    headers = {key.strip().lower(): value.strip() for key, _, value in pairs}
    length = headers.get("content-length")
    if length is not None and not length.isdigit():
        raise ValueError("a length that is no number")
    return int(words[1]), headers


def _torn(url: str, exc: BaseException) -> Torn:
    why = "nothing came for too long" if isinstance(exc, TimeoutError) else "it broke off"
    return Torn(f"The answer of {url} is not whole: {why}.")
