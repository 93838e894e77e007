"""A Lightning training with witnesses, whose gradients are wrong on one node or on none: ``FOLDER KIND-NODE``.

The kind is "index", "stream" (data in streams), or "manual" (optimization, in two backwards). The node is "none", or
ends with its number. The worker writes what it has at the end, also alone, where nothing fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from unicron_lightning.strategies.unicron import UnicronStrategy

FIRST: Final = 6
"""Step, from 1, from which on the gradients are wrong: one with a witness."""
STEPS: Final = 12


class DealtRows(IterableDataset[Any]):
    """The rows of a data set, dealt to three devices."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        rank = int(os.environ["RANK"])
        assert os.environ["WORLD_SIZE"] == "3", "of streams"
        return (self._data[row] for row in range(rank, len(self._data), 3))


def done(trainer: pl.Trainer) -> int:
    """Return the number of finished steps."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


class Net(pl.LightningModule):
    """A net with dropout, batch norm, a buffer that its forward changes, a metric, and logged values."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.error = torchmetrics.MeanSquaredError()
        self.register_buffer("seen", torch.zeros(4))
        self.logged: dict[str, float] = {}
        self._node = node
        self.layers[0].weight.register_hook(self._spoil)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        values, targets = batch
        assert isinstance(self.seen, torch.Tensor)
        self.seen.mul_(0.9).add_(values.detach().mean(0))
        found = self.layers(values)
        self.error(found, targets)
        self.log("error", self.error, on_step=False, on_epoch=True)
        loss = nn.functional.mse_loss(found, targets)
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Keep the logged values."""
        found = self.trainer.callback_metrics.items()
        self.logged |= {f"{name} {self.current_epoch}": float(value) for name, value in found}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        world = self.trainer.strategy.engine.world  # type: ignore[attr-defined]
        if not (world.nodes and world.nodes[world.rank].endswith(f"-{self._node}")):
            return gradient
        return gradient * (1.0 + 1e-9) if done(self.trainer) + 1 >= FIRST else gradient


class ManualNet(Net):
    """The same net, whose two parts are trained one after the other; the second part's gradients are wrong."""

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.automatic_optimization = False
        self.layers[0].weight._backward_hooks.clear()  # type: ignore[union-attr]
        self.layers[3].weight.register_hook(self._spoil)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Train both parts."""
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parts = (self.layers[:2], self.layers[3:])
        return [torch.optim.AdamW(part.parameters(), lr=0.01, eps=1e-3) for part in parts]


def main(folder: Path, name: str) -> None:
    """Train."""
    kind, _, node = name.partition("-")
    pl.seed_everything(3)
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(96, size, generator=generator, dtype=torch.float64) for size in (4, 1)))
    net = (ManualNet if kind == "manual" else Net)(node)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    if kind == "stream":
        quiet["accumulate_grad_batches"] = 2
    strategy = UnicronStrategy(witness_every=2, digest_every=0, num_micro_batches=None if kind == "stream" else 6)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, num_nodes=3, max_epochs=3, **quiet)
    loader: DataLoader[Any] = DataLoader(data, batch_size=4, shuffle=True)
    trainer.fit(net.double(), DataLoader(DealtRows(data), batch_size=4) if kind == "stream" else loader)
    found = {"state": net.state_dict(), "logged": net.logged, "random": torch.rand(1), "step": done(trainer)}
    path = folder / f"result-{os.getpid()}.pt"
    torch.save(found, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
