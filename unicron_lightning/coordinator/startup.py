"""Actions that the configuration requests at the coordinator's start: drain nodes, submit tasks."""

from __future__ import annotations

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.config import CoordinatorConfig
from unicron_lightning.coordinator.jobs import refusal, result_of
from unicron_lightning.coordinator.state import Cluster


def inputs_at_start(config: CoordinatorConfig, cluster: Cluster) -> list[ev.Input]:
    """Return inputs for the machine, to follow `events.Started`.

    A task that already runs, or has ended according to the restored state, is left out: a restart repeats nothing.
    """
    inputs: list[ev.Input] = [ev.Drain(node=node, drained=True) for node in config.cluster.drained]
    inputs += [
        ev.Submit(job=job)
        for job in config.jobs()
        if refusal(cluster, job) is None and result_of(cluster.lasting, job.name) is None
    ]
    return inputs
