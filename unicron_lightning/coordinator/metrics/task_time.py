"""The time of a task by kind: productive, or lost, and by what. Pure.

The kinds are those of the field's accounts of goodput: productive time, and badput by type. Time is attributed once,
when its kind is known, so that every sum only rises. While a task trains, the time since its last reported step is
not attributed yet; steps are reported once a second.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from unicron_lightning.coordinator.state import Task

TimeKind = Literal[
    "productive",
    "start_up",
    "detection",
    "transition",
    "sub_healthy",
    "recomputed",
    "checkpoint",
    "other",
    "idle",
    "unknown",
]
TIME_KINDS: Final[tuple[TimeKind, ...]] = get_args(TimeKind)
Occupation = Literal["training", "start_up", "transition", "sub_healthy", "idle", "unknown"]

_HANG: Final = 3.0
"""Multiple of the usual step time after which an unfinished step is attributed to the detection of its failure."""
_PAUSE: Final = 1.5
"""Multiple of the usual step time from which the rest of an interval was no training: validation, a stalled loader."""


def occupation_of(task: Task, *, steps: bool) -> Occupation:
    """Return how the task spends its time now.

    Args:
        task: a task that is not over.
        steps: whether it has finished a step in its present life.
    """
    if any(incident.stepped_at is None for incident in task.accounts.open):
        return "transition"
    if not task.slots:
        return "idle"
    if task.settled and task.epoch is not None and task.epoch.hold:
        return "sub_healthy" if task.accounts.open else "idle"  # too few nodes to train at all
    if task.plain:
        return "unknown"
    return "training" if steps else "start_up"


class TaskTime:
    """Seconds of one task by kind.

    Args:
        now: time.time() from which on time is attributed.

    Attributes:
        seconds: sums by kind.
        occupation: how the task spends its time at present.
    """

    def __init__(self, now: float) -> None:
        self.seconds: dict[TimeKind, float] = dict.fromkeys(TIME_KINDS, 0.0)
        self.occupation: Occupation = "idle"
        self._until = now

    def change(self, occupation: Occupation, now: float, *, fault_at: float | None = None, usual: float | None) -> None:
        """Record that the task spends its time differently from now on.

        Args:
            occupation: the new one.
            now: time.time().
            fault_at: time of the failure that has ended the training; None if none has.
            usual: usual seconds of a step; None if unknown.
        """
        if self.occupation == "training":
            at = now if fault_at is None else min(fault_at, now)
            if fault_at is not None and usual is not None:
                at = min(at, self._until + _HANG * usual)
            self._attribute("productive", at)
            self._attribute("detection" if fault_at is not None else "productive", now)
        self.advance(now)
        self.occupation = occupation

    def advance(self, now: float) -> None:
        """Attribute the time until now, unless the task trains: a step attributes that."""
        if self.occupation != "training":
            self._attribute(self.occupation, now)

    def step(self, at: float, *, steps: int, repeated: int, usual: float | None, present: float, saved: bool) -> None:
        """Attribute the time up to a finished step.

        Args:
            at: time.time() of its end.
            steps: steps finished since the previous report.
            repeated: those of them that had been finished before the loss of all workers.
            usual: usual seconds of a step at the present size; None if unknown.
            present: share of the intended workers that is at work.
            saved: whether a checkpoint was completed since the previous report.
        """
        if self.occupation != "training":
            self.advance(at)
            return
        seconds = max(0.0, at - self._until)
        expected = seconds if usual is None else steps * usual
        pause = max(0.0, seconds - expected) if saved or seconds > _PAUSE * expected else 0.0
        missing = (seconds - pause) * (1.0 - min(1.0, max(0.0, present)))
        again = (seconds - pause - missing) * repeated / max(1, steps)
        self.seconds["checkpoint" if saved else "other"] += pause
        self.seconds["sub_healthy"] += missing
        self.seconds["recomputed"] += again
        self.seconds["productive"] += seconds - pause - missing - again
        self._until = max(at, self._until)

    @property
    def goodput(self) -> float | None:
        """Productive share of the attributed time; None if there is none."""
        total = sum(self.seconds.values())
        return self.seconds["productive"] / total if total else None

    def _attribute(self, kind: TimeKind, until: float) -> None:
        self.seconds[kind] += max(0.0, until - self._until)
        self._until = max(until, self._until)
