"""Sentences of docs/faults.md on the simulator's clock: the faults that `unicron inject` would produce, with times.

The simulator numbers nodes from 0. It has no ranks, whose assignment changes with every policy, and no points of a
program. A sentence that specifies more than a fault, a node and times is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Final

from unicron_lightning.coordinator.severity.errors import SEVERITY
from unicron_lightning.errors import ConfigError
from unicron_lightning.faults import fault as words
from unicron_lightning.faults.arrivals import arrivals, draw
from unicron_lightning.faults.language import parse, text
from unicron_lightning.simulate.trace import SLOWDOWN, SLOWING, SimCluster, TraceFault

SEEN_AS: Final[dict[words.Kind, str]] = {
    "kill": "exited_abnormally",
    "exit": "exited_abnormally",
    "stop": "silent",
    "hang": "task_hang",
    "kill agent": "lost_connection",
    "drop network": "lost_connection",
}
"""The kind of error that a fault appears as; ``raise`` names its own."""


def replay(sentences: Sequence[str], cluster: SimCluster, seconds: float, seed: int) -> Iterator[TraceFault]:
    """Generate the faults of sentences.

    Args:
        sentences: in any order; their places and the seed determine the random draws.
        cluster: the cluster; a node that is not named is drawn, as is the worker on it.
        seconds: duration of the trace: a rate has no end.
        seed: seed of sentences without one of their own.

    Raises:
        ConfigError: not a sentence, or one that the simulator does not support, quoted.
    """
    for place, sentence in enumerate(sentences):
        fault = parse(sentence)
        kind, node = _kind(fault), _node(fault, cluster)
        random = draw(fault, place, "where", seed=seed)
        for at in arrivals(fault, place, seed=seed):
            if at >= seconds:
                break
            yield _strike(fault, kind, node, round(at, 6), cluster, random, seconds)


def _strike(
    fault: words.Fault, kind: str, node: int | None, at: float, cluster: SimCluster, random: Random, seconds: float
) -> TraceFault:
    drawn, worker = random.randrange(cluster.num_nodes), random.randrange(cluster.workers_per_node)
    whole = SEVERITY[kind] == "SEV1"
    lasts = seconds if fault.duration is None else fault.duration  # without ``for=`` it does not return in this trace
    return TraceFault(
        at=at,
        kind=kind,
        node=drawn if node is None else node,
        worker=None if whole else worker,
        repair=lasts if fault.kind == "drop network" else 0.0,
        slowdown=SLOWDOWN if kind in SLOWING else 0.0,
    )


def _kind(fault: words.Fault) -> str:
    kind = str(fault.argument) if fault.kind == "raise" else SEEN_AS.get(fault.kind)
    if kind is None:
        raise ConfigError(f"{text(fault)!r}: the simulator knows {', '.join(SEEN_AS)} and raise")
    if fault.waits or fault.rank is not None or fault.task is not None:
        raise ConfigError(f"{text(fault)!r}: the simulator knows no tasks, ranks and points; expected node= and times")
    if fault.kind in ("stop", "hang") and fault.duration is not None:
        raise ConfigError(f"{text(fault)!r}: in the simulator it lasts until the worker is restarted; expected no for=")
    return kind


def _node(fault: words.Fault, cluster: SimCluster) -> int | None:
    if fault.node is None:
        return None
    if not (fault.node.isdecimal() and int(fault.node) < cluster.num_nodes):
        raise ConfigError(f"{text(fault)!r}: node={fault.node}: expected a number from 0 to {cluster.num_nodes - 1}")
    return int(fault.node)
