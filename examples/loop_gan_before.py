"""A small DCGAN that learns to draw rings, trained by a loop in plain PyTorch, in one process.

    python examples/loop_gan_before.py

loop_gan.py is the same script with recovery: docs/loop.md shows the difference.
"""

from __future__ import annotations

from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from demonstration import LAST, main
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, Dataset

NOISE, WIDTH, SIDE, SAMPLES = 16, 16, 16, 4800
"""Numbers from which an image is made, width of the models, pixels of a side, and number of images."""


class Rings(Dataset[Any]):
    """Images of rings, each drawn from its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        x, y, radius = torch.rand(3, generator=torch.Generator().manual_seed(number)) * 4 + 5
        pixels = torch.arange(SIDE)
        distance = ((pixels - x) ** 2 + (pixels[:, None] - y) ** 2).sqrt()
        return (2 * torch.exp(-((distance - radius / 2) ** 2)) - 1)[None]


def generator() -> nn.Module:
    """Return a model that makes an image of 16 x 16 pixels from noise."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * WIDTH, 4, bias=False),
        nn.BatchNorm2d(2 * WIDTH),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    """Return a model of the logit that an image is one of the data."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * WIDTH),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * WIDTH, 1, 4, bias=False),
        nn.Flatten(0),
    )


def train(steps: int, folder: Path) -> None:
    """Train, and write the parameters."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    loader = DataLoader(Rings(), batch_size=24, shuffle=True)
    batches = chain.from_iterable(repeat(loader))
    maker, judge = generator(), discriminator()
    makers = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def judging(images: Tensor) -> Tensor:
        real, made = judge(images), judge(maker(torch.randn(len(images), NOISE, 1, 1)).detach())
        loss = binary_cross_entropy_with_logits(real, torch.ones_like(real))
        return loss + binary_cross_entropy_with_logits(made, torch.zeros_like(made))

    def making(images: Tensor) -> Tensor:
        made = judge(maker(torch.randn(len(images), NOISE, 1, 1)))
        return binary_cross_entropy_with_logits(made, torch.ones_like(made))

    for images in islice(batches, steps):
        judged = judging(images)
        judged.backward()
        judges.step()
        judges.zero_grad()
        loss = making(images)
        loss.backward()
        makers.step()
        makers.zero_grad()
        judges.zero_grad()
    torch.save({"maker": maker.state_dict(), "judge": judge.state_dict()}, folder / LAST)
    print(f"finished {steps} steps: loss {loss.item():.3f}, of the discriminator {judged.item():.3f}", flush=True)


if __name__ == "__main__":
    main(__doc__, train)
