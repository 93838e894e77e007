"""Traces: faults of a cluster's nodes and workers over time, in a total order.

Faults are sorted by (time, place of the kind in `errors.KINDS`, node, worker, repair), so that a trace of the same
faults is the same whatever order they were listed in, and simultaneous faults have one sequence. A fault of a node that
is already down has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from unicron_lightning.coordinator.severity.errors import KINDS, SEVERITY, Severity
from unicron_lightning.errors import ConfigError

_ORDER: Final = {kind.name: place for place, kind in enumerate(KINDS)}


@dataclass(frozen=True, kw_only=True)
class SimCluster:
    """Equal nodes.

    Attributes:
        num_nodes: numbered from 0.
        workers_per_node: accelerators, one worker each.
        cell: nodes that are allocated, and lost, together: a *place* of the plan. 1 is realistic; more makes large
            clusters quicker to simulate, and every policy then loses a cell for a node.

    Raises:
        ConfigError: a value below 1, or nodes that do not fill their cells.
    """

    num_nodes: int
    workers_per_node: int
    cell: int = 1

    def __post_init__(self) -> None:
        for name in ("num_nodes", "workers_per_node", "cell"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected a whole number of at least 1")
        if self.num_nodes % self.cell:
            raise ConfigError(f"cell={self.cell!r}: expected a divisor of num_nodes={self.num_nodes}")

    @property
    def num_places(self) -> int:
        """Number of places that the plan allocates."""
        return self.num_nodes // self.cell

    @property
    def place_workers(self) -> int:
        """Workers of a place."""
        return self.cell * self.workers_per_node

    @property
    def num_workers(self) -> int:
        """Number of all workers."""
        return self.num_nodes * self.workers_per_node


@dataclass(frozen=True, kw_only=True)
class TraceFault:
    """A failure of a component.

    Attributes:
        at: seconds from the beginning of the trace.
        kind: one of `errors.KINDS`.
        node: the node.
        worker: local rank on the node; None: the whole node.
        repair: seconds until the node can be used again; 0: its processes restart immediately.

    Raises:
        ConfigError: a value out of its range.
    """

    at: float
    kind: str
    node: int
    worker: int | None = None
    repair: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _ORDER:
            raise ConfigError(f"kind={self.kind!r}: expected one of {', '.join(_ORDER)}")
        for name in ("at", "repair"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value!r}: expected seconds, 0 or more")
        if self.node < 0 or (self.worker is not None and self.worker < 0):
            raise ConfigError(f"node={self.node!r}, worker={self.worker!r}: expected numbers from 0 on")

    @property
    def severity(self) -> Severity:
        """Severity of the first occurrence of the kind."""
        return SEVERITY[self.kind]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Faults within a period, sorted.

    Attributes:
        name: for tables.
        seconds: duration; nothing after it counts.
        faults: sorted, see the module; `Trace.of` sorts.

    Raises:
        ConfigError: no duration, or faults that are not sorted.
    """

    name: str
    seconds: float
    faults: tuple[TraceFault, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(f"trace {self.name!r}: seconds={self.seconds!r}: expected a number > 0")
        if list(self.faults) != sorted(self.faults, key=order):
            raise ConfigError(f"trace {self.name!r}: expected faults in their order, as Trace.of makes it")

    @classmethod
    def of(cls, name: str, seconds: float, faults: Iterable[TraceFault]) -> Trace:
        """Create a trace of faults in any order; those at or after its end are left out."""
        kept = sorted((fault for fault in faults if fault.at < seconds), key=order)
        return cls(name=name, seconds=seconds, faults=tuple(kept))


def order(fault: TraceFault) -> tuple[float, int, int, int, float]:
    """Sort key of faults."""
    worker = -1 if fault.worker is None else fault.worker
    return fault.at, _ORDER[fault.kind], fault.node, worker, fault.repair
