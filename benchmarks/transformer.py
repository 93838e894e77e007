"""A small GPT in plain PyTorch and generated token data, for benchmarks in which the model matters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a model and of a micro-batch."""

    layers: int
    heads: int
    width: int
    context: int = 64
    sequences: int = 8
    """Sequences of a micro-batch."""


SIZES = {
    "tiny": Size(layers=2, heads=2, width=64),
    "1M": Size(layers=5, heads=4, width=128),
    "10M": Size(layers=6, heads=6, width=384, sequences=4),
    "100M": Size(layers=14, heads=12, width=768, context=512, sequences=16),
}
"""Sizes by name, the approximate number of parameters."""


class Block(nn.Module):
    """Attention and perceptron, each with a layer norm before it and a residual connection around it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList([nn.LayerNorm(size.width), nn.LayerNorm(size.width)])
        # No bias: the keys' bias has no gradient but rounding noise, which Adam would scale up to whole steps.
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width)
        self.perceptron = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norms[0](hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        grown: Tensor = self.perceptron(self.norms[1](hidden))
        return hidden + grown


class Transformer(nn.Module):
    """Maps tokens to the logits of the next ones.

    Args:
        size: of the model.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


def loss_of(network: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss of a network that maps tokens to logits."""
    logits = network(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Walks(Dataset[Tensor]):
    """Random walks over the vocabulary: learnable data generated from the index alone."""

    def __init__(self, number: int, context: int) -> None:
        generator = torch.Generator().manual_seed(7)
        moves = torch.randint(-3, 4, (number, context + 1), generator=generator)
        starts = torch.randint(0, VOCABULARY, (number, 1), generator=generator)
        self._walks = (starts + moves.cumsum(1)) % VOCABULARY

    def __len__(self) -> int:
        return len(self._walks)

    def __getitem__(self, index: int) -> Tensor:
        return self._walks[index]
