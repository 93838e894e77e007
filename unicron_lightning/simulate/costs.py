"""Costs of a failure for a system, as measured or published, with their origin: the numbers that a policy uses.

Each system's figures are in a file. A *figure* is a number of seconds (or a fraction) with its origin:

* ``measured``: by this project's benchmarks, of itself or of the named system;
* ``published``: by others, with the citation;
* ``code``: a default in the system's source;
* ``derived``: computed from other figures, as its source states;
* ``guess``: not measured by anyone. A sensitivity sweep moves these between `least` and `most`;
* ``given``: overridden by a plain number.

Costs that every system has at the size of a cluster (creating communicators, starting a process) are stated once, under
``common``, and named in `Figure.plus`: every system pays them, and moving one moves all systems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, get_args

from unicron_lightning.coordinator.severity.record import SEVERITY
from unicron_lightning.errors import ConfigError, check_numbers
from unicron_lightning.sections import read_section

Change = Literal["continue", "join", "leave", "start", "restart", "reattempt", "migrate", "relayout"]
CHANGES: Final[tuple[Change, ...]] = get_args(Change)
"""Changes of a task, in seconds that it is interrupted for each (for ``start``: seconds that other workers need not
wait):

* ``continue``: the survivors continue without the dead: new communicators, and data that the system moves for it;
* ``join``: ready workers are admitted;
* ``leave``: workers leave by plan;
* ``start``: a worker's start until it is ready to join or to begin: process, imports, model;
* ``restart``: all workers start again: stop, queue, rendezvous, start, load the checkpoint;
* ``reattempt``: a broken connection is renewed with the same members;
* ``migrate``: a new parallel configuration: layers move between workers (Oobleck's templates, Varuna's morphing);
* ``relayout``: the least time of any change after which the task has another TP x PP; without it, every change of the
  system is a restart already.
"""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one system.

    Attributes:
        system: its name.
        detection: seconds from a fault to its detection, by kind; ``default`` for kinds not listed.
        change: seconds by `Change`.
        checkpoint_interval: seconds between persistent checkpoints.
        memory_checkpoint_interval: seconds between checkpoints in memory, which outlive processes; None: no such
            checkpoints.
        checkpoint_seconds: seconds that training is interrupted for a checkpoint of the more frequent kind.
        persistent_seconds: seconds that training is interrupted for each persistent checkpoint.
        step_overhead: fraction by which a step is longer than Megatron's on the same workers; 2.7: 3.7 times as long.
        redundancy: fraction of the throughput spent on redundant computation.

    Raises:
        ConfigError: a value out of its range, or one that is missing.
    """

    system: str
    detection: Mapping[str, float]
    change: Mapping[Change, float]
    checkpoint_interval: float = 1800.0
    memory_checkpoint_interval: float | None = None
    checkpoint_seconds: float = 0.0
    persistent_seconds: float = 0.0
    step_overhead: float = 0.0
    redundancy: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict)
    """Costs that only one system has. ``checkpoint_blocking``: part of the time of writing a persistent checkpoint for
    which training waits, if that time is known (`sized`).
    """
    parts: Mapping[Change, Mapping[str, float]] = field(default_factory=dict)
    """Seconds of each change that every system has in common, by name: ``state`` and ``load`` depend on the model."""

    def __post_init__(self) -> None:
        if "default" not in self.detection:
            raise ConfigError(f"costs of {self.system!r}: detection={dict(self.detection)!r}: expected a `default`")
        if unknown := sorted(self.detection.keys() - SEVERITY.keys() - {"default"}):
            raise ConfigError(f"costs of {self.system!r}: detection of {unknown}: expected {', '.join(SEVERITY)}")
        if unknown := sorted(self.change.keys() - set(CHANGES)):
            raise ConfigError(f"costs of {self.system!r}: change {unknown}: expected {', '.join(CHANGES)}")
        for name, value in [*self.detection.items(), *self.change.items(), *self._numbers()]:
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"costs of {self.system!r}: {name}={value!r}: expected a finite number, 0 or more")
        for name in ("checkpoint_interval", "memory_checkpoint_interval"):
            if getattr(self, name) == 0:
                raise ConfigError(f"costs of {self.system!r}: {name}=0: expected seconds > 0")
        if self.redundancy >= 1:
            raise ConfigError(f"costs of {self.system!r}: redundancy={self.redundancy!r}: expected a part below 1")

    def sized(self, load: float | None, state: float | None) -> Costs:
        """Return the costs for a model of known size.

        Args:
            load: seconds to read, or to write, a persistent checkpoint; None: as in the figures.
            state: seconds to send a worker's part of the state to a peer; None: as in the figures.
        """
        if load is None and state is None:
            return self
        known = {"load": load, "state": state}
        change = dict(self.change)
        for name, parts in self.parts.items():
            for part, seconds in parts.items():
                new = known.get(part)
                if new is not None:
                    change[name] += new - seconds
        blocked = self.persistent_seconds
        if load is not None:
            blocked += self.extra.get("checkpoint_blocking", 0.0) * load
        return replace(self, change=change, persistent_seconds=blocked, parts={})

    def detects(self, kind: str) -> float:
        """Return the seconds from a fault of that kind to its detection."""
        return self.detection.get(kind, self.detection["default"])

    def takes(self, change: Change) -> float:
        """Return the seconds of a change.

        Raises:
            ConfigError: the system's costs do not include the change.
        """
        if change not in self.change:
            raise ConfigError(f"costs of {self.system!r}: no change {change!r}: expected its seconds")
        return self.change[change]

    def laid_out(self, seconds: float) -> float:
        """Return the seconds of a change after which the task has another TP x PP.

        Args:
            seconds: of the change alone.
        """
        restart = self.change.get("relayout")
        return seconds if restart is None else max(seconds, restart + self.persistent_seconds)

    def _numbers(self) -> list[tuple[str, float]]:
        names = ("checkpoint_interval", "checkpoint_seconds", "persistent_seconds", "step_overhead", "redundancy")
        memory = self.memory_checkpoint_interval
        return [*((name, getattr(self, name)) for name in names), ("memory_checkpoint_interval", memory or 0.0)]


Origin = Literal["measured", "published", "code", "derived", "guess", "given"]
COMMON: Final = "common"
_GUESS_FACTOR: Final = 3.0
"""Factor by which a guess without `least` or `most` is moved."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number with its origin; see the module.

    Attributes:
        value: seconds, or a fraction of 1.
        origin: sort of origin.
        source: the measurement, the citation or the basis of a guess. Only a ``given`` figure may have none.
        plus: names of common figures that are added.
        least, most: bounds of the plausible range.

    Raises:
        ConfigError: a value out of its range, or no source.
    """

    value: float
    origin: Origin
    source: str = ""
    plus: list[str] = field(default_factory=list)
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "value", "least", "most", least=0, error=ConfigError)
        if not self.source and self.origin != "given":
            raise ConfigError(f"value={self.value} ({self.origin}) without source: expected a reference to its origin")
        low, high = self.range
        if not low <= self.value <= high:
            raise ConfigError(f"value={self.value}, least={low}, most={high}: expected least <= value <= most")

    @property
    def range(self) -> tuple[float, float]:
        """The plausible range: as given; a guess otherwise within `_GUESS_FACTOR`; other figures are exact."""
        factor = _GUESS_FACTOR if self.origin == "guess" else 1.0
        low = self.value / factor if self.least is None else self.least
        high = self.value * factor if self.most is None else self.most
        return low, high


@dataclass(frozen=True, kw_only=True)
class _SystemFigures:
    """Figures of one system: the fields of `Costs`, each a figure."""

    detection: dict[str, Figure]
    change: dict[Change, Figure]
    checkpoint_interval: Figure
    memory_checkpoint_interval: Figure | None = None
    checkpoint_seconds: Figure | None = None
    step_overhead: Figure | None = None
    redundancy: Figure | None = None
    extra: dict[str, Figure] = field(default_factory=dict)


_GROUPS: Final = ("detection", "change", "extra")
_SINGLE: Final = tuple(each.name for each in fields(_SystemFigures) if each.name not in _GROUPS)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Figures of all systems.

    Attributes:
        common: figures that others name in `Figure.plus`.
        systems: figures by name of the system.

    Raises:
        ConfigError: a figure names a common one that does not exist.
    """

    common: Mapping[str, Figure]
    systems: Mapping[str, _SystemFigures]

    def __post_init__(self) -> None:
        for key, figure in self.figures():
            unknown = sorted(set(figure.plus) - self.common.keys())
            if unknown or (figure.plus and key.startswith(f"{COMMON}.")):
                raise ConfigError(f"costs.{key}: plus={figure.plus}: expected some of {', '.join(self.common)}")

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Iterate over all figures, by the key that overrides them without ``costs.``."""
        for name, figure in self.common.items():
            yield f"{COMMON}.{name}", figure
        for system, figures in self.systems.items():
            for group in _GROUPS:
                for name, figure in getattr(figures, group).items():
                    yield f"{system}.{group}.{name}", figure
            for name in _SINGLE:
                single: Figure | None = getattr(figures, name)
                if single is not None:
                    yield f"{system}.{name}", single

    def of(self, system: str) -> Costs:
        """Return the costs of a system.

        Raises:
            ConfigError: the system has none.
        """
        if system not in self.systems:
            raise ConfigError(f"no costs of {system!r}: expected costs.{system}, or one of {', '.join(self.systems)}")
        figures = self.systems[system]
        single = {name: getattr(figures, name) for name in _SINGLE}
        return Costs(
            system=system,
            detection={name: self._total(each) for name, each in figures.detection.items()},
            change={name: self._total(each) for name, each in figures.change.items()},
            parts={
                name: {part: self.common[part].value for part in each.plus} for name, each in figures.change.items()
            },
            extra={name: self._total(each) for name, each in figures.extra.items()},
            **{name: self._total(each) for name, each in single.items() if each is not None},
        )

    def _total(self, figure: Figure) -> float:
        return figure.value + sum(self.common[name].value for name in figure.plus)


def read_calibration(data: Mapping[str, Any]) -> Calibration:
    """Read a file's content. A plain number in the place of a figure is a ``given`` one.

    Raises:
        ConfigError: an unknown or missing key, or a wrong value; the message has the full key.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"costs={data!r}: expected a mapping with {COMMON} and names of systems")
    common = _figures(data.get(COMMON) or {}, f"costs.{COMMON}")
    systems = {}
    for name, each in data.items():
        if name != COMMON:
            if not isinstance(each, Mapping):
                raise ConfigError(f"costs.{name}={each!r}: expected a mapping")
            systems[name] = read_section(_SystemFigures, _with_figures(each), f"costs.{name}")
    calibration = Calibration(common=common, systems=systems)
    for name in systems:
        calibration.of(name)  # validates on its own
    return calibration


def _figures(data: Mapping[str, Any], where: str) -> dict[str, Figure]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}={data!r}: expected a mapping from names to figures")
    return {name: read_section(Figure, _figure(each), f"{where}.{name}") for name, each in data.items()}


def _with_figures(data: Mapping[str, Any]) -> dict[str, Any]:
    """Replace plain numbers by figures."""
    made: dict[str, Any] = {}
    for name, value in data.items():
        if name in _GROUPS and isinstance(value, Mapping):
            made[name] = {key: _figure(each) for key, each in value.items()}
        else:
            made[name] = _figure(value) if name in _SINGLE else value
    return made


def _figure(value: Any) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"value": value, "origin": "given"} if number else value
