"""A worker's part in its task, from the first ``fit`` to the end of the process."""

from __future__ import annotations

import atexit
import base64
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from unicron_lightning import environ, wire
from unicron_lightning.checkpoints.files import age, left_records, record_path
from unicron_lightning.copying import OfProcess
from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.stacks import StackFile
from unicron_lightning.worker import codec
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.communication.backends import DataPlane
from unicron_lightning.worker.communication.gloo import leave_buried, wait_buried
from unicron_lightning.worker.communication.owned_group import wait_destroyed
from unicron_lightning.worker.control.activity import Activity
from unicron_lightning.worker.control.monitor import Monitor
from unicron_lightning.worker.control.statistics import Summary
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.engine import Engine, Fabric, World
from unicron_lightning.worker.injector import Injector
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.siblings import HOOKS_SECONDS, EndingSiblings

logger = logging.getLogger(__name__)

_LINGER_SECONDS = 0.1
"""Seconds that a finished worker keeps its sockets open, as others may still read its last messages.

If that is too short, the coordinator notifies them and they finish among themselves.
"""
_BURIED_SECONDS = 2.0
"""Seconds that the end of the process waits for closed communicators: one in its destructor would abort the process."""
_MEANS = "means of evaluation"
_FIT = "fit"
_RESULTS = "results of fit"
"""Record of the task's present fit."""
_DESTROYED_SECONDS = 20.0
"""Seconds that the end of the process waits for NCCL groups in their aborts and destructors, for the same reason."""


class FitPassed(UnicronError):
    """This worker's script is in another ``fit`` than its task; no `ConfigError`, which would end the task."""


def _close(known: weakref.ref[Session]) -> None:
    """Close a session, if there is a trainer that uses it."""
    session = known()
    if session is not None:
        session.close()


class Session(OfProcess):
    """Control connection and engine of this process; without an agent, a world of this process alone.

    Args:
        device: device of the model; decides the back-end of the data plane.
        capacity: most workers the task can use.
        on_world: called with each new world.
        fabric: built with each epoch's communicator, if given.

    Attributes:
        is_joiner: whether the task ran already when this worker was started.
        joins: whether this joiner has not reached its first step.
        fits: number of the script's ``fit`` calls so far, those that were left out among them.
        left_out: number of these, which the task has finished.
        results: number and encoded results of the last ``fit`` that this worker has ended, and has not left out.
        record: path of this worker's record of its newest checkpoint, see `checkpoints.files`; "" without an agent.
        closing: called when the session ends, before its communicator is released.

    Raises:
        ConfigError: under torchrun with another rendezvous back-end.
    """

    def __init__(
        self, device: torch.device, capacity: int, on_world: Callable[[World], None], fabric: Fabric | None = None
    ) -> None:
        self.control: Control | None = None
        self.is_joiner = self.joins = False
        self.resume: Sequence[wire.Checkpoint] = ()
        self.memory: Sequence[wire.StateOffer] = ()
        self.fits = self.left_out = 0
        self._means: dict[str, str] = {}
        """Those of the evaluations since the last ``fit``, by their keys."""
        self.results: tuple[int, str] | None = None
        self.record = ""
        self.closing: Callable[[], None] = _nothing
        self._runs = 0
        self._stacks: StackFile | None = None
        self._siblings: EndingSiblings | None = None
        self._looks = False
        """Whether checkpoints may be complete that an earlier life of the task has not reported."""
        self._ready_to_abort = threading.Event()
        activity = Activity()
        self.monitor = Monitor("", activity)
        if environ.under_agent():
            own = environ.read()
            folder = Path(own.agent_socket).parent
            self._stacks, self._siblings = StackFile(folder), EndingSiblings(folder)
            self.monitor = Monitor(own.worker, activity, on_cpu=device.type == "cpu")
            self.control = Control(own.agent_socket, own.worker, own.local_rank, self._on_failure, self.monitor)
            self._plane = DataPlane(own.host, device if fabric is None else torch.device("cpu"))
            self.control.hello(capacity, None if fabric is None else fabric.granularity, self._plane.port)
            welcome = self.control.wait_welcome()
            if welcome.founder:
                welcome = self._wait_founded(self.control)
            self.record = str(record_path(folder, welcome.run))
            self.is_joiner, self.resume, self.memory = not welcome.founder, welcome.resume, welcome.memory
            self.joins = self.is_joiner
            self._looks = welcome.founder and welcome.life > 1
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"this process is one of WORLD_SIZE={os.environ['WORLD_SIZE']} but has no Unicron agent; start the "
                "script with `torchrun --rdzv-backend unicron`"
            )
        else:
            self._plane = DataPlane("127.0.0.1", device)
        self.engine = Engine(self.control, self._plane, on_world, self.is_joiner, activity, fabric)
        self._ready_to_abort.set()
        if self.control is not None:
            self.control.on_order = self._on_order
        if self.control is not None:
            atexit.register(self.close)
        elif fabric is not None:  # otherwise nothing outlives a run
            atexit.register(_close, weakref.ref(self))  # its trainer and model may be dropped before

    def find_unreported(self) -> None:
        """Add to `resume` what is complete on disk, but was not reported; for all founders of a life together."""
        if not self._looks:
            return
        self._looks = False
        looks = environ.read().local_rank == 0  # for its agent
        left = msgspec.json.encode(left_records(Path(self.record), self.resume) if looks else [])
        said = unpack_parts(self.engine.run(Agreement("unreported_checkpoints", lambda rank: left)))
        found = {each for part in said for each in msgspec.json.decode(part, type=list[wire.Checkpoint])}
        if not found:
            return
        self.resume = tuple(sorted((*found, *self.resume), key=age))
        newest = age(self.resume[0])
        self.memory = tuple(each for each in self.memory if (-each.version.fit, -each.version.step) <= newest)
        logger.warning("unreported_checkpoints_found paths=%s", sorted(each.path for each in found))

    @property
    def has_newer_state(self) -> bool:
        """Whether this worker's state comes from members of the task or an earlier life, not from the script."""
        return (self.is_joiner and not self.engine.has_state) or bool(self.resume or self.memory)

    @classmethod
    def of_process(
        cls, device: torch.device, capacity: int, on_world: Callable[[World], None], fabric: Fabric | None = None
    ) -> tuple[Session, bool]:
        """Return this process's session, which consecutive trainers share if it has an agent, and whether it is new."""
        global _shared
        if _shared is not None:
            _shared.engine.follow(on_world)
            return _shared, False
        made = cls(device, capacity, on_world, fabric)
        _shared = made if made.control is not None else None
        return made, True

    def statistics(self) -> Summary:
        """Return statistics of this worker's steps."""
        if self.control is None:  # no other thread reads it
            self.monitor.take()
        return self.monitor.summary()

    def runs(self, *, active: bool) -> None:
        """Report that a trainer's run has begun, or has ended: an exit within a run is no end of the task."""
        if self.control is not None:
            self.control.send(wire.Training(worker=self.control.worker, active=active))

    def begin_error_hooks(self) -> None:
        """Record that this worker runs the hooks of an error that ends it, if it has reported one."""
        if self.control is not None and self.control.is_ending and self._siblings is not None:
            self._siblings.begin()

    def leave_with_siblings(self) -> None:
        """After the hooks of an error that ends this worker, wait for those of the agent's other workers."""
        if self.control is not None and self.control.is_ending and self._siblings is not None:
            if not self._siblings.wait():
                logger.warning("siblings_hooks_cut seconds=%.0f", HOOKS_SECONDS)
            self.runs(active=False)

    def begin_run(self) -> int:
        """Return the number of a trainer's run that begins, the same on all workers."""
        self._runs += 1
        return self._runs

    def record_fit(self) -> None:
        """Record, as the first rank, the number of the task's present ``fit`` for workers that join later.

        So, too, the results of the one before and of evaluations since: the rank that had to record them may have died.
        """
        if self.control is not None and self.fits > 1 and self.engine.world.rank == 0 and not self.joins:
            self._send_means()
            self.control.record(_FIT, str(self.fits), self.engine.world.epoch)
            self.record_results()
        self._means.clear()

    def record_results(self) -> None:
        """Record, as the first rank, the results of the last ``fit`` that has ended, for workers that leave it out."""
        if self.control is not None and self.results is not None and self.engine.world.rank == 0:
            fit, text = self.results
            self.control.record(f"{_RESULTS} {fit}", text, self.engine.world.epoch, lasting=True)

    def results_of(self, fit: int) -> str | None:
        """Return the recorded results of a ``fit`` of the task, if there are any."""
        return None if self.control is None else self.control.lookup(f"{_RESULTS} {fit}")

    def record_means(self, number: int, means: Any) -> None:
        """Record, as the first rank, the means of an evaluation after a ``fit``, for workers that leave it out."""
        self._means[f"{_MEANS} {self.fits}.{number}"] = base64.b64encode(codec.encode(means)).decode()
        self._send_means()

    def _send_means(self) -> None:
        if self.control is not None and self.engine.world.rank == 0:
            for key, text in self._means.items():
                self.control.record(key, text, self.engine.world.epoch, lasting=True)

    def means_of(self, number: int) -> Any:
        """Return the recorded means of the evaluation with this number after the present ``fit``, or None."""
        text = None if self.control is None else self.control.lookup(f"{_MEANS} {self.fits}.{number}")
        return None if text is None else codec.decode(base64.b64decode(text))

    def is_past(self) -> bool:
        """Whether the task is in a later ``fit`` than this joiner's script."""
        assert self.control is not None
        return self.fits < int(self.control.lookup(_FIT) or 1)

    def wait_admission(self) -> None:
        """Report that this joiner is built and may be admitted; `Engine.run` then waits for its first epoch."""
        assert self.control is not None
        self.control.ready(0, {"step": 0, "has_state": False})

    def close(self) -> None:
        """End the session; the process may exit afterwards without waiting."""
        atexit.unregister(self.close)
        if self.control is not None and self.is_joiner and not self.engine.has_state:
            self.control.wait_over()
        if self.engine.world.size > 1:
            time.sleep(_LINGER_SECONDS)
        self.closing()
        self.engine.close()
        self._plane.close()
        if not wait_buried(_BURIED_SECONDS):
            leave_buried()
        if not wait_destroyed(_DESTROYED_SECONDS):
            logger.warning("nccl_groups_left seconds=%.0f", _DESTROYED_SECONDS)
        if self.control is not None:  # last: until then heartbeats continue
            self.control.close()
        if self._stacks is not None:
            self._stacks.close()

    def check_fit(self, donors: int) -> None:
        """Refuse a state that belongs to another ``fit`` of the script.

        Raises:
            FitPassed: quoting both.
        """
        if donors != self.fits:
            raise FitPassed(
                f"this worker is in its script's fit number {self.fits}, but the task has begun number {donors}: the "
                "worker joins there when it is started again"
            )

    def _wait_founded(self, control: Control) -> wire.Welcome:
        """Wait for the first epoch, or for the notice that it was formed without this worker, which then joins."""
        control.ready(0, {"step": 0, "has_state": True, "founder": True})
        with control.condition:
            control.condition.wait_for(lambda: control.latest is not None or not control.welcome.founder)
        return control.welcome

    def _on_order(self, order: wire.Inject) -> None:
        Injector.of(self.engine).order(order)

    def _on_failure(self, epoch: wire.Epoch) -> None:
        if self._ready_to_abort.is_set():
            self.engine.abort(epoch)


def _nothing() -> None:
    """Have nothing to release."""


_shared: Session | None = None


def control_of_process() -> Control | None:
    """Return the link of this process to its agent, if it has one."""
    return None if _shared is None else _shared.control
