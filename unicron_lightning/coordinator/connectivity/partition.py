"""Handles nodes that do not reach each other although the coordinator reaches all of them.

Rules:

* A suspicion arises when all members wait in a collective for longer than usual, when one has waited for a second, when
  a collective has failed, and when a settled epoch is not entered for a while. The members' agents then probe each
  other (`wire.Probe`). Suspicions by a wait alone, which may be for a slow rank, lead to fewer and fewer probes.
* If some nodes do not reach each other, the task continues on the set of nodes that `reachability.continuing` chooses.
  The slots of the other nodes are revoked: their workers stop, and are restarted as warm workers.
* Only agents that have answered are judged. An agent that does not answer may be dead, which its connection will show.
* Excluded nodes and the others probe each other periodically. A node returns when it and all others reach each other:
  at once after its first exclusion, and after a delay that doubles with each further one.
* No node is excluded when no other node is left. Every epoch is the coordinator's, so two worlds never coexist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.connectivity.reachability import Candidate, Pair, continuing, returning
from unicron_lightning.coordinator.incidents.facts import ErrorFact
from unicron_lightning.coordinator.membership import epochs
from unicron_lightning.coordinator.membership.slots import revoke
from unicron_lightning.coordinator.part import Part, on
from unicron_lightning.coordinator.state import Agent, NodeExclusion, Task, Worker

ANSWER_SECONDS: Final = 1.5
"""Time to wait for an agent's answer after the probe's own time limit."""
PAUSE_SECONDS: Final = 2.0
"""Least time between a probe and the next one."""
LONGEST_PAUSE: Final = 60.0
"""Longest time between probes for suspicions by a wait alone; it doubles with each probe without a cut."""
ENTER_SECONDS: Final = 2.0
"""Time after which members that have not entered a settled epoch are suspected, and interval of further suspicions."""
FIRST_LOOKS: Final = 5
"""Number of these checks if it is unknown whether workers report that they have entered an epoch."""
RETRY_SECONDS: Final = 1.0
LATER_RETRY_SECONDS: Final = 5.0
"""Interval of probes of nodes that were excluded more than a minute ago."""
STOP_SECONDS: Final = 1.0
"""Time after which workers of an excluded node are killed: while they wait for others, they do not handle signals."""
LONGEST_WAIT: Final = 60.0
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
        turn.timer("enter", ENTER_SECONDS, task=task.id)


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
        turn.timer("parted", RETRY_SECONDS if lately else LATER_RETRY_SECONDS, task=task.id)


def _look_at_entries(task: Task, turn: Turn) -> None:
    probing, record = task.probing, task.severity
    if probing.entering != task.number or not task.settled or task.finishing:
        return
    missing = [m.worker for m in task.live_members() if task.workers[m.worker].entered != task.number]
    probing.looks += 1
    if missing and (record.reports_entry or probing.looks <= FIRST_LOOKS):
        suspect(task, turn)
        turn.timer("enter", ENTER_SECONDS, task=task.id)


def _conclude(task: Task, turn: Turn) -> None:
    """Evaluate a probe after all answers, or its time limit."""
    probing = task.probing
    if not probing.asked:
        return
    turn.cancel("probe", task=task.id)
    asked, missed = probing.asked, probing.missed
    probing.asked, probing.missed = [], {}
    probing.clean = 0 if any(missed.values()) else probing.clean + 1
    probing.rests_until = turn.now + PAUSE_SECONDS
    probing.weak_rests_until = turn.now + min(LONGEST_PAUSE, PAUSE_SECONDS * 2.0 ** min(probing.clean, 10))
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
                revoke(task, turn, agent, reason, STOP_SECONDS)
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
    return 0.0 if times <= 1 else min(LONGEST_WAIT, 2.0 ** min(times - 1, 10))


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
