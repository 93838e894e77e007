"""The search behind `placement.place`; nodes and tasks are numbers here.

Each step is done for all tasks, in descending order of group and replica size: large pieces need the room that early
placement finds.

1. *keep*: each task keeps its whole groups in place. A task above its new size releases accelerators, of broken
   replicas first, then on the switches and nodes where it has fewest.
2. *reclaim*: a task takes missing accelerators on nodes where it ran until now, where groups fit into freed ones.
3. *grow*: a task completes broken replicas, then adds whole replicas on a node, whole ones under a switch, and groups
   anywhere.
4. *make way*: if no more groups fit, smaller groups of later tasks are evicted from the node where this is cheapest,
and
   those tasks place them again.

Step 4 finds room whenever it exists, if each group size divides the next larger one: larger groups then fill nodes in
multiples of the smaller ones and leave no room that a smaller one could have used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from unicron_lightning.planner.placement.placer import Demand

IntArray = NDArray[np.int64]


class Packing:
    """A placement under construction.

    Args:
        capacity: accelerators of each node.
        switch: the switch of each node, counted from 0.
        demands: the demand of each task.
        ran: current accelerators of each task by node. No node has more in use than its capacity.
    """

    def __init__(
        self,
        *,
        capacity: Sequence[int],
        switch: Sequence[int],
        demands: Sequence[Demand],
        ran: Sequence[dict[int, int]],
    ) -> None:
        self.held: list[dict[int, int]] = [{} for _ in demands]
        self._demands = demands
        self._ran = ran
        self._free: IntArray = np.array(capacity, dtype=np.int64)
        self._switch: IntArray = np.array(switch, dtype=np.int64)
        num_switches = max(switch, default=-1) + 1
        self._nodes: list[IntArray] = [np.flatnonzero(self._switch == index) for index in range(num_switches)]
        self._largest_node = max(capacity, default=0)
        self._largest_switch = int(self._by_switch(self._free).max(initial=0))

    def solve(self) -> None:
        """Fill ``held``.

        Raises:
            ValueError: the groups of a task don't fit.
        """
        order = sorted(
            range(len(self._demands)),
            key=lambda t: (-self._demands[t].group_size, -self._demands[t].replica_size, self._demands[t].task),
        )
        for task in order:
            self._keep(task)
        for task in order:
            self._give_up(task)
        for task in order:
            self._reclaim(task)
        for position, task in enumerate(order):
            while not self._grow(task):
                self._make_way(task, order[position + 1 :])

    def spanning(self, task: int) -> int:
        """Accelerators of replicas that are not whole on a node, or else under a switch, although they would fit."""
        size = self._demands[task].replica_size
        if size <= self._largest_node:
            return sum(num % size for num in self.held[task].values())
        if size <= self._largest_switch:
            return sum(num % size for num in self._switch_totals(task).values())
        return 0

    def _missing(self, task: int) -> int:
        return self._demands[task].num_workers - sum(self.held[task].values())

    def _put(self, task: int, node: int, num: int) -> None:
        """Give accelerators to a task, or take them with a negative number."""
        held = self.held[task]
        held[node] = held.get(node, 0) + num
        if held[node] == 0:
            del held[node]
        self._free[node] -= num
        assert self._free[node] >= 0

    # 1. keep

    def _keep(self, task: int) -> None:
        group = self._demands[task].group_size
        for node, num in sorted(self._ran[task].items()):
            if num >= group:
                self._put(task, node, num // group * group)

    def _give_up(self, task: int) -> None:
        over = -self._missing(task)
        for node, most in self._worst_first(task) if over > 0 else ():
            num = min(most, over)
            self._put(task, node, -num)
            over -= num
            if over <= 0:
                return

    def _worst_first(self, task: int) -> Iterator[tuple[int, int]]:
        """Nodes and the number of accelerators to release on each; the task's total shrinks while this is consumed."""
        size = self._demands[task].replica_size
        held = self.held[task]
        if size <= self._largest_node:
            yield from sorted(((n, num % size) for n, num in held.items() if num % size), key=lambda item: item[::-1])
        totals = self._switch_totals(task)
        for switch, total in sorted(totals.items(), key=lambda item: (item[1] % size, item[0])):
            excess = total % size
            for node in self._emptiest(task, switch) if excess else ():
                num = min(held[node], excess)
                excess -= num
                yield node, num
                if not excess:
                    break
        for switch in sorted(totals, key=lambda s: (totals[s], s)):
            for node in self._emptiest(task, switch):
                yield node, held[node]

    def _emptiest(self, task: int, switch: int) -> list[int]:
        """Nodes of a switch with accelerators of the task: those with fewest first, then those with most free ones."""
        nodes = [node for node in self.held[task] if self._switch[node] == switch]
        return sorted(nodes, key=lambda node: (self.held[task][node], -int(self._free[node]), node))

    def _switch_totals(self, task: int) -> dict[int, int]:
        totals: dict[int, int] = {}
        for node, num in self.held[task].items():
            switch = int(self._switch[node])
            totals[switch] = totals.get(switch, 0) + num
        return totals

    # 2. reclaim

    def _reclaim(self, task: int) -> None:
        """Take back groups that ran there at least partly, those with the largest part first."""
        group = self._demands[task].group_size
        ran, held = self._ran[task], self.held[task]
        missing = self._missing(task)
        left = {node: num - held.get(node, 0) for node, num in ran.items() if num > held.get(node, 0)}
        for node, num in sorted(left.items(), key=lambda item: (-min(item[1], group), item[0])):
            # Whole groups that ran there; if there was none, one group of which a part ran.
            wanted = max(num // group, 1) * group
            take = min(wanted, missing, int(self._free[node]) // group * group)
            if take > 0:
                self._put(task, node, take)
                missing -= take

    # 3. grow

    def _grow(self, task: int) -> bool:
        """Place the missing accelerators; False if some group does not fit."""
        demand = self._demands[task]
        self._reclaim(task)  # evicted groups may fit where they ran until now
        if self._missing(task) == 0:
            return True
        self._complete(task)
        if demand.replica_size <= self._largest_node:
            self._spread(task, demand.replica_size)
        if demand.replica_size <= self._largest_switch:
            self._add_under_switches(task)
        self._spread(task, demand.group_size)
        return self._missing(task) == 0

    def _complete(self, task: int) -> None:
        """Complete broken replicas, on their node if they fit on one, and under their switch."""
        size, group = self._demands[task].replica_size, self._demands[task].group_size
        if size <= self._largest_node:
            broken = [(size - num % size, node) for node, num in self.held[task].items() if num % size]
            for lacking, node in sorted(broken):
                if lacking <= min(self._missing(task), int(self._free[node])):
                    self._put(task, node, lacking)
        lacks = [(size - num % size, switch) for switch, num in self._switch_totals(task).items() if num % size]
        for lacking, switch in sorted(lacks):
            room = int((self._free[self._nodes[switch]] // group).sum()) * group
            if lacking <= min(self._missing(task), room):
                self._fill(task, switch, group, lacking // group)

    def _spread(self, task: int, piece: int) -> None:
        """Add the missing pieces (groups or replicas) that fit, on few switches and nodes."""
        room = self._by_switch(self._free // piece)
        wanted = self._missing(task) // piece
        familiar = self._per_switch(self._switch_totals(task))
        for switch, num in _fewest(room, wanted, familiar):
            self._fill(task, switch, piece, num)

    def _add_under_switches(self, task: int) -> None:
        """Add replicas that are whole under a switch, on few switches and nodes."""
        size, group = self._demands[task].replica_size, self._demands[task].group_size
        whole = self._by_switch(self._free // group) * group // size
        familiar = self._per_switch(self._switch_totals(task))
        for switch, num in _fewest(whole, self._missing(task) // size, familiar):
            self._fill(task, switch, group, num * size // group)

    def _fill(self, task: int, switch: int, piece: int, wanted: int) -> None:
        """Put pieces on the nodes of a switch."""
        nodes = self._nodes[switch]
        held = self.held[task]
        familiar = np.array([held.get(node, 0) for node in nodes.tolist()], dtype=np.int64)
        for index, num in _fewest(self._free[nodes] // piece, wanted, familiar):
            self._put(task, int(nodes[index]), num * piece)

    def _by_switch(self, per_node: IntArray) -> IntArray:
        sums = np.bincount(self._switch, weights=per_node, minlength=len(self._nodes))
        return np.asarray(np.rint(sums), dtype=np.int64)

    def _per_switch(self, totals: dict[int, int]) -> IntArray:
        values = np.zeros(len(self._nodes), dtype=np.int64)
        for switch, total in totals.items():
            values[switch] = total
        return values

    # 4. make way

    def _make_way(self, task: int, later: Sequence[int]) -> None:
        """Free room for one group by evicting smaller ones."""
        group = self._demands[task].group_size
        smaller = [t for t in later if self._demands[t].group_size < group]
        evictable = np.zeros_like(self._free)
        for other in smaller:
            for node, num in self.held[other].items():
                evictable[node] += num
        lacking = group - self._free % group
        possible = np.flatnonzero(evictable >= lacking)
        if not possible.size:
            demand = self._demands[task]
            raise ValueError(
                f"task {demand.task!r}: {self._missing(task)} of its {demand.num_workers} workers do not fit on any "
                f"node with {group} free accelerators: expected nodes for groups of group_size={group}"
            )
        node = int(possible[np.argmin(lacking[possible])])
        self._evict(node, int(lacking[node]), smaller)

    def _evict(self, node: int, lacking: int, others: Sequence[int]) -> None:
        """Evict other tasks' groups from a node until ``lacking`` accelerators are free: large groups that are needed
        whole first, then the smallest sufficient ones.
        """
        for other in others:
            group = self._demands[other].group_size
            num = min(self.held[other].get(node, 0), lacking // group * group)
            if num:
                self._put(other, node, -num)
                lacking -= num
        for other in reversed(others):
            group = self._demands[other].group_size
            if lacking > 0 and self.held[other].get(node, 0):
                num = min(self.held[other][node], -(-lacking // group) * group)
                self._put(other, node, -num)
                lacking -= num


def _fewest(room: IntArray, wanted: int, familiar: IntArray) -> list[tuple[int, int]]:
    """Choose bins and amounts that hold ``wanted`` (or as much as fits) in few new bins.

    Familiar bins come first, the fullest before others; then the roomiest, which keeps the number of bins low. The
    amount of the last bin goes to the tightest sufficient one, so that roomy bins stay whole.

    Args:
        room: of each bin.
        wanted: total amount.
        familiar: present amount in each bin, 0 for a new one.
    """
    order = np.lexsort((-room, -familiar))
    order = order[room[order] > 0]
    chosen: list[tuple[int, int]] = []
    for position, index in enumerate(order):
        if wanted <= 0:
            break
        best = index
        if familiar[index] == 0 and room[index] >= wanted:
            rest = order[position:]
            enough = rest[room[rest] >= wanted]
            best = enough[np.argmin(room[enough])]
        amount = min(int(room[best]), wanted)
        chosen.append((int(best), amount))
        wanted -= amount
    return chosen
