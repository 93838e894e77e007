"""Which places each task has: the plan, asked for when something has changed, and put in force.

The machine does not plan itself. When the usable places or the tasks that compete for them have changed it asks
(`events.Ask` with a `Question`), and the shell answers with the planner's numbers (`events.Planned`). An answer to an
older question is dropped: what has changed since is in the newer one. Until it is answered everything stays as it is,
but that nobody has places that are gone. A task alone needs no planner: it has all it can use.

Putting a plan in force is no more than noting whose each place is (`state.Lasting.assigned`): to an agent whose place
is another task's it is as if its node were drained. Its workers leave at a step boundary; then the place is free, and
the other task's agent there is granted its slot. So nothing needs to be undone if the next plan comes in the middle.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import msgspec

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.assignment import assign
from unicron_lightning.coordinator.membership import pause
from unicron_lightning.coordinator.places import NOBODY, Places, competing_tasks, several_compete, usable_places, users
from unicron_lightning.coordinator.question import Competitor, Question
from unicron_lightning.coordinator.replicas import keep_together, worth
from unicron_lightning.coordinator.state import Agent, Cluster, Task, has_multiple
from unicron_lightning.coordinator.turn import Turn


def review_allocation(cluster: Cluster, turn: Turn) -> None:
    """Ask for a plan if what it follows from has changed; for a task alone, make it."""
    places, tasks = usable_places(cluster, turn.daemons), competing_tasks(cluster)
    key = _key(places, tasks)
    lasting = cluster.lasting
    if any(task.rebuilding for task in tasks):
        return  # nothing is known of the plan in force but from the agents, and not all have come yet
    if key == lasting.planned:
        cluster.asked = None
        if keep_together(tasks, places, lasting.assigned) != lasting.assigned:
            _put_in_force(cluster, turn, key, places, lasting.allocation, about={})
    elif key != cluster.asked and len(tasks) > 1:
        cluster.asked = key
        _keep_standing(cluster, turn, places)
        turn.actions.append(ev.Ask(question=_question(cluster, key, places, tasks)))
    elif key != cluster.asked:
        wanted = {task.id: _alone(task, len(places)) for task in tasks}
        _put_in_force(cluster, turn, key, places, wanted, about={})


def standing(cluster: Cluster) -> Question | None:
    """The situation now, to plan ahead for what may happen; None if no plan is in force, or no other is possible."""
    places, tasks = usable_places(cluster), competing_tasks(cluster)
    if len(tasks) < 2 or cluster.lasting.planned != _key(places, tasks):
        return None
    question = _question(cluster, cluster.lasting.planned, places, tasks)
    return question if all(task.before == task.left for task in question.tasks) else None


def gather(cluster: Cluster, turn: Turn, agent: Agent, is_new: bool) -> None:
    """An agent has registered: where several tasks compete it counts in a moment, together with those that come then.

    A node's agents come within a second of each other, one for each task; planned at once, tasks would be moved for
    the first of them, and again for the next.
    """
    turn.places_changed = True
    if is_new and agent.place is not None and several_compete(cluster):
        agent.fresh = True
        if not cluster.gathering:
            cluster.gathering = True
            turn.timer("plan", turn.limits.join_grace)


def gathered(cluster: Cluster, turn: Turn) -> None:
    """All agents count that have come so far."""
    cluster.gathering = False
    turn.places_changed = True
    for task in cluster.tasks.values():
        for agent in task.agents.values():
            agent.fresh = False


def take_plan(cluster: Cluster, turn: Turn, event: ev.Planned) -> None:
    """Put the answer to the newest question in force; an older one's is dropped."""
    places, tasks = usable_places(cluster, turn.daemons), competing_tasks(cluster)
    if event.key == cluster.asked == _key(places, tasks):
        about = {"waf": event.waf, "milliseconds": event.milliseconds, "foreseen": event.foreseen}
        _put_in_force(cluster, turn, event.key, places, event.allocation, about)
        turn.places_changed = True


def _put_in_force(
    cluster: Cluster, turn: Turn, key: str, places: Places, wanted: Mapping[str, int], about: Mapping[str, object]
) -> None:
    lasting = cluster.lasting
    before = dict(lasting.assigned)
    nobody = dict.fromkeys((place.name for place in places), NOBODY)
    worths = [worth(cluster.tasks[task], before) for task in wanted if task in cluster.tasks]
    after = {**nobody, **assign(places, wanted, before, {k: v for each in worths for k, v in each.items()})}
    lasting.assigned = keep_together(competing_tasks(cluster), places, after)
    lasting.planned = key
    cluster.asked = None
    counts = Counter(lasting.assigned.values())
    was, lasting.allocation = lasting.allocation, {task: counts[task] for task in sorted(wanted)}
    turn.save_lasting()
    fields = {"allocation": lasting.allocation, "before": was, "places": lasting.assigned, **about}
    if was != lasting.allocation or before != lasting.assigned:
        turn.actions.append(ev.Emit(name="plan_made", task=None, incident=None, fields=fields))
    for task in competing_tasks(cluster):
        if not counts[task.id] and task.formed and not task.finishing:
            pause(task, turn)


def _keep_standing(cluster: Cluster, turn: Turn, places: Places) -> None:
    """Until the answer comes: places that are gone, and those of tasks that are gone, are nobody's."""
    usable = users(places)
    lasting = cluster.lasting
    standing = {
        name: task
        for name, task in lasting.assigned.items()
        if name in usable and (task == NOBODY or task in usable[name])
    }
    if standing != lasting.assigned:
        lasting.assigned = standing
        turn.save_lasting()


def _question(cluster: Cluster, key: str, places: Places, tasks: list[Task]) -> Question:
    """Only usable places may be assigned: `_keep_standing`."""
    lasting = cluster.lasting
    standing = Counter(lasting.assigned.values())
    on_node = Counter([place.node for place in places])
    return Question(
        key=key,
        num_places=len(places),
        node_places=max(on_node.values(), default=1),
        tasks=tuple(
            Competitor(
                name=task.id,
                weight=task.weight,
                min_places=task.min_nodes,
                max_places=_most(task, places),
                granularity=_step(task, min(len(places), _most(task, places))),
                runs=bool(task.slots) and (bool(task.established) or (task.formed and not task.elastic)),
                before=max(lasting.allocation.get(task.id, 0), standing[task.id]),
                left=standing[task.id],
            )
            for task in tasks
        ),
    )


def _alone(task: Task, num_places: int) -> int:
    """Places of the only task: all it can use; none as long as it cannot begin with them."""
    return min(task.limit, num_places) if task.formed or num_places >= task.min_nodes else 0


def _most(task: Task, places: Places) -> int:
    """Most places that the task can use now."""
    able = sum(len(names) for tasks, names in places.kinds if task.id in tasks)
    return task.limit if able == len(places) else min(task.limit, able)


def _step(task: Task, most: int) -> int:
    """Multiples of how many places it can have; 1 if there is none from its minimum to ``most``: it is to go on."""
    step = task.granularity
    return step if has_multiple(step, task.min_nodes, most) else 1


def _key(places: Places, tasks: list[Task]) -> str:
    """Names all that a plan is made anew for."""
    told = [(task.id, task.weight, task.min_nodes, task.limit, task.granularity) for task in tasks]
    terms = msgspec.json.encode(told)
    return hashlib.blake2b(places.digest + terms, digest_size=16).hexdigest()
