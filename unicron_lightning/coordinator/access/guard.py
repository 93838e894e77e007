"""The coordinator's side of the mutual proof: which requests are accepted, and how answers are proven.

Without a proof: requests of the coordinator's own page, in a browser's session, and scrapes with their credential.
"""

from __future__ import annotations

import secrets
import time
import weakref
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from unicron_lightning.address import address_of
from unicron_lightning.coordinator.access.hosts import misdirected
from unicron_lightning.coordinator.dashboard.visitors import KEY_HEADER, Visitors, foreign, is_open
from unicron_lightning.credentials import Token
from unicron_lightning.proof import (
    ANSWER_HEADER,
    MOST_REQUEST_BYTES,
    Challenges,
    Meeting,
    answer_proof,
    coordinator_proof,
    is_nonce,
    parse_authorization,
    same,
    scrape_credential,
)
from unicron_lightning.tls import name_of

_OPEN: Final = ("/healthz", "/v1/challenge")
_METRICS: Final = "/metrics"
_MEETING: Final = web.RequestKey("unicron-meeting", Meeting)


class Guard:
    """Accepts only requests that prove the token.

    Args:
        token: the shared secret.
        only_host: ``coordinator.host`` if it is a loopback address: requests must name a loopback host; None: any host.
        certificate: fingerprint of the certificate of encrypted links; None: links are plain.
        visitors: sessions of browsers, which need no proof for some requests.
    """

    def __init__(
        self,
        token: Token,
        only_host: str | None = None,
        certificate: str | None = None,
        visitors: Visitors | None = None,
    ) -> None:
        self.visitors = visitors or Visitors("unicron")
        self._certificate = certificate
        self._only_host = only_host
        self._secret = token.secret
        self._scraper = f"Bearer {scrape_credential(token.secret)}"
        self._challenges = Challenges(secrets.token_bytes(32))
        self.proven: weakref.WeakSet[Any] = weakref.WeakSet()
        """Transports of connections over which a request has proven the token."""

    def app(self) -> web.Application:
        """Build an application with the challenge's route; all routes added to it need a proof."""

        @web.middleware
        async def authorize(request: web.Request, handler: Any) -> web.StreamResponse:
            wrong = self._only_host and misdirected(request.headers.get("Host", ""), self._only_host)
            if wrong:
                return web.json_response({"error": wrong}, status=421)
            if self._of_page(request):
                own: web.StreamResponse = await handler(request)
                return own
            # A browser page may open WebSockets to loopback addresses; the package's clients send no origin.
            if "Origin" in request.headers:
                return web.json_response({"error": "requests by web pages are refused"}, status=403)
            if not await self._proven(request) and request.path not in _OPEN:
                return web.json_response({"error": "missing or wrong proof of the token"}, status=401)
            response: web.StreamResponse = await handler(request)
            return response

        app = web.Application(middlewares=[authorize], client_max_size=MOST_REQUEST_BYTES)
        app.router.add_get("/v1/challenge", self._get_challenge)
        app.on_response_prepare.append(self._sign)
        return app

    def _of_page(self, request: web.Request) -> bool:
        """Whether a request is one of the coordinator's own page, and permitted."""
        site, path = request.headers.get("Sec-Fetch-Site"), request.raw_path.partition("?")[0]
        scheme = "http" if self._certificate is None else "https"
        host = request.headers.get("Host", "")
        if foreign(request.headers.get("Origin"), site, scheme=scheme, host=host):
            return False
        session = self.visitors.of(request.cookies, time.monotonic())
        key = request.headers.get(KEY_HEADER, "")
        if not self.visitors.may(session, request.method, path, key):
            return is_open(request.method, path)
        self.proven.add(request.transport)
        return True

    async def _get_challenge(self, request: web.Request) -> web.Response:
        client = request.query.get("nonce", "")
        if not is_nonce(client):
            return web.json_response({"error": "nonce: expected 64 hexadecimal digits"}, status=400)
        address = self._address(request)
        if address is None:
            return web.json_response({"error": "the connection is closed"}, status=400)
        server = self._challenges.issue(client, time.monotonic())
        meeting = Meeting(client=client, server=server, address=address)
        proof = coordinator_proof(self._secret, meeting)
        return web.json_response({"nonce": server, "address": meeting.address, "proof": proof})

    async def _proven(self, request: web.Request) -> bool:
        header = request.headers.get("Authorization", "")
        if request.path == _METRICS and same(header, self._scraper):
            self.proven.add(request.transport)
            return True
        claim = parse_authorization(header)
        if claim is None:
            return False
        try:
            body = await request.read() if request.can_read_body else b""
        except (ConnectionError, HttpProcessingError, web.RequestPayloadError):
            return False  # The client left, or its body is malformed.
        address, target = self._address(request), request.raw_path
        if address is None or not self._challenges.accept(
            self._secret, claim, address, method=request.method, target=target, body=body, now=time.monotonic()
        ):
            return False
        self.proven.add(request.transport)
        request[_MEETING] = Meeting(client=claim.client, server=claim.server, address=address)
        return True

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        meeting = request.get(_MEETING)
        if meeting is not None:
            body = response.body if isinstance(response, web.Response) else None
            content = body if isinstance(body, bytes | bytearray) else b""
            response.headers[ANSWER_HEADER] = answer_proof(self._secret, meeting, response.status, bytes(content))

    def _address(self, request: web.Request) -> str | None:
        """Return the address of this end of the connection; None if it was closed meanwhile, e.g. as one too many."""
        if request.transport is None:
            return None
        if self._certificate is not None:
            return name_of(self._certificate)
        return address_of(request.transport.get_extra_info("sockname"))
