"""The control thread's look at the training thread: is it overdue, and what is it doing?

A step is overdue when its core phases have taken longer than the statistics allow (about 3x the average), another
phase when it has shown no sign of life for its time. Left out is the time in which the whole process stood still (this
thread woke late: a stalled machine, a collection of garbage, a stop signal) or the training thread waited for a CPU
(the kernel tells): neither is a hang. Nor is it one to compute, or to stand on a machine with far more to do than
CPUs, where a thread waits for the interpreter's lock while its holder waits for a CPU: that is given `BUSY` times the
limit. A hang of one rank makes all of them overdue; who it is, the coordinator finds.

Costs nothing on the training thread; here 20 microseconds, or 300 on a busy machine, where each look begins with cold
caches: hence `TICK_SECONDS`, which a hang is noticed later by at most.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from unicron_lightning import wire
from unicron_lightning.worker.activity import CORE, Activity, Moment
from unicron_lightning.worker.statistics import StepStatistics, Summary

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.1
BUSY: Final = 3.0
"""Who has computed on the CPU for most of the time is slow (caches and memory are shared), and fails so much later."""
AGAIN_SECONDS: Final = 1.0
"""Who is overdue says so again, as a coordinator that was away has not heard."""
CROWDED: Final = 2.0
"""Threads that run or would, for each CPU, from which a machine is crowded."""
_LATE_SECONDS: Final = 0.05
"""Waking later than this means that the process could not run; the interpreter's lock alone costs less."""


class Monitor:
    """Statistics of the steps, and the question whether the present one is overdue.

    Args:
        worker: this worker's identity.
        activity: what the training thread does.
        on_cpu: whether the training thread computes itself: else it may spin in a wait for an accelerator.
    """

    def __init__(self, worker: str, activity: Activity, *, on_cpu: bool = True) -> None:
        self.activity = activity
        self.statistics = StepStatistics()
        self._worker = worker
        self._schedule = f"/proc/self/task/{activity.thread}/schedstat"
        self._load = "/proc/loadavg"
        self._due: float | None = None
        self._step = 0
        """The step that the next two are about."""
        self._excused = 0.0
        """Seconds of it in which the process has not run."""
        self._on_cpu = on_cpu
        self._before: tuple[float, float] | None = None
        """What the kernel said of the thread when the step was first seen."""
        self._told: wire.Doing | None = None
        self._told_at = 0.0

    def limit(self, limits: wire.WatchLimits) -> None:
        """The coordinator's word on what is overdue."""
        self.statistics.limits = limits

    def take(self) -> None:
        """Take in the steps that were finished since."""
        finished = self.activity.finished
        self.statistics.take([finished.popleft() for _ in range(len(finished))])

    def summary(self) -> Summary:
        """The statistics up to the last look."""
        return self.statistics.summary()

    def pace(self) -> wire.Pace:
        """The same, for the coordinator."""
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

    def tick(self) -> tuple[float, wire.Doing | None]:
        """A look: seconds until the next one, and what is to be told, if anything."""
        now = self.activity.clock()
        late = 0.0 if self._due is None else now - self._due
        self.take()
        doing = self.look(late if late > _LATE_SECONDS else 0.0)
        told, self._due = self._tell(doing, now), self.activity.clock() + TICK_SECONDS
        return TICK_SECONDS, told

    def look(self, late: float = 0.0) -> wire.Doing:
        """What the training thread does; ``late``: for how long until now the process has not run."""
        now, moment, step = self.activity.clock(), self.activity.now, self.activity.step
        if step != self._step:
            self._step, self._excused, self._before = step, 0.0, None
            self._scheduled()  # from now on
        self._excused += min(late, now - self.activity.began)
        limit, seconds = self._limit(moment), now - moment.since
        if moment.phase in CORE:
            seconds += moment.core
            if not moment.waiting:
                seconds -= moment.waited  # whom this rank has waited for, and no more, is not overdue itself
            if limit is not None and seconds > 0.5 * limit:
                ran, waited = self._scheduled()
                seconds -= self._excused + waited
                computes = self._on_cpu and moment.phase == "compute" and ran > 0.5 * seconds
                if computes or (seconds > limit and self._crowded()):
                    limit *= BUSY
        return wire.Doing(
            worker=self._worker,
            epoch=self.activity.epoch,
            step=step,
            phase=moment.phase,
            waiting=moment.waiting,
            overdue=limit is not None and seconds > limit,
            seconds=round(max(seconds, 0.0), 4),
            limit=limit,
            micro_batch=moment.micro_batch if moment.micro_batch >= 0 else None,
        )

    def _limit(self, moment: Moment) -> float | None:
        limits = self.statistics.limits
        if moment.phase in CORE:
            known = self.statistics.limit(steady=moment.steady)
            return limits.stall_time if known is None else min(known, limits.stall_time)
        if moment.phase in ("recovery", "hold", "over"):
            return None  # the coordinator has a time for the first; the others take as long as they take
        times = {"data": limits.data_time, "hooks": limits.hook_time, "start": limits.start_time}
        return times.get(moment.phase, limits.stall_time)

    def _tell(self, doing: wire.Doing, now: float) -> wire.Doing | None:
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
        return doing if told is not None else None

    def _scheduled(self) -> tuple[float, float]:
        """Seconds that the training thread has run, and has waited for a CPU, since this step was first seen."""
        try:
            file = os.open(self._schedule, os.O_RDONLY)  # a third of what `Path.read_text` costs
            try:
                ran, waited = (int(field) / 1e9 for field in os.read(file, 100).split()[:2])
            finally:
                os.close(file)
        except (OSError, ValueError):  # kernels without it
            return 0.0, 0.0
        if self._before is None:
            self._before = ran, waited
        return ran - self._before[0], waited - self._before[1]

    def _crowded(self) -> bool:
        """Whether the machine has far more to do than CPUs, now or over the last minute."""
        try:
            minute, _, _, running, *_ = Path(self._load).read_text().split()
            runnable = max(float(minute), float(running.partition("/")[0]))
        except (OSError, ValueError):  # another kernel
            return False
        return runnable > CROWDED * (os.cpu_count() or 1)
