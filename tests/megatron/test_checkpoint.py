"""A checkpoint can be loaded in another layout: the next gradients are the same."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from system.test_diverging import run
from torch.distributed import checkpoint as dcp

from unicron_lightning.checkpoints.index import plain_object
from unicron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from worlds.client import Worlds

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


def check_equal(first: str, second: str) -> None:
    """Plain torch reads the same tensors and objects from both, and the library's own files are the same."""
    entries = [dcp.FileSystemReader(path).read_metadata().state_dict_metadata for path in (first, second)]
    sizes = [
        {name: (entry.size, entry.properties.dtype) for name, entry in found.items() if hasattr(entry, "size")}
        for found in entries
    ]
    assert sizes[0] == sizes[1] and entries[0].keys() == entries[1].keys()
    states = [{name: torch.full(size, 99, dtype=dtype) for name, (size, dtype) in sizes[0].items()} for _ in range(2)]
    for path, state in zip((first, second), states, strict=True):
        dcp.load(state, checkpoint_id=path)
    torch.testing.assert_close(*states, rtol=0, atol=0, equal_nan=True)
    common = [torch.load(Path(path) / "common.pt", weights_only=True) for path in (first, second)]
    for each in common:
        each["optimizer"].pop("param_state", None)
    assert common[0] == common[1]
    assert (Path(first) / "metadata.json").read_bytes() == (Path(second) / "metadata.json").read_bytes()


@pytest.mark.filterwarnings("ignore:.*to load in a single process")
def test_zero1_of_two_stages_twice_is_taken_up_in_other_layouts(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    norms = worlds.run("layouts:save_beside", 4, tmp_path / "save", path=path, tp=1, pp=2, zero1=True)[0]
    assert sorted(entry.name for entry in tmp_path.glob("checkpoint*")) == ["checkpoint", "checkpoint-beside"]
    check_equal(path, f"{path}-beside")
    check(worlds, tmp_path / "tp2", f"{path}-beside", norms, 2, tp=2, pp=1, zero1=True)
    check(worlds, tmp_path / "one", path, norms, 1, tp=1, pp=1, zero1=True)


@pytest.mark.filterwarnings("ignore:.*to load in a single process")
def test_bf16_without_zero1_is_taken_up_in_another_layout(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    norms = worlds.run("layouts:save_beside", 2, tmp_path / "save", path=path, tp=2, pp=1, zero1=False, bf16=True)[0]
    check_equal(path, f"{path}-beside")
    check(worlds, tmp_path / "pp2", f"{path}-beside", norms, 2, rel=1e-3, tp=1, pp=2, zero1=False, bf16=True)


@pytest.mark.chaos  # to keep `make test` short
@pytest.mark.parametrize(("bf16", "zero1"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.filterwarnings("ignore:.*to load in a single process")
def test_divided_experts_are_taken_up_in_other_layouts(worlds: Worlds, tmp_path: Path, bf16: bool, zero1: bool) -> None:
    path, rel = str(tmp_path / "checkpoint"), 1e-3 if bf16 else 1e-5
    saved = {"zero1": zero1, "bf16": bf16}
    norms = worlds.run("layouts:save_beside", 4, tmp_path / "save", path=path, tp=1, pp=2, ep=2, **saved)[0]
    check_equal(path, f"{path}-beside")
    check(worlds, tmp_path / "one", path, norms, 1, rel=rel, tp=1, pp=1, ep=1, **saved)
    check(worlds, tmp_path / "tp2", f"{path}-beside", norms, 4, rel=rel, tp=2, pp=1, ep=2, **saved)
    path = str(tmp_path / "whole")
    norms = worlds.run("layouts:save_beside", 2, tmp_path / "save-whole", path=path, tp=2, pp=1, ep=1, **saved)[0]
    check_equal(path, f"{path}-beside")
    check(worlds, tmp_path / "ep2", f"{path}-beside", norms, 2, rel=rel, tp=1, pp=1, ep=2, **saved)


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*to load in a single process")
def test_a_checkpoint_after_the_fit_is_that_of_its_end(tmp_path: Path) -> None:
    """Both stages write it; their groups end with the fit."""
    about = {"call": "save", "place": "after", "shard_size": 2, "last": 3}
    statuses, _cluster = run(tmp_path, strategy="unicron_megatron", **about)
    assert statuses == {0}
    check_equal(str(tmp_path / "within"), str(tmp_path / "after"))


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_another_optimizers_state_and_a_changed_index_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    worlds.run("layouts:save", 1, tmp_path / "save", path=str(path), tp=1, pp=1, zero1=False)
    (refused,) = worlds.run("layouts:load_refused", 1, tmp_path / "zero1", path=str(path), zero1=True)
    assert refused.startswith(f"{str(path)!r} was written with use_distributed_optimizer=False, and this run has")
    trap = Trap(tmp_path / "run")
    (path / ".metadata").write_bytes(pickle.dumps(trap))
    (refused,) = worlds.run("layouts:load_refused", 1, tmp_path / "load", path=str(path))
    assert not trap.path.exists()
    assert "checkpoint/.metadata is no index of a checkpoint: posix.mkdir is not allowed in it" in refused


def test_nothing_in_changed_objects_is_run(worlds: Worlds, tmp_path: Path) -> None:
    """Also where the index is whole: what it names beside the tensors is loaded as plain data."""
    trap = Trap(tmp_path / "run")
    changed = io.BytesIO()
    torch.save(trap, changed)
    changed.seek(0)
    with pytest.raises(ConfigError, match=r"model\.extra of the checkpoint is no plain data"):
        plain_object(changed, "model.extra")
    assert not trap.path.exists()
