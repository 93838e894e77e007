"""The placer: turns numbers of places into an assignment of places to tasks, with as few moves as possible.

The coordinator places tasks with it, and ``unicron plan`` shows its result. Every task keeps its places up to its
planned number. Additional places come first from nodes where the task already runs, then from nodes with the most free
places. Where a task cannot use a free place, other tasks move along the shortest chain (augmenting paths of a bipartite
matching), so that a task gets all its places whenever possible.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple


class Place(NamedTuple):
    """A place that may be used now.

    Attributes:
        name: ``<node>/<slot>``.
        node: the node that it belongs to.
        tasks: tasks that could use it, sorted.
    """

    name: str
    node: str
    tasks: tuple[str, ...]


class PlaceList(list[Place]):
    """Immutable list of places by name, with derived maps that are computed once."""

    @cached_property
    def by_name(self) -> dict[str, Place]:
        """The places by name, in their order."""
        return {place.name: place for place in self}

    @cached_property
    def users(self) -> dict[str, frozenset[str]]:
        """The tasks that can use each place. Places that are alike share one set, which is faster than a tuple."""
        usual = self[0].tasks if self else ()
        users = dict.fromkeys([place.name for place in self], frozenset(usual))
        sets: dict[int, frozenset[str]] = {}
        for place in [place for place in self if place.tasks is not usual]:
            users[place.name] = sets.setdefault(id(place.tasks), frozenset(place.tasks))
        return users


def assign(
    places: Sequence[Place],
    wanted: Mapping[str, int],
    before: Mapping[str, str],
    worth: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Give each task as many places as planned, or as many as it can use.

    Args:
        places: the usable places; a `PlaceList` of them is in the order of their names.
        wanted: number of places by task.
        before: previous task of each place; places and tasks that are gone are ignored.
        worth: value of places to their present tasks: a task that has too many keeps the places with the lowest
        numbers.

    Returns:
        The task of each assigned place, independent of the order of the arguments.
    """
    listed = places if isinstance(places, PlaceList) else PlaceList(sorted(places, key=attrgetter("name")))
    by_name, able = listed.by_name, listed.users
    given = _Given(by_name, _keep(by_name, able, wanted, before, worth or {}))
    have = Counter(given.tasks.values())  # chains of moves do not change the other tasks' counts
    for task in sorted(wanted):
        missing = wanted[task] - have[task]
        for node in given.nearest_first(task) if missing > 0 else ():
            for name in [name for name in given.free[node] if task in able[name]][:missing]:
                given.give(name, task)
                missing -= 1
            if not missing:
                break
        while missing > 0 and (moves := _chain(by_name, given.tasks, task)) is not None:
            for name, mover in moves.items():
                given.give(name, mover)
            missing -= 1
    return given.tasks


class _Given:
    """The assignment under construction.

    Args:
        places: the usable places by name, in the order of their names.
        tasks: the task of each place that is assigned already.
    """

    def __init__(self, places: Mapping[str, Place], tasks: dict[str, str]) -> None:
        self.tasks = tasks
        self.free: defaultdict[str, list[str]] = defaultdict(list)
        """Free places by node."""
        self._places = places
        for name in [name for name in places if name not in tasks]:
            self.free[places[name].node].append(name)
        self._roomy = sorted(self._room(node) for node in self.free)

    @cached_property
    def _on(self) -> defaultdict[str, Counter[str]]:
        """Number of places of each task on each node; only needed if some task gets more."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for name, task in self.tasks.items():
            counts[task][self._places[name].node] += 1
        return counts

    def give(self, name: str, task: str) -> None:
        """Assign a place, which may be another task's."""
        node, owner, on = self._places[name].node, self.tasks.get(name), self._on
        if owner is None:
            del self._roomy[bisect_left(self._roomy, self._room(node))]
            self.free[node].remove(name)
            insort(self._roomy, self._room(node))
        else:
            on[owner][node] -= 1
        on[task][node] += 1
        self.tasks[name] = task

    def nearest_first(self, task: str) -> list[str]:
        """Sort nodes with free places: those with most places of the task first, then roomy ones."""
        own = {node: num for node, num in self._on[task].items() if num}
        near = sorted(own, key=lambda node: (-own[node], self._room(node)))
        return [*near, *(node for _, _, node in self._roomy if node not in own)]

    def _room(self, node: str) -> tuple[int, str, str]:
        """Key of a node in `_roomy`: roomy nodes first, then in the order of their places' names."""
        return -len(self.free[node]), f"{node}/", node


def _keep(
    places: Mapping[str, Place],
    able: Mapping[str, frozenset[str]],
    wanted: Mapping[str, int],
    before: Mapping[str, str],
    worth: Mapping[str, int],
) -> dict[str, str]:
    """Select the places that stay with their task: the most valuable, on nodes where the task has most."""
    known = [name for name, tasks in able.items() if before.get(name) in tasks]
    have = Counter([before[name] for name in known])
    left = Counter(wanted)
    shrinking = {task for task, number in have.items() if number > left[task]}
    result = {name: before[name] for name in known if before[name] not in shrinking}
    known = [name for name in known if before[name] in shrinking]
    count = Counter((before[name], places[name].node) for name in known)
    for name in sorted(known, key=lambda name: (worth.get(name, 0), -count[before[name], places[name].node], name)):
        if left[before[name]] > 0:
            left[before[name]] -= 1
            result[name] = before[name]
    return result


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
