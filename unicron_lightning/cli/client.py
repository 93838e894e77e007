"""What the commands that ask a coordinator have in common."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final

from unicron_lightning.cli.output import visible
from unicron_lightning.credentials import Token, token_for
from unicron_lightning.errors import CoordinatorUnavailable, UnicronError

DEFAULT_ENDPOINT: Final = "127.0.0.1:29461"
_TIMEOUT_SECONDS: Final = 5.0
_REFUSALS: Final = (400, 403, 404, 409)


def connecting() -> argparse.ArgumentParser:
    """The options by which a command finds its coordinator, as a parent of its parser."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--endpoint", default=DEFAULT_ENDPOINT, metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--token-file", metavar="PATH", help="default: UNICRON_TOKEN, else the file made for you")
    return parser


def token_of(options: argparse.Namespace) -> Token:
    """The token for the options of `connecting`.

    Raises:
        ConfigError: there is none, or a file can't be used.
    """
    return _token_at(options.endpoint, options.token_file)


def _token_at(endpoint: str, token_file: str | None) -> Token:
    return token_for(endpoint.rpartition(":")[0] or endpoint, token_file, option="--token-file ")


def quoted(name: str) -> str:
    """A name as one part of a path."""
    return urllib.parse.quote(name, safe="")


def fetch(
    endpoint: str, path: str, token: Token | None = None, *, method: str = "GET", body: Any = None, **query: str
) -> Any:
    """Ask a coordinator, or order something of it.

    Args:
        endpoint: ``HOST:PORT``.
        path: e.g. ``/v1/status``.
        token: the shared secret; None: that of this user or the environment.
        method: GET, or POST for an order.
        body: what goes with an order, as JSON; None for nothing.
        query: parameters.

    Returns:
        The decoded JSON.

    Raises:
        CoordinatorUnavailable: nobody answers there, not a coordinator, or it wants another token.
        UnicronError: the coordinator refuses the order; the reason is its own.
    """
    url = f"http://{endpoint}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
    token = token or _token_at(endpoint, None)
    headers = {"Authorization": f"Bearer {token.secret}"}
    # No proxy: an endpoint is a host of the cluster.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            refusal = _reason(error) if method == "POST" and error.code in _REFUSALS else None
        if refusal is not None:
            raise UnicronError(refusal) from None
        hint = f" (token: that of {token.origin}; see UNICRON_TOKEN and --token-file)" if error.code == 401 else ""
        raise CoordinatorUnavailable(f"{endpoint} answers HTTP {error.code}{hint}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CoordinatorUnavailable(f"no coordinator answers at {endpoint}: {reason}") from None


def _reason(error: urllib.error.HTTPError) -> str | None:
    try:
        return visible(str(json.load(error)["error"]))
    except (ValueError, KeyError, TypeError):
        return None
