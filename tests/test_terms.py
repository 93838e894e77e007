"""A task's terms: each is in every fingerprint of a plan, and each reaches the planner."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from coordinator.allocation.test_answers import KNOWN, situation
from planner.situations import task as plan_task
from simulate.scenes import CLUSTER, costs, random_trace
from simulate.scenes import task as sim_task

from unicron_lightning.cli.plan.situation import PerformanceConfig, PlanClusterConfig, PlanTaskConfig, task_of
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation.answers import event_between, state_of
from unicron_lightning.coordinator.allocation.places import Places
from unicron_lightning.coordinator.allocation.plans import plan_key, terms_of
from unicron_lightning.coordinator.events import Competitor, Limits
from unicron_lightning.coordinator.lifecycle import Lifecycle
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.state import Cluster
from unicron_lightning.jobs import Job, JobShare, stating
from unicron_lightning.planner.reward import Curve
from unicron_lightning.simulate.unicron_system import Ablation, System
from unicron_lightning.terms import Terms

TERMS = [each.name for each in fields(Terms)]
STATED = Terms(weight=2.0, min_workers=2, max_workers=6, granularity=1, may_pause=False)


def with_another(name: str) -> Terms:
    """`STATED` with another value of one term."""
    value = getattr(STATED, name)
    return replace(STATED, **{name: not value if isinstance(value, bool) else 2 * value})


def submitted(terms: Terms) -> Cluster:
    """A coordinator with one job of these terms, whose workers have sent their hellos."""
    machine = Machine(ev.Limits())
    machine.handle(ev.Started(), 1.0)
    machine.handle(ev.Submit(jobs=(Job(name="a", command=["train.py"], **stating(terms)),)), 1.0)
    machine.tasks["a"].lifecycle = Lifecycle(script="elastic")
    machine.tasks["a"].replica_nodes = terms.granularity
    return machine.cluster


def competitor(terms: Terms) -> Competitor:
    return Competitor(name="a", terms=terms, runs=True, before=2, left=2)


def test_all_terms_are_in_the_values() -> None:
    assert STATED.values == tuple(getattr(STATED, name) for name in TERMS)


@pytest.mark.parametrize("name", TERMS)
def test_no_plan_is_kept_when_a_term_changes(name: str) -> None:
    """`plans.plan_key`: the machine asks again."""
    one, other = submitted(STATED), submitted(with_another(name))
    assert terms_of(other, other.tasks["a"]) == with_another(name)
    assert plan_key(one, Places(), [one.tasks["a"]]) != plan_key(other, Places(), [other.tasks["a"]])
    assert plan_key(one, Places(), [one.tasks["a"]]) == plan_key(submitted(STATED), Places(), [one.tasks["a"]])


def test_the_plan_of_a_coordinator_before_this_value_is_kept() -> None:
    """The key in its store is of the terms in this order: a coordinator that continues asks for no new plan."""
    cluster = submitted(Terms(weight=2.0, min_workers=2, max_workers=6, granularity=2, may_pause=False))
    assert plan_key(cluster, Places(), [cluster.tasks["a"]]) == "c266fd3f1fe105a8419ab615e8aeea96"


@pytest.mark.parametrize("name", TERMS)
def test_no_plan_made_ahead_is_served_when_a_term_changes(name: str) -> None:
    """`answers.event_between`: the situation is not the foreseen one."""
    standing, other = situation(7, competitor(STATED)), situation(8, competitor(with_another(name)))
    assert event_between(standing, situation(8, competitor(STATED))) is not None
    assert event_between(standing, other) is None


@pytest.mark.parametrize("name", TERMS)
def test_no_curve_made_before_is_used_when_a_term_changes(name: str) -> None:
    """`answers.Knowledge.curves`, of the simulator."""
    known = replace(KNOWN, curves={})
    for terms in (STATED, with_another(name), STATED):
        (curve,) = state_of(situation(16, competitor(terms)), known).tasks
        assert curve.task.terms == terms
    assert len(known.curves or {}) == 2


@pytest.mark.parametrize("name", TERMS)
def test_a_state_of_another_term_has_another_fingerprint(name: str) -> None:
    """`Curve.digest`: fingerprints of states and digests of columns are made of it."""
    digests = {
        Curve.of(replace(plan_task("a", range(17)), terms=terms), 1, 16).digest
        for terms in (STATED, with_another(name), replace(STATED))
    }
    assert len(digests) == 2


def test_a_fingerprint_has_more_than_the_numbers_of_workers() -> None:
    """A limit at the end of the curve decides whether a node that joins is of use."""
    most, none = (Curve.of(plan_task("a", range(9), max_workers=limit), 1, 8) for limit in (8, None))
    assert most.workers.tolist() == none.workers.tolist() and most.digest != none.digest


@pytest.mark.parametrize("name", TERMS)
def test_a_term_that_users_state_reaches_the_planner(name: str) -> None:
    other = with_another(name)
    stated = {each: getattr(other, each) for each in TERMS}
    config = PlanTaskConfig(performance=PerformanceConfig(flops={1: 1.0}), transition_seconds=1.0, **stated)
    assert task_of("a", config, "tasks", PlanClusterConfig(), Path()).terms == other
    assert stating(other).keys() <= {each.name for each in fields(JobShare)}, "users state it for a job"
    cluster = submitted(other)
    asked = competitor(terms_of(cluster, cluster.tasks["a"]))
    assert state_of(situation(16, asked), KNOWN).tasks[0].task.terms == other


def test_simulated_jobs_have_the_terms_of_their_tasks() -> None:
    tasks = [sim_task("a", weight=3.0, min_workers=6, max_workers=12, granularity=4)]
    system = System(Ablation(may_pause=True), CLUSTER, tasks, random_trace(0, faults=3), costs(), Limits())
    job = system.shell.machine.cluster.lasting.jobs["a"]
    expected = stating(replace(tasks[0].terms, min_workers=2, max_workers=3))
    assert {name: getattr(job, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("terms", "numbers"),
    [
        (Terms(), [0, 1, 2, 99]),
        (Terms(min_workers=2, max_workers=6), [0, 0, 2, 6]),
        (Terms(min_workers=2, max_workers=6, granularity=4), [0, 0, 0, 4]),
        (Terms(min_workers=4, max_workers=5, granularity=3), [0, 0, 0, 0]),
    ],
)
def test_usable_workers_are_multiples_between_the_limits(terms: Terms, numbers: list[int]) -> None:
    assert [terms.usable(number) for number in (0, 1, 2, 99)] == numbers
