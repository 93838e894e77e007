"""Muon, whose updates need whole matrices, with deaths before, in and after its updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from fsdp.judge import notes
from fsdp.test_training import check, die, run
from optimizers.table import OPTIMIZERS, SAMPLES, Matrices, data
from torch.utils.data import DataLoader

from unicron_lightning import UnicronFSDPStrategy
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.mesh import local_shards

if TYPE_CHECKING:
    from pathlib import Path

    from worlds.client import Worlds

MUON_POINTS = 64
"""Points of a step with an update of whole matrices, the last ones of which are those of the update and the commit."""
CHOSEN: list[dict[str, Any]] = [
    {"replicas": 2, "tied": False, "muon": True, "at": [[rank, point]]}
    for rank, point in ((0, "update"), (1, "update"), (2, 58), (3, 59), (0, 60), (1, 61), (2, "updated"), (3, "commit"))
]
TOGETHER: list[dict[str, Any]] = [
    {"replicas": 2, "tied": True, "muon": True, "at": [[0, 59], [3, 61]]},
    {"replicas": 3, "tied": False, "muon": True, "at": [[1, "updated"], [2, 58]]},
    {"replicas": 2, "tied": False, "muon": True, "at": [[1, 60], [2, "commit"]]},
]


class ClipsItself(Matrices):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Clip nothing."""


class ChangesGradients(Matrices):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for each in self.parameters():
            if each.grad is not None:
                each.grad.mul_(2)


def fit(module: Matrices, folder: Path, **options: Any) -> list[torch.Tensor]:
    """Train in this process alone; return the parameters."""
    pl.seed_everything(3, verbose=False)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "64-true",
        "max_epochs": 2,
        "logger": False,
    }
    settings |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(**settings, gradient_clip_val=0.1, default_root_dir=folder, **options)
    trainer.fit(module, DataLoader(data().dataset, batch_size=2, sampler=range(SAMPLES)))
    return [each.detach() for each in local_shards(module.parameters())]


@pytest.mark.allow_leak("listening_sockets", reason="the group of a replica of one lives as long as the process")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
def test_one_shard_is_lightnings_own(tmp_path: Path) -> None:
    make = OPTIMIZERS["muon"]
    whole = fit(Matrices(make, 0.0), tmp_path)
    own = fit(Matrices(make, 0.0), tmp_path, strategy=UnicronFSDPStrategy(shard_size=1))
    for one, other in zip(own, whole, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.allow_leak("listening_sockets", reason="the group of a replica of one lives as long as the process")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
@pytest.mark.parametrize(
    ("module", "message"),
    [(ClipsItself, "configure_gradient_clipping with Muon"), (ChangesGradients, "a hook has changed gradients")],
)
def test_gradients_that_change_after_the_update_are_refused(
    module: type[Matrices], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(module(OPTIMIZERS["muon"], 0.0), tmp_path, strategy=UnicronFSDPStrategy(shard_size=1))


def test_deaths_in_an_update(worlds: Worlds, tmp_path: Path) -> None:
    """Each worker in some part of it, and two at once; parameters are those of one process."""
    worlds.run("deaths:histories", 1, tmp_path, chosen=[*CHOSEN, *TOGETHER], seeds=[])


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_kills_heal(tmp_path: Path) -> None:
    schedule = [die("update", 0, 1), die("optimizer", 1, 0), die("updated", 1, 1), die("commit", 0, 0)]
    settings = {"steps": 12, "full": 4, "muon": True, "tied": False, "save_every": 5}
    run(tmp_path, settings, schedule, 5, "2:4")
    assert [note["point"] for note in notes(tmp_path, "fault")] == [fault["point"] for fault in schedule]
    check(tmp_path, settings, 4)
