"""Group ``health`` of the coordinator's configuration, and checks of numbers of all groups.

Each error names the key and quotes its value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from unicron_lightning.coordinator.severity.errors import SEVERITY
from unicron_lightning.detection.health import HealthLimits
from unicron_lightning.detection.patterns import Pattern
from unicron_lightning.errors import ConfigError


def check_positive(group: str, **values: float) -> None:
    """Require each value to be finite and above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{group}.{name}={value}: expected a number > 0")


def check_not_negative(group: str, **values: float) -> None:
    """Require each value to be finite and at least 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{group}.{name}={value}: expected a number >= 0")


def check_above_one(group: str, **values: float) -> None:
    """Require each value to be finite and above 1."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 1):
            raise ConfigError(f"{group}.{name}={value}: expected a number > 1")


@dataclass(kw_only=True)
class PatternConfig:
    """One of ``health.patterns``."""

    pattern: str = ""
    """A regular expression of Python, searched in ``TYPE: message`` of an exception."""
    kind: str = ""
    """One of the kinds of errors, which has a severity: docs/detection.md."""


@dataclass(kw_only=True)
class HealthConfig(HealthLimits):
    """Group ``health``: kinds of errors, and limits of a healthy node. See docs/detection.md."""

    patterns: list[PatternConfig] = field(default_factory=list)
    """Patterns of errors and their kinds, consulted before the built-in table."""
    nan_loss: str = "tell"
    """Reaction to a loss that is NaN or infinite: ``tell`` (log an error), or ``stop`` the task."""
    flapping_cuts: int = 3
    """Number of broken and renewed connections of an agent within the window at which its link is flapping."""
    flapping_window: float = 300.0
    """Window of `flapping_cuts`, in seconds."""

    def __post_init__(self) -> None:
        for row in self.patterns:
            if row.kind not in SEVERITY or not row.pattern:
                raise ConfigError(
                    f"health.patterns: {row.pattern!r} of kind {row.kind!r}: expected a pattern and "
                    f"one of {', '.join(SEVERITY)}"
                )
            Pattern(pattern=row.pattern, kind=row.kind)
        check_not_negative("health", **{each.name: getattr(self, each.name) for each in fields(HealthLimits)})
        check_positive("health", flapping_cuts=self.flapping_cuts, flapping_window=self.flapping_window)
        if self.nan_loss not in ("tell", "stop"):
            raise ConfigError(f"health.nan_loss={self.nan_loss}: expected tell or stop")
