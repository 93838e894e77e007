"""Answers the machine's questions: with the planner, which also plans ahead for likely next events, or without it.

The planner is imported at the first question: a coordinator of one task never needs it. Everything runs in one thread
beside the event loop, so that compiling and planning ahead never make an agent wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation import estimates
from unicron_lightning.coordinator.allocation.request import Competitor, Question
from unicron_lightning.coordinator.state import Cluster

if TYPE_CHECKING:
    from unicron_lightning.coordinator.config.schema import PlannerConfig
    from unicron_lightning.planner.performance.model import PerformanceModel
    from unicron_lightning.planner.reward import Curve
    from unicron_lightning.planner.solver import Plan, PlanTable
    from unicron_lightning.planner.state import ClusterState, Event

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """Inputs of the planner when a question is asked. Frozen, since it is passed to another thread.

    Attributes:
        performances: T(t,x) by task and number of places.
        running_seconds: D_running by number of places.
        transition_seconds: D_transition by task.
        caution: `PlanTask.caution` of all tasks.
        relayout_seconds: D_relayout by task; 0 for tasks that keep their layout.
        curves: curves made before, by their inputs, if no ``performances`` change between questions; else None.
    """

    performances: Mapping[str, PerformanceModel]
    running_seconds: Callable[[int], float]
    transition_seconds: Callable[[str], float]
    caution: float = 0.0
    relayout_seconds: Callable[[str], float] = lambda _: 0.0
    curves: dict[object, Curve] | None = None

    @classmethod
    def of(cls, cluster: Cluster, planner: PlannerConfig) -> Knowledge:
        """Combine measurements with the configured estimates."""
        tasks, lasting = cluster.tasks, cluster.lasting
        failures = estimates.failure_model(tasks, lasting.lifetimes, planner)
        transitions = estimates.transition_times(tasks, planner)
        return cls(
            performances=estimates.performances(tasks, lasting.jobs),
            running_seconds=failures.running_seconds,
            transition_seconds=transitions.expected_seconds,
            caution=planner.caution,
            relayout_seconds=estimates.relayout_times(transitions, lasting.jobs),
        )


class Planning:
    """The planner of one coordinator."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unicron-planner")
        self._ahead: AskedAhead | None = None

    def ask(self, question: Question, known: Knowledge, then: Callable[[ev.Planned], None]) -> None:
        """Answer in the planner's thread, call ``then`` there with the answer, and then plan ahead."""

        def work() -> None:
            try:
                answer = self._answer(question, known)
                then(answer)
                self._plan_ahead(question.standing(answer.allocation), known)
            except Exception:
                # The tasks continue unchanged; the next change asks again.
                logger.exception("planning_failed question=%s", question)

        self._thread.submit(work)

    def plan_ahead(self, standing: Question, known: Knowledge) -> None:
        """Compute, in the planner's thread, plans for likely next events; existing ones are kept.

        Args:
            standing: the present situation, in which nothing is to be changed.
            known: the planner's inputs.
        """

        def work() -> None:
            try:
                self._plan_ahead(standing, known)
            except Exception:
                logger.exception("planning_ahead_failed standing=%s", standing)

        self._thread.submit(work)

    def close(self) -> None:
        """Wait for the computation in progress, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _answer(self, question: Question, known: Knowledge) -> ev.Planned:
        from unicron_lightning.planner.solver import solve

        began = time.perf_counter()
        plan = self._ahead.plan(question) if self._ahead is not None else None
        foreseen = plan is not None
        if plan is None:
            plan = solve(state_of(question, known))
        return ev.Planned(
            key=question.key,
            allocation=allocation_of(question, plan),
            waf=plan.waf,
            milliseconds=round(1e3 * (time.perf_counter() - began), 3),
            foreseen=foreseen,
        )

    def _plan_ahead(self, standing: Question, known: Knowledge) -> None:
        from unicron_lightning.planner.solver import PlanTable, solve

        state = state_of(standing, known)
        before = self._ahead
        if before is None or before.state.fingerprint != state.fingerprint:
            table = PlanTable.of(state)
        elif before.standing != standing:
            table = before.table
        else:
            return
        launches = {each: solve(state_of(each, known)) for each in standing.launches()}
        self._ahead = AskedAhead(standing=standing, state=state, table=table, launches=launches)


@dataclass(frozen=True, kw_only=True)
class AskedAhead:
    """Plans for likely next events.

    Attributes:
        standing: the situation that they were made in, in which nothing was to be changed.
        state: the same situation in the planner's terms.
        table: the plans.
        launches: plans for the launch of jobs when the task that they come after has succeeded, by situation. They
            differ from ``standing`` by several tasks, so they are not in the table.
    """

    standing: Question
    state: ClusterState
    table: PlanTable
    launches: Mapping[Question, Plan] = field(default_factory=dict)

    def plan(self, question: Question) -> Plan | None:
        """Return the plan for a situation that differs by one foreseen event; None for any other.

        Ends and joins start waiting tasks. Among equal ones the oldest is next, as the names for the planner rise with
        age (`unicron_lightning.planner.solver`).
        """
        event = event_between(self.standing, question)
        if event is None:
            return self.launches.get(question.situation)
        return self.table.look_up(self.state, event)


def event_between(standing: Question, question: Question) -> Event | None:
    """Return the event between two situations, if it is one that is planned ahead; None otherwise."""
    from unicron_lightning.planner.state import NodesJoined, TaskFinished, WorkersLost

    old = {task.name: task for task in standing.tasks}
    new = {task.name: task for task in question.tasks}
    # Only the places that tasks have left are part of an event.
    if any(name not in old or replace(task, left=0) != replace(old[name], left=0) for name, task in new.items()):
        return None
    gone = sorted(old[name].plan_name for name in old.keys() - new.keys())
    struck = {task.plan_name: task.before - task.left for task in new.values() if task.before > task.left}
    lost = standing.num_places - question.num_places
    if gone:
        return TaskFinished(task=gone[0]) if len(gone) == 1 and not struck and not lost else None
    if lost > 0 and len(struck) <= 1:
        return WorkersLost(num_workers=lost, by_task=tuple(struck.items()))
    return NodesJoined(num_workers=-lost) if lost < 0 and not struck else None


def state_of(question: Question, known: Knowledge) -> ClusterState:
    """Convert a question to the planner's terms."""
    from unicron_lightning.planner.state import ClusterState

    reach = question.num_places + question.node_places
    curves = tuple(_curve(task, known, reach) for task in question.tasks)
    return ClusterState(
        tasks=curves,
        num_workers=question.num_places,
        running_seconds=known.running_seconds,
        allocation={task.plan_name: task.before for task in question.tasks},
        lost={task.plan_name: task.before - task.left for task in question.tasks if task.before > task.left},
        node_workers=question.node_places,
    )


def _curve(task: Competitor, known: Knowledge, reach: int) -> Curve:
    """Evaluate a task's performance at every number of places up to ``reach`` that it may get."""
    from unicron_lightning.planner.reward import Curve, PlanTask

    planned = PlanTask(
        name=task.plan_name,
        performance=known.performances[task.name],
        transition_seconds=known.transition_seconds(task.name),
        terms=replace(
            task.terms,
            max_workers=max(task.max_places, task.terms.min_workers),
            may_pause=task.terms.may_pause or not task.runs,
        ),
        caution=known.caution,
        relayout_seconds=known.relayout_seconds(task.name),
    )
    if known.curves is None:
        return Curve.of(planned, unit=1, num_workers=reach)
    inputs = (task.name, planned.sizes(1, reach), planned.terms, known.caution, bool(planned.relayout_seconds))
    if (curve := known.curves.get(inputs)) is None:
        curve = known.curves[inputs] = Curve.of(planned, unit=1, num_workers=reach)
    return curve.of_task(planned, reach)


def allocation_of(question: Question, plan: Plan) -> dict[str, int]:
    """Return the plan's number of places of each task, by the tasks' own names."""
    return {task.name: plan.allocation[task.plan_name] for task in question.tasks}


def keep(question: Question) -> ev.Planned:
    """Answer a question without taking a place from any task.

    Free places go, task by task in the question's order, to tasks that reach their minimum with them. The rest goes to
    the task with the fewest places: one at a time, or enough for the next multiple of its granularity.
    """
    tasks = question.tasks
    places = {task.name: min(task.left, task.max_places) for task in tasks}
    free = question.num_places - sum(places.values())
    for task in tasks:
        missing = _more(task.terms.min_workers - 1, task) - places[task.name]
        if 0 < missing <= free:
            places[task.name] += missing
            free -= missing
    while free > 0:
        below = [task for task in tasks if task.terms.min_workers <= places[task.name] < task.max_places]
        more = {task.name: _more(places[task.name], task) for task in below}
        able = [t for t in below if more[t.name] <= min(t.max_places, places[t.name] + free)]
        if not able:
            break
        name = min(able, key=lambda task: places[task.name]).name
        free -= more[name] - places[name]
        places[name] = more[name]
    return ev.Planned(key=question.key, allocation=places)


def _more(places: int, task: Competitor) -> int:
    """Return the next number of places above ``places`` that the task can use."""
    step = task.terms.granularity
    return (places // step + 1) * step
