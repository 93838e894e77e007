"""Turn numbers of places into an assignment of places to tasks, with as few moves as possible.

Every task keeps its places up to its planned number. Additional places come first from nodes where the task already
runs, then from nodes with the most free places. Where a task has no agent at a free place, other tasks move along the
shortest chain (augmenting paths of a bipartite matching), so that a task gets all its places whenever possible.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from unicron_lightning.coordinator.allocation.places import Place, users


def assign(
    places: Sequence[Place],
    wanted: Mapping[str, int],
    before: Mapping[str, str],
    worth: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Give each task as many places as planned, or as many as it can use.

    Args:
        places: the usable places.
        wanted: number of places by task.
        before: previous task of each place; places and tasks that are gone are ignored.
        worth: value of places to their present tasks: a task that has too many keeps the places with the lowest
        numbers.

    Returns:
        The task of each assigned place, independent of the order of the arguments.
    """
    by_name = {place.name: place for place in sorted(places, key=lambda place: place.name)}
    able = users(by_name.values())
    result = _keep(by_name, able, wanted, before, worth or {})
    have = Counter(result.values())  # chains of moves do not change the other tasks' counts
    for task in sorted(wanted):
        missing = wanted[task] - have[task]
        if missing <= 0:
            continue
        for name in _nearest_free(by_name, able, result, before, task)[:missing]:
            result[name] = task
            missing -= 1
        while missing > 0 and (moves := _chain(by_name, result, task)) is not None:
            result.update(moves)
            missing -= 1
    return result


def _keep(
    places: Mapping[str, Place],
    able: Mapping[str, frozenset[str]],
    wanted: Mapping[str, int],
    before: Mapping[str, str],
    worth: Mapping[str, int],
) -> dict[str, str]:
    """Select the places that stay with their task: the most valuable, on nodes where the task has most."""
    known = [name for name in places if before.get(name) in able[name]]
    have = Counter(before[name] for name in known)
    left = Counter(wanted)
    result = {name: before[name] for name in known if have[before[name]] <= left[before[name]]}
    known = [name for name in known if have[before[name]] > left[before[name]]]
    count = Counter((before[name], places[name].node) for name in known)
    for name in sorted(known, key=lambda name: (worth.get(name, 0), -count[before[name], places[name].node], name)):
        if left[before[name]] > 0:
            left[before[name]] -= 1
            result[name] = before[name]
    return result


def _nearest_free(
    places: Mapping[str, Place],
    able: Mapping[str, frozenset[str]],
    result: Mapping[str, str],
    before: Mapping[str, str],
    task: str,
) -> list[str]:
    """List free places that the task can use, best first: previous places, near its others, roomy nodes."""
    own = Counter(places[name].node for name, other in result.items() if other == task)
    free = [place for name, place in places.items() if name not in result]
    room = Counter([place.node for place in free])

    def rank(place: Place) -> tuple[bool, int, int, str]:
        return before.get(place.name) != task, -own[place.node], -room[place.node], place.name

    return [place.name for place in sorted((place for place in free if task in able[place.name]), key=rank)]


def _chain(places: Mapping[str, Place], result: Mapping[str, str], task: str) -> dict[str, str] | None:
    """Find the shortest chain of moves that gives ``task`` one more place: new task by place; None if impossible."""
    came: dict[str, tuple[str, str] | None] = {task: None}
    """Predecessor of each task in the search: the task that takes a place from it, and that place."""
    queue = deque([task])
    while queue:
        mover = queue.popleft()
        for name, place in places.items():
            if mover not in place.tasks:
                continue
            owner = result.get(name)
            if owner is None:
                return _unwind(came, name, mover)
            if owner not in came:
                came[owner] = (mover, name)
                queue.append(owner)
    return None


def _unwind(came: Mapping[str, tuple[str, str] | None], free: str, mover: str) -> dict[str, str]:
    moves = {free: mover}
    step = came[mover]
    while step is not None:
        moves[step[1]] = step[0]
        step = came[step[0]]
    return moves
