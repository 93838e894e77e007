"""Models of images, without further packages: a small diffusion model with a moving average, and a classifier."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loader() -> DataLoader[Any]:
    images = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(images), batch_size=4)


class Diffusion(pl.LightningModule):
    """Predicts the noise that was added to an image; draws noise by the image, so that ddp draws the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down = nn.Conv2d(3, 16, 3, padding=1, stride=2)
        self.norm = nn.GroupNorm(4, 16)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 3, 2, stride=2)
        self.register_buffer("kept", torch.linspace(0.99, 0.01, 10))

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        angle = time[:, None].to(image.dtype)
        hidden = self.down(image) + self.time(torch.cat([angle.sin(), angle.cos()], 1))[:, :, None, None]
        return self.up(torch.relu(self.middle(torch.relu(self.norm(hidden)))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (image,) = batch
        noise = torch.sin(37.0 * image)
        time = (image[:, 0, 0, 0].abs() * 100).long() % 10
        kept = self.kept[time][:, None, None, None]
        loss = (self(kept.sqrt() * image + (1 - kept).sqrt() * noise, time) - noise).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, eps=1e-4)


class Sparse(pl.LightningModule):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 8, sparse=True)
        self.out = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        index = (batch[0].flatten(1)[:, :4].abs() * 100).long() % 32
        return self.out(self.table(index).mean(1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def average() -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=0.9)


def scheduled() -> GradientAccumulationScheduler:
    return GradientAccumulationScheduler({0: 2, 1: 1})


def averaging() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)
