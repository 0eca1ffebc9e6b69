"""What stands before every page: headers that shut a browser in, the question whose page is asking, cookies, forms."""

from __future__ import annotations

import hashlib
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from cotenant.server.errors import BadRequest, Forbidden

#: Nothing from elsewhere, nothing inline, in nobody's frame.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self';"
    " base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
MAX_FORM: Final = 16 * 1024
VISIT_S: Final = 3600


def check_origin(request: Request, allowed_origins: tuple[str, ...]) -> None:
    """Refuse what another site's page sends, or fetches.

    Following a link from elsewhere to a page is fine: a page shows itself to nobody but the person. Other ports of this
    machine are other sites here, although they share cookies with us. A form of our own page has the origin "null", as
    browsers make it with no-referrer; Sec-Fetch-Site, where there is one, says whose it was, and its own token always does.

    Raises:
        Forbidden: the request does not come from our own page.
    """
    headers = request.headers
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    foreign = origin not in (None, "null") and not _is_ours(str(origin), headers.get("host", ""), allowed_origins)
    navigates = request.method in ("GET", "HEAD") and headers.get("sec-fetch-mode", "navigate") == "navigate"
    if foreign or (site not in (None, "same-origin", "none") and not navigates):
        raise Forbidden("this request was sent by another site's page; nothing was done", code="foreign_origin")


def _is_ours(origin: str, host: str, allowed: tuple[str, ...]) -> bool:
    if origin in allowed or any(item.endswith(":*") and _without_port(origin) == item[:-2] for item in allowed):
        return True
    return bool(host) and urlsplit(origin).netloc.lower() == host.lower()


def _without_port(origin: str) -> str:
    head, colon, port = origin.rpartition(":")
    return head if colon and port.isdigit() else origin


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form as browsers send it; of a repeated one the last.

    Raises:
        BadRequest: it is no form, too long, or not UTF-8.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise BadRequest("this is not a form as browsers send it", code="not_a_form")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM:
            raise BadRequest(f"the form is longer than {MAX_FORM // 1024} KiB", code="too_large")
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=20, errors="strict"))
    except (ValueError, UnicodeDecodeError):
        raise BadRequest("the form cannot be read", code="not_a_form") from None


class Cookies:
    """The names of our cookies: browsers keep them by host and not by port, and two servers must not take each other's."""

    def __init__(self, cluster_id: str) -> None:
        mark = hashlib.sha256(cluster_id.encode()).hexdigest()[:8]
        self.session = f"cotenant_{mark}"
        self.visit = f"cotenant_visit_{mark}"

    def give(self, response: Response, request: Request, name: str, value: str, max_age_s: int) -> None:
        """Out of reach of scripts and of other sites' posts; over TLS only where TLS is."""
        response.set_cookie(
            name, value, max_age=max_age_s, path="/", httponly=True, samesite="lax", secure=_is_secure(request)
        )

    def take(self, response: Response, request: Request, name: str) -> None:
        response.delete_cookie(name, path="/", httponly=True, samesite="lax", secure=_is_secure(request))


def _is_secure(request: Request) -> bool:
    # A proxy says it for its browser. Who says it of himself gets a cookie that only TLS brings back: his own loss.
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", "").lower())


def without_origin(request: Request) -> Request:
    """The same request for a check of its Host alone."""
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"origin"]
    assert Headers(raw=headers).get("origin") is None
    return Request({**request.scope, "headers": headers})
