"""The training thread's current activity, written as plain values by this thread and read by the control thread.

A step lasts from one commit to the next; at a commit all ranks are together. Its time is divided into *phases*. In the
phases of the step protocol itself (`CORE`), hangs are detected by the statistics of earlier steps. The other phases run
foreign code, or operations whose duration is unpredictable.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

ActivityPhase = Literal[
    "start",  # until the first step
    "over",  # after the last step
    "data",  # fetches samples
    "compute",  # forward and backward of a micro-batch
    "reduce",  # waits for the reductions
    "commit",
    "optimizer",
    "hooks",  # code of the script and of Lightning between steps
    "boundary",  # between two steps, where the world may change
    "validation",
    "checkpoint",
    "epoch_end",  # the script's code between two passes over the data
    "recovery",  # enters an epoch
    "hold",  # waits for enough nodes
]
CORE: Final = frozenset({"compute", "reduce", "commit", "optimizer"})
ORDINARY: Final = CORE | {"data", "hooks", "boundary"}
"""Phases of a step without further activities."""
BETWEEN: Final = frozenset({"validation", "checkpoint", "epoch_end"})
"""Phases between steps that end with a wait for all ranks."""
UNSETTLING: Final = frozenset({"start", "recovery", "hold"})
"""Phases after which a step is the first in its world and may take longer."""
_KEPT: Final = 1000
_EVALUATED: Final = 100


class Moment(NamedTuple):
    """The training thread's activity at a moment. Times are those of the activity's clock, in seconds."""

    phase: ActivityPhase
    since: float
    """Start of the phase, or of its present part (a batch of a validation)."""
    core: float
    """Seconds spent in the earlier core phases of this step."""
    steady: bool
    """Whether this step has had no unsettling phase."""
    waiting: bool
    """Whether the training thread waits for the other ranks in a collective."""
    micro_batch: int
    """The micro-batch being computed; -1 for none."""
    waited: float = 0.0
    """Seconds spent in finished waits for other ranks, in the core phases of this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Times of one finished step.

    Attributes:
        step: number of finished optimizer steps, including this one.
        epoch: epoch in which the step was committed.
        seconds: time since the commit before.
        phases: seconds by phase, which add up to ``seconds``.
        micro_batches: number of micro-batches of its own that this rank computed.
        repeated: number of other ranks' that it repeated as their witness.
    """

    step: int
    epoch: int
    seconds: float
    phases: dict[str, float]
    micro_batches: int
    repeated: int = 0

    @property
    def ordinary(self) -> bool:
        """Whether the step had ordinary phases only."""
        return self.phases.keys() <= ORDINARY

    @property
    def busy(self) -> float | None:
        """Seconds that this rank needed for one micro-batch, without waiting; None if it computed none."""
        spent = self.phases.get("compute", 0.0) + self.phases.get("data", 0.0)
        return spent / (self.micro_batches + self.repeated) if self.micro_batches else None


class Activity:
    """Record of the training thread's activity. Each method takes about a microsecond.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.thread = threading.get_native_id()
        """The training thread's id in the kernel."""
        self.now = Moment("start", clock(), 0.0, False, False, -1)
        self.step = 0
        """Number of finished optimizer steps."""
        self.epoch = 0
        """Epoch of the world; 0 before the first."""
        self.operation: tuple[int, str] | None = None
        """Place and name of the engine's operation in progress."""
        self.finished: deque[StepTimes] = deque(maxlen=_KEPT)
        """Finished steps that have not been read; the reader removes them."""
        self.began = self.now.since
        """Start of the step in progress, i.e. the time of the last commit."""
        self.passed: set[ActivityPhase] = set()
        """Phases between steps that this process has passed."""
        self.evaluated: deque[float] = deque(maxlen=_EVALUATED)
        """Seconds of the last batches of validations, without those in which this rank waited."""
        self._times: dict[str, float] = {}
        self._micro_batches = self._repeated = 0
        self._waited = 0.0
        self.waits_since = self.now.since
        """Time at which the newest wait for other ranks began."""

    def enter(self, phase: ActivityPhase, micro_batch: int = -1) -> None:
        """Begin a phase, or a new part of the present one."""
        now, before = self.clock(), self.now
        core = self._note(before, now)
        if before.phase in BETWEEN and phase != before.phase:
            self.passed.add(before.phase)
        if before.phase == "validation" and before.micro_batch >= 0 and self.waits_since < before.since:
            self.evaluated.append(now - before.since)
        self.now = Moment(phase, now, core, before.steady and phase not in UNSETTLING, False, micro_batch, self._waited)

    @contextlib.contextmanager
    def during(self, phase: ActivityPhase) -> Iterator[None]:
        """Run in a phase, then return to the phase before."""
        before, passed = self.now.phase, frozenset(self.passed)
        self.enter(phase)
        try:
            yield
        except BaseException:
            self.enter(before)
            self.passed = set(passed)
            raise
        self.enter(before)

    def waits(self, waiting: bool) -> None:
        """Record the start or the end of a wait for other ranks."""
        now, (phase, since, core, steady, waited, micro_batch, _) = self.clock(), self.now
        if waiting:
            self.waits_since = now
        elif waited and phase in CORE:
            self._waited += now - self.waits_since
        self.now = Moment(phase, since, core, steady, waiting, micro_batch, self._waited)

    def computed(self) -> None:
        """Record a finished micro-batch."""
        self._micro_batches += 1

    def repeated(self) -> None:
        """Record a repetition of another rank's micro-batch, which is no part of this rank's share."""
        self._repeated += 1

    def busy(self) -> float:
        """Seconds that this rank has spent in this step fetching and computing one micro-batch; 0 before the first."""
        spent = self._times.get("compute", 0.0) + self._times.get("data", 0.0)
        return spent / (self._micro_batches + self._repeated) if self._micro_batches else 0.0

    def committed(self, step: int) -> None:
        """Record the commit of a step; the optimizer runs next.

        Args:
            step: number of finished steps, including this one.
        """
        now, before = self.clock(), self.now
        self._note(before, now)
        times = StepTimes(
            step=step,
            epoch=self.epoch,
            seconds=now - self.began,
            phases=self._times,
            micro_batches=self._micro_batches,
            repeated=self._repeated,
        )
        self.finished.append(times)
        self.step, self.began, self._times, self._waited = step, now, {}, 0.0
        self._micro_batches = self._repeated = 0
        self.now = Moment("optimizer", now, 0.0, True, False, -1)

    def _note(self, before: Moment, now: float) -> float:
        """Add the time of the ending phase; return the step's seconds in core phases."""
        spent = now - before.since
        self._times[before.phase] = self._times.get(before.phase, 0.0) + spent
        return before.core + spent if before.phase in CORE else before.core
