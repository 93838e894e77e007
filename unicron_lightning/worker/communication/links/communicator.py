"""Collectives of one epoch over links; the only module of this package that others use."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence, Set
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor

from unicron_lightning import wire
from unicron_lightning.worker.communication.background_connect import abandoned
from unicron_lightning.worker.communication.communicator import CommunicatorAborted, Gate, Handle, Route
from unicron_lightning.worker.communication.links.exchanges import (
    Broadcast,
    Gather,
    HostCollective,
    RoutedTransfer,
    summing,
)
from unicron_lightning.worker.communication.links.greeting import REPLY_BYTES, Hello, confirm
from unicron_lightning.worker.communication.links.hub import Hub
from unicron_lightning.worker.communication.links.session import LinkSession
from unicron_lightning.worker.communication.owned_group import reason_of

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
    device: torch.device | None = None

    def __init__(self, hub: Hub, epoch: wire.Epoch, rank: int, timeout: timedelta) -> None:
        self.rank = rank
        self.world = len(epoch.members)
        self.gate = Gate()
        self._hub = hub
        self._seconds = timeout.total_seconds()
        self._session = hub.open(epoch, rank, self.gate)
        try:
            self._connect()
        except BaseException as error:
            self.abort(str(error).splitlines()[0][:200] if str(error) else repr(error))
            raise

    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._begin(summing(tensor, self.rank, self.world))

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        return self._begin(Gather(received, sent, self.rank))

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return self._begin(Broadcast(tensor, root, self.rank, self.world))

    def transfer(self, routes: Sequence[Route]) -> Handle:
        self._reach({rank for route in routes for rank in self._neighbours(route)})
        return self._begin(RoutedTransfer(routes, self.rank))

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

    def _neighbours(self, route: Route) -> tuple[int, ...]:
        """The ranks before and after this one."""
        if self.rank not in route.ranks:
            return ()
        at = route.ranks.index(self.rank)
        return route.ranks[max(at - 1, 0) : at] + route.ranks[at + 1 : at + 2]

    def _reach(self, ranks: Set[int]) -> None:
        """Connect to further ranks, in a thread of its own: a peer that dies now blocks it for some seconds."""
        session = self._session
        self._hub.extend(session, ranks)
        if session.ready:
            return
        threading.Thread(target=self._connect_further, name="unicron-further-links", daemon=True).start()
        session.gate.wait_for(lambda: session.ready)
        session.gate.check()

    def _connect_further(self) -> None:
        try:
            self._connect()
        except Exception as error:  # noqa: BLE001 - the training thread waits for the link, or for an abort
            self.abort(reason_of(error))

    def _connect(self) -> None:
        session, deadline = self._session, time.monotonic() + self._seconds
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
