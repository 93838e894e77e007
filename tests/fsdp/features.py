"""A model with everything that a shard has to keep, trained as tests/fsdp/train.py does.

It has batch norm, a buffer that changes, torchmetrics objects, frozen and tied parameters, adapters, and activations
that are computed again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torchmetrics
from torch import Tensor, nn
from train import Model, main


class Adapted(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Mlp(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.adapted, self.norm, self.mlp = Adapted(width), nn.BatchNorm1d(width), Mlp(width)
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        out: Tensor = x + self.mlp(self.norm(self.adapted(x)))
        return out


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Features(Model):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__({**settings, "configures": False})
        torch.manual_seed(8)
        self.net: Any = Network(16)
        self.right = nn.ModuleDict(
            {
                name: torchmetrics.Accuracy("multiclass", num_classes=256)
                for name in ("fitting", "validating", "testing")
            }
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._judge(batch, "fitting")
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._judge(batch, "validating"), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._judge(batch, "testing"), sync_dist=True)

    def _judge(self, batch: Any, stage: str) -> Tensor:
        logits, following = self.net(batch[0]), batch[1].flatten()
        right: Any = self.right[stage]
        right(logits, following)
        name = {"fitting": "right", "validating": "val_right", "testing": "test_right"}[stage]
        self.log(name, right, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits, following)


if __name__ == "__main__":
    main(Features)
