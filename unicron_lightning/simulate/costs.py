"""Costs of a failure for a system, as measured or published: the numbers that a policy uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from unicron_lightning.coordinator.severity.errors import SEVERITY
from unicron_lightning.errors import ConfigError

Change = Literal["continue", "join", "leave", "start", "restart", "reattempt", "migrate"]
CHANGES: Final[tuple[Change, ...]] = ("continue", "join", "leave", "start", "restart", "reattempt", "migrate")
"""Changes of a task, in seconds that it is interrupted for each (for ``start``: seconds that other workers need not
wait):

* ``continue``: the survivors continue without the dead: new communicators, and data that the system moves for it;
* ``join``: ready workers are admitted;
* ``leave``: workers leave by plan;
* ``start``: a worker's start until it is ready to join or to begin: process, imports, model;
* ``restart``: all workers start again: stop, queue, rendezvous, start, load the checkpoint;
* ``reattempt``: a broken connection is renewed with the same members;
* ``migrate``: a new parallel configuration: layers move between workers (Oobleck's templates, Varuna's morphing).
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

    def _numbers(self) -> list[tuple[str, float]]:
        names = ("checkpoint_interval", "checkpoint_seconds", "persistent_seconds", "step_overhead", "redundancy")
        memory = self.memory_checkpoint_interval
        return [*((name, getattr(self, name)) for name in names), ("memory_checkpoint_interval", memory or 0.0)]
