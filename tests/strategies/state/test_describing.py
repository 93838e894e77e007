"""The compared descriptions show each relevant difference, and nothing else."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning.data.fetch import Fetcher
from unicron_lightning.data.order import DataOrder, StepShape
from unicron_lightning.data.steps import IndexedSteps, StepPace, TrainingLoader
from unicron_lightning.strategies.state.comparison import describe_data, describe_model
from unicron_lightning.worker.comparison import shared_state


class Model(pl.LightningModule):
    def __init__(self, width: int = 2, folder: str = "/data/n0", **settings: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)


class Trainer:
    """A trainer with the attributes that are read."""

    def __init__(self, model: Model, lr: float = 0.1, gamma: float = 0.5) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.lightning_module, self.strategy = model, object()
        self.optimizers = [optimizer]
        scheduler = StepLR(optimizer, 10, gamma)
        self.lr_scheduler_configs = [type("Config", (), {"scheduler": scheduler, "interval": "step"})]


def model_of(trainer: Any) -> dict[str, str]:
    return describe_model(trainer)


def data_of(length: int = 40, seed: int = 3, *, shuffle: bool = True) -> dict[str, str]:
    loader = DataLoader(TensorDataset(torch.zeros(length, 2)), batch_size=2, shuffle=shuffle)
    order = DataOrder(loader, StepShape(devices=2, accumulation=1), seed)
    pace = StepPace(position=lambda: (0, 0), share=list)
    made = TrainingLoader(loader, IndexedSteps(order, partial(Fetcher, loader, order, 0), pace))
    try:
        return describe_data(made)
    finally:
        made.close()


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]


def test_the_same_program_is_described_alike_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    one, other = (model_of(Trainer(Model(folder=folder))) for folder in ("/data/n0", "/data/n1"))
    assert one == other
    assert data_of() == data_of()


@pytest.mark.parametrize(
    ("trainer", "names"),
    [
        (lambda: Trainer(Model(), lr=0.2), ["optimizer", "scheduler"]),
        (lambda: Trainer(Model(), gamma=0.4), ["scheduler"]),
        (lambda: Trainer(Model(width=3)), ["parameters", "hparams"]),
        (lambda: Trainer(Model(dropout=0.1)), ["hparams"]),
    ],
)
def test_a_model_or_setting_that_differs_is_named(trainer: Any, names: list[str]) -> None:
    assert differing(model_of(Trainer(Model())), model_of(trainer())) == names


def test_a_scheduler_without_a_state_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(Model())
    monkeypatch.setattr(trainer.lr_scheduler_configs[0].scheduler, "state_dict", lambda: None)
    assert "()" in model_of(trainer)["scheduler"]


def test_another_seed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    one = model_of(Trainer(Model()))
    monkeypatch.setenv("PL_GLOBAL_SEED", "8")
    assert differing(one, model_of(Trainer(Model()))) == ["seed"]


def test_frozen_parameters_are_named() -> None:
    frozen = Model()
    frozen.layer.bias.requires_grad = False
    assert differing(model_of(Trainer(Model())), model_of(Trainer(frozen))) == ["requires_grad"]


def test_data_of_another_length_or_order_are_named() -> None:
    assert differing(data_of(), data_of(length=44)) == ["data length", "data order"]
    assert differing(data_of(), data_of(seed=4)) == ["data order"]
    assert differing(data_of(), data_of(shuffle=False)) == ["data order"]


class Own(StepLR):
    """Has a schedule's settings, and attributes of its rank."""

    def __init__(self, optimizer: Any, step_size: int, folder: Path, warm_up: float = 0.5) -> None:
        self.warm_up, self.phase, self.word, self.limits = warm_up, 1, "cosine", [3, 5]
        self.started, self.times, self.folder, self.path = time.perf_counter(), [time.time()], folder, str(folder)
        self.rule = (lambda: 1) if folder.name == "n0" else None
        self.writer = object() if folder.name == "n0" else None
        super().__init__(optimizer, step_size)


def test_attributes_of_a_schedule_that_may_be_of_the_rank_are_left_out() -> None:
    optimizer = torch.optim.SGD(Model().parameters(), lr=0.1)
    one, other = (Own(optimizer, 10, Path("/data", name)) for name in ("n0", "n1"))
    assert shared_state(one) == shared_state(other)
    changed: dict[str, Any] = {"warm_up": 0.6, "phase": 2, "word": "linear", "limits": [3, 6]}
    changed |= {"gamma": 0.2, "last_epoch": 7, "_last_lr": [0.2], "step_size": 9}
    for name, value in changed.items():
        kept = getattr(other, name)
        setattr(other, name, value)
        assert shared_state(one) != shared_state(other), name
        setattr(other, name, kept)


def test_torchs_own_schedules_are_compared_whole() -> None:
    optimizer = torch.optim.SGD(Model().parameters(), lr=0.1)
    for schedule in (StepLR(optimizer, 10), torch.optim.swa_utils.SWALR(optimizer, 0.1)):
        assert shared_state(schedule) == schedule.state_dict()
