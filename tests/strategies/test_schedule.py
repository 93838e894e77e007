"""A global batch that changes by a schedule of epochs; tests/matrix compares it with ddp, also through a kill."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.checks import check_trainer
from unicron_lightning.strategies.state.checkpointing import count_steps
from unicron_lightning.strategies.unicron import UnicronStrategy

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")

DEVICES, SAMPLES = 2, 64
ROUNDS = {0: 2, 1: 1, 2: 3}
STEPS = [4, 8, 3]
"""Of 16 micro-batches."""


class Counting(pl.LightningModule):
    """Counts samples, steps and validations by epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.samples: list[list[int]] = [[], [], []]
        self.steps = [0, 0, 0]
        self.totals: list[int | float] = []
        self.validations: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.totals.append(self.trainer.num_training_batches)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples[self.current_epoch] += batch[0][:, 0].long().tolist()
        return (self.layer(batch[0] / SAMPLES) - 1).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps[self.current_epoch] += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validations.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Stream(IterableDataset[Any]):
    """Each device reads its part."""

    def __iter__(self) -> Any:
        for sample in range(int(os.environ.get("RANK", "0")), SAMPLES, DEVICES):
            yield (torch.full((2,), float(sample)),)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(SAMPLES)).repeat(2, 1).T), 4)


def fit(module: Any, data: Any = None, *, ckpt: Any = None, rounds: Any = None, **settings: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [GradientAccumulationScheduler(dict(ROUNDS if rounds is None else rounds)), *settings.pop("more", ())]
    basic: dict[str, Any] = {"devices": DEVICES, "max_epochs": 3, "limit_val_batches": 0, "strategy": "unicron"}
    saving = {"enable_checkpointing": len(callbacks) > 1}
    trainer = pl.Trainer(accelerator="cpu", callbacks=callbacks, **quiet | basic | saving | settings)
    trainer.fit(module, loader() if data is None else data, loader(), ckpt_path=ckpt, weights_only=False)
    return trainer


def test_steps_and_samples_of_each_epoch() -> None:
    module = Counting()
    trainer = fit(module)
    assert (module.steps, module.totals, trainer.global_step) == (STEPS, STEPS, sum(STEPS))
    assert [sorted(seen) for seen in module.samples] == [list(range(SAMPLES))] * 3
    assert trainer.accumulate_grad_batches == 1


def test_a_stream() -> None:
    module = Counting()
    fit(module, DataLoader(Stream(), 4), val_check_interval=1.0)
    assert module.steps == STEPS
    assert [sorted(seen[-SAMPLES:]) for seen in module.samples] == [list(range(SAMPLES))] * 3


@pytest.mark.parametrize("kind", ["indexed", "stream"])
@pytest.mark.parametrize(
    ("step", "rounds"), [(2, ROUNDS), (4, ROUNDS), (6, ROUNDS), (12, ROUNDS), (14, ROUNDS), (8, {0: 1}), (16, {0: 1})]
)
def test_resuming_within_and_at_the_end_of_each_epoch(
    step: int, rounds: dict[int, int], kind: str, tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=step, save_top_k=-1, save_on_train_epoch_end=False)
    whole, rest = Counting(), Counting()
    data = loader() if kind == "indexed" else DataLoader(Stream(), 4)
    fit(whole, data, rounds=rounds, more=[saving])
    trainer = fit(rest, data, rounds=rounds, ckpt=tmp_path / f"step={step}.ckpt")
    assert trainer.global_step == sum(whole.steps) and sum(rest.steps) == sum(whole.steps) - step
    assert all(torch.equal(rest.state_dict()[name], value) for name, value in whole.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "validations"),
    [
        ({"val_check_interval": 4}, [2, 4, 8, 12, 14]),
        ({"val_check_interval": 0.5}, [2, 4, 8, 12, 13, 14, 15]),
        ({}, [4, 12, 15]),
        ({"limit_train_batches": 4}, [2, 6, 8]),
        ({"limit_train_batches": 0.5}, [2, 6, 7]),
    ],
)
def test_validations_and_limits(settings: dict[str, Any], validations: list[int]) -> None:
    module = Counting()
    fit(module, limit_val_batches=1, num_sanity_val_steps=0, **settings)
    assert sorted(set(module.validations)) == validations


def test_validations_within_epochs_of_a_stream() -> None:
    module = Counting()
    settings = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "val_check_interval": 4}
    fit(module, DataLoader(Stream(), 4), **settings)
    assert sorted(set(module.validations)) == [2, 4, 8, 12, 14]


@pytest.mark.parametrize("again", [{"reload_dataloaders_every_n_epochs": 1}, {"ckpt": "epoch=0.ckpt"}])
def test_validations_of_data_that_is_set_up_in_a_later_epoch(again: dict[str, Any], tmp_path: Path) -> None:
    """The interval is more steps in the first data epoch than later ones have."""
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    settings: dict[str, Any] = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "val_check_interval": 8}
    fit(Counting(), rounds={0: 1, 1: 4}, max_epochs=1, more=[saving], **settings)
    module = Counting()
    given = {"ckpt": tmp_path / again["ckpt"]} if "ckpt" in again else again
    fit(module, rounds={0: 1, 1: 4}, **settings, **given)
    assert sorted(set(module.validations)) == ([10, 12] if "ckpt" in again else [8, 10, 12])


def test_checkpoints_of_ddp_are_counted_by_the_schedule() -> None:
    shape = StepShape(devices=DEVICES, accumulation=3, schedule=tuple(ROUNDS.items()))
    counts = {name: {"ready": 8 * epochs} for name, epochs in (("total", 3), ("current", 1))}
    loops = {"epoch_loop.batch_progress": counts, "epoch_progress": {"current": {"ready": 3}}}
    counts["current"]["processed"], counts["total"]["processed"] = 6, 22
    count_steps({"loops": {"fit_loop": loops}}, shape)
    assert counts == {"total": {"ready": 15, "processed": 14}, "current": {"ready": 3, "processed": 2}}


class Chosen(GradientAccumulationScheduler):
    """Decides by the clock."""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"accumulate_grad_batches": 3},
            r"`accumulate_grad_batches` and are using the `GradientAccumulationScheduler`",
        ),
        ({"strategy": UnicronStrategy(num_micro_batches=4)}, r"num_micro_batches=4 and .*: leave one of them out"),
        ({"val_check_interval": 2, "check_val_every_n_epoch": None}, r"val_check_interval=2, .* over several epochs"),
        ({"more": [Chosen({0: 2})]}, r"Chosen\(scheduling=\{0: 2\}\) may decide by more than its schedule"),
    ],
)
def test_contradictions(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(Counting(), **settings)


def test_fewer_workers_than_torchrun_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_MAX_NODES", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert fit(Counting(), num_nodes=2, devices=1).global_step == sum(STEPS)  # four are idle in the second epoch
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches=2\) has work for 4 workers, but .* start 6"):
        fit(Counting(), num_nodes=2, devices=1, rounds={0: 2, 1: 1})


def test_a_model_of_megatron() -> None:
    trainer = pl.Trainer(accelerator="cpu", callbacks=[GradientAccumulationScheduler({2: 4})], logger=False)
    with pytest.raises(
        ConfigError, match=r"scheduling=\{2: 4, 0: 1\}\) changes .* Trainer\(strategy=\"unicron_fsdp\"\)"
    ):
        check_trainer(trainer, scheduled=False)
