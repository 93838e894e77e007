"""Answers the machine's questions with the planner, and makes the answers to the next ones before they are asked.

The planner is imported when the first question comes: a coordinator of one task never needs it. Everything runs in one
thread beside the event loop, so that compiling and planning ahead never make an agent wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator import throughput
from unicron_lightning.coordinator.question import Question
from unicron_lightning.coordinator.state import Cluster

if TYPE_CHECKING:
    from unicron_lightning.coordinator.config import PlannerConfig
    from unicron_lightning.planner.performance.model import PerformanceModel
    from unicron_lightning.planner.plan import Plan
    from unicron_lightning.planner.state import ClusterState
    from unicron_lightning.planner.table import PlanTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What is known of the tasks and the cluster when a question is asked. Frozen: it goes to another thread.

    Attributes:
        performances: T(t,x) by task and number of places.
        running_seconds: D_running by number of places.
        transition_seconds: D_transition by task.
    """

    performances: Mapping[str, PerformanceModel]
    running_seconds: Callable[[int], float]
    transition_seconds: Callable[[str], float]

    @classmethod
    def of(cls, cluster: Cluster, planner: PlannerConfig) -> Knowledge:
        """What was measured, beside what is believed."""
        tasks, lasting = cluster.tasks, cluster.lasting
        failures = throughput.failure_model(
            tasks,
            lasting.lifetimes,
            slot_mtbf=planner.node_mtbf_hours * 3600.0,
            worker_mtbf=planner.worker_mtbf_hours * 3600.0,
        )
        transitions = throughput.transition_times(
            tasks,
            shrink_seconds=planner.shrink_seconds,
            grow_seconds=planner.grow_seconds,
            restart_seconds=planner.restart_seconds,
            cold_seconds=planner.cold_seconds,
        )
        return cls(
            performances=throughput.performances(tasks, lasting.jobs),
            running_seconds=failures.running_seconds,
            transition_seconds=transitions.expected_seconds,
        )


class Planning:
    """The planner of one coordinator."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unicron-planner")
        self._last: Question | None = None
        self._table: PlanTable | None = None

    def ask(self, question: Question, known: Knowledge, then: Callable[[ev.Planned], None]) -> None:
        """Answer in the planner's thread, where ``then`` is called with it, and go on to plan ahead."""

        def work() -> None:
            try:
                state, plan, answer = self._answer(question, known)
                then(answer)
                self._plan_ahead(question, state, plan)
            except Exception:
                # The tasks go on as they are; the next change asks anew.
                logger.exception("planning_failed question=%s", question)

        self._thread.submit(work)

    def close(self) -> None:
        """Wait for what is being planned, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _answer(self, question: Question, known: Knowledge) -> tuple[ClusterState, Plan, ev.Planned]:
        from unicron_lightning.planner.solver import solve

        began = time.perf_counter()
        state = self._state(question, known)
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

    def _state(self, question: Question, known: Knowledge) -> ClusterState:
        from unicron_lightning.planner.reward import Curve
        from unicron_lightning.planner.state import ClusterState
        from unicron_lightning.planner.task import PlanTask

        # The same for small changes of the cluster: what was planned ahead is for the same curves.
        reach = 1 << max(3, (question.num_places + question.node_places).bit_length())
        curves = tuple(
            Curve.of(
                PlanTask(
                    name=task.name,
                    performance=known.performances[task.name],
                    transition_seconds=known.transition_seconds(task.name),
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
            running_seconds=known.running_seconds,
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
