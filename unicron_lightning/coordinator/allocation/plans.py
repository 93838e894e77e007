"""The places of each task: the plan is requested when its inputs change, and put in force.

The machine does not plan itself. When the usable places or the competing tasks change, it asks (`events.RequestPlan`
with a `Question`), and the shell answers with the planner's numbers (`events.Planned`). An answer to an older question
is dropped, since the newer question covers all later changes. Until the answer arrives the assignment stays as it is,
except that places that are gone are released. A single task needs no planner: it gets every place it can use.

Putting a plan in force only records the task of each place (`state.Lasting.assigned`). An agent whose place belongs to
another task is treated as if its node were drained: its workers leave at a step boundary. Then the place is free, and
the other task's agent there is granted its slot. So nothing has to be undone when the next plan arrives in between.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.allocation.places import (
    NO_TASK,
    Places,
    competing_tasks,
    several_compete,
    usable_places,
)
from unicron_lightning.coordinator.events import Competitor, Question
from unicron_lightning.coordinator.membership.epochs import keep_running, save_and_stop
from unicron_lightning.coordinator.membership.slots import keep_together, worth
from unicron_lightning.coordinator.orders import calibration, relayout
from unicron_lightning.coordinator.state import Agent, Cluster, Task, has_multiple
from unicron_lightning.planner.placement import assign
from unicron_lightning.terms import Terms
from unicron_lightning.wire import Layout


def review_allocation(cluster: Cluster, turn: Turn) -> None:
    """Ask for a plan if its inputs have changed; for a single task whose layout is given, make the plan directly."""
    places, tasks = usable_places(cluster, turn.daemons), competing_tasks(cluster)
    calibration.check(cluster, turn, places, tasks)
    key = plan_key(cluster, places, tasks)
    lasting = cluster.lasting
    if any(task.rebuilding for task in tasks):
        return  # only agents know the plan in force, and not all have registered yet
    if key == lasting.planned:
        cluster.asked = None
        if keep_together(tasks, places, lasting.assigned) != lasting.assigned:
            _put_in_force(cluster, turn, key, places, lasting.allocation, lasting.layouts, about={})
    elif key != cluster.asked and (len(tasks) > 1 or _leaves_layout(cluster, tasks)):
        cluster.asked = key
        _keep_standing(cluster, turn, places)
        turn.actions.append(ev.RequestPlan(question=_question(cluster, key, places, tasks)))
    elif key != cluster.asked:
        wanted = {task.id: _alone(task, places.able[task.id]) for task in tasks}
        _put_in_force(cluster, turn, key, places, wanted, layouts={}, about={})


def standing(cluster: Cluster) -> Question | None:
    """Return the present situation, for planning ahead; None if no plan is in force or no alternative exists."""
    places, tasks = usable_places(cluster), competing_tasks(cluster)
    if len(tasks) + len(cluster.lasting.held) < 2 or cluster.lasting.planned != plan_key(cluster, places, tasks):
        return None
    question = _question(cluster, cluster.lasting.planned, places, tasks)
    return question if all(task.before == task.left for task in question.tasks) else None


def gather(cluster: Cluster, turn: Turn, agent: Agent, is_new: bool) -> None:
    """Handle an agent's registration: if tasks compete, it counts after a short delay, with others that arrive.

    The agents of a node, one per task, register within a second of each other. Planning immediately would move tasks
    for the first agent, and again for each further one.
    """
    turn.places_changed = True
    turn.daemons.registers(agent.task)
    if is_new and agent.place is not None and several_compete(cluster):
        agent.fresh = True
        if not cluster.gathering:
            cluster.gathering = True
            turn.timer("plan", turn.limits.join_grace)


def gathered(cluster: Cluster, turn: Turn) -> None:
    """Count all agents that have registered so far."""
    cluster.gathering = False
    turn.places_changed = True
    for task in cluster.tasks.values():
        for agent in task.agents.values():
            agent.fresh = False


def take_plan(cluster: Cluster, turn: Turn, event: ev.Planned) -> None:
    """Put the answer to the newest question in force; drop an answer to an older one."""
    places, tasks = usable_places(cluster, turn.daemons), competing_tasks(cluster)
    if event.key == cluster.asked == plan_key(cluster, places, tasks):
        about = {"waf": event.waf, "milliseconds": event.milliseconds, "foreseen": event.foreseen}
        _put_in_force(cluster, turn, event.key, places, event.allocation, event.layouts, about)
        turn.places_changed = True


def _put_in_force(
    cluster: Cluster,
    turn: Turn,
    key: str,
    places: Places,
    wanted: Mapping[str, int],
    layouts: Mapping[str, Layout],
    about: Mapping[str, Any],
) -> None:
    lasting = cluster.lasting
    before = dict(lasting.assigned)
    nobody = dict.fromkeys(places.by_name, NO_TASK)
    worths = [worth(cluster.tasks[task], before) for task in wanted if task in cluster.tasks]
    after = {**nobody, **assign(places, wanted, before, {k: v for each in worths for k, v in each.items()})}
    lasting.assigned = keep_together(competing_tasks(cluster), places, after)
    lasting.planned, lasting.layouts = key, dict(layouts)
    cluster.asked = None
    counts = Counter(lasting.assigned.values())
    was, lasting.allocation = lasting.allocation, {task: counts[task] for task in sorted(wanted)}
    turn.save_lasting()
    if was != lasting.allocation or before != lasting.assigned:
        allocation, places_of = lasting.allocation, lasting.assigned
        turn.emit_of_cluster("plan_made", allocation=allocation, before=was, places=places_of, **about)
    for task in competing_tasks(cluster):
        if counts[task.id]:
            keep_running(task, turn)
            if task.id in layouts and _has_stepped(task):
                relayout.follow_plan(task, turn)
        elif task.formed and not (task.finishing or task.pausing):
            save_and_stop(task, turn, "plan")


def _leaves_layout(cluster: Cluster, tasks: list[Task]) -> bool:
    """Whether a task's job leaves the layout to the plan."""
    return any((job := cluster.lasting.jobs.get(task.id)) is not None and job.auto_layouts for task in tasks)


def _has_stepped(task: Task) -> bool:
    """Whether a step with all present slots is known."""
    pace = task.measured.pace
    return bool(pace.worker) and not pace.stands and pace.level.slots == len(task.slots)


def _keep_standing(cluster: Cluster, turn: Turn, places: Places) -> None:
    """Release places that are gone, and those of tasks that are gone, until the answer arrives."""
    usable = places.users
    lasting = cluster.lasting
    standing = {
        name: task
        for name, task in lasting.assigned.items()
        if name in usable and (task == NO_TASK or task in usable[name])
    }
    if standing != lasting.assigned:
        lasting.assigned = standing
        turn.save_lasting()


def _question(cluster: Cluster, key: str, places: Places, tasks: list[Task]) -> Question:
    """Build the question; the caller has released unusable places with `_keep_standing`."""
    lasting = cluster.lasting
    standing = Counter(lasting.assigned.values())
    on_node = Counter([place.node for place in places])
    return Question(
        key=key,
        num_places=len(places),
        node_places=max(on_node.values(), default=1),
        tasks=tuple(_competitor(cluster, task, places, _most(task, places), standing[task.id]) for task in tasks),
        coming=_coming(cluster, places, tasks),
        parts=_parts(places) if len({node.kind for node in cluster.nodes.values()}) > 1 else (),
    )


def _parts(places: Places) -> tuple[tuple[int, frozenset[str]], ...]:
    """Divide the places so that no task can use those of two parts."""
    parts: list[tuple[int, frozenset[str]]] = []
    for tasks, names in places.kinds:
        shared = [part for part in parts if not part[1].isdisjoint(tasks)]
        parts = [part for part in parts if part not in shared]
        parts.append((len(names) + sum(n for n, _ in shared), frozenset(tasks).union(*(own for _, own in shared))))
    return tuple(part for part in parts if part[1])


def _competitor(cluster: Cluster, task: Task, places: Places, most: int, left: int) -> Competitor:
    return Competitor(
        name=task.id,
        since=task.created_at,
        terms=replace(terms_of(cluster, task), max_workers=most, granularity=_step(task, min(len(places), most))),
        runs=_runs(task),
        before=max(cluster.lasting.allocation.get(task.id, 0), left),
        left=left,
    )


def _coming(cluster: Cluster, places: Places, tasks: list[Task]) -> tuple[tuple[str, tuple[Competitor, ...]], ...]:
    """Find the held jobs that wait for one competing task only; every job can use the same places as other jobs."""
    coming: dict[str, list[Competitor]] = {task.id: [] for task in tasks}
    for name, awaited in cluster.lasting.held.items():
        if len(awaited) == 1 and awaited[0] in coming and name in cluster.tasks:
            job = cluster.tasks[name]
            coming[awaited[0]].append(_competitor(cluster, job, places, job.limit, 0))
    return tuple((name, tuple(jobs)) for name, jobs in coming.items() if jobs)


def _runs(task: Task) -> bool:
    """Whether a pause would interrupt training; a task that pauses no longer counts as running."""
    training = bool(task.established) or (task.formed and not task.elastic)
    return bool(task.slots) and training and not task.pausing


def terms_of(cluster: Cluster, task: Task) -> Terms:
    """Return a task's terms in slots: its job's, with all that agents, workers and operators have changed since.

    The plan may pause the task while it trains if its job allows it and its workers can save first. A size that a
    calibration measures is its minimum and its maximum.
    """
    job = cluster.lasting.jobs.get(task.id)
    measures = task.calibration is not None and task.calibration.size is not None
    return Terms.of(
        Terms() if job is None else job,
        weight=task.weight,
        min_workers=task.limit if measures else task.min_nodes,
        max_workers=task.limit,
        granularity=task.granularity,
        may_pause=job is not None and job.may_pause and task.elastic and not measures,
    )


def _alone(task: Task, num_places: int) -> int:
    """Return the number of places of the only task: all it can use, or none while they are too few to start."""
    return min(task.limit, num_places) if task.formed or num_places >= task.min_nodes else 0


def _most(task: Task, places: Places) -> int:
    """Return the largest number of places that the task can use now."""
    able = places.able[task.id]
    return task.limit if able == len(places) else min(task.limit, able)


def _step(task: Task, most: int) -> int:
    """Return the granularity in places; 1 if no multiple of it lies between the minimum and ``most``."""
    step = task.granularity
    return step if has_multiple(step, task.min_nodes, most) else 1


def plan_key(cluster: Cluster, places: Places, tasks: list[Task]) -> str:
    """Digest of everything that a plan depends on."""
    terms = [(task.id, *terms_of(cluster, task).values) for task in tasks]
    return hashlib.blake2b(places.digest + msgspec.json.encode(terms), digest_size=16).hexdigest()
