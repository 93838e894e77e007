"""Answers the machine's questions: with the planner, which also plans ahead for likely next events, or without it.

The planner is imported at the first question: a coordinator of one task never needs it. Everything runs in one thread
beside the event loop, so that compiling and planning ahead never make an agent wait.

**Estimates** are the planner's inputs from measurements of running tasks: T(t,x), D_transition and the failure rate.

**Interface**, by number of *slots* (a slot is a worker in the planner's terms):

    performances(tasks, jobs)           -> {task id: PerformanceModel}, of all in one unit
    transition_times(tasks, planner)    -> TransitionTimes; .expected_seconds(task id), .of_kind(task id, kind)
    failure_model(tasks, past, planner) -> FailureModel; .running_seconds(number of slots)

where ``tasks`` are `state.Cluster.tasks` (or those that compete), ``jobs`` `state.Lasting.jobs`, ``past``
`state.Lasting.lifetimes` and ``planner`` the group of the configuration. A job that has not begun has an entry in
``jobs`` only, an attached torchrun in ``tasks`` only. Call these in the coordinator's own thread, as they read its
state; the results are frozen and may be used in any thread. They stay the same until a measurement changes by more than
noise, so that plans made ahead stay valid.

How T(t,x) is made:

* the prior: the analytic model of the job's ``transformer``, else of the shape that its workers report if that names an
  accelerator, else the job's profile, else `SublinearModel` with the task's micro-batches;
* corrected by the step times measured at each size (`CalibratedModel`), and beside a ``transformer`` by the profile.
  Without measurements and a ``transformer``, numpy is not imported.

FLOP/s must be comparable between tasks, which requires the FLOPs of a step: from the job (``flops_per_step``, else its
``transformer``), else from the workers (the attribute of that name of the LightningModule, or the model's shape). For a
task without either, only the *shape* of T(t,x) is measured. Its slots are valued at the median of the other tasks'
slots (1 FLOP/s if none is known), so that such tasks neither starve nor displace the others.

The planner is imported at first use: a coordinator with one task starts without it.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.events import Competitor, Question
from unicron_lightning.coordinator.incidents.facts import Lifetimes, Speed
from unicron_lightning.coordinator.state import Cluster, Task
from unicron_lightning.jobs import Job, problem_of_shape
from unicron_lightning.wire import Layout

if TYPE_CHECKING:
    from unicron_lightning.coordinator.config import PlannerConfig
    from unicron_lightning.planner.failures import FailureModel
    from unicron_lightning.planner.performance.calibrated import Measurement
    from unicron_lightning.planner.performance.description import TransformerProfile
    from unicron_lightning.planner.performance.model import ParallelConfiguration, PerformanceModel
    from unicron_lightning.planner.reward import Curve
    from unicron_lightning.planner.solver import Plan, PlanTable
    from unicron_lightning.planner.state import ClusterState, Event
    from unicron_lightning.planner.transitions import TransitionTimes

logger = logging.getLogger(__name__)


_PROFILE_ERROR: Final = 0.1
"""Relative standard error of a job's profile: a few measurements outweigh it."""
_MOST_WORKERS: Final = 1 << 15
"""Limit of the search of a ``transformer``, which bounds its memory; more workers are taken to be idle."""
_LEAST_SPREAD: Final = 0.02
"""Lower bound of a measured interval's relative deviation: equal values by chance are not exact."""
_HOUR: Final = 3600.0


def performances(tasks: Mapping[str, Task], jobs: Mapping[str, Job]) -> dict[str, PerformanceModel]:
    """Return T(t,x) of each task, by number of slots, comparable with each other.

    Args:
        tasks: those that have begun, by id.
        jobs: definitions, by task id.
    """
    names = [*tasks, *(name for name in jobs if name not in tasks)]
    pairs = {name: (tasks.get(name), jobs.get(name)) for name in names}
    nominal = _nominal_rate(pairs.values())
    made = {name: performance_of(task, job, nominal=nominal) for name, (task, job) in pairs.items()}
    return {name: _LaidOut(made[name], job) if job and job.layouts else made[name] for name, (_, job) in pairs.items()}


class _LaidOut:
    """T(t,x) of a job that names its layouts.

    Args:
        model: T(t,x).
        job: the job.
    """

    def __init__(self, model: PerformanceModel, job: Job) -> None:
        self.throughput = model.throughput
        self.uncertainty = model.uncertainty
        self._job = job

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        """Return TP and PP with a number of slots; the rest is unknown."""
        from unicron_lightning.planner.performance.model import ParallelConfiguration

        layout = self._job.layout(num_workers)
        if layout is None:
            return None
        return ParallelConfiguration(
            tensor_parallel=layout.tensor, pipeline_parallel=layout.pipeline, data_parallel=1, micro_batch_size=1
        )


def performance_of(task: Task | None, job: Job | None, *, nominal: float = 1.0) -> PerformanceModel:
    """Return T(t,x) of one task, by number of slots.

    Args:
        task: the task, if it has begun.
        job: its job, if it was submitted.
        nominal: value of a slot if the task's FLOPs are unknown, FLOP/s.
    """
    from unicron_lightning.planner.performance.model import SublinearModel

    speeds = {} if task is None else task.measured.speeds
    flops = flops_per_step(task, job)
    prior = analytic(task, job)
    points, error = {} if prior is None else _points(job), None
    if prior is None and job is not None and job.profile:
        prior, error = _profile(job.profile), _PROFILE_ERROR
    if prior is None:
        shape = SublinearModel(num_parts=_parts(task, job))
        prior = SublinearModel(rate=_level(shape, speeds, flops) or nominal, num_parts=shape.num_parts)
    if not speeds and not points:
        return prior
    if flops is None:
        # Only the shape is measured: it is scaled to the prior at the smallest size.
        least = min(speeds)
        flops = prior.throughput(least) * speeds[least].seconds
        if flops == 0:
            return prior
    from unicron_lightning.planner.performance.calibrated import CalibratedModel

    return CalibratedModel(prior=prior, measured={**points, **_measured(speeds, flops)}, prior_error=error)


class _InSlots:
    """T(t,x) of a task with several workers in a slot, by number of slots.

    Args:
        model: T(t,x) by number of workers.
        workers: in a slot.
    """

    def __init__(self, model: PerformanceModel, workers: int) -> None:
        self._model, self._workers = model, workers

    def throughput(self, num_workers: int) -> float:
        return self._model.throughput(num_workers * self._workers)

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        return self._model.configuration(num_workers * self._workers)

    def uncertainty(self, num_workers: int) -> float:
        return self._model.uncertainty(num_workers * self._workers)


def shape_of(task: Task | None, job: Job | None) -> TransformerProfile | None:
    """Return the shape of a task's model: as its job states it, else as its workers report it; None if unknown."""
    if job is not None and job.transformer is not None:
        return job.transformer
    if task is None or not task.layouts.transformer or not task.measured.samples_per_step:
        return None
    from unicron_lightning.planner.performance.description import TransformerProfile

    samples, spread = task.measured.samples_per_step, task.layouts.spread
    given: dict[str, Any] = {**task.layouts.transformer, "global_batch_size": samples, "uneven_shares": True}
    if spread is not None and samples % spread.micro_batches == 0:
        given["micro_batch_size"] = samples // spread.micro_batches
    try:
        return msgspec.convert(given, TransformerProfile)
    except msgspec.ValidationError:
        return None  # a report of another version, or of a model of another kind


def analytic(task: Task | None, job: Job | None) -> PerformanceModel | None:
    """Return T(t,x) of a task's shape without measurements, by number of slots; None if shape or machine is unknown."""
    shape = shape_of(task, job)
    if shape is None or problem_of_shape(shape) is not None:
        return None
    if job is not None:
        return _of_shape(shape, job.workers_per_node, job.max_nodes)
    level = None if task is None else task.measured.pace.level
    if task is None or level is None or not level.slots or level.workers % level.slots:
        return None
    return _of_shape(shape, level.workers // level.slots, task.max_nodes)


@functools.lru_cache(maxsize=256)  # each model searches once
def _of_shape(shape: TransformerProfile, workers: int, most_slots: int) -> PerformanceModel:
    from unicron_lightning.planner.performance.transformer import TransformerModel

    most = min(workers * most_slots, _MOST_WORKERS)
    return _InSlots(TransformerModel.of(shape, ordered=True, most_workers=most), workers)


def _points(job: Job | None) -> dict[int, Measurement]:
    """Return a job's profile as measurements that correct the analytic model."""
    if job is None or not job.profile:
        return {}
    from unicron_lightning.planner.performance.calibrated import Measurement

    at = job.submitted_at
    return {slots: Measurement(flops_per_second=rate, at_seconds=at) for slots, rate in job.profile.items()}


def _nominal_rate(tasks: Iterable[tuple[Task | None, Job | None]]) -> float:
    """Return the median FLOP/s of a slot over tasks whose FLOPs are known; 1.0 if none is."""
    rates = []
    for task, job in tasks:
        flops = flops_per_step(task, job)
        speeds = {} if task is None else task.measured.speeds
        if flops is not None and speeds:
            rates.append(statistics.median(flops / speed.seconds / slots for slots, speed in speeds.items()))
        elif job is not None and (known := [rate / slots for slots, rate in job.profile.items() if rate > 0]):
            rates.append(statistics.median(known))
        elif (model := analytic(task, job)) is not None:
            least = job.min_nodes if job is not None else task.min_nodes if task is not None else 1
            rates.append(model.throughput(least) / least)
    rates = [rate for rate in rates if rate > 0]
    return statistics.median(rates) if rates else 1.0


def flops_per_step(task: Task | None, job: Job | None) -> float | None:
    """Return FLOPs of the model in one optimizer step: as defined, else as reported by workers, else None."""
    if job is not None and job.flops_per_step is not None:
        return job.flops_per_step
    if job is not None and job.transformer is not None:
        return float(job.transformer.flops_per_step)
    if task is not None and task.measured.flops_per_step is not None:
        return task.measured.flops_per_step
    reported = shape_of(task, job)
    return None if reported is None else float(reported.flops_per_step)


def transition_times(tasks: Mapping[str, Task], planner: PlannerConfig) -> TransitionTimes:
    """Return D_transition by task and kind, from measured transitions.

    Args:
        tasks: those that have begun.
        planner: has the medians expected before any transition was measured.
    """
    from unicron_lightning.planner.transitions import TransitionTime, TransitionTimes

    medians = {
        "shrink_in_place": planner.shrink_seconds,
        "grow_in_place": planner.grow_seconds,
        "restart": planner.restart_seconds,
        "reconfigure_cold": planner.cold_seconds,
    }
    priors = {kind: TransitionTime(median_seconds=seconds) for kind, seconds in medians.items()}
    measured = [(name, each) for name, task in tasks.items() for each in task.measured.transitions]
    measured.sort(key=lambda item: item[1].at)
    return TransitionTimes([(name, each.kind, each.seconds) for name, each in measured], priors)


def _relayout_times(times: TransitionTimes, jobs: Mapping[str, Job]) -> Callable[[str], float]:
    """Return D_relayout by task: that of a cold reconfiguration for jobs with layouts, 0 for all others."""
    laid = frozenset(name for name, job in jobs.items() if job.layouts or job.auto_layouts)
    return lambda name: times.of_kind(name, "reconfigure_cold").expected_seconds if name in laid else 0.0


def failure_model(tasks: Mapping[str, Task], past: Lifetimes, planner: PlannerConfig) -> FailureModel:
    """Return D_running by number of slots.

    Args:
        tasks: those that have begun.
        past: lifetimes of ended tasks.
        planner: has the mean times between failures, each weighted like one observed failure.
    """
    from unicron_lightning.planner.failures import FailureModel, RateBelief

    slots = RateBelief.from_mtbf(planner.node_mtbf_hours * _HOUR)
    workers = RateBelief.from_mtbf(planner.worker_mtbf_hours * _HOUR)
    for each in (past, *(task.measured.lifetimes for task in tasks.values())):
        slots = slots.observed(num_failures=each.slots_lost, exposure_seconds=each.slot_seconds)
        workers = workers.observed(num_failures=each.workers_lost, exposure_seconds=each.slot_seconds)
    return FailureModel(worker=workers.hazard(), node=slots.hazard(), workers_per_node=1)


def _parts(task: Task | None, job: Job | None) -> float | None:
    """Return micro-batches of a step per worker of a slot, called parts in `SublinearModel`."""
    capacity = 0 if task is None else task.capacity()
    if not capacity:
        return None
    level = task.measured.pace.level if task is not None else None
    per_slot = level.workers / level.slots if level is not None and level.slots else 0.0
    return capacity / (per_slot or (job.workers_per_node if job is not None else 1))


def _level(shape: PerformanceModel, speeds: Mapping[int, Speed], flops: float | None) -> float | None:
    """Return the measured FLOP/s of a slot, assuming that a model of rate 1 has the right shape."""
    if flops is None or not speeds:
        return None
    return statistics.median(flops / speed.seconds / shape.throughput(slots) for slots, speed in speeds.items())


def _profile(profile: Mapping[int, float]) -> PerformanceModel:
    from unicron_lightning.planner.performance.model import MeasuredPoint, MeasuredTable

    points = tuple(MeasuredPoint(num_workers=x, flops_per_second=rate) for x, rate in sorted(profile.items()))
    return MeasuredTable(points=points, between="linear")


def _measured(speeds: Mapping[int, Speed], flops: float) -> dict[int, Measurement]:
    from unicron_lightning.planner.performance.calibrated import Measurement

    return {
        slots: Measurement(
            flops_per_second=flops / speed.seconds,
            num_points=float(speed.intervals),
            deviation=max(speed.spread, _LEAST_SPREAD),
            at_seconds=speed.at,
        )
        for slots, speed in speeds.items()
    }


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """Inputs of the planner when a question is asked. Frozen, since it is passed to another thread.

    Attributes:
        performances: T(t,x) by task and number of places.
        running_seconds: D_running by number of places.
        transition_seconds: D_transition by task.
        caution: `PlanTask.caution` of all tasks.
        relayout_seconds: D_relayout by task; 0 for tasks that keep their layout.
        lays_out: tasks whose layout the plan chooses.
        curves: curves made before, by their inputs, if no ``performances`` change between questions; else None.
    """

    performances: Mapping[str, PerformanceModel]
    running_seconds: Callable[[int], float]
    transition_seconds: Callable[[str], float]
    caution: float = 0.0
    relayout_seconds: Callable[[str], float] = lambda _: 0.0
    lays_out: frozenset[str] = frozenset()
    curves: dict[object, Curve] | None = None

    @classmethod
    def of(cls, cluster: Cluster, planner: PlannerConfig) -> Knowledge:
        """Combine measurements with the configured estimates."""
        tasks, lasting = cluster.tasks, cluster.lasting
        failures = failure_model(tasks, lasting.lifetimes, planner)
        transitions = transition_times(tasks, planner)
        return cls(
            performances=performances(tasks, lasting.jobs),
            running_seconds=failures.running_seconds,
            transition_seconds=transitions.expected_seconds,
            caution=planner.caution,
            relayout_seconds=_relayout_times(transitions, lasting.jobs),
            lays_out=frozenset(name for name, job in lasting.jobs.items() if job.auto_layouts),
        )


class Planning:
    """The planner of one coordinator."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unicron-planner")
        self._ahead: _AskedAhead | None = None

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
        parts, plan = question.divided(), None if self._ahead is None else self._ahead.plan(question)
        if question.parts:
            seconds = known.running_seconds(question.num_places)  # until a failure of any kind
            known = replace(known, running_seconds=lambda _: seconds)
        plans = [solve(state_of(part, known)) for part in parts] if plan is None else [plan]
        return ev.Planned(
            key=question.key,
            allocation=_allocation(question, [allocation_of(*each) for each in zip(parts, plans, strict=True)]),
            waf=math.fsum(each.waf for each in plans),
            milliseconds=round(1e3 * (time.perf_counter() - began), 3),
            foreseen=plan is not None,
            layouts={
                k: v for part, each in zip(parts, plans, strict=True) for k, v in layouts_of(part, each, known).items()
            },
        )

    def _plan_ahead(self, standing: Question, known: Knowledge) -> None:
        from unicron_lightning.planner.solver import PlanTable, solve

        if standing.parts:
            self._ahead = None  # plans ahead are for one kind of nodes
            return
        state = state_of(standing, known)
        before = self._ahead
        if before is None or before.state.fingerprint != state.fingerprint:
            table = PlanTable.of(state)
        elif before.standing != standing:
            table = before.table
        else:
            return
        launches = {each: solve(state_of(each, known)) for each in standing.launches()}
        self._ahead = _AskedAhead(standing=standing, state=state, table=table, launches=launches)


@dataclass(frozen=True, kw_only=True)
class _AskedAhead:
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


def layouts_of(question: Question, plan: Plan, known: Knowledge) -> dict[str, Layout]:
    """Return the plan's layouts of the tasks that leave it to the plan, by the tasks' own names."""
    names = {task.plan_name: task.name for task in question.tasks if task.name in known.lays_out}
    chosen = {part.name: part.configuration for part in plan.tasks} if names else {}
    return {
        name: Layout(tensor=layout.tensor_parallel, pipeline=layout.pipeline_parallel)
        for plan_name, name in names.items()
        if (layout := chosen[plan_name]) is not None
    }


def _allocation(question: Question, parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the places of all tasks, given those of each kind of nodes."""
    known = {name: places for each in parts for name, places in each.items()}
    return {task.name: known.get(task.name, 0) for task in question.tasks}


def keep(question: Question) -> ev.Planned:
    """Answer a question without taking a place from any task, see `_kept`."""
    return ev.Planned(key=question.key, allocation=_allocation(question, map(_kept, question.divided())))


def _kept(question: Question) -> dict[str, int]:
    """Return the places of the tasks on one kind of nodes.

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
    return places


def _more(places: int, task: Competitor) -> int:
    """Return the next number of places above ``places`` that the task can use."""
    step = task.terms.granularity
    return (places // step + 1) * step
