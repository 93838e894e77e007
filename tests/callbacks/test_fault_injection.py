"""The callback in a world of one, which needs no permission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from unicron_lightning.callbacks import FaultInjection
from unicron_lightning.errors import ConfigError
from unicron_lightning.faults.fault import Faults
from unicron_lightning.strategies.unicron import UnicronStrategy


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.finite: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.net.weight.grad
        assert gradient is not None
        self.finite.append(bool(gradient.isfinite().all()))
        gradient.nan_to_num_(0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, *callbacks: pl.Callback, strategy: Any = None) -> Line:
    module = Line()
    trainer = pl.Trainer(
        strategy=UnicronStrategy() if strategy is None else strategy,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        max_steps=4,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(torch.ones(64, 2), batch_size=2))
    return module


def test_a_gradient_is_corrupted_in_the_step_that_was_said(tmp_path: Path) -> None:
    module = fit(tmp_path, FaultInjection("corrupt gradient step=2 micro_batch=1"))
    assert module.finite == [True, True, False, True]


def test_what_is_raised_ends_the_fit(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        fit(tmp_path, FaultInjection(Faults("raise other_software_error step=1 phase=commit")))


def test_wrong_faults_and_other_strategies_are_refused(tmp_path: Path) -> None:
    (tmp_path / "faults.yaml").write_text("- kill rank=1\n")
    callback = FaultInjection(tmp_path / "faults.yaml")
    assert callback.faults.texts == ["kill rank=1"]
    with pytest.raises(ConfigError, match='FaultInjection needs Trainer\\(strategy="unicron"\\)'):
        fit(tmp_path, callback, strategy="auto")
    with pytest.raises(ConfigError, match="kil rank=1"):
        FaultInjection(["kil rank=1"])
