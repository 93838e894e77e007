"""Handles nodes that do not reach each other although the coordinator reaches all of them.

Rules:

* A suspicion arises when all members wait in a collective for longer than usual, when one has waited for a second, when
  a collective has failed, and when a settled epoch is not entered for a while. The members' agents then probe each
  other (`wire.Probe`). Suspicions by a wait alone, which may be for a slow rank, lead to fewer and fewer probes.
* If some nodes do not reach each other, the task continues on the set of nodes that `continuing` chooses.
  The slots of the other nodes are revoked: their workers stop, and are restarted as warm workers.
* Only agents that have answered are judged. An agent that does not answer may be dead, which its connection will show.
* Excluded nodes and the others probe each other periodically. A node returns when it and all others reach each other:
  at once after its first exclusion, and after a delay that doubles with each further one.
* No node is excluded when no other node is left. Every epoch is the coordinator's, so two worlds never coexist.

**The choice of the nodes that continue** when some cannot reach each other is pure. The nodes of a task that reach each
other form a graph. The task continues on a *clique* of it: a set in which each node reaches every other one. Among all
such sets the chosen one has, in descending priority,

1. a node whose workers hold the task's state,
2. the most complete replicas of the model,
3. the most workers,
4. the earliest nodes in slot order.

Equal reports lead to equal sets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator.actions import Part, Turn, on
from unicron_lightning.coordinator.incidents.facts import ErrorFact
from unicron_lightning.coordinator.membership import epochs
from unicron_lightning.coordinator.membership.slots import revoke
from unicron_lightning.coordinator.state import Agent, NodeExclusion, Task, Worker

Pair = frozenset[str]
"""Two nodes, at least one of which cannot connect to the other."""

_MOST_GROUPS: Final = 24
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
    sets = _maximal(firsts, away) if len(groups) <= _MOST_GROUPS else iter([_without_the_worst(groups, away)])
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


ANSWER_SECONDS: Final = 1.5
"""Time to wait for an agent's answer after the probe's own time limit."""
_PAUSE_SECONDS: Final = 2.0
"""Least time between a probe and the next one."""
_LONGEST_PAUSE: Final = 60.0
"""Longest time between probes for suspicions by a wait alone; it doubles with each probe without a cut."""
_ENTER_SECONDS: Final = 2.0
"""Time after which members that have not entered a settled epoch are suspected, and interval of further suspicions."""
_FIRST_LOOKS: Final = 5
"""Number of these checks if it is unknown whether workers report that they have entered an epoch."""
RETRY_SECONDS: Final = 1.0
_LATER_RETRY_SECONDS: Final = 5.0
"""Interval of probes of nodes that were excluded more than a minute ago."""
_STOP_SECONDS: Final = 1.0
"""Time after which workers of an excluded node are killed: while they wait for others, they do not handle signals."""
_LONGEST_WAIT: Final = 60.0
WINDOW_SECONDS: Final = 600.0
"""Age beyond which an exclusion does not delay a node's return."""
_MINUTE: Final = 60.0
_MOST_NAMED: Final = 8


def suspect(task: Task, turn: Turn, *, weakly: bool = False) -> None:
    """Suspect that members do not reach each other: let their agents probe, unless a probe has just ended."""
    probing = task.probing
    rests_until = probing.weak_rests_until if weakly else probing.rests_until
    if probing.asked or turn.now < rests_until or task.finishing or task.over is not None:
        return
    agents = [task.agents[agent] for agent in epochs.agents_to_notify(task) if agent in task.agents]
    _begin(task, turn, agents, {agent.id: [*_elsewhere(agent, agents)] for agent in agents})


def delays(task: Task, turn: Turn) -> bool:
    """Whether to delay the answer to a failed collective because a probe will give more information soon."""
    if task.probing.asked:
        turn.timer("comm_error", turn.limits.comm_error_grace, task=task.id)
    return bool(task.probing.asked)


def receive(task: Task, turn: Turn, agent: Agent, message: wire.Probed) -> None:
    """Process an agent's report of the peers that it did not reach."""
    probing = task.probing
    if message.number == probing.number and agent.id in probing.asked and agent.id not in probing.missed:
        probing.missed[agent.id] = [peer for peer in message.missed if peer in task.agents]
        if set(probing.asked) <= set(probing.missed):
            _conclude(task, turn)


def restore(task: Task, turn: Turn) -> None:
    """Start again after a restart of the coordinator, without timers."""
    task.probing.asked, task.probing.missed, task.probing.entering = [], {}, 0
    if _left_out(task):
        turn.timer("parted", RETRY_SECONDS, task=task.id)


def watch(task: Task, turn: Turn) -> None:
    """Check some time after the newest epoch has settled that all members have entered it. Idempotent."""
    probing = task.probing
    if task.settled and probing.entering != task.number and len({member.node for member in task.members()}) > 1:
        probing.entering, probing.looks = task.number, 0
        turn.timer("enter", _ENTER_SECONDS, task=task.id)


def review(task: Task, turn: Turn) -> None:
    """Bar all agents of excluded nodes, but readmit them when no other node is left. Idempotent."""
    probing = task.probing
    if not probing.nodes:
        return
    for agent in task.agents.values():
        parted = probing.nodes.get(agent.node)
        agent.parted = "" if parted is None else parted.reason
    if _left_out(task) and not _inside(task):
        for node in _left_out(task):  # no node is left to reach
            _admit(task, turn, node)


# ---- probes ----------------------------------------------------------------------------------------------------------


def _begin(task: Task, turn: Turn, agents: Iterable[Agent], peers: Mapping[str, list[Agent]]) -> None:
    """Send an order to each connected agent that has peers to probe."""
    probing = task.probing
    asked = [agent for agent in agents if agent.conn is not None and peers.get(agent.id)]
    if not asked:
        return
    probing.number += 1
    probing.asked, probing.missed = [agent.id for agent in asked], {}
    found = {peer.id: peer for agent in asked for peer in peers[agent.id]}
    known = {  # shared by all orders: there may be millions of pairs
        peer.id: wire.Peer(agent=peer.id, host=peer.store.host, port=peer.store.port)
        for peer in found.values()
        if peer.store is not None and peer.conn is not None
    }
    for agent in asked:
        targets = [known[peer.id] for peer in peers[agent.id] if peer.id in known]
        turn.send(agent, wire.Probe(number=probing.number, peers=targets, seconds=turn.limits.probe_time))
    turn.timer("probe", turn.limits.probe_time + ANSWER_SECONDS, task=task.id)


def _elsewhere(agent: Agent, agents: Iterable[Agent]) -> Iterable[Agent]:
    return (other for other in agents if other.node != agent.node)


def _probe_again(task: Task, turn: Turn) -> None:
    """Probe between excluded nodes and the others."""
    outside = [agent for agent in task.agents.values() if agent.parted and agent.conn is not None and agent.store]
    inside = [task.agents[agent] for agent in _inside(task)]
    if not task.probing.asked and outside and inside:
        peers = {agent.id: [*inside, *_elsewhere(agent, outside)] for agent in outside}
        peers.update({agent.id: outside for agent in inside})
        _begin(task, turn, [*outside, *inside], peers)
    _again(task, turn)


def _again(task: Task, turn: Turn) -> None:
    if left_out := _left_out(task):
        lately = any(turn.now - task.probing.nodes[node].times[-1] < _MINUTE for node in left_out)
        turn.timer("parted", RETRY_SECONDS if lately else _LATER_RETRY_SECONDS, task=task.id)


def _look_at_entries(task: Task, turn: Turn) -> None:
    probing, record = task.probing, task.severity
    if probing.entering != task.number or not task.settled or task.finishing:
        return
    missing = [m.worker for m in task.live_members() if task.workers[m.worker].entered != task.number]
    probing.looks += 1
    if missing and (record.reports_entry or probing.looks <= _FIRST_LOOKS):
        suspect(task, turn)
        turn.timer("enter", _ENTER_SECONDS, task=task.id)


def _conclude(task: Task, turn: Turn) -> None:
    """Evaluate a probe after all answers, or its time limit."""
    probing = task.probing
    if not probing.asked:
        return
    turn.cancel("probe", task=task.id)
    asked, missed = probing.asked, probing.missed
    probing.asked, probing.missed = [], {}
    probing.clean = 0 if any(missed.values()) else probing.clean + 1
    probing.rests_until = turn.now + _PAUSE_SECONDS
    probing.weak_rests_until = turn.now + min(_LONGEST_PAUSE, _PAUSE_SECONDS * 2.0 ** min(probing.clean, 10))
    answered = {agent: task.agents[agent].node for agent in missed if agent in task.agents}
    cut = {
        frozenset((answered[agent], answered[peer]))
        for agent, peers in missed.items()
        for peer in peers
        if agent in answered and peer in answered
    }
    silent = {task.agents[agent].node for agent in asked if agent in task.agents and agent not in missed}
    left_out = set(_left_out(task))
    _part(task, turn, {pair for pair in cut if not pair & left_out})
    if any(agent in task.agents and task.agents[agent].node in left_out for agent in asked):
        _take_back(task, turn, cut, set(answered.values()), silent)


# ---- effects of decisions -------------------------------------------------------------------------------------------


def _part(task: Task, turn: Turn, cut: set[Pair]) -> None:
    """Continue without nodes that the others do not reach."""
    concerned = [task.agents[agent] for agent in epochs.agents_to_notify(task) if agent in task.agents]
    concerned.sort(key=lambda agent: task.slots.index(agent.id) if agent.id in task.slots else len(task.slots))
    nodes = list(dict.fromkeys(agent.node for agent in concerned))
    on_node: dict[str, list[Worker]] = {node: [] for node in nodes}
    for member in task.live_members():
        if member.node in on_node:
            on_node[member.node].append(task.workers[member.worker])
    inside = continuing([_candidate(task, node, there) for node, there in on_node.items()], cut, _whole_replicas(task))
    outside = [node for node in nodes if node not in inside]
    if not outside:
        return
    epochs.open_incident(task)
    pairs = sorted(sorted(pair) for pair in cut if pair <= set(nodes))
    cause = f"nodes do not reach each other: {', '.join(map(' and '.join, pairs[:_MOST_NAMED]))}"
    cause += f" and {len(pairs) - _MOST_NAMED} more pairs" if len(pairs) > _MOST_NAMED else ""
    _report(task, turn, cause, pairs)
    turn.emit(task, "nodes_left_out", nodes=outside, continuing=inside, unreached=pairs)
    for node in outside:
        own = sorted({other for pair in pairs if node in pair for other in pair} - {node})
        reason = f"it does not reach {', '.join(own[:_MOST_NAMED])}, or is not reached"
        parted = task.probing.nodes.setdefault(node, NodeExclusion())
        parted.times = [*(at for at in parted.times if turn.now - at < WINDOW_SECONDS), turn.now]
        parted.reason, parted.reached_since = reason, 0.0
        for agent in [agent for agent in task.agents.values() if agent.node == node]:
            agent.parted = reason
            turn.send(agent, wire.Barred(reason=agent.barred))
            if agent.id in task.slots:
                for worker in task.workers_of(agent.id):
                    epochs.remove_worker(task, worker)
                revoke(task, turn, agent, reason, _STOP_SECONDS)
    turn.places_changed = True
    turn.timer("parted", RETRY_SECONDS, task=task.id)


def _report(task: Task, turn: Turn, cause: str, pairs: list[list[str]]) -> None:
    error = ErrorFact(
        step=task.severity.step,
        kind="connection_failed",
        severity="SEV3",
        cause=cause,
        happened_at=task.watch.since or turn.now,
        received_at=turn.now,
        details={"unreached": pairs[:_MOST_NAMED]},
    )
    turn.log(task, error)


def _take_back(task: Task, turn: Turn, cut: set[Pair], answered: set[str], silent: set[str]) -> None:
    """Readmit excluded nodes that have reached all others for long enough."""
    inside = {task.agents[agent].node for agent in _inside(task)}
    waiting = [node for node in _left_out(task) if node in answered and node not in silent]
    unknown = {frozenset((node, other)) for node in waiting for other in inside & silent}
    reaching = returning(sorted(inside), waiting, cut | unknown)
    for node in _left_out(task):
        parted = task.probing.nodes[node]
        if node not in reaching:
            parted.reached_since = 0.0
            continue
        parted.reached_since = parted.reached_since or turn.now
        if turn.now - parted.reached_since >= wait_of(len(parted.times)):
            _admit(task, turn, node)


def wait_of(times: int) -> float:
    """Return the seconds for which a node must reach the others before it returns, after ``times`` recent
    exclusions.
    """
    return 0.0 if times <= 1 else min(_LONGEST_WAIT, 2.0 ** min(times - 1, 10))


def _admit(task: Task, turn: Turn, node: str) -> None:
    parted = task.probing.nodes[node]
    seconds = round(turn.now - parted.times[-1], 3)
    parted.reason, parted.reached_since = "", 0.0
    for agent in [agent for agent in task.agents.values() if agent.node == node]:
        agent.parted = ""
        turn.send(agent, wire.Barred(reason=agent.barred))
    turn.places_changed = True
    turn.emit_apart(task, "node_readmitted", node=node, seconds=seconds)


# ---- queries ---------------------------------------------------------------------------------------------------------


def _left_out(task: Task) -> list[str]:
    return [node for node, parted in task.probing.nodes.items() if parted.reason]


def _inside(task: Task) -> list[str]:
    """Agents of nodes that are not excluded, and that hold a slot."""
    return [agent for agent in task.slots if not task.agents[agent].parted]


def _candidate(task: Task, node: str, members: list[Worker]) -> Candidate:
    holds = any(epochs.holds_state(worker) for worker in members if worker.id in task.established)
    return Candidate(node=node, workers=len(members), holds_state=holds)


def _whole_replicas(task: Task) -> list[set[str]]:
    whole = (replica for replica in task.replicas if all(worker in task.workers for worker in replica))
    return [{task.agents[task.workers[worker].agent].node for worker in replica} for replica in whole]


PART: Final = Part(
    restore=restore,
    receivers=(on(wire.Probed, receive),),
    timers={"probe": _conclude, "parted": _probe_again},
    review=review,
)
ENTRIES: Final = Part(timers={"enter": _look_at_entries}, review=watch)
"""Suspicion of members that do not enter a settled epoch."""
