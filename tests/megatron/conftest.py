"""Worlds of real processes with megatron-core, gloo and the CPU shim."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from worlds.client import Worlds, worlds_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Worlds"]
MODULES = (
    "untouched",  # first, because it records the original torch
    *(
        f"unicron_lightning.{name}"
        for name in (
            "megatron.toy",
            "replica.mirror",
            "megatron.sharded",
            "megatron.checkpoint",
        )
    ),
)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """The process that forks worlds; skips if megatron-core is not installed."""
    pytest.importorskip("megatron.core.package_info")
    with worlds_of(Path(__file__).parent, *MODULES) as started:
        yield started
