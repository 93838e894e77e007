"""What the training thread is doing: written by it alone, as plain values, and read by the control thread.

A step's time runs from one commit to the next, where all ranks are together. It is made up of *phases*; those of the
step protocol itself (`CORE`) are what a hang is looked for in by the statistics of the steps before. In the others
somebody else's code runs, or something that takes as long as it takes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Phase = Literal[
    "start",  # up to the first step
    "over",  # after the last
    "data",  # fetches samples
    "compute",  # forward and backward of a micro-batch
    "reduce",  # waits for the reductions
    "commit",
    "optimizer",
    "hooks",  # the script's code, and Lightning's, between steps
    "boundary",  # between two steps, where a world may change
    "validation",
    "checkpoint",
    "epoch_end",  # the script's code between two passes over the data
    "recovery",  # enters an epoch
    "hold",  # waits for nodes enough
]
CORE: Final = frozenset({"compute", "reduce", "commit", "optimizer"})
ORDINARY: Final = CORE | {"data", "hooks", "boundary"}
"""Phases of a step in which nothing special was done."""
UNSETTLING: Final = frozenset({"start", "recovery", "hold"})
"""A step that begins with one of them is the first in its world: it may take longer."""
_KEPT: Final = 1000


class Moment(NamedTuple):
    """What the training thread does. Times are those of the activity's clock, in seconds."""

    phase: Phase
    since: float
    """When the phase, or the present part of it (a batch of a validation), began."""
    core: float
    """Spent in the core phases of this step before this one."""
    steady: bool
    """Whether this step has had no unsettling phase."""
    waiting: bool
    """Whether it waits in a collective, for the other ranks."""
    micro_batch: int
    """The micro-batch in hand; -1 for none."""
    waited: float = 0.0
    """Spent in waits for other ranks that are over, in the core phases of this step: others' doing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """One finished step.

    Attributes:
        step: optimizer steps finished with it.
        epoch: in which it was committed.
        seconds: since the commit before.
        phases: seconds by phase, which add up to that.
        micro_batches: how many this rank computed.
    """

    step: int
    epoch: int
    seconds: float
    phases: dict[str, float]
    micro_batches: int

    @property
    def ordinary(self) -> bool:
        """Whether nothing but a step was done."""
        return self.phases.keys() <= ORDINARY

    @property
    def busy(self) -> float | None:
        """Seconds that one micro-batch took this rank, waiting left out; None if it had none."""
        spent = self.phases.get("compute", 0.0) + self.phases.get("data", 0.0)
        return spent / self.micro_batches if self.micro_batches else None


class Activity:
    """The slot that the training thread writes to. Each method costs it about a microsecond.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.thread = threading.get_native_id()
        """The training thread's, to the kernel."""
        self.now = Moment("start", clock(), 0.0, False, False, -1)
        self.step = 0
        """Optimizer steps finished."""
        self.epoch = 0
        """Of the world; 0 before the first."""
        self.finished: deque[StepTimes] = deque(maxlen=_KEPT)
        """Steps that nobody has looked at yet; the reader takes them out."""
        self.began = self.now.since
        """When the step in progress did, i.e. the last commit."""
        self._times: dict[str, float] = {}
        self._micro_batches = 0
        self._waited = 0.0
        self._waits_since = self.now.since

    def enter(self, phase: Phase, micro_batch: int = -1) -> None:
        """A phase begins, or a new part of the present one."""
        now, before = self.clock(), self.now
        core = self._note(before, now)
        self.now = Moment(phase, now, core, before.steady and phase not in UNSETTLING, False, micro_batch, self._waited)

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """In a phase, then again in the one before."""
        before = self.now.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def waits(self, waiting: bool) -> None:
        """A wait for other ranks begins or ends."""
        now, (phase, since, core, steady, waited, micro_batch, _) = self.clock(), self.now
        if waiting:
            self._waits_since = now
        elif waited and phase in CORE:
            self._waited += now - self._waits_since
        self.now = Moment(phase, since, core, steady, waiting, micro_batch, self._waited)

    def computed(self) -> None:
        """A micro-batch is finished."""
        self._micro_batches += 1

    def busy(self) -> float:
        """Seconds in which this rank has fetched and computed in this step; 0 before it has."""
        return self._times.get("compute", 0.0) + self._times.get("data", 0.0)

    @property
    def micro_batches(self) -> int:
        """Finished in this step."""
        return self._micro_batches

    def committed(self, step: int) -> None:
        """So many steps are finished; the optimizer's turn begins."""
        now, before = self.clock(), self.now
        self._note(before, now)
        times = StepTimes(
            step=step,
            epoch=self.epoch,
            seconds=now - self.began,
            phases=self._times,
            micro_batches=self._micro_batches,
        )
        self.finished.append(times)
        self.step, self.began, self._times, self._micro_batches, self._waited = step, now, {}, 0, 0.0
        self.now = Moment("optimizer", now, 0.0, True, False, -1)

    def _note(self, before: Moment, now: float) -> float:
        """Books the phase that ends; returns the step's seconds in core phases."""
        spent = now - before.since
        self._times[before.phase] = self._times.get(before.phase, 0.0) + spent
        return before.core + spent if before.phase in CORE else before.core
