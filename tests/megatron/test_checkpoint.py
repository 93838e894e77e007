"""A checkpoint can be loaded in another layout: the next gradients are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from megatron.conftest import Worlds

pytestmark = pytest.mark.faults


def check(
    worlds: Worlds, folder: Path, path: str, expected: list[float], world: int, rel: float = 1e-5, **layout: Any
) -> None:
    results = worlds.run("layouts:load", world, folder, path=path, **layout)
    for result in results:
        assert result["norms"] == pytest.approx(expected, rel=rel)
        assert result["rest"] == {"loops": {"steps": 2}, "text": "second"}
        assert (
            result["refused"]
            == f"'{path}-elsewhere' is no checkpoint of megatron-core: expected a folder with metadata.json"
        )


def test_zero1_of_two_stages_twice_is_taken_up_in_other_layouts(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    norms = worlds.run("layouts:save", 4, tmp_path / "save", path=path, tp=1, pp=2, zero1=True)[0]
    assert [entry.name for entry in tmp_path.glob("checkpoint*")] == ["checkpoint"]
    check(worlds, tmp_path / "tp2", path, norms, 2, tp=2, pp=1, zero1=True)
    check(worlds, tmp_path / "one", path, norms, 1, tp=1, pp=1, zero1=True)


def test_bf16_without_zero1_is_taken_up_in_another_layout(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    norms = worlds.run("layouts:save", 2, tmp_path / "save", path=path, tp=2, pp=1, zero1=False, bf16=True)[0]
    check(worlds, tmp_path / "pp2", path, norms, 2, rel=1e-3, tp=1, pp=2, zero1=False, bf16=True)
