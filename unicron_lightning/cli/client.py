"""Common parts of the commands that query a coordinator.

Some get answers from the state folder of a coordinator that has ended, such as an embedded one after its last task.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import os
import socket
import sqlite3
import sys
import time
import urllib.parse
from dataclasses import fields
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from unicron_lightning import environ
from unicron_lightning.agent.options import endpoint_of, parse_endpoint, parse_endpoints
from unicron_lightning.cli.output import visible
from unicron_lightning.errors import CoordinatorUnavailable, CoordinatorUnproven, UnicronError
from unicron_lightning.handshake import Handshake
from unicron_lightning.private_files import default_state_dir
from unicron_lightning.proof import ANSWER_HEADER, MOST_CHALLENGE_BYTES, MOST_REQUEST_BYTES
from unicron_lightning.tls import Access, AccessOptions, TlsExpected

DEFAULT_ENDPOINT: Final = "127.0.0.1:29461"
_TIMEOUT_SECONDS: Final = 5.0
_REFUSALS: Final = (400, 403, 404, 409, 503)
_FILE: Final = "coordinator.sqlite"
_CONNECT_SECONDS: Final = 1.0
_AWAY: Final = "waits for a coordinator: an agent of the task starts one, or `unicron coordinator` does"


def connecting() -> argparse.ArgumentParser:
    """Return the options that locate the coordinator, as a parent of a command's parser."""
    parser = argparse.ArgumentParser(add_help=False)
    endpoint = os.environ.get(environ.ENDPOINT) or DEFAULT_ENDPOINT
    words = f"default: {environ.ENDPOINT}, else {DEFAULT_ENDPOINT}"
    parser.add_argument("--endpoint", default=endpoint, metavar="HOST:PORT[,HOST:PORT]", help=words)
    parser.add_argument("--token-file", metavar="PATH", help="default: UNICRON_TOKEN, else the file made for you")
    parser.add_argument("--forwarded", action="store_true", help="a tunnel or service forwards from the endpoint to it")
    certificate = (
        "a CA's file (unicron certs), sha256:FINGERPRINT, or auto: the token proves it; default: auto beyond loopback"
    )
    parser.add_argument("--tls", metavar="CERTIFICATE", help=f"which certificate is accepted: {certificate}")
    parser.add_argument(
        "--tls-client", metavar="PATH", help="this client's certificate with its key, if it asks for one"
    )
    parser.add_argument("--plaintext", action="store_true", help="not encrypted, beyond loopback either")
    return parser


def answering() -> argparse.ArgumentParser:
    """Return the options of `connecting`, and ``--json``, for commands that print the coordinator's answer."""
    parser = argparse.ArgumentParser(add_help=False, parents=[connecting()])
    parser.add_argument("--json", action="store_true", help="print what the coordinator answers")
    return parser


def access_options(options: argparse.Namespace) -> AccessOptions:
    """Return those of the options of `connecting` that are for the access."""
    return AccessOptions(**{each.name: getattr(options, each.name) for each in fields(AccessOptions)})


def access_of(options: argparse.Namespace) -> Access:
    """Return the access given by the options of `connecting`.

    Raises:
        ConfigError: there is no token, or a file can't be used.
    """
    return access_to(options.endpoint, access_options(options))


def access_to(endpoint: str, options: AccessOptions) -> Access:
    """Return the access to an endpoint by options of the command line.

    Raises:
        ConfigError: there is no token, or a file can't be used.
    """
    return options.access(parse_endpoints(endpoint)[0][0], "--token-file ", "--tls ")


def quoted(name: str) -> str:
    """Quote a name as one part of a path."""
    return urllib.parse.quote(name, safe="")


def fetch(
    endpoint: str, path: str, access: Access | None = None, *, method: str = "GET", body: Any = None, **query: str
) -> Any:
    """Send a query or an order to a coordinator.

    Args:
        endpoint: ``HOST:PORT``, or several, separated by commas: the coordinator that leads answers.
        path: e.g. ``/v1/status``.
        access: access to it; None: with the token of the environment or of this user.
        method: GET, or POST for an order.
        body: the content of an order, as JSON; None for nothing.
        query: parameters.

    Returns:
        The decoded JSON.

    Raises:
        CoordinatorUnavailable: no coordinator answers there, or it cannot prove that it knows the token.
        UnicronError: the coordinator refuses the order, with its own reason; or the order is too large.
    """
    content = b"" if body is None else json.dumps(body).encode()
    if len(content) >= MOST_REQUEST_BYTES:
        raise UnicronError(f"the order for {path} has {len(content)} bytes: expected < {MOST_REQUEST_BYTES}")
    if access is None:
        access = access_to(endpoint, AccessOptions())
    target = path + (f"?{urllib.parse.urlencode(query)}" if query else "")
    status, answer = request(endpoint, method, target, access, content)
    if status != HTTPStatus.OK:
        refusal = _reason(answer) if method == "POST" and status in _REFUSALS else None
        if refusal is not None:
            raise UnicronError(refusal)
        raise CoordinatorUnavailable(f"{endpoint} answers HTTP {status}")
    try:
        return json.loads(answer)
    except ValueError as error:
        raise CoordinatorUnavailable(f"no coordinator answers at {endpoint}: {error}") from None


def request(endpoint: str, method: str, target: str, access: Access, body: bytes = b"") -> tuple[int, bytes]:
    """Send one request after mutual proof; return the proven status and body.

    Of several endpoints the first one that can be reached is asked. An order that was sent and not answered is not sent
    to another one, since it may have been carried out.

    Raises:
        CoordinatorUnavailable: no coordinator answers there.
        CoordinatorUnproven: the process that answers does not know the token.
    """
    failed: list[CoordinatorUnavailable] = []
    try:
        for host, port in parse_endpoints(endpoint):
            sent: list[str] = []
            try:
                return _request_of(endpoint_of(host, port), method, target, access, body, sent)
            except CoordinatorUnavailable as error:
                failed.append(error)
                if method != "GET" and sent:
                    raise
        raise _reason_of(failed)
    finally:
        failed.clear()  # an error's traceback has this frame: the cycle would keep the connection's socket


def _reason_of(failed: list[CoordinatorUnavailable]) -> CoordinatorUnavailable:
    """Return the error for endpoints of which none has answered."""
    unproven = [error for error in failed if isinstance(error, CoordinatorUnproven)]
    if len(failed) == 1 or unproven:
        return (unproven or failed)[0]
    return CoordinatorUnavailable("; ".join(str(error) for error in failed))


def answering_endpoint(endpoint: str, access: Access) -> str:
    """Return the one of several endpoints at which a coordinator answers; a single one as it is.

    Raises:
        CoordinatorUnavailable: none does.
    """
    places = [endpoint_of(*place) for place in parse_endpoints(endpoint)]
    for place in places[:-1]:
        with contextlib.suppress(CoordinatorUnavailable):
            request(place, "GET", "/healthz", access)
            return place
    return places[-1]


def _request_of(
    endpoint: str, method: str, target: str, access: Access, body: bytes, sent: list[str]
) -> tuple[int, bytes]:
    """Send a request to one endpoint; ``sent`` gets it once it may have arrived."""
    try:
        return _request(endpoint, method, target, access, body, sent)
    except TlsExpected:
        if not access.trust.may_encrypt:
            raise
    return _request(endpoint, method, target, access.encrypted, body, sent)


def _request(
    endpoint: str, method: str, target: str, access: Access, body: bytes, sent: list[str]
) -> tuple[int, bytes]:
    handshake = Handshake(endpoint, access)
    try:
        with contextlib.closing(_connection(endpoint, handshake)) as connection:
            connection.connect()
            connection.auto_open = 0  # the certificate of this connection is known
            _meet(connection, handshake)
            headers = handshake.headers(method, target, body)
            sent.append(target)
            connection.request(method, target, body=body or None, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = handshake.explained(error)
        if reason is not None:
            raise reason from None
        raise CoordinatorUnavailable(f"no coordinator answers at {endpoint}: {error}") from None
    handshake.check(answer.headers.get(ANSWER_HEADER), answer.status, content)
    return answer.status, content


def _connection(endpoint: str, handshake: Handshake) -> http.client.HTTPConnection:
    place, context = parse_endpoint(endpoint), handshake.context
    # No proxy: an endpoint is a host of the cluster.
    if context is None:
        return http.client.HTTPConnection(*place, timeout=_TIMEOUT_SECONDS)
    return http.client.HTTPSConnection(*place, timeout=_TIMEOUT_SECONDS, context=context)


def _meet(connection: http.client.HTTPConnection, handshake: Handshake) -> None:
    connection.request("GET", handshake.challenge)
    peer = connection.sock.getpeername() if handshake.context is None else None
    try:
        answer = connection.getresponse()
    except ConnectionResetError as error:  # or http.client.RemoteDisconnected, which is one too
        refused = handshake.refused()
        if refused is None:
            raise
        raise refused from error
    content = answer.read(MOST_CHALLENGE_BYTES) if answer.status == HTTPStatus.OK else b""
    handshake.meet(answer.status, content, peer)
    answer.read()


def _reason(answer: bytes) -> str | None:
    try:
        return visible(str(json.loads(answer)["error"]))
    except (ValueError, KeyError, TypeError):
        return None


def ask(options: argparse.Namespace, path: str, **query: str) -> Any:
    """Query the coordinator; if none listens, read what the last one at this endpoint has stored on this machine.

    A line on stderr says so.

    Args:
        options: of the command line.
        path: /v1/jobs, /v1/events or /v1/incidents.
        query: parameters.

    Raises:
        CoordinatorUnavailable: no coordinator answers, and nothing is stored; or one listens but is not accepted.
    """
    try:
        return fetch(options.endpoint, path, access_of(options), **query)
    except CoordinatorUnavailable:
        answer = stored(options.endpoint, path, **query)
        if answer is None:
            raise
        return answer


def stored(endpoint: str, path: str, **query: str) -> Any:
    """Answer as `ask` does without a coordinator; None if one listens, or nothing is stored."""
    return None if _listens(endpoint) else _read(endpoint, path, query)


def _listens(endpoint: str) -> bool:
    for place in parse_endpoints(endpoint):
        with contextlib.suppress(OSError):
            socket.create_connection(place, _CONNECT_SECONDS).close()
            return True
    return False


def _read(endpoint: str, path: str, query: dict[str, str]) -> Any:
    """Answer from the database of this endpoint; None if there is none of this user's that can be read."""
    file = default_state_dir(*parse_endpoints(endpoint)[0]) / _FILE
    try:
        for each in (file, file.parent):
            if each.is_symlink() or each.stat().st_uid != os.getuid():
                return None
        with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
            answer = _answer(database, path, query)
        _announce(endpoint, file, file.stat().st_mtime)
    except (OSError, sqlite3.Error):
        return None
    return answer


def _answer(database: sqlite3.Connection, path: str, query: dict[str, str]) -> Any:
    from unicron_lightning.coordinator.incidents import accounting
    from unicron_lightning.coordinator.incidents.facts import IncidentClosed
    from unicron_lightning.coordinator.orders.jobs import listed, recent
    from unicron_lightning.coordinator.storage import StoredState

    state, task = StoredState(database), query.get("task")
    if path == "/v1/events":
        return state.events(task=task, since=int(query.get("since", "0")))
    cluster, started_at = state.load(), 0.0
    if query.get("current") == "1":
        started_at = max(
            [each["at"] for each in state.events(name="coordinator_started", newest=True, limit=1)] or [0.0]
        )
    if path == "/v1/incidents":
        closed = state.events(task=task, name=IncidentClosed.event)
        return accounting.book(recent(closed, cluster, started_at), cluster, time.time(), only=task)
    assert path == "/v1/jobs"
    found = listed(cluster, started_at)
    return [status if status["ended_at"] is not None else {**status, "reason": _AWAY} for status in found]


def events_of(options: argparse.Namespace, *, since: int = 0, task: str | None) -> list[dict[str, Any]]:
    """Return the whole log after an event, page by page; of one task if it is given."""
    query = {} if task is None else {"task": task}
    found: list[dict[str, Any]] = []
    while (page := ask(options, "/v1/events", since=str(since), **query)) and page[-1]["seq"] > since:
        found += page
        since = page[-1]["seq"]
    return found


@functools.cache
def _announce(endpoint: str, file: Path, saved_at: float) -> None:
    """Say where the answer comes from, once."""
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved_at))
    print(f"unicron: no coordinator listens at {endpoint}; its state of {saved}, from {file.parent}:", file=sys.stderr)
