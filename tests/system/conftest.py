"""The failure-free reference, run once for all tests of a shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from system.cluster import SETTINGS
from system.judge import Reference


@pytest.fixture(scope="session")
def reference_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """Returns a function that gives the reference for settings that differ from the default ones."""
    made: dict[str, Reference] = {}

    def reference(epochs: int = 40, **settings: Any) -> Reference:
        key = repr(sorted(settings.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("reference")
            made[key] = Reference(folder, {**SETTINGS, **settings}, epochs)
        return made[key]

    return reference


@pytest.fixture(scope="session")
def reference(reference_for: Callable[..., Reference]) -> Reference:
    """The reference of the default settings."""
    return reference_for()
