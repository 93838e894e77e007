"""What a checkpoint of any kind restores is what was saved, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from worlds.client import Worlds

KINDS = ("float32", "bf16", "divided", "divided bf16", "divided in buckets", "untied in buckets")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    worlds.run("restored:checkpoints", 1, tmp_path, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_in_memory(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    worlds.run("restored:members", 1, tmp_path, kind=kind)


def test_dropped_trainers_leave_no_files(worlds: Worlds, tmp_path: Path) -> None:
    [found] = worlds.run("restored:dropped", 1, tmp_path)
    assert found == [found[0]] * 3
