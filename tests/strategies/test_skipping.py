"""Micro-batches whose training_step returns None."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

DEVICES = 2

pytestmark = pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")


class Skipping(pl.LightningModule):
    """Returns None for some micro-batches, by their data or their number."""

    def __init__(self, skips: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.skips = skips
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.skips(batch[0], batch_idx):
            return None
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


class Dealt(Sampler[int]):
    """The order in which two devices of ddp take the samples, a batch of four each."""

    def __init__(self, data: Any) -> None:
        self.order = DistributedSampler(data, 1, 0, seed=3)

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Any:
        order = list(self.order)
        for start in range(0, len(order), 8):
            yield from (*order[start : start + 8 : 2], *order[start + 1 : start + 8 : 2])


@pytest.mark.parametrize(
    ("skips", "steps"),
    [(lambda x, step: bool(x.sum() > 0), 12), (lambda x, step: step % 3 == 1, 12), (lambda x, step: True, 12)],
)
def test_equal_to_one_device_that_accumulates(tmp_path: Path, skips: Any, steps: int) -> None:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x)
    mine, plain = Skipping(skips), Skipping(lambda x, number: skips(x, number // DEVICES))

    def fit(module: Any, loader: Any, **settings: Any) -> pl.Trainer:
        pl.seed_everything(3, verbose=False)
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=2,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
            **quiet | settings,
        )
        trainer.fit(module, loader)
        return trainer

    expected = fit(plain, DataLoader(data, 4, sampler=Dealt(data)), devices=1, accumulate_grad_batches=DEVICES)
    found = fit(mine, DataLoader(data, 4), devices=DEVICES, strategy="unicron")
    assert found.global_step == expected.global_step == steps
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert found.callback_metrics.keys() == expected.callback_metrics.keys()
    for name, value in expected.callback_metrics.items():
        assert float(found.callback_metrics[name]) == pytest.approx(float(value), rel=1e-5)
    assert all(outputs for outputs in mine.outputs) or any(skips(x, number) for number in range(6))
