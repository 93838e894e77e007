"""The mutual proof at the start of a link: both ends know the epoch's key, which never crosses the network. Pure.

    dialler                                       acceptor
      MAGIC, epoch, both ranks, nonce   -------->
      <--------  nonce, HMAC("acceptor", epoch, both workers, the acceptor's port, both nonces)
      HMAC("dialler", the same)         -------->

Only members of the epoch have its key, from their agents. Neither end sends or accepts a frame before the other's
proof. The port is the one that the dialler has dialled, and that the acceptor listens on, so that a process on another
port cannot forward.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Final

from unicron_lightning import wire

MAGIC: Final = b"UNICRON1"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
_HELLO: Final = struct.Struct(f"!{len(MAGIC)}sQII{NONCE_BYTES}s")
HELLO_BYTES: Final = _HELLO.size
REPLY_BYTES: Final = NONCE_BYTES + PROOF_BYTES


@dataclass(frozen=True)
class Hello:
    """The dialler's first message."""

    epoch: int
    dialler: int
    acceptor: int
    nonce: bytes

    @classmethod
    def new(cls, epoch: int, dialler: int, acceptor: int) -> Hello:
        """Return a hello with a new nonce; the ends are ranks of the epoch."""
        return cls(epoch, dialler, acceptor, secrets.token_bytes(NONCE_BYTES))

    def packed(self) -> bytes:
        """Return the message."""
        return _HELLO.pack(MAGIC, self.epoch, self.dialler, self.acceptor, self.nonce)

    @classmethod
    def unpacked(cls, data: bytes) -> Hello | None:
        """Parse a message of `HELLO_BYTES`; None if a stranger has sent it."""
        magic, epoch, dialler, acceptor, nonce = _HELLO.unpack(data)
        return cls(epoch, dialler, acceptor, nonce) if magic == MAGIC else None


def proof(epoch: wire.Epoch, role: str, hello: Hello, answer: bytes, port: int) -> bytes:
    """Return the proof of one end.

    Args:
        epoch: its key and the names of the two workers.
        role: "dialler" or "acceptor".
        hello: the dialler's message.
        answer: the acceptor's nonce.
        port: of the acceptor.
    """
    names = (epoch.members[rank].worker.encode() for rank in (hello.dialler, hello.acceptor))
    fields = (b"unicron link", role.encode(), *names, hello.packed(), answer, str(port).encode())
    message = b"".join(len(field).to_bytes(8, "big") + field for field in fields)
    return hmac.digest(epoch.key.encode(), message, "sha256")


def reply(epoch: wire.Epoch, hello: Hello, port: int) -> tuple[bytes, bytes]:
    """Return the message of the acceptor on ``port``, and the proof that it expects then."""
    answer = secrets.token_bytes(NONCE_BYTES)
    return answer + proof(epoch, "acceptor", hello, answer, port), proof(epoch, "dialler", hello, answer, port)


def confirm(epoch: wire.Epoch, hello: Hello, received: bytes, port: int) -> bytes | None:
    """Check the message of `REPLY_BYTES` from the acceptor on ``port``; return the dialler's proof, None if it has no
    proof.
    """
    answer, proven = received[:NONCE_BYTES], received[NONCE_BYTES:]
    if not hmac.compare_digest(proven, proof(epoch, "acceptor", hello, answer, port)):
        return None
    return proof(epoch, "dialler", hello, answer, port)
