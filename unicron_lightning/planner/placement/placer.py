"""Places numbers of workers on nodes: running workers stay in place, and new ones are placed close together.

Each worker takes an accelerator of a node. `place` gives each task the planned number of accelerators.

Guarantees:

* no node has more accelerators in use than it has, and nodes that are not ready have none in use;
* the accelerators of a group, i.e. of workers that have to share a node (tensor parallelism), are on one node;
* equal arguments give equal results, in any order of nodes and tasks.

Aims, in descending priority:

1. The fewest moves: accelerators on which a task has to start that it did not have before. A task that had p_t
   accelerators on ready nodes and gets x_t starts on at least max(0, x_t - p_t) of them in any placement, so that

       moved accelerators  >=  sum over tasks of max(0, x_t - p_t)  =  Placement.fewest_moves

   Where no group has more than one accelerator the bound is always reached, since tasks only release surplus ones:
   those kept are a part of the running ones and fit; the rest fits because all accelerators are alike. Groups of the
   size of a node reach the bound for the same reason. With groups in between, free accelerators may be scattered, and
   smaller groups have to be evicted. `Placement.num_moved` may then exceed the bound; the minimum is a packing problem,
   which is solved greedily here. `Placement.proven_fewest` states whether the bound was reached.
2. Replicas (TP x PP groups) whole on a node where they fit on one, whole under a switch otherwise.
3. Few nodes and few switches for each task.

Aims 2 and 3 are bin packing and pursued greedily; `Placement.num_spanning` measures the result.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from unicron_lightning.planner.placement.packing import Packing

Accelerators = Mapping[str, Mapping[str, int]]
"""node -> task -> number of accelerators"""


class NodeState(enum.Enum):
    """State of a node. Tasks are placed on ready nodes only and have to leave the others."""

    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"
    CORDONED = "cordoned"


@dataclass(frozen=True, kw_only=True)
class NodeCapacity:
    """A machine.

    Attributes:
        name: unique.
        num_accelerators: number of its accelerators.
        switch: the switch, rack or rail group that it shares with near nodes; "" if unknown.
        state: only ready nodes are used.
    """

    name: str
    num_accelerators: int
    switch: str = ""
    state: NodeState = NodeState.READY

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
        num_workers: its accelerators, a multiple of ``group_size``.
        replica_size: workers of one replica (TP x PP), a multiple of ``group_size``; 0 for one group.
        group_size: workers that have to share a node (TP).
    """

    task: str
    num_workers: int
    replica_size: int = 0
    group_size: int = 1

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"task {self.task!r}: group_size={self.group_size}: expected an integer >= 1")
        for name in ("num_workers", "replica_size"):
            value = getattr(self, name)
            if value < 0 or value % self.group_size:
                expected = f"a multiple of group_size={self.group_size}"
                raise ValueError(f"task {self.task!r}: {name}={value}: expected {expected}")
        if self.replica_size == 0:
            object.__setattr__(self, "replica_size", self.group_size)


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
        fewest_moves: a lower bound of `num_moved` for every placement.
        num_spanning: by task, accelerators of replicas that could be whole on a node, or under a switch, and are not.
    """

    accelerators: Accelerators
    moves: tuple[Move, ...]
    fewest_moves: int
    num_spanning: Mapping[str, int]

    @property
    def num_moved(self) -> int:
        """Accelerators on which a task has to start that it did not have before."""
        return sum(move.num_accelerators for move in self.moves if move.target is not None)

    @property
    def proven_fewest(self) -> bool:
        """Whether no placement moves fewer accelerators; False means unknown."""
        return self.num_moved == self.fewest_moves

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
        ValueError: a name is given twice, more accelerators run on a ready node than it has, or the demands do not fit:
            more accelerators than are available, or groups too large for the remaining nodes.
    """
    _check(nodes, demands, running)
    ready = sorted((node for node in nodes if node.state is NodeState.READY), key=lambda node: (node.switch, node.name))
    tasks = sorted(demands, key=lambda demand: demand.task)
    index_of = {node.name: index for index, node in enumerate(ready)}
    switches = {name: index for index, name in enumerate(sorted({node.switch for node in ready}))}
    ran: dict[str, dict[int, int]] = {demand.task: {} for demand in tasks}
    for node, accelerators in running.items():
        for task, num in accelerators.items():
            if num > 0 and node in index_of and task in ran:
                ran[task][index_of[node]] = num
    packing = Packing(
        capacity=[node.num_accelerators for node in ready],
        switch=[switches[node.switch] for node in ready],
        demands=tasks,
        ran=[ran[demand.task] for demand in tasks],
    )
    packing.solve()
    names = [node.name for node in ready]
    placed = {d.task: {names[i]: n for i, n in held.items()} for d, held in zip(tasks, packing.held, strict=True)}
    return Placement(
        accelerators=_by_node(placed),
        moves=_moves(placed, running),
        fewest_moves=sum(max(0, d.num_workers - sum(ran[d.task].values())) for d in tasks),
        num_spanning=MappingProxyType({d.task: packing.spanning(t) for t, d in enumerate(tasks)}),
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
        if node.state is NodeState.READY and sum(accelerators.values()) > node.num_accelerators:
            raise ValueError(
                f"node {node.name!r}: {sum(accelerators.values())} accelerators run on it, "
                f"expected at most its {node.num_accelerators}"
            )
    wanted = sum(demand.num_workers for demand in demands)
    there = sum(node.num_accelerators for node in nodes if node.state is NodeState.READY)
    if wanted > there:
        raise ValueError(f"the tasks get {wanted} workers: expected at most the {there} accelerators of ready nodes")


def _by_node(placed: Mapping[str, Mapping[str, int]]) -> Accelerators:
    """Turn task -> node -> accelerators into node -> task -> accelerators."""
    accelerators: dict[str, dict[str, int]] = {}
    for task, nodes in placed.items():
        for node, num in nodes.items():
            accelerators.setdefault(node, {})[task] = num
    return MappingProxyType(
        {node: MappingProxyType(dict(sorted(accelerators[node].items()))) for node in sorted(accelerators)}
    )


def _moves(placed: Mapping[str, Mapping[str, int]], running: Accelerators) -> tuple[Move, ...]:
    """Accelerators that each task releases, paired with those that it gets, both in the order of the nodes' names."""
    before: dict[str, dict[str, int]] = {}
    for node, tasks in running.items():
        for task, num in tasks.items():
            before.setdefault(task, {})[node] = num
    moves: list[Move] = []
    for task in sorted({*placed, *before}):
        now, then = before.get(task, {}), placed.get(task, {})
        change = {node: then.get(node, 0) - now.get(node, 0) for node in sorted({*now, *then})}
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
