"""A small GPT over the standard library's documentation, trained by a loop in plain PyTorch, through failures.

    python examples/loop_gpt.py --demo           # three workers; one is killed while they train

loop_gpt_before.py is the same script without recovery: docs/loop.md shows the difference.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from demonstration import LAST, Uses, main
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import unicron_lightning as unicron

BLOCK, WIDTH, SAMPLES = 32, 48, 4800
"""Bytes of context, width of the model, and number of pieces of the text."""


class Text(Dataset[Any]):
    """Pieces of the documentation, as bytes, with their numbers."""

    def __init__(self) -> None:
        words = "".join(topics.topics[key] for key in sorted(topics.topics)).encode()
        self.bytes = torch.frombuffer(bytearray(words), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, Tensor, Tensor]:
        piece = self.bytes[number * BLOCK : (number + 1) * BLOCK + 1]
        return number, piece[:-1], piece[1:]


class Gpt(nn.Module):
    """A decoder of two layers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(BLOCK)
        values = self.token(words) + self.place.weight
        logits = self.head(self.blocks(values, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(steps: int, folder: Path) -> None:
    """Train, and write the parameters."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    loader = DataLoader(Text(), batch_size=4, shuffle=True)
    run = unicron.Run(loader, global_batch_size=24, seed=1, checkpoints=folder)
    model, uses = Gpt(), Uses(SAMPLES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    counter = torch.optim.SGD(uses.parameters(), lr=6.0, maximize=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    run.register(model=model, uses=uses, optimizer=optimizer, counter=counter, schedule=schedule)

    def loss_of(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        numbers, words, targets = batch
        return model(words, targets) + uses(numbers)

    for step in run.steps(steps):
        loss = step.run(loss_of)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        counter.step()
        schedule.step()
        optimizer.zero_grad()
        counter.zero_grad()
    run.save(folder / LAST)
    print(f"finished {steps} steps: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main(__doc__, train, workers=3)
