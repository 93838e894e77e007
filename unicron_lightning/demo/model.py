"""A small GPT over bytes, written as for plain Lightning, without any knowledge of failures."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm causal self-attention and feed-forward; maps [batch, length, width] to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias: a key's bias has no gradient but rounding noise, which Adam would scale up to whole steps.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        fed: Tensor = x + self.dropout(self.feed(self.norm2(x)))
        return fed


class GPT(pl.LightningModule):
    """Next-byte prediction.

    Args:
        layers, width, heads: size of the transformer.
        length: bytes of context.
        steps: of the cosine schedule.
    """

    def __init__(
        self, layers: int = 2, width: int = 64, heads: int = 4, length: int = 64, steps: int = 240, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.steps = steps
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, 256] of the byte after each of ``tokens`` [batch, length]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))
        return logits

    def _loss(self, text: Tensor) -> Tensor:
        logits = self(text[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch[1]), sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
