"""Group ``health`` of the coordinator's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from unicron_lightning.coordinator.config.checks import check_not_negative, check_positive
from unicron_lightning.coordinator.severity.errors import SEVERITY
from unicron_lightning.detection.health import HealthLimits
from unicron_lightning.detection.pairs import PairLimits
from unicron_lightning.detection.patterns import Pattern
from unicron_lightning.errors import ConfigError

MOST_PAIR_SIZE: Final = 256.0
"""MiB: what an agent's event loop moves in a second or less."""


@dataclass(kw_only=True)
class PatternConfig:
    """One of ``health.patterns``."""

    pattern: str = ""
    """A regular expression of Python, searched in ``TYPE: message`` of an exception."""
    kind: str = ""
    """One of the kinds of errors, which has a severity: docs/severity.md."""


@dataclass(kw_only=True)
class HealthConfig:
    """Group ``health``: what counts as which error, and what is wrong with a node. See docs/detection.md."""

    patterns: list[PatternConfig] = field(default_factory=list)
    """Which errors are of which kind, before the built-in table is asked."""
    nan_loss: str = "tell"
    """What is done when the loss is NaN or infinite: ``tell``, or ``stop`` the task."""
    flapping_cuts: int = 3
    """An agent whose connection broke and was renewed so often within the window has a flapping link."""
    flapping_window: float = 300.0
    """Seconds."""
    disk_free: float = 0.1
    """GiB: with less in the folder for temporary files or where its agent runs a node gets no workers."""
    memory_free: float = 2.0
    """Percent of memory: the same."""
    memory_pressure: float = 50.0
    """Percent of ten seconds in which everything waited for memory: told."""
    gpu_temperature: float = 90.0
    """Degrees Celsius: told."""
    nvlink_errors: int = 1
    """Recoveries of a GPU's links since its agent began: the node is cordoned."""
    pair_check: bool = False
    """Whether a node must have exchanged data with another one of its task before it gets workers."""
    pair_size: float = 4.0
    """MiB in each direction."""
    pair_time: float = 2.0
    """Seconds that it may take."""
    pair_bandwidth: float = 100.0
    """Mbit/s: less in either direction and the node gets no workers; 0: any will do."""
    pair_retry: float = 30.0
    """Seconds after which a node that got none is tried again."""

    def limits(self) -> HealthLimits:
        """What a node is judged by."""
        return HealthLimits(
            disk_free=self.disk_free,
            memory_free=self.memory_free,
            memory_pressure=self.memory_pressure,
            gpu_temperature=self.gpu_temperature,
            nvlink_errors=self.nvlink_errors,
        )

    def pairs(self) -> PairLimits:
        """What an exchange of data is judged by."""
        return PairLimits(
            check=self.pair_check,
            size=self.pair_size,
            seconds=self.pair_time,
            bandwidth=self.pair_bandwidth,
            retry=self.pair_retry,
        )

    def __post_init__(self) -> None:
        for row in self.patterns:
            if row.kind not in SEVERITY or not row.pattern:
                raise ConfigError(
                    f"health.patterns: {row.pattern!r} of kind {row.kind!r}: expected a pattern and "
                    f"one of {', '.join(SEVERITY)}"
                )
            Pattern(pattern=row.pattern, kind=row.kind)
        check_not_negative("health", **vars(self.limits()))
        check_not_negative("health", pair_bandwidth=self.pair_bandwidth)
        check_positive("health", pair_size=self.pair_size, pair_time=self.pair_time, pair_retry=self.pair_retry)
        if self.pair_size > MOST_PAIR_SIZE:
            raise ConfigError(f"health.pair_size={self.pair_size}: expected at most {MOST_PAIR_SIZE:g} MiB")
        check_positive("health", flapping_cuts=self.flapping_cuts, flapping_window=self.flapping_window)
        if self.nan_loss not in ("tell", "stop"):
            raise ConfigError(f"health.nan_loss={self.nan_loss}: expected tell or stop")
