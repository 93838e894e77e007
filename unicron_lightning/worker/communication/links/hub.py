"""A worker's links: accepts, reads and writes them in one thread, over all epochs.

An epoch uses the links to its peers that exist already, and has the others dialled. Each end of a kept link tells the
other that it uses the link in the new epoch; a link that ends before that is dialled again, and one that ends later
aborts the epoch at this worker. Abort, close and all exchanges are callable from any thread.
"""

from __future__ import annotations

import hmac
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from unicron_lightning import wire
from unicron_lightning.worker.communication.communicator import Gate, Handle
from unicron_lightning.worker.communication.links.exchanges import HostCollective
from unicron_lightning.worker.communication.links.greeting import (
    HELLO_BYTES,
    PROOF_BYTES,
    Hello,
    reply,
)
from unicron_lightning.worker.communication.links.link import GOODBYE, RESUME, Header, Link, LinkBroken, end
from unicron_lightning.worker.communication.links.session import LinkSession

logger = logging.getLogger(__name__)

MOST_STRANGERS: Final = 256
"""Most connections without a proof; further ones replace the oldest."""
GREETING_SECONDS: Final = 60.0
"""Longest time until a connection has proven its origin; a member may be ahead of this one by an epoch."""
FLUSH_SECONDS: Final = 2.0
"""Longest time for which `Hub.close` waits until the last frames are sent."""
KEPT_LINKS: Final = 64
"""Most links to members that are no peers in the present epoch; they may be again in a later one."""
_READ: Final = select.EPOLLIN
_WRITE: Final = select.EPOLLOUT


@dataclass
class _Stranger:
    """An accepted connection before its proof."""

    sock: socket.socket
    since: float
    data: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None
    expected: bytes = b""


class Hub:
    """The links of this process.

    Args:
        host: this machine's address for data-plane sockets.

    Attributes:
        port: on which other members reach this one.
    """

    def __init__(self, host: str) -> None:
        self.lock = threading.RLock()
        self._listener = socket.create_server((host, 0), backlog=1024, family=_family(host))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._wake_read, self._wake_write = socket.socketpair()
        self._links: dict[int, Link] = {}  # by descriptor
        self._strangers: dict[int, _Stranger] = {}
        self._session: LinkSession | None = None
        self._closed = False
        for sock in (self._listener, self._wake_read):
            self._epoll.register(sock, _READ)
        self._thread = threading.Thread(target=self._run, name="unicron-links", daemon=True)
        self._thread.start()

    def open(self, epoch: wire.Epoch, rank: int, gate: Gate) -> LinkSession:
        """Begin an epoch, which ends the one before; use the links to its peers that exist."""
        with self.lock:
            if self._session is not None:
                self.abort(self._session, "the epoch was superseded")
            session = self._session = LinkSession(epoch, rank, gate)
            if self._closed:
                session.gate.shut("closed")
                return session
            self._keep({member.worker for member in epoch.members}, session)
            by_worker = {link.worker: link for link in self._links.values()}
            for peer in session.peers:
                if (link := by_worker.get(epoch.members[peer].worker)) is not None:
                    self._use(session, peer, link)
            for stranger in list(self._strangers.values()):
                self._greet(stranger)
            for link in list(self._links.values()):
                self._guarded(link.resume)
                self._watch(link.sock.fileno(), link)
            return session

    def extend(self, session: LinkSession, ranks: Set[int]) -> None:
        """Have further ranks as peers in the epoch; use the links to them that exist."""
        with self.lock:
            session.gate.check()
            session.further |= ranks
            by_worker = {link.worker: link for link in self._links.values()}
            for rank in ranks - session.links.keys():
                if (link := by_worker.get(session.epoch.members[rank].worker)) is not None:
                    self._use(session, rank, link)

    def adopt(self, session: LinkSession, rank: int, sock: socket.socket) -> None:
        """Use a connection that this end has dialled, after both proofs."""
        with self.lock:
            if session is not self._session or session.gate.reason is not None:
                end(sock)
                return
            self._add(session, rank, sock)

    def begin(self, session: LinkSession, exchange: HostCollective) -> Handle:
        """Begin an exchange of the epoch."""
        with self.lock:
            session.gate.check()
            try:
                handle = session.begin(exchange)
            except (ValueError, LinkBroken) as error:
                if isinstance(error, LinkBroken):
                    self._drop(error.link, str(error))
                self.abort(session, str(error))
                session.gate.check()
                raise
            self._watch_writes(session)
            return handle

    def abort(self, session: LinkSession, reason: str) -> None:
        """End an epoch's exchanges: nothing is written to their tensors afterwards, and no frame has their bytes."""
        session.gate.shut(reason)
        with self.lock:
            session.end()
            for link in list(self._links.values()):
                if not link.forget(session.epoch.number):
                    self._drop(link, "a frame was cut short by an abort")

    def close(self) -> None:
        """Take leave of all peers, and release everything; idempotent."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            if self._session is not None:
                self._session.gate.shut("closed")
                number = self._session.epoch.number
                for link in list(self._links.values()):
                    self._guarded(partial(link.send, Header(GOODBYE, number)))
            self._wake_write.send(b"x")
        self._thread.join(2 * FLUSH_SECONDS)

    # ---- frames: link.FrameReceiver

    def place(self, link: Link, header: Header) -> memoryview | None:
        session = self._session
        if header.kind in (RESUME, GOODBYE):
            return memoryview(b"")
        if session is None or header.epoch > session.epoch.number:
            return None
        if header.epoch < session.epoch.number or session.gate.reason is not None:
            return memoryview(bytearray(header.length))
        return session.place(header)

    def arrived(self, link: Link, header: Header) -> None:
        session = self._session
        if header.kind == RESUME:
            link.resumed = max(link.resumed, header.epoch)
            if session is not None:
                _notify(session)
        elif header.kind == GOODBYE:
            link.parting = True
        elif session is not None and header.epoch == session.epoch.number and session.gate.reason is None:
            session.arrived(header)
            self._watch_writes(session)

    # ---- the thread

    def _run(self) -> None:
        leave_at: float | None = None
        while True:
            events = self._epoll.poll(0.05 if leave_at else 1.0)
            with self.lock:
                for descriptor, mask in events:
                    self._contained(descriptor, mask)
                self._expire()
                if not self._closed:
                    continue
                leave_at = leave_at or time.monotonic() + FLUSH_SECONDS
                if time.monotonic() >= leave_at or not any(link.unsent for link in self._links.values()):
                    self._release()
                    return

    def _contained(self, descriptor: int, mask: int) -> None:
        """Process an event; an error of this project's own ends the epoch here, not the thread."""
        try:
            self._event(descriptor, mask)
        except Exception as error:
            logger.exception("link_event_failed")
            if self._session is not None:
                self.abort(self._session, f"an error in the links' thread: {error!r}")

    def _event(self, descriptor: int, mask: int) -> None:
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor == self._wake_read.fileno():
            self._epoll.unregister(descriptor)
        elif (stranger := self._strangers.get(descriptor)) is not None:
            self._hear(stranger)
        elif (link := self._links.get(descriptor)) is not None:
            if mask & _WRITE:
                self._guarded(link.flush)
            if mask & _READ:
                self._guarded(link.read)
            elif mask & (select.EPOLLHUP | select.EPOLLERR):
                self._drop(link, "closed by the other end")
            if descriptor in self._links:
                self._watch(descriptor, link)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do something with a link; what arrives may be sent on by another, and the one that fails ends. If the
        members differ, the epoch ends.
        """
        try:
            act()
        except LinkBroken as error:
            self._drop(error.link, str(error))
        except ValueError as error:
            assert self._session is not None
            self.abort(self._session, str(error))

    def _watch_writes(self, session: LinkSession) -> None:
        for link in list(session.links.values()):
            self._watch(link.sock.fileno(), link)

    def _watch(self, descriptor: int, link: Link) -> None:
        wanted = (0 if link.waits else _READ) | (_WRITE if link.unsent else 0)
        if descriptor in self._links and link.watched != wanted:
            self._epoll.modify(descriptor, wanted)
            link.watched = wanted

    def _add(self, session: LinkSession, rank: int, sock: socket.socket) -> None:
        """Use a new connection, in place of an older one to the same worker."""
        worker = session.epoch.members[rank].worker
        for old in [link for link in self._links.values() if link.worker == worker]:
            session.links.pop(rank, None)
            self._drop(old, "replaced")
        link = Link(sock, worker, self)
        self._links[sock.fileno()] = link
        self._epoll.register(sock, _READ)
        link.watched = _READ
        link.resumed = session.epoch.number
        self._use(session, rank, link)
        _notify(session)

    def _use(self, session: LinkSession, rank: int, link: Link) -> None:
        self._guarded(lambda: session.use(rank, link))
        self._watch(link.sock.fileno(), link)

    def _drop(self, link: Link, reason: str) -> None:
        """Close a link. An epoch that both ends use it in is aborted, unless the other end has taken leave."""
        descriptor = link.sock.fileno()
        if self._links.pop(descriptor, None) is None:
            return
        self._epoll.unregister(descriptor)
        link.close()
        session = self._session
        if session is None or (rank := session.rank_of(link)) is None:
            return
        del session.links[rank]
        if link.resumed >= session.epoch.number and not link.parting and session.gate.reason is None:
            self.abort(session, f"the connection to worker {link.worker} has ended: {reason}")
        _notify(session)

    def _keep(self, workers: set[str], session: LinkSession) -> None:
        peers = {session.epoch.members[peer].worker for peer in session.peers}
        others = [link for link in self._links.values() if link.worker not in peers]
        spare = [link for link in others if link.worker in workers]
        for link in others:
            if link.worker not in workers or link in spare[:-KEPT_LINKS]:
                self._drop(link, "no longer used")

    # ---- greetings of those that dial

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # none is left, it has gone again, or there is no descriptor
                return
            sock.setblocking(False)
            while len(self._strangers) >= MOST_STRANGERS:
                self._turn_away(next(iter(self._strangers.values())))
            self._strangers[sock.fileno()] = _Stranger(sock, time.monotonic())
            self._epoll.register(sock, _READ)

    def _hear(self, stranger: _Stranger) -> None:
        length = PROOF_BYTES if stranger.expected else HELLO_BYTES
        try:
            data = stranger.sock.recv(length - len(stranger.data)) if len(stranger.data) < length else b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._turn_away(stranger)
            return
        stranger.data += data
        if len(stranger.data) < length:
            return
        if stranger.expected:
            self._admit(stranger)
            return
        stranger.hello = Hello.unpacked(bytes(stranger.data))
        self._greet(stranger)

    def _greet(self, stranger: _Stranger) -> None:
        """Answer a hello, once this worker is in its epoch."""
        hello, session = stranger.hello, self._session
        if stranger.expected or (hello is None and len(stranger.data) < HELLO_BYTES):
            return
        if hello is not None and (session is None or hello.epoch > session.epoch.number):
            return  # its epoch will follow
        if hello is None or session is None or not _fits(hello, session):
            self._turn_away(stranger)
            return
        answer, stranger.expected = reply(session.epoch, hello, self.port)
        stranger.data.clear()
        try:
            stranger.sock.send(answer)
        except OSError:
            self._turn_away(stranger)

    def _admit(self, stranger: _Stranger) -> None:
        hello, session = stranger.hello, self._session
        assert hello is not None and session is not None
        if not hmac.compare_digest(bytes(stranger.data), stranger.expected) or not _fits(hello, session):
            self._turn_away(stranger)
            return
        descriptor = stranger.sock.fileno()
        del self._strangers[descriptor]
        self._epoll.unregister(descriptor)
        self._add(session, hello.dialler, stranger.sock)

    def _turn_away(self, stranger: _Stranger) -> None:
        descriptor = stranger.sock.fileno()
        del self._strangers[descriptor]
        self._epoll.unregister(descriptor)
        end(stranger.sock)

    def _expire(self) -> None:
        late = time.monotonic() - GREETING_SECONDS
        for stranger in [each for each in self._strangers.values() if each.since < late]:
            self._turn_away(stranger)

    def _release(self) -> None:
        for stranger in list(self._strangers.values()):
            self._turn_away(stranger)
        for link in list(self._links.values()):
            self._drop(link, "closed")
        for sock in (self._listener, self._wake_read, self._wake_write):
            sock.close()
        self._epoll.close()


def _fits(hello: Hello, session: LinkSession) -> bool:
    """Whether a dialler may dial this worker in the present epoch."""
    return (
        hello.epoch == session.epoch.number
        and hello.acceptor == session.rank
        and hello.dialler < session.world  # also one that needs a further link before this worker does
        and session.gate.reason is None
    )


def _notify(session: LinkSession) -> None:
    with session.gate.condition:
        session.gate.condition.notify_all()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
