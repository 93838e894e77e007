"""Injected faults that an agent carries out: on its workers, its connection, itself (docs/faults.md).

Orders come from the coordinator, which passes them only if it is configured to. A fault of a worker's own script
strikes once the coordinator reports that it is in the event log. Other faults are passed on to the worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

from unicron_lightning import wire
from unicron_lightning.errors import ConfigError
from unicron_lightning.faults.fault import Fault
from unicron_lightning.faults.language import parse

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

    def take(self, message: wire.Inject | wire.FaultNoted) -> None:
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
