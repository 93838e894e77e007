"""Worlds of real processes with FSDP2 and gloo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from worlds.client import Worlds, worlds_of

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """The process that forks worlds."""
    with worlds_of(Path(__file__).parent, "sharded", "folders") as started:
        yield started
