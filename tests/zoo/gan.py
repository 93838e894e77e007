"""GANs with manual optimization, as in Lightning's documentation and in other styles."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

LATENT = 4


def points(number: int, size: int) -> DataLoader[Any]:
    x = torch.randn(number, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=size)


def loader() -> DataLoader[Any]:
    return points(64, 4)


class Gan(pl.LightningModule):
    """Two optimizers, each toggled, with gradient clipping and a scheduler that steps in ``training_step``."""

    def __init__(self, toggles: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(LATENT, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.error = torchmetrics.MeanMetric()
        self.toggles = toggles

    def latent(self, real: torch.Tensor) -> torch.Tensor:
        """Noise that depends on the data only, so that ddp draws the same."""
        return torch.cos(17.0 * real[:, :LATENT])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        first, second = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        if self.toggles:
            self.toggle_optimizer(first)
        cheated = bce(self.discriminator(self.generator(self.latent(real))), ones)
        first.zero_grad()
        self.manual_backward(cheated)
        self.clip_gradients(first, gradient_clip_val=0.5)
        first.step()
        if self.toggles:
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
        made = self.generator(self.latent(real)).detach()
        second.zero_grad()
        found = bce(self.discriminator(real), ones)
        caught = bce(self.discriminator(made), zeros)
        self.manual_backward(found / 2)
        self.manual_backward(caught / 2)
        second.step()
        if self.toggles:
            self.untoggle_optimizer(second)
        self.lr_schedulers()[0].step()
        self.error(found + caught)
        self.log("error", self.error, on_epoch=True)
        self.log_dict({"generator": cheated, "discriminator": found + caught}, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.generator.parameters(), lr=0.01, eps=1e-3)
        second = torch.optim.Adam(self.discriminator.parameters(), lr=0.02, eps=1e-3)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, 0.9) for each in (first, second)]
        return [first, second], schedulers


class Plain(Gan):
    """Without toggling."""

    def __init__(self) -> None:
        super().__init__(toggles=False)


class Critic(Gan):
    """A Wasserstein GAN: closures, several steps of one optimizer, every second batch one of the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (real,) = batch
        first, second = self.optimizers()
        loss = torch.zeros(())

        def closure() -> torch.Tensor:
            nonlocal loss
            second.zero_grad()
            made = self.generator(self.latent(real))
            mixed = (real + made.detach()).mul(0.5).requires_grad_()
            slope = torch.autograd.grad(self.discriminator(mixed).sum(), mixed, create_graph=True)[0]
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss = self.discriminator(made.detach()).mean() - self.discriminator(real).mean() + penalty
            self.manual_backward(loss)
            return loss

        with second.toggle_model():
            for _ in range(3):
                second.step(closure=closure)
        if batch_idx % 2:
            with first.toggle_model():
                cheated = -self.discriminator(self.generator(self.latent(real))).mean()
                self.manual_backward(cheated)
                first.step()
                first.zero_grad()
        self.log("critic", loss, on_epoch=True, sync_dist=True)
        return {"loss": loss}


class Accumulating(pl.LightningModule):
    """One optimizer that steps every third batch; gradients last between batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        self.manual_backward(loss / 3)
        optimizer = self.optimizers()
        if (batch_idx + 1) % 3 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
