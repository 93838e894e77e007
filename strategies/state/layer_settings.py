"""Settings of torch's layers that code changes while it trains: a joiner's layers are new ones.

A hook may set a layer's mode, the probability of a dropout or the momentum of batch norm; `BaseFinetuning` starts and
stops the tracking of statistics. No state dict has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import nn

_PLAIN: Final = (bool, int, float, type(None))


def layer_settings(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the settings of the layers, by their names: of torch's all that are numbers, of others their mode."""
    return {name: dict(_settings(layer)) for name, layer in module.named_modules()}


def set_layers(module: nn.Module, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Set what `layer_settings` gave on another worker."""
    for name, layer in module.named_modules():
        for key, value in settings.get(name, {}).items():
            if getattr(layer, key, None) != value:
                setattr(layer, key, value)


def _settings(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    of_torch = any(
        each.__module__.startswith("torch.nn.modules") for each in type(layer).__mro__ if each is not nn.Module
    )
    for key, value in vars(layer).items():
        if key == "training" or (of_torch and not key.startswith("_") and isinstance(value, _PLAIN)):
            yield key, value
