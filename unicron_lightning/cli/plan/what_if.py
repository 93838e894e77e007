"""``--what-if``: resolves the user's event with respect to the plan in force."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from unicron_lightning.cli.plan.command import EVENTS
from unicron_lightning.cli.plan.situation import Situation
from unicron_lightning.errors import ConfigError
from unicron_lightning.planner.placement import NodeCapacity, Placement
from unicron_lightning.planner.solver import Plan, solve
from unicron_lightning.planner.state import Event, NodesJoined, TaskFinished, TaskLaunched, WorkersLost


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The consequence of an event.

    Attributes:
        words: readable description of the event.
        situation: after the event, with the losses.
        plan: the new plan.
    """

    words: str
    situation: Situation
    plan: Plan


def what_if(situation: Situation, plan: Plan, placement: Placement, event: str, argument: str | None) -> Outcome:
    """Plan for an event that happens once ``plan`` is in force.

    Raises:
        ConfigError: the event is unknown or impossible.
    """
    in_force = dataclasses.replace(
        situation, state=situation.state.adopt(plan.allocation), running=placement.accelerators, assumed=False
    )
    if event == "node-loss":
        return _node_loss(in_force, placement, argument)
    if event == "join":
        return _join(in_force, argument)
    if event not in EVENTS:
        raise ConfigError(f"--what-if {event}: expected one of {', '.join(EVENTS)}")
    tasks = {"finish": in_force.state.names, "launch": tuple(c.task.name for c in in_force.state.queued)}[event]
    if argument not in tasks:
        raise ConfigError(
            f"--what-if {event} {argument or ''}: expected one of the tasks {', '.join(tasks) or '(none)'}"
        )
    if event == "finish":
        return _after(in_force, TaskFinished(task=argument), f"{argument} finishes")
    return _after(in_force, TaskLaunched(task=argument), f"{argument} is launched")


def _node_loss(situation: Situation, placement: Placement, argument: str | None) -> Outcome:
    ready = {node.name: node for node in situation.nodes if node.state == "ready"}
    name = argument
    if argument not in ready:
        on_nodes = placement.of_task(argument or "")
        name = min(on_nodes, key=lambda node: (-on_nodes[node], node), default=None)
    if name is None:
        running = ", ".join(task for task, num in situation.state.allocation.items() if num)
        raise ConfigError(
            f"--what-if node-loss {argument or ''}: expected a ready node, or a task that has workers ({running})"
        )
    lost = placement.accelerators.get(name, {})
    node = ready[name]
    if node.num_accelerators == 0:
        raise ConfigError(f"--what-if node-loss {name}: the node has no accelerators")
    event = WorkersLost(num_workers=node.num_accelerators, by_task=tuple(lost.items()))
    nodes = _replaced(situation.nodes, dataclasses.replace(node, state="failed"))
    held = ", ".join(f"{num} of {task}" for task, num in sorted(lost.items())) or "idle"
    return _after(dataclasses.replace(situation, nodes=nodes), event, f"{name} fails ({held})")


def _join(situation: Situation, argument: str | None) -> Outcome:
    if argument is None:
        names = {node.name for node in situation.nodes}
        name = next(f"new{index}" for index in range(len(names) + 1) if f"new{index}" not in names)
        node = NodeCapacity(name=name, num_accelerators=situation.state.node_workers)
    else:
        away = {n.name: n for n in situation.nodes if n.state != "ready"}
        if argument not in away:
            raise ConfigError(
                f"--what-if join {argument}: expected a node that is not ready ({', '.join(away) or 'none is'}), "
                "or no name for a new one"
            )
        node = dataclasses.replace(away[argument], state="ready")
    if not 0 < node.num_accelerators <= situation.state.node_workers:
        raise ConfigError(
            f"--what-if join {node.name}: {node.num_accelerators} accelerators, "
            f"expected 1 to {situation.state.node_workers}"
        )
    nodes = _replaced(situation.nodes, node)
    event = NodesJoined(num_workers=node.num_accelerators)
    return _after(dataclasses.replace(situation, nodes=nodes), event, f"{node.name} joins")


def _replaced(nodes: tuple[NodeCapacity, ...], node: NodeCapacity) -> tuple[NodeCapacity, ...]:
    return (*(each for each in nodes if each.name != node.name), node)


def _after(situation: Situation, event: Event, words: str) -> Outcome:
    after = dataclasses.replace(situation, state=situation.state.after(event))
    return Outcome(words=words, situation=after, plan=solve(after.state))
