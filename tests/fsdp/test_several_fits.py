"""Fits of a sharded model by one trainer; with kills: `strategies.test_several_fits`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from worlds.client import Worlds


def test_each_fit_continues_with_a_new_optimizer(worlds: Worlds, tmp_path: Path) -> None:
    [(sharded_steps, steps, difference)] = worlds.run("further:beside_a_whole_model", 1, tmp_path)
    assert sharded_steps == steps == 30 and difference < 1e-6


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_further_fit_may_return_to_a_checkpoint(worlds: Worlds, tmp_path: Path, *, evaluates: bool) -> None:
    [(sharded_steps, steps, difference)] = worlds.run("further:from_a_checkpoint", 1, tmp_path, evaluates=evaluates)
    assert sharded_steps == steps > 10 and difference < 1e-6


def test_gradient_of_the_last_step(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run("further:short_step", 1, tmp_path) == [[2.0, 2.0]]
