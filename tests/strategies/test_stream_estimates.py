"""The estimated number of steps of iterable data sets, which schedules of the learning rate need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, IterableDataset

from unicron_lightning.errors import ConfigError

STATED = 10


class Stream(IterableDataset[Any]):
    """Yields ``size`` samples on each device."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.zeros(self.size, 32))


class Sized(Stream):
    """States a length, which may be wrong."""

    def __len__(self) -> int:
        return STATED


class Scheduled(BoringModel):
    """Needs the number of steps; `estimates` are those seen while the optimizer is made and while it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.estimates: list[float] = []

    def configure_optimizers(self) -> Any:
        self.estimates.append(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], []

    def on_train_start(self) -> None:
        assert self.trainer.estimated_stepping_batches == self.estimates[0], "elsewhere it is the same"

    def on_train_end(self) -> None:
        self.estimates.append(self.trainer.global_step)


@pytest.mark.parametrize(
    ("data", "accumulation", "given", "estimate", "steps"),
    [
        (Sized(STATED), 1, {}, 10, 10),
        (Sized(STATED), 2, {}, 6, 6),
        (Sized(STATED), 2, {"limit_train_batches": 4}, 4, 4),
        (Sized(STATED), 1, {"limit_train_batches": 40}, 10, 10),
        (Sized(STATED), 2, {"max_steps": 3}, 3, 3),
        (Sized(STATED + 4), 1, {}, 10, 14),
        (Sized(STATED - 4), 1, {}, 10, 6),
        (Stream(STATED), 1, {"max_steps": 7}, 7, 7),
        (Stream(STATED), 1, {"limit_train_batches": 3}, 6, 6),
    ],
)
def test_estimate(data: Any, accumulation: int, given: dict[str, Any], estimate: int, steps: int) -> None:
    module = Scheduled()
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"max_epochs": 2, "devices": 2, "limit_val_batches": 0, "accumulate_grad_batches": accumulation}
    trainer = pl.Trainer(strategy="unicron", accelerator="cpu", enable_checkpointing=False, **quiet | settings | given)
    trainer.fit(module, DataLoader(data, batch_size=2))
    assert module.estimates == [estimate, steps]


@pytest.mark.parametrize("data", [Stream(4), {"a": Stream(4), "b": Stream(5)}, [Stream(4), Stream(6)]])
def test_what_is_not_known_is_an_error(data: Any) -> None:
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(strategy="unicron", accelerator="cpu", max_epochs=2, enable_checkpointing=False, **quiet)
    sets = data if isinstance(data, (dict, list)) else [data]
    loaders = {k: DataLoader(v) for k, v in sets.items()} if isinstance(sets, dict) else [DataLoader(v) for v in sets]
    with pytest.raises(ConfigError, match=r"without a length.*max_steps.*limit_train_batches"):
        trainer.fit(Scheduled(), loaders if len(loaders) > 1 else loaders[0])


def test_other_strategies_estimate_as_before() -> None:
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(BoringModel())
    trainer._data_connector.attach_data(trainer.lightning_module, DataLoader(Stream(4)))
    assert trainer.estimated_stepping_batches == -1
