"""Answers the machine's questions with the planner, and makes the answers to the next ones before they are asked.

The planner is imported when the first question comes: a coordinator of one task never needs it. Everything runs in one
thread beside the event loop, so that compiling and planning ahead never make an agent wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.question import Competitor, Question

if TYPE_CHECKING:
    from unicron_lightning.coordinator.config import CoordinatorConfig
    from unicron_lightning.planner.performance.model import PerformanceModel
    from unicron_lightning.planner.plan import Plan
    from unicron_lightning.planner.state import ClusterState
    from unicron_lightning.planner.table import PlanTable

logger = logging.getLogger(__name__)

Performance = Callable[[Competitor], "PerformanceModel"]
"""What is known of a task's speed, by number of places."""


class Planning:
    """The planner of one coordinator.

    Args:
        performance: see `Performance`.
        running_seconds: D_running by number of places.
        transition_seconds: D_transition by task.
    """

    def __init__(
        self,
        performance: Performance,
        running_seconds: Callable[[int], float],
        transition_seconds: Callable[[str], float],
    ) -> None:
        self._performance = performance
        self._running_seconds = running_seconds
        self._transition_seconds = transition_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unicron-planner")
        self._last: Question | None = None
        self._table: PlanTable | None = None

    def ask(self, question: Question, then: Callable[[ev.Planned], None]) -> None:
        """Answer in the planner's thread, where ``then`` is called with it, and go on to plan ahead."""

        def work() -> None:
            try:
                state, plan, answer = self._answer(question)
                then(answer)
                self._plan_ahead(question, state, plan)
            except Exception:
                # The tasks go on as they are; the next change asks anew.
                logger.exception("planning_failed question=%s", question)

        self._thread.submit(work)

    def answer(self, question: Question) -> ev.Planned:
        """The same at once, and without planning ahead."""
        return self._answer(question)[2]

    def close(self) -> None:
        """Wait for what is being planned, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _answer(self, question: Question) -> tuple[ClusterState, Plan, ev.Planned]:
        from unicron_lightning.planner.solver import solve

        began = time.perf_counter()
        state = self._state(question)
        plan = self._foreseen(state)
        foreseen = plan is not None
        if plan is None:
            plan = solve(state)
        answer = ev.Planned(
            key=question.key,
            allocation=dict(plan.allocation),
            waf=plan.waf,
            milliseconds=round(1e3 * (time.perf_counter() - began), 3),
            foreseen=foreseen,
        )
        return state, plan, answer

    def _foreseen(self, state: ClusterState) -> Plan | None:
        if self._table is None:
            return None
        plans = self._table.plans.values()
        return next((plan for plan in plans if plan.state.fingerprint == state.fingerprint), None)

    def _plan_ahead(self, question: Question, state: ClusterState, plan: Plan) -> None:
        from unicron_lightning.planner.table import PlanTable

        self._last = question
        self._table = PlanTable.of(state.adopt(plan.allocation), self._table)

    def _state(self, question: Question) -> ClusterState:
        from unicron_lightning.planner.reward import Curve
        from unicron_lightning.planner.state import ClusterState
        from unicron_lightning.planner.task import PlanTask

        # The same for small changes of the cluster: what was planned ahead is for the same curves.
        reach = 1 << max(3, (question.num_places + question.node_places).bit_length())
        curves = tuple(
            Curve.of(
                PlanTask(
                    name=task.name,
                    performance=self._performance(task),
                    transition_seconds=self._transition_seconds(task.name),
                    weight=task.weight,
                    min_workers=task.min_places,
                    max_workers=max(task.max_places, task.min_places),
                    may_pause=not task.runs,
                ),
                unit=1,
                num_workers=reach,
            )
            for task in question.tasks
        )
        return ClusterState(
            tasks=curves,
            num_workers=question.num_places,
            running_seconds=self._running_seconds,
            allocation={task.name: task.before for task in question.tasks},
            lost={task.name: task.before - task.left for task in question.tasks if task.before > task.left},
            node_workers=question.node_places,
            pivot=_pivot(question, self._last),
        )


def _pivot(question: Question, last: Question | None) -> str | None:
    """The task that the event was about, as the planner names it in the plans that it makes ahead."""
    struck = [task.name for task in question.tasks if task.before > task.left]
    if struck:
        return min(struck)
    if last is None:
        return None
    names, before = ({task.name for task in each.tasks} for each in (question, last))
    changed = sorted(names ^ before)
    return changed[0] if len(changed) == 1 else None


def constant_hazard(place_mtbf_seconds: float) -> Callable[[int], float]:
    """D_running if a place fails once in so many seconds, at random."""
    return lambda num_places: place_mtbf_seconds / max(1, num_places)


class NominalPerformance:
    """T(t,x) of a task of which nothing is known: x to a power below 1, so that equal tasks get equal shares.

    Args:
        exponent: how much of a further worker's speed arrives, in (0, 1].
    """

    def __init__(self, exponent: float = 0.95) -> None:
        self._exponent = exponent

    def throughput(self, num_workers: int) -> float:
        return 0.0 if num_workers == 0 else float(num_workers) ** self._exponent

    def configuration(self, num_workers: int) -> None:
        return None

    def uncertainty(self, num_workers: int) -> float:
        return float("inf") if num_workers else 0.0


def planning_of(config: CoordinatorConfig) -> Planning:
    """The planner as configured."""
    beliefs = config.planner
    nominal = NominalPerformance(beliefs.scaling_exponent)
    # A place fails with its node, and by its own workers.
    failures_per_hour = 1 / beliefs.node_mtbf_hours + 1 / beliefs.worker_mtbf_hours
    return Planning(
        lambda _: nominal, constant_hazard(3600.0 / failures_per_hour), lambda _: beliefs.transition_seconds
    )
