"""Traces from their configuration: the node and worker of each failure, its cause, and the downtime of the node.

The same configuration, cluster and seed give the same trace, byte for byte, with the same numpy. Each source draws from
its own generator, seeded by (seed, name of the source), so adding or changing one leaves the others as they were. Times
are rounded to microseconds, as the simulator counts them.

Nodes that are down do not fail: a failure that would strike a node under repair is left out, or strikes another node if
the number of failures is given (``exact``).

Faults may also be sentences of docs/faults.md: those that `unicron inject` would produce, with times of the simulator's
clock. The simulator numbers nodes from 0. It has no ranks, whose assignment changes with every policy, and no points of
a program. A sentence that specifies more than a fault, a node and times is refused.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unicron_lightning.coordinator.severity.errors import SEVERITY
from unicron_lightning.errors import ConfigError
from unicron_lightning.faults import fault as words
from unicron_lightning.faults.arrivals import arrivals, draw
from unicron_lightning.faults.language import parse, text
from unicron_lightning.simulate.trace import SLOWDOWN, SLOWING, SimCluster, Trace, TraceFault, order
from unicron_lightning.simulate.traces.arrivals import HOUR, arrivals_of
from unicron_lightning.simulate.traces.config import CoordinatorFaults, RepairConfig, SourceConfig, TraceConfig
from unicron_lightning.simulate.traces.table import read_table

DAY = 24 * HOUR


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A failure before its node is known to be up.

    Attributes:
        fault: the failure.
        elsewhere: first candidate for another node if the drawn one is down; None: the failure is left out then.
    """

    fault: TraceFault
    elsewhere: int | None


def generate(config: TraceConfig, cluster: SimCluster, seed: int, folder: Path = Path()) -> Trace:
    """Generate the trace of a configuration.

    Args:
        config: the trace.
        cluster: the cluster whose nodes and workers fail.
        seed: seed of the randomness.
        folder: base of a relative `TraceConfig.csv`.

    Raises:
        ConfigError: the file of events can't be read or contradicts the cluster, or a sentence is wrong.
    """
    seconds = config.days * DAY
    drawn: list[_Drawn] = []
    for name, source in config.sources.items():
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        drawn += _faults(source, cluster, seconds, random)
    drawn.sort(key=lambda each: order(each.fault))
    faults = list(_where_nodes_are_up(drawn, cluster))
    if config.csv is not None:
        faults += read_table(folder / config.csv, cluster)
    faults += replay(config.faults, cluster, seconds, seed)
    return Trace.of(config.name, seconds, faults, list(_outages(config.coordinator, seconds, seed)))


def _outages(config: CoordinatorFaults | None, seconds: float, seed: int) -> Iterator[tuple[float, float]]:
    if config is None:
        return
    random = np.random.default_rng([seed, zlib.crc32(b"coordinator")])
    end = 0.0
    while (begin := end + float(random.exponential(config.mtbf_hours * HOUR))) < seconds:
        end = begin + config.minutes * 60.0
        yield round(begin, 6), round(end, 6)


def _faults(source: SourceConfig, cluster: SimCluster, seconds: float, random: np.random.Generator) -> Iterator[_Drawn]:
    per_switch = source.nodes_per_switch
    sizes = {
        "worker": cluster.num_workers,
        "node": cluster.num_nodes,
        "switch": -(-cluster.num_nodes // per_switch),
    }
    struck = arrivals_of(source, sizes[source.component], seconds, random)
    num = struck.seconds.size
    causes = list(source.causes.values())
    picked = _causes(np.array([cause.count for cause in causes]), num, source.process == "exact", random)
    repairs = repair_seconds(source.repair, num, random)
    for place, cause in enumerate(causes):
        if cause.repair is not None:
            own = picked == place
            repairs[own] = repair_seconds(cause.repair, int(own.sum()), random)
    ranks = random.integers(0, cluster.workers_per_node, num)
    elsewhere = random.integers(0, cluster.num_nodes, num)
    times = np.round(struck.seconds, 6)
    for index in range(num):
        cause, component = causes[picked[index]], int(struck.components[index])
        first = component // cluster.workers_per_node if source.component == "worker" else component
        nodes = [first]
        if source.component == "switch":
            nodes = list(range(component * per_switch, min((component + 1) * per_switch, cluster.num_nodes)))
        whole = SEVERITY[cause.kind] == "SEV1"
        worker = component % cluster.workers_per_node if source.component == "worker" else int(ranks[index])
        for node in nodes:
            fault = TraceFault(
                at=float(times[index]),
                kind=cause.kind,
                node=node,
                worker=None if whole else worker,
                repair=float(repairs[index]) if cause.lasts else 0.0,
                strikes=cause.strikes,
                slowdown=cause.slowdown if cause.kind in SLOWING else 0.0,
            )
            yield _Drawn(fault=fault, elsewhere=int(elsewhere[index]) if source.process == "exact" else None)


def _causes(counts: NDArray[np.float64], num: int, exactly: bool, random: np.random.Generator) -> NDArray[np.int64]:
    """Choose the cause of each failure: at random, or in exact proportions (largest remainders) in a random order."""
    shares = counts / counts.sum()
    if not exactly:
        return random.choice(counts.size, size=num, p=shares)
    whole = np.floor(shares * num + 1e-9).astype(np.int64)
    remainders = shares * num - whole
    missing = num - int(whole.sum())
    whole[np.argsort(-remainders, kind="stable")[:missing]] += 1
    return random.permutation(np.repeat(np.arange(counts.size), whole))


def repair_seconds(repair: RepairConfig, num: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Draw downtimes of nodes; rounded to microseconds."""
    if repair.distribution == "lognormal":
        hours = repair.median_hours * np.exp(repair.log_deviation * random.standard_normal(num))
    elif repair.distribution == "uniform":
        hours = random.uniform(repair.least_hours, repair.most_hours, num)
    else:
        hours = np.full(num, repair.hours if repair.distribution == "fixed" else 0.0)
    return np.round(hours * HOUR, 6)


def _where_nodes_are_up(drawn: list[_Drawn], cluster: SimCluster) -> Iterator[TraceFault]:
    """Drop, or move, failures that would strike a node that is down."""
    down: dict[int, float] = {}
    returns: list[tuple[float, int]] = []
    for each in drawn:
        fault = each.fault
        while returns and returns[0][0] <= fault.at:
            until, node = heapq.heappop(returns)
            if down.get(node) == until:
                del down[node]
        if fault.node in down:
            if each.elsewhere is None or len(down) >= cluster.num_nodes:
                continue
            node = each.elsewhere
            while node in down:
                node = (node + 1) % cluster.num_nodes
            fault = replace(fault, node=node)
        if fault.takes_node:
            down[fault.node] = fault.at + fault.repair
            heapq.heappush(returns, (down[fault.node], fault.node))
        yield fault


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
