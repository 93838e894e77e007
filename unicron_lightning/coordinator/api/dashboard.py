"""The routes of the page: its files, log-in and log-out, and the stream of changes (server-sent events).

Queries and orders use the routes of `api`; `guard` admits a session's requests to them.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import time
from typing import TYPE_CHECKING, Final

from aiohttp import web

from unicron_lightning.coordinator.dashboard.board import Board, entries
from unicron_lightning.coordinator.dashboard.visitors import CODE_SECONDS, LOGIN, PAGES, SESSION_SECONDS, Visitors

if TYPE_CHECKING:
    from unicron_lightning.coordinator.server.server import Server

LOOK_SECONDS: Final = 0.3
KEEP_ALIVE_SECONDS: Final = 15.0
MOST_VIEWERS: Final = 64
_TYPES: Final = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Dashboard:
    """The page of one server.

    Args:
        shell: the server.
        visitors: the browsers' sessions.
        secure: whether links are encrypted.
    """

    def __init__(self, shell: Server, visitors: Visitors, *, secure: bool) -> None:
        self._shell = shell
        self._visitors = visitors
        self._secure = secure
        self._board = Board()
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._viewers = 0

    def add_routes(self, app: web.Application) -> None:
        """Add the page's routes."""
        for path in PAGES:
            app.router.add_get(path, self._get_page)
        app.router.add_post("/v1/dashboard/code", self._post_code)
        app.router.add_post(LOGIN, self._post_login)
        app.router.add_post("/dashboard/logout", self._post_logout)
        app.router.add_get("/dashboard/stream", self._get_stream, allow_head=False)

    async def close(self) -> None:
        """End all streams."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _get_page(self, request: web.Request) -> web.Response:
        name = PAGES[request.path]
        file = importlib.resources.files("unicron_lightning.coordinator.dashboard") / name
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(text=file.read_text("utf-8"), content_type=kind, charset="utf-8", headers=HEADERS)

    async def _post_code(self, _request: web.Request) -> web.Response:
        code = self._visitors.issue_code(time.monotonic())
        return web.json_response({"code": code, "seconds": CODE_SECONDS})

    async def _post_login(self, request: web.Request) -> web.Response:
        try:
            code = json.loads(await request.read())["code"]
        except (ValueError, KeyError, TypeError, RecursionError):
            code = None
        session = self._visitors.log_in(code, time.monotonic()) if isinstance(code, str) else None
        if session is None:
            error = "code: unknown, used or expired; expected one that `unicron dashboard` has just printed"
            return web.json_response({"error": error}, status=403, headers=HEADERS)
        answer = web.json_response({"key": session.key}, headers=HEADERS)
        answer.set_cookie(
            self._visitors.cookie, session.id,
            max_age=int(SESSION_SECONDS), httponly=True, samesite="Strict", secure=self._secure, path="/",
        )  # fmt: skip
        return answer

    async def _post_logout(self, request: web.Request) -> web.Response:
        session = self._visitors.of(request.cookies, time.monotonic())
        if session is not None:
            self._visitors.log_out(session)
        answer = web.json_response({}, headers=HEADERS)
        answer.del_cookie(self._visitors.cookie, path="/")
        return answer

    async def _get_stream(self, request: web.Request) -> web.StreamResponse:
        """Send the state, then its changes, as server-sent events, while the session lasts."""
        if self._viewers >= MOST_VIEWERS:
            return web.json_response({"error": f"{MOST_VIEWERS} pages are open already"}, status=503)
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        self._viewers += 1
        try:
            self._look()
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._keep_looking())
            version = 0
            while not self._looking.done() and self._visitors.of(request.cookies, time.monotonic()) is not None:
                changed = self._changed
                newest, text = self._board.version, self._board.since(version)
                await answer.write(b": \n\n" if newest == version else f"data: {text}\n\n".encode())
                version = newest
                await self._wait(changed)
        except ConnectionError:
            pass  # The page was closed.
        finally:
            self._viewers -= 1
        return answer

    async def _wait(self, changed: asyncio.Event) -> None:
        assert self._looking is not None
        waiting = asyncio.create_task(changed.wait())
        try:
            await asyncio.wait({waiting, self._looking}, timeout=KEEP_ALIVE_SECONDS, return_when="FIRST_COMPLETED")
        finally:
            waiting.cancel()

    async def _keep_looking(self) -> None:
        """Update the board while pages are open."""
        while self._viewers:
            await asyncio.sleep(LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        if self._board.update(entries(self._shell.machine, self._shell.goodput, self._shell.about())):
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
