"""Sharing of places without the planner (``planner=fixed``): tasks keep the places they have."""

from __future__ import annotations

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.question import Competitor, Question


def keep(question: Question) -> ev.Planned:
    """Answer a question without taking a place from any task.

    Free places go, task by task in the question's order, to tasks that reach their minimum with them. The rest goes to
    the task with the fewest places: one at a time, or enough for the next multiple of its granularity.
    """
    tasks = question.tasks
    places = {task.name: min(task.left, task.max_places) for task in tasks}
    free = question.num_places - sum(places.values())
    for task in tasks:
        missing = _more(task.min_places - 1, task) - places[task.name]
        if 0 < missing <= free:
            places[task.name] += missing
            free -= missing
    while free > 0:
        below = [task for task in tasks if task.min_places <= places[task.name] < task.max_places]
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
    return (places // task.granularity + 1) * task.granularity
