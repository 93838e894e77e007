"""Costs with their origin: each system's figures from a file, and the numbers that policies use.

A *figure* is a number of seconds (or a fraction) with its origin:

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
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from unicron_lightning.errors import ConfigError
from unicron_lightning.sections import read_section
from unicron_lightning.simulate.costs import Change, Costs

Origin = Literal["measured", "published", "code", "derived", "guess", "given"]
COMMON: Final = "common"
GUESS_FACTOR: Final = 3.0
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
        for name in ("value", "least", "most"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value!r}: expected a finite number, 0 or more")
        if not self.source and self.origin != "given":
            raise ConfigError(f"value={self.value} ({self.origin}) without source: expected a reference to its origin")
        low, high = self.range
        if not low <= self.value <= high:
            raise ConfigError(f"value={self.value}, least={low}, most={high}: expected least <= value <= most")

    @property
    def range(self) -> tuple[float, float]:
        """The plausible range: as given; a guess otherwise within `GUESS_FACTOR`; other figures are exact."""
        factor = GUESS_FACTOR if self.origin == "guess" else 1.0
        low = self.value / factor if self.least is None else self.least
        high = self.value * factor if self.most is None else self.most
        return low, high


@dataclass(frozen=True, kw_only=True)
class SystemFigures:
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
_SINGLE: Final = tuple(each.name for each in fields(SystemFigures) if each.name not in _GROUPS)


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
    systems: Mapping[str, SystemFigures]

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
            systems[name] = read_section(SystemFigures, _with_figures(each), f"costs.{name}")
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
