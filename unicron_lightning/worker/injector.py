"""Injects faults into this worker at the engine's points (docs/faults.md).

The injector replaces `Engine.fault`, which does nothing without injected faults. A strike is in the event log before it
happens: the worker first asks the coordinator, which also knows the strikes on this worker's predecessors.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from unicron_lightning import environ, wire
from unicron_lightning.errors import ConfigError
from unicron_lightning.faults.arrivals import SCRIPT, FaultTimer, Point, draw
from unicron_lightning.faults.fault import EXAMPLES, Example, Fault, parse, text
from unicron_lightning.worker.communication.communicator import CommunicatorAborted
from unicron_lightning.worker.engine import Engine

logger = logging.getLogger(__name__)

NOTED_SECONDS: Final = 30.0
"""Time to wait for the note of a fault, since the coordinator may be down. An unrecorded fault does not strike."""
_OUTSIDE: Final = ("validation", SCRIPT)
"""Phases outside any operation."""


class Injector:
    """One worker's faults. The training thread calls it at each point; any thread may call `add`.

    Args:
        engine: the engine whose points are observed.
        claim: asked before each strike for permission, with the fault's key; performs actions that a worker cannot do
            to itself. Default: the coordinator, through the agent.
    """

    def __init__(self, engine: Engine, claim: Callable[[str, Fault, Point], bool] | None = None) -> None:
        self._engine = engine
        self._claim = claim or self._noted
        self._others: Callable[..., None] = engine.fault
        self._watches: list[tuple[str, FaultTimer, Fault]] = []
        self._struck: dict[str, int] = {}
        self._claims = itertools.count(1)
        self._began = time.monotonic()
        self._own = environ.read() if environ.under_agent() else None
        self._step = -1
        self._forwards = 0
        self._slow: tuple[float, float | None, int | None] | None = None
        self._started: float | None = None
        self._took = 0.0

    @classmethod
    def of(cls, engine: Engine) -> Injector:
        """The engine's injector, installed if necessary."""
        if not isinstance(engine.fault, cls):
            engine.fault = cls(engine)
        return engine.fault

    def add(self, key: str, fault: Fault, seed: int = 0, ordered: Fault | None = None) -> None:
        """Add a fault to watch for.

        Args:
            key: the fault's name in the task; the same in all workers.
            fault: the fault; ignored if it is for another task.
            seed: for random choices, if the fault has no seed of its own.
            ordered: the fault in the words of an operator, for the logs; None: `fault`.
        """
        own = self._own
        if fault.task not in (None, own.task if own else None):
            return
        start = (self._engine.world.rank, own.round) if own else ()
        watch = FaultTimer(fault, draw(fault, key, seed=seed).random(), draw(fault, key, *start, seed=seed))
        self._watches = [*self._watches, (key, watch, ordered or fault)]

    def order(self, order: wire.Inject) -> None:
        """From the control thread: add an operator's fault for this worker."""
        try:
            self.add(order.key, parse(order.fault), ordered=parse(order.ordered) if order.ordered else None)
        except ConfigError as error:  # sent by a newer coordinator; this thread must survive
            logger.error("fault_unreadable error=%s", error)

    def __call__(self, phase: str, *where: Any) -> None:
        """Handle the engine's point: inject all faults that are due."""
        self._others(phase, *where)
        now = time.monotonic()
        if phase == "micro_batch" and self._started is not None:
            self._took, self._started = now - self._started, None
        point = self._point(phase, where, now)
        for key, watch, named in self._watches:
            if watch.due(point):
                self._strike(key, watch, named, point, where)
        if phase == "forward":
            self._drag(point)
            self._started = time.monotonic()

    def _point(self, phase: str, where: tuple[Any, ...], now: float) -> Point:
        world, index = self._engine.world, None
        if self._engine.step != self._step or phase == "exchange":
            self._step, self._forwards = self._engine.step, 0
        if phase == "forward":
            index, self._forwards = self._forwards, self._forwards + 1
        elif phase in ("micro_batch", "launched"):
            index = where[1]
        elif phase == SCRIPT and self._forwards:
            index = self._forwards - 1
        return Point(
            phase=phase,
            name=where[0] if phase == SCRIPT else None,
            index=index,
            step=self._engine.step,
            rank=world.rank,
            nodes=world.nodes or ("" if self._own is None else self._own.node,) * world.size,
            has_state=self._engine.has_state,
            at=now - self._began,
        )

    def _strike(self, key: str, watch: FaultTimer, named: Fault, point: Point, where: tuple[Any, ...]) -> None:
        fault = watch.fault
        if fault.rank == "all":
            key = f"{key} at rank {point.rank}"
        if not self._claim(key, named, point):
            watch.over = True
            return
        watch.struck += 1
        watch.over = watch.struck == fault.most
        logger.warning("fault_strikes fault=%r rank=%d step=%d", text(named), point.rank, point.step)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), fault.signal)
            case "hang":
                hang(str(fault.argument or "sleep"), fault.duration)
            case "raise":
                inside = point.phase not in _OUTSIDE and self._engine.control is not None
                raise library_error(str(fault.argument), inside)
            case "exit":
                leave(int(fault.argument or 0))
            case "slow":
                until = None if fault.duration is None else time.monotonic() + fault.duration
                last = None if fault.steps is None else point.step + fault.steps - 1
                self._slow = float(fault.argument or 1), until, last
            case "corrupt gradient":
                corrupt_next_gradient(where[2])

    def _drag(self, point: Point) -> None:
        """Delay a slow worker's micro-batch in proportion to the duration of the one before."""
        if self._slow is None:
            return
        factor, until, last = self._slow
        if (until is not None and time.monotonic() >= until) or (last is not None and point.step > last):
            self._slow = None
            return
        time.sleep((factor - 1) * self._took)

    def _noted(self, key: str, fault: Fault, point: Point) -> bool:
        """Whether the fault may strike and is in the event log."""
        control = self._engine.control
        if control is None:
            number = self._struck.get(key, 0)
            if fault.kind in ("kill agent", "kill coordinator", "drop network", "stop"):
                logger.error("fault_refused fault=%r reason=no agent", text(fault))
                return False
            self._struck[key] = number + 1
            return fault.most is None or number < fault.most
        answer = control.claim(
            wire.FaultDue(
                worker=control.worker,
                claim=f"{control.worker} {next(self._claims)}",
                key=key,
                most=fault.most,
                fault=text(replace(fault, task=None)),
                fields={
                    "rank": point.rank,
                    "step": point.step,
                    "phase": point.name or point.phase,
                    "index": point.index,
                },
            ),
            NOTED_SECONDS,
        )
        if answer is None or not answer.strikes:
            reason = f"not noted within {NOTED_SECONDS:g} s" if answer is None else answer.reason
            logger.warning("fault_refused fault=%r reason=%s", text(fault), reason)
            return False
        return True


_NAP_SECONDS = 0.05
_HOLD_SECONDS = 4000
"""Longest sleep of usleep in whole seconds; its limit in microseconds is slightly higher."""


def hang(how: str, seconds: float | None) -> None:
    """Block for ``seconds`` (None: for ever).

    Args:
        how: ``sleep``, ``spin``, or ``gil``: sleep with the interpreter's lock, so that no other thread runs either,
            except for a moment at a signal.
        seconds: duration.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if how == "sleep":
            time.sleep(min(_NAP_SECONDS, left))
        elif how == "gil":
            ctypes.PyDLL(None).usleep(ctypes.c_uint(int(1e6 * min(_HOLD_SECONDS, left))))


def leave(status: int) -> None:
    """End the process at once, as a library's ``exit`` does."""
    logging.shutdown()
    os._exit(status)


def library_error(kind: str, in_operation: bool) -> Exception:
    """The exception that a library raises for an error of this kind.

    Args:
        kind: one of `EXAMPLES`.
        in_operation: whether the error is raised in an operation of the engine. There, collectives raise broken
            connections as `CommunicatorAborted`, which is handled in place.
    """
    example = EXAMPLES[kind]
    raised = _class_of(example)(example.text)
    if not (example.collective and in_operation):
        return raised
    aborted = CommunicatorAborted(example.text)
    aborted.__cause__ = raised
    return aborted


def corrupt_next_gradient(module: torch.nn.Module) -> None:
    """Make the next backward produce NaN for the first parameter that needs a gradient."""
    parameter = next((p for p in module.parameters() if p.requires_grad), None)
    if parameter is None:
        return

    def spoil(gradient: Tensor) -> Tensor:
        handle.remove()
        return torch.full_like(gradient, float("nan"))

    handle = parameter.register_hook(spoil)


def _class_of(example: Example) -> type[Exception]:
    path, _, name = example.exception.rpartition(".")
    found: type[Exception] = getattr(import_module(path or "builtins"), name, RuntimeError)
    return found
