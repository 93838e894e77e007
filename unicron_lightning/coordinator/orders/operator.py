"""Orders of an operator: drains of nodes, and the orders that the configuration gives at the coordinator's start."""

from __future__ import annotations

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.config.schema import CoordinatorConfig
from unicron_lightning.coordinator.orders.jobs import refusal, result_of
from unicron_lightning.coordinator.severity import apply as severity
from unicron_lightning.coordinator.state import Cluster, Lasting
from unicron_lightning.jobs import Job


def drained(lasting: Lasting) -> list[str]:
    """Return the nodes, or agents, that get no workers: drained by an operator, or cordoned."""
    return [*lasting.drained, *(node for node in lasting.cordoned if node not in lasting.drained)]


def drain(cluster: Cluster, turn: Turn, event: ev.Drain) -> bool:
    """Record that a node is drained, or no longer is; return whether that is a change."""
    lasting = cluster.lasting
    if event.drained and event.node not in lasting.drained:
        lasting.drained.append(event.node)
    elif not event.drained and event.node in drained(lasting):
        lasting.drained = [node for node in lasting.drained if node != event.node]
        lasting.cordoned.pop(event.node, None)
        for task in cluster.tasks.values():
            severity.lift(task, turn, event.node)
    else:
        return False
    name = "node_drains" if event.drained else "node_undrained"
    turn.emit_of_cluster(name, node=event.node)
    turn.save_lasting()
    turn.places_changed = True
    return True


def inputs_at_start(config: CoordinatorConfig, cluster: Cluster) -> list[ev.Input]:
    """Return inputs for the machine, to follow `events.Started`.

    A task that already runs, or has ended according to the restored state, is left out: a restart repeats nothing.
    So is one that comes after a task that has not succeeded.
    """
    inputs: list[ev.Input] = [ev.Drain(node=node, drained=True) for node in config.cluster.drained]
    due: list[Job] = []
    for job in config.jobs():
        if refusal(cluster, [*due, job]) is None and result_of(cluster.lasting, job.name) is None:
            due.append(job)
    return [*inputs, *([ev.Submit(jobs=tuple(due))] if due else [])]
