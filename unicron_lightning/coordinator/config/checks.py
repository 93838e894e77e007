"""Checks of numbers in the configuration: each error names the key and quotes its value."""

from __future__ import annotations

import math

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
