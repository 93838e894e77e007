"""The mutual proof on links to the coordinator: both ends know the token, which never crosses the network. Pure.

    client                                                coordinator
      GET /v1/challenge?nonce=CLIENT  ------------------>
      <------------------ SERVER, address, HMAC("coordinator", CLIENT, SERVER, address)
      request, Authorization: Unicron CLIENT:SERVER:HMAC("client", CLIENT, SERVER, address, method, target, body)
                                      ------------------>
      <------------------ answer, Unicron-Proof: HMAC("answer", CLIENT, SERVER, address, status, body)

The client sends only its nonce before it has checked the coordinator's proof, and accepts no answer without a proof of
its own, since another process may have taken the port in between. A WebSocket is opened by such a request, so the proof
covers the persistent connection.

`address` is the address of the coordinator's end of the connection. A client that knows the address it has connected to
compares both, and thus detects a process that forwards to the true coordinator from another address. On an
encrypted link it is the SHA-256 of the coordinator's certificate instead (`tls.name_of`) and is always compared, which
detects a process that ends the encryption itself.

A challenge is accepted once, within `CHALLENGE_SECONDS`, by the process that issued it. Unused challenges take no
memory, because they carry a code of that process. Only used ones are kept, until they expire, and using one requires
the token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import dataclass
from typing import Final

from unicron_lightning.credentials import Token
from unicron_lightning.errors import CoordinatorUnproven

CHALLENGE_SECONDS: Final = 60.0
MOST_USED: Final = 200_000
"""Largest number of challenges used within that time; further requests are refused until some expire."""
MOST_CHALLENGE_BYTES: Final = 4096
"""Largest size of the answer to a request for a challenge."""
MOST_REQUEST_BYTES: Final = 1 << 20
"""A request's body is smaller: it is read before its proof can be checked."""
SCHEME: Final = "Unicron"
ANSWER_HEADER: Final = "Unicron-Proof"
_NONCE: Final = re.compile(r"[0-9a-f]{64}")
_CHALLENGE: Final = re.compile(r"[0-9a-f]{32}[0-9a-f]{16}[0-9a-f]{64}")
_HEADER: Final = re.compile(rf"{SCHEME} ([0-9a-f]{{64}}):([0-9a-f]{{112}}):([0-9a-f]{{64}})")


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """One exchange between a client and the coordinator, as both ends must see it.

    Attributes:
        client: the client's nonce.
        server: the coordinator's challenge.
        address: the coordinator's end of the connection.
    """

    client: str
    server: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Parsed header of a request."""

    client: str
    server: str
    proof: str


def new_nonce() -> str:
    """Return a new client nonce of 256 random bits."""
    return secrets.token_hex(32)


def is_nonce(text: str) -> bool:
    """Whether ``text`` has the form of a client's nonce."""
    return _NONCE.fullmatch(text) is not None


def coordinator_proof(secret: str, transcript: Transcript) -> str:
    """Return the coordinator's proof, which requires the token."""
    return _code(secret, "unicron coordinator", transcript, ())


def client_proof(secret: str, transcript: Transcript, method: str, target: str, body: bytes) -> str:
    """Return the client's proof for this request, which requires the token; ``target`` is path and query."""
    return _code(secret, "unicron client", transcript, (method, target, hashlib.sha256(body).hexdigest()))


def answer_proof(secret: str, transcript: Transcript, status: int, body: bytes) -> str:
    """Return the coordinator's proof for this answer, which requires the token."""
    return _code(secret, "unicron answer", transcript, (str(status), hashlib.sha256(body).hexdigest()))


def authorization(secret: str, transcript: Transcript, method: str, target: str, body: bytes = b"") -> str:
    """Return the value of the header ``Authorization``."""
    proof = client_proof(secret, transcript, method, target, body)
    return f"{SCHEME} {transcript.client}:{transcript.server}:{proof}"


def scrape_credential(secret: str) -> str:
    """Return the credential for ``/metrics`` alone: derived from the token, which it does not reveal."""
    return hmac.digest(secret.encode(), b"unicron metrics", "sha256").hex()


def parse_authorization(header: str) -> Claim | None:
    """Return the claim in a header; None if the header does not have this form."""
    found = _HEADER.fullmatch(header)
    return None if found is None else Claim(client=found[1], server=found[2], proof=found[3])


def same(one: str, other: str) -> bool:
    """Compare proofs in constant time."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))


def check_coordinator(
    endpoint: str, token: Token, client: str, answer: bytes, dialled: str, *, forwarded: bool
) -> Transcript:
    """Check the answer to the request for a challenge.

    Args:
        endpoint: as the user wrote it, for messages.
        token: the shared secret.
        client: the nonce that was sent.
        answer: body of the answer.
        dialled: `address_of` the other end of the connection, or `tls.name_of` its certificate.
        forwarded: whether the coordinator of a plain link may have another address.

    Raises:
        CoordinatorUnproven: the process is no coordinator with this token, or the coordinator has another address.
    """
    try:
        found = json.loads(answer)
        transcript = Transcript(client=client, server=str(found["nonce"]), address=str(found["address"]))
        proven = same(str(found["proof"]), coordinator_proof(token.secret, transcript))
    except (ValueError, KeyError, TypeError, RecursionError):
        proven = False
    if not proven:
        raise unproven(endpoint, token)
    if dialled.startswith("tls:") and transcript.address != dialled:
        raise CoordinatorUnproven(
            f"what answers at {endpoint} is not the coordinator, whose certificate is another: it ends the encryption "
            "itself and forwards"
        )
    if not forwarded and transcript.address != dialled:
        raise CoordinatorUnproven(
            f"what answers at {endpoint} forwards to a coordinator at {transcript.address.partition('@')[0]}: "
            "expected the option forwarded if that is meant (an SSH tunnel, a Kubernetes service)"
        )
    return transcript


def unproven(endpoint: str, token: Token) -> CoordinatorUnproven:
    """Return the error for an answer without a proof."""
    return CoordinatorUnproven(
        f"what answers at {endpoint} cannot prove that it knows the token (that of {token.origin})"
    )


class Challenges:
    """The challenges of one coordinator process; times are monotonic seconds.

    Args:
        key: random, known to this process alone.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._used: dict[str, float] = {}

    def issue(self, client: str, now: float) -> str:
        """Return a challenge for a client's nonce."""
        head = f"{secrets.token_hex(16)}{int(1e3 * (now + CHALLENGE_SECONDS)):016x}"
        return head + self._seal(client, head)

    def accept(
        self, secret: str, claim: Claim, address: str, *, method: str, target: str, body: bytes, now: float
    ) -> bool:
        """Whether a request is proven; if so, its challenge is used up."""
        if not self._open(claim, now):
            return False
        transcript = Transcript(client=claim.client, server=claim.server, address=address)
        if not same(claim.proof, client_proof(secret, transcript, method, target, body)):
            return False
        self._used[claim.server] = _expiry(claim.server)
        return True

    def _open(self, claim: Claim, now: float) -> bool:
        if _CHALLENGE.fullmatch(claim.server) is None:
            return False
        self._forget(now)
        if claim.server in self._used or len(self._used) >= MOST_USED or _expiry(claim.server) <= now:
            return False
        return same(claim.server[48:], self._seal(claim.client, claim.server[:48]))

    def _forget(self, now: float) -> None:
        # Entries are nearly in the order of their expiry; a short delay at the front costs nothing.
        while self._used:
            first = next(iter(self._used))
            if self._used[first] > now:
                return
            del self._used[first]

    def _seal(self, client: str, head: str) -> str:
        return hmac.digest(self._key, f"{client}:{head}".encode(), "sha256").hex()


def _expiry(challenge: str) -> float:
    return int(challenge[32:48], 16) / 1e3


def _code(secret: str, purpose: str, transcript: Transcript, rest: tuple[str, ...]) -> str:
    fields = (purpose, transcript.client, transcript.server, transcript.address, *rest)
    message = b"".join(len(data := field.encode(errors="replace")).to_bytes(8, "big") + data for field in fields)
    return hmac.digest(secret.encode(), message, "sha256").hex()
