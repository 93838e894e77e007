"""What a checkpoint of any kind restores is what was saved, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from worlds.client import Worlds

KINDS = ("float32", "bf16", "fp16", "divided", "divided fp16", "divided in buckets", "untied in buckets")


@pytest.mark.parametrize(
    "kind",
    # divided without more: the kinds that are divided and fp16, or divided in buckets, take its path
    [pytest.param(kind, marks=pytest.mark.chaos) if kind == "divided" else kind for kind in KINDS],
)
@pytest.mark.parametrize("scenario", ["checkpoints", pytest.param("members", marks=pytest.mark.chaos)])
def test_a_state(worlds: Worlds, tmp_path: Path, kind: str, scenario: str) -> None:
    """In checkpoints, and in memory."""
    worlds.run(f"restored:{scenario}", 1, tmp_path, kind=kind)


def test_dropped_trainers_leave_no_files(worlds: Worlds, tmp_path: Path) -> None:
    [found] = worlds.run("restored:dropped", 1, tmp_path)
    assert found == [found[0]] * 3


def test_further_runs_that_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    [found] = worlds.run("restored:refused", 1, tmp_path)
    wanted = [
        "the model in a further run",
        "the module in a further",
        "trainer.predict: under",
        "OptimizerConfig(lr=0.1)",
    ]
    assert len(found) == 4
    for message, words in zip(found, wanted, strict=True):
        assert message.startswith(words), message
