"""Sessions of browsers. Pure. A code of `unicron dashboard` opens one; its cookie reads, and orders need its key, too.

A browser cannot make the mutual proof without knowing the token, which no page should get. A holder of the token
requests a code with a proof; the code opens one session within `CODE_SECONDS`, once. The session's id is in a cookie
that scripts cannot read. The key is a second secret, which the page keeps in the storage of its origin and sends in a
header: cookies are shared by all ports of a host, and sent with requests that other pages cause; the key is neither.

Sessions end with the process.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from unicron_lightning.proof import same

CODE_SECONDS: Final = 300.0
SESSION_SECONDS: Final = 12 * 3600.0
KEY_HEADER: Final = "X-Unicron-Key"
MOST_CODES: Final = 64
MOST_SESSIONS: Final = 64

PAGES: Final = {
    "/dashboard": "page.html",
    "/dashboard/app.js": "app.js",
    "/dashboard/view.js": "view.js",
    "/dashboard/style.css": "style.css",
    "/dashboard/icon.svg": "icon.svg",
}
"""Files without data, which anyone may load."""
LOGIN: Final = "/dashboard/login"
_READ: Final = ("/dashboard/stream", "/v1/status", "/v1/events", "/v1/incidents")
_ORDERS: Final = re.compile(
    r"/dashboard/logout|/v1/nodes/[^/]+/(?:drain|undrain)|/v1/tasks/[^/]+/(?:resize|cancel|inject)"
)
"""Orders of a page; it can submit no job, which would run a command."""


@dataclass(frozen=True, kw_only=True)
class BrowserSession:
    """A session of a browser.

    Attributes:
        id: value of its cookie.
        key: value of `KEY_HEADER` in its orders.
        until: monotonic seconds at which it ends.
    """

    id: str
    key: str
    until: float


class Visitors:
    """Codes and sessions of one coordinator process; times are monotonic seconds.

    Args:
        cookie: name of the cookie.
    """

    def __init__(self, cookie: str) -> None:
        self.cookie = cookie
        self._codes: dict[str, float] = {}
        self._sessions: dict[str, BrowserSession] = {}

    def issue_code(self, now: float) -> str:
        """Return a code that opens one session."""
        self._codes = dict([*self._codes.items()][-MOST_CODES + 1 :])
        code = secrets.token_urlsafe(24)
        self._codes[code] = now + CODE_SECONDS
        return code

    def log_in(self, code: str, now: float) -> BrowserSession | None:
        """Open a session with a code, which is used up; None if the code is unknown, used or expired."""
        known = next((each for each in self._codes if same(each, code)), None)
        if known is None or self._codes.pop(known) <= now:
            return None
        session = BrowserSession(id=secrets.token_hex(32), key=secrets.token_hex(32), until=now + SESSION_SECONDS)
        alive = {each.id: each for each in self._sessions.values() if each.until > now}
        self._sessions = dict([*alive.items()][-MOST_SESSIONS + 1 :]) | {session.id: session}
        return session

    def log_out(self, session: BrowserSession) -> None:
        """End a session."""
        self._sessions.pop(session.id, None)

    def of(self, cookies: Mapping[str, str], now: float) -> BrowserSession | None:
        """Return the session that a request's cookies name; None if there is none."""
        session = self._sessions.get(cookies.get(self.cookie, ""))
        return session if session is not None and session.until > now else None

    def may(self, session: BrowserSession | None, method: str, path: str, key: str) -> bool:
        """Whether a request of a session is permitted.

        Args:
            session: the session; None for none.
            method: the request's method.
            path: its path, as sent.
            key: the value of `KEY_HEADER`.
        """
        if session is None:
            return False
        if method == "GET":
            return path in _READ
        matches = method == "POST" and _ORDERS.fullmatch(path) is not None
        return matches and same(key, session.key)


def is_open(method: str, path: str) -> bool:
    """Whether a request needs no session: for the files of the page, and to open a session."""
    return (method in ("GET", "HEAD") and path in PAGES) or (method == "POST" and path == LOGIN)


def foreign(origin: str | None, site: str | None, *, scheme: str, host: str) -> bool:
    """Whether a browser sends a request for a page of another origin.

    Args:
        origin: header Origin; None if the browser sends none.
        site: header Sec-Fetch-Site; None if the browser sends none.
        scheme: ``http`` or ``https``, of the coordinator's links.
        host: header Host.
    """
    if site is not None and site not in ("same-origin", "none"):
        return True
    return origin is not None and origin.lower() != f"{scheme}://{host}".lower()
