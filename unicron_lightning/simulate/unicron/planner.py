"""Answers the machine's questions as `coordinator.allocation.answers` does: the same planner, state and estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation import estimates
from unicron_lightning.coordinator.allocation.answers import Knowledge, state_of
from unicron_lightning.coordinator.allocation.request import Question
from unicron_lightning.coordinator.state import Cluster
from unicron_lightning.simulate.costs import Costs

if TYPE_CHECKING:
    from unicron_lightning.planner.performance.model import PerformanceModel


def answer(question: Question, known: Knowledge) -> ev.Planned:
    """Return the plan, as an input of the machine."""
    from unicron_lightning.planner.solver import solve

    plan = solve(state_of(question, known))
    return ev.Planned(key=question.key, allocation=dict(plan.allocation), waf=plan.waf)


def knowledge(cluster: Cluster, performances: Mapping[str, PerformanceModel], costs: Costs) -> Knowledge:
    """Combine the tasks' exact speeds with the coordinator's measurements of everything else.

    Args:
        cluster: the machine's state.
        performances: T(t,x) by number of places. In the real system these are profiles, corrected by measured steps.
        costs: an operator's estimates of transitions before any was measured.
    """
    tasks = cluster.tasks
    hours = costs.extra.get("node_mtbf_hours", 720.0), costs.extra.get("worker_mtbf_hours", 720.0)
    failures = estimates.failure_model(
        tasks, cluster.lasting.lifetimes, slot_mtbf=hours[0] * 3600.0, worker_mtbf=hours[1] * 3600.0
    )
    transitions = estimates.transition_times(
        tasks,
        shrink_seconds=max(1e-3, costs.takes("continue")),
        grow_seconds=max(1e-3, costs.takes("join")),
        restart_seconds=max(1e-3, costs.takes("start") + costs.takes("join")),
        cold_seconds=max(1e-3, costs.takes("start") + costs.takes("join")),
    )
    return Knowledge(
        performances=performances,
        running_seconds=failures.running_seconds,
        transition_seconds=transitions.expected_seconds,
    )
