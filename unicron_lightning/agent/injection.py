"""Faults on purpose that an agent carries out: upon its workers, its connection, itself (docs/faults.md).

Orders come from the coordinator, which lets them pass only if it is configured to; what a worker's own script has due
comes by the coordinator's word that it is in the event log. Other faults are passed on to the worker.
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
    """Strikes what an agent can strike. Lives in the agent's event loop.

    Args:
        signals: sends a signal to a worker's process, if there is one.
        tell: passes a message on to a worker.
        cut: has the connection to the coordinator carry nothing for so many seconds (None: for ever).
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
        """Carry out an order, or what a worker's script has due and is noted now."""
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
            self._tell(message.worker, message)  # a stopped worker reads it when it goes on

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
