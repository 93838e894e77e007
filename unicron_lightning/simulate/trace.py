"""The simulated cluster: its tasks with their speeds, and the faults that befall it.

Traces: faults of a cluster's nodes and workers over time, in a total order.

Faults are sorted by (time, place of the kind in the table of severities, node, worker, repair), so that a trace of the
same faults is the same whatever order they were listed in, and simultaneous faults have one sequence. A fault of a node
that is already down only prolongs its absence, if it lasts longer.

Two groups of kinds interrupt nothing when they happen:

* `SLOWING`: the steps of the node's task take longer for as long as the fault lasts;
* `CORRUPTING`: the task's state is wrong from then on. When that is detected, all return to the newest persistent
  checkpoint written before. A NaN in the loss is detected at once; differing parameters stand for silent corruption,
  which is found late, but by Unicron with a witness (``extra["witness_steps"]``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, get_args

from unicron_lightning.coordinator.severity.record import SEVERITY, Severity
from unicron_lightning.errors import ConfigError, check_numbers
from unicron_lightning.terms import Terms

if TYPE_CHECKING:
    from unicron_lightning.planner.performance.model import ParallelConfiguration, PerformanceModel


@dataclass(frozen=True, kw_only=True)
class SimTask:
    """A task.

    Attributes:
        name: unique.
        performance: T(t,x) by number of workers (accelerators), FLOP/s.
        flops_per_step: FLOPs of one optimizer step of the whole task; a step at x workers takes this / T(t,x).
        terms: the terms on which it competes; of the workers of its places, those beyond a multiple of the granularity
            stand idle.
        arrival: seconds from the beginning; 0: it runs already when the trace begins.
        departure: time of its end, whatever its progress; None: never.
        steps: optimizer steps after which it ends; None: never.
        state_gigabytes: parameters and optimizer state of a replica; None: unknown, and transfers take what costs say.
        step_samples: samples of one optimizer step; None: unknown.

    Raises:
        ConfigError: a value out of its range.
    """

    name: str
    performance: PerformanceModel
    flops_per_step: float
    terms: Terms = field(default_factory=Terms)
    arrival: float = 0.0
    departure: float | None = None
    steps: float | None = None
    state_gigabytes: float | None = None
    step_samples: int | None = None

    def __post_init__(self) -> None:
        if (problem := self.terms.problem()) is not None:
            raise ConfigError(f"task {self.name!r}: {problem}")
        if not (math.isfinite(self.flops_per_step) and self.flops_per_step > 0):
            raise ConfigError(f"task {self.name!r}: flops_per_step={self.flops_per_step!r}: expected a number > 0")
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            raise ConfigError(f"task {self.name!r}: arrival={self.arrival!r}: expected seconds, 0 or more")
        if self.departure is not None and not self.departure > self.arrival:
            given = f"departure={self.departure!r}"
            raise ConfigError(f"task {self.name!r}: {given}: expected seconds after arrival={self.arrival!r}")
        for name in ("steps", "state_gigabytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"task {self.name!r}: {name}={value!r}: expected a number > 0")

    def throughput(self, num_workers: int) -> float:
        """Return FLOP/s with a number of workers, rounded down to those that it can use; 0.0 below its minimum."""
        usable = self.terms.usable(num_workers)
        return self.performance.throughput(usable) if usable else 0.0

    def layout(self, num_workers: int) -> tuple[int, int] | None:
        """Return TP and PP with a number of workers; None if unknown, or below its minimum."""
        usable = self.terms.usable(num_workers)
        found = self.performance.configuration(usable) if usable else None
        return None if found is None else (found.tensor_parallel, found.pipeline_parallel)


class PlaceSpeed:
    """A `PerformanceModel` by number of places, which caches each size.

    Args:
        task: the task.
        place_workers: workers of a place.
    """

    def __init__(self, task: SimTask, place_workers: int) -> None:
        self._task = task
        self._place_workers = place_workers
        self._known: dict[int, float] = {}

    def throughput(self, num_workers: int) -> float:
        """Return T with a number of places [FLOP/s]."""
        known = self._known.get(num_workers)
        if known is None:
            known = self._known[num_workers] = self._task.throughput(num_workers * self._place_workers)
        return known

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        """Return the configuration with a number of places."""
        terms, workers = self._task.terms, num_workers * self._place_workers
        usable = workers - workers % terms.granularity
        return self._task.performance.configuration(min(usable, terms.max_workers or usable))

    def uncertainty(self, num_workers: int) -> float:
        """Return 0: the speeds of simulated tasks are exact."""
        return 0.0


def place_terms(task: SimTask, place_workers: int, num_places: int) -> Terms:
    """Return the terms of a task in places: up to the most places whose workers it can use, all or nearly all."""
    terms = task.terms
    least = -(-terms.min_workers // terms.granularity) * terms.granularity
    least_places = max(1, -(-least // place_workers))
    most_places = num_places if terms.max_workers is None else min(-(-terms.max_workers // place_workers), num_places)
    return replace(terms, min_workers=least_places, max_workers=max(least_places, most_places), granularity=1)


_ORDER: Final = {kind: place for place, kind in enumerate(SEVERITY)}
_UNITS: Final = {"slowdown": "a fraction"}
SLOWDOWN: Final = 0.1
"""Slowdown if none is given: that from which the coordinator reports a task as degraded."""
SLOWING: Final = ("node_degraded", "link_degraded")
CORRUPTING: Final = ("nan_loss", "parameters_differ")
Strikes = Literal["one", "task"]
"""What a fault strikes: the named worker or node; or, as a bug does, all workers of the task that uses the node."""


@dataclass(frozen=True, kw_only=True)
class SimCluster:
    """Equal nodes.

    Attributes:
        num_nodes: numbered from 0.
        workers_per_node: accelerators, one worker each.
        cell: nodes that are allocated, and lost, together: a *place* of the plan. 1 is realistic; more makes large
            clusters quicker to simulate, and every policy then loses a cell for a node.
        storage_gigabytes_per_second: of the shared storage, for all that read or write a checkpoint; None: not known.
        peer_gigabytes_per_second: of a worker that receives its part of the state from a peer; None: not known.

    Raises:
        ConfigError: a value below 1, or nodes that do not fill their cells.
    """

    num_nodes: int
    workers_per_node: int
    cell: int = 1
    storage_gigabytes_per_second: float | None = None
    peer_gigabytes_per_second: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "num_nodes", "workers_per_node", "cell", least=1, error=ConfigError)
        if self.num_nodes % self.cell:
            raise ConfigError(f"cell={self.cell!r}: expected a divisor of num_nodes={self.num_nodes}")
        speeds = ("storage_gigabytes_per_second", "peer_gigabytes_per_second")
        check_numbers(self, *speeds, above=0, error=ConfigError)

    def transfer_seconds(self, task: SimTask) -> tuple[float | None, float | None]:
        """Return the seconds to read or write a task's checkpoint, and to send a worker's part of its state to a peer.

        None stands for what is not known. The state is spread evenly over the workers of a replica: the granularity.
        """
        size, storage, peer = task.state_gigabytes, self.storage_gigabytes_per_second, self.peer_gigabytes_per_second
        if size is None:
            return None, None
        part = size / task.terms.granularity
        return None if storage is None else size / storage, None if peer is None else part / peer

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
        kind: one of `severity.record.SEVERITY`.
        node: the node.
        worker: local rank on the node; None: the whole node.
        repair: seconds until the node can be used again; 0: its processes restart immediately. For `SLOWING` kinds,
            seconds until it is as fast as before (0: never); for `CORRUPTING` kinds, seconds until it is detected.
        strikes: see `Strikes`.
        slowdown: for `SLOWING` kinds, the fraction by which steps of the node's task take longer.

    Raises:
        ConfigError: a value out of its range.
    """

    at: float
    kind: str
    node: int
    worker: int | None = None
    repair: float = 0.0
    strikes: Strikes = "one"
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _ORDER:
            raise ConfigError(f"kind={self.kind!r}: expected one of {', '.join(_ORDER)}")
        for name in ("at", "repair", "slowdown"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value!r}: expected {_UNITS.get(name, 'seconds')}, 0 or more")
        if self.strikes not in get_args(Strikes):
            raise ConfigError(f"strikes={self.strikes!r}: expected one of {', '.join(get_args(Strikes))}")
        if self.strikes == "task" and (self.repair or self.kind in (*SLOWING, *CORRUPTING)):
            given = f"kind={self.kind!r}, repair={self.repair!r}, strikes='task'"
            raise ConfigError(f"{given}: expected a kind that stops workers, whose nodes stay up")
        if (self.slowdown > 0) != (self.kind in SLOWING):
            given = f"kind={self.kind!r}, slowdown={self.slowdown!r}"
            raise ConfigError(f"{given}: expected a slowdown > 0 of {' and '.join(SLOWING)}, and of no other kind")
        if self.node < 0 or (self.worker is not None and self.worker < 0):
            raise ConfigError(f"node={self.node!r}, worker={self.worker!r}: expected numbers from 0 on")

    @property
    def severity(self) -> Severity:
        """Severity of the first occurrence of the kind."""
        return SEVERITY[self.kind]

    @property
    def takes_node(self) -> bool:
        """Whether the node cannot be used for as long as the fault lasts."""
        return self.repair > 0 and self.kind not in (*SLOWING, *CORRUPTING)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Faults within a period, sorted.

    Attributes:
        name: for tables.
        seconds: duration; nothing after it counts.
        faults: sorted, see the module; `Trace.of` sorts.
        coordinator_outages: begin and end of each time without Unicron's coordinator, in seconds, sorted.

    Raises:
        ConfigError: no duration, or faults that are not sorted.
    """

    name: str
    seconds: float
    faults: tuple[TraceFault, ...] = ()
    coordinator_outages: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(f"trace {self.name!r}: seconds={self.seconds!r}: expected a number > 0")
        if list(self.faults) != sorted(self.faults, key=order):
            raise ConfigError(f"trace {self.name!r}: expected faults in their order, as Trace.of makes it")

    @classmethod
    def of(
        cls,
        name: str,
        seconds: float,
        faults: Iterable[TraceFault],
        coordinator_outages: Iterable[tuple[float, float]] = (),
    ) -> Trace:
        """Create a trace of faults in any order; those at or after its end are left out."""
        kept = sorted((fault for fault in faults if fault.at < seconds), key=order)
        outages = tuple(sorted(outage for outage in coordinator_outages if outage[0] < seconds))
        return cls(name=name, seconds=seconds, faults=tuple(kept), coordinator_outages=outages)


def order(fault: TraceFault) -> tuple[float, int, int, int, float]:
    """Sort key of faults."""
    worker = -1 if fault.worker is None else fault.worker
    return fault.at, _ORDER[fault.kind], fault.node, worker, fault.repair
