"""A classifier whose gradients overflow in one micro-batch of each data epoch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HUGE = 1e37


def loader() -> DataLoader[Any]:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    x[17, 0] = 9.0
    return DataLoader(TensorDataset(x), batch_size=4)


class Network(pl.LightningModule):
    """Learns a sum; `overflows`: the loss of the micro-batch with the largest sample is huge."""

    def __init__(self, overflows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.overflows = overflows

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.net(x) - x.tanh().sum(1, keepdim=True)).float().square().mean().to(torch.get_default_dtype())
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss * HUGE if self.overflows and float(x.max()) > 8.0 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


def overflowing() -> Network:
    return Network(overflows=True)


def ordinary() -> Network:
    return Network(overflows=False)
