"""The optimizers that are compared, and a model whose parameters all are matrices, as `torch.optim.Muon` wants them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

PACKAGE: Final = "pytorch_optimizer"
"""A public package with optimizers of the kinds of Shampoo and SOAP: ``pip install --no-deps pytorch_optimizer``."""
Make = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer from parameters."""


def _of_package(name: str, **options: Any) -> Make:
    def make(parameters: Iterable[Any]) -> Optimizer:
        made: Optimizer = getattr(importlib.import_module(PACKAGE), name)(parameters, **options)
        return made

    return make


def _fused_with_tensor_rate(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.02, dtype=torch.float64), fused=True)


OPTIMIZERS: Final[dict[str, Make]] = {
    "muon": partial(torch.optim.Muon, lr=0.02),
    "adamw-foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "adamw-tensor-rate": _fused_with_tensor_rate,
    "sgd-fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "asgd-foreach": partial(torch.optim.ASGD, lr=0.02, foreach=True),
    "adafactor": partial(torch.optim.Adafactor, lr=0.02),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.5, max_iter=4, history_size=3),
    "lbfgs-wolfe": partial(torch.optim.LBFGS, max_iter=3, history_size=3, line_search_fn="strong_wolfe"),
    "shampoo": _of_package("Shampoo", lr=0.05, momentum=0.9, preconditioning_compute_steps=3),
    "soap": _of_package("SOAP", lr=0.02, precondition_frequency=3),
}
"""By name."""
OF_PACKAGE: Final = ("shampoo", "soap")
HAS_PACKAGE: Final = importlib.util.find_spec(PACKAGE) is not None
SAMPLES: Final = 24
"""Of which a step has four, in two micro-batches."""


class Matrices(pl.LightningModule):
    """Two layers without bias.

    Args:
        make: makes the optimizer.
        dropout: probability.
    """

    def __init__(self, make: Make, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3, bias=False)
        )
        self._make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters())


def data() -> DataLoader[Any]:
    """Data of six steps."""
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x[:, :3].sin()), batch_size=2, shuffle=True)
