"""The planner's inputs from measurements of running tasks: T(t,x), D_transition and the failure rate.

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

* the prior: the job's profile if it has one, else `SublinearModel` with the task's micro-batches;
* corrected by the step times measured at each size (`CalibratedModel`); with neither, numpy is not imported.

FLOP/s must be comparable between tasks, which requires the FLOPs of a step: from the job (``flops_per_step``), else
from the workers (the attribute of that name of the LightningModule). For a task without either, only the *shape* of
T(t,x) is measured. Its slots are valued at the median of the other tasks' slots (1 FLOP/s if none is known), so that
such tasks neither starve nor displace the others.

The planner is imported at first use: a coordinator with one task starts without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from unicron_lightning.coordinator.incidents.record import Lifetimes, Speed
from unicron_lightning.coordinator.state import Task
from unicron_lightning.jobs import Job

if TYPE_CHECKING:
    from unicron_lightning.coordinator.config.schema import PlannerConfig
    from unicron_lightning.planner.failures import FailureModel
    from unicron_lightning.planner.performance.calibrated import Measurement
    from unicron_lightning.planner.performance.model import ParallelConfiguration, PerformanceModel
    from unicron_lightning.planner.transitions import TransitionTimes

_PROFILE_ERROR: Final = 0.1
"""Relative standard error of a job's profile: a few measurements outweigh it."""
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
    nominal = nominal_rate(pairs.values())
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
    prior: PerformanceModel
    if job is not None and job.profile:
        prior = _profile(job.profile)
    else:
        shape = SublinearModel(num_parts=_parts(task, job))
        prior = SublinearModel(rate=_level(shape, speeds, flops) or nominal, num_parts=shape.num_parts)
    if not speeds:
        return prior
    if flops is None:
        # Only the shape is measured: it is scaled to the prior at the smallest size.
        least = min(speeds)
        flops = prior.throughput(least) * speeds[least].seconds
        if flops == 0:
            return prior
    from unicron_lightning.planner.performance.calibrated import CalibratedModel

    error = _PROFILE_ERROR if job is not None and job.profile else None
    return CalibratedModel(prior=prior, measured=_measured(speeds, flops), prior_error=error)


def nominal_rate(tasks: Iterable[tuple[Task | None, Job | None]]) -> float:
    """Return the median FLOP/s of a slot over tasks whose FLOPs are known; 1.0 if none is."""
    rates = []
    for task, job in tasks:
        flops = flops_per_step(task, job)
        speeds = {} if task is None else task.measured.speeds
        if flops is not None and speeds:
            rates.append(statistics.median(flops / speed.seconds / slots for slots, speed in speeds.items()))
        elif job is not None and (known := [rate / slots for slots, rate in job.profile.items() if rate > 0]):
            rates.append(statistics.median(known))
    return statistics.median(rates) if rates else 1.0


def flops_per_step(task: Task | None, job: Job | None) -> float | None:
    """Return FLOPs of the model in one optimizer step: as defined, else as reported by workers, else None."""
    if job is not None and job.flops_per_step is not None:
        return job.flops_per_step
    return None if task is None else task.measured.flops_per_step


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


def relayout_times(times: TransitionTimes, jobs: Mapping[str, Job]) -> Callable[[str], float]:
    """Return D_relayout by task: that of a cold reconfiguration for jobs with layouts, 0 for all others."""
    laid = frozenset(name for name, job in jobs.items() if job.layouts)
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
