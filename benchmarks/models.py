"""The small GPT of benchmarks, as a module of Lightning."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor
from transformer import Size, Transformer, loss_of


class GPT(Transformer, pl.LightningModule):
    """Predicts the next token.

    Args:
        size: of the model.
        eps: of AdamW.
        fused: use AdamW's fused kernel.
    """

    def __init__(self, size: Size, eps: float = 1e-8, fused: bool = False) -> None:
        super().__init__(size)
        self.eps, self.fused = eps, fused

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = loss_of(self, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=self.eps, fused=self.fused or None)
