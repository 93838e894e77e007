"""Orders of an operator for nodes."""

from __future__ import annotations

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.severity import apply as severity
from unicron_lightning.coordinator.state import Cluster, Lasting
from unicron_lightning.coordinator.turn import Turn


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
    turn.actions.append(ev.Emit(name=name, task=None, incident=None, fields={"node": event.node}))
    turn.save_lasting()
    turn.places_changed = True
    return True
