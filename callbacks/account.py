"""Use of a task's time: training, lost to failures, or other work. Pure: times are arguments.

The *goodput* is the share of the time since the start that was not lost. The lost time consists of

* the start itself, up to the first step;
* in a step in which the world changed, the time beyond a usual step in a world of that size;
* the time between two steps in which the world changed: a join, a leave;
* after the loss of all members, everything since the checkpoint from which the task resumes.

Validation, checkpoints and waiting for data are *other* work: wanted, but no training. The slower speed of a smaller
world counts as training.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

_USUAL: Final = 32
"""Number of undisturbed steps from which the usual step time is computed."""


class TimeAccount:
    """Seconds by use. ``now`` is of any monotonic clock; ``epoch`` is the present world's.

    Args:
        now: time of the start.
    """

    def __init__(self, now: float) -> None:
        self.train = self.lost = self.other = 0.0
        self.steps = 0
        self._mark = now
        self._epoch: int | None = None
        self._worker_seconds: deque[float] = deque(maxlen=_USUAL)

    def step_begins(self, now: float, epoch: int) -> None:
        """Account for the time since the last call, which was no step."""
        if self._epoch == epoch:
            self.other += now - self._mark
        else:
            self.lost += now - self._mark
        self._epoch, self._mark = epoch, now

    def step_ends(self, now: float, epoch: int, world: int) -> float:
        """Account for a finished step in a world of ``world`` workers; return its seconds."""
        seconds = now - self._mark
        useful = seconds
        if epoch == self._epoch:
            self._worker_seconds.append(seconds * world)
        elif self._worker_seconds:
            useful = min(seconds, statistics.median(self._worker_seconds) / world)
        self.train += useful
        self.lost += seconds - useful
        self.steps += 1
        self._epoch, self._mark = epoch, now
        return seconds

    def goodput(self, now: float) -> float:
        """Return the share of the time since the start that was not lost; 0 before the first step."""
        total = self.train + self.lost + self.other + now - self._mark
        return 1.0 - self.lost / total if self.steps and total > 0 else 0.0

    def state(self) -> dict[str, float]:
        """Return the account as plain data."""
        return {"train": self.train, "lost": self.lost, "other": self.other, "steps": self.steps}

    def load_state(self, state: dict[str, float], now: float, away: float) -> None:
        """Continue another worker's account. ``away``: seconds since then in which the task did not train."""
        self.train, self.other, self.steps = state["train"], state["other"], int(state["steps"])
        self.lost = state["lost"] + away
        self._mark = now
