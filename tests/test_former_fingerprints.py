"""The four fingerprints that were kept by hand, compared with those made from all fields."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace

import msgspec
from coordinator.allocation.test_answers import KNOWN, situation
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.situations import task as plan_task
from test_terms import submitted

from unicron_lightning.coordinator.allocation.answers import event_between, state_of
from unicron_lightning.coordinator.allocation.places import Places
from unicron_lightning.coordinator.allocation.plans import plan_key
from unicron_lightning.coordinator.allocation.request import Competitor
from unicron_lightning.coordinator.state import Cluster
from unicron_lightning.planner.events import NodesJoined
from unicron_lightning.planner.reward import Curve
from unicron_lightning.planner.task import PlanTask
from unicron_lightning.terms import Terms

terms = st.builds(
    Terms,
    weight=st.sampled_from([0.5, 1.0, 3.0]),
    min_workers=st.integers(1, 2),
    max_workers=st.integers(2, 5),
    granularity=st.integers(1, 2),
    may_pause=st.booleans(),
)
competitors = st.builds(
    Competitor, name=st.just("a"), terms=terms, runs=st.booleans(), before=st.just(2), left=st.just(2)
)
near = st.integers(0, 5)


def perhaps(one: Terms, other: Terms, index: int) -> Terms:
    """One, with at most one term of the other."""
    names = [each.name for each in fields(Terms)]
    return replace(one, **({names[index]: getattr(other, names[index])} if index < len(names) else {}))


def former_key(cluster: Cluster, places: Places) -> str:
    task = cluster.tasks["a"]
    job = cluster.lasting.jobs["a"]
    rows = [(task.id, task.weight, task.min_nodes, task.limit, task.granularity, job.may_pause and task.elastic)]
    return hashlib.blake2b(places.digest + msgspec.json.encode(rows), digest_size=16).hexdigest()


def former_terms(task: Competitor) -> tuple[object, ...]:
    of = task.terms
    return of.weight, task.min_places, task.max_places, task.runs, task.before, of.granularity, of.may_pause


def former_inputs(task: Competitor, reach: int) -> tuple[object, ...]:
    planned = PlanTask(name="a", performance=KNOWN.performances["a"], transition_seconds=5.0, terms=task.terms)
    return "a", planned.sizes(1, reach), task.terms.weight, 0.0, False


def former_digest(curve: Curve) -> bytes:
    task = curve.task
    values = (
        task.name,
        task.terms.weight,
        task.transition_seconds,
        task.terms.min_workers,
        task.terms.may_pause,
        task.caution,
        task.relayout_seconds,
        curve.unit,
    )
    content = hashlib.blake2b(repr((*values, curve.num_workers)).encode(), digest_size=16)
    for array in (curve.workers, curve.waf, curve.layouts):
        content.update(array.tobytes())
    return content.digest()


@settings(max_examples=200, deadline=None)
@given(terms)
def test_the_key_of_a_plan_is_the_same_text(stated: Terms) -> None:
    cluster = submitted(stated)
    assert plan_key(cluster, Places(), [cluster.tasks["a"]]) == former_key(cluster, Places())


@settings(max_examples=500, deadline=None)
@given(competitors, competitors, near)
def test_the_same_situations_differ_by_an_event(one: Competitor, other: Competitor, index: int) -> None:
    other = replace(other, terms=perhaps(one.terms, other.terms, index))
    event = event_between(situation(7, one), situation(8, other))
    assert event == (NodesJoined(num_workers=1) if former_terms(one) == former_terms(other) else None)


@settings(max_examples=300, deadline=None)
@given(competitors, competitors, near)
def test_a_curve_is_used_again_for_equal_tasks_only(one: Competitor, other: Competitor, index: int) -> None:
    """Where it was used for tasks that differ by a term, the new curve has the same contents."""
    other = replace(other, terms=perhaps(one.terms, other.terms, index))
    known = replace(KNOWN, curves={})
    ((first,), (second,)) = (state_of(situation(9, task), known).tasks for task in (one, other))
    if former_inputs(one, 10) == former_inputs(other, 10):
        assert first.workers.tolist() == second.workers.tolist() and first.waf.tolist() == second.waf.tolist()
    else:
        assert len(known.curves or {}) == 2


@settings(max_examples=500, deadline=None)
@given(terms, terms, near, st.sampled_from([0.0, 1.0]))
def test_states_are_told_apart_as_before(one: Terms, other: Terms, index: int, caution: float) -> None:
    """And by limits and granularities that do not show in the numbers of workers."""
    tasks = [
        replace(plan_task("a", range(9)), terms=each, caution=caution) for each in (one, perhaps(one, other, index))
    ]
    first, second = (Curve.of(each, 1, 8) for each in tasks)
    apart = (first.task.terms.max_workers, first.task.terms.granularity) != (
        second.task.terms.max_workers,
        second.task.terms.granularity,
    )
    assert (first.digest != second.digest) == (former_digest(first) != former_digest(second) or apart)
