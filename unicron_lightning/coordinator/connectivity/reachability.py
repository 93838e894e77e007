"""Choice of the nodes that continue when some cannot reach each other: pure.

The nodes of a task that reach each other form a graph. The task continues on a *clique* of it: a set in which each node
reaches every other one. Among all such sets the chosen one has, in descending priority,

1. a node whose workers hold the task's state,
2. the most complete replicas of the model,
3. the most workers,
4. the earliest nodes in slot order.

Equal reports lead to equal sets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Pair = frozenset[str]
"""Two nodes, at least one of which cannot connect to the other."""

MOST_GROUPS: Final = 24
"""Largest number of groups that are compared in all combinations.

A group consists of nodes that are cut from the same others; a partitioned network has two or three groups. With more
groups, groups are removed until none is cut from another.
"""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A node with workers.

    Attributes:
        node: its label.
        workers: number of its workers.
        holds_state: whether they have the task's state.
    """

    node: str
    workers: int = 1
    holds_state: bool = True


def continuing(
    candidates: Sequence[Candidate], cut: Collection[Pair], replicas: Sequence[Collection[str]] = ()
) -> list[str]:
    """Choose the nodes that continue.

    Args:
        candidates: in slot order.
        cut: pairs that cannot reach each other, in either direction.
        replicas: nodes of each complete replica of the model; empty if each worker holds the whole model.

    Returns:
        Labels in slot order: all of them if nothing is cut, and at least one unless there are no candidates.
    """
    order = {candidate.node: place for place, candidate in enumerate(candidates)}
    away = neighbours(order, cut)
    concerned = [node for node in order if away[node]]
    free = [node for node in order if not away[node]]

    def worth(chosen: Collection[str]) -> tuple[bool, int, int, list[int]]:
        there = [candidate for candidate in candidates if candidate.node in chosen]
        whole = sum(all(node in chosen for node in replica) for replica in replicas)
        return (
            any(candidate.holds_state for candidate in there),
            whole,
            sum(candidate.workers for candidate in there),
            [-order[candidate.node] for candidate in there],
        )

    groups = _alike(concerned, away)
    firsts = [group[0] for group in groups]
    sets = _maximal(firsts, away) if len(groups) <= MOST_GROUPS else iter([_without_the_worst(groups, away)])
    best: set[str] = set()
    for found in sets:
        chosen = {*free, *(node for group in groups if group[0] in found for node in group)}
        if not best or worth(chosen) > worth(best):
            best = chosen
    return [node for node in order if node in best]


def returning(inside: Collection[str], outside: Sequence[str], cut: Collection[Pair]) -> list[str]:
    """Choose the nodes to readmit: each reaches all nodes inside, and those chosen before it.

    Args:
        inside: nodes that continue.
        outside: excluded nodes, in the order in which they may return.
        cut: pairs that cannot reach each other.
    """
    chosen: list[str] = []
    for node in outside:
        if not any(frozenset((node, other)) in cut for other in (*inside, *chosen)):
            chosen.append(node)
    return chosen


def neighbours(nodes: Collection[str], cut: Collection[Pair]) -> Mapping[str, set[str]]:
    """Return for each node the nodes that it cannot reach, or that cannot reach it."""
    away: dict[str, set[str]] = {node: set() for node in nodes}
    for one, other in (sorted(pair) for pair in cut if len(pair) == 2):
        if one in away and other in away:
            away[one].add(other)
            away[other].add(one)
    return away


def _alike(nodes: Sequence[str], away: Mapping[str, set[str]]) -> list[list[str]]:
    """Group nodes that are cut from the same others: a maximal set contains all of a group, or none."""
    groups: dict[frozenset[str], list[str]] = {}
    for node in nodes:
        groups.setdefault(frozenset(away[node]), []).append(node)
    return list(groups.values())


def _without_the_worst(groups: Sequence[Sequence[str]], away: Mapping[str, set[str]]) -> list[str]:
    """Remove the group that is cut from the most nodes, among equals the last, until the remaining ones reach each
    other.

    Returns:
        The first nodes of the remaining groups, and of further groups that fit beside them.
    """
    firsts = [group[0] for group in groups]
    left = {first: {other for other in away[first] if other in firsts} for first in firsts}
    sizes = {group[0]: len(group) for group in groups}
    order = {first: place for place, first in enumerate(firsts)}
    while any(left.values()):
        worst = max(left, key=lambda first: (sum(sizes[other] for other in left[first]), order[first]))
        for other in left.pop(worst):
            left[other].discard(worst)
    return [*left, *returning(left, [f for f in firsts if f not in left], _pairs(firsts, away))]


def _pairs(nodes: Sequence[str], away: Mapping[str, set[str]]) -> set[Pair]:
    return {frozenset((node, other)) for node in nodes for other in away[node]}


def _maximal(
    possible: Sequence[str], away: Mapping[str, set[str]], chosen: Sequence[str] = (), done: Sequence[str] = ()
) -> Iterator[list[str]]:
    """Yield each mutually reachable set that no further node fits into, in a deterministic order.

    Uses the algorithm of Bron and Kerbosch.

    Args:
        possible: nodes that reach all chosen ones.
        away: nodes that do not reach each node.
        chosen: nodes of the sets to find.
        done: further nodes that reach all chosen ones; the sets with these were found before.
    """
    if not possible:
        yield from [] if done else [[*chosen]]
        return
    pivot = min((*possible, *done), key=lambda node: sum(other in away[node] for other in possible))
    for node in [node for node in possible if node in away[pivot] or node == pivot]:
        fitting = [other for other in possible if other != node and other not in away[node]]
        yield from _maximal(fitting, away, (*chosen, node), [other for other in done if other not in away[node]])
        possible, done = [other for other in possible if other != node], [*done, node]
