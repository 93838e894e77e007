"""A convolutional classifier of generated images, with validation and checkpoints.

    torchrun --nnodes 1:2 --nproc-per-node 1 --rdzv-backend unicron --rdzv-id images --max-restarts 1000 \
        examples/images.py --folder images-output

Each image shows one of four shapes at a random place, with noise, and is drawn from its number alone: every worker sees
the same data without a download.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

SIZE, SHAPE = 16, 7


def shapes() -> Tensor:
    """A filled square, a frame, a cross and a plus, [4, SHAPE, SHAPE]."""
    line = torch.arange(SHAPE)
    middle, ends = line == SHAPE // 2, (line == 0) | (line == SHAPE - 1)
    diagonal = line[:, None] == line[None, :]
    drawn = (
        torch.ones(SHAPE, SHAPE, dtype=torch.bool),
        ends[:, None] | ends[None, :],
        diagonal | diagonal.flip(1),
        middle[:, None] | middle[None, :],
    )
    return torch.stack(drawn).float()


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, first: int, number: int) -> None:
        self._first, self._number, self._shapes = first, number, shapes()

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(self._first + index)
        kind = int(torch.randint(len(self._shapes), (), generator=random))
        row, column = torch.randint(SIZE - SHAPE, (2,), generator=random).tolist()
        image = 0.3 * torch.randn(1, SIZE, SIZE, generator=random)
        image[0, row : row + SHAPE, column : column + SHAPE] += self._shapes[kind]
        return image, kind


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(64, 4)),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("images-output"), help="of the checkpoints, on all nodes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=2048, help="images of an epoch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        max_epochs=options.epochs,
        callbacks=[ModelCheckpoint(options.folder, "best", monitor="accuracy", mode="max")],
        logger=False,
    )
    train, validate = Images(0, options.images), Images(1_000_000, 256)
    trainer.fit(Classifier(), DataLoader(train, batch_size=16, shuffle=True), DataLoader(validate, batch_size=64))
    if trainer.global_rank == 0:
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}", flush=True)


if __name__ == "__main__":
    main()
