"""Injected faults that an agent carries out: on its workers, its connection, itself (docs/faults.md).

Orders come from the coordinator, which passes them only if it is configured to. A fault of a worker's own script
strikes once the coordinator reports that it is in the event log. Other faults are passed on to the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Final

from unicron_lightning import wire
from unicron_lightning.errors import ConfigError
from unicron_lightning.faults.fault import Fault, parse

logger = logging.getLogger(__name__)


class AgentFaults:
    """Carries out faults that an agent can inject. Lives in the agent's event loop.

    Args:
        signals: sends a signal to a worker's process, if it exists.
        tell: passes a message on to a worker.
        cut: makes the connection to the coordinator carry nothing for a number of seconds (None: permanently).
    """

    def __init__(
        self,
        signals: Callable[[str, int], None],
        tell: Callable[[str, wire.ToWorker], bool],
        cut: Callable[[float | None], None],
    ) -> None:
        self._signals = signals
        self._tell = tell
        self._cut = cut

    def take(self, message: wire.Inject | wire.FaultRecorded) -> None:
        """Carry out an order, or a fault of a worker's script that is now in the event log."""
        try:
            fault = parse(message.fault)
        except ConfigError as error:  # a newer coordinator's
            logger.error("fault_unreadable error=%s", error)
            return
        worker = message.worker
        if isinstance(message, wire.Inject):
            if worker is not None and (fault.waits or fault.kind not in ("kill", "stop")):
                self._tell(worker, message)
            else:
                self._strike(fault, worker)
        else:
            if message.strikes and fault.kind in ("stop", "drop network", "kill agent"):
                self._strike(fault, message.worker)
            self._tell(message.worker, message)  # a stopped worker reads it when it resumes

    def _strike(self, fault: Fault, worker: str | None) -> None:
        logger.warning("fault_strikes fault=%r worker=%s", fault.kind, worker)
        match fault.kind:
            case "kill" if worker is not None:
                self._signals(worker, fault.signal)
            case "stop" if worker is not None:
                self._signals(worker, signal.SIGSTOP)
                if fault.duration is not None:
                    asyncio.get_running_loop().call_later(fault.duration, self._signals, worker, signal.SIGCONT)
            case "kill agent":
                os.kill(os.getpid(), fault.signal)
            case "drop network":
                self._cut(fault.duration)


_SEND_SECONDS: Final = 1.0
_CHUNK_BYTES: Final = 1 << 16


class Cut:
    """A cut of one connection, from its creation on. Requires asyncio's own event loop and ``dup2``.

    Args:
        transport: transport of a TCP connection.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._place: int = transport.get_extra_info("socket").fileno()
        self._real: int | None = os.dup(self._place)
        nowhere, self._written = socket.socketpair()
        nowhere.setblocking(False)
        self._written.setblocking(False)
        self._put(nowhere.fileno())
        nowhere.close()

    def heal(self) -> None:
        """Restore the connection; if either end has closed it meanwhile, it ends now."""
        if self._real is None:
            return
        if not self._transport.is_closing():
            with contextlib.suppress(OSError):
                self._send_late(self._real)
            self._put(self._real)
        self.forget()

    def forget(self) -> None:
        """Close the socket that was set aside."""
        if self._real is not None:
            os.close(self._real)
            self._real = None
            self._written.close()

    def _put(self, source: int) -> None:
        self._transport.pause_reading()  # the loop must not watch the old socket under the new one's number
        os.dup2(source, self._place, inheritable=False)
        self._transport.resume_reading()

    def _send_late(self, real: int) -> None:
        poll = select.poll()
        poll.register(real, select.POLLOUT)
        while data := self._read_written():
            while data:
                if not poll.poll(1000 * _SEND_SECONDS):
                    return
                data = data[os.write(real, data) :]

    def _read_written(self) -> bytes:
        try:
            return self._written.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return b""
