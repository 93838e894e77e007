"""One simulation: a policy, a cluster with tasks, a trace."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.healing import Healing
from unicron_lightning.simulate.policies.systems import SYSTEMS
from unicron_lightning.simulate.result import SimulationResult
from unicron_lightning.simulate.trace import SimCluster, Trace
from unicron_lightning.simulate.unicron.system import ABLATIONS, System
from unicron_lightning.simulate.workload import SimTask

_SYSTEMS: Final = {system.name: system for system in SYSTEMS}
_ABLATIONS: Final = {ablation.name: ablation for ablation in ABLATIONS}
POLICIES: Final = (*_ABLATIONS, *_SYSTEMS)
"""Names of all policies."""


def simulate(
    policy: str, cluster: SimCluster, tasks: Sequence[SimTask], trace: Trace, costs: Costs
) -> SimulationResult:
    """Replay a trace.

    Args:
        policy: one of `POLICIES`.
        cluster: the nodes.
        tasks: all tasks; those with arrival 0 run already.
        trace: the faults.
        costs: costs of the policy's system.

    Returns:
        The result, byte for byte the same for the same arguments: only the trace was drawn at random, by its generator.

    Raises:
        ConfigError: an unknown policy, a fault of a node that does not exist, tasks of the same name.
    """
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise ConfigError(f"tasks {names}: expected different names")
    for fault in trace.faults:
        if fault.node >= cluster.num_nodes or (fault.worker or 0) >= cluster.workers_per_node:
            given = f"{fault!r} in trace {trace.name!r}"
            size = f"{cluster.num_nodes} nodes of {cluster.workers_per_node} workers"
            raise ConfigError(f"{given}: expected one of {size}, numbered from 0")
    if policy in _ABLATIONS:
        with _rarely_collected():
            return System(_ABLATIONS[policy], cluster, tasks, trace, costs).run()
    if policy not in _SYSTEMS:
        raise ConfigError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
    return Healing(_SYSTEMS[policy](), cluster, tasks, trace, costs).run()


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Make the garbage collector run rarely: a machine with 100,000 agents creates hardly any cycles.

    Searching all of them repeatedly would take a fifth of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
