"""A client's side of the proof on a link to the coordinator, without input or output: `link` and `cli.client` do that.

The order is: connect with `Handshake.context`, request `Handshake.challenge`, give its answer to `Handshake.meet`, send
the request with `Handshake.headers`, and give its answer to `Handshake.check`. See `proof` and `tls`.
"""

from __future__ import annotations

import ssl
from http import HTTPStatus
from typing import Any

from unicron_lightning.errors import CoordinatorUnproven
from unicron_lightning.proof import (
    Transcript,
    answer_proof,
    authorization,
    check_coordinator,
    new_nonce,
    same,
    unproven,
)
from unicron_lightning.tls import (
    Access,
    Certificate,
    address_of,
    client_context,
    explained,
    hung_up,
    ssl_error_in,
    tls_expected,
)


class Handshake:
    """One attempt at a proven request.

    Args:
        endpoint: as the user wrote it, for messages.
        access: the client's token, and its requirements on the link.

    Attributes:
        challenge: target of the first request.
        context: of the connections; None for plain ones.
    """

    def __init__(self, endpoint: str, access: Access) -> None:
        self._endpoint, self._access = endpoint, access
        self._certificate = Certificate(access.trust)
        self._nonce = new_nonce()
        self._transcript: Transcript | None = None
        self.challenge = f"/v1/challenge?nonce={self._nonce}"
        self.context: ssl.SSLContext | None = None
        if access.trust.encrypted:
            self.context = client_context(access.trust, self._certificate)

    def meet(self, status: int, content: bytes, peer: Any) -> None:
        """Check the answer to the challenge.

        Args:
            status: of HTTP.
            content: the body of an answer with the status 200, else empty.
            peer: address of the connection's other end; not used on an encrypted one.

        Raises:
            TlsExpected: the port speaks TLS, the client did not.
            CoordinatorUnproven: the process does not know the token, or has another address or certificate.
        """
        if status == HTTPStatus.UPGRADE_REQUIRED and self.context is None:
            raise tls_expected(self._endpoint, self._access.trust)
        self._transcript = check_coordinator(
            self._endpoint,
            self._access.token,
            self._nonce,
            content,
            address_of(peer) if self.context is None else self._certificate.name,
            forwarded=self._access.forwarded,
        )

    def headers(self, method: str, target: str, body: bytes = b"") -> dict[str, str]:
        """Return the headers that prove a request."""
        assert self._transcript is not None, "meet() first"
        return {"Authorization": authorization(self._access.token.secret, self._transcript, method, target, body)}

    def check(self, proof: str | None, status: int, body: bytes) -> None:
        """Check the answer to the request; ``proof``: its header `proof.ANSWER_HEADER`.

        Raises:
            CoordinatorUnproven: it has no proof of the token.
        """
        assert self._transcript is not None, "meet() first"
        expected = answer_proof(self._access.token.secret, self._transcript, status, body)
        if not same(proof or "", expected):
            raise unproven(self._endpoint, self._access.token)

    def refused(self) -> CoordinatorUnproven | None:
        """Return the error of a connection that ended before the first answer; None for a plain one."""
        return None if self.context is None else hung_up(self._endpoint, self._access.trust)

    def explained(self, error: BaseException) -> CoordinatorUnproven | None:
        """Return the error of a failed TLS connection in a line; None for other errors."""
        cause = None if self.context is None else ssl_error_in(error)
        return None if cause is None else explained(self._endpoint, cause, self._access.trust)
