"""How places are shared without the planner (``planner=fixed``): who has a place keeps it."""

from __future__ import annotations

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.question import Question


def keep(question: Question) -> ev.Planned:
    """The answer that takes no place from anybody.

    Free places go, task by task in the question's order, to those below their minimum that reach it with them, then one
    at a time to whoever has the fewest.
    """
    tasks = question.tasks
    places = {task.name: min(task.left, task.max_places) for task in tasks}
    free = question.num_places - sum(places.values())
    for task in tasks:
        missing = task.min_places - places[task.name]
        if 0 < missing <= free:
            places[task.name] += missing
            free -= missing
    while free > 0:
        below = [task for task in tasks if task.min_places <= places[task.name] < task.max_places]
        if not below:
            break
        places[min(below, key=lambda task: places[task.name]).name] += 1
        free -= 1
    return ev.Planned(key=question.key, allocation=places)
