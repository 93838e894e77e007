"""Conventions of Lightning that scripts rely on, under the strategy."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning.data.combined import CombinedPass
from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.passes.evaluation import GlobalPasses

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning")


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.layer(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(number: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(number, 2)), batch_size=2)


def trainer(folder: Path, **settings: Any) -> pl.Trainer:
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    basic: dict[str, Any] = {"strategy": "unicron", "accelerator": "cpu", "devices": 1, "max_epochs": 1}
    return pl.Trainer(**basic | dict.fromkeys(quiet, False) | {"default_root_dir": folder} | settings)


class Augmenting(Small):
    """Draws random numbers in a hook of the transfer; ``noise`` are numbers that another hook draws."""

    def __init__(self, noise: int, *, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.noise = noise
        self.drawn: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        torch.rand(self.noise)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.drawn.append(float(torch.rand(1)))
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.drawn.append(float(torch.rand(1)))
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


@pytest.mark.parametrize("manual", [False, True])
def test_random_numbers_of_the_transfer_belong_to_the_micro_batch(tmp_path: Path, manual: bool) -> None:
    drawn = []
    for noise in (0, 5):
        pl.seed_everything(3, verbose=False)
        module = Augmenting(noise, manual=manual)
        samples = DataLoader(data().dataset, batch_size=2, num_workers=1)  # seeds nothing here
        trainer(tmp_path, accumulate_grad_batches=1 if manual else 2, limit_val_batches=0).fit(module, samples)
        drawn.append(module.drawn)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == len(drawn[0]) == 8


class Scaling(Small):
    """Builds another batch before the transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []
        self.copied: Any = None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.means.append(float(batch[0].mean()))
        return (batch[0] * 3, "more")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch[1] == "more"
        self.log("seen", batch[0].mean())
        return super().training_step(batch, batch_idx)

    def on_train_start(self) -> None:
        self.copied = copy.deepcopy(self)


class ScalingData(pl.LightningDataModule):
    train_dataloader = staticmethod(data)
    on_before_batch_transfer = Scaling.on_before_batch_transfer

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []


def test_a_hook_before_the_transfer_gets_each_micro_batch_once(tmp_path: Path) -> None:
    module, run = Scaling(), trainer(tmp_path, devices=2)
    run.fit(module, data())
    assert module.means == [1.0] * 4  # two steps of two micro-batches
    assert run.callback_metrics["seen"] == 3
    assert module.copied._on_before_batch_transfer([torch.ones(2)])[0].tolist() == [3, 3]
    assert "_on_before_batch_transfer" not in vars(module)


def test_a_hook_of_the_data_module_before_the_transfer(tmp_path: Path) -> None:
    given, run = ScalingData(), trainer(tmp_path)
    run.fit(Small(), datamodule=given)
    assert given.means == [1.0] * 4


def test_loaders_that_a_global_pass_would_read_at_once_are_refused() -> None:
    users, rounds = CombinedLoader([data(4), data(6)], "min_size"), StepShape(devices=2, accumulation=1)
    loaders = CombinedPass(users, rounds, lambda combined: pytest.fail("made"))
    passes: Any = SimpleNamespace(_strategy=SimpleNamespace(strategy_name="unicron_fsdp"))
    with pytest.raises(ConfigError, match=r"mode='min_size'\) in an evaluation; unicron_fsdp.*sequential"):
        GlobalPasses.together(passes, loaders)


def test_a_tensor_of_integers_is_warned_of_when_it_is_logged(tmp_path: Path) -> None:
    class Counting(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("own_count", torch.tensor(3))
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match=r"self\.log\('own_count', \.\.\.\)` in your `training_step` but.* floating"):
        trainer(tmp_path).fit(Counting(), data())


@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoints_have_no_entry_of_the_loaders(tmp_path: Path, weights_only: bool) -> None:
    run = trainer(tmp_path)
    run.fit(Small(), data())
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only)
    content = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert "combined_loader" not in content["loops"]["fit_loop"]["state_dict"]
