"""Traces from their configuration: the node and worker of each failure, its cause, and the downtime of the node.

The same configuration, cluster and seed give the same trace, byte for byte, with the same numpy. Each source draws from
its own generator, seeded by (seed, name of the source), so adding or changing one leaves the others as they were. Times
are rounded to microseconds, as the simulator counts them.

Nodes that are down do not fail: a failure that would strike a node under repair is left out, or strikes another node if
the number of failures is given (``exact``).

Faults may also be sentences of docs/faults.md: those that `unicron inject` would produce, with times of the simulator's
clock. The simulator numbers nodes from 0. It has no ranks, whose assignment changes with every policy, and no points of
a program. A sentence that specifies more than a fault, a node and times is refused.

**The schema of a trace file.** A trace consists of independent *sources* of failures. Each has *causes*, which give the
kind of error and its relative frequency. The distribution of a source's failures in time is its `process`; the mean
number of failures is the same for all processes:

    components x hours / mtbf_hours            components: workers, nodes or switches of the cluster

**Times and components of one source's failures.** Each process has the same mean number of failures, components x
seconds / mtbf:

* ``poisson``: N is Poisson distributed, times are uniform and independent, each component is as likely as any other;
* ``exact``: the same with N the mean, rounded; in both, a few components may be more likely than others (`offenders`);
* ``weibull``: lifetimes of each component from new, P(T > t) = exp(-(t / scale)^shape), with
  scale = mtbf / Gamma(1 + 1/shape). With a shape other than 1 the rate starts as that of
  new components and approaches 1 / mtbf with time;
* ``bursts``: a Neyman-Scott process. Bursts begin like ``poisson`` at rate 1 / (mtbf burst_size); each has a geometric
  number of failures, exponential times apart, among `neighbours` components in a row. Failures beyond the end are cut.

**Faults as CSV**: a user's own events are read, any trace is written.

    at,kind,node,worker,repair
    86400,ecc_error,3,,172800
    2026-03-01T04:00:00,exited_abnormally,0,5,

``at``: seconds from the beginning, or times in ISO 8601, all in one format; the first time is the beginning unless a
line ``# start TIME`` gives another. ``kind``: of the table of severities. ``node``: a number from 0 on. ``worker``: its
local rank, empty for the whole node. ``repair``: seconds until the node can be used again, empty for 0; for kinds that
slow it down, until it is as fast as before, and for kinds that corrupt the state, until that is detected. Two more
columns are optional: ``strikes``, ``one`` (default) or ``task``, for all workers of its task; and ``slowdown``, the
fraction by which steps take longer (default 0.1). Lines that begin with # and empty lines are skipped; the order of
lines and columns does not matter. A line for a node that is down prolongs its absence.
"""

from __future__ import annotations

import csv
import datetime
import heapq
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from unicron_lightning.coordinator.severity.record import SEVERITY
from unicron_lightning.errors import ConfigError, check_numbers
from unicron_lightning.faults import fault as words
from unicron_lightning.faults.arrivals import arrivals, draw
from unicron_lightning.faults.fault import parse, text
from unicron_lightning.simulate.trace import (
    CORRUPTING,
    SLOWDOWN,
    SLOWING,
    SimCluster,
    Strikes,
    Trace,
    TraceFault,
    order,
)

Process = Literal["poisson", "weibull", "bursts", "exact"]
Distribution = Literal["lognormal", "uniform", "fixed", "none"]


@dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """Downtime of a node after a failure of severity SEV1; after others its processes restart immediately.

    For kinds that slow a node down: the time until it is as fast as before; for kinds that corrupt the state: the time
    until that is detected.
    """

    distribution: Distribution = "none"
    """``lognormal`` (median_hours, log_deviation), ``uniform`` (least_hours, most_hours), ``fixed`` (hours)."""
    median_hours: float = 0.0
    log_deviation: float = 0.0
    """Standard deviation of the logarithm: with 1, two thirds of all values lie within a factor of 2.7 of the
    median.
    """
    least_hours: float = 0.0
    most_hours: float = 0.0
    hours: float = 0.0

    def __post_init__(self) -> None:
        numbers = ("median_hours", "log_deviation", "least_hours", "most_hours", "hours")
        check_numbers(self, *numbers, least=0, error=ConfigError)
        if self.distribution == "lognormal" and not self.median_hours:
            raise ConfigError("distribution=lognormal without median_hours: expected hours > 0")
        if self.distribution == "uniform" and self.most_hours < self.least_hours:
            given = f"least_hours={self.least_hours}, most_hours={self.most_hours}"
            raise ConfigError(f"{given}: expected least_hours <= most_hours")


@dataclass(frozen=True, kw_only=True)
class CauseConfig:
    """A cause of failures, and the kind of error that it appears as."""

    kind: str
    """Kind of error, of `unicron_lightning.coordinator.severity.record`."""
    count: float
    """Frequency relative to the other causes of its source: only the share matters."""
    strikes: Strikes = "one"
    """``task``: all workers of the task that the component belongs to, as a bug or a poisoned batch does."""
    slowdown: float = SLOWDOWN
    """Fraction by which steps take longer, for ``node_degraded`` and ``link_degraded``."""
    repair: RepairConfig | None = None
    """Downtime after this cause; null: that of the source."""

    @property
    def lasts(self) -> bool:
        """Whether a duration belongs to it: the node is away, slow, or the damage is not detected yet."""
        return SEVERITY[self.kind] == "SEV1" or self.kind in (*SLOWING, *CORRUPTING)

    def __post_init__(self) -> None:
        if self.kind not in SEVERITY:
            raise ConfigError(f"kind={self.kind!r}: expected one of {', '.join(SEVERITY)}")
        if self.strikes == "task" and self.lasts:
            raise ConfigError(
                f"kind={self.kind!r}, strikes='task': expected a kind that stops workers, whose nodes stay up"
            )
        check_numbers(self, "slowdown", above=0, expected="a fraction > 0", error=ConfigError)
        check_numbers(self, "count", above=0, expected="a number > 0", error=ConfigError)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Failures of one sort of component."""

    component: Literal["worker", "node", "switch"]
    """The component that fails. A switch takes down all its nodes at the same moment."""
    mtbf_hours: float
    """Component-hours per failure of one component, on average."""
    causes: dict[str, CauseConfig]
    process: Process = "poisson"
    """Distribution of failures in time:

    * ``poisson``: a constant rate.
    * ``weibull``: lifetimes of components, all new at the beginning, with `shape`.
    * ``bursts``: a failure is soon followed by more of the same component and its neighbours.
    * ``exact``: random times, but exactly the mean number of failures, and of each cause, to repeat counted events.
    """
    shape: float = 1.0
    """Shape of ``weibull``: below 1 failures are frequent at the beginning, above 1 they increase with age."""
    burst_size: float = 1.0
    """Mean number of failures in one of the ``bursts``, the first included; the numbers are geometric."""
    burst_seconds: float = 600.0
    """Mean seconds between the failures within one of the ``bursts``."""
    neighbours: int = 1
    """Number of consecutive components that one of the ``bursts`` strikes."""
    nodes_per_switch: int = 16
    """Nodes that a ``switch`` takes down."""
    offenders: float = 0.0
    """Fraction of the components that fail repeatedly (lemons), drawn at random; the mean over all stays `mtbf_hours`.
    For ``poisson`` and ``exact``.
    """
    offender_factor: float = 10.0
    """How many times as often as another an offender fails."""
    frequency: float = 1.0
    """Factor on the frequency given by `mtbf_hours`."""
    repair: RepairConfig = field(default_factory=RepairConfig)
    origin: str = ""
    """Origin of the numbers."""

    def __post_init__(self) -> None:
        check_numbers(self, "mtbf_hours", "shape", "burst_seconds", "frequency", above=0, error=ConfigError)
        sizes = ("burst_size", "neighbours", "nodes_per_switch")
        check_numbers(self, *sizes, least=1, expected="a number of at least 1", error=ConfigError)
        if not self.causes:
            raise ConfigError("causes: none, expected at least one")
        if not 0 <= self.offenders < 1 or not self.offender_factor >= 1:
            given = f"offenders={self.offenders}, offender_factor={self.offender_factor}"
            raise ConfigError(f"{given}: expected a fraction below 1, and a factor of at least 1")
        if self.offenders and self.process not in ("poisson", "exact"):
            raise ConfigError(f"offenders={self.offenders}, process={self.process}: expected poisson or exact")


@dataclass(frozen=True, kw_only=True)
class CoordinatorFaults:
    """Failures of Unicron's coordinator, at a constant rate. Other systems have none."""

    mtbf_hours: float
    """Mean hours between two failures."""
    minutes: float | None = 1.0
    """Time until another one has read its stored state; null: that is lost, and the first failure is for good."""

    def __post_init__(self) -> None:
        timed = () if self.minutes is None else ("minutes",)
        check_numbers(self, "mtbf_hours", *timed, above=0, error=ConfigError)


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """A trace: generated, read from a CSV file of a user's own events, or given as sentences."""

    name: str
    """Name for tables and pictures."""
    days: float
    """Duration in days."""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Sources of failures by freely chosen names. Each has its own random numbers: a change affects no other source."""
    csv: str | None = None
    """A file with the columns of `unicron_lightning.simulate.traces`; added to the sources' failures."""
    faults: list[str] = field(default_factory=list)
    """Sentences of docs/faults.md, see `unicron_lightning.simulate.traces`; added to the sources'
    failures.
    """

    coordinator: CoordinatorFaults | None = None
    """Failures of the coordinator; null: none."""

    def __post_init__(self) -> None:
        check_numbers(self, "days", above=0, expected="a number > 0", error=ConfigError)


COLUMNS = ("at", "kind", "node", "worker", "repair")
_FURTHER = ("strikes", "slowdown")
_OPTIONAL = ("worker", "repair", *_FURTHER)
_START = "# start "


def read_table(path: Path, cluster: SimCluster) -> list[TraceFault]:
    """Read a file.

    Raises:
        ConfigError: it can't be read, or a line is wrong; the message has the line's number.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}: expected a CSV file with {', '.join(COLUMNS)}") from error
    return parse_table(text, cluster, str(path))


def parse_table(text: str, cluster: SimCluster, name: str) -> list[TraceFault]:
    """Read text.

    Args:
        text: the file's text.
        cluster: the cluster whose nodes and workers are valid.
        name: name of the file, for messages.

    Raises:
        ConfigError: as for `read_table`.
    """
    lines = text.splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
    if not numbers:
        raise ConfigError(f"{name}: no lines: expected a header with {', '.join(COLUMNS)}")
    rows = csv.reader([lines[number - 1] for number in numbers])
    header = [column.strip() for column in next(rows)]
    unknown, missing = set(header) - set(COLUMNS) - set(_FURTHER), set(COLUMNS) - set(header) - set(_OPTIONAL)
    if unknown or missing or len(set(header)) < len(header):
        raise ConfigError(f"{name}, line {numbers[0]}: header {','.join(header)!r}: expected {','.join(COLUMNS)}")
    start = _start(lines, name)
    faults = []
    times: set[bool] = set()
    parsed = []
    for number, row in zip(numbers[1:], rows, strict=True):
        where = f"{name}, line {number}"
        if len(row) != len(header):
            raise ConfigError(f"{where}: {len(row)} values: expected {len(header)}, as in the header")
        values = {column: value.strip() for column, value in zip(header, row, strict=True)}
        at = _time(values["at"], where)
        times.add(isinstance(at, float))
        if len(times) > 1:
            raise ConfigError(f"{where}: at={values['at']!r}: expected all times in seconds, or all in ISO 8601")
        parsed.append((where, at, values))
    dates = [at for _, at, _ in parsed if isinstance(at, datetime.datetime)]
    begin = start or (min(dates) if dates else None)
    for where, at, values in parsed:
        seconds = at if isinstance(at, float) else _since(at, begin, where)
        faults.append(_fault(seconds, values, cluster, where))
    return faults


def _start(lines: list[str], name: str) -> datetime.datetime | None:
    for number, line in enumerate(lines, 1):
        if line.startswith(_START):
            at = _time(line.removeprefix(_START).strip(), f"{name}, line {number}")
            if isinstance(at, float):
                raise ConfigError(f"{name}, line {number}: {line!r}: expected a time in ISO 8601")
            return at
    return None


def _time(text: str, where: str) -> float | datetime.datetime:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        # Python 3.10 does not read the Z.
        at = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise ConfigError(f"{where}: at={text!r}: expected seconds, or a time like 2026-03-01T04:00:00") from None
    return at if at.tzinfo else at.replace(tzinfo=datetime.timezone.utc)


def _since(at: datetime.datetime, begin: datetime.datetime | None, where: str) -> float:
    assert begin is not None
    seconds = (at - begin).total_seconds()
    if seconds < 0:
        raise ConfigError(f"{where}: at={at.isoformat()}: expected a time after the start, {begin.isoformat()}")
    return seconds


def _fault(at: float, values: Mapping[str, str], cluster: SimCluster, where: str) -> TraceFault:
    node = _number(values["node"], "node", cluster.num_nodes, where)
    worker = None
    if values.get("worker"):
        worker = _number(values["worker"], "worker", cluster.workers_per_node, where)
    kind, strikes = values["kind"], values.get("strikes") or "one"
    repair = _real(values.get("repair") or "0", "repair", "seconds", where)
    slow = _real(values.get("slowdown") or str(SLOWDOWN if kind in SLOWING else 0.0), "slowdown", "a fraction", where)
    try:
        return TraceFault(
            at=at,
            kind=kind,
            node=node,
            worker=worker,
            repair=repair,
            strikes=strikes,  # type: ignore[arg-type]
            slowdown=slow,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _real(text: str, name: str, expected: str, where: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {name}={text!r}: expected {expected}") from error


def _number(text: str, name: str, limit: int, where: str) -> int:
    if not (text.isdecimal() and int(text) < limit):
        raise ConfigError(f"{where}: {name}={text!r}: expected a whole number from 0 to {limit - 1}")
    return int(text)


HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Failures of one source, sorted by time.

    Attributes:
        seconds: times, shape (n,).
        components: failing components, numbered from 0, shape (n,).
    """

    seconds: NDArray[np.float64]
    components: NDArray[np.int64]

    def sorted(self) -> Arrivals:
        """Sort by time, then by component."""
        order = np.lexsort((self.components, self.seconds))
        return Arrivals(seconds=self.seconds[order], components=self.components[order])


def arrivals_of(source: SourceConfig, num_components: int, seconds: float, random: np.random.Generator) -> Arrivals:
    """Draw the failures of a source.

    Args:
        source: its process and rate.
        num_components: number of components.
        seconds: duration of the trace.
        random: source of randomness.
    """
    mtbf = source.mtbf_hours * HOUR / source.frequency
    mean = num_components * seconds / mtbf
    if source.process == "weibull":
        return _renewals(source.shape, mtbf, num_components, seconds, random).sorted()
    if source.process == "bursts":
        return _bursts(source, mean, num_components, seconds, random).sorted()
    num = round(mean) if source.process == "exact" else int(random.poisson(mean))
    drawn = _uniform(num, num_components, seconds, random)
    if source.offenders:
        drawn = Arrivals(seconds=drawn.seconds, components=_offending(source, num, num_components, random))
    return drawn.sorted()


def _uniform(num: int, num_components: int, seconds: float, random: np.random.Generator) -> Arrivals:
    times = random.uniform(0.0, seconds, num)
    return Arrivals(seconds=times, components=random.integers(0, num_components, num))


def _offending(source: SourceConfig, num: int, num_components: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Draw components, of which a few are `offender_factor` times as likely as others."""
    shuffled = random.permutation(num_components)
    bad = shuffled[: math.ceil(source.offenders * num_components)]
    weights = np.ones(num_components)
    weights[bad] = source.offender_factor
    return random.choice(num_components, size=num, p=weights / weights.sum())


def _renewals(shape: float, mtbf: float, num_components: int, seconds: float, random: np.random.Generator) -> Arrivals:
    scale = mtbf / math.gamma(1 + 1 / shape)
    alive, ages = np.arange(num_components), np.zeros(num_components)
    times, components = [], []
    while alive.size:
        ages = ages + scale * random.weibull(shape, alive.size)
        within = ages < seconds
        alive, ages = alive[within], ages[within]
        times.append(ages)
        components.append(alive)
    return Arrivals(seconds=np.concatenate([*times, []]), components=np.concatenate([*components, []]).astype(np.int64))


def _bursts(
    source: SourceConfig, mean: float, num_components: int, seconds: float, random: np.random.Generator
) -> Arrivals:
    num_bursts = int(random.poisson(mean / source.burst_size))
    first = _uniform(num_bursts, num_components, seconds, random)
    sizes = random.geometric(1 / source.burst_size, num_bursts)
    starts = np.cumsum(sizes) - sizes
    gaps = random.exponential(source.burst_seconds, int(sizes.sum()))
    gaps[starts] = 0.0
    # Running sums within each burst: the overall sums, less the sum at the start of the burst.
    sums = np.cumsum(gaps)
    times = np.repeat(first.seconds, sizes) + sums - np.repeat(sums[starts], sizes)
    beside = random.integers(0, source.neighbours, times.size)
    beside[starts] = 0
    components = (np.repeat(first.components, sizes) + beside) % num_components
    within = times < seconds
    return Arrivals(seconds=times[within], components=components[within])


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
        end = seconds if config.minutes is None else begin + config.minutes * 60.0
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


_SEEN_AS: Final[dict[words.Kind, str]] = {
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
    kind = str(fault.argument) if fault.kind == "raise" else _SEEN_AS.get(fault.kind)
    if kind is None:
        raise ConfigError(f"{text(fault)!r}: the simulator knows {', '.join(_SEEN_AS)} and raise")
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
