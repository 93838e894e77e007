"""Objects that ranks exchange during checkpoints are not unpickled without the epoch's code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from worlds.client import Worlds

pytestmark = pytest.mark.faults
KEY = "5f" * 16


def test_members_of_an_epoch_exchange_objects(worlds: Worlds, tmp_path: Path) -> None:
    results = worlds.run("exchanges:exchange", 2, tmp_path, keys=[KEY, KEY], trap="")
    assert results[0][:4] == ["{'rank': 1,"] * 4


@pytest.mark.parametrize("key", [None, "5e" * 16])
def test_nothing_of_a_stranger_is_unpickled(key: str | None, worlds: Worlds, tmp_path: Path) -> None:
    """A stranger in the place of rank 1 knows no key, or that of another epoch."""
    trap = tmp_path / "run"
    trap.mkdir()
    results = worlds.run("exchanges:exchange", 2, tmp_path, keys=[KEY, key], trap=str(trap))
    *found, process = results[0]
    assert len(found) == 4 and all("from another rank has no valid code of this epoch" in each for each in found), found
    assert process not in [path.name for path in trap.iterdir()]


def test_torchs_own_exchange_would_run_it(worlds: Worlds, tmp_path: Path) -> None:
    trap = tmp_path / "run"
    trap.mkdir()
    results = worlds.run("exchanges:exchange", 2, tmp_path, keys=[None, None], trap=str(trap))
    assert results[0][-1] in [path.name for path in trap.iterdir()]
