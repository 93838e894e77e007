"""Places numbers of workers on nodes, as the coordinator does: `assign`, with a place for each accelerator.

Guarantees:

* no node has more accelerators in use than it has, and nodes that are not ready have none in use;
* the fewest moves: a task that had p_t accelerators on ready nodes and gets x_t starts on max(0, x_t - p_t) others, the
  least of any placement, since tasks only release surplus ones and all accelerators are alike;
* equal arguments give equal results, in any order of nodes and tasks.

Workers that should share a node (a replica, or a tensor-parallel group) are not kept together;
`Placement.num_spanning` counts those that do not share one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from unicron_lightning.planner.placement.assignment import Place, assign

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
    """

    name: str
    num_accelerators: int
    state: NodeState = "ready"

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
    """

    task: str
    num_workers: int
    together: int = 1

    def __post_init__(self) -> None:
        for name, least in (("num_workers", 0), ("together", 1)):
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
    """

    accelerators: Accelerators
    moves: tuple[Move, ...]
    num_spanning: Mapping[str, int]

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
    places: list[Place] = []
    before: dict[str, str] = {}
    for node in ready:
        own = [Place(f"{node.name}/{slot}", node.name, tasks) for slot in range(node.num_accelerators)]
        held = (task for task, num in sorted(running.get(node.name, {}).items()) for _ in range(num))
        before.update(zip((each.name for each in own), held, strict=False))
        places += own
    assigned = assign(places, {demand.task: demand.num_workers for demand in demands}, before)
    placed = Counter((each.node, assigned[each.name]) for each in places if each.name in assigned)
    accelerators: dict[str, dict[str, int]] = {}
    for (name, task), num in sorted(placed.items()):
        accelerators.setdefault(name, {})[task] = num
    together, spanning = {demand.task: demand.together for demand in demands}, dict.fromkeys(tasks, 0)
    for (_, task), num in placed.items():
        spanning[task] += num % together[task]
    return Placement(
        accelerators=MappingProxyType({name: MappingProxyType(on_node) for name, on_node in accelerators.items()}),
        moves=_moves(placed, running),
        num_spanning=MappingProxyType(spanning),
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
    wanted = sum(demand.num_workers for demand in demands)
    there = sum(node.num_accelerators for node in nodes if node.state == "ready")
    if wanted > there:
        raise ValueError(f"the tasks get {wanted} workers: expected at most the {there} accelerators of ready nodes")


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
