"""A model whose changes show the weight of each sample, and a fit of it in one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Linear(pl.LightningModule):
    """A gradient is a mean of samples; `steps` has the changes of the parameter, `seen` the indices of the batches."""

    def __init__(self, *, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.steps: list[float] = []
        self.seen: list[tuple[float, int]] = []
        self._last = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (samples,) = batch
        self.seen.append((samples[0].item(), batch_idx))
        loss = -self.layer(samples[:, None]).mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        weight: Any = self.layer.weight.detach()
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        self.steps.append(round(whole.item() - self._last, 5))
        self._last = whole.item()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(module: Linear, data: Any, devices: int, accumulation: int, strategy: Any = "unicron") -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    shape: dict[str, Any] = {"devices": 1, "num_nodes": devices, "accumulate_grad_batches": accumulation}
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet | shape
    )
    trainer.fit(module, DataLoader(data, batch_size=1))
