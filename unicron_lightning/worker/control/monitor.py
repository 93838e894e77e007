"""The control thread's check of the training thread: whether it is overdue, and its current activity.

A step is overdue when its core phases have taken longer than the statistics allow (about 3x the average), another
phase when it has shown no progress for its time limit. Excluded is time in which the whole process was stopped (the
control thread woke late: a stalled machine, a garbage collection, a stop signal) or the training thread waited for a
CPU (as reported by the kernel), since neither is a hang. Computing is no hang either, nor is being slow on an
overloaded machine, where a thread waits for the interpreter's lock while its holder waits for a CPU: both get `BUSY`
times the limit. A hang of one rank makes all ranks overdue; the coordinator determines which rank hangs. A rank that
waits for others is overdue at the plain limit on any machine: the question costs little, and the others answer for
themselves.

A check costs the training thread nothing and takes 20 microseconds, or 300 on a busy machine, where it begins with cold
caches. The interval `TICK_SECONDS` follows from this and bounds the additional delay of detection.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Final

from unicron_lightning import wire
from unicron_lightning.wire.fields import MOST_LETTERS
from unicron_lightning.worker.control.activity import BETWEEN, CORE, Activity, Moment
from unicron_lightning.worker.control.statistics import StepStatistics, Summary, evaluation_limit

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.1
BUSY: Final = 3.0
"""Factor on the limit for a thread that has mostly been computing: shared caches and memory can slow it down."""
AGAIN_SECONDS: Final = 1.0
"""Interval at which an overdue state is reported again, for a coordinator that was down."""
WAIT_SECONDS: Final = 1.0
"""Seconds in one collective after which a worker reports its wait, since it may not reach the others; then doubled."""
_LONGEST_WAIT: Final = 32.0
CROWDED: Final = 2.0
"""Runnable threads per CPU from which on a machine is overloaded."""
_LATE_SECONDS: Final = 0.05
"""Delay of a wake-up beyond which the process was not running; the interpreter's lock alone costs less."""


class Monitor:
    """Statistics of the steps, and the check whether the present one is overdue.

    Args:
        worker: this worker's identity.
        activity: the training thread's activity.
        on_cpu: whether the training thread computes on the CPU; otherwise it may spin while waiting for an accelerator.
    """

    def __init__(self, worker: str, activity: Activity, *, on_cpu: bool = True) -> None:
        self.activity = activity
        self.statistics = StepStatistics()
        self._adding = threading.Lock()
        """Held while steps are added, and while they are summarized, which the training thread does, too."""
        self._worker = worker
        self._schedule = f"/proc/self/task/{activity.thread}/schedstat"
        self._load = "/proc/loadavg"
        self._due: float | None = None
        self._step = 0
        """The step that `_excused` and `_before` refer to."""
        self._excused = 0.0
        """Seconds of this step in which the process was not running."""
        self._on_cpu = on_cpu
        self._before: tuple[float, float] | None = None
        """The kernel's times of the thread when the step was first seen."""
        self._told: wire.ActivityReport | None = None
        self._told_at = 0.0
        self._long_wait = WAIT_SECONDS

    def limit(self, limits: wire.WatchLimits) -> None:
        """Set the coordinator's limits."""
        self.statistics.limits = limits

    def take(self) -> None:
        """Add the steps finished since the last call."""
        finished = self.activity.finished
        with self._adding:
            self.statistics.take([finished.popleft() for _ in range(len(finished))])

    def summary(self) -> Summary:
        """The statistics up to the last check."""
        with self._adding:
            return self.statistics.summary()

    def pace(self) -> wire.Pace:
        """The statistics in the form that is sent to the coordinator."""
        known = self.summary()
        return wire.Pace(
            steps=known.steps,
            mean=known.mean,
            median=known.median,
            usual=known.usual,
            slowdown=known.slowdown,
            busy=known.busy,
            micro_batches=known.micro_batches,
            phases=known.phases,
        )

    def tick(self) -> tuple[float, wire.ActivityReport | None]:
        """Check the training thread; return the seconds until the next check, and the message to send, if any."""
        now = self.activity.clock()
        late = 0.0 if self._due is None else now - self._due
        self.take()
        doing = self.look(late if late > _LATE_SECONDS else 0.0)
        told, self._due = self._tell(doing, now), self.activity.clock() + TICK_SECONDS
        return TICK_SECONDS, told

    def look(self, late: float = 0.0) -> wire.ActivityReport:
        """The training thread's activity; ``late`` is the time until now in which the process was not running."""
        now, moment, step = self.activity.clock(), self.activity.now, self.activity.step
        if step != self._step:
            self._step, self._excused, self._before = step, 0.0, None
            self._scheduled()  # starts the count
        self._excused += min(late, now - self.activity.began)
        limit, seconds = self._limit(moment), now - moment.since
        if moment.waiting and moment.phase in BETWEEN:
            limit, seconds = self._wait_limit(moment), now - self.activity.waits_since
        due = limit
        position, operation = self.activity.operation or (0, "")
        if moment.phase in CORE:
            seconds += moment.core
            if not moment.waiting:
                seconds -= moment.waited  # a rank that has only waited for others is not overdue itself
            if limit is not None and seconds > 0.5 * limit:
                ran, waited = self._scheduled()
                seconds -= self._excused + waited
                computes = self._on_cpu and moment.phase == "compute" and ran > 0.5 * seconds
                if computes or (seconds > limit and self._crowded()):
                    limit *= BUSY
                    due = due if moment.waiting and not computes else limit
        return wire.ActivityReport(
            worker=self._worker,
            epoch=self.activity.epoch,
            step=step,
            phase=moment.phase,
            waiting=moment.waiting,
            overdue=due is not None and seconds > due,
            seconds=round(max(seconds, 0.0), 4),
            limit=limit,
            micro_batch=moment.micro_batch if moment.micro_batch >= 0 else None,
            waits=round(max(now - self.activity.waits_since, 0.0), 4) if moment.waiting else 0.0,
            position=position,
            operation=operation[:MOST_LETTERS],
        )

    def _limit(self, moment: Moment) -> float | None:
        limits = self.statistics.limits
        if moment.phase in CORE:
            known = self.statistics.limit(steady=moment.steady)
            return limits.stall_time if known is None else min(known, limits.stall_time)
        if moment.phase in ("recovery", "hold", "over"):
            return None  # the coordinator limits a recovery; the others have no limit
        times = {"data": limits.data_time, "hooks": limits.hook_time, "start": limits.start_time}
        return times.get(moment.phase, limits.stall_time)

    def _wait_limit(self, moment: Moment) -> float:
        """Seconds after which a wait between steps is worth a question: another rank may be frozen.

        Whether one is frozen is judged by its process, so that a rank that is only slow raises no alarm.
        """
        limits = self.statistics.limits
        known = evaluation_limit(self.activity.evaluated.copy(), limits) if moment.phase == "validation" else None
        if known is None:
            known = self.statistics.limit(steady=moment.steady)
        return min(limits.change_time if known is None else known, limits.stall_time)

    def _tell(self, doing: wire.ActivityReport, now: float) -> wire.ActivityReport | None:
        told = self._told
        if doing.overdue:
            same = told is not None and (told.step, told.phase, told.waiting) == (
                doing.step,
                doing.phase,
                doing.waiting,
            )
            if same and now < self._told_at + AGAIN_SECONDS:
                return None
            self._told, self._told_at = doing, now
            return doing
        self._told = None
        long = doing.waits >= self._long_wait
        if long:
            self._long_wait += min(self._long_wait, _LONGEST_WAIT)
        elif doing.waits < WAIT_SECONDS:
            self._long_wait = WAIT_SECONDS
        return doing if told is not None or long else None

    def _scheduled(self) -> tuple[float, float]:
        """Seconds that the training thread has run, and has waited for a CPU, since this step was first seen."""
        try:
            file = os.open(self._schedule, os.O_RDONLY)  # takes a third of the time of `Path.read_text`
            try:
                ran, waited = (int(field) / 1e9 for field in os.read(file, 100).split()[:2])
            finally:
                os.close(file)
        except (OSError, ValueError):  # not provided by all kernels
            return 0.0, 0.0
        if self._before is None:
            self._before = ran, waited
        return ran - self._before[0], waited - self._before[1]

    def _crowded(self) -> bool:
        """Whether far more threads are runnable than the machine has CPUs, now or over the last minute."""
        try:
            minute, _, _, running, *_ = Path(self._load).read_text().split()
            runnable = max(float(minute), float(running.partition("/")[0]))
        except (OSError, ValueError):  # another kernel
            return False
        return runnable > CROWDED * (os.cpu_count() or 1)
