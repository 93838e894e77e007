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
def test_the_state_of_a_member(worlds: Worlds, tmp_path: Path, strategy: str) -> None:
    worlds.run("restored:members", 1, tmp_path, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_double_precision(worlds: Worlds, tmp_path: Path, strategy: str) -> None:
    worlds.run("restored:double", 1, tmp_path, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_dropped_trainer(worlds: Worlds, tmp_path: Path, strategy: str) -> None:
    worlds.run("restored:dropped", 1, tmp_path, strategy=strategy)
