"""Collectives of one epoch over links; the only module of this package that others use."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Final

from torch import Tensor

from unicron_lightning import wire
from unicron_lightning.worker.communication.background_connect import abandoned
from unicron_lightning.worker.communication.communicator import CommunicatorAborted, Gate, Handle
from unicron_lightning.worker.communication.links.exchanges import Broadcast, Gather, HostCollective, summing
from unicron_lightning.worker.communication.links.greeting import REPLY_BYTES, Hello, confirm
from unicron_lightning.worker.communication.links.hub import Hub
from unicron_lightning.worker.communication.links.session import LinkSession

DIAL_SECONDS: Final = 5.0
"""Longest time for one attempt to reach a peer."""
_AGAIN_SECONDS: Final = 0.02
_LOOK_SECONDS: Final = 0.2


class LinkCommunicator:
    """Collectives of one epoch on host memory.

    The constructor blocks until all links are there; run it in a thread if a peer may be dead.

    Args:
        hub: the links of this process.
        epoch: its members, their hosts and ports, and its key.
        rank: this worker's place.
        timeout: for all links together.

    Attributes:
        gate: on which the training thread waits.

    Raises:
        CommunicatorAborted: a peer was not reached, or the epoch was superseded.
    """

    tells_success = True

    def __init__(self, hub: Hub, epoch: wire.Epoch, rank: int, timeout: timedelta) -> None:
        self.rank = rank
        self.world = len(epoch.members)
        self.gate = Gate()
        self._hub = hub
        self._session = hub.open(epoch, rank, self.gate)
        try:
            self._connect(time.monotonic() + timeout.total_seconds())
        except BaseException as error:
            self.abort(str(error).splitlines()[0][:200] if str(error) else repr(error))
            raise

    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._begin(summing(tensor, self.rank, self.world))

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        return self._begin(Gather(received, sent, self.rank))

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return self._begin(Broadcast(tensor, root, self.rank, self.world))

    def wait(self, handle: Handle) -> None:
        self.gate.wait(handle, self.abort)

    def abort(self, reason: str) -> None:
        self._hub.abort(self._session, reason)

    def close(self) -> None:
        """End this epoch's collectives; the links stay for the next epoch."""
        self.abort("closed")

    def released(self, seconds: float) -> bool:
        return True  # an abort forgets all tensors

    def broken(self) -> bool:
        """Whether a connection to a peer has been closed."""
        return self.gate.reason is not None

    def _begin(self, exchange: HostCollective) -> Handle:
        return self._hub.begin(self._session, exchange)

    def _connect(self, deadline: float) -> None:
        session = self._session
        while True:
            with self._hub.lock:
                undialled, ready = session.undialled(), session.ready
            session.gate.check()
            if ready:
                return
            if abandoned():
                raise CommunicatorAborted("the epoch was superseded while connecting")
            if time.monotonic() > deadline:
                raise CommunicatorAborted("not all peers were reached in time")
            failed = [peer for peer in undialled if not self._dial(peer)]
            if failed:
                session.gate.wait_for(lambda: session.ready, _AGAIN_SECONDS)
            elif not undialled:
                session.gate.wait_for(lambda: session.ready or bool(session.undialled()), _LOOK_SECONDS)

    def _dial(self, peer: int) -> bool:
        """Connect to a peer, and prove each other's membership; return False if it was not reached."""
        session = self._session
        member = session.epoch.members[peer]
        try:
            sock = socket.create_connection((member.host, member.port), DIAL_SECONDS)
        except OSError:
            return False
        try:
            hello = Hello.new(session.epoch.number, self.rank, peer)
            sock.sendall(hello.packed())
            proven = confirm(session.epoch, hello, _read(sock, session), member.port)
            if proven is None:
                raise OSError("no member of this epoch")
            sock.sendall(proven)
        except OSError:
            sock.close()
            return False
        self._hub.adopt(session, peer, sock)
        return True


def _read(sock: socket.socket, session: LinkSession) -> bytes:
    """Read the acceptor's reply; it may enter the epoch later than this worker."""
    sock.settimeout(_LOOK_SECONDS)
    data = b""
    while len(data) < REPLY_BYTES:
        try:
            received = sock.recv(REPLY_BYTES - len(data))
        except TimeoutError:
            if session.gate.reason is not None or abandoned():
                raise OSError("the epoch is over") from None
            continue
        if not received:
            raise OSError("closed by the other end")
        data += received
    return data
