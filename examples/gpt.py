"""A small GPT over bytes of English text: the topics of Python's own ``help()``, which every installation has.

On every node (here three agents on one machine, each in a shell of its own or behind ``&``):

    torchrun --nnodes 1:3 --nproc-per-node 1 --rdzv-backend unicron --rdzv-id gpt --max-restarts 1000 examples/gpt.py

Nothing in the script is about failures but ``strategy="unicron"``.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

LENGTH = 64
"""Bytes of context."""


class Text(Dataset[Tensor]):
    """Windows of ``LENGTH + 1`` bytes."""

    def __init__(self) -> None:
        text = "\n".join(pydoc_data.topics.topics.values()).encode()
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self._bytes[index * LENGTH : (index + 1) * LENGTH + 1].long()


class Gpt(pl.LightningModule):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        inside = self.token(text[:, :-1]) + self.place(torch.arange(LENGTH, device=text.device))
        logits = self.head(self.blocks(inside, mask=self.mask, is_causal=True))
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of the declared world")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=options.nodes,
        accumulate_grad_batches=2,
        max_steps=options.steps,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Gpt(), DataLoader(Text(), batch_size=8, shuffle=True))
    if trainer.global_rank == 0:
        print(f"finished {trainer.global_step} steps: loss {float(trainer.callback_metrics['loss']):.3f}", flush=True)


if __name__ == "__main__":
    main()
