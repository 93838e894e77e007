"""Questions of the machine to the planner: plain values, counted in places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from unicron_lightning.terms import Terms


@dataclass(frozen=True, kw_only=True)
class Competitor:
    """A task that competes for places.

    Attributes:
        name: its id.
        since: time.time() of its creation: of equally good plans, the one for the oldest tasks is chosen.
        terms: the terms on which it competes for places, each of which counts as a worker. Before a plan pauses it
            while it runs, its workers write a checkpoint.
        runs: whether it has workers with state, so that pausing it would cost all steps since its last checkpoint.
        before: places allocated by the last plan.
        left: the part of ``before`` that is still usable.
    """

    name: str
    since: float = 0.0
    terms: Terms
    runs: bool
    before: int
    left: int

    @property
    def max_places(self) -> int:
        """Most places that it can use, which may be fewer than its minimum."""
        assert self.terms.max_workers is not None, "a task has no more places than its limit"
        return self.terms.max_workers

    @property
    def plan_name(self) -> str:
        """Name for the planner, which breaks ties by names: that of an older task comes first."""
        return f"{int(self.since * 1e6) + 10**17:018d} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question how many places each task gets.

    Attributes:
        key: names the situation; the answer repeats it.
        num_places: usable places.
        node_places: places of the largest node, which are lost, or arrive, at the same time.
        tasks: in the order of their creation.
        coming: jobs that will compete as soon as a task, the key, has succeeded.
    """

    key: str
    num_places: int
    node_places: int
    tasks: tuple[Competitor, ...]
    coming: tuple[tuple[str, tuple[Competitor, ...]], ...] = ()

    def standing(self, allocation: Mapping[str, int]) -> Question:
        """Return the situation in which the answer ``allocation`` is in force."""
        tasks = tuple(
            replace(task, runs=task.runs or places > 0, before=places, left=places)
            for task in self.tasks
            for places in [allocation[task.name]]
        )
        return replace(self, tasks=tasks)

    @property
    def situation(self) -> Question:
        """The question without its name and its future: questions with equal situations have equal answers."""
        return replace(self, key="", coming=())

    def launches(self) -> Iterator[Question]:
        """Iterate over the situations in which a task has succeeded, and the jobs that wait for it compete."""
        for ended, jobs in self.coming:
            tasks = (*(task for task in self.tasks if task.name != ended), *jobs)
            yield replace(self.situation, tasks=tuple(sorted(tasks, key=lambda task: (task.since, task.name))))
