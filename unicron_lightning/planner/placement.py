"""The placer: turns numbers of places into an assignment of places to tasks, with as few moves as possible.

The coordinator places tasks with `assign`, and ``unicron plan`` shows its result (`place`, with a place for each
accelerator). Every task keeps its places up to its planned number. Additional places come first from nodes where the
task already runs, then from nodes with the most free places. Where a task cannot use a free place, other tasks move
along the shortest chain (augmenting paths of a bipartite matching), so that a task gets all its places whenever
possible.

`place` guarantees:

* no node has more accelerators in use than it has, and nodes that are not ready have none in use;
* the fewest moves: a task that had p_t accelerators on ready nodes and gets x_t starts on max(0, x_t - p_t) others, the
  least of any placement, since tasks only release surplus ones and all accelerators are alike;
* equal arguments give equal results, in any order of nodes and tasks.

Nodes may have an island (an NVLink domain, or a rack); one without is an island of its own. Then workers that should
share an island (a replica, or a tensor-parallel group) are kept inside one where the fewest moves leave a choice: a
task gets places that complete its groups, then those for whole groups, and then others; it keeps whole groups first.
Workers that should share a node are not kept together. `Placement` counts those that share neither.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Literal, NamedTuple


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
    islands: Islands | None = None,
) -> dict[str, str]:
    """Give each task as many places as planned, or as many as it can use.

    Args:
        places: the usable places; a `PlaceList` of them is in the order of their names.
        wanted: number of places by task.
        before: previous task of each place; places and tasks that are gone are ignored.
        worth: value of places to their present tasks: a task that has too many keeps the places with the lowest
        numbers.
        islands: of the nodes, if any node has one.

    Returns:
        The task of each assigned place, independent of the order of the arguments.
    """
    listed = places if isinstance(places, PlaceList) else PlaceList(sorted(places, key=attrgetter("name")))
    by_name, able = listed.by_name, listed.users
    given = _Given(by_name, _keep(by_name, able, wanted, before, worth or {}, islands))
    have = Counter(given.tasks.values())  # chains of moves do not change the other tasks' counts
    for task in sorted(wanted, key=lambda task: (-islands.together[task] if islands else 0, task)):
        missing = wanted[task] - have[task]
        near = given.nearest_first(task) if missing > 0 else []
        first = islands.shares(given, able, task, near, missing) if islands and near else []
        for node, most in [*first, *((node, missing) for node in near)]:
            for name in [name for name in given.free[node] if task in able[name]][: min(most, missing)]:
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
    def on(self) -> defaultdict[str, Counter[str]]:
        """Number of places of each task on each node; only needed if some task gets more."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for name, task in self.tasks.items():
            counts[task][self._places[name].node] += 1
        return counts

    def give(self, name: str, task: str) -> None:
        """Assign a place, which may be another task's."""
        node, owner, on = self._places[name].node, self.tasks.get(name), self.on
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
        own = {node: num for node, num in self.on[task].items() if num}
        near = sorted(own, key=lambda node: (-own[node], self._room(node)))
        return [*near, *(node for _, _, node in self._roomy if node not in own)]

    def _room(self, node: str) -> tuple[int, str, str]:
        """Key of a node in `_roomy`: roomy nodes first, then in the order of their places' names."""
        return -len(self.free[node]), f"{node}/", node


@dataclass(frozen=True, kw_only=True)
class Islands:
    """Islands of nodes.

    Attributes:
        of: island by node.
        together: by task, workers that should share an island.
    """

    of: Mapping[str, str]
    together: Mapping[str, int]

    def shares(
        self, given: _Given, able: Mapping[str, frozenset[str]], task: str, near: Sequence[str], missing: int
    ) -> list[tuple[str, int]]:
        """The nodes on which a task gets places so that its groups are whole, and how many on each."""
        group = self.together[task]
        free = {node: sum(task in able[name] for name in given.free[node]) for node in near}
        own, room, share = Counter[str](), Counter[str](), Counter[str]()
        for node, number in given.on[task].items():
            own[self.of[node]] += number
        for node, number in free.items():
            room[self.of[node]] += number
        for island in sorted(room, key=lambda island: (-own[island] % group, island)):
            lack = -own[island] % group
            share[island] = lack if lack <= min(room[island], missing) else 0
            missing -= share[island]
        for island in sorted(room, key=lambda island: (not own[island], room[island] % group, -room[island], island)):
            whole = min(room[island] - share[island], missing) // group * group
            share[island] += whole
            missing -= whole
        found = []
        for node in near:
            found.append((node, min(share[self.of[node]], free[node])))
            share[self.of[node]] -= found[-1][1]
        return found

    def whole_first(self, names: list[str], places: Mapping[str, Place], before: Mapping[str, str]) -> list[str]:
        """Sort places of tasks: those of whole groups first, on islands where the task has most."""
        where = {name: (before[name], self.of[places[name].node]) for name in names}
        count, seen, rest = Counter(where.values()), Counter[tuple[str, str]](), set()
        for name in names:
            seen[where[name]] += 1
            if seen[where[name]] > count[where[name]] - count[where[name]] % self.together.get(before[name], 1):
                rest.add(name)
        return sorted(names, key=lambda name: (name in rest, -count[where[name]], where[name]))


def _keep(
    places: Mapping[str, Place],
    able: Mapping[str, frozenset[str]],
    wanted: Mapping[str, int],
    before: Mapping[str, str],
    worth: Mapping[str, int],
    islands: Islands | None,
) -> dict[str, str]:
    """Select the places that stay with their task: the most valuable, on nodes where the task has most."""
    known = [name for name, tasks in able.items() if before.get(name) in tasks]
    have = Counter([before[name] for name in known])
    left = Counter(wanted)
    shrinking = {task for task, number in have.items() if number > left[task]}
    result = {name: before[name] for name in known if before[name] not in shrinking}
    known = [name for name in known if before[name] in shrinking]
    count = Counter((before[name], places[name].node) for name in known)
    known.sort(key=lambda name: (worth.get(name, 0), -count[before[name], places[name].node], name))
    for name in islands.whole_first(known, places, before) if islands else known:
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


Accelerators = Mapping[str, Mapping[str, int]]
"""node -> task -> number of accelerators"""


NodeState = Literal["ready", "failed", "draining", "cordoned"]
"""Tasks are placed on ready nodes only and have to leave the others."""


@dataclass(frozen=True, kw_only=True)
class NodeCapacity:
    """A machine.

    Attributes:
        name: unique.
        num_accelerators: number of its accelerators.
        state: only ready nodes are used.
        kind: of its accelerators.
        island: to which it belongs; "" if it is one of its own.
    """

    name: str
    num_accelerators: int
    state: NodeState = "ready"
    kind: str = ""
    island: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name='': expected the name of a node")
        if self.num_accelerators < 0:
            raise ValueError(f"node {self.name!r}: num_accelerators={self.num_accelerators}: expected an integer >= 0")


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Accelerators that a task gets.

    Attributes:
        task: its name, unique.
        num_workers: its accelerators.
        together: workers that should share a node, for the report.
        kind: of the accelerators.
        in_island: workers that should share an island.
    """

    task: str
    num_workers: int
    together: int = 1
    kind: str = ""
    in_island: int = 1

    def __post_init__(self) -> None:
        for name, least in (("num_workers", 0), ("together", 1), ("in_island", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"task {self.task!r}: {name}={value}: expected an integer >= {least}")


@dataclass(frozen=True, kw_only=True)
class Move:
    """Accelerators of a task that change place.

    Attributes:
        task: name of the task.
        source: the node where they ran; None if they are new to the task.
        target: the node where they will run; None if they are released.
        num_accelerators: their number, >= 1.
    """

    task: str
    source: str | None
    target: str | None
    num_accelerators: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The accelerators of all tasks on all nodes.

    Attributes:
        accelerators: node -> task -> number of accelerators; only nodes and tasks that have some, sorted by name.
        moves: the required changes, sorted by task. Unchanged accelerators are not listed.
        num_spanning: by task, accelerators that do not share a node with the others of their `Demand.together`.
        num_spanning_islands: the same of islands and `Demand.in_island`; empty if no node has an island.
    """

    accelerators: Accelerators
    moves: tuple[Move, ...]
    num_spanning: Mapping[str, int]
    num_spanning_islands: Mapping[str, int]

    @property
    def num_moved(self) -> int:
        """Accelerators on which a task has to start that it did not have before."""
        return sum(move.num_accelerators for move in self.moves if move.target is not None)

    def of_task(self, task: str) -> dict[str, int]:
        """Accelerators of one task: node -> number of accelerators."""
        return {node: tasks[task] for node, tasks in self.accelerators.items() if task in tasks}


def place(nodes: Sequence[NodeCapacity], demands: Sequence[Demand], running: Accelerators) -> Placement:
    """Place tasks on nodes.

    Args:
        nodes: all nodes, ready or not.
        demands: number of workers of each task. Running tasks without a demand release their accelerators.
        running: current accelerators. Accelerators on nodes that are not ready or no longer known are lost.

    Raises:
        ValueError: a name is given twice, more accelerators run on a ready node than it has, or the demands are more
            accelerators than are available.
    """
    _check(nodes, demands, running)
    ready = [node for node in nodes if node.state == "ready"]
    tasks = tuple(sorted(demand.task for demand in demands))
    able = {
        kind: tuple(sorted(demand.task for demand in demands if demand.kind == kind))
        for kind in {n.kind for n in ready}
    }
    places: list[Place] = []
    before: dict[str, str] = {}
    for node in ready:
        own = [Place(f"{node.name}/{slot}", node.name, able[node.kind]) for slot in range(node.num_accelerators)]
        held = (task for task, num in sorted(running.get(node.name, {}).items()) for _ in range(num))
        before.update(zip((each.name for each in own), held, strict=False))
        places += own
    # Slashes keep a node's own island apart from named ones.
    of = {node.name: node.island or f"/{node.name}" for node in ready}
    islands = Islands(of=of, together={d.task: d.in_island for d in demands}) if any(n.island for n in nodes) else None
    assigned = assign(places, {demand.task: demand.num_workers for demand in demands}, before, islands=islands)
    placed = Counter((each.node, assigned[each.name]) for each in places if each.name in assigned)
    accelerators: dict[str, dict[str, int]] = {}
    for (name, task), num in sorted(placed.items()):
        accelerators.setdefault(name, {})[task] = num
    together, spanning = {demand.task: demand.together for demand in demands}, dict.fromkeys(tasks, 0)
    for (_, task), num in placed.items():
        spanning[task] += num % together[task]
    on_islands: Counter[tuple[str, str]] = Counter()
    for (name, task), num in placed.items():
        on_islands[of[name], task] += num
    apart = dict.fromkeys(tasks, 0) if islands else {}
    for (_, task), num in on_islands.items():
        if islands:
            apart[task] += num % islands.together[task]
    return Placement(
        accelerators=MappingProxyType({name: MappingProxyType(on_node) for name, on_node in accelerators.items()}),
        moves=_moves(placed, running),
        num_spanning=MappingProxyType(spanning),
        num_spanning_islands=MappingProxyType(apart),
    )


def _check(nodes: Sequence[NodeCapacity], demands: Sequence[Demand], running: Accelerators) -> None:
    for what, names in (("node", [n.name for n in nodes]), ("task", [d.task for d in demands])):
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"{what} {twice[0]!r} is given twice: expected different names")
    for node in nodes:
        accelerators = running.get(node.name, {})
        wrong = [task for task, num in accelerators.items() if num < 0]
        if wrong:
            raise ValueError(
                f"node {node.name!r}: {accelerators[wrong[0]]} accelerators of {wrong[0]!r} run: expected 0 or more"
            )
        if node.state == "ready" and sum(accelerators.values()) > node.num_accelerators:
            raise ValueError(
                f"node {node.name!r}: {sum(accelerators.values())} accelerators run on it, "
                f"expected at most its {node.num_accelerators}"
            )
    for kind in sorted({demand.kind for demand in demands}):
        wanted = sum(demand.num_workers for demand in demands if demand.kind == kind)
        there = sum(node.num_accelerators for node in nodes if node.state == "ready" and node.kind == kind)
        if wanted > there:
            given = f"the tasks get {wanted} workers{f' of kind {kind!r}' if kind else ''}"
            raise ValueError(f"{given}: expected at most the {there} accelerators of ready nodes")


def _moves(placed: Counter[tuple[str, str]], running: Accelerators) -> tuple[Move, ...]:
    """Accelerators that each task releases, paired with those that it gets, both in the order of the nodes' names.

    Args:
        placed: number of accelerators by node and task.
        running: the same before.
    """
    before = Counter({(node, task): num for node, tasks in running.items() for task, num in tasks.items()})
    changes: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for task, node in sorted({(task, node) for node, task in (*placed, *before)}):
        changes[task][node] = placed[node, task] - before[node, task]
    moves: list[Move] = []
    for task, change in changes.items():
        sources = [(node, -num) for node, num in change.items() if num < 0]
        targets = [(node, num) for node, num in change.items() if num > 0]
        moves += _paired(task, sources, targets)
    return tuple(moves)


def _paired(task: str, sources: list[tuple[str, int]], targets: list[tuple[str, int]]) -> list[Move]:
    """Moves that take all accelerators of the sources to the targets; a surplus on either side has no other end."""
    moves: list[Move] = []
    left, right = sources[::-1], targets[::-1]
    while left or right:
        source, num_left = left.pop() if left else (None, right[-1][1])
        target, num_right = right.pop() if right else (None, num_left)
        num = min(num_left, num_right)
        moves.append(Move(task=task, source=source, target=target, num_accelerators=num))
        if source is not None and num_left > num:
            left.append((source, num_left - num))
        if target is not None and num_right > num:
            right.append((target, num_right - num))
    return moves
