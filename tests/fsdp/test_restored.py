"""What a checkpoint of any kind restores is what was saved, bit by bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from worlds.client import Worlds

STRATEGIES = ("unicron", "unicron_fsdp")


@pytest.mark.parametrize(
    ("strategy", "form"),
    [
        *product(STRATEGIES, ("file", "beside", "parting")),
        ("unicron_fsdp", "folder"),
        ("unicron_fsdp", "parting in a folder"),
    ],
)
def test_a_checkpoint(worlds: Worlds, tmp_path: Path, strategy: str, form: str) -> None:
    worlds.run("restored:checkpoints", 1, tmp_path, strategy=strategy, form=form)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scenario", ["members", "double", "dropped"])
def test_a_state(worlds: Worlds, tmp_path: Path, strategy: str, scenario: str) -> None:
    """That of a member for a joiner, that of double precision, and of a trainer that is dropped."""
    worlds.run(f"restored:{scenario}", 1, tmp_path, strategy=strategy)
