"""Which clients may connect to the coordinator, and how: its port, encryption, mutual proof, limits, and browsers'
sessions.

**Guard** is the coordinator's side of the mutual proof: which requests are accepted, and how answers are proven.
Without a proof: requests of the coordinator's own page, in a browser's session, and scrapes with their credential.

**Host names** are validated in requests to the coordinator, and in agents' addresses of their stores. A web page can
resolve its own name to a loopback address and then send requests to a coordinator there; the name in the Host header
gives them away. An agent may direct other processes only to its own machine.

**Connections that have not proven the token** are limited in number and duration. Any process that can reach the port
can open connections, send half a request and wait. Such connections are closed after `PROOF_SECONDS`, and the oldest of
them earlier if there are too many for the descriptors that this process may open. Connections with a proof (agents,
daemons, commands) are left alone.

**Encryption.** Beyond loopback links are encrypted, unless ``coordinator.plaintext`` is set. Without a certificate of
the user the coordinator makes one at each start. Its proof of the token names the certificate (`proof`), so no file has
to be copied.

**Sessions of browsers.** A code of ``unicron dashboard`` opens one; its cookie reads, and orders need its key, too.
A browser cannot make the mutual proof without knowing the token, which no page should get. A holder of the token
requests a code with a proof; the code opens one session within `CODE_SECONDS`, once. The session's id is in a cookie
that scripts cannot read. The key is a second secret, which the page keeps in the storage of its origin and sends in a
header: cookies are shared by all ports of a host, and sent with requests that other pages cause; the key is neither.

Sessions end with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import ipaddress
import json
import logging
import re
import resource
import secrets
import socket
import ssl
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from unicron_lightning.coordinator.config import ProcessConfig
from unicron_lightning.credentials import Token, is_loopback
from unicron_lightning.detection.silence import Lateness
from unicron_lightning.errors import ConfigError, PortInUse
from unicron_lightning.proof import (
    ANSWER_HEADER,
    MOST_REQUEST_BYTES,
    Challenges,
    Transcript,
    answer_proof,
    coordinator_proof,
    is_nonce,
    parse_authorization,
    same,
    scrape_credential,
)
from unicron_lightning.tls import AUTO, address_of, fingerprint_of, load_pem, name_of
from unicron_lightning.wire.fields import shortened

logger = logging.getLogger(__name__)


def misdirected(header: str, configured: str) -> str | None:
    """Return why a request to a coordinator on a loopback address is refused; None if it is accepted.

    Args:
        header: its Host header, "" for none.
        configured: ``coordinator.host``.
    """
    name = _without_port(header).lower().rstrip(".")
    if is_loopback(name) or name in (configured.lower().strip("[]"), socket.gethostname().lower()):
        return None
    return f"Host: {shortened(header)}: expected a loopback address, localhost or {configured}"


def misplaced(store: str, host: str, peer: str) -> str | None:
    """Return why an agent's store can't be at the host that it names; None if it can.

    Args:
        store: the host that the agent names for its store.
        host: the host that its registration names.
        peer: the address that its connection comes from.
    """
    if store == host or _address(store) == _address(peer) or (is_loopback(store) and is_loopback(peer)):
        return None
    return f"store.host={shortened(store)}: expected {shortened(host)}, the agent's host, or {shortened(peer)}"


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0] if header.count(":") == 1 else header


def _address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


PROOF_SECONDS: Final = 5.0
FEW_DESCRIPTORS: Final = 4096
"""Limit of open files below which the coordinator logs for how many agents it suffices."""
_OWN_DESCRIPTORS: Final = 32
"""Files and sockets of the process itself."""
LOOK_SECONDS: Final = 0.25
_LOG_SECONDS: Final = 1.0
_OUT_OF: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files to the hard one; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard


def _agents_within(limit: int) -> int:
    """Return how many agents and daemons the limit of descriptors suffices for: a quarter is kept for others."""
    return max(0, limit - _most_unproven(limit) - _OWN_DESCRIPTORS)


def _most_unproven(limit: int) -> int:
    """Return how many connections without a proof may stay.

    Args:
        limit: of the descriptors that this process may open.
    """
    return max(16, limit // 4)


def excess(ages: dict[Any, float], now: float, most: int) -> list[Any]:
    """Select connections without a proof that have to be closed.

    Args:
        ages: time at which each was first seen, oldest first.
        now: the present time of the same clock.
        most: number of connections that may stay.
    """
    late = [each for each, seen in ages.items() if now - seen > PROOF_SECONDS]
    rest = [each for each, seen in ages.items() if now - seen <= PROOF_SECONDS]
    return late + rest[: max(0, len(rest) - most)]


class UnprovenConnections:
    """Limits unproven connections of one server, in its event loop.

    Args:
        runner: the server's runner, set up.
        proven: transports of connections that have proven the token.
        clock: time.monotonic(), or a stand-in.
    """

    def __init__(
        self, runner: web.AppRunner, proven: weakref.WeakSet[Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._runner = runner
        self._proven = proven
        self._seen: dict[Any, float] = {}
        self._known: set[Any] = set()
        """Connections found to be proven: ten thousand are there, and few are new."""
        self._timer: asyncio.TimerHandle | None = None
        self._lateness = Lateness(LOOK_SECONDS, clock())
        self._told = 0.0
        self._silenced = 0

    def start(self) -> None:
        """Start watching; log at most once a second that descriptors are exhausted."""
        limit = raise_descriptor_limit()
        if limit < FEW_DESCRIPTORS:
            logger.warning(
                "descriptors_few limit=%d: enough for about %d agents and daemons; raise the hard limit of open files "
                "(ulimit -Hn, LimitNOFILE) if there will be more",
                limit,
                _agents_within(limit),
            )
        asyncio.get_running_loop().set_exception_handler(self._log)
        self._lateness = Lateness(LOOK_SECONDS, self._clock())
        self.look()

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Close connections without a proof that are there for too long, or are too many; again soon."""
        if self._timer is not None:
            self._timer.cancel()
        server = self._runner.server
        now = self._clock()
        late = self._lateness.fired(now)  # time in which no request could be answered is not counted
        self._seen = {each: min(now, seen + late) for each, seen in self._seen.items()}
        there = server.connections if server is not None else []
        self._known.intersection_update(there)
        unknown = [each for each in there if each not in self._known]
        self._known.update(each for each in unknown if each.transport in self._proven)
        self._seen = {each: self._seen.get(each, now) for each in unknown if each not in self._known}
        # The limit can be changed from outside while this process runs.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        for handler in excess(self._seen, now, _most_unproven(soft)):
            handler.force_close()
            del self._seen[handler]
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)

    def _log(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _OUT_OF):
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now - self._told < _LOG_SECONDS:
            self._silenced += 1
            return
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        logger.error("descriptors_exhausted limit=%d error=%s more=%d", limit, error, self._silenced)
        self._told, self._silenced = now, 0


_HANDSHAKE: Final = b"\x16"
"""First byte of a client that speaks TLS."""
_FULL_SECONDS: Final = 0.5
_GOODBYE_SECONDS: Final = 1.0
_REFUSAL: Final = json.dumps({"error": "this port speaks TLS"}).encode()
_PLAIN_ANSWER: Final = (
    b"HTTP/1.1 426 Upgrade Required\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_REFUSAL), _REFUSAL)
)


BACKLOG: Final = 1024
"""Connections that may wait to be taken in: all agents of a restarted coordinator return together, and one that finds
no room tries again a second later. A longer queue would not be served within the time that clients allow."""


def resolve(host: str, port: int) -> Any:
    """Return the first of the addresses of ``coordinator.host``, as `socket.getaddrinfo` does.

    Raises:
        ConfigError: it has none.
    """
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"coordinator.host={host}: {error.strerror}") from error


def bind(address: Any) -> socket.socket:
    """Listen at an address of `resolve`.

    Raises:
        PortInUse: another program does.
        ConfigError: it is not this machine's, or may not be used.
    """
    family, kind, protocol, _, endpoint = address
    listener = socket.socket(family, kind, protocol)
    try:
        # Lets a restarted coordinator have its port back while old connections linger in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(endpoint)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = f"can't listen on {endpoint[0]}:{endpoint[1]}: {error.strerror}"
        raise (PortInUse(reason) if error.errno == errno.EADDRINUSE else ConfigError(reason)) from error
    return listener


class TlsDoor:
    """Takes connections in and hands them on once they are encrypted.

    A plain request is answered in one line, so that its sender knows why. Connections that have not finished the
    handshake are as few, and as short, as those without a proof.

    Args:
        listener: closed at the end.
        context: of the server's side.
        protocol: makes what an encrypted connection is handed to.
    """

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, protocol: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._listener = listener
        self._context = context
        self._protocol = protocol
        self._pending: dict[asyncio.Task[None], socket.socket] = {}
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take connections."""
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Take no more; connections that are not encrypted yet end."""
        if self._accepting is not None:
            self._accepting.cancel()
        for connection in self._pending.values():
            _end(connection)
        await asyncio.gather(*filter(None, (self._accepting, *self._pending)), return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptors are left
                loop.call_exception_handler({"message": "a connection could not be taken", "exception": error})
                await asyncio.sleep(_FULL_SECONDS)
                continue
            task = asyncio.create_task(self._admit(connection))
            self._pending[task] = connection
            task.add_done_callback(self._pending.pop)
            if len(self._pending) > _most_unproven(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
                _end(next(iter(self._pending.values())))

    async def _admit(self, connection: socket.socket) -> None:
        try:
            first = await asyncio.wait_for(_first_byte(connection), PROOF_SECONDS)
            if first == _HANDSHAKE:
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._protocol, connection, ssl=self._context, ssl_handshake_timeout=PROOF_SECONDS
                )
                return
            if first:
                await asyncio.wait_for(_refuse(connection), _GOODBYE_SECONDS)
        except (OSError, asyncio.TimeoutError):
            pass  # it has closed, sent nothing, or can't be agreed with: not worth a line each
        connection.close()


async def _first_byte(connection: socket.socket) -> bytes:
    """Wait for a connection's first byte, and leave it there; empty if it has ended."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK)


async def _refuse(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, _PLAIN_ANSWER)
    connection.shutdown(socket.SHUT_WR)
    while await loop.sock_recv(connection, 1 << 16):  # to close with unread data would take the answer back
        pass


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


_OWN_LIFETIME: Final = datetime.timedelta(days=3650)
"""Lifetime of a certificate that the coordinator makes: longer than a process lives; clients do not check its dates."""


@dataclass(frozen=True, kw_only=True)
class Encryption:
    """Encryption of connections.

    Attributes:
        context: of the server's side.
        fingerprint: SHA-256 of the certificate.
    """

    context: ssl.SSLContext
    fingerprint: str


def certificate_wanted(config: ProcessConfig, *, loopback: bool) -> str | None:
    """Return ``auto``, the path of a certificate, or None for plain links.

    Args:
        config: the options.
        loopback: whether only this machine can reach the listening address.

    Raises:
        ConfigError: options contradict each other.
    """
    if config.plaintext:
        if config.tls is not None or config.tls_client_ca is not None:
            raise ConfigError(
                "coordinator.plaintext=true: expected neither coordinator.tls nor coordinator.tls_client_ca"
            )
        return None
    if config.tls is None and loopback:
        if config.tls_client_ca is not None:
            raise ConfigError(f"coordinator.tls_client_ca={config.tls_client_ca}: expected coordinator.tls too")
        return None
    return config.tls or AUTO


def encryption_of(config: ProcessConfig, *, loopback: bool) -> Encryption | None:
    """Return the encryption of connections; None if they are plain, with a warning beyond loopback.

    Raises:
        ConfigError: options contradict each other, or a file cannot be used.
    """
    wanted = certificate_wanted(config, loopback=loopback)
    if wanted is None:
        if not loopback:
            logger.warning(
                "links_not_encrypted host=%s: with coordinator.plaintext all but the token can be read and changed on "
                "the way",
                config.host,
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    pem = _make_own(context) if wanted == AUTO else _load(context, Path(wanted).expanduser(), config.tls_key)
    if config.tls_client_ca is not None:
        given = f"coordinator.tls_client_ca={config.tls_client_ca}"
        path = Path(config.tls_client_ca).expanduser()
        load_pem(context.load_verify_locations, path, given, "a CA's certificate (PEM)")
        context.verify_mode = ssl.CERT_REQUIRED
    return Encryption(context=context, fingerprint=fingerprint_of(_first_certificate(pem)))


def _make_own(context: ssl.SSLContext) -> str:
    from unicron_lightning.certificates import issue  # `cryptography`: not for coordinators on loopback

    made = issue("unicron coordinator", _OWN_LIFETIME, ca=None)
    with tempfile.NamedTemporaryFile(prefix="unicron-") as file:  # of mode 0600; OpenSSL takes keys from files only
        file.write(made.pem)
        file.flush()
        context.load_cert_chain(file.name)
    return made.certificate_pem.decode("ascii")


def _load(context: ssl.SSLContext, path: Path, key: str | None) -> str:
    given = f"coordinator.tls={path}" + (f" coordinator.tls_key={key}" if key else "")
    try:
        context.load_cert_chain(path, Path(key).expanduser() if key else None)
        return path.read_text(encoding="ascii", errors="replace")
    except ssl.SSLError:
        raise ConfigError(f"{given}: expected auto, or a certificate with its key (PEM; unicron certs)") from None
    except OSError as error:
        raise ConfigError(f"{given}: {error.strerror or error}") from None


def _first_certificate(pem: str) -> bytes:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    inner = pem.partition(begin)[2].partition(end)[0]
    return ssl.PEM_cert_to_DER_cert(f"{begin}{inner}{end}")


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


_OPEN: Final = ("/healthz", "/v1/challenge")
_METRICS: Final = "/metrics"
_MEETING: Final = web.RequestKey("unicron-transcript", Transcript)


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
        transcript = Transcript(client=client, server=server, address=address)
        proof = coordinator_proof(self._secret, transcript)
        return web.json_response({"nonce": server, "address": transcript.address, "proof": proof})

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
        request[_MEETING] = Transcript(client=claim.client, server=claim.server, address=address)
        return True

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        transcript = request.get(_MEETING)
        if transcript is not None:
            body = response.body if isinstance(response, web.Response) else None
            content = body if isinstance(body, bytes | bytearray) else b""
            response.headers[ANSWER_HEADER] = answer_proof(self._secret, transcript, response.status, bytes(content))

    def _address(self, request: web.Request) -> str | None:
        """Return the address of this end of the connection; None if it was closed meanwhile, e.g. as one too many."""
        if request.transport is None:
            return None
        if self._certificate is not None:
            return name_of(self._certificate)
        return address_of(request.transport.get_extra_info("sockname"))
