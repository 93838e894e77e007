"""Common parts of the commands that query a coordinator."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import urllib.parse
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from unicron_lightning.address import address_of
from unicron_lightning.cli.output import visible
from unicron_lightning.credentials import Token, token_for
from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
from unicron_lightning.proof import (
    ANSWER_HEADER,
    MOST_CHALLENGE_BYTES,
    Meeting,
    answer_proof,
    authorization,
    check_coordinator,
    new_nonce,
    same,
    unproven,
)

DEFAULT_ENDPOINT: Final = "127.0.0.1:29461"
_TIMEOUT_SECONDS: Final = 5.0
_REFUSALS: Final = (400, 403, 404, 409, 503)


def connecting() -> argparse.ArgumentParser:
    """Return the options that locate the coordinator, as a parent of a command's parser."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--endpoint", default=DEFAULT_ENDPOINT, metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--token-file", metavar="PATH", help="default: UNICRON_TOKEN, else the file made for you")
    parser.add_argument("--forwarded", action="store_true", help="a tunnel or service forwards from the endpoint to it")
    return parser


@dataclass(frozen=True, kw_only=True)
class Access:
    """Access to a coordinator.

    Attributes:
        token: the shared secret.
        forwarded: whether a process forwards from the endpoint to the coordinator.
    """

    token: Token
    forwarded: bool = False


def access_of(options: argparse.Namespace) -> Access:
    """Return the access given by the options of `connecting`.

    Raises:
        ConfigError: there is no token, or a file can't be used.
    """
    return Access(token=_token_at(options.endpoint, options.token_file), forwarded=options.forwarded)


def _token_at(endpoint: str, token_file: str | None) -> Token:
    return token_for(endpoint.rpartition(":")[0] or endpoint, token_file, option="--token-file ")


def quoted(name: str) -> str:
    """Quote a name as one part of a path."""
    return urllib.parse.quote(name, safe="")


def fetch(
    endpoint: str, path: str, access: Access | None = None, *, method: str = "GET", body: Any = None, **query: str
) -> Any:
    """Send a query or an order to a coordinator.

    Args:
        endpoint: ``HOST:PORT``.
        path: e.g. ``/v1/status``.
        access: access to it; None: with the token of the environment or of this user.
        method: GET, or POST for an order.
        body: the content of an order, as JSON; None for nothing.
        query: parameters.

    Returns:
        The decoded JSON.

    Raises:
        CoordinatorUnavailable: no coordinator answers there, or it cannot prove that it knows the token.
        UnicronError: the coordinator refuses the order; the reason is its own.
    """
    access = access or Access(token=_token_at(endpoint, None))
    target = path + (f"?{urllib.parse.urlencode(query)}" if query else "")
    status, answer = request(endpoint, method, target, access, b"" if body is None else json.dumps(body).encode())
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

    Raises:
        CoordinatorUnavailable: no coordinator answers there.
        CoordinatorUnproven: the process that answers does not know the token.
    """
    try:
        parts = urllib.parse.urlsplit(f"//{endpoint}")
        # No proxy: an endpoint is a host of the cluster.
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS)
        with contextlib.closing(connection):
            connection.connect()
            meeting = _meet(connection, endpoint, access)
            headers = {"Authorization": authorization(access.token.secret, meeting, method, target, body)}
            connection.request(method, target, body=body or None, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CoordinatorUnavailable(f"no coordinator answers at {endpoint}: {error}") from None
    expected = answer_proof(access.token.secret, meeting, answer.status, content)
    if not same(answer.headers.get(ANSWER_HEADER, ""), expected):
        raise unproven(endpoint, access.token)
    return answer.status, content


def _meet(connection: http.client.HTTPConnection, endpoint: str, access: Access) -> Meeting:
    client = new_nonce()
    connection.request("GET", f"/v1/challenge?nonce={client}")
    dialled = address_of(connection.sock.getpeername())
    answer = connection.getresponse()
    content = answer.read(MOST_CHALLENGE_BYTES) if answer.status == HTTPStatus.OK else b""
    meeting = check_coordinator(endpoint, access.token, client, content, dialled, forwarded=access.forwarded)
    answer.read()
    return meeting


def _reason(answer: bytes) -> str | None:
    try:
        return visible(str(json.loads(answer)["error"]))
    except (ValueError, KeyError, TypeError):
        return None
