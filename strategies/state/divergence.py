"""Detection of parameters that differ between workers: found by a digest in the commit, healed or stopped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, get_args

from torch import Tensor

from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.agreement import check_parameters
from unicron_lightning.worker.digest import digest_of
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.step import GradientStep

OnDivergence = Literal["heal", "stop"]
_CHOICES: Final = get_args(OnDivergence)


class Divergence:
    """Compares the workers' parameters at intervals.

    Args:
        every: number of steps between two comparisons; 0: none is made.
        on_divergence: ``heal``: a worker that differs from most exits, and its successor receives the others'
            parameters; ``stop``: the task ends.

    Raises:
        ConfigError: for a value that is not allowed.
    """

    def __init__(self, every: int, on_divergence: OnDivergence) -> None:
        if every < 0:
            raise ConfigError(f"digest_every={every!r}: expected a number of steps, or 0 for never")
        if on_divergence not in _CHOICES:
            raise ConfigError(f"on_divergence={on_divergence!r}: expected 'heal' or 'stop'")
        self._every = every
        self._stops = on_divergence == "stop"

    def digest(self, parameters: Iterable[Tensor], engine: Engine) -> float:
        """Return the digest of the parameters before a step; 0.0 where they are not compared."""
        due = self._every and engine.world.size > 1 and engine.step and engine.step % self._every == 0
        return digest_of(parameters) if due else 0.0

    def check(self, operation: GradientStep, engine: Engine) -> None:
        """Raise `ParametersDiffer` on the workers that must exit after a committed step."""
        world = engine.world
        check_parameters(operation.odd, world.rank, world.nodes, engine.step, stops=self._stops)
