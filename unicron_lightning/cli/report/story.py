"""The course of a task, from its event log and the bills of its incidents. Pure.

The comparison with a restart from the newest checkpoint is an estimate from this task's own figures: a restart repeats
the time since that checkpoint (or since the first step, if there was none), and costs the task's own start-up again.
Detection and the time with fewer workers are the same in both cases and left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unicron_lightning.coordinator.incidents.facts import (
    EpochPublished,
    EpochSettled,
    FirstStep,
    LifeBegun,
    TaskEnd,
    read_fact,
)
from unicron_lightning.coordinator.incidents.record import PHASES
from unicron_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What an incident cost, and would have cost with a restart from the newest checkpoint; seconds of the whole task.

    Attributes:
        incident: its id.
        transition: the interruption.
        repeated: time since the newest checkpoint, which a restart would repeat.
        start_up: a start of the task, as measured; None if it has not finished a step.
        restarted: whether the task did restart from a checkpoint.
    """

    incident: str
    transition: float
    repeated: float
    start_up: float | None
    restarted: bool

    @property
    def seconds(self) -> float:
        """Seconds saved; 0 if the task restarted."""
        return 0.0 if self.restarted else self.repeated + (self.start_up or 0.0) - self.transition


@dataclass(frozen=True, kw_only=True)
class TaskStory:
    """The newest run of a task; times are time.time().

    Attributes:
        task: its id.
        began, ended: its times; the present if it has not ended.
        outcome: ``succeeded``, ``failed``, or None if it runs.
        reason: of its end, or why it does not train now; "" for none.
        world: times of changes of the world, with its number of workers from then on.
        steps: times of known steps, with the step: first steps of epochs, and checkpoints.
        checkpoints: times of checkpoints.
        bills: its incidents, oldest first, as `/v1/incidents` answers.
        start_up: seconds until the first finished step; None if there was none.
        lost: seconds of the whole task's work lost, by phase.
        saved: comparison of each incident.
        recomputed: micro-batches that survivors computed again.
    """

    task: str
    began: float
    ended: float
    outcome: str | None
    reason: str
    world: Sequence[tuple[float, int]]
    steps: Sequence[tuple[float, int]]
    checkpoints: Sequence[float]
    bills: Sequence[Mapping[str, Any]]
    start_up: float | None
    lost: Mapping[str, float]
    saved: Sequence[Saved]
    recomputed: int

    @property
    def kinds(self) -> dict[str, float]:
        """Seconds of the run by kind: productive, start_up, and the phases of incidents."""
        start = self.ended - self.began if self.start_up is None else self.start_up
        rest = max(0.0, self.ended - self.began - start - sum(self.lost.values()))
        return {"productive": rest, "start_up": start, **self.lost}

    @property
    def goodput(self) -> float:
        """Productive share of the run."""
        return self.kinds["productive"] / max(1e-9, self.ended - self.began)


def story_of(
    task: str,
    events: Sequence[Mapping[str, Any]],
    bills: Sequence[Mapping[str, Any]],
    now: float,
    waits: str = "",
) -> TaskStory:
    """Return the course of a task's newest run.

    Args:
        task: its id.
        events: its event log, oldest first.
        bills: its incidents.
        now: time.time(), for a run that has not ended.
        waits: why it does not train now, if it has not ended; "" if it trains.

    Raises:
        ConfigError: the log has no event of the task.
    """
    first = max([place for place, event in enumerate(events) if event["name"] == "task_created"], default=0)
    own = events[first:]
    if not own:
        raise ConfigError(f"task {task!r}: the event log has no event of it; unicron jobs lists the tasks")
    facts = [(event["at"], read_fact(event["name"], event["fields"], event["at"])) for event in own]
    began = own[0]["at"]
    end = next(((at, fact) for at, fact in facts if isinstance(fact, TaskEnd)), None)
    steps = [
        (fact.at, fact.step or 0, len(fact.recomputed), fact.epoch) for _, fact in facts if isinstance(fact, FirstStep)
    ]
    saves = [(event["at"], int(event["fields"].get("step", 0))) for event in own if event["name"] == "checkpoint_saved"]
    lives = [at for at, fact in facts if isinstance(fact, LifeBegun)]
    mine = sorted((bill for bill in bills if bill["fault_at"] >= began - 1), key=lambda bill: bill["fault_at"])
    first_step = min([at for at, *_ in steps], default=None)
    start_up = None if first_step is None else max(0.0, first_step - began)
    return TaskStory(
        task=task,
        began=began,
        ended=now if end is None else end[0],
        outcome=None if end is None else "succeeded" if end[1].succeeded else "failed",
        reason=waits if end is None else end[1].reason,
        world=_world(facts),
        steps=sorted([*((at, step) for at, step, *_ in steps), *saves]),
        checkpoints=[at for at, _ in saves],
        bills=mine,
        start_up=start_up,
        lost={phase: sum(_lost(bill, phase) for bill in mine) for phase in PHASES},
        saved=[_saved(bill, [at for at, _ in saves], first_step, start_up, lives) for bill in mine],
        recomputed=sum({epoch: again for _, _, again, epoch in steps}.values()),
    )


def _world(facts: Sequence[tuple[float, Any]]) -> list[tuple[float, int]]:
    members: dict[int, int] = {}
    found: list[tuple[float, int]] = []
    for at, fact in facts:
        match fact:
            case EpochPublished(number=number, members=names):
                members[number] = len(names)
            case EpochSettled(number=number) if number in members:
                found.append((at, members[number]))
            case LifeBegun() | TaskEnd():
                found.append((at, 0))
    return found


def _lost(bill: Mapping[str, Any], phase: str) -> float:
    """Return a phase's loss as seconds of the whole task: worker-seconds by the number of workers before."""
    workers = bill["weight"] * bill["workers_before"]
    return float(bill["phases"][phase]["worker_seconds"] / workers) if workers else 0.0


def _saved(
    bill: Mapping[str, Any],
    saves: Sequence[float],
    first_step: float | None,
    start_up: float | None,
    lives: Sequence[float],
) -> Saved:
    fault, stepped = bill["fault_at"], bill["stepped_at"] or bill["closed_at"] or float("inf")
    place = bisect_right(saves, fault)
    since = saves[place - 1] if place else fault if first_step is None else first_step
    return Saved(
        incident=bill["incident"],
        transition=bill["phases"]["transition"]["seconds"],
        repeated=max(0.0, fault - since),
        start_up=start_up,
        restarted=any(bill["known_at"] <= at <= stepped for at in lives),
    )
