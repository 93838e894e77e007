"""Manual optimization, in a world of one with several micro-batches per step, against plain Lightning."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from zoo.gan import Accumulating, Critic, Gan, Plain, loader

from unicron_lightning.data.seeding import RandomPurpose, place_seed, seed_all
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.unicron import DataParallel

DEVICES = 2


def trained(module: pl.LightningModule, folder: Path, data: Any, **settings: Any) -> pl.Trainer:
    pl.seed_everything(3, verbose=False)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    basic: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 3, "default_root_dir": folder}
    trainer = pl.Trainer(**basic | quiet | settings)
    trainer.fit(module, data)
    return trainer


def without_norm(module: Any) -> Any:
    """The same model in a form whose result does not depend on the division of a batch."""
    if hasattr(module, "generator"):
        module.generator[1] = nn.Identity()
    return module


class Unfreezing(pl.LightningModule):
    """Steps its optimizer twice in a batch; a layer is frozen when the fit begins, and trained from epoch 1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        self.net[2].requires_grad_(False)  # smaller than what is trained, and so followed

    def on_train_epoch_start(self) -> None:
        self.net[2].requires_grad_(self.current_epoch > 0)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for target in (1.0, 2.0):
            optimizer.zero_grad()
            self.manual_backward((self.net(batch[0]) - target).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", [Gan, Plain, Critic, Accumulating, Unfreezing])
def test_equal_to_one_large_batch(tmp_path: Path, kind: type[pl.LightningModule]) -> None:
    data = loader()
    sampler = DistributedSampler(data.dataset, 1, 0, seed=3)  # the order of ddp
    whole = DataLoader(data.dataset, batch_size=4 * DEVICES, sampler=sampler)
    plain, mine = without_norm(kind()), without_norm(kind())
    expected = trained(plain, tmp_path, whole, devices=1)
    found = trained(mine, tmp_path, data, devices=DEVICES, strategy="unicron")
    assert found.global_step == expected.global_step > 0
    for (name, one), other in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), name
        assert one.requires_grad and one.is_leaf
    for name, value in expected.callback_metrics.items():
        if not name.endswith("_step"):
            assert float(found.callback_metrics[name]) == pytest.approx(float(value), rel=1e-4), name
    states = zip(found.optimizers, expected.optimizers, strict=True)
    assert all(a.param_groups[0]["lr"] == b.param_groups[0]["lr"] for a, b in states)
    gc.collect()
    assert not [each for each in threading.enumerate() if each.name.startswith("micro-batch")]


class Numbers(IterableDataset[torch.Tensor]):
    """Four numbers for each device."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(4.0).unsqueeze(1)


class Drawing(Accumulating):
    """Draws a random number before and after its backward, and after the optimizer's step, in which a hook draws."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[int, list[float]]] = []
        self.of_hook: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        numbers = [float(torch.rand(()))]
        self.manual_backward(self.net(batch.repeat(1, 6)).mean())
        numbers.append(float(torch.rand(())))
        self.optimizers().step()
        numbers.append(float(torch.rand(())))
        self.drawn.append((int(batch), numbers))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.of_hook.append(float(torch.rand(())))


def test_random_numbers_after_a_backward_and_a_step_are_those_of_the_micro_batch(tmp_path: Path) -> None:
    """Those of the first strand are drawn after the second one's samples have been fetched."""
    module = Drawing()
    trained(module, tmp_path, DataLoader(Numbers()), devices=DEVICES, strategy="unicron", max_epochs=1)
    expected = []
    for step in range(4):
        for micro_batch in range(DEVICES):
            seed_all(place_seed(3, RandomPurpose.FORWARD, 0, step, micro_batch))
            expected.append((step, [float(torch.rand(())) for _ in range(3)]))
    assert sorted(module.drawn) == sorted(expected)


def test_a_worker_without_micro_batches_reads_no_stream_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, without = Drawing(), Drawing()
    for module in (plain, without):
        trained(module, tmp_path, DataLoader(Numbers()), devices=DEVICES, strategy="unicron", max_epochs=1)
        monkeypatch.setattr(DataParallel, "own", lambda *_: [])  # so that it has them as a dead worker's
    assert Counter(number for number, _ in without.drawn) == {0: 6, 1: 2, 2: 2, 3: 2}, "the stand-in is the first batch"
    assert without.of_hook == plain.of_hook and len({*plain.of_hook}) == 4
    for one, other in zip(without.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


class Dependent(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch[0].sum() > 0:
            super().training_step(batch, batch_idx)


class Direct(Accumulating):
    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Late(Accumulating):
    def on_train_batch_end(self, *args: Any) -> None:
        self.manual_backward(self.net(torch.ones(2, 6)).mean())


class Plateau(Accumulating):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lr_schedulers().step(1.0)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


class Failing(Accumulating):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        raise ArithmeticError("of the module")


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (Dependent, ConfigError, r"come to manual_backward\(\) with 6 parameters .* and to its end"),
        (Direct, ConfigError, r"Direct.training_step calls loss.backward\(\); expected self.manual_backward"),
        (Late, ConfigError, r"Late calls manual_backward\(\) outside of training_step"),
        (Plateau, ConfigError, r"Plateau.training_step calls ReduceLROnPlateau.step\(\)"),
        (Failing, ArithmeticError, "of the module"),
    ],
)
def test_errors(tmp_path: Path, module: type[pl.LightningModule], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trained(module(), tmp_path, loader(), devices=DEVICES, strategy="unicron")
    assert not [each for each in threading.enumerate() if each.name.startswith("micro-batch")]
