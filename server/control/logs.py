"""Log lines of a job, fetched from the host that has them."""

from __future__ import annotations

import re
import sqlite3
from typing import Final

from cotenant.hostd.protocol import LogPage
from cotenant.server.backends.base import Host, HostRefused
from cotenant.server.control import elements
from cotenant.server.control.auth import Auth
from cotenant.server.control.context import Context
from cotenant.server.errors import BadRequest, Conflict, Forbidden, NotFound, OutcomeUnknown, Unreachable
from cotenant.server.model.answers import LogAnswer
from cotenant.server.model.caller import Caller
from cotenant.server.model.text import clean, mask
from cotenant.server.store import arrays, ranks
from cotenant.server.store.db import Tx
from cotenant.server.store.views.arrays import find_unstarted, no_such_job

LINES_MAX: Final = 2000
#: One page from the host; with 2,000 characters a line at most an answer stays well under a frame.
PAGE_BYTES: Final = 256 * 1024
LINE_CHARS: Final = 2000
_CURSOR: Final = re.compile(r"(att_[0-9a-z]+)(?:\.(\d+))?:(out|err):(\d+)")


class Logs:
    """Reads logs; a reader never sees a torn line, and none twice when it gives the cursor back."""

    def __init__(self, context: Context, auth: Auth) -> None:
        self._context = context
        self._auth = auth

    async def tail(
        self,
        caller: Caller,
        job_id: str,
        *,
        stream: str = "out",
        attempt: int | None = None,
        rank: int | None = None,
        since: str | None = None,
        lines: int = 100,
        cursor: str | None = None,
    ) -> LogAnswer:
        """The last `lines` lines, or what follows `cursor`. `since` "start" reads from the beginning.

        Of a job over several hosts one rank is read, the first where none is named.

        Raises:
            NotFound: no such job or attempt.
            Forbidden: another owner's log.
            Unreachable: the host that has the log does not answer.
        """
        context = self._context
        if stream not in ("out", "err"):
            raise BadRequest('stream must be "out" or "err"', hint="Call once for each.")
        if not 1 <= lines <= LINES_MAX:
            raise BadRequest(f"lines is {lines}; it must be 1 to {LINES_MAX}", hint="Use the cursor for more.")
        if since not in (None, "start"):
            cursor, since = cursor or since, None
        found = await context.db.read(
            lambda c: (
                c.execute("SELECT * FROM job WHERE id = ?", (job_id,)).fetchone(),
                c.execute("SELECT * FROM attempt WHERE job_id = ? ORDER BY epoch", (job_id,)).fetchall(),
            )
        )
        job, attempts = found
        if job is None:
            job = context.db.peek(lambda c: find_unstarted(c, job_id))
            if job is None:
                raise context.db.peek(lambda c: no_such_job(c, job_id))
        if not self._auth.sees_inside(caller, owner=job["owner"], name=job["caller"], pool=job["pool"]):
            raise Forbidden(
                "this log belongs to another owner", code="not_visible", hint="get_job shows what everybody may see."
            )
        if arrays.is_array(job):
            which = context.db.peek(lambda c: elements.describe(Tx(c), job_id))
            raise BadRequest(
                f"{job_id} is an array; each of its elements has a log of its own",
                hint=f"Give the id of one of them. {which[:1].upper()}{which[1:]}.",
            )
        offset: int | None = None
        attempt_id = None
        if cursor is not None:
            if (match := _CURSOR.fullmatch(cursor)) is None:
                raise BadRequest(
                    "this cursor is not one of tail_logs",
                    code="bad_cursor",
                    hint="Leave it out to read the last lines.",
                )
            attempt_id, stream, offset = match[1], match[3], int(match[4])
            rank = None if match[2] is None else int(match[2])
        chosen = None
        for row in attempts:
            if row["id"] == attempt_id if attempt_id is not None else attempt is None or row["epoch"] == attempt:
                chosen = row
        if chosen is None:
            if attempts or attempt is not None or attempt_id is not None:
                raise NotFound("this job has no such attempt", code="no_such_attempt", hint=f"It has {len(attempts)}.")
            return LogAnswer(
                job_id, None, stream, [], None, more=False, final=job["ended_at_ms"] is not None, truncated_before=False
            )
        at, host = self._where(chosen, rank)
        link = context.hosts.get(host)
        if link is None:
            raise Unreachable(
                f'host "{host}" has the log and does not answer',
                hint="list_hosts shows why.",
                retry_after_s=10,
            )
        if offset is None and since == "start":
            offset = 0
        try:
            page = await link.read_log(at, stream, offset=offset, tail_lines=lines, max_bytes=PAGE_BYTES)
        except HostRefused as refused:
            if refused.code == "unknown_attempt":
                over = chosen["state"] == "ended"
                return LogAnswer(job_id, chosen["id"], stream, [], None, more=False, final=over, truncated_before=False)
            raise Conflict(refused.message, code=refused.code) from refused
        shown = page.text.split("\n")
        if shown[-1] == "":
            shown.pop()
        return LogAnswer(
            job_id=job_id,
            attempt_id=chosen["id"],
            stream=stream,
            lines=[mask(clean(_last_drawn(line), LINE_CHARS, indent=True)) for line in shown],
            cursor=f"{at}:{stream}:{page.end}",
            more=page.end < page.size,
            final=page.final,
            truncated_before=page.start > (offset or 0),
            note=await _note(link, chosen, at, stream, page, first=cursor is None),
        )

    def _where(self, attempt: sqlite3.Row, rank: int | None) -> tuple[str, str]:
        """(what its host calls it, that host) of an attempt, or of one rank.

        Raises:
            NotFound: it has no such rank.
        """
        if attempt["nodes"] == 1 and rank in (None, 0):
            return attempt["id"], attempt["host"]
        for row in self._context.db.peek(lambda c: ranks.of(c, attempt["id"])):
            if row["rank"] == (rank or 0):
                return row["id"], row["host"]
        last = attempt["nodes"] - 1
        raise NotFound(f"this attempt has no rank {rank}", code="no_such_rank", hint=f"Its ranks are 0 to {last}.")


async def _note(link: Host, attempt: sqlite3.Row, at: str, stream: str, page: LogPage, *, first: bool) -> str | None:
    """What a reader of stdout alone would miss: how the attempt failed, and that stderr holds more. None mostly.

    Looked up at a log's end or where a first look finds nothing, so following a log costs no further trips.
    """
    at_end = page.final and page.end >= page.size
    failed = attempt["failure_class"] is not None
    if stream != "out" or not ((at_end and failed) or (first and not page.text)):
        return None
    try:
        more = (await link.read_log(at, "err", offset=None, tail_lines=1, max_bytes=PAGE_BYTES)).size
    except (HostRefused, Unreachable, OutcomeUnknown):
        more = 0  # the lines that were asked for are here all the same
    parts = []
    if failed:
        parts.append(f"attempt {attempt['epoch']} failed ({attempt['failure_class']}): {attempt['message']}")
    if more:
        parts.append(f'stderr holds {more} bytes: read them with stream="err"')
    return ". ".join(mask(clean(part, 500)) for part in parts) or None


def _last_drawn(line: str) -> str:
    """What a terminal would show of a line that a progress bar drew over itself with carriage returns."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]
