"""The GPT of loop_gpt.py over shards: tar files, each read from its beginning to its end, as WebDataset does.

    python examples/loop_shards.py --demo        # three workers; one is killed while they train

Each stream has its part of the shards, by RANK and WORLD_SIZE, and any worker can open it again: docs/loop.md.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from demonstration import LAST, Uses, main
from loop_gpt import SAMPLES, Gpt, Text
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import unicron_lightning as unicron

SHARDS, STREAMS = 12, 3


def write(folder: Path) -> None:
    """Write the pieces of the text as shards; a file in a shard is a sample, and has its number as name."""
    text = Text()
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:02}.tar", "w") as file:
            for number in range(shard, SAMPLES, SHARDS):
                _, words, targets = text[number]
                content = bytes([*words.tolist(), int(targets[-1])])
                about = tarfile.TarInfo(f"{number}.txt")
                about.size = len(content)
                file.addfile(about, io.BytesIO(content))


class Shards(IterableDataset[Any]):
    """The samples of shards, in the order of the files."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.tar"))

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # of the stream
        for path in self.paths[rank::world]:
            with tarfile.open(path) as file:
                for about in file:
                    opened = file.extractfile(about)
                    assert opened is not None
                    piece = torch.frombuffer(bytearray(opened.read()), dtype=torch.uint8).long()
                    yield int(about.name.removesuffix(".txt")), piece[:-1], piece[1:]


def train(steps: int, folder: Path) -> None:
    """Train, and write the parameters."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory(prefix="shards-") as name:
        write(Path(name))
        loader = DataLoader(Shards(Path(name)), batch_size=4)
        run = unicron.Run(loader, global_batch_size=24, streams=STREAMS, seed=1, checkpoints=folder)
        model, uses = Gpt(), Uses(SAMPLES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        counter = torch.optim.SGD(uses.parameters(), lr=6.0, maximize=True)
        run.register(model=model, uses=uses, optimizer=optimizer, counter=counter)

        def loss_of(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            numbers, words, targets = batch
            return model(words, targets) + uses(numbers)

        for step in run.steps(steps):
            loss = step.run(loss_of)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            counter.step()
        run.save(folder / LAST)
        print(f"finished {steps} steps: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main(__doc__, train, workers=3)
