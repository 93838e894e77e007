"""Refusals of what a sharded model cannot have, each with one error that names the value and the alternative."""

from __future__ import annotations

from typing import Final

from torch.optim import Optimizer

from unicron_lightning.errors import ConfigError

_GATHERING: Final = ("Muon", "Shampoo", "DistributedShampoo", "SOAP", "LBFGS")
"""Optimizers that need whole parameters, or several evaluations of the loss."""


def check_sharded_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers that need whole parameters.

    Raises:
        ConfigError: naming the class.
    """
    name = type(optimizer).__name__
    if name in _GATHERING:
        raise ConfigError(
            f"{name} needs whole parameters, of which each worker has a shard; expected an optimizer that works on "
            "each element, such as AdamW or SGD"
        )
